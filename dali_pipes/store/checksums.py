"""Compute checksums of the types that AIStore's buckets have, in the hexadecimal form of its headers."""

import hashlib
from collections.abc import Callable
from typing import Protocol

import google_crc32c
import xxhash

DEFAULT_CHECKSUM_TYPE = "xxhash2"
NO_CHECKSUM_TYPE = "none"


class Checksum(Protocol):
    """A checksum that grows with the bytes."""

    def update(self, data: bytes | memoryview, /) -> object:
        """Add bytes."""

    def hexdigest(self) -> str:
        """The checksum so far, in lower-case hexadecimal; empty for type ``none``."""


class _Crc32c:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | memoryview, /) -> None:
        self._value = google_crc32c.extend(self._value, bytes(data))  # its C code takes only bytes

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


class _NoChecksum:
    def update(self, data: bytes | memoryview, /) -> None:
        pass

    def hexdigest(self) -> str:
        return ""


_MAKERS: dict[str, Callable[[], Checksum]] = {
    "crc32c": _Crc32c,
    "md5": lambda: hashlib.md5(usedforsecurity=False),
    "sha256": hashlib.sha256,
    "sha512": hashlib.sha512,
    "xxhash": xxhash.xxh64,  # also XXH64: AIS has two implementations with a name each
    "xxhash2": xxhash.xxh64,
    NO_CHECKSUM_TYPE: _NoChecksum,
}
CHECKSUM_TYPES = tuple(_MAKERS)
"""The types, in the order in which AIS lists them."""
XXH64_TYPES = ("xxhash2", "xxhash")
"""AIStore has two implementations of XXH64, and a name for each."""


def new_checksum(checksum_type: str) -> Checksum:
    """A checksum to which no bytes were added yet.

    Raises:
        KeyError: If the type is not one of `CHECKSUM_TYPES`. Check a type that comes from a client before the call.

    >>> crc = new_checksum("crc32c")
    >>> crc.update(b"123456789")
    >>> crc.hexdigest()
    'e3069283'
    """
    return _MAKERS[checksum_type]()


def damaged(where: str, cause: str, *, target: str, bucket: str) -> str:
    """The text for an object of AIStore whose bytes on a target's disk have changed; ``target`` may be empty."""
    at = f" on the disk of the target at {target}" if target else " on its target's disk"
    return (
        f"'{where}' is damaged{at}: {cause}; write it again. A bucket with mirroring or erasure coding mends it when "
        f"it is read after 'ais bucket props set {bucket} checksum.validate_warm_get=true'; without copies, AIStore "
        "deletes the damaged object then"
    )
