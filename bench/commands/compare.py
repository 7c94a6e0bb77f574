"""``bench compare``: is a run worse than an earlier one?"""

from pathlib import Path

import click

from bench.commands.options import words

__all__ = ["compare"]


@click.command()
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option(
    "--threshold",
    default=0.05,
    show_default=True,
    type=float,
    help="How much worse, as a share, is not called worse yet.",
)
@click.option(
    "--figures",
    default=None,
    help="Comma separated, as the records call them.  [default: samples_per_s, cpu_ms_per_sample, "
    "time_to_first_batch_s, loader_memory_mib, shared_memory_mib, fetched_ratio]",
)
@click.option(
    "--relative-to",
    default=None,
    metavar="LOADER",
    help="Compare ratios to this loader's figures, round by round within each run, where the machine has a part in "
    "them: what makes all slower alike, a busier machine, is in none. memory, say.  [default: figures as they are]",
)
@click.option(
    "--anyway",
    is_flag=True,
    help="Compare runs of other machines, data or options, too; and of other versions of the record, by what of the "
    "setting both have.",
)
def compare(
    *, before: Path, after: Path, threshold: float, figures: str | None, relative_to: str | None, anyway: bool
) -> int:
    """Compare two records of `bench run` or `bench sweep`; say what became worse, by how much, how surely.

    Exit 0: nothing did, as far as the repeats tell. 1: something did, its 95 % interval wholly on the worse side.
    2: the runs cannot be read or compared.
    A 95 % interval of two runs takes 4 repeats of each; of 7 it is narrow enough for most ends.
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
