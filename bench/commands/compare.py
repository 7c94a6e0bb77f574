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
    help="Comma separated names, as in the records.  [default: of bench run samples_per_s, cpu_ms_per_sample, "
    "time_to_first_batch_s, loader_memory_mib, shared_memory_mib, fetched_ratio; of bench feed samples_per_s, "
    "cpu_us_per_sample, faults_per_sample, read_ratio]",
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
    help="Compare runs with different machines, data or options, too, and records of different versions, by the "
    "settings that both have.",
)
def compare(
    *, before: Path, after: Path, threshold: float, figures: str | None, relative_to: str | None, anyway: bool
) -> int:
    """Compare two records of `bench run` (also with --au), `bench sweep` or `bench feed`.

    Says what became worse.

    A figure's change is given with its 95 % interval.
    Exit 0: no figure became worse, as far as the repeats show. 1: a figure became worse, and its whole 95 % interval is
    on the worse side. 2: the runs cannot be read or compared.
    A 95 % interval of two runs needs 4 repeats of each; with 7 it is narrow enough for most purposes.
    """
    from bench.reports.comparable import read_comparable
    from bench.reports.regression import JUDGED, compare_runs, format_verdict
    from dali_pipes.errors import DataError

    try:
        runs = read_comparable(before), read_comparable(after)
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
