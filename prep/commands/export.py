"""The command ``export tfrecord``: shards to what other loaders read.

Added to `prep.commands.prep.prep` when `prep.commands.prep` has been imported, whose options it takes.
"""

from pathlib import Path

import click

from dali_pipes.commands.options import cluster_options, endpoint_for, format_bytes, json_option, size
from prep.commands.prep import counted, pairs, prep, tell

__all__ = ["export"]


@prep.group(short_help="Shards into TFRecord files.")
def export() -> None:
    """Write the samples of shards in another format."""


@export.command("tfrecord", short_help="TFRecord files of tf.train.Example.")
@click.argument("url")
@click.argument("out")
@click.option(
    "--photo",
    metavar="COMPONENT",
    help='The photo; "jpg;png" takes the first that a sample has.  [default: the first that is no mask, by names]',
)
@click.option(
    "--feature",
    "features",
    metavar="FEATURE=COMPONENT",
    multiple=True,
    callback=pairs,
    help="A component to write as bytes, and the name it gets; may be repeated. Others are then left out.  [default: "
    "each but the photo and cls, under its own name: trimap.png]",
)
@click.option("--max-bytes", type=size, help="Bytes a file.  [default: a file for each shard]")
@click.option("--overwrite", is_flag=True, help="Replace other files under the output's names.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Files in flight, each written by a process of its own.  [default: the cores, at most 16]",
)
@cluster_options
@json_option
def export_tfrecord(
    url: str,
    out: str,
    *,
    photo: str | None,
    features: dict[str, str],
    max_bytes: int | None,
    overwrite: bool,
    jobs: int | None,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
) -> None:
    """Export the indexed shards at URL to TFRecord files at OUT, each with the index that DALI's reader wants.

    URL is ais://BUCKET/PREFIX, DIRECTORY[/PREFIX], a glob of local tars, or shards with braces. OUT is
    ais://BUCKET[/PREFIX] or DIRECTORY[/PREFIX]; a last part that ends in "-" or "_" is what the names start with, any
    other is a folder, in which names start with "samples-". A bucket that is not there is made.

    A record is a tf.train.Example: image/encoded, image/format, image/height, image/width, image/class/label (from
    cls), image/class/text (from the class table), image/filename (the key), and the other components as bytes.
    Written are PREFIX000000.tfrecord, ... and PREFIX000000.idx, ...: a line a record, offset and size. An export that
    was interrupted is finished by running it again; files that are there already, byte for byte, are not written again.
    `prep pack tfrecords --key image/filename` reads them.
    """
    from dali_pipes.store.urls import is_remote, resolve_shards
    from prep.export.export import export_tfrecords
    from prep.pack.pack import open_target

    place = next(filter(is_remote, (url, out)), out)
    with endpoint_for(place, endpoint, embedded_dir) as answering:
        store, prefix = open_target(out, endpoint=answering)
        report = export_tfrecords(
            resolve_shards(url, endpoint=answering),
            store=store,
            prefix=prefix,
            photo=photo,
            features=features or None,
            max_bytes=max_bytes,
            overwrite=overwrite,
            jobs=jobs,
            show_progress=not as_json,
        )
    there = len(report.files) - report.num_written
    note = f" ({there} of the files were there already)" if there else ""
    tell(
        f"wrote {counted(len(report.files), 'file')}, {counted(report.num_samples, 'sample')}, "
        f"{format_bytes(report.num_bytes)} in {report.elapsed_s:.1f} s{note} -> {store.locate(report.files[0])}"
        f"{', ...' if len(report.files) > 1 else ''}",
        {
            "url": report.url,
            "files": report.files,
            "num_written": report.num_written,
            "num_samples": report.num_samples,
            "num_bytes": report.num_bytes,
            "index_bytes": report.index_bytes,
            "features": report.features,
            "elapsed_s": report.elapsed_s,
        },
        as_json=as_json,
    )
