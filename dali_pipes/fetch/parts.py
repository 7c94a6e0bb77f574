"""An object that is being fetched, and the parts that it is read in."""

import time
from dataclasses import dataclass, field

from dali_pipes.cache.extents import Extent
from dali_pipes.store.checksums import CHECKSUM_TYPES, DEFAULT_CHECKSUM_TYPE, NO_CHECKSUM_TYPE, Checksum, new_checksum

XXH64_TYPES = (DEFAULT_CHECKSUM_TYPE, "xxhash")  # AIStore has two implementations of it, and a name for each


class FaultError(Exception):
    """An attempt failed; another one may succeed.

    Args:
        cause: What happened.
        retry_after_s: The server asked to wait for so long.
        is_fruitless: The bytes that came are of no use.
    """

    def __init__(self, cause: str, *, retry_after_s: float = 0.0, is_fruitless: bool = False) -> None:
        super().__init__(cause)
        self.retry_after_s, self.is_fruitless = retry_after_s, is_fruitless


@dataclass
class FetchedObject:
    """One object being fetched."""

    name: str
    where: str
    """``ais://pets/x.tar``, for messages."""
    endpoint: str
    extent: Extent
    checksum: int
    """XXH64, from the manifest."""
    started: float = field(default_factory=time.monotonic)
    target: str | None = None
    """The URL that the proxy redirected to; other ranges of the object are read there without asking the proxy."""
    version: tuple[str, ...] | None = None
    """Version, type and value of AIStore's own checksum, as the first answer reported them."""
    wrong: list[tuple[int, str]] = field(default_factory=list)
    """Bodies that ended in order but were not the manifest's: number of bytes and XXH64 of each."""

    @property
    def address(self) -> str:
        """Object and cluster, for messages."""
        return f"'{self.where}' at {self.endpoint}"

    @property
    def checksum_type(self) -> str:
        """Type of AIStore's own checksum, empty where none was reported."""
        return self.version[1] if self.version else ""

    def hashes(self) -> list[Checksum]:
        """New checksums: the manifest's, and AIStore's own if it has another type that we know."""
        kind = self.checksum_type
        is_other = kind in CHECKSUM_TYPES and kind not in (*XXH64_TYPES, NO_CHECKSUM_TYPE)
        return [new_checksum(DEFAULT_CHECKSUM_TYPE), *([new_checksum(kind)] if is_other else [])]

    def differs(self, digest: str) -> str:
        """Says that the bytes which came have another checksum than the manifest's."""
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
    """One of several parts, which are hashed together at the end. A single part is hashed while it comes."""
    position: int = 0
    """The next byte that is missing."""
    hashes: list[Checksum] = field(default_factory=list)
    """Of the bytes before ``position``."""
    num_received: int = 0
    """Bytes, over all attempts."""

    def restart(self) -> None:
        """Forget what came."""
        self.position = self.start
        self.hashes = []

    def advance(self, num: int) -> None:
        """Count bytes that came."""
        self.position += num
        self.num_received += num
