"""``bench report``: show records as Markdown, plots, the tables of a document, or on the terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bench.engine.options import target_option, words
from dali_pipes.commands.output import print_note

if TYPE_CHECKING:
    from bench.reports.summary import Report


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
    from bench.reports.documents import update_document
    from bench.reports.record import read_run, write_text
    from bench.reports.summary import restricted
    from bench.reports.tables import markdown_page, report_text

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
        print_note(f"wrote {_draw(reports, plots_dir)} plots to {plots_dir}")
    if markdown_path is not None:
        page = markdown_page(reports)
        if str(markdown_path) == "-":
            click.echo(page, nl=False)
        else:
            write_text(page, markdown_path)
            print_note(f"wrote {markdown_path}, {len(records)} records")
    would_change = False
    for document in documents:
        updated = update_document(document, write=not check)
        changed = "as they were" if not updated.changed else "would change" if check else "changed"
        print_note(f"{document}: {updated.num_tables} tables, {changed}")
        would_change |= check and updated.changed
    if records and plots_dir is None and markdown_path is None:
        several = len(reports) > 1
        click.echo(
            "\n\n".join(f"{title}\n{report_text(one)}" if several else report_text(one) for title, one in reports)
        )
    return int(would_change)


def _draw(reports: "Sequence[tuple[str, Report]]", directory: Path) -> int:
    """Write the plots of records into a directory, which is made if it is not there; return their number."""
    from bench.reports.plots import plots_of
    from bench.reports.record import write_text

    plots = {f"{title}-{name}.svg": svg for title, report in reports for name, svg in plots_of(report).items()}
    directory.mkdir(parents=True, exist_ok=True)
    for name, svg in plots.items():
        write_text(svg, directory / name)
    return len(plots)
