"""Where the tests of caches have their directories."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """Where a file's blocks are its data's: on a disk a file in many pieces has blocks that list them."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="dali-pipes-test-") as name:
        yield Path(name)
