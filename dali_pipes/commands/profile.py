"""``dali-pipes profile``: where a loader's time goes, stage by stage, and what to turn."""

import json
from dataclasses import asdict, replace
from typing import Any

import click

from dali_pipes.commands.bottleneck import Diagnosis, find_bottleneck
from dali_pipes.commands.epoch_profile import EpochProfile, profile_loader
from dali_pipes.commands.job import Job, job_options
from dali_pipes.commands.options import json_option


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
    help="How long a training step takes for each batch; at 0 the loader's own limit is found.",
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
    stage how long it was busy and how long it waited: fetch, stage, read, inputs, decode, transform, hand-over, step.

    Then the stage for which the training step waits most is named, and what to turn. The command reads the shards into
    the cache, as a training would, and writes nothing else. For a time line, run your training under nsys or
    torch.profiler: the same stages show there as ranges, in nsys beside DALI's own ranges, which are of operators
    (DALI_PIPES_ANNOTATE=1 always, 0 never).
    """
    from dali_pipes.options import Decode
    from dali_pipes.processes.ranks import cores_of_rank
    from dali_pipes.profiling import recording
    from dali_pipes.tuning import Machine

    job = Job(**options)
    cache = job.cache if num_fetchers is None else replace(job.cache, fetchers=num_fetchers)
    asked = Decode(threads=num_threads, queue_depth=prefetch_queue_depth)
    with recording() as recorder, job.open(cache=cache, decode=asked) as loader:
        profiles = profile_loader(loader, epochs=epochs, recorder=recorder, compute_s=compute_ms / 1000)
        decode, is_in_memory = loader.parts.decode, loader.parts.share.space.is_memory
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
            "epochs": [asdict(epoch) | asdict(found) for epoch, found in zip(profiles, diagnoses, strict=True)],
        }
        click.echo(json.dumps(report))
    else:
        click.echo("\n\n".join(_text(epoch, found) for epoch, found in zip(profiles, diagnoses, strict=True)))


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
        [*lines, f"bottleneck: {found.bottleneck}: {found.why}", *(f"  turn: {text}" for text in found.turn)]
    )
