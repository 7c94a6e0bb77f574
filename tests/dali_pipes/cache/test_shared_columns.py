"""A large manifest's columns: one file for all loaders of a cache file, compared with what the store said."""

import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dali_pipes.cache import cache, files
from dali_pipes.cache.directory import OwnDirectory
from dali_pipes.cache.free_space import FreeSpace
from dali_pipes.cache.share import CacheShare
from dali_pipes.formats.manifest import Manifest
from tests.simulated import simulated_manifest

NUM_SHARDS = 50
RESERVED = 4 << 30


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SHARED_FROM_BYTES", 100)


@pytest.fixture
def open_share(tmp_path: Path) -> Callable[[], tuple[Manifest, CacheShare]]:
    def open_() -> tuple[Manifest, CacheShare]:
        manifest = simulated_manifest(NUM_SHARDS)
        space = FreeSpace.of(tmp_path)
        return manifest, CacheShare(
            manifest, np.arange(NUM_SHARDS), space=space, source="here", group=0, reserved=1 << 20, cache_bytes=1 << 20,
            keep=False,
        )  # fmt: skip

    return open_


def columns_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("dali-pipes-*/*.columns*"))


def mapped(path: Path) -> int:
    """How often this process has mapped a file."""
    return Path("/proc/self/maps").read_text().count(str(path))


def test_loaders_map_one_file(tmp_path: Path, open_share: Callable[[], tuple[Manifest, CacheShare]]) -> None:
    """The same values, in pages of one file, for each loader; gone with the cache file."""
    first, one = open_share()
    second, other = open_share()
    (path,) = columns_files(tmp_path)
    assert mapped(path) == 2
    expected = simulated_manifest(NUM_SHARDS)
    for manifest in (first, second):
        assert manifest.digest == expected.digest
        assert list(manifest.names) == list(expected.names)
        assert not manifest.samples.flags.writeable
        for name, column in expected.shard_columns().items():
            assert np.array_equal(manifest.shard_columns()[name], column)
    one.close()
    other.close()
    assert columns_files(tmp_path) == []


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:80] + b"\xff" + data[81:]])
def test_file_with_other_values_is_moved_aside(
    tmp_path: Path,
    open_share: Callable[[], tuple[Manifest, CacheShare]],
    damage: Callable[[bytes], bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, one = open_share()
    (path,) = columns_files(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    manifest, other = open_share()
    assert manifest.digest == simulated_manifest(NUM_SHARDS).digest
    assert len(columns_files(tmp_path)) == 2  # the new one, and the one that was moved aside
    assert "is damaged" in caplog.text
    other.close()
    one.close()


def test_full_disk_leaves_each_loader_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = simulated_manifest(NUM_SHARDS).shard_columns()
    directory = OwnDirectory(tmp_path / "cache")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "_write_columns", full)
    assert files.share_columns(directory, "0" * 32, columns) is None
    directory.close()


def test_small_manifest_is_not_shared(
    tmp_path: Path, open_share: Callable[[], tuple[Manifest, CacheShare]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "SHARED_FROM_BYTES", files.SHARED_FROM_BYTES)
    _, share = open_share()
    assert columns_files(tmp_path) == []
    share.close()
