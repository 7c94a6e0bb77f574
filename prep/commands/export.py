"""``dali-pipes prep export tfrecord``."""

from pathlib import Path
from typing import Any

import click

from dali_pipes.commands.options import cluster_options, endpoint_for, format_bytes, json_option, size
from prep.commands.options import allow_missing_option, jobs_option, no_part_option, overwrite_option, pairs_option
from prep.commands.output import counted, fields_of, print_result, there_already


@click.group()
def export() -> None:
    """Write the samples of shards in another format."""


@export.command("tfrecord", short_help="TFRecord files of tf.train.Example.")
@click.argument("url")
@click.argument("out")
@click.option(
    "--photo",
    metavar="COMPONENT",
    help='The photo; "jpg;png" takes the first that a sample has.  [default: the first photo not named like a mask]',
)
@pairs_option(
    "--feature",
    "features",
    metavar="FEATURE=COMPONENT",
    help="A component to write as bytes, and the name of its feature; may be repeated. Other components are then left "
    "out.  [default: all except the photo and cls, under their own names, such as trimap.png]",
)
@click.option("--max-bytes", type=size, help="Bytes per file.  [default: a file for each shard]")
@overwrite_option("other files under the output's names")
@jobs_option("Files in flight, each written by a process of its own")
@allow_missing_option
@no_part_option("it writes the files of one set; name some of the shards to each process, with braces")
@cluster_options
@json_option
def export_tfrecord(
    url: str,
    out: str,
    *,
    features: dict[str, str],
    allow_missing: bool,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Export the indexed shards at URL to TFRecord files at OUT, each with the index that DALI's reader needs.

    URL is ais://BUCKET/PREFIX, DIRECTORY[/PREFIX], a glob of local tars, or shards with braces. OUT is
    ais://BUCKET[/PREFIX] or DIRECTORY[/PREFIX]. If its last part ends in "-" or "_", the files' names start with it;
    any other is a folder, in which names start with "samples-". A missing bucket is created.

    A record is a tf.train.Example: image/encoded, image/format, image/height, image/width, image/class/label (from
    cls), image/class/text (from the class table), image/filename (the key), and the other components as bytes.

    The command writes PREFIX000000.tfrecord, ... and PREFIX000000.idx, ...; an .idx file has one line for each record:
    offset and size. Run an interrupted export again to finish it: files that are already complete are not written
    again. `prep pack tfrecords --key image/filename` reads the files.
    """
    from dali_pipes.data_set.named import name_shards
    from prep.export.export import export_tfrecords
    from prep.pack.pack import open_target

    with endpoint_for(url, endpoint, embedded_dir, writes=[out]) as answering:
        store, prefix = open_target(out, endpoint=answering)
        report = export_tfrecords(
            name_shards(url, endpoint=answering, allow_missing=allow_missing),
            store=store,
            prefix=prefix,
            features=features or None,
            show_progress=not as_json,
            **options,
        )
    notes = there_already(len(report.files) - report.num_written, "files")
    print_result(
        f"wrote {counted(len(report.files), 'file')}, {counted(report.num_samples, 'sample')}, "
        f"{format_bytes(report.num_bytes)} in {report.elapsed_s:.1f} s{' (' + notes[0] + ')' if notes else ''}"
        f" -> {store.locate(report.files[0])}{', ...' if len(report.files) > 1 else ''}",
        fields_of(report),
        as_json=as_json,
    )
