"""``dali-pipes prep remove``."""

from pathlib import Path

import click

from dali_pipes.commands.options import cluster_options, endpoint_for, json_option
from dali_pipes.commands.output import counted, fields_of, print_result
from prep.commands.options import command_line, dry_run_option, no_part_option


@click.command()
@click.argument("dataset")
@click.option("--key", "keys", metavar="KEY", multiple=True, help="A sample's key; may be repeated.")
@click.option(
    "--list",
    "lists",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="A list of samples: KEY or SHARD<tab>KEY on each line, or a quarantine file, as a loader's "
    "Select(exclude=...) takes them; may be repeated.",
)
@click.option("--shard", "shards", metavar="NAME", multiple=True, help="A shard with all its samples; may be repeated.")
@dry_run_option
@no_part_option("it writes one manifest")
@cluster_options
@json_option
def remove(
    dataset: str,
    *,
    keys: tuple[str, ...],
    lists: tuple[Path, ...],
    shards: tuple[str, ...],
    dry_run: bool,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
) -> None:
    """Remove samples from DATASET: write a new version of the data set without them.

    DATASET is an indexed data set: ais://BUCKET/PREFIX or DIRECTORY[/PREFIX]. No shard is written: the new version's
    manifest says which samples are left out of every epoch. dali-pipes of an earlier version refuses such a manifest.
    Older versions stay, with the samples. To write shards without them, and to delete older versions: prep compact.
    """
    from prep.versions.publish import open_newest
    from prep.versions.remove import remove as remove_samples

    if not (keys or lists or shards):
        raise click.UsageError("name samples with --key or --list, or shards with --shard")
    with endpoint_for([dataset], endpoint, embedded_dir, writes=[dataset]) as answering:
        report = remove_samples(
            open_newest(dataset, endpoint=answering),
            lists=lists,
            keys=keys,
            shards=shards,
            command=command_line(click.get_current_context()),
            dry_run=dry_run,
        )
    now = f"has {counted(report.num_shards, 'shard')}, {counted(report.num_samples, 'sample')}"
    what = counted(report.num_removed, "sample")
    if report.num_removed_shards:
        what += f", with {counted(report.num_removed_shards, 'shard')}"
    if not (report.num_removed or report.num_removed_shards):
        line = f"nothing to remove: '{report.url}@{report.version}' lacks these already; it {now}"
    elif dry_run:
        line = f"would remove {what} from '{report.url}', which then {now}"
    else:
        line = f"removed {what} -> '{report.url}@{report.version}' {now}"
    print_result(line, fields_of(report), as_json=as_json)
