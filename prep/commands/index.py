"""``dali-pipes prep index``."""

import time
from pathlib import Path

import click

from dali_pipes.commands.options import cluster_options, endpoint_for, format_bytes, json_option
from prep.commands.options import overwrite_option, urls_argument
from prep.commands.output import counted, print_result


@click.command()
@urls_argument
@click.option(
    "--etl",
    metavar="NAME",
    help="Index the shards as this running ETL of the cluster gives them, for loader(dp.Shards(urls, etl=NAME)).  "
    "[default: as they are stored]",
)
@overwrite_option("a manifest that lists shards which are no longer there, or are not named")
@cluster_options
@json_option
def index(
    urls: tuple[str, ...],
    *,
    etl: str | None,
    overwrite: bool,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
) -> None:
    """Index the shards at URL: where each component of each sample lies, and how large each photo is.

    URL is ais://BUCKET/PREFIX, DIRECTORY[/PREFIX], a glob of local tars, or shards with braces. Each shard is read
    once.

    The command writes a shard index beside each shard; one column file, with the keys and labels of all samples; and,
    last, one manifest. With --etl, each shard is read through the ETL, and these files carry its name: they lie beside
    those of the stored shards.

    From then on the manifest says which shards the data set has: run the command again when shards were added. It never
    drops a shard from a manifest without --overwrite, and refuses while the cluster moves objects and lists only some.
    """
    from dali_pipes.data_set.named import list_shards
    from dali_pipes.formats.names import manifest_name
    from dali_pipes.store.cluster.transformed import through_etl
    from dali_pipes.store.urls import is_remote, resolve_shards
    from prep.index import index_shards

    started = time.perf_counter()
    if etl is not None and endpoint is None and is_remote(urls[0]):
        raise click.UsageError("--etl NAME needs --endpoint; an embedded node's ETLs end with it.")
    with endpoint_for(urls, endpoint, embedded_dir) as answering:
        shards = (resolve_shards if overwrite else list_shards)(urls, endpoint=answering)
        if etl is not None:
            shards = through_etl(shards, etl)
        manifest = index_shards(shards, overwrite=overwrite, show_progress=not as_json)
    elapsed_s = time.perf_counter() - started
    where = shards.store.locate(manifest_name(shards.prefix))
    print_result(
        f"indexed {counted(manifest.num_shards, 'shard')}, {counted(manifest.num_samples, 'sample')}, "
        f"{format_bytes(manifest.total_bytes)} in {elapsed_s:.1f} s -> {where}",
        {
            "manifest": where,
            "digest": manifest.digest,
            "num_shards": manifest.num_shards,
            "num_samples": manifest.num_samples,
            "num_bytes": manifest.total_bytes,
            "etl": etl,
            "components": dict(manifest.components),
            "classes": {str(label): name for label, name in manifest.classes.items()},
            "elapsed_s": elapsed_s,
        },
        as_json=as_json,
    )
