"""Shards and loader names in, a record out: compare first, then time, repeats of all loaders and settings interleaved.

A turn opens one loader under one setting in fresh processes, draws a first epoch, in a warm turn those that count, and
closes it (`bench.timing.turn`, `bench.timing.ranks`). Nothing of one loader is alive while another is timed: no thread,
no worker, no prefetched batch. A round is one turn of everything; rounds follow each other, so that a drift of the
machine meets all alike, and ratios to the baseline are taken round by round. What ends a run before its last round,
Ctrl-C or a loader that fails, does not take the rounds before with it.
"""

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.environment import describe_environment
from bench.loaders import LOADERS, LoaderOptions, LoaderSpec, Prepared, open_loader
from bench.loaders.workers import endpoint_of
from bench.outputs import Comparison, OutputError, Reference, compare_epoch, tolerance_of
from bench.reports.figures import figures_of
from bench.reports.record import RUN_FORMAT, VERSION, shown_command
from bench.reports.report import summarise
from bench.timing.data import DataFacts, DataSets
from bench.timing.folders import check_writable
from bench.timing.ranks import TIMEOUT_S, Turn, rank_context, run_turn
from bench.timing.settings import Setting, setting_text
from bench.timing.turn import TurnJob
from dali_pipes.errors import PipesError
from dali_pipes.progress import bar

if TYPE_CHECKING:
    from bench.timing.turn import Drawn, Spent
    from dali_pipes.store.urls import ShardSet

__all__ = ["RunOptions", "check_counts", "check_specs", "compare_outputs", "run_benchmark", "turn_jobs"]

DEFAULT_BASELINE = "webloader"
"""The loader that ratios are to, where it was timed; else the first."""

BY_SETTING = ("batch_size", "num_threads", "keeps_shards")
"""Of `LoaderOptions`: what each setting says for itself."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How often, how long, against what; what is read is in `Setting` and `LoaderOptions`."""

    repeats: int = 7
    """Turns of each loader and setting: of seven, a 95 % interval is narrower than smallest to largest."""
    epochs: int = 1
    """Timed in each warm turn, after the first: more of them where one is short."""
    baseline: LoaderSpec | None = None
    """What ratios are to; ``None``: webloader, where it is timed, else the first."""
    num_samples: int | None = None
    """The samples over and over, so many of them; ``None``: as they are."""
    direct: bool = False
    """No gateway before a cluster: bytes are not counted."""
    directory: Path | None = None
    """Where shards that are packed anew, and what loaders convert, are written."""
    bystanders: Collection[int] = field(default=())
    """Processes below this one whose CPU is nobody's, such as an embedded AIS node."""
    timeout_s: float = TIMEOUT_S
    """A turn may take, and comparing a loader's outputs; what takes longer ends the run."""

    def __post_init__(self) -> None:
        for name in ("repeats", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_samples is not None and self.num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {self.num_samples}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be more than 0, got {self.timeout_s:g}")
        if self.directory is not None:
            check_writable(self.directory)


def run_benchmark(
    shards: "ShardSet",
    specs: Sequence[LoaderSpec],
    *,
    options: LoaderOptions,
    settings: Sequence[Setting] = (),
    run: RunOptions | None = None,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Compare, then time.

    Args:
        shards: What every loader reads.
        specs: The loaders, in the order of the table.
        options: What they share.
        settings: What each of them is timed under; none: once, as ``options`` say, from a warm cache.
        run: How often and how long; the defaults where ``None``.
        keep: Given the record of the whole rounds, at least one, if something ends the run before its last; what ended
            it is raised then.

    Returns:
        The record of a run, ready for JSON: ``{"format", "version", "command", "environment", "options", "data",
        "baseline", "complete", "num_rounds", "stopped", "records": [one a loader and setting]}``; each of the last with
        ``repeats``, every turn as it was measured, and ``summary``, medians and intervals. Of a run that is not
        ``complete`` there are ``num_rounds`` of ``options``' ``repeats``, and ``stopped`` says in which turn it ended.

    Raises:
        OutputError: If a loader does not yield what the shards hold; nothing is timed then.
        PipesError: If a loader cannot be opened, one of its processes ends early, or a turn takes too long.
        ValueError: If there is no loader, one twice, no baseline among them, a setting that the shards do not allow, or
            no room for what is to be written.
    """
    run = run or RunOptions()
    settings = list(settings) or [
        Setting(threads=options.num_threads, batch_size=options.batch_size, crop=options.crop),
    ]
    check_specs(specs, run.baseline)
    load_at_start = round(os.getloadavg()[0], 2)
    with DataSets(
        shards,
        photo=options.photo,
        mask=options.mask,
        num_samples=run.num_samples,
        direct=run.direct,
        directory=run.directory,
    ) as data:
        data.check(settings, loaders={spec.name for spec in specs})
        rank_context()  # loads libraries while nothing is timed
        comparisons = compare_outputs(data, specs, settings, options=options, timeout_s=run.timeout_s)
        facts = {setting: data.open(setting).facts for setting in settings}
        # Before the first clock: conversion takes the cores.
        prepared = {(spec, setting): data.prepared(spec.name, setting) for setting in settings for spec in specs}
        rounds = _Rounds([(spec, setting) for setting in settings for spec in specs], wanted=run.repeats)

        def record() -> dict[str, Any]:
            known = list(dict.fromkeys(facts.values()))
            records = [
                _record(
                    spec,
                    setting,
                    rounds.whole(spec, setting),
                    comparison=comparisons[spec, setting],
                    facts=facts[setting],
                    data=known.index(facts[setting]),
                    prepared=prepared[spec, setting],
                )
                for spec, setting in rounds.turns
            ]
            found = {
                **_header(specs, options=options, run=run, is_local=endpoint_of(shards) is None),
                "data": [one.to_json() for one in known],
                "complete": rounds.is_complete,
                "num_rounds": rounds.num_whole,
                "stopped": None if rounds.is_complete else rounds.at,
                "records": records,
            }
            found["environment"]["load_at_start"] = load_at_start
            for row, summary in zip(records, summarise(found), strict=True):
                row["summary"] = summary
            return found

        try:
            _time_all(data, rounds, options=options, run=run)
            return record()
        except BaseException:
            if rounds.num_whole and keep is not None:
                keep(record())
            raise


class _Rounds:
    """The turns of each loader and setting so far, and where the next one belongs."""

    def __init__(self, places: Sequence[tuple[LoaderSpec, Setting]], *, wanted: int) -> None:
        self.turns: dict[tuple[LoaderSpec, Setting], list[Turn]] = {place: [] for place in places}
        self.wanted = wanted
        self.at = ""
        """The turn that is being made."""

    def begin(self, number: int, spec: LoaderSpec, setting: Setting) -> None:
        self.at = f"round {number + 1} of {self.wanted}, loader '{spec}' ({setting_text(setting.to_json())})"

    @property
    def num_whole(self) -> int:
        """Rounds in which all had their turn."""
        return min(len(turns) for turns in self.turns.values())

    @property
    def is_complete(self) -> bool:
        return self.num_whole == self.wanted

    def whole(self, spec: LoaderSpec, setting: Setting) -> list[Turn]:
        """The turns of whole rounds: ratios are taken within a round."""
        return self.turns[spec, setting][: self.num_whole]


def _header(specs: Sequence[LoaderSpec], *, options: LoaderOptions, run: RunOptions, is_local: bool) -> dict[str, Any]:
    """What a record says of the run as a whole."""
    baseline = run.baseline or next((spec for spec in specs if spec.name == DEFAULT_BASELINE), specs[0])
    return {
        "format": RUN_FORMAT,
        "version": VERSION,
        "command": shown_command(),
        "environment": describe_environment(),
        "options": {
            **{name: value for name, value in asdict(options).items() if name not in BY_SETTING},
            "loaders": [str(spec) for spec in specs],
            "repeats": run.repeats,
            "epochs": run.epochs,
            "direct": run.direct,
            "timeout_s": run.timeout_s,
            "source": "local files" if is_local else "AIStore",
        },
        # With the decoder that it was given: webloader:turbo may stand before it.
        "baseline": str(replace(baseline, decode=baseline.apply(options).decode))
        if LOADERS[baseline.name].decodes
        else str(baseline),
    }


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


def compare_outputs(
    data: DataSets,
    specs: Sequence[LoaderSpec],
    settings: Sequence[Setting],
    *,
    options: LoaderOptions,
    timeout_s: float,
) -> dict[tuple[LoaderSpec, Setting], Comparison]:
    """What each loader gives of each data set and crop, held against Pillow and torchvision; other things alike.

    A setting's threads, batches, ranks and latency do not change what a sample becomes.

    Raises:
        OutputError: If a loader does not yield what the shards hold.
        PipesError: If one takes longer than ``timeout_s``, or cannot be opened.
    """
    compared: dict[tuple[object, ...], Comparison] = {}
    found: dict[tuple[LoaderSpec, Setting], Comparison] = {}
    for setting in settings:
        shards = data.open(setting).shards
        kind = (shards.url, shards.names, setting.crop)
        if missing := [spec for spec in specs if (spec, *kind) not in compared]:
            shared = replace(options, crop=setting.crop)
            whole = replace(setting, ranks=1)
            with Reference.open(shards, options=shared) as reference:
                for spec in missing:
                    (prepared,) = data.prepared(spec.name, whole)
                    with _limited(timeout_s, what=f"loader '{spec}' ({setting_text(whole.to_json())})"):
                        compared[spec, *kind] = _compare(spec, shards, reference, options=shared, prepared=prepared)
        found |= {(spec, setting): compared[spec, *kind] for spec in specs}
    return found


@contextlib.contextmanager
def _limited(timeout_s: float, *, what: str) -> Iterator[None]:
    """End what hangs in this process, as Ctrl-C would; only the main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(signum: int, frame: object) -> None:
        raise PipesError(
            f"{what} hangs, or needs longer: its outputs were not compared in {timeout_s:g} s; give it more with "
            "--timeout-s, or leave the loader out"
        )

    previous = signal.signal(signal.SIGALRM, late)
    # Again after as long: closing it may hang, too.
    earlier = signal.setitimer(signal.ITIMER_REAL, timeout_s, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *earlier)
        signal.signal(signal.SIGALRM, previous)


def _compare(
    spec: LoaderSpec, shards: "ShardSet", reference: Reference, *, options: LoaderOptions, prepared: Prepared | None
) -> Comparison:
    with open_loader(spec.name, shards, options=spec.apply(options), prepared=prepared) as loader:
        tolerance = tolerance_of(decode=loader.decode, device=loader.device)
        return compare_epoch(
            loader.epoch(),
            reference,
            loader=str(spec),
            tolerance=tolerance,
            gives=loader.gives,
            show=f"compare {spec}",
        )


def _time_all(data: DataSets, rounds: _Rounds, *, options: LoaderOptions, run: RunOptions) -> None:
    with bar(what="time loaders", total=run.repeats * len(rounds.turns), unit="turn") as drawn:
        for number in range(run.repeats):
            # Another order each round: who comes after the loader that leaves most behind is not always the same one.
            order = random.Random(f"{options.seed} {number}").sample(list(rounds.turns), len(rounds.turns))
            for spec, setting in order:
                rounds.begin(number, spec, setting)
                if setting.cache == "cold":
                    data.drop_pages(setting, data.prepared(spec.name, setting))
                jobs = turn_jobs(data, spec, setting, options=options, epochs=run.epochs)
                # Memory is not touched before (`bench.scenarios.warm`): turns follow each other sooner than a host
                # takes pages back, and neither CPU-ms a sample nor samples/s were seen to change with it.
                turn = run_turn(jobs, bystanders={*run.bystanders, *data.bystanders}, timeout_s=run.timeout_s)
                check_counts(spec, turn, data.open(setting).facts)
                rounds.turns[spec, setting].append(turn)
                drawn.update(1)


def turn_jobs(
    data: DataSets, spec: LoaderSpec, setting: Setting, *, options: LoaderOptions, epochs: int
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


def _record(
    spec: LoaderSpec,
    setting: Setting,
    turns: Sequence[Turn],
    *,
    comparison: Comparison,
    facts: DataFacts,
    data: int,
    prepared: Sequence[Prepared | None],
) -> dict[str, Any]:
    one = turns[-1].ranks[0]
    made = [part for part in prepared if part is not None]
    return {
        "loader": spec.name,
        "decode": one.decode,
        "device": one.device,
        "num_workers": one.num_workers,
        "gives": list(one.gives),
        "setting": setting.to_json(),
        "data": data,
        "outputs": comparison.to_json(),
        "prepared": {"wall_s": sum(part.wall_s for part in made), "num_bytes": sum(part.num_bytes for part in made)}
        if made
        else None,
        "repeats": [_repeat(turn, setting, facts) for turn in turns],
    }


def _repeat(turn: Turn, setting: Setting, facts: DataFacts) -> dict[str, Any]:
    return {
        "figures": figures_of(turn, setting=setting, facts=facts),
        "start_mib": turn.start_mib,
        "peak_mib": turn.peak_mib,
        "shared_memory_mib": turn.shared_memory_mib,
        "ranks": [
            {
                name: None if drawn is None else _drawn(drawn, spent)
                for name, drawn, spent in (
                    ("first", rank.first, rank.first_spent),
                    ("steady", rank.steady, rank.steady_spent),
                )
            }
            for rank in turn.ranks
        ],
    }


def _drawn(drawn: "Drawn", spent: "Spent | None") -> dict[str, Any]:
    row: dict[str, Any] = {
        "num_samples": drawn.num_samples,
        "num_epochs": drawn.num_epochs,
        "elapsed_s": drawn.elapsed_s,
        "ends_s": drawn.ends_s,
        # A line, not one each: there may be thousands.
        "waits_us": " ".join(str(round(1e6 * wait)) for wait in drawn.waits_s),
    }
    if spent is not None:
        row["cpu_s"] = spent.cpu_s
        row["traffic"] = None if spent.traffic is None else asdict(spent.traffic)
    return row
