"""Time loaders on the same shards, under each setting: the scenario of `bench run` and `bench sweep`.

The loaders' outputs are compared first. Then each turn opens one loader under one setting in fresh processes, draws a
first epoch, in a warm turn those that count, and closes it (`bench.compare.ranks`, `bench.compare.turn`). Nothing of
one loader is alive while another is timed: no thread, no worker, no prefetched batch. Ratios to the baseline are taken
round by round.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from bench.compare.check_loaders import compare_outputs
from bench.compare.data import DataFacts, DataSets
from bench.compare.outputs import Comparison, OutputError
from bench.compare.ranks import TIMEOUT_S, Turn, run_turn
from bench.compare.records import record_of
from bench.compare.settings import TurnSetting
from bench.compare.turn import TurnJob
from bench.engine.scenario import Rounds, Scenario
from bench.engine.turn_process import fork_server
from bench.loaders.encoded import endpoint_of
from bench.loaders.protocol import LoaderOptions, Prepared
from bench.loaders.registry import LOADERS
from bench.loaders.selection import LoaderSpec
from bench.reports.figures import FIGURES, Figure
from bench.reports.notes import notes_of
from bench.reports.summary import setting_text, summarise
from bench.reports.tables import format_table
from bench.tools.folders import RunFolder

if TYPE_CHECKING:
    from dali_pipes.store.shard_set import ShardSet


DEFAULT_BASELINE = "webloader"
"""The loader that ratios are to, where it was timed; else the first."""

BY_SETTING = ("batch_size", "num_threads", "keeps_shards")
"""Those of `LoaderOptions` that each setting has itself."""


class Contender(NamedTuple):
    """A loader under a setting."""

    spec: LoaderSpec
    setting: TurnSetting


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the turns of a run read, and what is known of it."""

    data: DataSets
    comparisons: Mapping[Contender, Comparison]
    facts: Mapping[TurnSetting, DataFacts]
    prepared: Mapping[Contender, Sequence[Prepared | None]]


@dataclass(frozen=True, kw_only=True)
class LoaderScenario(Scenario[Inputs, Contender, Turn]):
    """How often, how long and on what loaders are timed."""

    kind = "run"
    title = "time loaders"
    runs_in: ClassVar[Literal["fork", "interpreter", "caller"]] = "caller"  # a turn has a process for each rank
    figures: ClassVar[Mapping[str, Figure]] = FIGURES
    work_option = "--work"

    shards: "ShardSet"
    """What every loader reads."""
    loaders: Sequence[LoaderSpec]
    """In the order of the table."""
    options: LoaderOptions = field(default_factory=LoaderOptions)
    """What the loaders share."""
    settings: Sequence[TurnSetting] = ()
    """What each of them is timed under; none: once, as ``options`` say, from a warm cache."""
    repeats: int = 7
    """Of seven turns, a 95 % interval is narrower than smallest to largest."""
    epochs: int = 1
    """Timed in each warm turn, after the first: more of them where one is short."""
    baseline: LoaderSpec | None = None
    """The loader that ratios are to; ``None``: webloader, where it is timed, else the first."""
    num_samples: int | None = None
    """The samples are repeated to this number; ``None``: as they are."""
    direct: bool = False
    """No gateway before a cluster: bytes are not counted."""
    bystanders: Collection[int] = ()
    """Processes below this one whose CPU time counts for no loader, such as an embedded AIS node."""
    timeout_s: float = TIMEOUT_S
    """For a turn, and for comparing the outputs of one loader."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_specs(self.loaders, self.baseline)
        if not self.settings:
            of = self.options
            only = TurnSetting(threads=of.num_threads, batch_size=of.batch_size, crop=of.crop)
            object.__setattr__(self, "settings", (only,))

    def prepare(self, folder: RunFolder, stack: ExitStack) -> Inputs:
        """Make the data sets, compare the outputs, and have converted what loaders read in a format of their own.

        Raises:
            OutputError: If a loader does not yield what the shards hold.
            PipesError: If a loader cannot be opened, or takes too long.
            ValueError: If the shards do not allow a setting, or there is no room for what is to be written.
        """
        data = stack.enter_context(
            DataSets(
                self.shards,
                photo=self.options.photo,
                mask=self.options.mask,
                num_samples=self.num_samples,
                direct=self.direct,
                folder=folder,
            )
        )
        data.check(self.settings, loaders={spec.name for spec in self.loaders})
        fork_server()  # loads libraries while nothing is timed
        found = compare_outputs(data, self.loaders, self.settings, options=self.options, timeout_s=self.timeout_s)
        contenders = self._contenders()
        return Inputs(
            data=data,
            comparisons={one: found[one] for one in contenders},
            facts={setting: data.open(setting).facts for setting in self.settings},
            # Before the first clock: conversion takes the cores.
            prepared={one: data.prepared(one.spec.name, one.setting) for one in contenders},
        )

    def subjects(self, made: Inputs) -> Sequence[Contender]:
        """Each loader under each setting."""
        return self._contenders()

    def _contenders(self) -> list[Contender]:
        return [Contender(spec, setting) for setting in self.settings for spec in self.loaders]

    def name_of(self, subject: Contender) -> str:
        """``loader 'dali' (threads 2, batch 64)``."""
        return f"loader '{subject.spec}' ({setting_text(subject.setting.to_json())})"

    def measure(self, made: Inputs, subject: Contender, number: int) -> Turn:
        """One turn, all ranks.

        Memory is not touched before (`bench.tools.memory`): turns follow each other sooner than a host takes pages
        back, and neither CPU-ms a sample nor samples/s were seen to change with it.
        """
        spec, setting = subject
        if setting.cache == "cold":
            made.data.drop_pages(setting, made.prepared[subject])
        jobs = turn_jobs(made.data, spec, setting, options=self.options, epochs=self.epochs)
        turn = run_turn(jobs, bystanders={*self.bystanders, *made.data.bystanders}, timeout_s=self.timeout_s)
        check_counts(spec, turn, made.facts[setting])
        return turn

    def report(self, made: Inputs, rounds: Rounds[Contender, Turn]) -> dict[str, Any]:
        """``{"options", "data", "baseline", "records": [one a loader and setting]}``.

        Each of the records has ``repeats``, every turn as it was measured, and ``summary``, medians and intervals.
        """
        data = list(dict.fromkeys(made.facts.values()))
        report: dict[str, Any] = {
            "options": self._options(),
            "baseline": self._baseline(),
            "data": [facts.to_json() for facts in data],
            "records": [
                {
                    **record_of(*one, rounds.whole(one), facts=made.facts[one.setting], prepared=made.prepared[one]),
                    "data": data.index(made.facts[one.setting]),
                    "outputs": made.comparisons[one].to_json(),
                }
                for one in rounds.subjects
            ],
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
            "source": "local files" if endpoint_of(self.shards) is None else "AIStore",
        }

    def _baseline(self) -> str:
        """With the decoder that it was given: webloader:turbo may stand before it."""
        default = next((spec for spec in self.loaders if spec.name == DEFAULT_BASELINE), self.loaders[0])
        baseline = self.baseline or default
        if not LOADERS[baseline.name].decodes:
            return str(baseline)
        return str(replace(baseline, decode=baseline.apply(self.options).decode))

    @staticmethod
    def table(report: Any) -> str:
        """A row a loader and setting, and the notes that a reader needs."""
        return "\n".join([format_table(report), "", *notes_of(report)])


def check_specs(specs: Sequence[LoaderSpec], baseline: LoaderSpec | None, *, is_served: bool = False) -> None:
    """Refuse loaders that cannot be timed together.

    Args:
        specs: The loaders.
        baseline: What ratios are to, if it was named.
        is_served: They will read from a bucket, wherever the shards lie now.

    Raises:
        ValueError: If there is none, one twice, the baseline is not among them, or one reads no bucket and is to.
    """
    if not specs:
        raise ValueError("loaders must name at least one loader")
    if len(set(specs)) != len(specs):
        raise ValueError(f"loaders must not repeat, got {', '.join(map(str, specs))}")
    if baseline is not None and baseline not in specs:
        raise ValueError(f"baseline must be one of the loaders, {', '.join(map(str, specs))}, got '{baseline}'")
    for spec in specs if is_served else ():
        if not {"ais", "converted"} & set(LOADERS[spec.name].source):
            raise ValueError(f"loader '{spec}' reads shards in a directory, and a latency is added before a bucket")


def turn_jobs(
    data: DataSets, spec: LoaderSpec, setting: TurnSetting, *, options: LoaderOptions, epochs: int
) -> list[TurnJob]:
    """What each rank of a turn is to do."""
    opened = data.open(setting)
    prepared = data.prepared(spec.name, setting)
    return [
        TurnJob(
            spec=spec,
            urls=opened.urls_of_rank(rank, setting.ranks),
            endpoint=opened.endpoint,
            options=options,
            setting=setting,
            epochs=epochs,
            prepared=prepared[rank],
            counters=opened.counters,
        )
        for rank in range(setting.ranks)
    ]


def check_counts(spec: LoaderSpec, turn: Turn, facts: DataFacts) -> None:
    """Every sample of every epoch, over all ranks: what was compared is what was timed."""
    for name in ("first", "steady"):
        drawn = [getattr(rank, name) for rank in turn.ranks]
        if drawn[0] is not None:
            found, wanted = sum(one.num_samples for one in drawn), drawn[0].num_epochs * facts.num_samples
            if found != wanted:
                raise OutputError(f"loader '{spec}': {found} samples came in its {name} epochs, expected {wanted}")
