"""``bench windows``: a data set through caches that hold all of it or a part."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bench.commands.options import (
    at_least,
    cache_option,
    cluster_options,
    json_option,
    loading_options,
    numbers,
    opened_shards,
    repeats_option,
    shards_option,
    tell,
)

if TYPE_CHECKING:
    from bench.loaders import Device

__all__ = ["windows"]


@click.command()
@shards_option(required=False, help="Samples to repeat.  [default: the demo photos]")
@click.option("--samples", default=10_000, show_default=True, type=at_least(1), help="Samples to load.")
@click.option("--num-shards", default=40, show_default=True, type=at_least(1), help="Shards that they are packed into.")
@repeats_option(3, help="Turns of each combination.")
@click.option(
    "--epochs",
    default=1,
    show_default=True,
    type=at_least(1),
    help="Epochs timed in each turn, after the cold one, which has its own figures.",
)
@loading_options()
@click.option("--fractions", default="1.0,0.2", show_default=True, help="Sizes of the cache, as shares of the data.")
@click.option(
    "--latencies-ms",
    default="0,20",
    show_default=True,
    help="Milliseconds added to each request, redirects included.",
)
@click.option("--ramp-up", is_flag=True, help="Start each epoch with windows of 1, 2, 4, ... shards.")
@cache_option(help="Where the images lie; the server keeps the data set there too.")
@json_option
@cluster_options
def windows(
    *,
    shards: str | None,
    samples: int,
    num_shards: int,
    repeats: int,
    epochs: int,
    batch_size: int,
    num_threads: int | None,
    device: "Device",
    crop: int,
    fractions: str,
    latencies_ms: str,
    ramp_up: bool,
    cache: Path,
    json_path: Path | None,
    endpoint: str | None,
    embedded_dir: Path | None,
) -> None:
    """Load a data set through caches that hold all of it or a part, near and far from its server; print who waits.

    Reads --shards, once, from where --endpoint says. What is loaded is a copy of them on a server of its own, which is
    slowed by --latencies-ms. Writes nothing but the file that --json names.
    """
    import contextlib

    from bench.environment import check_extras

    check_extras()
    from bench.loaders import available_cores
    from bench.scenarios.windows import WindowsOptions, format_windows, run_windows

    options = WindowsOptions(
        samples=samples,
        num_shards=num_shards,
        repeats=repeats,
        epochs=epochs,
        batch_size=batch_size,
        num_threads=num_threads or available_cores(),
        crop=crop,
        device=device,
        fractions=numbers("--fractions", fractions),
        latencies_ms=numbers("--latencies-ms", latencies_ms),
        ramp_up=ramp_up,
        cache=cache,
    )
    with contextlib.ExitStack() as stack:
        found = None
        if shards is not None:
            found, _ = stack.enter_context(opened_shards(shards, endpoint=endpoint, embedded_dir=embedded_dir))
        report = run_windows(options, shards=found)
    tell("windows", report, format_windows(report), json_path)
