"""Extents: bytes of an open file, read and checked."""

import os
import tempfile
from collections.abc import Sequence

import pytest

from dali_pipes.cache.extents import BLOCK_BYTES, Extent
from dali_pipes.formats.manifest import checksum


def test_checksum_where_a_read_gives_less_than_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """POSIX allows it; file systems in user space or of a network do it."""
    data, read = os.urandom(2 * BLOCK_BYTES + 1), os.preadv

    def read_half(file: int, views: Sequence[memoryview], position: int) -> int:
        (view,) = views
        return read(file, [view[: -(-len(view) // 2)]], position)

    with tempfile.TemporaryFile() as file:
        file.write(b"x" + data + b"x")
        file.flush()
        monkeypatch.setattr(os, "preadv", read_half)
        assert Extent(file.fileno(), 1, len(data)).checksum() == checksum(data)
