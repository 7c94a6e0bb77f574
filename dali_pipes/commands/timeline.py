"""Put a profile on a time axis: how busy each stage was when, and the stalls of the loop with their causes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt

from dali_pipes.commands.step_clock import EpochSteps, StepClock
from dali_pipes.profiling import Kind, Ranges, Stage

NUM_BINS = 600
"""Intervals of an epoch's axis."""
STALL_TIMES = 3.0
"""A wait for a batch is a stall if it is longer than this many times the epoch's median wait, and ..."""
STALL_LEAST_S = 0.005
"""... than this; shorter ones are the noise of a machine with other processes."""

LOOP_STAGES: tuple[Stage, ...] = ("hand-over", "inputs", "read")
THREAD_STAGES: tuple[Stage, ...] = ("stage", "fetch")

Float64s = npt.NDArray[np.float64]
Pair = tuple[Float64s, Float64s]
"""Begins and ends of some ranges, which may overlap, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One stage on the time axis."""

    stage: str
    threads: int
    busy: Float64s
    """float64 [bins]: the share of each interval, 0 to 1, in which its threads worked."""
    waits: Float64s
    """Likewise, in which it waited for the stage before it; 0 for stages that have threads of their own."""


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A wait of the loop for a batch that took much longer than the others of its epoch."""

    step: int
    """The batch, from 0."""
    at_s: float
    """Its begin, in seconds from the epoch's start."""
    waited_s: float
    stage: str
    """The stage that the loop waited for."""
    cause: str


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One epoch."""

    epoch: int
    num_samples: int
    wall_s: float
    rows: Sequence[Row]
    """The step, then the stages from the loop to the store."""
    stalls: Sequence[Stall]
    """In the order of time."""
    median_wait_s: float
    is_cut: bool
    """Whether the recorder could not keep all ranges: rows of a cut timeline are empty from some time on."""


def timeline_of(
    steps: EpochSteps, ranges: Ranges, clock: StepClock, *, decode_threads: int, num_fetchers: int
) -> Timeline:
    """Put one epoch on an axis of `NUM_BINS` intervals.

    Args:
        steps: The times of the epoch's batches.
        ranges: When each stage ran.
        clock: How busy DALI's threads were.
        decode_threads: DALI's threads on the CPU.
        num_fetchers: Threads that fetch shards.
    """
    edges = np.linspace(steps.started, steps.ended, NUM_BINS + 1)
    waits = waits_of(steps)
    waiting = covered(waits, edges)
    rows = [Row(stage="step", threads=1, busy=1 - waiting, waits=waiting)]
    for stage in LOOP_STAGES:
        busy, waited = (covered(ranges.of(stage, kind, in_loop=True), edges) for kind in ("busy", "waiting"))
        rows.append(Row(stage=stage, threads=1, busy=busy, waits=waited))
    none = np.zeros(NUM_BINS)
    decoding = on_core_share(clock, edges, threads=decode_threads)
    rows.append(Row(stage="decode", threads=decode_threads, busy=decoding, waits=none))
    for stage in THREAD_STAGES:
        busy = covered(ranges.of(stage, "busy"), edges) / max(1, num_fetchers)
        rows.append(Row(stage=stage, threads=num_fetchers, busy=busy, waits=none))
    taken = waits[1] - waits[0]
    return Timeline(
        epoch=steps.epoch,
        num_samples=steps.num_samples,
        wall_s=steps.ended - steps.started,
        rows=rows,
        stalls=find_stalls(waits, ranges, clock, started=steps.started, decode_threads=decode_threads),
        median_wait_s=float(np.median(taken)) if len(taken) else 0.0,
        is_cut=ranges.is_full,
    )


def waits_of(steps: EpochSteps) -> Pair:
    """Begin and end of the loop's wait for each batch."""
    came = np.array(steps.came, np.float64)
    return np.array(steps.asked, np.float64)[: len(came)], came


def covered(ranges: Pair, edges: Float64s) -> Float64s:
    """The seconds of some ranges in each interval, over the interval's length: float64 [edges - 1].

    >>> covered((np.array([0.0, 1.5]), np.array([1.0, 3.0])), np.array([0.0, 2.0, 4.0]))
    array([0.75, 0.5 ])
    """

    def until(times: Float64s) -> Float64s:
        """The seconds after ``times`` have begun, summed over the times, at each edge."""
        ordered = np.sort(times)
        sums = np.append(0.0, np.cumsum(ordered - edges[0]))
        number = np.searchsorted(ordered, edges, side="right")
        found: Float64s = number * (edges - edges[0]) - sums[number]
        return found

    if len(edges) < 2:
        return np.zeros(0)
    seconds, lengths = np.diff(until(ranges[0]) - until(ranges[1])), np.diff(edges)
    shares: Float64s = np.clip(seconds, 0, None) / np.where(lengths > 0, lengths, 1)
    shares[shares < 1e-9] = 0.0  # a sum of many floats misses zero by a little
    return shares


def on_core_share(clock: StepClock, edges: Float64s, *, threads: int) -> Float64s:
    """The share of each interval that DALI's threads were on a core, 0 to 1: float64 [edges - 1]."""
    if len(clock.at) < 2 or threads < 1:
        return np.zeros(max(0, len(edges) - 1))
    seconds, lengths = np.diff(np.interp(edges, np.array(clock.at), np.array(clock.on_core_s))), np.diff(edges)
    shares: Float64s = np.clip(seconds / (np.where(lengths > 0, lengths, 1) * threads), 0, 1)
    return shares


def find_stalls(waits: Pair, ranges: Ranges, clock: StepClock, *, started: float, decode_threads: int) -> list[Stall]:
    """The stalls and their causes: the waits of over `STALL_TIMES` medians and over `STALL_LEAST_S` seconds."""
    taken = waits[1] - waits[0]
    if not len(taken):
        return []
    limit = max(STALL_TIMES * float(np.median(taken)), STALL_LEAST_S)
    steps = np.flatnonzero(taken > limit)
    # Every second interval is a stall, the others lie between two.
    edges = np.stack([waits[0][steps], waits[1][steps]], axis=1).ravel()
    loop: dict[tuple[str, str], Float64s] = {}
    for stage in LOOP_STAGES:
        for kind in get_args(Kind):
            loop[stage, kind] = covered(ranges.of(stage, kind, in_loop=True), edges)[::2]
    others: dict[str, Float64s] = {stage: covered(ranges.of(stage, "busy"), edges)[::2] for stage in THREAD_STAGES}
    others["decode"] = on_core_share(clock, edges, threads=decode_threads)[::2]
    stalls = []
    for number, step in enumerate(steps.tolist()):
        name, cause = cause_of(
            {what: float(shares[number]) for what, shares in loop.items()},
            {what: float(shares[number]) for what, shares in others.items()},
            waited_s=float(taken[step]),
            decode_threads=decode_threads,
        )
        stalls.append(
            Stall(
                step=step,
                at_s=float(waits[0][step]) - started,
                waited_s=float(taken[step]),
                stage=name,
                cause=cause,
            )
        )
    return stalls


def cause_of(
    loop: Mapping[tuple[str, str], float], others: Mapping[str, float], *, waited_s: float, decode_threads: int
) -> tuple[str, str]:
    """What the loop waited for, as a stage and as a text.

    Args:
        loop: Stage and kind -> share of the wait, 0 to 1, that the loop's thread spent so.
        others: ``fetch`` and ``stage`` -> how many of their threads worked, on average; ``decode`` -> the share of
            DALI's threads.
        waited_s: The wait.
        decode_threads: DALI's threads.
    """
    (stage, kind), share = max(loop.items(), key=lambda item: item[1])
    spent = f"{1000 * share * waited_s:.0f} of {1000 * waited_s:.0f} ms"
    if (stage, kind) == ("read", "waiting"):
        fetch, staging = others["fetch"], others["stage"]
        if max(fetch, staging) < 0.05:
            return "read", f"{spent}: bytes of the next samples; no thread fetched or staged a shard meanwhile"
        name = "fetch" if fetch >= staging else "stage"
        return name, f"{spent}: shards on their way; {fetch:.1f} threads fetched and {staging:.1f} staged meanwhile"
    if (stage, kind) == ("hand-over", "waiting"):
        busy = f"{others['decode']:.0%} of DALI's {decode_threads} threads were on a core"
        return "decode", f"{spent}: the batch being decoded; {busy}"
    if not share:
        return "step", "nothing that the loader's stages say: another loader, or the interpreter"
    return stage, f"{spent}: work of '{stage}' in the thread that iterates"
