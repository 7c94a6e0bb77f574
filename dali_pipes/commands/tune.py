"""The loader that ``profile`` and ``tune`` run, `Job`; and ``dali-pipes tune``, which finds the fastest settings.

Batches of the given shards are decoded over and over. One setting is varied at a time: first the threads, then the
share of the JPEG engines, then the batches decoded ahead. Only the decode pipeline is timed, fed from memory. A
loader's other settings (cache, fetchers) depend on the store and the disk; `dali-pipes profile` shows if these are the
limit.
"""

import contextlib
import functools
import importlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dali_pipes.commands.options import cache_bytes_option, cluster_options, endpoint_for, join_options, json_option
from dali_pipes.commands.output import print_note
from dali_pipes.progress import bar
from dali_pipes.store.patience import current_patience

if TYPE_CHECKING:
    from dali_pipes.graph.decode import BatchInputs, DecodePipeline
    from dali_pipes.graph.definition import Graph
    from dali_pipes.graph.inputs import Components
    from dali_pipes.graph.random import Random
    from dali_pipes.iterator import Loader
    from dali_pipes.options import Cache
    from dali_pipes.tuning import Settings


GRAPHS = ("segmentation", "classification_train", "classification_eval")
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

# The argument URL and the options that make a `Job`; a command takes them as ``**options``.
job_options = join_options(
    click.argument("shards", metavar="URL"),
    click.option(
        "--graph",
        help=f"The graph: {', '.join(GRAPHS)}, or your own function as package.module:function.  [default: "
        "segmentation if the data set has masks, else classification_train]",
    ),
    click.option("--crop", type=click.IntRange(min=1), help="Side of the crop in pixels.  [default: the graph's own]"),
    click.option("--photo", help="Component that holds the photo.  [default: the only one]"),
    click.option("--mask", help="Component that holds the mask.  [default: the only one]"),
    click.option("--batch-size", default=64, show_default=True, type=click.IntRange(min=1), help="Samples in a batch."),
    click.option(
        "--device",
        default="auto",
        show_default=True,
        type=click.Choice(["auto", "cpu", "gpu"]),
        help="Where batches are decoded; auto takes a GPU if there is one.",
    ),
    click.option(
        "--cache",
        "cache_dir",
        type=click.Path(file_okay=False, path_type=Path),
        help="Directory for the cache file.  [default: /dev/shm, or the directory for temporary files]",
    ),
    cache_bytes_option,
    cluster_options,
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """The arguments of a training's loader."""

    shards: str
    graph: str | None
    """``None``: by what the data set has, see `ChosenGraph`."""
    crop: int | None
    photo: str | None
    mask: str | None
    batch_size: int
    device: Any
    cache_dir: Path | None
    cache_bytes: int | None
    endpoint: str | None
    embedded_dir: Path | None

    @property
    def cache(self) -> "Cache":
        from dali_pipes.options import Cache

        patience = current_patience()
        return Cache(
            directory=self.cache_dir,
            max_bytes=self.cache_bytes,
            patience_s=patience.patience_s,
            start_patience_s=patience.start_s,
        )

    @functools.cached_property
    def made_graph(self) -> "Graph":
        return find_graph(self.graph, crop=self.crop, photo=self.photo, mask=self.mask)

    @contextlib.contextmanager
    def open(self, **options: Any) -> "Iterator[Loader]":
        """Open the loader, with more of its arguments."""
        import dali_pipes as dp

        graph = self.made_graph
        with (
            endpoint_for(self.shards, self.endpoint, self.embedded_dir) as endpoint,
            dp.loader(
                self.shards,
                graph,
                batch_size=self.batch_size,
                device=self.device,
                endpoint=endpoint,
                # One process, even under a launcher.
                rank=0,
                world_size=1,
                **({"cache": self.cache} | options),
            ) as loader,
        ):
            if isinstance(graph, ChosenGraph):
                masks = "masks" if graph.name == "segmentation" else "no masks"
                print_note(f"graph: {graph.name}, because the data set has {masks}; see --graph")
            yield loader

    def to_json(self) -> dict[str, Any]:
        """List the arguments on which measurements depend, without endpoint and directories, which name machines.

        The graph is known when the loader has been opened.
        """
        names = ("graph", "crop", "batch_size", "device", "cache_bytes")
        chosen = {"graph": self.made_graph.name} if isinstance(self.made_graph, ChosenGraph) else {}
        return {name: getattr(self, name) for name in names} | chosen


@dataclass(eq=False)
class ChosenGraph:
    """A graph that is `segmentation` on a data set with masks, or if ``mask`` is named, else `classification_train`."""

    crop: int | None = None
    photo: str | None = None
    mask: str | None = None
    name: str = ""
    """The graph that was chosen; empty before a data set is opened with it."""

    def __call__(self, components: "Components", random: "Random") -> "Mapping[str, Any]":
        photo = components.photo(self.photo, besides=self.mask)
        is_masked = self.mask is not None or components.has_mask(photo=photo)
        self.name = "segmentation" if is_masked else "classification_train"
        return find_graph(self.name, crop=self.crop, photo=photo, mask=self.mask)(components, random)


def find_graph(name: str | None, *, crop: int | None, photo: str | None, mask: str | None) -> "Graph":
    """Make one of `GRAPHS` with these arguments, or import ``package.module:function``, which takes none of them.

    ``None`` is the graph that fits the data set: `ChosenGraph`.

    Raises:
        ValueError: If there is no such graph, or a graph without a mask is given one.
    """
    if name is None:
        return ChosenGraph(crop=crop, photo=photo, mask=mask)
    if ":" in name:
        module, _, attribute = name.partition(":")
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, here)  # modules beside a script, as `python -m` finds them
        try:
            graph: Graph = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as exc:
            raise ValueError(f"--graph '{name}': {exc}") from exc
        if not callable(graph):
            raise ValueError(f"--graph '{name}': expected a function, found {type(graph).__name__}")
        return graph
    if name not in GRAPHS:
        raise ValueError(f"--graph must be one of {', '.join(GRAPHS)}, or package.module:function, got '{name}'")
    from dali_pipes.graph import pipelines

    if mask is not None and name != "segmentation":
        raise ValueError(f"--mask '{mask}' is for --graph segmentation, got --graph {name}; drop one of them")
    arguments: dict[str, Any] = {"photo": photo} | ({} if crop is None else {"crop": crop})
    if name == "segmentation":
        arguments["mask"] = mask
    if name == "classification_eval" and crop is not None and crop > 256:
        arguments["resize"] = crop  # its default, 256, is for crops up to that
    built_in: Graph = getattr(pipelines, name)(**arguments)
    return built_in


def thread_counts(cores: int) -> list[int]:
    """List the numbers of decoding threads to try: powers of two, three quarters of the cores, all cores."""
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
    """Find the fastest settings, and return them with the samples/s of each candidate for those that were timed.

    ``rate`` measures the samples/s of settings, for this number of seconds. Settings that are not timed within
    ``budget_s`` seconds keep their defaults.
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
            started = synchronised_clock(decode)
        elif num_batches > NUM_WARM_UP:
            num_samples += len(inputs.batch)
            # At least two batches, however short the time is: the time of a single batch varies too much.
            if time.perf_counter() - started >= seconds and num_batches >= 2 * NUM_WARM_UP:
                break
    elapsed_s = synchronised_clock(decode) - started
    decode.drain()
    return num_samples / elapsed_s


def synchronised_clock(decode: "DecodePipeline") -> float:
    """The time in seconds when a GPU has done all that was launched."""
    if decode.device_id is not None:
        import torch

        torch.cuda.synchronize(decode.device_id)
    return time.perf_counter()


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
    if not output.resolve().parent.is_dir():
        raise ValueError(f"-o '{output}': no such directory '{output.parent}'")
    from dali_pipes.processes.ranks import cores_of_rank
    from dali_pipes.tuning import Machine, Tuning

    cores, job, show = max(1, cores_of_rank() // ranks), Job(**options), not as_json
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

        # The search starts when the first batches have been read.
        on_gpu = decode.device_id is not None
        settings, timed = search(rate, cores=cores, on_gpu=on_gpu, budget_s=seconds, show=show)
        all_rates = {
            name: {str(value): round(rate, 1) for value, rate in rates.items()} for name, rates in timed.items()
        }
        measured = {"job": job.to_json(), "cores": cores, "samples_per_s": all_rates}
        machine = replace(Machine.here(decode.device_id), cores=cores)
        found = Tuning(machine=machine, settings=settings, measured=measured)
    found.write(output)
    if as_json:
        click.echo(json.dumps({**asdict(found), "output": str(output)}))
        return
    for name, rates in all_rates.items():
        figures = ", ".join(f"{value}: {rate:.0f}" for value, rate in rates.items())
        click.echo(f"{name}  (samples/s)  {figures}")
    chosen = ", ".join(f"{name} {value}" for name, value in asdict(found.settings).items() if value is not None)
    click.echo(f"wrote '{output}': {chosen}")
