"""The stores that the tests of pack write to."""

from pathlib import Path

import pytest

from dali_pipes.store.base import Store
from dali_pipes.store.local import LocalStore


@pytest.fixture(params=["directory", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store that does not exist yet."""
    return LocalStore(tmp_path / "out") if request.param == "directory" else request.getfixturevalue("bucket")
