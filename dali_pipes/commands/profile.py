"""``dali-pipes profile``: epochs of a real loader, to seconds busy and waiting of each stage, and what to turn.

Three clocks, none of which a loader that nobody profiles has to wind: `dali_pipes.profiling` for what runs in Python's
threads, the kernel's accounts of DALI's own threads, and, since DALI 2.4 gives no times of its operators, a twin of the
decode half that stops behind the decoders, for the share of decoding in what those threads do.
"""

import contextlib
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dali_pipes.commands.job import Job, job_options
from dali_pipes.commands.options import json_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dali_pipes.graph.decode import BatchInputs
    from dali_pipes.iterator import Loader
    from dali_pipes.profiling import Kind, Recorder, Stage

__all__ = ["EpochProfile", "Finding", "StageTimes", "find_bottleneck", "profile", "profile_loader"]

# Batches that the twins decode, and how often each: the share of decoding differs little from batch to batch.
NUM_TWIN_BATCHES = 4
NUM_TWIN_ROUNDS = 3
# A step that waits for less than this share of its time has a loader that keeps up.
KEEPS_UP = 0.05
# Threads that work for this share of the time are all at work: the rest is a batch's last samples.
ALL_AT_WORK = 0.75
# Ready to run, and no core free, for this share of the time: others want the cores, too.
CROWDED = 0.2


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """One stage in one epoch, summed over its threads."""

    stage: str
    threads: int
    busy_s: float | None
    """``None`` where it cannot be measured."""
    waiting_s: float | None
    """For the stage before it; of stages with threads of their own, all that they were not busy."""
    queued_s: float = 0.0
    """Of the waiting: ready to run, and no core was free."""


@dataclass(frozen=True, kw_only=True)
class EpochProfile:
    """Where one epoch's time went."""

    epoch: int
    num_samples: int
    num_batches: int
    wall_s: float
    first_batch_s: float
    """From the epoch's start to its first batch."""
    fetched_bytes: int
    """Brought from the store in this epoch, shard indexes included."""
    stages: tuple[StageTimes, ...]
    """In the order of the data path."""

    def of(self, stage: str) -> StageTimes:
        """One stage's times."""
        return next(times for times in self.stages if times.stage == stage)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The stage that the others wait for, and what changes it."""

    bottleneck: str
    why: str
    turn: tuple[str, ...]


def find_bottleneck(
    epoch: EpochProfile, *, cores: int, batch_size: int, on_gpu: bool, is_in_memory: bool = True
) -> Finding:
    """The stage that most of the step's waiting is for.

    What the step waits for is one of five: shards (`read` waits), decoded batches (`hand-over` waits), or one of the
    three stages that work in the thread that iterates.

    Args:
        epoch: The figures.
        cores: Cores that the process may use.
        batch_size: Samples a batch.
        on_gpu: Whether it was decoded there.
        is_in_memory: Whether the image lies in memory, not on a disk.
    """
    step = epoch.of("step")
    waited = step.waiting_s or 0.0
    share = waited / epoch.wall_s if epoch.wall_s else 0.0
    if share < KEEPS_UP:
        return Finding(
            bottleneck="step",
            why=f"the step waits for {share:.1%} of the time: the loader keeps up",
            turn=("nothing in the loader; fewer num_threads leave cores to the training",),
        )
    awaited = {
        "shards": epoch.of("read").waiting_s or 0.0,
        "decoding": epoch.of("hand-over").waiting_s or 0.0,
        "read": epoch.of("read").busy_s or 0.0,
        "seam": epoch.of("seam").busy_s or 0.0,
        "hand-over": epoch.of("hand-over").busy_s or 0.0,
    }
    most = max(awaited, key=lambda name: awaited[name])
    told = f"of the {waited:.2f} s that the step waits, {awaited[most]:.2f} s are for "
    if most == "shards":
        return _of_shards(epoch, told, is_in_memory=is_in_memory)
    if most == "decoding":
        return _of_decoding(epoch, told, cores=cores, batch_size=batch_size, on_gpu=on_gpu)
    turns = {
        "read": (
            "a larger batch_size: a call a batch is what reading costs",
            *(() if is_in_memory else ("cache_dir in memory (/dev/shm) or on a faster disk: the image is on one",)),
        ),
        "seam": (
            "the graph's arrays and parsers (components.array, .json, .parsed, .npy): they run in Python, in the "
            "thread that iterates; do less there, or once in advance: dali-pipes prep transform",
        ),
        "hand-over": ("a larger batch_size", "with_keys=False, where keys are not used"),
    }
    return Finding(bottleneck=most, why=f"{told}work in the thread that iterates", turn=turns[most])


def _of_shards(epoch: EpochProfile, told: str, *, is_in_memory: bool) -> Finding:
    fetch, stage = epoch.of("fetch"), epoch.of("stage")
    turn = []
    if (stage.busy_s or 0.0) > (fetch.busy_s or 0.0):
        name = "stage"
        if not is_in_memory:
            turn.append("cache_dir in memory (/dev/shm) or on a faster disk: shards are written and synced there")
    else:
        name = "fetch"
        if fetch.busy_s is None or fetch.busy_s > ALL_AT_WORK * fetch.threads * epoch.wall_s:
            turn.append(
                "more num_fetchers: all were at work; if that changes nothing, the network or the store is full"
            )
        else:
            turn.append(
                "num_fetchers were not all at work: cache_bytes for larger windows ahead, or more, smaller shards"
            )
        turn.append("cache_dir on a local disk and cache_bytes for all shards: later epochs and jobs fetch nothing")
    if epoch.first_batch_s > 0.5 * epoch.wall_s:
        turn.append("ramp_up=True: the first batch then waits for one shard only")
    rate = epoch.fetched_bytes / 2**20 / epoch.wall_s
    return Finding(bottleneck=name, why=f"{told}shards ({rate:.0f} MiB/s came)", turn=tuple(turn))


def _of_decoding(epoch: EpochProfile, told: str, *, cores: int, batch_size: int, on_gpu: bool) -> Finding:
    decode, transform = epoch.of("decode"), epoch.of("transform")
    name = "decode" if (decode.busy_s or 0.0) >= (transform.busy_s or 0.0) else "transform"
    threads = decode.threads
    capacity = threads * epoch.wall_s
    at_work = ((decode.busy_s or 0.0) + (transform.busy_s or 0.0)) / capacity if capacity else 0.0
    queued = decode.queued_s / capacity if capacity else 0.0
    why = f"{told}batches being decoded; DALI's {threads} threads are at work for {at_work:.0%} of the time"
    turn = []
    if queued > CROWDED:
        why += f", and for {queued:.0%} ready with no core free"
        turn.append("fewer num_threads, or fewer other processes: they compete for the cores")
    elif at_work >= ALL_AT_WORK and threads < cores:
        turn.append(f"more num_threads: {threads} of {cores} cores decode")
    elif at_work >= ALL_AT_WORK:
        turn.append("more cores" if on_gpu else "more cores, or device='gpu': all cores decode")
    else:
        turn.append("prefetch_queue_depth=3 or more: threads are idle between batches")
        if batch_size < 8 * threads:
            turn.append(f"a larger batch_size: {batch_size} samples are few for {threads} threads")
    if on_gpu:
        turn.append("hw_decoder_load: dali-pipes tune URL")
    if name == "decode":
        turn.append("smaller photos, once in advance: dali-pipes prep transform; or a graph that decodes a window only")
    else:
        turn.append("the graph: fused operators (crop_mirror_normalize), dtype='uint8' or 'float16', a smaller crop")
    return Finding(bottleneck=name, why=why, turn=tuple(turn))


def profile_loader(
    loader: "Loader", *, epochs: int, recorder: "Recorder", compute_s: float = 0.0
) -> list[EpochProfile]:
    """Iterate, and say of each epoch where its time went.

    Args:
        loader: Just made, so that the first epoch stages its shards, as a job's does.
        epochs: How many.
        recorder: Of `dali_pipes.profiling.recording`, within which the loader was made.
        compute_s: What a step takes after each batch: a training's, slept.
    """
    kept: list[BatchInputs] = []
    loader._decode.waits_on_host = True  # or nobody would be seen to wait for a GPU
    taken = [_epoch(loader, recorder, compute_s=compute_s, kept=kept) for _ in range(epochs)]
    share = _decode_share(loader, kept)
    return [_split(profile, share) for profile in taken]


def _epoch(loader: "Loader", recorder: "Recorder", *, compute_s: float, kept: "list[BatchInputs]") -> EpochProfile:
    before, in_loader, dali = recorder.seconds(), recorder.in_loader_s(), _dali_threads()
    fetched = loader._stager.fetched_bytes
    num_samples = num_batches = num_fetchers = 0
    first_batch_s = 0.0
    started = time.perf_counter()
    batches = iter(loader)
    epoch = loader.epoch
    for _ in batches:
        if not num_batches:
            first_batch_s = time.perf_counter() - started
        num_batches, num_samples = num_batches + 1, num_samples + loader.num_valid
        num_fetchers = max(num_fetchers, len(loader._stager._threads))
        fed = loader._repair._decoded  # kept there until the next one comes
        if fed is not None and len(kept) < NUM_TWIN_BATCHES:
            kept.append(fed)
        if compute_s:
            time.sleep(compute_s)
    wall_s = time.perf_counter() - started
    after = recorder.seconds()
    in_loader = recorder.in_loader_s() - in_loader

    def took(stage: "Stage", kind: "Kind") -> float:
        return after.get((stage, kind), 0.0) - before.get((stage, kind), 0.0)

    def of_fetchers(stage: "Stage") -> StageTimes:
        measured = took(stage, "busy") if num_fetchers == 0 or (stage, "busy") in after else None
        return StageTimes(
            stage=stage,
            threads=num_fetchers,
            busy_s=measured,
            waiting_s=None if measured is None else max(0.0, num_fetchers * wall_s - measured),
        )

    threads = loader._decode.num_threads
    if loader._decode.device_id is not None:
        threads *= 1 + loader._decode.num_decoders  # each decoder for a GPU has as many of its own
    busy_s, queued_s = (
        sum(max(0.0, now[kind] - dali.get(thread, (0.0, 0.0))[kind]) for thread, now in _dali_threads().items())
        for kind in (0, 1)
    )
    stages = (
        of_fetchers("fetch"),
        of_fetchers("stage"),
        StageTimes(stage="read", threads=1, busy_s=took("read", "busy"), waiting_s=took("read", "waiting")),
        StageTimes(stage="seam", threads=1, busy_s=took("seam", "busy"), waiting_s=0.0),
        # Together, until a twin has said how much of it is decoding.
        StageTimes(
            stage="decode",
            threads=threads,
            busy_s=busy_s,
            waiting_s=max(0.0, threads * wall_s - busy_s),
            queued_s=queued_s,
        ),
        StageTimes(
            stage="hand-over", threads=1, busy_s=took("hand-over", "busy"), waiting_s=took("hand-over", "waiting")
        ),
        StageTimes(stage="step", threads=1, busy_s=wall_s - in_loader, waiting_s=in_loader),
    )
    return EpochProfile(
        epoch=epoch,
        num_samples=num_samples,
        num_batches=num_batches,
        wall_s=wall_s,
        first_batch_s=first_batch_s,
        fetched_bytes=loader._stager.fetched_bytes - fetched,
        stages=stages,
    )


def _split(profile: EpochProfile, decode_share: float) -> EpochProfile:
    """With decode and transform apart; they have the same threads."""
    stages: list[StageTimes] = []
    for times in profile.stages:
        if times.stage != "decode":
            stages.append(times)
            continue
        busy_s = times.busy_s or 0.0
        for name, share in (("decode", decode_share), ("transform", 1 - decode_share)):
            stages.append(
                StageTimes(
                    stage=name,
                    threads=times.threads,
                    busy_s=share * busy_s,
                    waiting_s=times.waiting_s,
                    queued_s=times.queued_s,
                )
            )
    return EpochProfile(**{**asdict(profile), "stages": tuple(stages)})


def _decode_share(loader: "Loader", kept: "Sequence[BatchInputs]") -> float:
    """How much of what DALI does for a batch is decoding, by a twin that does no more: 0 to 1.

    On the CPU in CPU time, on a GPU in the time that a batch takes alone: it has no account of its engines' time.
    """
    decode = loader._decode
    if not decode.num_decoders:
        return 0.0
    seconds = _alone_s if decode.device_id is not None else time.process_time
    ratios = []
    with contextlib.closing(decode.twin()) as whole, contextlib.closing(decode.twin(only_decoders=True)) as decoders:
        for round_number in range(NUM_TWIN_ROUNDS + 1):
            took = []
            for twin in (whole, decoders):
                started = seconds()
                for fed in kept:
                    twin.run(fed)
                took.append(seconds() - started)
            if round_number and took[0] > 0:  # the first round allocates
                ratios.append(min(1.0, took[1] / took[0]))
    return statistics.median(ratios) if ratios else 1.0


def _alone_s() -> float:
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


def _dali_threads() -> dict[int, tuple[float, float]]:
    """DALI's threads in this process: number -> seconds on a core, seconds ready with no core free."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        # A thread may end meanwhile, as a segment's do.
        with contextlib.suppress(OSError, ValueError):
            if (task / "comm").read_text().startswith("[DALI]"):
                on_core, queued, *_ = (int(text) for text in (task / "schedstat").read_text().split())
                found[int(task.name)] = on_core / 1e9, queued / 1e9
    return found


@click.command(short_help="Where a loader's time goes, stage by stage, and what to turn.")
@job_options
@click.option(
    "--epochs",
    default=2,
    show_default=True,
    type=click.IntRange(min=1),
    help="Epochs; the first one stages shards, unless they are cached.",
)
@click.option("--num-threads", type=click.IntRange(min=1), help="Decoding threads.  [default: cores]")
@click.option("--prefetch-queue-depth", type=click.IntRange(min=1), help="Batches decoded ahead.  [default: 2]")
@click.option("--num-fetchers", type=click.IntRange(min=1), help="Shards in flight.  [default: 8]")
@click.option(
    "--compute-ms",
    default=0.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="What a training step takes a batch; at 0 the loader's own limit is found.",
)
@json_option
def profile(
    *,
    epochs: int,
    num_threads: int | None,
    prefetch_queue_depth: int | None,
    num_fetchers: int | None,
    compute_ms: float,
    as_json: bool,
    **options: Any,
) -> None:
    """Run a loader on the shards at URL (ais://bucket/prefix, a glob of local tars, or a directory), and print for each
    stage how long it was busy and how long it waited.

    The stage that the training step waits for most is named, and what to turn. Reads the shards into the cache, as a
    training would; writes nothing else. For a time line, run your training under nsys or torch.profiler: the same
    stages show there as ranges, in nsys beside DALI's own, which are of operators
    (DALI_PIPES_ANNOTATE=1 always, 0 never).
    """
    from dali_pipes.profiling import recording
    from dali_pipes.ranks import cores_of_rank
    from dali_pipes.tuning import Machine

    job = Job(**options)
    asked = {"num_threads": num_threads, "prefetch_queue_depth": prefetch_queue_depth, "num_fetchers": num_fetchers}
    # What is not said is the loader's, and a tuning file's, to say.
    given = {name: value for name, value in asked.items() if value is not None}
    with recording() as recorder, job.open(**given) as loader:
        profiles = profile_loader(loader, epochs=epochs, recorder=recorder, compute_s=compute_ms / 1000)
        cores = cores_of_rank()
        on_gpu, is_in_memory = loader._decode.device_id is not None, loader._share.space.is_memory
        machine = asdict(Machine.here(loader._decode.device_id))
        settings = {
            "num_threads": loader._decode.num_threads,
            "prefetch_queue_depth": loader._decode.prefetch_queue_depth,
            "num_fetchers": loader._stager._num_fetchers,
        }
    findings = [
        find_bottleneck(found, cores=cores, batch_size=job.batch_size, on_gpu=on_gpu, is_in_memory=is_in_memory)
        for found in profiles
    ]
    if as_json:
        report = {
            "machine": machine,
            "options": {
                **job.to_json(),
                **settings,
                "compute_ms": compute_ms,
                "cores": cores,
                "decoded_on_gpu": on_gpu,
            },
            "epochs": [{**asdict(found), **asdict(finding)} for found, finding in zip(profiles, findings, strict=True)],
        }
        click.echo(json.dumps(report))
        return
    click.echo("\n\n".join(_text(found, finding) for found, finding in zip(profiles, findings, strict=True)))


def _text(found: EpochProfile, finding: Finding) -> str:
    step = found.of("step")
    share = (step.waiting_s or 0.0) / found.wall_s
    fetched = f", {found.fetched_bytes / 2**20:.0f} MiB fetched" if found.fetched_bytes else ""
    lines = [
        f"epoch {found.epoch}: {found.num_samples} samples in {found.wall_s:.2f} s "
        f"({found.num_samples / found.wall_s:.0f} samples/s){fetched}; the step waits for {share:.0%} of it",
        f"{'stage':<10} {'threads':>7} {'busy s':>8} {'waiting s':>9} {'busy':>5}",
    ]
    for times in found.stages:
        capacity = times.threads * found.wall_s
        is_known = times.busy_s is not None and capacity > 0
        lines.append(
            f"{times.stage:<10} {times.threads:>7} {_seconds(times.busy_s):>8} {_seconds(times.waiting_s):>9} "
            + (f"{(times.busy_s or 0.0) / capacity:>5.0%}" if is_known else f"{'-':>5}")
        )
    lines.append(f"bottleneck: {finding.bottleneck}: {finding.why}")
    lines += [f"  turn: {text}" for text in finding.turn]
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
