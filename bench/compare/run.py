"""Time loaders on the same shards, under each setting: the scenario of `bench run` and `bench sweep`.

The loaders' outputs are compared first. Then each turn opens one loader under one setting in fresh processes, draws a
first epoch, in a warm turn also the timed epochs, and closes it (`bench.compare.turn`). While one loader is timed,
nothing of another one exists: no thread, no worker, no prefetched batch. Ratios to the baseline are taken within each
round.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import click

from bench.compare.data import DataSets
from bench.compare.outputs import Comparison, OutputError, compare_outputs
from bench.compare.settings import DataFacts, TurnSetting
from bench.compare.turn import TIMEOUT_S, LoaderTurn, TurnJob, figures_of, run_turn
from bench.engine.options import at_least, option
from bench.engine.scenario import Rounds, Scenario
from bench.engine.turn_process import fork_server
from bench.loaders.protocol import PARTS, LoaderOptions, Recipe
from bench.loaders.registry import LOADERS, LoaderSpec, is_peer, place_of
from bench.tools.folders import RunFolder

if TYPE_CHECKING:
    from dali_pipes.store.shard_set import ShardSet


DEFAULT_BASELINE = "webloader"

_SOURCES = {"local": "local files", "ais": "AIStore", "s3": "S3", "cloud": "a cloud's bucket"}
_BY_SETTING = ("batch_size", "num_threads", "keeps_shards")


class Contender(NamedTuple):
    """One loader under one setting, and what it makes of a sample."""

    spec: LoaderSpec
    setting: TurnSetting
    recipe: Recipe


class Inputs(NamedTuple):
    data: DataSets
    comparisons: Mapping[Contender, Comparison]
    jobs: Mapping[Contender, TurnJob]
    failed: Mapping[tuple[LoaderSpec, Recipe], str]
    """The error of each peer that is left out, because its outputs could not be compared."""


@dataclass(frozen=True, kw_only=True)
class LoaderScenario(Scenario[Inputs, Contender, Any]):
    """Time loaders under settings."""

    kind = "run"
    title = "time loaders"
    runs_in: ClassVar[Literal["fork", "interpreter", "caller"]] = "caller"  # a turn has a process for each rank
    work_option = "--work"

    shards: "ShardSet"
    loaders: Sequence[LoaderSpec]
    options: LoaderOptions = field(default_factory=LoaderOptions)
    settings: Sequence[TurnSetting] = ()
    """Each loader is timed under each of these settings. If there are none, it is timed under ``options``, with a warm
    cache."""
    recipes: Sequence[Recipe] = ()
    """What is made of a sample; if there are none: what ``options`` says."""
    repeats: int = option(7, help="Turns of each loader; they are interleaved. A 95 % interval needs 6.")
    epochs: int = option(1, help="Timed epochs of each turn, after one that is not timed.")
    baseline: LoaderSpec | None = None
    """The loader that ratios are to; ``None``: webloader if it is timed, otherwise the first."""
    num_samples: int | None = option(
        type=at_least(1), name="--samples", help="Repeat the samples up to this number, in new shards."
    )
    direct: bool = option(False, help="Put no gateway before a cluster: no bytes are counted or delayed.")
    seed: int = option(7, type=at_least(0), help="Order of the shards and samples, for loaders that have one.")
    work: Path | None = option(
        type=click.Path(path_type=Path),
        help="Directory for packed, served and converted shards.  [default: the directory for temporary files]",
    )
    bystanders: Collection[int] = ()
    """Processes below this one whose CPU time belongs to no loader, such as an embedded AIS node."""
    timeout_s: float = option(
        TIMEOUT_S,
        type=click.FloatRange(min=0, min_open=True),
        help="Limit of a turn, and of comparing a loader's outputs; a loader that takes longer has failed.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_specs(self.loaders, self.baseline)
        of = self.options
        only = TurnSetting(threads=of.num_threads, batch_size=of.batch_size, crop=of.crop)
        object.__setattr__(self, "settings", self.settings or (only,))
        object.__setattr__(self, "recipes", self.recipes or (of.recipe,))

    def prepare(self, folder: RunFolder, stack: ExitStack) -> Inputs:
        """Make the data sets, compare the outputs, and convert the shards for loaders with a format of their own.

        A peer that fails is left out; its error is in the record. An error of one of our own loaders is raised.
        """
        data = DataSets(
            self.shards,
            options=self.options,
            folder=folder,
            stack=stack,
            num_samples=self.num_samples,
            direct=self.direct,
        )
        data.check(self.settings)
        fork_server()  # loads libraries while nothing is timed
        self.check_data(data)
        failed: dict[tuple[LoaderSpec, Recipe], str] = {}
        comparisons: dict[Contender, Comparison] = {}
        for recipe in self.recipes:
            errors: dict[LoaderSpec, str] = {}
            options = replace(self.options, recipe=recipe)
            specs = list(self.loaders)
            if recipe == "encoded":  # without decoding, a loader with two decoders has one turn
                specs = list({spec.name: spec for spec in reversed(specs)}.values())[::-1]
            found = compare_outputs(
                data, specs, self.settings, options=options, timeout_s=self.timeout_s, failed=errors
            )
            comparisons |= {Contender(*one, recipe): comparison for one, comparison in found.items()}
            failed |= {(spec, recipe): error for spec, error in errors.items()}
        # All jobs now: the conversions take the cores, and must not run while a clock does.
        jobs = {one: self.job_of(data, one, one.setting, epochs=self.epochs) for one in comparisons}
        return Inputs(data, comparisons, jobs, failed)

    def check_data(self, data: DataSets) -> None:
        """Refuse data that do not allow the run, before outputs are compared."""

    def job_of(self, data: DataSets, subject: Contender, setting: TurnSetting, *, epochs: int) -> TurnJob:
        return data.turn_job(subject.spec, setting, options=replace(self.options, recipe=subject.recipe), epochs=epochs)

    def subjects(self, made: Inputs) -> Sequence[Contender]:
        return list(made.jobs)

    def name_of(self, subject: Contender) -> str:
        return f"loader '{subject.spec}' ({subject.setting})"

    def goes_on_without(self, subject: Contender) -> bool:
        return is_peer(subject.spec.name) and len(self.loaders) > 1

    def measure(self, made: Inputs, subject: Contender, number: int) -> Any:
        """Take one turn, with all ranks.

        Memory is not touched before (Note [cold memory]): turns follow each other before a host takes pages back, and
        neither CPU-ms a sample nor samples/s changed with it in our measurements.
        """
        job = made.jobs[subject]
        if job.setting.cache == "cold":
            made.data.drop_pages(job.setting, job.prepared)
        return self.take_turn(made, job)

    def take_turn(self, made: Inputs, job: TurnJob) -> LoaderTurn:
        """Run a job. All ranks together must get each sample in each epoch, as in the comparison."""
        turn = run_turn(job, bystanders={*self.bystanders, *made.data.bystanders}, timeout_s=self.timeout_s)
        for name in ("first", "steady"):
            drawn = [getattr(rank, name) for rank in turn.ranks]
            if drawn[0] is not None:
                found = sum(one.num_samples for one in drawn)
                wanted = len(drawn[0].epochs) * made.data.facts(job.setting).num_samples
                if found != wanted:
                    raise OutputError(f"loader '{job.spec}': {found} samples came in its {name} epochs, not {wanted}")
        return turn

    def repeat(self, made: Inputs, subject: Contender, row: Any) -> dict[str, Any]:
        return {"figures": figures_of(row, setting=subject.setting, facts=made.data.facts(subject.setting))}

    def record(self, made: Inputs, subject: Contender, rows: Sequence[Any]) -> dict[str, Any]:
        """Return every turn of one loader under one setting as it was measured, and what its outputs differed by."""
        record = super().record(made, subject, rows)
        if not rows:
            return record | {"loader": str(subject.spec), "setting": subject.setting.to_json()}
        one = rows[-1].ranks[0]
        parts = [part for part in made.jobs[subject].prepared if part is not None]
        cost = {"wall_s": sum(part.wall_s for part in parts), "num_bytes": sum(part.num_bytes for part in parts)}
        return record | {
            "loader": subject.spec.name,
            "decode": "none" if subject.recipe == "encoded" else one.decode,
            "device": one.device,
            "num_workers": one.num_workers,
            "gives": list(one.gives),
            "parts": sorted(PARTS[subject.recipe]),
            "setting": subject.setting.to_json(),
            "prepared": cost if parts else None,
            "data": self._facts(made).index(made.data.facts(subject.setting)),
            "outputs": asdict(made.comparisons[subject]),
        }

    def _facts(self, made: Inputs) -> list[DataFacts]:
        return list(dict.fromkeys(made.data.facts(setting) for setting in self.settings))

    def data(self, made: Inputs) -> list[dict[str, Any]]:
        return [asdict(one) for one in self._facts(made)]

    def failed(self, made: Inputs, rounds: Rounds[Contender, Any]) -> list[dict[str, Any]]:
        """Return also the peers that were left out because their outputs could not be compared."""
        early = [{"loader": str(spec), "setting": None, "error": error} for (spec, _), error in made.failed.items()]
        return early + super().failed(made, rounds)

    def options_json(self) -> dict[str, Any]:
        return {
            **{name: value for name, value in asdict(self.options).items() if name not in _BY_SETTING},
            "loaders": [str(spec) for spec in self.loaders],
            **{name: getattr(self, name) for name in ("repeats", "epochs", "direct", "timeout_s")},
            "source": _SOURCES[place_of(self.shards)],
        }

    def baseline_name(self) -> str | None:
        default = next((spec for spec in self.loaders if spec.name == DEFAULT_BASELINE), self.loaders[0])
        return str(self.baseline or default)


def check_specs(specs: Sequence[LoaderSpec], baseline: LoaderSpec | None, *, is_served: bool = False) -> None:
    """Refuse loaders that cannot be timed together, or that must read from a bucket and cannot."""
    if not specs:
        raise ValueError("loaders must name at least one loader")
    if baseline is not None and baseline not in specs:
        raise ValueError(f"baseline must be one of the loaders, {', '.join(map(str, specs))}, got '{baseline}'")
    for spec in specs if is_served else ():
        if not {"ais", "converted"} & set(LOADERS[spec.name].source):
            raise ValueError(f"loader '{spec}' reads shards in a directory, but a latency needs shards in a bucket")
