"""``bench gpu``: time decoding on a GPU under many settings, or the same code on the CPU."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch

from bench.engine.options import at_least, field_options, opened_shards, target_option, words
from bench.gpu.cases import CHECKS, SCENARIOS, default_sweeps
from bench.gpu.scenario import GpuScenario, is_done, take_scenario
from bench.gpu.workload import Workload
from bench.loaders.recipe import find_components
from bench.reports.record import write_record, write_text
from bench.reports.tables import markdown_page, report_text
from bench.tools.environment import available_cores
from bench.tools.folders import RunFolder, remove_leftovers
from bench.tools.repeat import MASK, PHOTO, draw_shards
from dali_pipes.commands.options import cluster_options, join_options

_SHARE, _COUNT = click.FloatRange(0, 1), at_least(1)
_SWEEPABLE: dict[str, click.ParamType[Any]] = {
    "hw_decoder_load": _SHARE,
    "num_threads": _COUNT,
    "batch_size": _COUNT,
    "photo_side": _COUNT,
    "progressive_share": _SHARE,
    "size_hint": _COUNT,
}


def _sweeps(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[str, tuple[Any, ...]] | None:
    """Read ``NAME=VALUE,VALUE`` of an option that may be given several times; ``None`` if it was not given."""
    found: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        name, _, values = text.replace("-", "_").partition("=")
        if name not in _SWEEPABLE:
            raise click.BadParameter(f"expected one of {', '.join(_SWEEPABLE)}, then =VALUE,..., got '{text}'")
        found[name] = tuple(_SWEEPABLE[name].convert(value, parameter, context) for value in words(values))
    return found or None


@click.command()
@click.option("--shards", help="Photos, masks and labels.  [default: drawn]")
@click.option("--scenarios", help="Comma separated; see above.  [default: rn50]")
@click.option("--all", "everything", is_flag=True, help="Run all scenarios, the most important first.")
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for the records, gpu-SCENARIO.json, and report.md. Records that are there are gone on with.",
)
@target_option("--json", "json_path", help="Write the record here.")
@click.option("--device", default="auto", type=click.Choice(["auto", "cpu", "gpu"]))
@click.option("--batch-size", type=at_least(1), help="Samples a batch.  [default: 256, on the CPU 64]")
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    callback=_sweeps,
    metavar="NAME=VALUE,...",
    help=f"What to vary, one at a time: {', '.join(_SWEEPABLE)}.  [default: all of them]",
)
@click.option("--no-sweep", is_flag=True, help="Only the base setting.")
@click.option("--photo", help="Component that holds the photo.  [default: the only one]")
@click.option("--mask", help="Component that holds the mask.  [default: the only one]")
@click.option("--num-photos", default=1024, type=at_least(1), help="Photos kept in memory.")
@join_options(*field_options(GpuScenario).values())
@click.option(
    "--minutes",
    default=8.0,
    type=click.FloatRange(min=0.01),
    help="The time of the command. What would begin later is left out, and listed; with -o the same command goes on.",
)
@cluster_options
@click.pass_context
def gpu(
    context: click.Context,
    /,
    *,
    scenarios: str | None,
    everything: bool,
    output: Path | None,
    json_path: Path | None,
    device: str,
    sweeps: dict[str, tuple[Any, ...]] | None,
    no_sweep: bool,
    minutes: float,
    **settings: Any,
) -> None:
    """Time decoding, one setting changed at a time, and print a table for each scenario:

    \b
    path    an epoch of each graph through a loader on the device: every key once, finite
    parity  pixels of the GPU's decoders against the CPU's, as a distribution
    rn50    the recipe of DALI's own benchmark, in our loader and from DALI's reader of local files
    masks   the segmentation loader, its masks decoded on the CPU or beside the photos
    decode  decoding alone: the JPEG engines' share, progressive photos, sizes, preallocation
    roi     a window decoded alone, against the whole photo; also all on the engines
    step    the loader beside an emulated training step of 7,010 photos/s: the share of the time that is the step's

    They stand in the order of their worth. With a GPU, this command measures everything, run again until it says that
    all is done: dali-pipes bench gpu --all --shards URL -o DIR. Each time it takes --minutes at most. A record is
    written before and after every turn, so a command that is killed loses one turn. Each scenario runs in a process of
    its own. A point that fails, or ends its process, is recorded as failed. On the CPU every scenario runs that
    can run there, and the report makes no statement about GPUs. Exit code 1 if path or parity failed.
    """
    wanted = list(SCENARIOS) if everything else words(scenarios or "rn50")
    if unknown := [name for name in wanted if name not in SCENARIOS]:
        raise ValueError(f"--scenarios must be of {', '.join(SCENARIOS)}, got {', '.join(unknown)}")
    if everything and (output is None or scenarios is not None):
        raise ValueError("--all needs -o DIR, and does not go with --scenarios")
    if json_path is not None and (output is not None or len(wanted) != 1):
        raise ValueError("--json takes the record of one scenario; for several pass -o DIR alone")
    data = {name: settings.pop(name) for name in ("shards", "photo", "mask", "num_photos", "endpoint", "embedded_dir")}
    if device == "gpu" and not torch.cuda.is_available():
        raise ValueError("--device gpu, and torch finds no CUDA device; --device cpu runs what the CPU can do")
    settings["device"] = "gpu" if device != "cpu" and torch.cuda.is_available() else "cpu"
    # A GPU needs larger batches than a core does.
    settings["batch_size"] = settings["batch_size"] or (256 if settings["device"] == "gpu" else 64)
    settings["num_threads"] = settings["num_threads"] or available_cores()
    settings["sweeps"] = {} if no_sweep else default_sweeps(settings["device"]) if sweeps is None else sweeps
    deadline = time.monotonic() + 60 * minutes
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
    reports: list[dict[str, Any]] = []
    with _opened_workload(**data) as (workload, servers, directory):
        for name in wanted:
            path = (output or directory) / f"gpu-{name}.json"
            if time.monotonic() > deadline and not path.exists():
                continue
            scenario = GpuScenario(
                name=name, workload=workload, deadline=deadline, bystanders=sorted(servers), **settings
            )
            reports.append(take_scenario(scenario, path))
            click.echo(f"{name}\n{report_text(reports[-1])}\n")
            if json_path is not None:
                write_record(reports[-1], json_path)
            if output is not None:
                write_text(markdown_page([(one["scenario"], one) for one in reports]), output / "report.md")
    done = [report["scenario"] for report in reports if is_done(report)]
    if left := [name for name in wanted if name not in done]:
        how = "the same command goes on" if output is not None else "pass more --minutes, or -o DIR and run it again"
        click.echo(f"the time was over: {', '.join(left)} not done; {how}")
    elif output is not None:
        click.echo(f"all done: {len(reports)} records and report.md in '{output}'")
    # If the path fails, the figures of the session mean nothing. Its records are written all the same.
    context.exit(int(any(report["failed"] for report in reports if report["scenario"] in CHECKS)))


@contextlib.contextmanager
def _opened_workload(
    *, shards: str | None, photo: str | None, mask: str | None, num_photos: int, **where: Any
) -> Iterator[tuple[Workload, set[int], Path]]:
    """Open photos and shards; yields them, the processes that were started to serve them, and an empty directory."""
    with contextlib.ExitStack() as stack:
        remove_leftovers()  # of a command that was killed
        folder = stack.enter_context(RunFolder())
        if shards is None:
            found, servers = draw_shards(folder.new(), num=num_photos), set[int]()
            photo, mask = photo or PHOTO, mask or MASK
        else:
            found, servers = stack.enter_context(opened_shards(shards, **where))
            photo, mask = find_components(found, photo=photo, mask=mask)
        workload = Workload(
            found, photo=photo, mask=mask or "", num_photos=num_photos, directory=folder.new(), is_drawn=shards is None
        )
        yield workload, servers, folder.new()
