"""A data set of three classes, in a directory and in a bucket."""

from pathlib import Path

import pytest

from tests.prep.versions.sets import Place, class_folders, make_set


@pytest.fixture
def local(tmp_path: Path) -> Place:
    """An indexed data set of the classes cat, dog and owl, two photos each, a shard for each class; in a directory."""
    (tmp_path / "set").mkdir()
    folder = class_folders(tmp_path / "old", {"cat": 2, "dog": 2, "owl": 2})
    return make_set(folder, Place(f"{tmp_path}/set/s-", None))


@pytest.fixture(params=["directory", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """The same data set, in a directory or in a bucket."""
    if request.param == "directory":
        found: Place = request.getfixturevalue("local")
        return found
    folder = class_folders(tmp_path / "old", {"cat": 2, "dog": 2, "owl": 2})
    bucket = request.getfixturevalue("bucket")
    return make_set(folder, Place(f"{bucket.url}/s-", bucket.endpoint))


@pytest.fixture
def more(tmp_path: Path) -> Path:
    """Class folders to be added: a dog, and the new class bee."""
    return class_folders(tmp_path / "more", {"dog": 1, "bee": 1}, first=50)
