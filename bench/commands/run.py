"""``bench run``: loaders on the same shards, compared first, then timed; and what ``bench sweep`` shares with it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

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
    tell,
    words,
)

if TYPE_CHECKING:
    from typing import Unpack

    from bench.loaders import Device

__all__ = ["TimingArguments", "run", "time_loaders", "timing_options"]

_TIMEOUT_S = 1800.0
"""`bench.timing.ranks.TIMEOUT_S`, which ``--help`` shows without loading it."""
_MILLISECONDS = click.FloatRange(min=0, max=60_000, max_open=True)

timing_options = combined(
    [
        shards_option(help="What to read: ais://bucket/prefix, a glob of local tars, or a directory."),
        click.option(
            "--loaders",
            default="dali,webloader,memory",
            show_default=True,
            help="Comma separated names; webloader:turbo has its own decoder. all, peers, dali-decode and "
            "python-decode stand for those of the kind that are installed.",
        ),
        click.option("--baseline", default=None, help="Whom ratios are to.  [default: webloader, else the first]"),
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
            help="cold: time the first epoch, opening included, and have the kernel forget the files before.",
        ),
        click.option(
            "--compute-ms",
            default=0.0,
            show_default=True,
            type=_MILLISECONDS,
            help="Emulate a training step of so long: asleep on a CPU, at work on a GPU.",
        ),
        click.option(
            "--latency-ms",
            default=None,
            type=_MILLISECONDS,
            help="Add so much to each request. Local shards are served from a copy, from a server of their own.",
        ),
        click.option("--direct", is_flag=True, help="No gateway before a cluster: no bytes are counted, none delayed."),
        click.option(
            "--samples", default=None, type=at_least(1), help="Pack so many samples, the given ones repeated."
        ),
        click.option("--num-shards", default=None, type=at_least(1), help="Pack the samples into so many shards."),
        click.option(
            "--photo-side", default=None, type=at_least(1), help="Make photos so many pixels wide or high, and masks."
        ),
        photo_options(),
        click.option(
            "--timeout-s",
            default=_TIMEOUT_S,
            show_default=True,
            type=click.FloatRange(min=0, min_open=True),
            help="A turn, or the comparison of a loader, that takes longer ends the run and is said to hang.",
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


class TimingArguments(TypedDict):
    """The values of `timing_options`."""

    shards: str
    loaders: str
    baseline: str | None
    repeats: int
    epochs: int
    batch_size: int
    num_threads: int | None
    device: "Device"
    crop: int
    ranks: int
    cache: Literal["warm", "cold"]
    compute_ms: float
    latency_ms: float | None
    direct: bool
    samples: int | None
    num_shards: int | None
    photo_side: int | None
    photo: str
    mask: str
    seed: int
    timeout_s: float
    work: Path | None
    html_path: Path | None
    json_path: Path | None
    endpoint: str | None
    embedded_dir: Path | None


@click.command()
@timing_options
def run(**arguments: "Unpack[TimingArguments]") -> None:
    """Hold each loader's outputs against Pillow and torchvision, then time them, and print a table.

    Reads the shards. Writes the files that --json and -o name, and under --work what is packed anew, served or
    converted, until the end. What Ctrl-C, or a loader that fails, leaves of whole rounds is written and told, too.
    """
    time_loaders(arguments, over=())


def time_loaders(arguments: TimingArguments, *, over: Sequence[str]) -> None:
    """Check everything that was asked for, then run it and tell what was found.

    Args:
        arguments: Of the command.
        over: Axes, as `bench.timing.settings.sweep` takes them.
    """
    from bench.environment import check_extras

    check_extras()
    from bench.loaders import LoaderOptions, LoaderSpec, select_loaders
    from bench.run import RunOptions, check_specs, run_benchmark
    from bench.timing.folders import remove_leftovers
    from bench.timing.settings import Setting, sweep

    given = arguments
    if given["json_path"] is not None and given["json_path"] == given["html_path"]:
        raise ValueError(f"--json and --output name the same file, '{given['json_path']}'")
    settings = sweep(
        Setting(
            threads=given["num_threads"],
            batch_size=given["batch_size"],
            crop=given["crop"],
            ranks=given["ranks"],
            cache=given["cache"],
            compute_ms=given["compute_ms"],
            latency_ms=given["latency_ms"],
            shards=given["num_shards"],
            photo_side=given["photo_side"],
        ),
        over,
    )
    options = LoaderOptions(
        batch_size=given["batch_size"],
        crop=given["crop"],
        photo=given["photo"],
        mask=given["mask"],
        seed=given["seed"],
        device=given["device"],
    )
    baseline = None if given["baseline"] is None else LoaderSpec.parse(given["baseline"])
    how = RunOptions(
        repeats=given["repeats"],
        epochs=given["epochs"],
        baseline=baseline,
        num_samples=given["samples"],
        direct=given["direct"],
        directory=given["work"],
        timeout_s=given["timeout_s"],
    )
    named = words(given["loaders"])
    with opened_shards(given["shards"], endpoint=given["endpoint"], embedded_dir=given["embedded_dir"]) as opened:
        found, node = opened
        # Local shards that are served from a copy are read as those of a bucket are.
        is_served = any(setting.latency_ms is not None for setting in settings)
        selection = select_loaders(named, shards=None if is_served else found)
        for line in selection.skipped:
            click.echo(line, err=True)
        check_specs(selection.specs, baseline, is_served=is_served)
        if left := remove_leftovers(given["work"]):
            click.echo(f"removed what runs that were killed had left: {', '.join(map(str, left))}", err=True)

        def keep(report: dict[str, Any]) -> None:
            _tell(report, given)
            files = [f"'{path}'" for path in (given["json_path"], given["html_path"]) if path is not None]
            click.echo(
                f"stopped in {report['stopped'] or 'its last moment'}; kept: {report['num_rounds']} whole rounds, "
                f"{'in ' + ' and '.join(files) if files else 'above; --json FILE writes them'}",
                err=True,
            )

        report = run_benchmark(
            found,
            selection.specs,
            options=options,
            settings=settings,
            run=replace(how, bystanders=node),
            keep=keep,
        )
    _tell(report, given)


def _tell(report: dict[str, Any], given: TimingArguments) -> None:
    from bench.reports.report import format_table, notes_of

    tell("run", report, "\n".join([format_table(report), "", *notes_of(report)]), given["json_path"])
    if given["html_path"] is not None:
        from bench.reports.page import html_page
        from bench.reports.record import write_text

        write_text(html_page([(given["html_path"].stem, report)]), given["html_path"])
