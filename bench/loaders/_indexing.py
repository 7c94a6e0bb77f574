"""Shards to the index that `dali` and `memory` read, once more and elsewhere: what ``prep index`` takes, to be shown.

Every other loader that has something made of the shards first is shown with what that took, so these are, too. What
they read is the index that lies beside the shards; this one is the same, and nobody reads it.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.loaders import Prepared
from dali_pipes.data_set.indexing import index_in_memory
from dali_pipes.formats.names import columns_name, manifest_name
from dali_pipes.store.local import LocalStore

if TYPE_CHECKING:
    from dali_pipes.store.urls import ShardSet

__all__ = ["prepare"]


def prepare(shards: "ShardSet", *, directory: Path) -> Prepared:
    """Shard indexes, column file and manifest, in ``directory``; nothing is written beside the shards.

    Raises:
        DataError: As `prep.index.index_shards`.
        StoreError: If a shard is not there.
    """
    started = time.perf_counter()
    found = index_in_memory(shards)
    target = LocalStore(directory)
    for name, data in found.indexes.items():
        target.write(name, data)
    target.write(columns_name(shards.prefix), found.columns.to_bytes(manifest=found.manifest.digest))
    target.write(manifest_name(shards.prefix), found.manifest.to_bytes())
    return Prepared.of(directory, started=started)
