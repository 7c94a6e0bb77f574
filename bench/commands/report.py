"""``bench report``: show records as a page, Markdown, the tables of a document, or on the terminal."""

from pathlib import Path

import click

from bench.commands.options import target_option
from bench.engine.options import words
from dali_pipes.commands.output import print_note


@click.command()
@click.argument("records", metavar="[RECORD]...", nargs=-1, type=click.Path(path_type=Path))
@target_option("-o", "--output", "html_path", help="Write one HTML page that needs no other file: tables and plots.")
@target_option("--markdown", "markdown_path", help="Write Markdown, without the plots; - for stdout.")
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
    html_path: Path | None,
    markdown_path: Path | None,
    baseline: str | None,
    loaders: str | None,
    documents: tuple[Path, ...],
    check: bool,
) -> int:
    """Show RECORDs, files that commands of `bench` wrote with --json, of this version and earlier ones.

    Without an option their tables go to stdout. A document's tables stand between two lines. The first line names the
    record, with a path relative to the document, and may choose baseline, loaders and figures:

    \b
    <!-- bench report results/pets.json --baseline dali --loaders dali,memory samples_per_s -->
    <!-- end of bench report -->

    Reads the records. Writes the files that are named.
    """
    from bench.reports.documents import page_parts, terminal_text, update_document
    from bench.reports.page import html_page, markdown_page
    from bench.reports.record import write_text

    if check and not documents:
        raise ValueError("--check goes with --update DOCUMENT")
    if not records and not documents:
        raise ValueError("name at least one record, or a document: --update DOCUMENT")
    if not records and (baseline or loaders):
        raise ValueError("--baseline and --loaders apply to RECORDs; for a document's tables they stand in its marks")
    for target in (html_path, markdown_path):
        if target is not None and target.resolve() in {record.resolve() for record in records}:
            raise ValueError(f"'{target}' is one of the records; name another file to write")
    runs, texts = page_parts(records, baseline=baseline, loaders=None if loaders is None else words(loaders))
    if html_path is not None:
        write_text(html_page(runs, texts), html_path)
        print_note(f"wrote {html_path}, {len(records)} records")
    if markdown_path is not None:
        page = markdown_page(runs, texts)
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
    if records and html_path is None and markdown_path is None:
        click.echo(terminal_text(runs, texts))
    return int(would_change)
