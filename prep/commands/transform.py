"""``dali-pipes prep transform``; the output options and the report are shared with ``prep etl``."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dali_pipes.commands.options import cluster_options, endpoint_for, format_bytes, json_option
from dali_pipes.commands.output import counted, fields_of, print_result
from prep.commands.options import jobs_option, on_option, overwrite_option, part_option, print_empty_part

if TYPE_CHECKING:
    from prep.etl.local import TransformReport
    from prep.part import JobPart
    from prep.workers import WorkersKind


FUNCTION_HELP = "pets, the tutorial's transform, or MODULE:FUNCTION, of a module in the current directory or installed."

replace_option = overwrite_option("what is there under these names")


@click.command()
@click.argument("urls", metavar="URL... OUT", nargs=-1, required=True)
@click.option("--function", metavar="TRANSFORM", required=True, help=FUNCTION_HELP)
@replace_option
@jobs_option("Processes")
@on_option
@part_option("every N-th shard")
@cluster_options
@json_option
def transform(
    urls: tuple[str, ...],
    *,
    function: str,
    overwrite: bool,
    jobs: int | None,
    on: "WorkersKind",
    part: "JobPart",
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
) -> None:
    """Transform the shards at URL into OUT without an ETL: the bytes are the same as those of a cluster's ETL.

    URL is ais://BUCKET/PREFIX, DIRECTORY[/PREFIX], a glob of local tars, or shards with braces; OUT is
    ais://BUCKET[/PREFIX] or DIRECTORY[/PREFIX], created if it does not exist. Shards keep their names, and samples keep
    their keys and order. The function takes a dict of component to bytes and returns another; an empty one leaves the
    sample out.

    The command writes the shards and, if there is one, the class table; index them afterwards.
    """
    from dali_pipes.data_set.named import list_shards
    from prep.etl.local import open_output, transform_shards

    *inputs, out = inputs_and_output(urls)
    with endpoint_for(inputs, endpoint, embedded_dir, writes=[out]) as answering:
        shards = list_shards(inputs, endpoint=answering)
        own = part.of_shards(shards)
        if not own.names:
            print_empty_part(part, own.url, as_json=as_json)
            return
        report = transform_shards(
            own,
            open_output(out, endpoint=answering),
            transform=function,
            whole=shards,
            overwrite=overwrite,
            jobs=jobs,
            on=on,
            show_progress=not as_json,
        )
    print_report(report, function, as_json=as_json)


def inputs_and_output(urls: tuple[str, ...]) -> tuple[str, ...]:
    """The arguments ``URL... OUT``, of which there must be two at least."""
    if len(urls) < 2:
        raise click.UsageError("expected URL... and OUT")
    return urls


def print_report(report: "TransformReport", what: str, *, as_json: bool) -> None:
    """Print the result of ``what``, a function or an ETL."""
    line = (
        f"transformed {counted(len(report.shards), 'shard')} by {what}, {format_bytes(report.num_bytes)} in "
        f"{report.elapsed_s:.1f} s -> {report.url}"
    )
    print_result(line, fields_of(report) | {"transform": what}, as_json=as_json)
