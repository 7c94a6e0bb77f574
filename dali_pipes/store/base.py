"""The interface of a store: a place that holds objects: a bucket of AIStore or of a cloud, or a directory.

`SCHEMES` says which URLs name which kind of store.

A store's attributes say what it can do (`Store.directory`, `Store.cluster`, `Store.etl`). Code outside this folder
reads them, and never asks for a store's class. Object names are relative to the bucket or directory.
"""

import builtins
import contextlib
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from dali_pipes.errors import StoreError
from dali_pipes.store.http.answers import MissingObjectError
from dali_pipes.store.shard_names import BucketParts, ObjectEntry, check_object_name

if TYPE_CHECKING:
    from aistore import Client

    from dali_pipes.fetch.fetcher import Fetcher
    from dali_pipes.formats.shard_index import ComponentRange
    from dali_pipes.store.cluster.access import ClusterAccess, Proxies
    from dali_pipes.store.cluster.client import ClusterClient
    from dali_pipes.store.http.objects import ObjectFetcher, ObjectFile
    from dali_pipes.store.listings import Found
    from dali_pipes.store.patience import Patience
    from dali_pipes.store.ranges import Way

# Whoever reads a shard takes larger pieces, which bypass the buffer.
_BUFFER_BYTES = 64 << 10


class Scheme(NamedTuple):
    """The beginning of URLs that name a bucket or a server."""

    opener: str
    """``module:function``: called with the scheme and the bucket or host, it opens the store. Imported when needed."""
    provider: str = ""
    """AIStore's name for the cloud: with an endpoint, the bucket is read through the cluster that has it as a
    backend. Empty: never."""
    is_read_only: bool = False


_CLOUD = "dali_pipes.store.cloud.bucket:open_bucket"
SCHEMES = {
    "ais": Scheme("dali_pipes.store.cluster.ais:open_bucket", provider="ais"),
    "s3": Scheme(_CLOUD, provider="aws"),
    "gs": Scheme(_CLOUD, provider="gcp"),
    "az": Scheme(_CLOUD, provider="azure"),
    "https": Scheme(_CLOUD, is_read_only=True),
    "http": Scheme(_CLOUD, is_read_only=True),
}
"""A new store is a line here, and a module with its opener."""
PROVIDERS = {scheme: found.provider for scheme, found in SCHEMES.items() if found.provider}
SERVERS = tuple(scheme for scheme, found in SCHEMES.items() if found.is_read_only)
DIRECT = "direct"
"""The endpoint that stands for none: buckets of clouds are read without AIStore, also where AIS_ENDPOINT is set."""


class Store(ABC):
    """A bucket or a directory. It pickles. All methods raise `StoreError` with the object's URL in the text."""

    directory: Path | None = None
    """The directory whose files are the objects; ``None`` for a bucket."""
    endpoint: str | None = None
    """AIStore's proxy, through which a bucket is reached; ``None`` without AIStore."""
    etl: str = ""
    """The ETL through which shards are read; empty for none."""

    @property
    def cluster(self) -> "Bucket | None":
        """The bucket, with a cluster's operations: dSort, ETLs, the SDK's client. ``None`` without AIStore."""
        return None

    def need_cluster(self, why: str) -> "Bucket":
        """`cluster`, or a `ValueError` that ``why`` ends."""
        if self.cluster is None:
            kind = "a directory" if self.directory is not None else "a bucket without AIStore"
            raise ValueError(f"'{self.url}' is {kind}, {why}")
        return self.cluster

    @property
    @abstractmethod
    def url(self) -> str:
        """``ais://pets`` or the directory's path; no slash at the end."""

    @abstractmethod
    def locate(self, name: str) -> str:
        """The URL or path of one object, for messages and for programs that read it directly."""

    def identity(self, name: str) -> str:
        """A text that is equal for two names of the same object: the URL, or the path with links resolved."""
        return self.locate(name)

    def check_name(self, name: str) -> None:  # noqa: B027  # a directory takes any path
        """Raise `ValueError` if this store could confuse an object's name, or a prefix of names, with another."""

    @abstractmethod
    def exists(self) -> bool:
        """Whether the bucket or directory exists."""

    @abstractmethod
    def create(self) -> None:
        """Make the bucket or directory, if it does not exist."""

    @abstractmethod
    def list(self, prefix: str) -> Sequence[ObjectEntry]:
        """The objects whose name starts with ``prefix``, sorted by name; of a directory, only the prefix's folder."""

    def list_all(self, prefix: str) -> Sequence[ObjectEntry]:
        """As `list`, for callers who take an object that is not listed for one that does not exist.

        Raises:
            StoreError: If the cluster moves objects between its nodes: it lists only some of them then.
        """
        return self.list(prefix)

    def list_names(self, prefix: str) -> "builtins.list[str]":
        """The names of what `list_all` lists."""
        return [entry.name for entry in self.list_all(prefix)]

    def find_all(self, names: Sequence[str]) -> "Found":
        """Look for the named objects in a listing: see `list_all`."""
        from dali_pipes.store.listings import Found

        return Found.among(self.list_all(os.path.commonprefix(names)), names)  # noqa: RUF071 (by character)

    @abstractmethod
    def read(self, name: str) -> bytes:
        """All bytes of a (small) object."""

    @abstractmethod
    def find(self, name: str) -> bytes | None:
        """All bytes of a (small) object, ``None`` if it does not exist. One request; `size` and `read` would be two."""

    @abstractmethod
    def read_range(self, name: str, *, start: int, size: int) -> bytes:
        """The object's bytes ``[start, start + size)``; fewer if the object ends before."""

    def read_ranges(self, ranges: "Sequence[ComponentRange]") -> "builtins.list[bytes]":
        """Read components of shards, given in any order, and compare each with its checksum.

        Raises:
            DataError: If one has other bytes than when it was indexed, also when it is read again.
        """
        from dali_pipes.store.ranges import read_in_ways, read_joined

        joined = partial(read_joined, self.read_range)
        return read_in_ways(ranges, [*self.range_ways(), joined, joined], locate=self.locate)

    def range_ways(self) -> "Sequence[Way]":
        """Return the ways to read ranges that are tried before `dali_pipes.store.ranges.read_joined`."""
        return ()

    @abstractmethod
    def open(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """A stream of the object's bytes, front to back, not seekable."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Create or replace an object; readers see all of it or nothing."""

    @abstractmethod
    def write_stream(self, name: str, chunks: Callable[[], Iterable[memoryview]], *, num_bytes: int) -> None:
        """Create or replace an object from a stream of ``num_bytes``; each call of ``chunks`` starts the stream anew.

        The object is there whole or not at all. Errors that ``chunks`` raises pass through unchanged.
        """

    def write_apart(self, names: Sequence[str], data: bytes) -> None:
        """Write a small object that must outlive a node: to the first name, or to some until two nodes have it."""
        self.write(names[0], data)

    @abstractmethod
    def write_new(self, name: str, data: bytes, *, by: str) -> bool:
        """Create a small object, unless there is one of this name; whether it was created.

        Of several writers at a time one creates the object, and the others get ``False``, or an error. ``by`` is
        letters and digits that identify the writer's job. A job that was stopped and is run again passes the same; two
        jobs at a time that pass the same may both create the object.

        Raises:
            StoreError: Also if another job has claimed the name and does not write the object: it was stopped.
        """

    def upload(self, name: str, path: Path) -> None:
        """Create or replace an object from a file."""

        def chunks() -> Iterator[memoryview]:
            view = memoryview(bytearray(1 << 20))
            try:
                with path.open("rb", buffering=0) as stream:
                    while num := stream.readinto(view):
                        yield view[:num]
            except OSError as exc:  # otherwise it would look like a connection error
                raise StoreError(f"cannot read '{path}': {exc.strerror or exc}") from exc

        try:
            num_bytes = path.stat().st_size
        except OSError as exc:
            raise StoreError(f"cannot read '{path}': {exc.strerror or exc}") from exc
        self.access().write_stream(name, chunks, num_bytes=num_bytes)

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of an object, ``None`` if it does not exist."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object, if it exists."""

    def access(self) -> "Store":
        """Return this store for worker processes: it pickles. The bucket is looked for first."""
        return self

    @abstractmethod
    def file(self, name: str, *, size: int) -> "Path | ObjectFile":
        """An object of ``size`` bytes, to be opened for reading, also in a worker process."""

    def known_checksum(self, entry: ObjectEntry) -> tuple[str, str] | None:
        """Type and value of the checksum that the store computed over an object's bytes; ``None`` if it has none."""
        return None

    @abstractmethod
    def open_fetcher(self) -> "Fetcher":
        """A fetcher that copies objects into a cache file; one thread uses it and closes it."""


class RemoteStore(Store):
    """A store on servers, whose objects our HTTP client reads."""

    prompt_s: float | None = None
    """The longest silence for a small object; ``None``: as for others."""

    @property
    @abstractmethod
    def objects(self) -> "ObjectFetcher":
        """Reads the bucket's objects; any thread may use it."""

    @abstractmethod
    def missing(self, name: str, exc: MissingObjectError) -> StoreError:
        """The error for a reader of an object that is missing, or whose bucket is."""

    def locate(self, name: str) -> str:
        return f"{self.url}/{name}"

    def check_name(self, name: str) -> None:
        check_object_name(name, url=self.locate(name))

    def read(self, name: str) -> bytes:
        with self._reading(name):
            return self.objects.read(name, silence_s=self.prompt_s)

    def find(self, name: str) -> bytes | None:
        try:
            return self.objects.read(name, silence_s=self.prompt_s)
        except MissingObjectError:
            return None

    def read_range(self, name: str, *, start: int, size: int) -> bytes:
        with self._reading(name):
            return self.objects.read(name, start=start, size=size) if size else b""

    def open(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        with self._reading(name):
            return cast("BinaryIO", io.BufferedReader(self.objects.open(name), _BUFFER_BYTES))

    def file(self, name: str, *, size: int) -> "ObjectFile":
        from dali_pipes.store.http.objects import ObjectFile

        return ObjectFile(self, name, size)

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except MissingObjectError as exc:
            raise self.missing(name, exc) from None


class Bucket(RemoteStore):
    """A bucket of a cluster, with the operations that only a cluster has."""

    endpoint: str
    bucket: str
    """Its name, as URLs have it: after its namespace, if it has one."""
    provider: str
    scheme: str
    """The scheme of its URL: ``ais``, ``s3``, ``gs`` or ``az``."""
    client: "Client"
    """The SDK's, for what `by_sdk` does not do."""
    sdk_bucket: Any
    """The SDK's bucket."""
    http: "ClusterAccess"
    proxies: "Proxies"
    checksum_type: str
    """The bucket's type of checksum; a target reports checksums of this type for the objects that it stores."""
    patience: "Patience"

    @property
    @abstractmethod
    def requests(self) -> "ClusterClient":
        """Sends requests that are not for objects' bytes."""

    @property
    def query(self) -> dict[str, str]:
        """What a request's query says of the bucket."""
        return {"provider": self.provider, **self.parts.query}

    @property
    def parts(self) -> BucketParts:
        """The parts of the bucket's name."""
        return BucketParts.parse(self.bucket)

    @abstractmethod
    def asking(self, where: str) -> contextlib.AbstractContextManager[None]:
        """Turn errors of ``requests`` into a `StoreError` that says where it failed and what to do."""

    @abstractmethod
    def has_backend(self) -> bool:
        """Whether the cluster reads the objects from elsewhere: a cloud, or another cluster."""

    @abstractmethod
    def by_sdk(self, where: str) -> contextlib.AbstractContextManager[Any]:
        """Yield the SDK's bucket; turn the SDK's errors into a `StoreError`, as `asking` does. Imports the SDK."""

    @abstractmethod
    def target_of(self, name: str) -> str:
        """The address of the target that has an object; empty if the cluster has one target, or does not say it."""

    @abstractmethod
    def learn_map(self) -> None:
        """Look at the cluster's map once, while it is well: for other proxies, and to notice later what it lacks.

        Does not wait for a cluster that is away; the next call looks again then.
        """
