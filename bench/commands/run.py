"""``bench run``: loaders on the same shards, compared first, then timed; and what ``bench sweep`` shares with it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bench.commands.options import (
    at_least,
    cluster_options,
    combined,
    json_option,
    loading_options,
    opened_shards,
    photo_options,
    repeats_option,
    shards_option,
    target_option,
    words,
)
from bench.commands.running import needs_extras, run_and_tell

_TIMEOUT_S = 1800.0
"""`bench.compare.turn.TIMEOUT_S`, which ``--help`` shows without loading it."""
_MILLISECONDS = click.FloatRange(min=0, max=60_000, max_open=True)

timing_options = combined(
    [
        shards_option(help="What to read: ais://bucket/prefix, a glob of local tars, or a directory.", name="data"),
        click.option(
            "--loaders",
            default="dali,webloader,memory",
            show_default=True,
            help="Comma separated names; webloader:turbo has its own decoder. all, peers, dali-decode and "
            "python-decode stand for those of the kind that are installed.",
        ),
        click.option("--baseline", default=None, help="What ratios are to.  [default: webloader, else the first]"),
        repeats_option(7, help="Turns of each loader; they are interleaved. A 95 % interval takes 6."),
        click.option(
            "--epochs",
            default=1,
            show_default=True,
            type=at_least(1),
            help="Epochs timed in each turn, after the first, which is not.",
        ),
        loading_options(by_rank=True),
        click.option(
            "--ranks",
            default=1,
            show_default=True,
            type=at_least(1),
            help="Processes, each with its own loader over its share of the shards.",
        ),
        click.option(
            "--cache",
            default="warm",
            show_default=True,
            type=click.Choice(["warm", "cold"]),
            help="cold: time the first epoch, opening included; before it, the kernel is told to forget the files.",
        ),
        click.option(
            "--compute-ms",
            default=0.0,
            show_default=True,
            type=_MILLISECONDS,
            help="Emulate a training step of this length: asleep on a CPU, at work on a GPU.",
        ),
        click.option(
            "--latency-ms",
            default=None,
            type=_MILLISECONDS,
            help="Add this delay to each request. Local shards are served from a copy, from a server of their own.",
        ),
        click.option("--direct", is_flag=True, help="No gateway before a cluster: no bytes are counted, none delayed."),
        click.option(
            "--samples",
            "num_samples",
            default=None,
            type=at_least(1),
            help="Samples to pack, the given ones repeated.",
        ),
        click.option(
            "--num-shards",
            "shards",
            default=None,
            type=at_least(1),
            help="Shards to pack the samples into.",
        ),
        click.option(
            "--photo-side",
            default=None,
            type=at_least(1),
            help="Scale photos and masks to this longer side.",
        ),
        photo_options(),
        click.option(
            "--timeout-s",
            default=_TIMEOUT_S,
            show_default=True,
            type=click.FloatRange(min=0, min_open=True),
            help="A turn, or the comparison of a loader, that takes longer ends the run, with an error that names it.",
        ),
        click.option(
            "--work",
            default=None,
            type=click.Path(path_type=Path),
            help="Where what is packed, served and converted is written.  [default: the directory for temporary files]",
        ),
        target_option("-o", "--output", "html_path", help="Write the report here, as `bench report -o` does."),
        json_option,
        cluster_options,
    ]
)
"""What `bench run` and `bench sweep` have in common: all but what is swept."""


@click.command()
@timing_options
@needs_extras
def run(**given: Any) -> None:
    """Compare each loader's outputs with Pillow's and torchvision's, then time the loaders, and print a table.

    Reads the shards. Writes the files that --json and -o name, and under --work what is packed anew, served or
    converted, until the end. Ctrl-C, or a loader that fails, leaves the whole rounds before it: they are printed and
    written, too.
    """
    time_loaders(given, over=())


def time_loaders(given: dict[str, Any], *, over: Sequence[str]) -> None:
    """Check everything that was asked for, then run it and report.

    Args:
        given: The values of `timing_options`.
        over: Axes, as `bench.compare.settings.sweep` takes them.
    """
    from bench.compare.run import LoaderScenario, check_specs
    from bench.compare.settings import TurnSetting, sweep
    from bench.loaders.protocol import LoaderOptions
    from bench.loaders.selection import LoaderSpec, select_loaders
    from bench.tools.folders import check_writable

    if given["json_path"] is not None and given["json_path"] == given["html_path"]:
        raise ValueError(f"--json and --output name the same file, '{given['json_path']}'")

    def some(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names}

    base = TurnSetting(
        **some("threads", "batch_size", "crop", "ranks", "cache", "compute_ms", "latency_ms", "shards", "photo_side")
    )
    settings = sweep(base, over)
    options = LoaderOptions(**some("batch_size", "crop", "photo", "mask", "seed", "device"))
    baseline = None if given["baseline"] is None else LoaderSpec.parse(given["baseline"])
    if given["work"] is not None:
        check_writable(given["work"])
    with opened_shards(given["data"], endpoint=given["endpoint"], embedded_dir=given["embedded_dir"]) as (found, node):
        # Local shards that are served from a copy are read as those of a bucket are.
        is_served = any(setting.latency_ms is not None for setting in settings)
        selection = select_loaders(words(given["loaders"]), shards=None if is_served else found)
        for line in selection.skipped:
            click.echo(line, err=True)
        check_specs(selection.specs, baseline, is_served=is_served)
        scenario = LoaderScenario(
            shards=found,
            loaders=selection.specs,
            options=options,
            settings=settings,
            baseline=baseline,
            bystanders=node,
            **some("repeats", "epochs", "num_samples", "direct", "work", "seed", "timeout_s"),
        )
        run_and_tell(scenario, **some("json_path", "html_path"))
