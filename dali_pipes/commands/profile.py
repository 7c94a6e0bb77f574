"""``dali-pipes profile``: show how long each stage of a loader works and waits, find the bottleneck, give advice."""

import contextlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from dali_pipes.commands.epoch_profile import EpochProfile, profile_loader
from dali_pipes.commands.options import format_bytes, json_option
from dali_pipes.commands.output import PAGES, check_output, print_note, writing
from dali_pipes.commands.tune import Job, job_options

# A loader is fast enough if the step waits for less than this share of the time.
KEEPS_UP = 0.05
# Threads count as all busy above this share of the time: a few threads idle during a batch's last samples.
ALL_BUSY = 0.75
# Threads compete with others for cores if they are ready, without a free core, for more than this share of the time.
CROWDED = 0.2


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
    help="Write a page with a timeline of the stages here, page.html.",
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

    Then name the bottleneck, which is the stage for which the training step waits most, and the settings to change; and
    the memory of the process, and of the cache file, which is not a part of it. The command reads the shards into the
    cache, as a training does, and writes no other file, unless -o names one.

    -o page.html writes a page that needs no other file: when each stage worked and waited, and the stalls, which are
    waits for a batch that take much longer than the others, with their causes.

    For a timeline of your own training, run it under nsys or torch.profiler. They show the same stages as ranges; nsys
    also shows DALI's own ranges, one for each operator. DALI_PIPES_ANNOTATE=1 always adds our ranges, 0 never.
    """
    from dali_pipes.commands.step_clock import StepClock
    from dali_pipes.options import Decode
    from dali_pipes.processes.programs import ResidentMemory
    from dali_pipes.processes.ranks import cores_of_rank
    from dali_pipes.profiling import recording
    from dali_pipes.tuning import Machine

    if output is not None:
        check_output(output, endings=PAGES, expected="a page's name, .html", option="--output")
    job = Job(**options)
    cache = job.cache if num_fetchers is None else replace(job.cache, fetchers=num_fetchers)
    asked = Decode(threads=num_threads, queue_depth=prefetch_queue_depth)
    with contextlib.ExitStack() as stack:
        recorder = stack.enter_context(recording(with_ranges=output is not None))
        loader = stack.enter_context(job.open(cache=cache, decode=asked))
        clock = None if output is None else stack.enter_context(StepClock())
        profiles = profile_loader(loader, epochs=epochs, recorder=recorder, compute_s=compute_ms / 1000, clock=clock)
        decode, share = loader.parts.decode, loader.parts.share
        is_in_memory = share.space.is_memory
        memory = {
            **asdict(ResidentMemory.now()),
            "cache_bytes": share.taken_bytes,
            "cache_directory": str(share.space.directory),
        }
        settings = {
            "num_threads": decode.num_threads,
            "prefetch_queue_depth": decode.prefetch_queue_depth,
            "num_fetchers": cache.fetchers,
        }
    cores, on_gpu = cores_of_rank(), decode.device_id is not None
    diagnoses = [
        find_bottleneck(epoch, cores=cores, batch_size=job.batch_size, on_gpu=on_gpu, is_in_memory=is_in_memory)
        for epoch in profiles
    ]
    if as_json:
        used = {**settings, "compute_ms": compute_ms, "cores": cores, "decoded_on_gpu": on_gpu}
        report = {
            "machine": asdict(Machine.here(decode.device_id)),
            "options": {**job.to_json(), **used},
            "memory": memory,
            "epochs": [asdict(epoch) | asdict(found) for epoch, found in zip(profiles, diagnoses, strict=True)],
        }
        click.echo(json.dumps(report))
    else:
        click.echo("\n\n".join(_text(epoch, found) for epoch, found in zip(profiles, diagnoses, strict=True)))
        click.echo("\n" + _memory_text(memory))
    if output is not None and clock is not None and recorder.ranges is not None:
        from dali_pipes.commands.profile_page import profile_page
        from dali_pipes.commands.timeline import timeline_of

        timelines = [
            timeline_of(
                steps,
                recorder.ranges,
                clock,
                decode_threads=settings["num_threads"],
                num_fetchers=times.of("fetch").threads,
            )
            for steps, times in zip(clock.epochs, profiles, strict=True)
        ]
        told = {**settings, "batch_size": job.batch_size, "compute_ms": compute_ms, "cores": cores}
        html = profile_page(
            job.shards, timelines, profiles, diagnoses, settings=[(name, str(value)) for name, value in told.items()]
        )
        with writing(output):
            output.write_text(html, encoding="utf-8")
        print_note(f"wrote {output}, {format_bytes(len(html.encode()))}")


def _memory_text(memory: dict[str, Any]) -> str:
    own, files, shared, cached = (
        format_bytes(memory[name]) for name in ("own_bytes", "file_bytes", "shared_bytes", "cache_bytes")
    )
    return (
        f"memory of this process: {own} of its own, {files} of mapped files, {shared} of mapped shared memory; not "
        f"among these: {cached} of the cache file in {memory['cache_directory']}"
    )


def _text(epoch: EpochProfile, found: Diagnosis) -> str:
    share = epoch.of("step").waiting_s / epoch.wall_s
    fetched = f", {epoch.fetched_bytes / 2**20:.0f} MiB fetched" if epoch.fetched_bytes else ""
    lines = [
        f"epoch {epoch.epoch}: {epoch.num_samples} samples in {epoch.wall_s:.2f} s "
        f"({epoch.num_samples / epoch.wall_s:.0f} samples/s){fetched}; the step waits for {share:.0%} of it",
        f"{'stage':<10} {'threads':>7} {'busy s':>8} {'waiting s':>9} {'busy':>5}",
    ]
    for times in epoch.stages:
        capacity = times.threads * epoch.wall_s
        busy = f"{times.busy_s / capacity:.0%}" if capacity else "-"
        lines.append(f"{times.stage:<10} {times.threads:>7} {times.busy_s:>8.2f} {times.waiting_s:>9.2f} {busy:>5}")
    return "\n".join(
        [*lines, f"bottleneck: {found.bottleneck}: {found.why}", *(f"  try: {text}" for text in found.turn)]
    )


_IN_THIS_THREAD = "work in the thread that iterates"
_INPUTS = Diagnosis(
    bottleneck="inputs",
    why=_IN_THIS_THREAD,
    turn=(
        "the graph's arrays and parsers (components.array, .json, .parsed, .npy): they run in Python, in the thread "
        "that iterates; do less there, or do it once in advance: dali-pipes prep transform",
    ),
)
_HAND_OVER = Diagnosis(
    bottleneck="hand-over",
    why=_IN_THIS_THREAD,
    turn=("a larger batch_size", "Outputs(keys=False), where keys are not used"),
)


def find_bottleneck(
    epoch: EpochProfile, *, cores: int, batch_size: int, on_gpu: bool, is_in_memory: bool = True
) -> Diagnosis:
    """Find the stage for which the step waits most.

    The step waits for one of five things: shards (``read`` waits), decoded batches (``hand-over`` waits), or one of the
    three stages that work in the thread that iterates.
    """
    waited_s = epoch.of("step").waiting_s
    share = waited_s / epoch.wall_s if epoch.wall_s else 0.0
    if share < KEEPS_UP:
        return Diagnosis(
            bottleneck="step",
            why=f"the step waits for {share:.1%} of the time: the loader is fast enough",
            turn=("nothing in the loader; fewer threads, Decode(threads=), leave more cores to the training",),
        )
    read, inputs, hand_over = epoch.of("read"), epoch.of("inputs"), epoch.of("hand-over")
    causes = [
        (read.waiting_s, _shards(epoch, is_in_memory=is_in_memory)),
        (hand_over.waiting_s, _decoding(epoch, cores=cores, batch_size=batch_size, on_gpu=on_gpu)),
        (read.busy_s, _reading(is_in_memory=is_in_memory)),
        (inputs.busy_s, _INPUTS),
        (hand_over.busy_s, _HAND_OVER),
    ]
    longest_s, found = max(causes, key=lambda cause: cause[0])
    why = f"of the {waited_s:.2f} s that the step waits, {longest_s:.2f} s are for {found.why}"
    return replace(found, why=why)


def _shards(epoch: EpochProfile, *, is_in_memory: bool) -> Diagnosis:
    fetch, stage = epoch.of("fetch"), epoch.of("stage")
    name = "stage" if stage.busy_s > fetch.busy_s else "fetch"
    turn = []
    if name == "fetch":
        if fetch.busy_s > ALL_BUSY * fetch.threads * epoch.wall_s:
            turn.append(
                "more fetchers, Cache(fetchers=): all were busy; if that changes nothing, the network or the store is "
                "at its limit"
            )
        else:
            turn.append(
                "the fetchers were not all busy: Cache(max_bytes=) to stage more ahead, or more and smaller shards"
            )
        turn.append("Cache(directory=, max_bytes=): a local disk for all shards; later epochs and jobs fetch nothing")
    elif not is_in_memory:
        turn.append("Cache(directory=) in memory (/dev/shm) or on a faster disk: shards are written and synced there")
    if epoch.first_batch_s > 0.5 * epoch.wall_s:
        turn.append("Shuffle(ramp_up=True): the first batch then waits for one shard only")
    rate = epoch.fetched_bytes / 2**20 / epoch.wall_s
    return Diagnosis(bottleneck=name, why=f"shards ({rate:.0f} MiB/s came)", turn=tuple(turn))


def _decoding(epoch: EpochProfile, *, cores: int, batch_size: int, on_gpu: bool) -> Diagnosis:
    decode, transform = epoch.of("decode"), epoch.of("transform")
    name = "decode" if decode.busy_s >= transform.busy_s else "transform"
    threads = decode.threads
    capacity = threads * epoch.wall_s
    busy = (decode.busy_s + transform.busy_s) / capacity if capacity else 0.0
    queued = decode.queued_s / capacity if capacity else 0.0
    why = f"batches being decoded; DALI's {threads} threads are busy for {busy:.0%} of the time"
    turn = []
    if queued > CROWDED:
        why += f", and for {queued:.0%} ready with no core free"
        turn.append("fewer threads, Decode(threads=), or fewer other processes: they compete for cores")
    elif busy >= ALL_BUSY and threads < cores:
        turn.append(f"more threads, Decode(threads=): {threads} of {cores} cores decode")
    elif busy >= ALL_BUSY:
        turn.append("more cores" if on_gpu else "more cores, or device='gpu': all cores decode")
    else:
        turn.append("Decode(queue_depth=3) or more: threads are idle between batches")
        if batch_size < 8 * threads:
            turn.append(f"a larger batch_size: {batch_size} samples are few for {threads} threads")
    if on_gpu:
        turn.append("Decode(engine_share=): dali-pipes tune URL")
    if name == "decode":
        turn.append(
            "smaller photos, made once: dali-pipes prep recode --short-side N; or a graph that decodes a crop only"
        )
    else:
        turn.append("the graph: fused operators (crop_mirror_normalize), dtype='uint8' or 'float16', a smaller crop")
    return Diagnosis(bottleneck=name, why=why, turn=tuple(turn))


def _reading(*, is_in_memory: bool) -> Diagnosis:
    turn = ["a larger batch_size: reading costs one call a batch"]
    if not is_in_memory:
        turn.append("Cache(directory=) in memory (/dev/shm) or on a faster disk: the cache file is on a disk")
    return Diagnosis(bottleneck="read", why=_IN_THIS_THREAD, turn=tuple(turn))
