"""Shards in a cache file: each at its address with its index, shared by processes, found again by the next job."""

import errno
import os
from pathlib import Path

import pytest

import dali_pipes.cache.cache
import dali_pipes.cache.files
import dali_pipes.cache.share
from dali_pipes.cache.share import cache_file_key
from dali_pipes.data_set.data_set import DataSet
from dali_pipes.errors import CacheError
from dali_pipes.store.urls import resolve_shards
from tests.dali_pipes.cache.job import Job
from tests.shards import samples_and_shards

# A process that stages the shards that it is told, and waits for its end. It writes each object in two halves, with a
# pause between them.


# Eight shards.
samples, shards = samples_and_shards([(40 + 7 * (i % 5), 33 + 5 * (i % 7)) for i in range(16)], per_shard=2)


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def test_new_start_of_the_machine_has_bytes_checked(
    shards: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is whole is not fetched again; what the disk has lost is; and meanwhile it counts for nothing."""
    job = Job(shards, cache_dir)
    job.stager.need(job.all)
    os.pwrite(job.share._file, b"lost", int(job.share.starts[2]) + 700)
    os.pwrite(job.share._file, b"lost", job.share.index_extent(5).start + 10)
    job.close()
    monkeypatch.setattr(dali_pipes.cache.files, "boot_id", lambda: 4711)
    job = Job(shards, cache_dir)
    assert not len(job.share.take([0]).ready)  # it is to be checked first
    job.share.fail(0)
    job.stager.need([1, 2, 3, 4, 5])
    assert job.stager.fetched_bytes == job.object_bytes(2) + job.object_bytes(5)
    job.check(1, 2, 3, 4, 5)
    job.close()


def test_no_space_after_all_is_an_error(shards: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else has filled the disk: which shard, how many bytes, where."""
    job = Job(shards, cache_dir)

    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(dali_pipes.cache.share, "reserve", fail)
    num_bytes = job.share.extent_bytes[7]
    with pytest.raises(CacheError, match=rf"no space for shard 'x' in '{cache_dir}': {num_bytes} bytes"):
        job.share.reserve_blocks(7, name="x")
    job.close()


def test_key_is_of_all_that_lies_in_the_cache_file(shards: Path, tmp_path: Path) -> None:
    """An index that was made anew, of the same shards, is other bytes."""
    indexed = DataSet(resolve_shards(shards, endpoint=None))
    key = cache_file_key(indexed.whole)
    assert len(key) == 32
    assert cache_file_key(DataSet(resolve_shards(shards, endpoint=None)).whole) == key
    changed = indexed.whole.index_checksums.copy()
    changed[3] ^= 1
    object.__setattr__(indexed.whole, "index_checksums", changed)
    assert cache_file_key(indexed.whole) != key
