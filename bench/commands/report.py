"""``bench report`` shows records; ``bench compare`` tells whether a run is worse than an earlier one."""

from pathlib import Path

import click

from bench.engine.options import target_option, words
from dali_pipes.commands.output import print_note


@click.command()
@click.argument("records", metavar="[RECORD]...", nargs=-1, type=click.Path(path_type=Path))
@target_option("--markdown", "markdown_path", help="Write Markdown; - for stdout.")
@click.option(
    "--plots",
    "plots_dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Draw the figures of runs into this directory, as RECORD-FIGURE.svg.",
)
@click.option("--baseline", help="Show ratios to this loader.  [default: as in the run]")
@click.option("--loaders", help="Comma separated: show these only.  [default: all of the run]")
@click.option(
    "--update",
    "documents",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Replace the tables of this document, see above; may be given several times.",
)
@click.option("--check", is_flag=True, help="With --update: write nothing; exit 1 if a table would change.")
def report(
    *,
    records: tuple[Path, ...],
    markdown_path: Path | None,
    plots_dir: Path | None,
    baseline: str | None,
    loaders: str | None,
    documents: tuple[Path, ...],
    check: bool,
) -> int:
    """Show RECORDs, files that commands of `bench` wrote with --json.

    Without an option their tables go to stdout. A document's tables stand between two lines. The first line names the
    record, with a path relative to the document, and may choose baseline, loaders and figures:

    \b
    <!-- bench report results/pets.json --baseline dali --loaders dali,memory samples_per_s -->
    <!-- end of bench report -->

    Reads the records. Writes the files that are named.
    """
    from bench.reports.record import read_run, write_text
    from bench.reports.summary import restricted
    from bench.reports.tables import markdown_page, report_text, update_document

    if check and not documents:
        raise ValueError("--check goes with --update DOCUMENT")
    if not records and not documents:
        raise ValueError("name at least one record, or a document: --update DOCUMENT")
    if not records and (baseline or loaders):
        raise ValueError("--baseline and --loaders apply to RECORDs; for a document's tables they stand in its marks")
    if markdown_path is not None and markdown_path.resolve() in {record.resolve() for record in records}:
        raise ValueError(f"'{markdown_path}' is one of the records; name another file to write")
    chosen = None if loaders is None else words(loaders)
    reports = [(path.stem, restricted(read_run(path), baseline=baseline, loaders=chosen)) for path in records]
    if plots_dir is not None:
        from bench.reports.plots import plots_of

        plots = {f"{title}-{name}.svg": svg for title, report in reports for name, svg in plots_of(report).items()}
        plots_dir.mkdir(parents=True, exist_ok=True)
        for name, svg in plots.items():
            write_text(svg, plots_dir / name)
        print_note(f"wrote {len(plots)} plots to {plots_dir}")
    if markdown_path is not None:
        page = markdown_page(reports)
        if str(markdown_path) == "-":
            click.echo(page, nl=False)
        else:
            write_text(page, markdown_path)
            print_note(f"wrote {markdown_path}, {len(records)} records")
    would_change = False
    for document in documents:
        num_tables, changes = update_document(document, write=not check)
        outcome = "as they were" if not changes else "would change" if check else "changed"
        print_note(f"{document}: {num_tables} tables, {outcome}")
        would_change |= check and changes
    if records and plots_dir is None and markdown_path is None:
        several = len(reports) > 1
        click.echo(
            "\n\n".join(f"{title}\n{report_text(one)}" if several else report_text(one) for title, one in reports)
        )
    return int(would_change)


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
