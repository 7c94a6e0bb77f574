"""Objects that the tests of fetchers serve, break and compare."""

import contextlib
import os
import random
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import xxhash

from dali_pipes.cache.extents import Extent
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.store.cluster.access import ClusterAccess
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.objects import StoredObjects
from dali_pipes.store.http.objects import ObjectFetcher, RetryPolicy
from dali_pipes.store.patience import Patience
from tests.servers.faulty import FaultyProxy
from tests.servers.scripted import Visit

DATA = random.Random(0).randbytes(2_500_001)
OTHER = random.Random(1).randbytes(2_500_001)
# A server on a loaded machine must not look silent. `PATIENT` is for faults that are mended, `BRIEF` for all others.
RETRY = RetryPolicy(silence_s=60.0, connect_timeout_s=60.0)
PATIENT = Patience(patience_s=60.0, longest_pause_s=0.02)
BRIEF = Patience(patience_s=0.2, longest_pause_s=0.02)
SENDFILE_MARGIN = 1000  # bytes of the file around an extent


class LookedAtClock:
    """Stands in for the module ``time`` of a client: time passes when the client looks at the clock, 50 ms each time.

    So a server that sends a piece after every second look is slow for the client, on a machine of any speed and load.
    A client that waits looks three times or more.
    """

    def __init__(self) -> None:
        self.num_looks = self.num_pieces = 0

    def monotonic(self) -> float:
        self.num_looks += 1
        return 0.05 * self.num_looks

    def is_due(self) -> bool:
        """Whether a server may send the next piece."""
        is_due = self.num_looks >= 2 * (self.num_pieces + 1)
        self.num_pieces += is_due
        return is_due


class Place:
    """A file with an extent in its middle."""

    def __init__(self, size: int = len(DATA)) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (the garbage collector closes it)
        self._file.write(b"\xaa" * (size + 2 * SENDFILE_MARGIN))
        self.extent = Extent(self._file.fileno(), SENDFILE_MARGIN, size)

    def holds(self, data: bytes) -> bool:
        """Whether these bytes lie there, and its neighbours are as they were."""
        margin = b"\xaa" * SENDFILE_MARGIN
        size = self.extent.size + 2 * SENDFILE_MARGIN
        return os.pread(self._file.fileno(), size + 1, 0) == margin + data + margin


def checksum(data: bytes) -> int:
    found: int = xxhash.xxh64_intdigest(data)
    return found


@contextlib.contextmanager
def fetching(
    endpoint: str, bucket: str, *, retry: RetryPolicy = RETRY, patience: Patience = BRIEF, **access: Any
) -> Iterator[ObjectFetcher]:
    """A fetcher from a cluster; ``access`` are arguments of `ClusterAccess`, such as a token and certificates."""
    source = StoredObjects(ClusterAccess(endpoint=endpoint, **access), bucket)
    with ObjectFetcher(source, retry=retry, patience=patience) as fetcher:
        yield fetcher


def fetch_object(fetcher: ObjectFetcher, *, name: str = "a/x.tar", times: int = 1, num_connections: int = 1) -> None:
    """Fetch an object whose bytes are ``DATA``, and hold every byte against them."""
    place = Place()
    for _ in range(times):
        assert fetcher.fetch([Wanted(name, place.extent, checksum(DATA))], num_connections=num_connections)
    assert place.holds(DATA)


def fetch_through(proxy: FaultyProxy, store: AisStore, *, num_connections: int = 1, **options: Any) -> None:
    """Fetch ``a/x.tar``, patiently, and hold every byte against what was written."""
    with fetching(proxy.endpoint, store.bucket, **({"patience": PATIENT} | options)) as fetcher:
        fetch_object(fetcher, num_connections=num_connections)


def fails(
    fetcher: ObjectFetcher,
    error: type[Exception],
    text: str,
    *,
    name: str = "a/x.tar",
    place: Place | None = None,
    num_connections: int = 1,
) -> str:
    """The text of the error that a fetch of ``DATA`` must raise."""
    place = place or Place()
    with pytest.raises(error, match=text) as raised:
        fetcher.fetch([Wanted(name, place.extent, checksum(DATA))], num_connections=num_connections)
    return str(raised.value)


def ranged(visit: Visit, data: bytes, *, shift: int = 0, version: bytes = b'ETag: "1"') -> bytes:
    """Build the answer to a ranged request; with ``shift``, its header states another range."""
    found = re.search(rb"Range: bytes=(\d+)-(\d*)", visit.request)
    assert found is not None
    start, stop = int(found[1]), min(len(data), int(found[2]) + 1 if found[2] else len(data))
    place = b"Content-Range: bytes %d-%d/%d" % (start + shift, stop - 1 + shift, len(data))
    head = b"HTTP/1.1 206 Part\r\n%b\r\n%b\r\nContent-Length: %d\r\n\r\n" % (version, place, stop - start)
    return head + data[start:stop]
