"""``dali-pipes tune``: find the settings with which this machine decodes fastest, and write them to a tuning file.

Batches of the given shards are decoded over and over. One setting is varied at a time: first the threads, then the
share of the JPEG engines, then the batches decoded ahead. Only the decode pipeline is timed, fed from memory. A
loader's other settings (cache, fetchers) depend on the store and the disk; `dali-pipes profile` shows if these are the
limit.
"""

import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dali_pipes.commands.job import Job, job_options
from dali_pipes.commands.options import json_option
from dali_pipes.progress import bar

if TYPE_CHECKING:
    from dali_pipes.graph.batch_inputs import BatchInputs
    from dali_pipes.graph.decode import DecodePipeline
    from dali_pipes.tuning import Settings, Tuning


# 0.12 is what DALI's own benchmark uses on a Hopper machine with 70 threads; 0.65 is DALI's default.
HW_DECODER_LOADS = (0.0, 0.12, 0.25, 0.4, 0.5, 0.65, 0.8, 0.9, 1.0)
# Not 1, although it is as fast without a training: a slow batch or a training step would then delay the next batch.
PREFETCH_DEPTHS = (2, 3, 4)
# A setting that costs more threads or memory must be faster by this share: short runs of one setting differ as much.
MIN_GAIN = 0.03
# Each candidate is timed this number of times, in turns with the others; its median counts.
NUM_ROUNDS = 3
# Batches that are kept in memory to be decoded.
NUM_BATCHES = 8
# Batches that are not timed: the first ones allocate.
NUM_WARM_UP = 2

Rate = Callable[["Settings", float], float]


def thread_counts(cores: int) -> list[int]:
    """List the numbers of decoding threads to try: powers of two, three quarters of the cores, all cores.

    >>> thread_counts(16), thread_counts(2)
    ([1, 2, 4, 8, 12, 16], [1, 2])
    """
    powers = [1 << power for power in range(cores.bit_length()) if 1 << power <= cores]
    return sorted({*powers, *([3 * cores // 4] if cores >= 8 else []), cores})


def pick(rates: Mapping[Any, float]) -> Any:
    """Pick the first setting that no other one beats by more than `MIN_GAIN`.

    >>> pick({1: 100.0, 2: 190.0, 4: 250.0, 8: 252.0})
    4
    """
    best = max(rates.values())
    return next(setting for setting, rate in rates.items() if rate * (1 + MIN_GAIN) >= best)


def search(
    rate: Rate, *, cores: int, on_gpu: bool, budget_s: float, show: bool = True
) -> "tuple[Settings, dict[str, dict[Any, float]]]":
    """Find the fastest settings, and return them with the measured rates.

    ``rate`` measures the samples/s of settings, for this number of seconds. Settings that are not timed within
    ``budget_s`` seconds keep their defaults. The rates are, for each of ``num_threads``, ``hw_decoder_load`` and
    ``prefetch_queue_depth`` that was timed, the samples/s of each candidate.
    """
    from dali_pipes.tuning import PREFETCH_QUEUE_DEPTH, Settings

    deadline = time.monotonic() + budget_s
    candidates: dict[str, Sequence[Any]] = {"num_threads": thread_counts(cores)}
    if on_gpu:
        candidates["hw_decoder_load"] = HW_DECODER_LOADS
    candidates["prefetch_queue_depth"] = PREFETCH_DEPTHS
    num_runs = NUM_ROUNDS * sum(len(values) for values in candidates.values())
    # Half of the time goes into making pipelines and their first batches.
    run_s = 0.5 * budget_s / num_runs
    found = Settings(num_threads=cores, prefetch_queue_depth=PREFETCH_QUEUE_DEPTH)
    timed: dict[str, dict[Any, float]] = {}
    with bar(what="tune", total=num_runs, unit="run", shown=show) as drawn:
        for name, values in candidates.items():
            runs: dict[Any, list[float]] = {value: [] for value in values}
            for _ in range(NUM_ROUNDS):
                for value in values:
                    if time.monotonic() < deadline:
                        runs[value].append(rate(replace(found, **{name: value}), run_s))
                    drawn.update(1)
            if not all(runs.values()):
                break
            rates = timed[name] = {value: statistics.median(measured) for value, measured in runs.items()}
            # Fewer threads and fewer batches ahead cost less; all shares of the engines cost the same.
            chosen = max(rates, key=lambda value: rates[value]) if name == "hw_decoder_load" else pick(rates)
            found = replace(found, **{name: chosen})
    return found, timed


def samples_per_s(decode: "DecodePipeline", batches: "Sequence[BatchInputs]", *, seconds: float) -> float:
    """Measure how fast a pipeline decodes these batches, over and over, with its queue full as a loader keeps it."""
    decode.feed = itertools.cycle(batches).__next__
    for _ in range(decode.prefetch_queue_depth):
        decode.schedule()
    started, num_samples = 0.0, 0
    for num_batches in itertools.count(1):
        inputs, _ = decode.take()
        decode.schedule()
        if num_batches == NUM_WARM_UP:
            _synchronise(decode)
            started = time.perf_counter()
        elif num_batches > NUM_WARM_UP:
            num_samples += len(inputs.batch)
            # At least two batches, however short the time is: the time of a single batch varies too much.
            if time.perf_counter() - started >= seconds and num_batches >= 2 * NUM_WARM_UP:
                break
    _synchronise(decode)
    elapsed_s = time.perf_counter() - started
    decode.drain()
    return num_samples / elapsed_s


def _synchronise(decode: "DecodePipeline") -> None:
    if decode.device_id is not None:
        import torch

        torch.cuda.synchronize(decode.device_id)


def tune_job(job: Job, *, cores: int, budget_s: float, show: bool = True) -> "Tuning":
    """Find the settings for a job on this machine, with this number of cores for each rank.

    The search starts when the first batches have been read, and takes ``budget_s`` seconds.
    """
    from dali_pipes.tuning import Machine, Tuning

    with job.open(cache=replace(job.cache, show_progress=show)) as loader:
        decode = loader.parts.decode
        batches: list[BatchInputs] = []
        decode.taken = batches
        for _ in range(min(NUM_BATCHES, len(loader))):
            next(loader)
        decode.taken = None
        # The last one may be short.
        batches = [inputs for inputs in batches if len(inputs.batch) == job.batch_size] or batches

        def rate(settings: "Settings", seconds: float) -> float:
            with contextlib.closing(decode.second_pipeline(**asdict(settings))) as pipeline:
                return samples_per_s(pipeline, batches, seconds=seconds)

        settings, timed = search(rate, cores=cores, on_gpu=decode.device_id is not None, budget_s=budget_s, show=show)
        rates = {name: {str(value): round(rate, 1) for value, rate in rates.items()} for name, rates in timed.items()}
        machine = replace(Machine.here(decode.device_id), cores=cores)
        measured = {"job": job.to_json(), "cores": cores, "samples_per_s": rates}
        return Tuning(machine=machine, settings=settings, measured=measured)


@click.command(short_help="Find the threads and the share of the JPEG engines for this machine.")
@job_options
@click.option(
    "-o",
    "--output",
    default=Path("tuning.json"),
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The tuning file. Pass it to loaders as Decode(tuning=), or name it in DALI_PIPES_TUNING.",
)
@click.option(
    "--ranks",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Number of ranks that will share this machine's cores; the file is valid for this number only.",
)
@click.option(
    "--seconds",
    default=90.0,
    show_default=True,
    type=click.FloatRange(min=0.1),
    help="Seconds for the search; staging the first shards takes additional time.",
)
@json_option
def tune(*, output: Path, ranks: int, seconds: float, as_json: bool, **options: Any) -> None:
    """Find the settings with which this machine decodes fastest, and write them to a tuning file.

    The command decodes batches of the shards at URL (ais://bucket/prefix, a glob of local tars, or a directory). It
    varies the number of threads, the number of batches decoded ahead and, on a GPU, the share of the JPEG engines. It
    reads the first shards into the cache. Run it while no other program needs the cores: otherwise it measures less
    than the machine can do. The settings change the speed, but not the samples or their order.
    """
    if output.exists() and not output.is_file():
        raise ValueError(f"-o '{output}': expected a file")
    if not output.resolve().parent.is_dir():
        raise ValueError(f"-o '{output}': no such directory '{output.parent}'")
    from dali_pipes.processes.ranks import cores_of_rank

    cores = max(1, cores_of_rank() // ranks)
    found = tune_job(Job(**options), cores=cores, budget_s=seconds, show=not as_json)
    found.write(output)
    if as_json:
        click.echo(json.dumps({**asdict(found), "output": str(output)}))
        return
    for name, rates in found.measured["samples_per_s"].items():
        chosen = str(getattr(found.settings, name))
        figures = ", ".join(f"{value}{'*' if value == chosen else ''}: {rate:.0f}" for value, rate in rates.items())
        click.echo(f"{name}  (samples/s)  {figures}")
    kept = found.settings
    share = "" if kept.hw_decoder_load is None else f", hw_decoder_load {kept.hw_decoder_load}"
    click.echo(
        f"wrote '{output}': num_threads {kept.num_threads}, prefetch_queue_depth {kept.prefetch_queue_depth}{share}"
    )
