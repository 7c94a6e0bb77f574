"""Time loaders on the same shards, under each setting: the scenario of `bench run` and `bench sweep`.

The loaders' outputs are compared first. Then each turn opens one loader under one setting in fresh processes, draws a
first epoch, in a warm turn also the timed epochs, and closes it (`bench.compare.turn`). While one loader is timed,
nothing of another one exists: no thread, no worker, no prefetched batch. Ratios to the baseline are taken within each
round.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from bench.compare.check_loaders import compare_outputs
from bench.compare.data import DataFacts, DataSets
from bench.compare.outputs import Comparison, OutputError
from bench.compare.records import record_of
from bench.compare.settings import TurnSetting
from bench.compare.turn import TIMEOUT_S, Turn, TurnJob, run_turn
from bench.engine.scenario import Rounds, Scenario
from bench.engine.turn_process import fork_server
from bench.loaders.protocol import LoaderOptions
from bench.loaders.registry import LOADERS, is_peer
from bench.loaders.selection import LoaderSpec, place_of
from bench.reports.figures import FIGURES, Figure
from bench.reports.notes import notes_of
from bench.reports.summary import setting_text, summarise
from bench.reports.tables import format_table
from bench.tools.folders import RunFolder
from dali_pipes.errors import PipesError

if TYPE_CHECKING:
    from dali_pipes.store.shard_set import ShardSet


DEFAULT_BASELINE = "webloader"

_SOURCES = {"local": "local files", "ais": "AIStore", "s3": "S3", "cloud": "a cloud's bucket"}
BY_SETTING = ("batch_size", "num_threads", "keeps_shards")
"""The fields of `LoaderOptions` that each setting has itself."""


class Contender(NamedTuple):
    """One loader under one setting."""

    spec: LoaderSpec
    setting: TurnSetting


class Inputs(NamedTuple):
    """The data that was prepared for the turns of a run."""

    data: DataSets
    comparisons: Mapping[Contender, Comparison]
    jobs: Mapping[Contender, TurnJob]
    failed: Mapping[LoaderSpec, str]
    """The error of each peer that is left out, because its outputs could not be compared."""


@dataclass(frozen=True, kw_only=True)
class LoaderScenario(Scenario[Inputs, Contender, Turn]):
    """Time loaders under settings."""

    kind = "run"
    title = "time loaders"
    runs_in: ClassVar[Literal["fork", "interpreter", "caller"]] = "caller"  # a turn has a process for each rank
    figures: ClassVar[Mapping[str, Figure]] = FIGURES
    work_option = "--work"

    shards: "ShardSet"
    """The shards that every loader reads."""
    loaders: Sequence[LoaderSpec]
    """The loaders, in the order of the table."""
    options: LoaderOptions = field(default_factory=LoaderOptions)
    """The options that all loaders share."""
    settings: Sequence[TurnSetting] = ()
    """Each loader is timed under each of these settings. If there are none, it is timed under ``options``, with a warm
    cache."""
    repeats: int = 7
    """With seven turns, a 95 % interval is narrower than the range from the smallest to the largest value."""
    epochs: int = 1
    """The number of timed epochs in each warm turn, after the first epoch; take more if an epoch is short."""
    baseline: LoaderSpec | None = None
    """The loader that ratios are to; ``None``: webloader if it is timed, otherwise the first."""
    num_samples: int | None = None
    """The samples are repeated up to this number; ``None``: they are taken as they are."""
    direct: bool = False
    """Put no gateway before a cluster: bytes are not counted."""
    bystanders: Collection[int] = ()
    """Processes below this one whose CPU time belongs to no loader, such as an embedded AIS node."""
    timeout_s: float = TIMEOUT_S
    """The time limit of one turn, and of comparing the outputs of one loader."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_specs(self.loaders, self.baseline)
        if not self.settings:
            of = self.options
            only = TurnSetting(threads=of.num_threads, batch_size=of.batch_size, crop=of.crop)
            object.__setattr__(self, "settings", (only,))

    def prepare(self, folder: RunFolder, stack: ExitStack) -> Inputs:
        """Make the data sets, compare the outputs, and convert the shards for loaders with a format of their own.

        A peer that fails is left out; its error is in the record.

        Raises:
            OutputError: If one of our own loaders yields other samples than the shards hold.
            PipesError: If one of our own loaders cannot be opened, or takes too long.
            ValueError: If the shards do not allow a setting, or there is too little space for what is to be written.
        """
        data = DataSets(
            self.shards,
            options=self.options,
            folder=folder,
            stack=stack,
            num_samples=self.num_samples,
            direct=self.direct,
        )
        data.check(self.settings, loaders={spec.name for spec in self.loaders})
        fork_server()  # loads libraries while nothing is timed
        failed: dict[LoaderSpec, str] = {}
        found = compare_outputs(
            data, self.loaders, self.settings, options=self.options, timeout_s=self.timeout_s, failed=failed
        )
        comparisons = {Contender(*one): comparison for one, comparison in found.items()}
        # All jobs now: the conversions take the cores, and must not run while a clock does.
        jobs = {one: data.turn_job(*one, options=self.options, epochs=self.epochs) for one in comparisons}
        return Inputs(data, comparisons, jobs, failed)

    def subjects(self, made: Inputs) -> Sequence[Contender]:
        return list(made.jobs)

    def name_of(self, subject: Contender) -> str:
        """``loader 'dali' (threads 2, batch 64)``."""
        return f"loader '{subject.spec}' ({subject.setting})"

    def short_name(self, subject: Contender) -> str:
        """``dali``, with the part of the setting that varies in this run."""
        settings = [setting.to_json() for setting in self.settings]
        alike = [name for name in settings[0] if len({setting[name] for setting in settings}) == 1]
        where = setting_text(subject.setting.to_json(), without=alike)
        return f"{subject.spec} ({where})" if where else str(subject.spec)

    def goes_on_without(self, subject: Contender) -> bool:
        """Return whether the loader is a peer, and not the only loader."""
        return is_peer(subject.spec.name) and len(self.loaders) > 1

    def measure(self, made: Inputs, subject: Contender, number: int) -> Turn:
        """Take one turn, with all ranks.

        Memory is not touched before (`bench.tools.memory`): turns follow each other before a host takes pages back, and
        neither CPU-ms a sample nor samples/s changed with it in our measurements.
        """
        job = made.jobs[subject]
        if job.setting.cache == "cold":
            made.data.drop_pages(job.setting, job.prepared)
        turn = run_turn(job, bystanders={*self.bystanders, *made.data.bystanders}, timeout_s=self.timeout_s)
        check_counts(job.spec, turn, made.data.open(job.setting)[1])
        return turn

    def speed(self, made: Inputs, subject: Contender, row: Turn) -> str:
        """Return samples/s of all ranks over the timed epochs."""
        timed = [rank.timed for rank in row.ranks]
        num_samples, elapsed_s = sum(drawn.num_samples for drawn in timed), max(drawn.elapsed_s for drawn in timed)
        return f"{num_samples / elapsed_s:,.0f} samples/s"

    def report(self, made: Inputs, rounds: Rounds[Contender, Turn]) -> dict[str, Any]:
        """Return ``{"options", "baseline", "data", "records"}``, with one record for each loader and setting.

        Each record has ``repeats``, every turn as it was measured, and ``summary``, medians and intervals. If peers
        failed, ``failed`` has their errors.

        Raises:
            PipesError: If all loaders failed.
        """
        failed: list[dict[str, Any]] = [
            {"loader": str(spec), "setting": None, "error": error} for spec, error in made.failed.items()
        ]
        failed += [
            {"loader": str(one.spec), "setting": one.setting.to_json(), "error": error}
            for one, error in rounds.errors.items()
        ]
        subjects = [one for one in rounds.subjects if one not in rounds.errors]
        if not subjects:
            raise PipesError("; ".join(row["error"] for row in failed))
        facts = {setting: made.data.open(setting)[1] for setting in self.settings}
        data = list(dict.fromkeys(facts.values()))
        report: dict[str, Any] = {
            "options": self._options(),
            "baseline": self._baseline(),
            "data": [asdict(one) for one in data],
            "records": [
                {
                    **record_of(made.jobs[one], rounds.whole(one), facts=facts[one.setting]),
                    "data": data.index(facts[one.setting]),
                    "outputs": asdict(made.comparisons[one]),
                }
                for one in subjects
            ],
            **({"failed": failed} if failed else {}),
        }
        for row, summary in zip(report["records"], summarise(report), strict=True):
            row["summary"] = summary
        return report

    def _options(self) -> dict[str, Any]:
        return {
            **{name: value for name, value in asdict(self.options).items() if name not in BY_SETTING},
            "loaders": [str(spec) for spec in self.loaders],
            "repeats": self.repeats,
            "epochs": self.epochs,
            "direct": self.direct,
            "timeout_s": self.timeout_s,
            "source": _SOURCES[place_of(self.shards)],
        }

    def _baseline(self) -> str:
        """The baseline with its decoder: the run may have webloader:turbo before webloader:pil."""
        default = next((spec for spec in self.loaders if spec.name == DEFAULT_BASELINE), self.loaders[0])
        baseline = self.baseline or default
        if not LOADERS[baseline.name].decodes:
            return str(baseline)
        return str(replace(baseline, decode=baseline.apply(self.options).decode))

    @staticmethod
    def table(report: Any) -> str:
        """One row for each loader and setting, and the notes below the table."""
        return "\n".join([format_table(report), "", *notes_of(report)])


def check_specs(specs: Sequence[LoaderSpec], baseline: LoaderSpec | None, *, is_served: bool = False) -> None:
    """Refuse loaders that cannot be timed together.

    Args:
        specs: The loaders.
        baseline: What ratios are to, if the user named it.
        is_served: They will read from a bucket, even if the shards are local now.

    Raises:
        ValueError: If there is no loader, or one comes twice; the baseline is not among them; or a loader cannot read
            from a bucket and must.
    """
    if not specs:
        raise ValueError("loaders must name at least one loader")
    if len(set(specs)) != len(specs):
        raise ValueError(f"loaders must not repeat, got {', '.join(map(str, specs))}")
    if baseline is not None and baseline not in specs:
        raise ValueError(f"baseline must be one of the loaders, {', '.join(map(str, specs))}, got '{baseline}'")
    for spec in specs if is_served else ():
        if not {"ais", "converted"} & set(LOADERS[spec.name].source):
            raise ValueError(f"loader '{spec}' reads shards in a directory, but a latency needs shards in a bucket")


def check_counts(spec: LoaderSpec, turn: Turn, facts: DataFacts) -> None:
    """Check that every epoch had every sample, over all ranks, so that the timed data is the compared data."""
    for name in ("first", "steady"):
        drawn = [getattr(rank, name) for rank in turn.ranks]
        if drawn[0] is not None:
            found, wanted = sum(one.num_samples for one in drawn), drawn[0].num_epochs * facts.num_samples
            if found != wanted:
                raise OutputError(f"loader '{spec}': {found} samples came in its {name} epochs, expected {wanted}")
