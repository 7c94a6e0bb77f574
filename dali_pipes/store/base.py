"""TODO: dali_pipes/store/base.py."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

__all__ = [
    "PROVIDERS",
    "ObjectEntry",
    "Store",
]


PROVIDERS = {"ais": "ais", "s3": "aws", "gs": "gcp", "az": "azure"}
"""URL scheme to AIS provider: a bucket of a cloud is read through the cluster that has it as a backend."""


@dataclass(frozen=True, kw_only=True)
class ObjectEntry:
    """One row of a listing."""

    name: str
    size: int
    checksum: str | None
    """``xxhash2`` in hexadecimal where the store knows it, else ``None``."""


class Store(Protocol):
    """A bucket or a directory. All methods raise `StoreError` with the object's URL in the text."""

    @property
    def url(self) -> str:
        """``ais://pets`` or the directory's path; no slash at the end."""

    def locate(self, name: str) -> str:
        """The URL or path of one object, for messages and for what reads it directly."""

    def list(self, prefix: str) -> "list[ObjectEntry]":
        """The objects whose name starts with ``prefix``, by name; of a directory, files in the prefix's folder only."""

    def read(self, name: str) -> bytes:
        """All bytes of a (small) object."""

    def find(self, name: str) -> bytes | None:
        """All bytes of a (small) object, ``None`` where there is none: one request, where `size` and `read` are two."""

    def read_range(self, name: str, *, start: int, size: int) -> bytes:
        """The object's bytes ``[start, start + size)``; fewer where it ends before."""

    def open(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """A stream of the object's bytes, front to back, not seekable."""

    def write(self, name: str, data: bytes) -> None:
        """Create or replace an object; readers see all of it or nothing."""

    def upload(self, name: str, path: Path) -> None:
        """Create or replace an object from a file."""

    def size(self, name: str) -> int | None:
        """Bytes of an object, ``None`` where there is none."""

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is no error."""
