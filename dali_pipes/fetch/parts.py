"""An object that is being fetched: its parts, and the way of their bytes into its extent."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from dali_pipes.cache.extents import BLOCK_BYTES, Extent
from dali_pipes.errors import CacheError, StoreError, printable
from dali_pipes.fetch.transport.event_loop import NOW, Task
from dali_pipes.fetch.transport.http1 import AnswerBody, Pipe
from dali_pipes.store.checksums import (
    CHECKSUM_TYPES,
    DEFAULT_CHECKSUM_TYPE,
    NO_CHECKSUM_TYPE,
    XXH64_TYPES,
    Checksum,
    new_checksum,
)

CAUSE_CHARS = 1000


class ObjectRequest(NamedTuple):
    """What to ask for to get an object."""

    url: str
    headers: tuple[tuple[str, str], ...] = ()
    """Fields of the request's head, for the URL's own host alone."""
    expires_s: float = math.inf
    """Seconds for which its signature is good."""


class Version(NamedTuple):
    """What an answer says of an object's version; empty where it says nothing."""

    version: str
    checksum_type: str = ""
    """Type of the store's own checksum."""
    checksum: str = ""


class FaultError(Exception):
    """An attempt failed; another one may succeed.

    The server asked for a pause of ``retry_after_s``. ``is_away``: the store, or a part of it, does not serve the
    object now; otherwise the store gave a wrong answer. ``is_fruitless``: the bytes that came are of no use, or too
    few to continue.
    """

    def __init__(
        self, cause: str, *, retry_after_s: float = 0.0, is_away: bool = False, is_fruitless: bool = False
    ) -> None:
        super().__init__(printable(cause, max_chars=CAUSE_CHARS))
        self.retry_after_s, self.is_away, self.is_fruitless = retry_after_s, is_away, is_fruitless


class MissingObjectError(StoreError):
    """The store does not find an object that the manifest lists; ``said`` is its answer."""

    def __init__(self, text: str, *, said: str = "") -> None:  # the default lets it be pickled
        super().__init__(text)
        self.said = said


@dataclass
class FetchedObject:
    name: str
    where: str
    """``ais://pets/x.tar``, for messages."""
    endpoint: str
    extent: Extent
    checksum: int
    """XXH64, from the manifest."""
    received: Callable[[int], None] = lambda _: None
    """See `dali_pipes.fetch.fetcher.Wanted`."""
    started: float = field(default_factory=time.monotonic)
    target: str | None = None
    """The URL that brought bytes, after redirects; other ranges of the object are read there at once."""
    version: Version | None = None
    """As the first answer reported it."""
    signed: ObjectRequest | None = None
    """What is asked for, if that has a signature that can expire; all ranges use it."""
    signed_until: float = math.inf
    """`time.monotonic()` when the signature expires."""
    num_refused: int = 0
    """Signatures that were refused, one after the other."""
    map_version: int | None = None
    """The version of the cluster's map when it was last looked at for this object."""
    settles_at: float = 0.0
    """`time.monotonic()` until which a change of the map may explain that the object is missing."""
    wrong: list[tuple[int, str]] = field(default_factory=list)
    """Bodies that ended properly but differ from the manifest: number of bytes and XXH64 of each."""

    @property
    def address(self) -> str:
        """Object and store, for messages."""
        return f"'{self.where}' at {self.endpoint}"

    @property
    def checksum_type(self) -> str:
        """Type of the store's own checksum, empty if none was reported."""
        return self.version.checksum_type if self.version else ""

    def hashes(self) -> list[Checksum]:
        """Start new checksums: the manifest's, and the store's own if it has another type that we know."""
        kind = self.checksum_type
        is_other = kind in CHECKSUM_TYPES and kind not in (*XXH64_TYPES, NO_CHECKSUM_TYPE)
        return [new_checksum(DEFAULT_CHECKSUM_TYPE), *([new_checksum(kind)] if is_other else [])]

    def differs(self, digest: str) -> str:
        return f"its bytes have the xxhash2 {digest}, the manifest says {self.checksum:016x}"


class NoRangesError(Exception):
    """The object must be read in one piece."""

    def __init__(self, item: FetchedObject, cause: str, *, is_lasting: bool = False) -> None:
        super().__init__(cause)
        self.where = item.where
        self.is_lasting = is_lasting
        """Whether the bucket's other objects must be read in one piece too."""


@dataclass
class ObjectPart:
    """Bytes ``[start, stop)`` of an object, read front to back by one connection at a time."""

    start: int
    stop: int
    is_range: bool
    """Whether it is one of several parts, which are hashed together at the end. A single part is hashed at once."""
    position: int = 0
    """The next byte that is missing."""
    hashes: list[Checksum] = field(default_factory=list)
    """The checksums of the bytes before ``position``."""
    num_received: int = 0
    """Bytes, over all attempts."""

    def restart(self) -> None:
        """Forget the bytes that came."""
        self.position = self.start
        self.hashes = []

    def advance(self, num: int) -> None:
        self.position += num
        self.num_received += num


class BodyWriter:
    """Writes bodies into extents: through a pipe inside the kernel if possible, else through a buffer. Owns pipes."""

    def __init__(self) -> None:
        self._idle_pipes: list[Pipe] = []
        self._can_splice = True
        # Shared by all tasks: a task does not wait between filling it and writing it.
        self._block = memoryview(bytearray(BLOCK_BYTES))

    def close(self) -> None:
        """Close all pipes. Can be called twice."""
        while self._idle_pipes:
            self._idle_pipes.pop().close()

    def write_next(self, body: AnswerBody, extent: Extent, part: ObjectPart) -> Task[int]:
        """Write the next bytes of a part; returns their number, 0 at the end of the body."""
        if self._can_splice and body.can_splice:
            return (yield from self._splice(body, extent, part))
        num = yield from body.receive(self._block[: part.stop - part.position])
        extent.write(self._block[:num], part.position)
        _update(part.hashes, self._block[:num])
        return num

    def _splice(self, body: AnswerBody, extent: Extent, part: ObjectPart) -> Task[int]:
        """Move bytes through a pipe into the file, and hash them while they are in the page cache."""
        pipe = self._idle_pipes.pop() if self._idle_pipes else Pipe()
        try:
            num = yield from body.splice(pipe)
            self._empty(pipe, extent, part.position, num)
        except CacheError:
            pipe.close()  # some bytes are left in it
            raise
        except BaseException:
            self._idle_pipes.append(pipe)
            raise
        self._idle_pipes.append(pipe)
        if part.hashes:
            stop = part.position + num
            for position in range(part.position, stop, BLOCK_BYTES):
                _update(part.hashes, extent.read(position, min(BLOCK_BYTES, stop - position)))
        return num

    def _empty(self, pipe: Pipe, extent: Extent, position: int, num: int) -> None:
        stop = position + num
        try:
            while position < stop:
                position += os.splice(pipe.source, extent.file, stop - position, offset_dst=extent.start + position)
        except OSError:
            # Through a buffer: this needs no splice in the file system, and its errors describe the fault of a disk.
            while position < stop:
                block = os.read(pipe.source, stop - position)
                extent.write(block, position)
                position += len(block)
            self._can_splice = False


def hash_extent(extent: Extent, hashes: list[Checksum]) -> Task[None]:
    for position in range(0, extent.size, BLOCK_BYTES):
        _update(hashes, extent.read(position, BLOCK_BYTES))
        yield NOW


def _update(hashes: list[Checksum], data: bytes | memoryview) -> None:
    for state in hashes:
        state.update(data)
