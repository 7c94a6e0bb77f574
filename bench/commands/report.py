"""``bench report``: records to a page, a Markdown file, a document's tables, or the terminal."""

from pathlib import Path

import click

from bench.commands.options import target_option

__all__ = ["report"]


@click.command()
@click.argument("records", metavar="[RECORD]...", nargs=-1, type=click.Path(path_type=Path))
@target_option("-o", "--output", "html_path", help="Write one HTML page that needs nothing else: tables and plots.")
@target_option("--markdown", "markdown_path", help="Write Markdown, without the plots; - for stdout.")
@click.option(
    "--update",
    "document",
    default=None,
    type=click.Path(path_type=Path),
    help="Replace the tables of this document: see below.",
)
@click.option("--check", is_flag=True, help="With --update: write nothing; exit 1 if a table would change.")
def report(
    *,
    records: tuple[Path, ...],
    html_path: Path | None,
    markdown_path: Path | None,
    document: Path | None,
    check: bool,
) -> int:
    """Show RECORDs, files that commands of `bench` wrote with --json, of this version and earlier ones.

    Without an option their tables go to stdout. A document's tables stand between two lines, the first of which says
    of what, its path being relative to the document, and may choose figures:

    \b
    <!-- bench report results/pets.json samples_per_s cpu_ms_per_sample -->
    <!-- end of bench report -->

    Reads the records. Writes the files that are named.
    """
    from bench.reports.documents import page_parts, terminal_text, update_document
    from bench.reports.page import html_page, markdown_page
    from bench.reports.record import write_text

    if check and document is None:
        raise ValueError("--check goes with --update DOCUMENT")
    if not records and document is None:
        raise ValueError("name at least one record, or a document: --update DOCUMENT")
    for target in (html_path, markdown_path):
        if target is not None and target.resolve() in {record.resolve() for record in records}:
            raise ValueError(f"'{target}' is one of the records; name another file to write")
    runs, texts = page_parts(records)
    if html_path is not None:
        write_text(html_page(runs, texts), html_path)
        click.echo(f"wrote {html_path}, {len(records)} records", err=True)
    if markdown_path is not None:
        page = markdown_page(runs, texts)
        if str(markdown_path) == "-":
            click.echo(page, nl=False)
        else:
            write_text(page, markdown_path)
            click.echo(f"wrote {markdown_path}, {len(records)} records", err=True)
    if document is not None:
        updated = update_document(document, write=not check)
        changed = "as they were" if not updated.changed else "would change" if check else "changed"
        click.echo(f"{document}: {updated.num_tables} tables, {changed}", err=True)
        return int(check and updated.changed)
    if html_path is None and markdown_path is None:
        click.echo(terminal_text(runs, texts))
    return 0
