"""Test objects in a folder: names with a common prefix, long names, damaged files, removed buckets."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prep.embedded.storage import ObjectMissingError, Storage


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    with Storage(tmp_path) as made:
        made.create_bucket("b")
        yield made


def read(storage: Storage, name: str) -> bytes:
    file, meta = storage.open("b", name)
    with file:
        data = file.read(meta.num_bytes)
    assert meta.checksum == xxhash.xxh64_hexdigest(data)
    return data


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=120), st.binary(), max_size=6
    )
)
def test_any_names_live_side_by_side(storage: Storage, objects: dict[str, bytes]) -> None:
    """Each name has its bytes; the listing has the names, in the order of code points."""
    for name, data in objects.items():
        storage.write("b", name, [data])
    assert storage.list_names("b") == sorted(objects)
    for name, data in objects.items():
        assert read(storage, name) == data
        storage.delete("b", name)
    assert storage.list_names("b") == []


def test_file_damaged_by_a_power_failure_is_no_object(storage: Storage, tmp_path: Path) -> None:
    """The object is missing, whichever part of its file is left; it can be stored again."""
    path = tmp_path / "buckets" / "b" / "a.obj"
    for part in (slice(0), slice(5), slice(12), slice(40), slice(60), slice(-1), slice(3, None)):
        storage.write("b", "a", [b"x" * 50])
        path.write_bytes(path.read_bytes()[part])
        with pytest.raises(ObjectMissingError):
            storage.open("b", "a")
        assert storage.write("b", "a", [b"new"]).version == 1
        assert read(storage, "a") == b"new"


def test_sweep_spares_the_living(storage: Storage, tmp_path: Path) -> None:
    """A second node removes files of dead nodes, but no file that a running node is writing."""
    dead = tmp_path / "scratch" / "dead"
    dead.mkdir()
    (dead / "half").touch()

    def chunks() -> Iterator[bytes]:
        yield b"x"
        with Storage(tmp_path):
            assert not dead.exists()
        yield b"y"

    storage.write("b", "a", chunks())
    assert read(storage, "a") == b"xy"
