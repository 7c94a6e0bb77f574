"""``dali-pipes bench``: compare and time loaders on the same shards."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from prep.cli import cluster_options

if TYPE_CHECKING:
    from bench.loaders import Device

__all__ = ["bench"]


@click.group()
def bench() -> None:
    """Time DALI against its peers, on the same shards, batches and clock."""


@bench.command()
@click.option(
    "--shards", required=True, help="What to read: ais://bucket/prefix, a glob of local tars, or a directory."
)
@click.option(
    "--loaders",
    default="dali,webloader,memory",
    show_default=True,
    help="Comma separated: dali, memory, webloader, webloader-tutorial; webloader:turbo has its own decoder.",
)
@click.option(
    "--repeats",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="Openings of each loader; they take turns.",
)
@click.option(
    "--epochs",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Epochs timed in each opening, after the first, which is not.",
)
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(min=1), help="Samples a batch.")
@click.option(
    "--num-threads",
    default=None,
    type=click.IntRange(min=1),
    help="DALI's threads, or worker processes.  [default: cores]",
)
@click.option(
    "--decode",
    default="pil",
    show_default=True,
    type=click.Choice(["pil", "turbo"]),
    help="What webloader decodes with.",
)
@click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "gpu"]))
@click.option("--crop", default=350, show_default=True, type=click.IntRange(min=1), help="Side of the centre crop.")
@click.option("--photo", default="image.jpg", show_default=True, help="Component that holds the photo.")
@click.option("--mask", default="trimap.png", show_default=True, help="Component that holds the mask.")
@click.option(
    "--seed", default=7, show_default=True, type=click.IntRange(min=0), help="Order of the shards and samples."
)
@click.option(
    "--repeat-samples",
    default=None,
    type=click.IntRange(min=1),
    help="Write this many samples, the given ones over and over, to a temporary directory, and read those.",
)
@click.option("--json", "json_path", default=None, type=click.Path(path_type=Path), help="Write the record here.")
@cluster_options
def run(
    *,
    shards: str,
    loaders: str,
    repeats: int,
    epochs: int,
    batch_size: int,
    num_threads: int | None,
    decode: str,
    device: "Device",
    crop: int,
    photo: str,
    mask: str,
    seed: int,
    repeat_samples: int | None,
    json_path: Path | None,
    endpoint: str | None,
    embedded_dir: Path | None,
) -> None:
    """Hold each loader's outputs against Pillow and torchvision, then time them, and print a table.

    Reads the shards. Writes nothing but the file that --json names.
    """
    import contextlib
    import tempfile

    from bench.environment import check_extras

    check_extras()
    from bench.record import check_target, write_record

    if json_path is not None:
        check_target(json_path)
    from bench.loaders import LoaderOptions, LoaderSpec, available_cores
    from bench.processes import child_pids
    from bench.repeat import repeat_shards
    from bench.report import format_table
    from bench.run import run_benchmark
    from prep.endpoint import cluster
    from prep.urls import is_remote, resolve_shards

    specs = [LoaderSpec.parse(text.strip()) for text in loaders.split(",")]
    options = LoaderOptions(
        batch_size=batch_size,
        num_threads=available_cores() if num_threads is None else num_threads,
        crop=crop,
        decode=decode,
        photo=photo,
        mask=mask,
        seed=seed,
        device=device,
    )
    with contextlib.ExitStack() as stack:
        before = child_pids()
        url = stack.enter_context(cluster(endpoint, embedded_dir=embedded_dir)) if is_remote(shards) else None
        node = child_pids() - before
        found = resolve_shards(shards, endpoint=url)
        if repeat_samples is not None:
            from prep.index import index_shards

            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="dali-pipes-bench-"))
            found = repeat_shards(found, num_samples=repeat_samples, directory=Path(directory))
            index_shards(found)
        report = run_benchmark(found, specs, options=options, repeats=repeats, epochs=epochs, bystanders=node)
    # The table first: it is on the terminal whatever becomes of the file.
    click.echo(format_table(report["records"]))
    if json_path is not None:
        write_record(report, json_path)


@bench.command()
@click.argument("record", type=click.Path(path_type=Path))
@click.option("--markdown", is_flag=True, help="A table for a document.")
def table(*, record: Path, markdown: bool) -> None:
    """Print the table of RECORD, a file that `bench run --json` wrote."""
    import json

    from bench.report import format_table

    try:
        shown = format_table(json.loads(record.read_text())["records"], markdown=markdown)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
        found = f"{type(exc).__name__}: {exc}"
        raise ValueError(f"'{record}': expected a file that `bench run --json` wrote ({found})") from exc
    click.echo(shown)
