"""``dali-pipes prep compact``."""

from pathlib import Path

import click

from dali_pipes.commands.options import cluster_options, endpoint_for, format_bytes, json_option
from dali_pipes.commands.output import counted, fields_of, print_result, print_some
from prep.commands.options import command_line, dry_run_option, jobs_option, no_part_option


@click.command()
@click.argument("dataset")
@click.option(
    "--drop-old",
    is_flag=True,
    help="Afterwards, delete all older versions: their manifests, and the shards and index files that the newest "
    "version does not have. Jobs that read them fail. What is deleted is named; see it first with --dry-run.",
)
@dry_run_option
@jobs_option("Shards in flight, each written by a process of its own")
@no_part_option("it makes one version of the data set")
@cluster_options
@json_option
def compact(
    dataset: str,
    *,
    drop_old: bool,
    dry_run: bool,
    jobs: int | None,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
) -> None:
    """Write the shards of DATASET that hold removed samples anew, without them, as a new version of the data set.

    Only these shards are read and compared with their checksums. The order of the other samples stays. Older versions
    stay, too, until --drop-old.
    """
    from prep.versions.compact import compact as compact_shards
    from prep.versions.publish import open_newest

    with endpoint_for([dataset], endpoint, embedded_dir, writes=[dataset]) as answering:
        report = compact_shards(
            open_newest(dataset, endpoint=answering),
            drop_old=drop_old,
            command=command_line(click.get_current_context()),
            dry_run=dry_run,
            jobs=jobs,
            show_progress=not as_json,
        )
    print_some("would delete" if dry_run else "deleted", report.deleted)
    if report.num_rewritten:
        sizes = f"{format_bytes(report.bytes_before)} -> {format_bytes(report.bytes_after)}"
        line = (
            f"{'would write' if dry_run else 'wrote'} {counted(report.num_rewritten, 'shard')} anew without "
            f"{counted(report.num_removed, 'sample')}, {sizes}"
        )
    else:
        line = "nothing to compact: no shard holds a removed sample"
    if drop_old:
        versions = ", ".join(map(str, report.dropped_versions)) or "none"
        line += (
            f"; {'would delete' if dry_run else 'deleted'} older versions: {versions}, "
            f"{counted(len(report.deleted), 'object')}"
        )
    print_result(f"{line} -> '{report.url}@{report.version}'", fields_of(report), as_json=as_json)
