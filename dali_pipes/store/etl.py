"""A bucket as an ETL shows it: its shards come transformed, and what describes them is called after the ETL.

So whoever indexes, stages or repairs shards need not know of ETLs: they ask for ``x-000000.tar`` and for
``x-manifest.safetensors``, and get the shard that the ETL makes of the one that is stored, and the manifest of such
shards, which lies beside the other one as ``x-manifest.NAME.etl.safetensors``. The class table is that of the shards.

What is not known of a transformed shard before it was read: its size, and any checksum. AIStore sends it whole or not
at all, whatever range is asked for.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from dali_pipes.formats.names import transformed_name
from dali_pipes.store.ais import AisStore
from dali_pipes.store.base import ObjectEntry, Store
from dali_pipes.store.etl_errors import asking_etl, check_running
from dali_pipes.store.urls import ShardSet

__all__ = ["TransformedStore", "etl_of", "index_command", "through_etl"]

_DESCRIBES = ".safetensors"
# Beside shards, and not called after an ETL.
_CLASSES = ".json"

_BLOCK_BYTES = 1 << 20


class TransformedStore:
    """A `dali_pipes.store.base.Store` of a bucket whose shards are read through an ETL. They cannot be written.

    Args:
        store: The bucket.
        etl: A running ETL's name; see `dali_pipes.store.etl_errors.check_running`.
    """

    def __init__(self, store: AisStore, etl: str) -> None:
        self.stored = store
        """The bucket without the ETL."""
        self.etl = etl

    @property
    def url(self) -> str:
        return self.stored.url

    def locate(self, name: str) -> str:
        return self.stored.locate(self.stored_name(name))

    def stored_name(self, name: str) -> str:
        """What an object is called in the bucket: a shard as here, what describes it after the ETL."""
        return transformed_name(name, etl=self.etl) if name.endswith(_DESCRIBES) else name

    def is_shard(self, name: str) -> bool:
        """Whether an object is read through the ETL."""
        return not name.endswith((_DESCRIBES, _CLASSES))

    def list(self, prefix: str) -> list[ObjectEntry]:
        """What the bucket lists: sizes and checksums are those of the shards as they are stored."""
        return self.stored.list(prefix)

    def read(self, name: str) -> bytes:
        if not self.is_shard(name):
            return self.stored.read(self.stored_name(name))
        with self.open(name) as stream:
            return stream.read()

    def find(self, name: str) -> bytes | None:
        """As the store's; not of a shard, which is found when it is transformed."""
        assert not self.is_shard(name), "a shard is asked for, not looked for"
        return self.stored.find(self.stored_name(name))

    def read_range(self, name: str, *, start: int, size: int) -> bytes:
        """As the store's; of a shard all that comes before is read, too, and thrown away."""
        if not self.is_shard(name):
            return self.stored.read_range(self.stored_name(name), start=start, size=size)
        with self.open(name) as stream:
            while start and (skipped := stream.read(min(start, _BLOCK_BYTES))):
                start -= len(skipped)
            pieces = []
            while size and (piece := stream.read(min(size, _BLOCK_BYTES))):
                pieces.append(piece)
                size -= len(piece)
        return b"".join(pieces)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        if not self.is_shard(name):
            with self.stored.open(self.stored_name(name)) as stream:
                yield stream
            return
        from aistore.sdk.etl import ETLConfig

        bucket = self.stored.client.bucket(self.stored.bucket, provider=self.stored.provider)
        with asking_etl(self.stored, self.etl, shard=name):
            raw: Any = bucket.object(name).get_reader(etl=ETLConfig(name=self.etl)).raw()
        with asking_etl(self.stored, self.etl, shard=name), contextlib.closing(raw):
            yield cast("BinaryIO", raw)

    def write(self, name: str, data: bytes) -> None:
        assert not self.is_shard(name), "a shard is transformed when it is read"
        self.stored.write(self.stored_name(name), data)

    def upload(self, name: str, path: Path) -> None:
        assert not self.is_shard(name), "a shard is transformed when it is read"
        self.stored.upload(self.stored_name(name), path)

    def size(self, name: str) -> int | None:
        """As the store's; of a shard as it is stored."""
        return self.stored.size(self.stored_name(name))

    def delete(self, name: str) -> None:
        assert not self.is_shard(name), "a shard is transformed when it is read"
        self.stored.delete(self.stored_name(name))


def through_etl(shards: ShardSet, etl: str) -> ShardSet:
    """The same shards as an ETL gives them, which is asked for.

    Raises:
        NoEtlError: If the cluster has none.
        StoreError: If it is not there, or does not run; names those that do.
        TypeError: If ``etl`` is no text.
        ValueError: If the shards are files, or ``etl`` is no ETL's name.
    """
    if not isinstance(etl, str):
        raise TypeError(f"etl must be the name of an ETL, got {etl!r}")
    store = shards.store
    if not isinstance(store, AisStore):
        raise ValueError(
            f"etl='{etl}' with '{shards.url}': a cluster's ETL transforms what is in its buckets; transform files once "
            f"and read those: dali-pipes prep transform '{shards.url}' OUT --function ..."
        )
    check_running(store, etl)
    return ShardSet(store=TransformedStore(store, etl), names=shards.names)


def etl_of(store: Store) -> str:
    """The ETL through which shards of a store are read; empty for none."""
    return store.etl if isinstance(store, TransformedStore) else ""


def index_command(shards: ShardSet) -> str:
    """The command that indexes these shards, for messages."""
    etl = etl_of(shards.store)
    return f"dali-pipes prep index '{shards.url}'{f' --etl {etl}' if etl else ''}"
