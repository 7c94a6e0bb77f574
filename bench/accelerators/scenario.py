"""Find how many accelerators each loader feeds, decoding photos and not: the scenario of ``bench run --au``.

Each number of accelerators that is tried is emulated: that many ranks, each a process with a loader of its own over its
share of the shards, that sleeps after each batch for as long as the accelerator computes, and then waits for the
others. `bench.compare.turn` runs them, as in `bench run`. A turn of a loader is a whole search, and its result the
largest number whose utilisation reaches the target.
"""

import statistics
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from bench.accelerators.known import Accelerator
from bench.accelerators.utilisation import late_share, num_fed, search, share_fed, utilisation
from bench.compare.check_loaders import compare_outputs
from bench.compare.data import DataFacts, DataSets
from bench.compare.outputs import Comparison
from bench.compare.run import check_counts, check_specs
from bench.compare.settings import MAX_RANKS, TurnSetting
from bench.compare.turn import TIMEOUT_S, Turn, run_turn
from bench.engine.scenario import Rounds, Scenario
from bench.engine.turn_process import fork_server
from bench.loaders.protocol import LoaderOptions
from bench.loaders.registry import LOADERS, Recipe, is_peer
from bench.loaders.selection import LoaderSpec
from bench.reports.figures import Figure
from bench.reports.tables import Columns, records_table, summarised
from bench.tools.environment import available_cores
from bench.tools.folders import RunFolder
from dali_pipes.errors import PipesError

if TYPE_CHECKING:
    from dali_pipes.store.shard_set import ShardSet

TARGET = 0.9
"""The utilisation that MLPerf Storage asks for with ResNet-50."""
EPOCH_STEPS = 2
"""The least number of steps of an accelerator in an epoch, whose first one is left out."""
FIGURES: Mapping[str, Figure] = {
    "accelerators": Figure(
        title="accelerators",
        unit="accelerators",
        better="high",
        digits=0,
        about="The largest number of emulated accelerators whose utilisation reaches the target.",
        of_the_machine=True,
    ),
    "share": Figure(
        title="with a fraction",
        unit="accelerators",
        better="high",
        digits=2,
        about="The same with a fraction, from the first number that is too many.",
        of_the_machine=True,
    ),
    "share_per_core": Figure(
        title="a core",
        unit="accelerators a core",
        better="high",
        digits=2,
        about="That, divided by the cores of this host that the run may use.",
        of_the_machine=True,
    ),
    "utilisation_of_one": Figure(
        title="AU of one",
        unit="%",
        better="high",
        digits=1,
        scale=100,
        about="Utilisation of a single accelerator.",
        of_the_machine=True,
    ),
    "samples_per_s": Figure(
        title="samples/s",
        unit="samples/s",
        better="high",
        digits=0,
        about="Samples of all accelerators, with that number of them, or with one if none is fed.",
        of_the_machine=True,
    ),
    "cpu_ms_per_sample": Figure(
        title="CPU-ms/sample",
        unit="CPU-ms a sample",
        better="low",
        digits=3,
        about="CPU time of all processes of the loaders, under the same condition.",
        of_the_machine=True,
    ),
    "cores_per_accelerator": Figure(
        title="cores an accelerator",
        unit="cores",
        better="low",
        digits=2,
        about="Cores' worth of CPU time that one accelerator takes at full utilisation.",
        of_the_machine=True,
    ),
    "late_share": Figure(
        title="late",
        unit="%",
        better="low",
        digits=1,
        scale=100,
        about="How much longer the emulated steps took than they should.",
        of_the_machine=True,
    ),
}


class AuSubject(NamedTuple):
    """A loader, and what it makes of a sample."""

    spec: LoaderSpec
    recipe: Recipe


class AuPoint(NamedTuple):
    """What was measured with one number of accelerators."""

    accelerators: int
    utilisation: float
    samples_per_s: float
    cpu_ms_per_sample: float
    late_share: float


class AuInputs(NamedTuple):
    """The data that was prepared for the turns, and the loaders that passed the comparison."""

    data: DataSets
    facts: DataFacts
    comparisons: Mapping[AuSubject, Comparison]
    failed: Mapping[AuSubject, str]
    limit: int
    """The largest number of accelerators that can be tried."""


@dataclass(frozen=True, kw_only=True)
class AuScenario(Scenario[AuInputs, AuSubject, tuple[AuPoint, ...]]):
    """Find how many accelerators each loader feeds."""

    kind = "au"
    title = "feed accelerators"
    runs_in: ClassVar[Literal["fork", "interpreter", "caller"]] = "caller"  # a turn has a process for each accelerator
    figures: ClassVar[Mapping[str, Figure]] = FIGURES
    work_option = "--work"

    shards: "ShardSet"
    """The shards that every loader reads."""
    loaders: Sequence[LoaderSpec]
    """The loaders, in the order of the table."""
    accelerator: Accelerator
    """What is emulated."""
    recipes: Sequence[Recipe] = ("classification", "encoded")
    """What is made of a sample: a decoded crop, or nothing."""
    options: LoaderOptions = field(default_factory=lambda: LoaderOptions(recipe="classification", mask=None, crop=224))
    """The options that all loaders share, but for the recipe."""
    setting: TurnSetting = field(default_factory=TurnSetting)
    """What `bench run` would take, but for ranks, batch size and the step's length."""
    target: float = TARGET
    """The least utilisation of accelerators that are fed."""
    most: int = MAX_RANKS
    """No more accelerators are tried."""
    steps: int = 20
    """The least number of steps of each accelerator in a trial, in as many epochs as that takes."""
    repeats: int = 3
    num_samples: int | None = None
    """The samples are repeated up to this number; ``None``: they are taken as they are."""
    direct: bool = False
    """Put no gateway before a cluster."""
    bystanders: Collection[int] = ()
    """Processes below this one whose CPU time belongs to no loader, such as an embedded AIS node."""
    timeout_s: float = TIMEOUT_S
    """The time limit of one trial, and of comparing the outputs of one loader."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_specs(self.loaders, None)
        if not 0 < self.target <= 1:
            raise ValueError(f"--au-target must be in (0, 1], got {self.target:g}")
        if self.most > MAX_RANKS:
            raise ValueError(
                f"--au-most must be at most {MAX_RANKS}, got {self.most}: they are processes of this machine"
            )

    def prepare(self, folder: RunFolder, stack: ExitStack) -> AuInputs:
        """Make the data set, and compare the loaders' outputs in each recipe.

        A peer that fails is left out; its error is in the record.

        Raises:
            OutputError: If one of our own loaders yields other samples than the shards hold.
            ValueError: If there are too few samples for one accelerator.
        """
        data = DataSets(
            self.shards,
            options=self.options,
            folder=folder,
            stack=stack,
            num_samples=self.num_samples,
            direct=self.direct,
        )
        one = self._setting(1)
        data.check([one], loaders={spec.name for spec in self.loaders})
        fork_server()  # loads libraries while nothing is timed
        _, facts = data.open(one)
        limit = self._limit(facts)
        comparisons: dict[AuSubject, Comparison] = {}
        failed: dict[AuSubject, str] = {}
        for recipe in self.recipes:
            errors: dict[LoaderSpec, str] = {}
            options = self._options_of(recipe)
            specs = [spec for spec in self.loaders if self._is_due(AuSubject(spec, recipe))]
            found = compare_outputs(data, specs, [one], options=options, timeout_s=self.timeout_s, failed=errors)
            comparisons |= {AuSubject(spec, recipe): comparison for (spec, _), comparison in found.items()}
            failed |= {AuSubject(spec, recipe): error for spec, error in errors.items()}
        return AuInputs(data, facts, comparisons, failed, limit)

    def _is_due(self, subject: AuSubject) -> bool:
        """Without decoding, a loader with two decoders has one turn."""
        if subject.recipe != "encoded":
            return True
        return next(spec for spec in self.loaders if spec.name == subject.spec.name) == subject.spec

    def _limit(self, facts: DataFacts) -> int:
        needed = EPOCH_STEPS * self.accelerator.batch_size
        if facts.num_samples < needed:
            raise ValueError(
                f"an accelerator '{self.accelerator.name}' takes batches of {self.accelerator.batch_size}, and needs "
                f"{EPOCH_STEPS} in an epoch, {needed} samples; the shards hold {facts.num_samples}; repeat them, "
                f"and more often for more than one accelerator: --samples {needed}"
            )
        return min(self.most, facts.num_shards, facts.num_samples // needed)

    def _setting(self, accelerators: int) -> TurnSetting:
        return replace(
            self.setting,
            ranks=accelerators,
            batch_size=self.accelerator.batch_size,
            compute_ms=1000 * self.accelerator.compute_s,
            cache="warm",
        )

    def _options_of(self, recipe: Recipe) -> LoaderOptions:
        return replace(self.options, recipe=recipe)

    def subjects(self, made: AuInputs) -> Sequence[AuSubject]:
        return list(made.comparisons)

    def name_of(self, subject: AuSubject) -> str:
        """``loader 'dali', classification``."""
        return f"loader '{subject.spec}', {subject.recipe}"

    def goes_on_without(self, subject: AuSubject) -> bool:
        """Return whether the loader is a peer, and not the only loader."""
        return is_peer(subject.spec.name) and len(self.loaders) > 1

    def measure(self, made: AuInputs, subject: AuSubject, number: int) -> tuple[AuPoint, ...]:
        """Search; each trial is emulated by processes of its own."""
        points: list[AuPoint] = []

        def trial(accelerators: int) -> float:
            points.append(self._trial(made, subject, accelerators))
            return points[-1].utilisation

        search(trial, target=self.target, limit=made.limit)
        return tuple(points)

    def _trial(self, made: AuInputs, subject: AuSubject, accelerators: int) -> AuPoint:
        steps_in_epoch = made.facts.num_samples // (accelerators * self.accelerator.batch_size)
        job = made.data.turn_job(
            subject.spec,
            self._setting(accelerators),
            options=self._options_of(subject.recipe),
            epochs=-(-self.steps // steps_in_epoch),
        )
        turn = run_turn(
            replace(job, in_step=True),
            bystanders={*self.bystanders, *made.data.bystanders},
            timeout_s=self.timeout_s,
        )
        check_counts(subject.spec, turn, made.facts)
        return point_of(turn, self.accelerator)

    def speed(self, made: AuInputs, subject: AuSubject, row: tuple[AuPoint, ...]) -> str:
        return f"{num_fed(_by_number(row), target=self.target)} accelerators"

    def report(self, made: AuInputs, rounds: Rounds[AuSubject, tuple[AuPoint, ...]]) -> dict[str, Any]:
        """Return ``{"records": [one for each loader and recipe], ...}``; ``repeats`` has every trial.

        Raises:
            PipesError: If all loaders failed.
        """
        failed = {**made.failed, **rounds.errors}
        subjects = [one for one in rounds.subjects if one not in rounds.errors]
        if not subjects:
            raise PipesError("; ".join(failed.values()))
        return {
            "accelerator": {**asdict(self.accelerator), "samples_per_s": self.accelerator.samples_per_s},
            "target": self.target,
            "limit": made.limit,
            "cores": available_cores(),
            "options": {
                **{name: value for name, value in asdict(self.options).items() if name not in ("recipe", "batch_size")},
                "setting": self._setting(1).to_json(),
                "steps": self.steps,
                "repeats": self.repeats,
                "source": "local files" if self.shards.store.endpoint is None else "AIStore",
            },
            "data": asdict(made.facts),
            "records": [
                {
                    "loader": _shown(one),
                    "recipe": one.recipe,
                    "outputs": asdict(made.comparisons[one]),
                    **summarised(_figures([self._figures(row) for row in rounds.whole(one)])),
                    "repeats": [[point._asdict() for point in row] for row in rounds.whole(one)],
                }
                for one in subjects
            ],
            **(
                {"failed": [{"loader": str(one.spec), "recipe": one.recipe, "error": failed[one]} for one in failed]}
                if failed
                else {}
            ),
        }

    def _figures(self, points: Sequence[AuPoint]) -> dict[str, float]:
        """The figures of one search."""
        found = _by_number(points)
        fed, share = num_fed(found, target=self.target), share_fed(found, target=self.target)
        at = next(point for point in points if point.accelerators == max(fed, 1))
        return {
            "accelerators": fed,
            "share": share,
            "share_per_core": share / available_cores(),
            "utilisation_of_one": found[1],
            "samples_per_s": at.samples_per_s,
            "cpu_ms_per_sample": at.cpu_ms_per_sample,
            "cores_per_accelerator": at.cpu_ms_per_sample / 1000 * self.accelerator.samples_per_s,
            "late_share": at.late_share,
        }

    @staticmethod
    def table(report: Any) -> str:
        """Return a row for each loader, decoding and not, and the notes below the table."""
        limit, one = report["limit"], report["accelerator"]

        def fed(record: Mapping[str, Any]) -> str:
            low, high = (round(value) for value in record["spread"]["accelerators"])
            mark = "+" if high == limit else ""
            return f"{record['accelerators']:g}{mark}" + (f" ({low}-{high})" if low != high else "")

        columns: Columns = {
            "loader": "loader",
            "photos": lambda record: "files" if record["recipe"] == "encoded" else "decoded",
            FIGURES["accelerators"].title: fed,
            **{f"{FIGURES[name].title}{' %' if FIGURES[name].unit == '%' else ''}": name for name in list(FIGURES)[1:]},
        }
        wanted = "" if one["mlperf_target"] is None else f"; MLPerf Storage asks for {one['mlperf_target']:.0%}"
        notes = [
            f"Accelerator '{one['name']}': a batch of {one['batch_size']} every {1000 * one['compute_s']:g} ms, "
            f"{one['samples_per_s']:,.0f} samples/s. Fed: utilisation of {report['target']:.0%} or more{wanted}.",
            f"The number of accelerators was searched by emulation, {report['num_rounds']} times, each trial with at "
            f"least {report['options']['steps']} steps of each accelerator: medians (smallest to largest). The "
            "fraction follows from the first number that is too many.",
            f"Host: {report['cores']} cores, which loaders and accelerators share. decoded: a crop of each photo, as "
            "bench run's classification recipe makes it. files: the photos' bytes are read and handed over.",
        ]
        if any(round(row["spread"]["accelerators"][1]) == limit for row in report["records"]):
            notes.append(
                f"+: no more than {limit} could be tried, with {report['data']['num_samples']:,} samples in "
                f"{report['data']['num_shards']} shards; --samples and --num-shards make more of them."
            )
        notes += [
            f"{row['loader']}, {row['recipe']}, failed and is left out: {row['error']}"
            for row in report.get("failed", ())
        ]
        return "\n".join([records_table(report["records"], columns, FIGURES), "", *notes])


def point_of(turn: Turn, accelerator: Accelerator) -> AuPoint:
    """Compute what is known of one number of accelerators from what its ranks measured.

    Raises:
        PipesError: If a rank had a single step in each epoch, the one that is left out.
    """
    timed = [rank.timed for rank in turn.ranks]
    batch_size, compute_s = accelerator.batch_size, accelerator.compute_s
    found = [utilisation(drawn.epochs, batch_size=batch_size, compute_s=compute_s) for drawn in timed]
    known = [value for value in found if value is not None]
    if len(known) < len(found):
        raise PipesError(
            f"one of {len(turn.ranks)} accelerators had a single step in each epoch, which is left out; give it more: "
            "--samples, and --num-shards so that all accelerators get as many"
        )
    epochs = [epoch for drawn in timed for epoch in drawn.epochs]
    assert timed[0].cpu_s is not None, "the first rank measures"
    num_samples = sum(drawn.num_samples for drawn in timed)
    return AuPoint(
        accelerators=len(turn.ranks),
        utilisation=statistics.fmean(known),
        samples_per_s=num_samples / max(drawn.elapsed_s for drawn in timed),
        cpu_ms_per_sample=1000 * timed[0].cpu_s / num_samples,
        late_share=late_share(epochs, batch_size=batch_size, compute_s=compute_s),
    )


def _by_number(points: Sequence[AuPoint]) -> dict[int, float]:
    return {point.accelerators: point.utilisation for point in points}


def _figures(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """The values of each figure, one for each search."""
    return {name: [row[name] for row in rows] for name in FIGURES}


def _shown(subject: AuSubject) -> str:
    """The loader's name; the decoder does not matter without decoding."""
    return (
        subject.spec.name if subject.recipe == "encoded" and LOADERS[subject.spec.name].decodes else str(subject.spec)
    )
