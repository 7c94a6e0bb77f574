"""``bench gpu``: what a GPU decodes, how it is set, and what is lost on the way; or its twin on the CPU."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bench.commands.options import (
    at_least,
    cluster_options,
    json_option,
    opened_shards,
    repeats_option,
    shards_option,
    words,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.gpu.cases import Workload
    from bench.gpu.run import GpuOptions

__all__ = ["gpu"]

_SWEEPABLE: dict[str, type] = {
    "hw_decoder_load": float,
    "num_threads": int,
    "batch_size": int,
    "photo_side": int,
    "progressive_share": float,
}


def _sweeps(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[str, tuple[Any, ...]] | None:
    """``NAME=VALUE,VALUE`` of an option that may be given several times; ``None`` where it was not."""
    found: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        name, _, values = text.replace("-", "_").partition("=")
        if name not in _SWEEPABLE:
            raise click.BadParameter(f"expected one of {', '.join(_SWEEPABLE)}, then =VALUE,..., got '{text}'")
        try:
            found[name] = tuple(_SWEEPABLE[name](value) for value in values.split(",") if value)
        except ValueError:
            raise click.BadParameter(f"expected numbers after '{name}=', got '{values}'") from None
        is_share = _SWEEPABLE[name] is float
        if any(not 0 <= value <= 1 if is_share else value < 1 for value in found[name]):
            expected = "between 0 and 1" if is_share else "of at least 1"
            raise click.BadParameter(f"expected numbers {expected} after '{name}=', got '{values}'")
    return found or None


@click.command()
@shards_option(required=False, help="Photos, masks and labels.  [default: drawn]")
@click.option("--scenarios", help="Comma separated; see above.  [default: rn50]")
@click.option("--all", "everything", is_flag=True, help="All of them, in order of worth, each to a file in -o.")
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="Directory for --all.")
@json_option
@click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "gpu"]))
@click.option("--num-threads", type=at_least(1), help="DALI's threads.  [default: cores]")
@click.option("--batch-size", type=at_least(1), help="Samples a batch.  [default: 256, on the CPU 64]")
@click.option(
    "--hw-decoder-load",
    default=0.65,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Share of a batch for the JPEG engines.",
)
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    callback=_sweeps,
    metavar="NAME=VALUE,...",
    help=f"What to vary, one at a time: {', '.join(_SWEEPABLE)}.  [default: all of them]",
)
@click.option("--no-sweep", is_flag=True, help="Only the base setting.")
@click.option("--photo", default="image.jpg", show_default=True, help="Component that holds the photo.")
@click.option("--mask", default="trimap.png", show_default=True, help="Component that holds the mask.")
@click.option("--num-photos", default=1024, show_default=True, type=at_least(1), help="Kept in memory.")
@click.option(
    "--seconds",
    default=2.0,
    show_default=True,
    type=click.FloatRange(min=0.001),
    help="For which each point is timed in each repeat.",
)
@repeats_option(2, help="Openings of each point; points take turns.")
@click.option(
    "--minutes",
    default=25.0,
    show_default=True,
    type=click.FloatRange(min=0.01),
    help="For --all: what would begin later is left out, and named.",
)
@cluster_options
@click.pass_context
def gpu(
    context: click.Context,
    *,
    shards: str | None,
    scenarios: str | None,
    everything: bool,
    output: Path | None,
    json_path: Path | None,
    device: str,
    num_threads: int | None,
    batch_size: int | None,
    hw_decoder_load: float,
    sweeps: dict[str, tuple[Any, ...]] | None,
    no_sweep: bool,
    photo: str,
    mask: str,
    num_photos: int,
    seconds: float,
    repeats: int,
    minutes: float,
    endpoint: str | None,
    embedded_dir: Path | None,
) -> None:
    """Time decoding, one setting changed at a time, and print a table for each scenario:

    \b
    path          an epoch of each graph through a loader on the device: every key once, finite
    parity        pixels of the GPU's decoders against the CPU's, as a distribution
    rn50          the recipe of DALI's own benchmark: random crop, resize, normalise to float16
    decode        decoding alone
    segmentation  the whole loader, photo and mask
    halves        a reader of its own and a decoder, against one pipeline; unpinned, copied, pinned
    roi           a window decoded alone, against the whole photo
    masks         PNG, LZ4 blocks inflated on the GPU, raw

    With a GPU, one command measures everything: dali-pipes bench gpu --all --shards URL -o DIR. It takes 25 minutes at
    most, the most telling first, and writes a record as soon as it has one; a point that fails is recorded as failed.
    On the CPU every scenario that has a twin runs, and nothing is said about GPUs. Exit code 1 where path or parity
    failed.
    """
    import time

    from bench.environment import check_extras

    check_extras()
    if everything and (output is None or scenarios is not None or json_path is not None):
        raise ValueError("--all needs -o DIR, and goes with neither --scenarios nor --json")
    if output is not None and not everything:
        raise ValueError("-o goes with --all; pass --json FILE for one scenario")
    from bench.gpu.report import format_markdown, format_scenario
    from bench.gpu.run import SCENARIOS, run_scenario
    from bench.reports.record import stamped, write_record, write_text

    wanted = list(SCENARIOS) if everything else words(scenarios or "rn50")
    if unknown := [name for name in wanted if name not in SCENARIOS]:
        raise ValueError(f"--scenarios must be of {', '.join(SCENARIOS)}, got {', '.join(unknown)}")
    if json_path is not None and len(wanted) != 1:
        raise ValueError(f"--json takes one scenario, got {len(wanted)}; pass --all -o DIR for several")
    options = _options(
        device, num_threads, batch_size, hw_decoder_load, {} if no_sweep else sweeps, seconds=seconds, repeats=repeats
    )
    deadline = time.monotonic() + 60 * minutes if everything else None
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
    reports = []
    with _opened_workload(
        shards, photo=photo, mask=mask, num_photos=num_photos, endpoint=endpoint, embedded_dir=embedded_dir
    ) as (workload, servers):
        for name in wanted:
            found = run_scenario(name, workload, options=options, deadline=deadline, bystanders=sorted(servers))
            reports.append(report := stamped(found, kind="gpu"))
            click.echo(f"{name}\n{format_scenario(report)}\n")
            if json_path is not None:
                write_record(report, json_path)
            if output is not None:
                # After each: whoever ends the session early keeps what there is.
                write_record(report, output / _file_name(report))
                write_text(format_markdown(reports), output / "report.md")
    if output is not None:
        click.echo(f"wrote {len(reports)} records and report.md into '{output}'")
    # A session's figures mean nothing where the path does not hold; its records are written all the same.
    context.exit(int(any("error" in report.get("check", ()) for report in reports)))


def _options(
    device: str,
    num_threads: int | None,
    batch_size: int | None,
    hw_decoder_load: float,
    sweeps: dict[str, tuple[Any, ...]] | None,
    *,
    seconds: float,
    repeats: int,
) -> "GpuOptions":
    import torch

    from bench.gpu.run import GpuOptions, default_sweeps
    from bench.loaders import available_cores

    if device == "gpu" and not torch.cuda.is_available():
        raise ValueError("--device gpu, and torch finds no CUDA device; --device cpu runs the twins")
    chosen = "gpu" if device != "cpu" and torch.cuda.is_available() else "cpu"
    return GpuOptions(
        device="gpu" if chosen == "gpu" else "cpu",
        num_threads=num_threads or available_cores(),
        # A GPU wants more at a time than a core does.
        batch_size=batch_size or (256 if chosen == "gpu" else 64),
        hw_decoder_load=hw_decoder_load,
        sweeps=default_sweeps(chosen) if sweeps is None else sweeps,
        seconds=seconds,
        repeats=repeats,
    )


@contextlib.contextmanager
def _opened_workload(
    shards: str | None, *, photo: str, mask: str, num_photos: int, endpoint: str | None, embedded_dir: Path | None
) -> "Iterator[tuple[Workload, set[int]]]":
    """Photos and shards, and the processes that were started to serve them."""
    import tempfile

    from bench.gpu.cases import Workload
    from bench.gpu.photos import draw_shards

    with contextlib.ExitStack() as stack:
        memory = Path("/dev/shm")  # noqa: S108 (a directory of our own is made there)
        directory = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="dali-pipes-bench-", dir=memory if memory.is_dir() else None)
            )
        )
        if shards is None:
            drawn = directory / "shards"
            drawn.mkdir()
            found, servers = draw_shards(drawn, num=num_photos), set[int]()
        else:
            found, servers = stack.enter_context(opened_shards(shards, endpoint=endpoint, embedded_dir=embedded_dir))
        workload = Workload(
            found, photo=photo, mask=mask, num_photos=num_photos, directory=directory, is_drawn=shards is None
        )
        yield workload, servers


def _file_name(report: dict[str, Any]) -> str:
    """``gpu-decode_nvidia-h100_2026-11-21.json``: scenario, hardware, date."""
    import re

    environment = report["environment"]
    gpu = report.get("gpu")
    model = gpu["name"] if gpu else f"{environment['cpu']['model']} {environment['cpu']['cores_available']} cores"
    hardware = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    return f"gpu-{report['scenario']}_{hardware}_{environment['date'][:10]}.json"
