import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """A directory in /dev/shm: ext4 counts blocks of its own among a file's."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)
