"""Put what a peer made of shards into their bucket, so that the peer reads it from there; and take it away again."""

import hashlib
from pathlib import Path

from dali_pipes.store.shard_set import ShardSet

FOLDER = "dali-pipes-bench"
"""Names in the bucket begin with it."""


def upload_folder(shards: ShardSet, directory: Path) -> None:
    """Upload each file of a directory into the shards' bucket, below `uploaded_prefix`."""
    prefix = uploaded_prefix(directory)
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            shards.store.upload(f"{prefix}/{path.relative_to(directory)}", path)


def uploaded_prefix(directory: Path | str) -> str:
    """The place in the bucket of the files of a directory: no two directories of a machine share one.

    >>> uploaded_prefix("/tmp/one") != uploaded_prefix("/tmp/two")
    True
    """
    return f"{FOLDER}/{hashlib.sha256(str(directory).encode()).hexdigest()[:16]}"


def remove_uploads(shards: ShardSet, directory: Path | str) -> None:
    """Delete what `upload_folder` uploaded; nothing if there is nothing."""
    for entry in shards.store.list(f"{uploaded_prefix(directory)}/"):
        shards.store.delete(entry.name)
