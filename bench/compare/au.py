"""Find how many accelerators each loader feeds, decoding photos and not: the scenario of ``bench run --au``.

Each number of accelerators that is tried is emulated: that many ranks, each a process with a loader of its own over its
share of the shards, that sleeps after each batch for as long as the accelerator computes, and then waits for the others
(`bench.compare.turn`). A turn of a loader is a whole search.

AU = total compute time / total running time (mlcommons/storage v2.0, ``Submission_guidelines.md``, "Performance
Metrics"). As in DLIO, which they run, each epoch's first step is in neither sum (argonne-lcf/dlio_benchmark 2.0.0,
``dlio_benchmark/utils/statscounter.py``, ``compute_metrics_train``); then the mean over the epochs of a rank, and over
the ranks. The end of an epoch, where a loader says that there are no more batches, counts. Other than in DLIO, a step
has its nominal time, as in the rules' text: a sleep that ends late lowers the utilisation.
"""

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import click

from bench.compare.data import DataSets
from bench.compare.run import Contender, Inputs, LoaderScenario
from bench.compare.settings import MAX_RANKS, DataFacts
from bench.compare.turn import LoaderTurn
from bench.engine.options import option
from bench.engine.scenario import Rounds, Scenario
from bench.loaders.protocol import Recipe
from bench.tools.environment import available_cores
from dali_pipes.errors import PipesError

TARGET = 0.9
"""The utilisation that MLPerf Storage asks for with ResNet-50."""
EPOCH_STEPS = 2
"""The least number of steps of an accelerator in an epoch, whose first one is left out."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One emulated accelerator. A step of it is a sleep: whatever it computes, it computes outside the host."""

    name: str
    batch_size: int
    compute_s: float
    mlperf_target: float | None = None
    """The utilisation that MLPerf Storage asks for, if the accelerator is one of theirs."""

    @property
    def samples_per_s(self) -> float:
        """If it never waits."""
        return self.batch_size / self.compute_s

    @classmethod
    def parse(cls, text: str) -> "Accelerator":
        """Read a name of `ACCELERATORS`, or ``NAME:BATCH:SECONDS``.

        >>> Accelerator.parse("tiny:8:0.01").samples_per_s
        800.0
        """
        if text in ACCELERATORS:
            return ACCELERATORS[text]
        with contextlib.suppress(ValueError):
            name, batch_size, compute_s = text.split(":")
            found = cls(name=name, batch_size=int(batch_size), compute_s=float(compute_s))
            if name and found.batch_size >= 1 and 0 < found.compute_s < 60:
                return found
        raise ValueError(
            f"--au expects one of {', '.join(ACCELERATORS)}, or NAME:BATCH:SECONDS such as mine:256:0.11, with at "
            f"least 1 sample and less than 60 s, got '{text}'"
        )


ACCELERATORS: Mapping[str, Accelerator] = {
    one.name: one
    for one in (
        # Workloads of MLPerf Storage that read photos: `reader.batch_size`, `train.computation_time` and `metric.au` in
        # mlcommons/storage, configs/dlio/workload/NAME.yaml. ResNet-50: v2.0, commits ac0424fa (H100) and be18c3e5
        # (A100). RetinaNet: v3.0, commits 11460d00 (B200) and 76f45459 (MI355).
        Accelerator(name="resnet50_h100", batch_size=400, compute_s=0.224, mlperf_target=0.90),
        Accelerator(name="resnet50_a100", batch_size=400, compute_s=0.435, mlperf_target=0.90),
        Accelerator(name="retinanet_b200", batch_size=24, compute_s=0.04755, mlperf_target=0.85),
        Accelerator(name="retinanet_mi355", batch_size=32, compute_s=0.0634, mlperf_target=0.85),
    )
}


class AuPoint(NamedTuple):
    accelerators: int
    utilisation: float
    samples_per_s: float
    cpu_ms_per_sample: float
    late_share: float


@dataclass(frozen=True, kw_only=True)
class AuScenario(LoaderScenario):
    """Find how many accelerators each loader feeds."""

    kind = "au"
    title = "feed accelerators"

    accelerator: Accelerator
    recipes: Sequence[Recipe] = ("classification", "encoded")
    target: float = option(
        TARGET,
        name="--au-target",
        type=click.FloatRange(min=0, max=1, min_open=True),
        help="An accelerator is fed if its utilisation is at least this.",
    )
    most: int = option(
        MAX_RANKS, name="--au-most", help="Try no more accelerators than this; each needs a shard and 2 batches."
    )
    steps: int = option(20, name="--au-steps", help="Steps of each accelerator in a trial, at least; MLPerf has 500.")
    repeats: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most > MAX_RANKS:
            raise ValueError(f"--au-most must be at most {MAX_RANKS}, got {self.most}")
        batch_size, compute_ms = self.accelerator.batch_size, 1000 * self.accelerator.compute_s
        one = replace(self.settings[0], ranks=1, cache="warm", batch_size=batch_size, compute_ms=compute_ms)
        object.__setattr__(self, "settings", (one,))

    def check_data(self, data: DataSets) -> None:
        self._limit(data.facts(self.settings[0]))

    def _limit(self, facts: DataFacts) -> int:
        needed = EPOCH_STEPS * self.accelerator.batch_size
        if facts.num_samples < needed:
            raise ValueError(
                f"an accelerator '{self.accelerator.name}' takes batches of {self.accelerator.batch_size}, and needs "
                f"{EPOCH_STEPS} in an epoch, {needed} samples; the shards hold {facts.num_samples}; repeat them, "
                f"and more often for more than one accelerator: --samples {needed}"
            )
        return min(self.most, facts.num_shards, facts.num_samples // needed)

    def name_of(self, subject: Contender) -> str:
        return f"loader '{subject.spec}', {subject.recipe}"

    def measure(self, made: Inputs, subject: Contender, number: int) -> list[AuPoint]:
        points: list[AuPoint] = []
        facts = made.data.facts(subject.setting)

        def trial(accelerators: int) -> float:
            steps_in_epoch = facts.num_samples // (accelerators * self.accelerator.batch_size)
            setting = replace(subject.setting, ranks=accelerators)
            job = self.job_of(made.data, subject, setting, epochs=-(-self.steps // steps_in_epoch))
            points.append(point_of(self.take_turn(made, replace(job, in_step=True)), self.accelerator))
            return points[-1].utilisation

        search(trial, target=self.target, limit=self._limit(facts))
        return points

    def repeat(self, made: Inputs, subject: Contender, row: Any) -> dict[str, Any]:
        found = {point.accelerators: point.utilisation for point in row}
        fed, share = num_fed(found, target=self.target)
        at = next(point for point in row if point.accelerators == max(fed, 1))
        figures = {
            "accelerators": fed,
            "share": share,
            "share_per_core": share / available_cores(),
            "utilisation_of_one": found[1],
            "samples_per_s": at.samples_per_s,
            "cpu_ms_per_sample": at.cpu_ms_per_sample,
            "cores_per_accelerator": at.cpu_ms_per_sample / 1000 * self.accelerator.samples_per_s,
            "late_share": at.late_share,
        }
        return {"figures": figures, "trials": [point._asdict() for point in row]}

    def record(self, made: Inputs, subject: Contender, rows: Sequence[Any]) -> dict[str, Any]:
        # The decoder does not matter without decoding.
        decode = "none" if subject.recipe == "encoded" else subject.spec.decode or "dali"
        return Scenario.record(self, made, subject, rows) | {
            "loader": subject.spec.name,
            "decode": decode,
            "device": self.options.delivery_device,
            "setting": {**subject.setting.to_json(), "recipe": subject.recipe},
            "outputs": asdict(made.comparisons[subject]),
        }

    def options_json(self) -> dict[str, Any]:
        searched = {"accelerator": asdict(self.accelerator), "target": self.target, "steps": self.steps}
        return {**super().options_json(), "recipe": f"accelerator {self.accelerator.name}", **searched}

    def baseline_name(self) -> None:
        """There are no ratios."""

    def notes(self, made: Inputs, rounds: Rounds[Contender, Any]) -> list[str]:
        one = self.accelerator
        limit = self._limit(made.data.facts(self.settings[0]))
        wanted = "" if one.mlperf_target is None else f"; MLPerf Storage asks for {one.mlperf_target:.0%}"
        notes = [
            f"Accelerator '{one.name}': a batch of {one.batch_size} every {1000 * one.compute_s:g} ms, "
            f"{one.samples_per_s:,.0f} samples/s. Fed: utilisation of {self.target:.0%} or more{wanted}.",
            f"The number of accelerators was searched by emulation, each trial with at least {self.steps} steps of "
            "each accelerator. The fraction follows from the first number that is too many.",
            f"Host: {available_cores()} cores, which loaders and accelerators share. classification: a crop of each "
            "photo, as bench run's recipe makes it. encoded: the photos' bytes are read and handed over.",
        ]
        points = [point for subject in rounds.subjects for row in rounds.whole(subject) for point in row]
        if any(point.accelerators == limit and point.utilisation >= self.target for point in points):
            notes.append(f"No more than {limit} could be tried; --samples and --num-shards make more shards.")
        return notes


def point_of(turn: LoaderTurn, accelerator: Accelerator) -> AuPoint:
    """Compute what is known of one number of accelerators from what its ranks measured."""
    timed = [rank.timed for rank in turn.ranks]
    step_s = accelerator.compute_s / accelerator.batch_size  # of a sample: a short batch takes its share of a step
    by_rank = []
    for drawn in timed:
        known = [
            (one.num_samples - one.first_samples) * step_s / (one.elapsed_s - one.first_step_s)
            for one in drawn.epochs
            if one.num_samples > one.first_samples
        ]
        if not known:
            raise PipesError(
                f"one of {len(timed)} accelerators had a single step in each epoch, which is left out; give it more: "
                "--samples, and --num-shards so that all accelerators get as many"
            )
        by_rank.append(statistics.fmean(known))
    epochs = [epoch for drawn in timed for epoch in drawn.epochs]
    assert timed[0].cpu_s is not None, "the first rank measures"
    num_samples = sum(drawn.num_samples for drawn in timed)
    return AuPoint(
        accelerators=len(turn.ranks),
        utilisation=statistics.fmean(by_rank),
        samples_per_s=num_samples / max(drawn.elapsed_s for drawn in timed),
        cpu_ms_per_sample=1000 * timed[0].cpu_s / num_samples,
        late_share=sum(one.computed_s for one in epochs) / (sum(one.num_samples for one in epochs) * step_s) - 1,
    )


def search(measure: Callable[[int], float], *, target: float, limit: int) -> dict[int, float]:
    """Look for the largest number of accelerators with a utilisation of ``target`` or more; return all that were tried.

    Tries 1, 2, 4, ... until one is too many, then halves the gap: more accelerators are taken not to be used better.

    >>> list(search(lambda number: 3.5 / number, target=1.0, limit=64))
    [1, 2, 4, 3]
    """
    found: dict[int, float] = {}
    fed, starved, number = 0, limit + 1, 1
    while fed + 1 < starved:
        found[number] = measure(number)
        if found[number] >= target:
            fed = number
        else:
            starved = number
        number = min(2 * fed, limit) if starved > limit else (fed + starved) // 2
    return found


def num_fed(found: Mapping[int, float], *, target: float) -> tuple[int, float]:
    """Return how many accelerators are fed: the largest number below the first one that is starved; and with a
    fraction.

    For the fraction: the smallest number that is starved takes all that the host can deliver, and ``target`` of fewer
    accelerators' needs is that much.

    >>> num_fed({1: 0.45}, target=0.9)
    (0, 0.5)
    """
    starved = min((number for number, value in found.items() if value < target), default=None)
    whole = max((number for number in found if starved is None or number < starved), default=0)
    return whole, float(whole) if starved is None else max(float(whole), starved * found[starved] / target)
