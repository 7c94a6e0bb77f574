"""The protocol of all fetchers, which bring objects of a store into extents, and what is built of any of them."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import BinaryIO, NamedTuple, Protocol, cast

from dali_pipes.cache.extents import Extent
from dali_pipes.formats.manifest import checksum as checksum_of
from dali_pipes.store.http.wire import StoppedError

# Shards in flight: enough to hide a store's latency. Each costs one connection, and one thread that mostly waits.
NUM_FETCHERS = 8


class Wanted(NamedTuple):
    """An object, and the place for it."""

    name: str
    extent: Extent
    """The extent for the bytes; its size is the object's."""
    checksum: int
    report: Callable[[Exception | None], None] | None = None
    """Called from any thread: with ``None`` when the object is whole and checked, or with the error that ended its
    fetch; the other fetches go on. Without a function, the first error stops all fetches and is raised."""
    received: Callable[[int], None] = lambda _: None
    """Called with the number of further bytes that came, from any thread of the fetcher."""

    def reported(self, fetch: Callable[[], None]) -> None:
        """Call ``fetch``, which brings this object, and report the end."""
        try:
            fetch()
        except StoppedError:
            raise
        except Exception as exc:
            if self.report is None:
                raise
            self.report(exc)
        else:
            if self.report is not None:
                self.report(None)


class Fetcher(Protocol):
    """Brings objects of one store into extents; belongs to one thread."""

    def fetch(self, wanted: Sequence[Wanted], *, stopped: Callable[[], bool], num_connections: int = 1) -> bool:
        """Fetch objects, shards and their indexes, into their extents, and check them.

        Args:
            wanted: In the order in which to begin; a fetcher that waits for answers waits for all of them together.
            stopped: Called at least every 100 ms, or between blocks and objects; ``True`` ends the fetch.
            num_connections: The most to use for each object.

        Returns:
            Whether all objects are whole and checked, or reported an error; ``False`` only if ``stopped``.

        Raises (for objects without ``report``):
            CacheError: If bytes cannot be stored.
            DataError: If an object differs from the manifest.
            NoEtlError, StoreError: If an object cannot be read.
        """

    def close(self) -> None:
        """Close its connections. Can be called twice."""


class WithIndexes:
    """A fetcher that takes shard indexes from memory, by name, for shards that were indexed on the fly."""

    def __init__(self, shards: Fetcher, indexes: Mapping[str, bytes]) -> None:
        self._shards, self._indexes = shards, indexes

    def fetch(self, wanted: Sequence[Wanted], *, stopped: Callable[[], bool], num_connections: int = 1) -> bool:
        stored = []
        for one in wanted:
            if (data := self._indexes.get(one.name)) is None:
                stored.append(one)
                continue
            assert (len(data), checksum_of(data)) == (one.extent.size, one.checksum)
            one.reported(partial(one.extent.write, data, 0))
        return self._shards.fetch(stored, stopped=stopped, num_connections=num_connections)

    def close(self) -> None:
        """Close the fetcher of the shards."""
        self._shards.close()


class WholeShards:
    """Reads parts of shards that can only be fetched whole; keeps the last shard, checked, in a file without a name."""

    def __init__(self, open_fetcher: Callable[[], Fetcher]) -> None:
        self._open_fetcher = open_fetcher
        self._fetcher: Fetcher | None = None
        self._file: BinaryIO | None = None
        self._name = ""

    def read(self, name: str, *, shard_bytes: int, checksum: int, start: int, size: int) -> bytes:
        """Read the shard's bytes ``[start, start + size)``; raises the fetcher's errors."""
        if self._file is None or name != self._name:
            self._forget()
            if self._fetcher is None:
                self._fetcher = self._open_fetcher()
            file = cast("BinaryIO", tempfile.TemporaryFile())  # noqa: SIM115 (closed by _forget)
            try:
                extent = Extent(file.fileno(), 0, shard_bytes)
                self._fetcher.fetch([Wanted(name, extent, checksum)], stopped=lambda: False)
            except BaseException:
                file.close()
                raise
            self._file, self._name = file, name
        return Extent(self._file.fileno(), 0, shard_bytes).read(start, size)

    def close(self) -> None:
        """Drop the shard and the connections. Can be called twice."""
        self._forget()
        if self._fetcher is not None:
            self._fetcher.close()
        self._fetcher = None

    def _forget(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
