"""The protocol of all fetchers, which bring objects of a store into extents."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from dali_pipes.cache.extents import Extent

# Shards in flight: enough to hide a store's latency. Each costs one connection, and one thread that mostly waits.
NUM_FETCHERS = 8


def _ignore(_: int) -> None:
    pass


class Wanted(NamedTuple):
    """An object, and the place for it."""

    name: str
    """The object's name in its store."""
    extent: Extent
    """The extent for the bytes; its size is the object's."""
    checksum: int
    """XXH64, from the manifest."""
    report: Callable[[Exception | None], None] | None = None
    """Called in the fetcher's thread: with ``None`` when the object is whole and checked, or with the error that ended
    its fetch; the other objects' fetches go on. It may be called again if an object is fetched again. ``None``: an
    error ends all fetches, and is raised."""
    received: Callable[[int], None] = _ignore
    """Called in the fetcher's thread with the number of further bytes that came."""

    def reported(self, fetch: Callable[[], bool]) -> bool:
        """Call ``fetch``, which brings this object, and report the end; returns whether to go on."""
        try:
            goes_on = fetch()
        except Exception as exc:
            if self.report is None:
                raise
            self.report(exc)
            return True
        if goes_on and self.report is not None:
            self.report(None)
        return goes_on


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
