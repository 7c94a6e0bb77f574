"""Show a bucket as an ETL transforms it: reading a shard gives the transformed shard.

Code that indexes, stages or repairs shards need not know about ETLs. It asks for ``x-000000.tar`` and gets the shard
that the ETL makes of the stored one. It asks for ``x-manifest.safetensors`` and gets the manifest of the transformed
shards, which lies beside the other manifest as ``x-manifest.NAME.etl.safetensors``. Both share one class table.

The size and the checksum of a transformed shard are unknown until it was read. AIStore sends it whole or not at all,
whatever range is asked for.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from dali_pipes.errors import StoreError
from dali_pipes.formats.names import transformed_name
from dali_pipes.store.base import Bucket, Store, StoreAccess
from dali_pipes.store.cluster.etl import asking_etl, check_running
from dali_pipes.store.cluster.transport.http_limits import MAX_OBJECT_BYTES
from dali_pipes.store.entries import ObjectEntry
from dali_pipes.store.shard_set import ShardSet

if TYPE_CHECKING:
    from dali_pipes.fetch.through_etl import TransformedFetcher


_DESCRIBES = ".safetensors"
# Class tables lie beside the shards too, but their names do not contain an ETL's.
_CLASSES = ".json"

_BLOCK_BYTES = 1 << 20


class TransformedStore(Store):
    """A bucket whose shards are read through a running ETL. They cannot be written."""

    endpoint: str

    def __init__(self, store: Bucket, etl: str) -> None:
        self.stored = store
        """The bucket without the ETL."""
        self.etl = etl
        self.endpoint = store.endpoint

    @property
    def cluster(self) -> Bucket:
        return self.stored

    @property
    def url(self) -> str:
        return self.stored.url

    def locate(self, name: str) -> str:
        return self.stored.locate(self.stored_name(name))

    def check_name(self, name: str) -> None:
        self.stored.check_name(name)

    def exists(self) -> bool:
        return self.stored.exists()

    def create(self) -> None:
        self.stored.create()

    def stored_name(self, name: str) -> str:
        """The object's name in the bucket. A shard keeps its name; a manifest or index has the ETL in its name."""
        return transformed_name(name, etl=self.etl) if name.endswith(_DESCRIBES) else name

    def is_shard(self, name: str) -> bool:
        """Whether an object is read through the ETL."""
        return not name.endswith((_DESCRIBES, _CLASSES))

    def list(self, prefix: str) -> Sequence[ObjectEntry]:
        """List the bucket; sizes and checksums are those of the stored shards."""
        return self.stored.list(prefix)

    def list_all(self, prefix: str) -> Sequence[ObjectEntry]:
        return self.stored.list_all(prefix)

    def read(self, name: str) -> bytes:
        if not self.is_shard(name):
            return self.stored.read(self.stored_name(name))
        data = bytearray()
        with self.open(name) as stream:
            while block := stream.read(_BLOCK_BYTES):
                data += block
                if len(data) > MAX_OBJECT_BYTES:
                    raise StoreError(
                        f"'{self.locate(name)}' has more than {MAX_OBJECT_BYTES} bytes, too many for memory"
                    )
        return bytes(data)

    def find(self, name: str) -> bytes | None:
        return self.stored.find(self._beside(name))

    def read_range(self, name: str, *, start: int, size: int) -> bytes:
        """Read a range of a transformed shard; all bytes before ``start`` are read, too, and thrown away."""
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

    def access(self) -> StoreAccess:
        """The bucket's, without the ETL."""
        return self.stored.access()

    def open_fetcher(self) -> "TransformedFetcher":
        from dali_pipes.fetch.through_etl import TransformedFetcher
        from dali_pipes.fetch.transport.access import ClusterAccess

        self.stored.learn_map()
        access = ClusterAccess.from_environment(self.endpoint, proxies=self.stored.proxies)
        return TransformedFetcher(access, self, patience=self.stored.patience)

    def write(self, name: str, data: bytes) -> None:
        self.stored.write(self._beside(name), data)

    def write_stream(self, name: str, chunks: Callable[[], Iterable[memoryview]], *, num_bytes: int) -> None:
        self.stored.write_stream(self._beside(name), chunks, num_bytes=num_bytes)

    def write_new(self, name: str, data: bytes, *, by: str) -> bool:
        return self.stored.write_new(self._beside(name), data, by=by)

    def upload(self, name: str, path: Path) -> None:
        self.stored.upload(self._beside(name), path)

    def size(self, name: str) -> int | None:
        """The size of an object; of a shard, the size of the stored shard."""
        return self.stored.size(self.stored_name(name))

    def delete(self, name: str) -> None:
        self.stored.delete(self._beside(name))

    def _beside(self, name: str) -> str:
        assert not self.is_shard(name), "a shard is transformed when it is read"
        return self.stored_name(name)


def through_etl(shards: ShardSet, etl: str) -> ShardSet:
    """The same shards, read through an ETL of their cluster: see `open_transformed`."""
    store = open_transformed(shards.store, etl, url=shards.url)
    return ShardSet(store=store, names=shards.names, manifest_prefix=shards.manifest_prefix)


def open_transformed(store: Store, etl: str, *, url: str) -> TransformedStore:
    """A bucket as an ETL of its cluster gives its shards; ``url`` names the shards, for errors.

    Raises:
        NoEtlError: If the cluster cannot have ETLs.
        StoreError: If the ETL is missing or does not run; names the ETLs that run.
        TypeError: If ``etl`` is not a text.
        ValueError: If the shards are files, or ``etl`` is not a valid name of an ETL.
    """
    if not isinstance(etl, str):
        raise TypeError(f"etl must be the name of an ETL, got {etl!r}")
    if store.cluster is None:
        raise ValueError(
            f"ETL '{etl}' with '{url}': a cluster's ETL transforms only objects in its buckets; transform these "
            f"files once and read the result: dali-pipes prep transform '{url}' OUT --function ..."
        )
    check_running(store.cluster, etl)
    return TransformedStore(store.cluster, etl)
