"""``bench compare``: is a run worse than an earlier one?"""

from pathlib import Path

import click

from bench.engine.options import words


@click.command()
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option(
    "--threshold",
    default=0.05,
    type=float,
    help="A figure counts as worse if it is worse by more than this share.",
)
@click.option(
    "--figures",
    help="Comma separated names, as in the records.  [default: samples_per_s, CPU a sample or GiB, the time to the "
    "first batch, memory, bytes that are fetched or read, accelerators]",
)
@click.option(
    "--relative-to",
    metavar="LOADER",
    help="Compare ratios to this loader's figures (memory, for example), round by round within each run, for figures "
    "that depend on the machine: a busier machine slows all loaders alike.  [default: the figures themselves]",
)
@click.option(
    "--anyway",
    is_flag=True,
    help="Compare runs with different machines, data or options, too, by the settings that both have.",
)
def compare(
    *, before: Path, after: Path, threshold: float, figures: str | None, relative_to: str | None, anyway: bool
) -> int:
    """Compare two records of one benchmark, such as `bench run`, `bench sweep` or `bench feed`.

    Says what became worse.

    A figure's change is given with its 95 % interval.
    Exit 0: no figure became worse, as far as the repeats show. 1: a figure became worse, and its whole 95 % interval is
    on the worse side. 2: the runs cannot be read or compared.
    A 95 % interval of two runs needs 4 repeats of each; with 7 it is narrow enough for most purposes.
    """
    from bench.reports.record import read_run
    from bench.reports.regression import JUDGED, compare_runs, format_verdict
    from dali_pipes.errors import DataError

    try:
        runs = read_run(before), read_run(after)
    except DataError as exc:
        raise ValueError(str(exc)) from exc  # exit 1 is for what became worse
    verdict = compare_runs(
        *runs,
        figures=JUDGED if figures is None else words(figures),
        threshold=threshold,
        relative_to=relative_to,
        anyway=anyway,
    )
    click.echo(format_verdict(verdict))
    return int(bool(verdict.regressions))
