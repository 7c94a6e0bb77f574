"""``dali-pipes profile``: show how long each stage of a loader works and waits, find the bottleneck, give advice.

The loader's own counters time the stages in Python's threads: `dali_pipes.metrics.counts`. The kernel times DALI's
threads. DALI 2.4 does not time its operators, so a second pipeline that stops after the decoders measures the share of
decoding in the work of these threads.
"""

import contextlib
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dali_pipes.commands.options import format_bytes, json_option
from dali_pipes.commands.output import check_output, print_note, writing
from dali_pipes.commands.tune import Job, job_options, synchronised_clock

if TYPE_CHECKING:
    from dali_pipes.graph.decode import BatchInputs, DecodePipeline
    from dali_pipes.iterator import Loader
    from dali_pipes.profiling import Trace

# A loader is fast enough if the step waits for less than this share of the time.
KEEPS_UP = 0.05
# Threads count as all busy above this share of the time: a few threads idle during a batch's last samples.
ALL_BUSY = 0.75
# Threads compete with others for cores if they are ready, without a free core, for more than this share of the time.
CROWDED = 0.2
# Batches and rounds that measure the share of decoding: it differs little from batch to batch.
NUM_SHARE_BATCHES = 4
NUM_SHARE_ROUNDS = 3
_TASKS = Path("/proc/self/task")


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """One stage in one epoch, summed over its threads."""

    threads: int = 1
    busy_s: float
    waiting_s: float = 0.0
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
    """From the store, shard indexes included."""
    stages: dict[str, StageTimes]
    """In the order of the data path."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The stage for which the others wait, the reason, and the advice."""

    bottleneck: str
    why: str
    turn: tuple[str, ...]


@click.command(short_help="Show where a loader's time goes, and which setting to change.")
@job_options
@click.option(
    "--epochs",
    default=2,
    show_default=True,
    type=click.IntRange(min=1),
    help="Number of epochs. The first one stages the shards that are not cached yet.",
)
@click.option(
    "--num-threads",
    type=click.IntRange(min=1),
    help="Decoding threads.  [default: the cores that this process may use]",
)
@click.option("--prefetch-queue-depth", type=click.IntRange(min=1), help="Batches decoded ahead.  [default: 2]")
@click.option("--num-fetchers", type=click.IntRange(min=1), help="Threads that fetch shards.  [default: 8]")
@click.option(
    "--compute-ms",
    default=0.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Milliseconds of a training step after each batch; 0 measures the loader's own limit.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a Chrome trace of the stages here, trace.json; https://ui.perfetto.dev opens it.",
)
@json_option
def profile(
    *,
    epochs: int,
    num_threads: int | None,
    prefetch_queue_depth: int | None,
    num_fetchers: int | None,
    compute_ms: float,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Run a loader on the shards at URL (ais://bucket/prefix, a glob of local tars, or a directory). Print how long
    each stage was busy and how long it waited: fetch, stage, read, inputs, decode, transform, hand-over, step.

    Then name the bottleneck, which is the stage for which the training step waits most, and the settings to change. The
    command reads the shards into the cache, as a training does, and writes no other file, unless -o names one.

    -o trace.json writes a trace that Perfetto opens: when each thread was in which stage, and when the step ran.

    For a timeline of your own training, run it under nsys or torch.profiler. They show the same stages as ranges; nsys
    also shows DALI's own ranges, one for each operator. DALI_PIPES_ANNOTATE=1 always adds our ranges, 0 never.
    """
    from dali_pipes.options import Decode
    from dali_pipes.processes.ranks import cores_of_rank
    from dali_pipes.profiling import recording
    from dali_pipes.tuning import Machine

    if output is not None:
        check_output(output, endings=(".json",), expected="a trace's name, .json", option="--output")
    job = Job(**options)
    cache = job.cache if num_fetchers is None else replace(job.cache, fetchers=num_fetchers)
    asked = Decode(threads=num_threads, queue_depth=prefetch_queue_depth)
    with contextlib.ExitStack() as stack:
        trace = None if output is None else stack.enter_context(recording())
        loader = stack.enter_context(job.open(cache=cache, decode=asked))
        profiles = profile_loader(loader, epochs=epochs, compute_s=compute_ms / 1000, trace=trace)
        decode = loader.parts.decode
    on_gpu = decode.device_id is not None
    diagnose = partial(find_bottleneck, cores=cores_of_rank(), batch_size=job.batch_size, on_gpu=on_gpu)
    found = [(epoch, diagnose(epoch)) for epoch in profiles]
    if as_json:
        used = {
            "num_threads": decode.num_threads,
            "prefetch_queue_depth": decode.prefetch_queue_depth,
            "num_fetchers": cache.fetchers,
            "compute_ms": compute_ms,
            "decoded_on_gpu": on_gpu,
        }
        report = {
            "machine": asdict(Machine.here(decode.device_id)),
            "options": job.to_json() | used,
            "epochs": [asdict(epoch) | asdict(diagnosis) for epoch, diagnosis in found],
        }
        click.echo(json.dumps(report))
    else:
        click.echo("\n\n".join(_text(epoch, diagnosis) for epoch, diagnosis in found))
    if output is not None and trace is not None:
        with writing(output):
            num_bytes = trace.write(output)
        print_note(f"wrote {output}, {format_bytes(num_bytes)}; open it in https://ui.perfetto.dev")


def _text(epoch: EpochProfile, found: Diagnosis) -> str:
    share, rate = epoch.stages["step"].waiting_s / epoch.wall_s, epoch.num_samples / epoch.wall_s
    lines = [
        f"epoch {epoch.epoch}: {epoch.num_samples} samples in {epoch.wall_s:.2f} s ({rate:.0f} samples/s), "
        f"{format_bytes(epoch.fetched_bytes)} fetched; the step waits for {share:.0%} of it",
        f"{'stage':<10} {'threads':>7} {'busy s':>8} {'waiting s':>9} {'busy':>5}",
    ]
    for name, times in epoch.stages.items():
        busy = times.busy_s / (times.threads * epoch.wall_s)
        lines.append(f"{name:<10} {times.threads:>7} {times.busy_s:>8.2f} {times.waiting_s:>9.2f} {busy:>5.0%}")
    lines.append(f"bottleneck: {found.bottleneck}: {found.why}")
    return "\n".join([*lines, *(f"  try: {text}" for text in found.turn)])


# The measurement


def profile_loader(
    loader: "Loader", *, epochs: int, compute_s: float = 0.0, trace: "Trace | None" = None
) -> list[EpochProfile]:
    """Iterate a new loader, and measure the times of each epoch; sleep ``compute_s`` in place of each training step."""
    decode = loader.parts.decode
    decode.waits_on_host = True  # otherwise the waiting for a GPU would not be measured
    first_batches: list[BatchInputs] = []
    decode.taken = first_batches
    profiles = [_measure_epoch(loader, compute_s=compute_s, trace=trace) for _ in range(epochs)]
    share = _decode_share(decode, first_batches)
    for profile in profiles:
        both = profile.stages["decode"]
        profile.stages["decode"] = replace(both, busy_s=share * both.busy_s)
        profile.stages["transform"] = replace(both, busy_s=(1 - share) * both.busy_s)
    return profiles


def _measure_epoch(loader: "Loader", *, compute_s: float, trace: "Trace | None") -> EpochProfile:
    """Measure one epoch; ``decode`` and ``transform`` both have all work of DALI's threads."""
    decode = loader.parts.decode
    before = _read_counters(loader)
    num_samples = num_batches = 0
    first_batch_s = 0.0
    started = time.perf_counter()
    batches = iter(loader)
    epoch = loader.epoch
    for _ in batches:
        came = time.perf_counter()
        first_batch_s = first_batch_s or came - started
        num_batches, num_samples = num_batches + 1, num_samples + loader.num_valid
        if decode.taken is not None and len(decode.taken) == NUM_SHARE_BATCHES:
            decode.taken = None
        if compute_s:
            time.sleep(compute_s)
        if trace is not None:
            trace.add("step", came, time.perf_counter())
    wall_s = time.perf_counter() - started
    if trace is not None:
        trace.add(f"epoch {epoch}", started, started + wall_s)
    took = {name: max(0.0, value - before[name]) for name, value in _read_counters(loader).items()}
    num_fetchers = loader.parts.stager.num_threads
    # On a GPU each decoder has as many threads of its own.
    num_threads = decode.num_threads * (1 if decode.device_id is None else 1 + decode.num_decoders)
    in_loader_s = took["loader_seconds"]

    def in_threads(threads: int, busy_s: float, queued_s: float = 0.0) -> StageTimes:
        waiting_s = max(0.0, threads * wall_s - busy_s)
        return StageTimes(threads=threads, busy_s=busy_s, waiting_s=waiting_s, queued_s=queued_s)

    of_dali = in_threads(num_threads, took["decode"], took["queued"])
    return EpochProfile(
        epoch=epoch,
        num_samples=num_samples,
        num_batches=num_batches,
        wall_s=wall_s,
        first_batch_s=first_batch_s,
        fetched_bytes=int(took["fetched_bytes"]),
        stages={
            "fetch": in_threads(num_fetchers, took["fetch"]),
            "stage": in_threads(num_fetchers, max(0.0, took["stage"] - took["fetch"])),
            "read": StageTimes(busy_s=took["read"] + took["read_wait_seconds"], waiting_s=took["shard_wait_seconds"]),
            "inputs": StageTimes(busy_s=took["inputs"]),
            "decode": of_dali,
            "transform": of_dali,
            "hand-over": StageTimes(busy_s=took["hand-over"], waiting_s=took["decode_wait_seconds"]),
            "step": StageTimes(busy_s=wall_s - in_loader_s, waiting_s=in_loader_s),
        },
    )


def _read_counters(loader: "Loader") -> dict[str, float]:
    """Read the loader's figures and seconds by stage, summed over threads since the loader or its threads were made."""
    counts, stager = loader.parts.counts, loader.parts.stager
    on_core_ns = queued_ns = 0  # of DALI's threads: on a core, and ready without a free core
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError, ValueError):  # a thread may end meanwhile
            if (task / "comm").read_text().startswith("[DALI]"):
                on_core, queued, *_ = (int(text) for text in (task / "schedstat").read_text().split())
                on_core_ns, queued_ns = on_core_ns + on_core, queued_ns + queued
    return loader.stats() | {
        "fetch": stager.fetch_time.seconds(),
        "stage": stager.stage_time.seconds(),
        "read": counts.read.seconds(),
        "inputs": counts.inputs.seconds(),
        "decode": on_core_ns / 1e9,
        "queued": queued_ns / 1e9,
        "hand-over": counts.hand_over.seconds(),
    }


def _decode_share(decode: "DecodePipeline", batches: "Sequence[BatchInputs]") -> float:
    """Measure the share of decoding in DALI's work for a batch, 0 to 1, with a second pipeline that only decodes.

    On the CPU this is the share of CPU time. On a GPU it is the share of the time that a batch takes alone, because
    nothing counts the time for which the GPU's engines are busy.
    """
    if not decode.num_decoders:
        return 0.0
    clock = time.process_time if decode.device_id is None else partial(synchronised_clock, decode)
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


# The diagnosis

# Advice by the stage of the thread that iterates, or by the state of the threads that the stage has.
_FASTER_CACHE = "Cache(directory=) in memory (/dev/shm) or on a faster disk: shards are written and read there"
_ADVICE = {
    "step": ("nothing in the loader; fewer threads, Decode(threads=), leave more cores to the training",),
    "read": ("a larger batch_size: reading costs one call a batch", _FASTER_CACHE),
    "inputs": (
        "the graph's arrays and parsers (components.array, .json, .parsed, .npy), which run in the thread that "
        "iterates: do less there, or do it once in advance: dali-pipes prep transform",
    ),
    "hand-over": ("a larger batch_size", "Outputs(keys=False), where keys are not used"),
    "decode": (
        "smaller photos, made once: dali-pipes prep recode --short-side N; or a graph that decodes a crop only",
    ),
    "transform": ("the graph: fused operators (crop_mirror_normalize), dtype='uint8' or 'float16', a smaller crop",),
}


def find_bottleneck(epoch: EpochProfile, *, cores: int, batch_size: int, on_gpu: bool) -> Diagnosis:
    """Find the stage for which the step waits most.

    The step waits for one of five things: shards (``read`` waits), decoded batches (``hand-over`` waits), or one of the
    three stages that work in the thread that iterates.
    """
    waited_s = epoch.stages["step"].waiting_s
    if waited_s < KEEPS_UP * epoch.wall_s:
        why = f"the step waits for {waited_s / epoch.wall_s:.1%} of the time: the loader is fast enough"
        return Diagnosis(bottleneck="step", why=why, turn=_ADVICE["step"])
    waits = {name: epoch.stages[name].busy_s for name in ("read", "inputs", "hand-over")}
    waits |= {"shards": epoch.stages["read"].waiting_s, "batches": epoch.stages["hand-over"].waiting_s}
    longest = max(waits, key=lambda cause: waits[cause])
    found = Diagnosis(bottleneck=longest, why="work in the thread that iterates", turn=_ADVICE.get(longest, ()))
    if longest == "shards":
        found = _slow_shards(epoch)
    elif longest == "batches":
        found = _slow_batches(epoch, cores=cores, batch_size=batch_size, on_gpu=on_gpu)
    why = f"of the {waited_s:.2f} s that the step waits, {waits[longest]:.2f} s are for {found.why}"
    return replace(found, why=why)


def _slow_shards(epoch: EpochProfile) -> Diagnosis:
    fetch, stage = epoch.stages["fetch"], epoch.stages["stage"]
    why = f"shards ({format_bytes(int(epoch.fetched_bytes / epoch.wall_s))}/s came)"
    if stage.busy_s > fetch.busy_s:
        return Diagnosis(bottleneck="stage", why=why, turn=(_FASTER_CACHE,))
    advice = ["the fetchers were not all busy: Cache(max_bytes=) to stage more ahead, or more and smaller shards"]
    if fetch.busy_s > ALL_BUSY * fetch.threads * epoch.wall_s:
        advice = ["more fetchers, Cache(fetchers=): all were busy; else the network or the store is at its limit"]
    advice += ["Cache(directory=, max_bytes=): a local disk for all shards; later epochs and jobs fetch nothing"]
    if epoch.first_batch_s > 0.5 * epoch.wall_s:
        advice += ["dali-pipes cache warm, before the job: the first batch waits for all shards that it names"]
    return Diagnosis(bottleneck="fetch", why=why, turn=tuple(advice))


def _slow_batches(epoch: EpochProfile, *, cores: int, batch_size: int, on_gpu: bool) -> Diagnosis:
    decode, transform = epoch.stages["decode"], epoch.stages["transform"]
    threads, capacity = decode.threads, decode.threads * epoch.wall_s
    busy = (decode.busy_s + transform.busy_s) / capacity
    queued = min(1.0, decode.queued_s / capacity)  # DALI has more threads than those that decode
    why = f"batches being decoded; DALI's {threads} threads are busy for {busy:.0%} of the time"
    if queued > CROWDED:
        why += f", and for {queued:.0%} ready with no core free"
        advice = ["fewer threads, Decode(threads=), or fewer other processes: they compete for cores"]
    elif busy >= ALL_BUSY:
        advice = [f"more threads, Decode(threads=): {threads} of {cores} cores decode"]
        if threads >= cores:
            advice = ["more cores" if on_gpu else "more cores, or device='gpu': all cores decode"]
    else:
        advice = ["Decode(queue_depth=3) or more: threads are idle between batches"]
        advice += ["a larger batch_size: each thread has few samples"] if batch_size < 8 * threads else []
    advice += ["Decode(engine_share=): dali-pipes tune URL"] if on_gpu else []
    slower = "decode" if decode.busy_s >= transform.busy_s else "transform"
    return Diagnosis(bottleneck=slower, why=why, turn=(*advice, *_ADVICE[slower]))
