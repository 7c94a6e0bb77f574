"""Write the index of a set of shards: a shard index for each, one column file and one manifest.

Each shard is read once, front to back: its checksum is computed, its members are located, its photos' headers are read.
For shards that are read through an ETL (`dali_pipes.store.cluster.etl`), the transformed ones are indexed.
"""

from collections.abc import Mapping

from dali_pipes.data_set.indexing import index_each
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import columns_name, manifest_name
from dali_pipes.store.shard_set import ShardSet


def index_shards(
    shards: ShardSet, *, classes: Mapping[int, str] | None = None, show_progress: bool = False
) -> Manifest:
    """Write a shard index beside each shard, the column file beside them all and, last, the manifest.

    Args:
        shards: The shards, in the order in which their samples are numbered.
        classes: Class id -> name; ``None``: the table that `pack` left beside the shards, if there is one.
        show_progress: Draw a bar, in bytes.

    Raises:
        DataError: If a shard is cut off or empty, samples are interleaved or doubled, a name is not UTF-8 or holds a
            control character, a header claims more than there is, or a label is not an integer: the text names shard,
            key and component. Nothing is written for that shard, and no manifest.
        StoreError: If a shard is missing, or the ETL that it is read through fails.
    """
    manifest, columns = index_each(shards, shards.store.write, classes=classes, show_progress=show_progress)
    shards.store.write(columns_name(shards.prefix), columns.to_bytes(manifest=manifest.digest))
    shards.store.write(manifest_name(shards.prefix), manifest.to_bytes())
    return manifest
