"""Measure a loader's epochs: seconds that each stage was busy and waiting.

Three clocks are read. `dali_pipes.profiling` times the stages in Python's threads. The kernel times DALI's own threads.
DALI 2.4 does not time its operators, so a second pipeline that stops after the decoders measures the share of decoding
in the work of these threads.
"""

import contextlib
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from dali_pipes.commands.step_clock import StepClock, dali_thread_times

if TYPE_CHECKING:
    from dali_pipes.graph.batch_inputs import BatchInputs
    from dali_pipes.graph.decode import DecodePipeline
    from dali_pipes.iterator import Loader
    from dali_pipes.profiling import Kind, Recorder, Seconds, Stage


# Batches and rounds that measure the share of decoding: it differs little from batch to batch.
NUM_SHARE_BATCHES = 4
NUM_SHARE_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """One stage in one epoch, summed over its threads."""

    stage: str
    threads: int
    busy_s: float
    waiting_s: float
    """Waiting for the stage before it; for a stage with its own threads, all the time that they were not busy."""
    queued_s: float = 0.0
    """The part of ``waiting_s`` in which a thread was ready to run, but no core was free."""


@dataclass(frozen=True, kw_only=True)
class EpochProfile:
    """The times of one epoch, stage by stage."""

    epoch: int
    num_samples: int
    num_batches: int
    wall_s: float
    first_batch_s: float
    """Seconds from the epoch's start to its first batch."""
    fetched_bytes: int
    """Brought from the store in this epoch, shard indexes included."""
    stages: tuple[StageTimes, ...]
    """The stages, in the order of the data path."""

    def of(self, stage: str) -> StageTimes:
        """Return one stage's times."""
        return next(times for times in self.stages if times.stage == stage)


class _Clocks(NamedTuple):
    # All clocks of this process, read at one time.
    seconds: "Seconds"
    in_loader_s: float
    dali_threads: Mapping[int, tuple[float, float]]
    fetched_bytes: int

    @classmethod
    def read(cls, loader: "Loader", recorder: "Recorder") -> "_Clocks":
        return cls(recorder.seconds(), recorder.in_loader_s(), dali_thread_times(), loader.parts.stager.fetched_bytes)


def profile_loader(
    loader: "Loader",
    *,
    epochs: int,
    recorder: "Recorder",
    compute_s: float = 0.0,
    clock: StepClock | None = None,
) -> list[EpochProfile]:
    """Iterate, and measure the times of each epoch.

    The loader was made inside the recorder's context and has not been iterated, so that its first epoch stages its
    shards, as a job's does. After each batch sleep ``compute_s`` seconds, in place of a training step. ``clock`` notes
    when each batch was asked for and came.
    """
    kept: list[BatchInputs] = []
    loader.parts.decode.waits_on_host = True  # otherwise the waiting for a GPU would not be measured
    loader.parts.decode.taken = kept
    profiles = [_measure_epoch(loader, recorder, compute_s=compute_s, kept=kept, clock=clock) for _ in range(epochs)]
    share = _decode_share(loader.parts.decode, kept)
    return [_split_decoding(profile, share) for profile in profiles]


def _measure_epoch(
    loader: "Loader",
    recorder: "Recorder",
    *,
    compute_s: float,
    kept: "list[BatchInputs]",
    clock: StepClock | None,
) -> EpochProfile:
    """Measure one epoch, with ``decode`` for all work of DALI's threads; ``kept`` gets the first batches."""
    before = _Clocks.read(loader, recorder)
    num_samples = num_batches = num_fetchers = 0
    first_batch_s = 0.0
    started = time.perf_counter()
    batches = iter(loader)
    epoch = loader.epoch
    if clock is not None:
        clock.begin_epoch(epoch, started)
    for _ in batches:
        if clock is not None:
            clock.came(loader.num_valid)
        if not num_batches:
            first_batch_s = time.perf_counter() - started
        num_batches, num_samples = num_batches + 1, num_samples + loader.num_valid
        num_fetchers = max(num_fetchers, loader.parts.stager.num_threads)
        if len(kept) == NUM_SHARE_BATCHES:
            loader.parts.decode.taken = None
        if compute_s:
            time.sleep(compute_s)
        if clock is not None:
            clock.ask()
    wall_s = time.perf_counter() - started
    if clock is not None:
        clock.end_epoch()
    after = _Clocks.read(loader, recorder)
    return EpochProfile(
        epoch=epoch,
        num_samples=num_samples,
        num_batches=num_batches,
        wall_s=wall_s,
        first_batch_s=first_batch_s,
        fetched_bytes=after.fetched_bytes - before.fetched_bytes,
        stages=_stages(loader.parts.decode, before, after, wall_s=wall_s, num_fetchers=num_fetchers),
    )


def _stages(
    decode: "DecodePipeline", before: _Clocks, after: _Clocks, *, wall_s: float, num_fetchers: int
) -> tuple[StageTimes, ...]:
    def took(stage: "Stage", kind: "Kind") -> float:
        return after.seconds.get((stage, kind), 0.0) - before.seconds.get((stage, kind), 0.0)

    def in_own_threads(stage: str, threads: int, busy_s: float, queued_s: float = 0.0) -> StageTimes:
        waiting_s = max(0.0, threads * wall_s - busy_s)
        return StageTimes(stage=stage, threads=threads, busy_s=busy_s, waiting_s=waiting_s, queued_s=queued_s)

    def in_this_thread(stage: "Stage") -> StageTimes:
        return StageTimes(stage=stage, threads=1, busy_s=took(stage, "busy"), waiting_s=took(stage, "waiting"))

    # On a GPU each decoder has as many threads of its own.
    decode_threads = decode.num_threads * (1 if decode.device_id is None else 1 + decode.num_decoders)
    decode_s = queued_s = 0.0
    for thread, (on_core_s, ready_s) in after.dali_threads.items():
        earlier = before.dali_threads.get(thread, (0.0, 0.0))
        decode_s += max(0.0, on_core_s - earlier[0])
        queued_s += max(0.0, ready_s - earlier[1])
    in_loader_s = after.in_loader_s - before.in_loader_s
    return (
        in_own_threads("fetch", num_fetchers, took("fetch", "busy")),
        in_own_threads("stage", num_fetchers, took("stage", "busy")),
        in_this_thread("read"),
        in_this_thread("inputs"),
        in_own_threads("decode", decode_threads, decode_s, queued_s),
        in_this_thread("hand-over"),
        StageTimes(stage="step", threads=1, busy_s=wall_s - in_loader_s, waiting_s=in_loader_s),
    )


def _split_decoding(profile: EpochProfile, decode_share: float) -> EpochProfile:
    """Split ``decode`` into ``decode`` and ``transform``, which share their threads."""
    stages: list[StageTimes] = []
    for times in profile.stages:
        if times.stage == "decode":
            stages.append(replace(times, busy_s=decode_share * times.busy_s))
            stages.append(replace(times, stage="transform", busy_s=(1 - decode_share) * times.busy_s))
        else:
            stages.append(times)
    return replace(profile, stages=tuple(stages))


def _decode_share(decode: "DecodePipeline", batches: "Sequence[BatchInputs]") -> float:
    """Measure the share of decoding in DALI's work for a batch, 0 to 1, with a second pipeline that only decodes.

    On the CPU this is the share of CPU time. On a GPU it is the share of the time that a batch takes alone, because
    nothing counts the time for which the GPU's engines are busy.
    """
    if not decode.num_decoders:
        return 0.0
    clock = time.process_time if decode.device_id is None else _synchronised_clock
    shares = []
    with (
        contextlib.closing(decode.second_pipeline()) as whole,
        contextlib.closing(decode.second_pipeline(only_decoders=True)) as decoders,
    ):
        for round_number in range(NUM_SHARE_ROUNDS + 1):
            took = []
            for pipeline in (whole, decoders):
                started = clock()
                for inputs in batches:
                    pipeline.run(inputs)
                took.append(clock() - started)
            if round_number and took[0] > 0:  # the first round allocates
                shares.append(min(1.0, took[1] / took[0]))
    return statistics.median(shares) if shares else 1.0


def _synchronised_clock() -> float:
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()
