"""Write the index of a set of shards: a shard index for each, one column file and one manifest.

Each shard is read once, front to back: its checksum is computed, its members are located, its photos' headers are read.
For shards that are read through an ETL (`dali_pipes.store.cluster.etl`), the transformed ones are indexed.
"""

import logging
from collections.abc import Callable, Mapping

from dali_pipes.data_set.indexing import find_manifest, index_each, stored_versions
from dali_pipes.errors import DataError, StoreError, shown
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import columns_name, index_name, manifest_name
from dali_pipes.store.shard_set import ShardSet
from prep.part import JobPart

_log = logging.getLogger(__name__)


def index_shards(
    shards: ShardSet,
    *,
    classes: Mapping[int, str] | None = None,
    overwrite: bool = False,
    show_progress: bool = False,
) -> Manifest:
    """Write a shard index beside each shard, the column file beside them all and, last, the manifest.

    An interrupted run leaves the old manifest as it was.

    Args:
        shards: The shards, in the order in which their samples are numbered.
        classes: Class id -> name; ``None``: the table that `pack` left beside the shards, if there is one.
        overwrite: Replace a manifest that lists other shards, too: they will belong to no data set.
        show_progress: Draw a bar, in bytes.

    Raises:
        DataError: If a shard is cut off or empty, samples are interleaved or doubled, a name is not UTF-8 or holds a
            control character, a header claims more than there is, or a label is not an integer: the text names shard,
            key and component. Nothing is written for that shard, and no manifest.
        StoreError: If a shard is missing, or the ETL that it is read through fails; if the manifest that is there lists
            a shard that is not among ``shards``, and ``overwrite`` is false; if the data set has versions, to which
            shards are added with `prep.versions`. Nothing is written then.
    """
    return _write(shards, shards.store.write, classes=classes, overwrite=overwrite, show_progress=show_progress)


def index_part(shards: ShardSet, part: JobPart, *, show_progress: bool = False) -> ShardSet:
    """Write the shard indexes of one part of the shards, and nothing else; returns these shards.

    When all parts are done, `merge_indexes` makes the manifest. It raises what `index_shards` does.
    """
    _check_has_no_versions(shards)
    own = part.of_shards(shards)
    if own.names:
        index_each(own, own.store.write, classes=None, show_progress=show_progress)
    return own


def merge_indexes(shards: ShardSet, *, overwrite: bool = False, show_progress: bool = False) -> Manifest:
    """Write the column file and, last, the manifest of shards whose indexes `index_part` has written.

    The shards are not read. The files are those that `index_shards` writes.

    Raises:
        StoreError: See `index_shards`; also if shards have no index: the text names some.
        DataError: If a shard index is not one, or not the one of its shard.
    """
    store = shards.store
    listed = store.find_all([index_name(name) for name in shards.names])
    lacking = [name for name in shards.names if index_name(name) not in listed]
    if lacking:
        raise StoreError(
            f"{len(lacking)} of {len(shards.names)} shards have no shard index: "
            f"{shown([store.locate(name) for name in lacking])}; a part is not done, or was stopped: run it again, "
            f"{shards.index_command} --part I/N"
        )
    return _write(
        shards, lambda *_: None, classes=None, overwrite=overwrite, show_progress=show_progress, is_indexed=True
    )


def _write(
    shards: ShardSet,
    keep: Callable[[str, bytes], None],
    *,
    classes: Mapping[int, str] | None,
    overwrite: bool,
    show_progress: bool,
    is_indexed: bool = False,
) -> Manifest:
    _check_has_no_versions(shards)
    if not overwrite:
        _check_keeps_all(shards)
    manifest, columns = index_each(shards, keep, classes=classes, show_progress=show_progress, is_indexed=is_indexed)
    _check_has_no_versions(shards)  # another command may have begun meanwhile
    shards.store.write(columns_name(shards.prefix), columns.to_bytes(manifest=manifest.digest))
    shards.store.write(manifest_name(shards.prefix), manifest.to_bytes())
    return manifest


def _check_has_no_versions(shards: ShardSet) -> None:
    """Refuse to index a data set anew whose manifest says more than its shards do: what was removed, and when."""
    versions = [] if shards.store.etl else stored_versions(shards.store, shards.prefix)
    if versions:
        where = shards.store.locate(shards.prefix)
        raise StoreError(
            f"'{where}' has versions ({shown(list(map(str, versions)), are_names=False)}), and only a data set without "
            f"them can be indexed anew; to add shards: dali-pipes prep add TARS '{where}'; to begin a data set of "
            f"its own: dali-pipes prep pack tars '{where}' URL"
        )


def _check_keeps_all(shards: ShardSet) -> None:
    """Refuse to replace a manifest by one that lacks a shard of it."""
    where = shards.store.locate(manifest_name(shards.prefix))
    try:
        old = find_manifest(shards)
    except DataError as exc:
        _log.warning("%s; it is replaced", exc)
        return
    kept = set(shards.names)
    lost = [name for name in old.names if name not in kept] if old is not None else []
    if old is not None and lost:
        raise StoreError(
            f"manifest '{where}' lists {old.num_shards} shards, and {len(lost)} of them are not among the "
            f"{len(kept)} to be indexed: {shown(lost)}; put them back, or name them too; --overwrite replaces the "
            "manifest, and the data set is then without them"
        )
