"""``dali-pipes prep index``."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dali_pipes.commands.options import cluster_options, endpoint_for, format_bytes, json_option
from dali_pipes.commands.output import counted, print_result
from prep.commands.options import (
    allow_missing_option,
    on_option,
    overwrite_option,
    part_option,
    print_empty_part,
    urls_argument,
)

if TYPE_CHECKING:
    from prep.part import JobPart
    from prep.workers import WorkersKind


@click.command()
@urls_argument
@click.option(
    "--etl",
    metavar="NAME",
    help="Index the shards as this running ETL of the cluster gives them, for loader(dp.Shards(urls, etl=NAME)).  "
    "[default: as they are stored]",
)
@part_option("write the shard indexes of every N-th shard, and no manifest; --merge makes it when all parts are done")
@click.option(
    "--merge",
    is_flag=True,
    help="Write the column file and the manifest of the shard indexes that all parts have written; no shard is read.",
)
@on_option
@click.option(
    "--anew",
    is_flag=True,
    help="Read each shard.  [default: take over the shard indexes that are surely of the shards as they are now]",
)
@allow_missing_option
@overwrite_option("a manifest that lists shards which are not named")
@cluster_options
@json_option
def index(
    urls: tuple[str, ...],
    *,
    etl: str | None,
    part: "JobPart",
    merge: bool,
    on: "WorkersKind",
    anew: bool,
    allow_missing: bool,
    overwrite: bool,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
) -> None:
    """Index the shards at URL: where each component of each sample lies, and how large each photo is.

    URL is ais://BUCKET/PREFIX, DIRECTORY[/PREFIX], a glob of local tars, or shards with braces. Each shard is read
    once.

    The command writes a shard index for each shard; one column file, with the keys and labels of all samples; and,
    last, one manifest. They lie in the folder .dali-pipes: of the bucket, or beside the shards of a directory. With
    --etl, each shard is read through the ETL, and these files carry its name.

    An interrupted command goes on when it is run again: a shard is not read if AIStore's checksum says that its index
    is of these bytes; in other stores, if the index was written after the shard's last change.

    From then on the manifest says which shards the data set has: run the command again when shards were added. It never
    drops a shard from a manifest without --overwrite or --allow-missing, and waits while the cluster moves objects and
    lists only some. Shards that a command has written, by its record, must be there.
    """
    from dali_pipes.data_set.named import list_shards
    from dali_pipes.data_set.written import stored_records
    from dali_pipes.formats.names import manifest_name
    from dali_pipes.store.cluster.transformed import through_etl
    from dali_pipes.store.urls import is_remote
    from prep.index import index_part, index_shards, merge_indexes

    started = time.perf_counter()
    if etl is not None and endpoint is None and is_remote(urls[0]):
        raise click.UsageError("--etl NAME needs --endpoint; an embedded node's ETLs end with it.")
    if merge and not part.is_all:
        raise click.UsageError("--merge follows when all parts are done; run it without --part.")
    if overwrite and not part.is_all:
        raise click.UsageError("--overwrite replaces a manifest, and a part writes none; give it to --merge.")
    if merge and anew:
        raise click.UsageError("--merge reads no shard; give --anew to the parts.")
    taken_over: list[int] = []
    how: dict[str, Any] = {"on": on, "show_progress": not as_json}
    keeping: dict[str, Any] = {"overwrite": overwrite, "allow_missing": allow_missing}
    with endpoint_for(urls, endpoint, embedded_dir) as answering:
        shards = list_shards(urls, endpoint=answering, allow_missing=allow_missing)
        if etl is not None:
            shards = through_etl(shards, etl)
        if not part.is_all:
            shards = index_part(shards, part, anew=anew, on_before=taken_over.append, **how)
        elif merge:
            manifest = merge_indexes(shards, **keeping, **how)
        else:
            manifest = index_shards(shards, anew=anew, on_before=taken_over.append, **keeping, **how)
        # The manifest names the shards from now on, and the record may name more.
        if allow_missing and etl is None and part.is_all:
            for name in stored_records(shards.store, shards.prefix):
                shards.store.delete(name)
    elapsed_s, num_before = time.perf_counter() - started, sum(taken_over)
    if not shards.names:
        print_empty_part(part, shards.url, as_json=as_json)
        return
    document: dict[str, Any] = {"num_indexed_before": num_before, "elapsed_s": elapsed_s}
    line = f"indexed {counted(len(shards.names), 'shard')}{f' ({num_before:,} indexed before)' if num_before else ''}"
    if part.is_all:
        where = shards.store.locate(manifest_name(shards.prefix))
        amount = f"{counted(manifest.num_samples, 'sample')}, {format_bytes(manifest.total_bytes)}"
        line = f"{line}, {amount} in {elapsed_s:.1f} s -> {where}"
        document |= {
            "manifest": where,
            "etl": etl,
            "digest": manifest.digest,
            "num_shards": manifest.num_shards,
            "num_samples": manifest.num_samples,
            "num_bytes": manifest.total_bytes,
            "components": dict(manifest.components),
            "classes": dict(manifest.classes),
        }
    else:
        what = f"part {part} of '{shards.url}'; when all parts are done, --merge makes the manifest"
        line = f"{line} in {elapsed_s:.1f} s: {what}"
        document |= {"part": str(part), "url": shards.url, "shards": shards.names}
    print_result(line, document, as_json=as_json)
