"""Shards that are in a kept cache file already: how often they are checked, and what becomes of a wrong one."""

import errno
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dali_pipes.cache.files
import dali_pipes.cache.share
from dali_pipes.cache.cache import Verify
from dali_pipes.cache.extents import Extent
from dali_pipes.cache.files import cache_root
from dali_pipes.cache.share import cache_file_key
from dali_pipes.data_set.data_set import DataSet
from dali_pipes.errors import CacheError
from dali_pipes.formats.names import index_name
from dali_pipes.store.urls import resolve_shards
from tests.shards import samples_and_shards

NUM_SHARDS = 8


samples, shards = samples_and_shards([(60, 50)] * (3 * NUM_SHARDS), per_shard=3)


class Job:
    """The shards of a directory, a share of their cache file, and a stager that fills it."""

    def __init__(self, shards: Path, cache_dir: Path, *, verify: Verify) -> None:
        self.directory = shards
        self.indexed = DataSet(resolve_shards(shards, endpoint=None))
        self.share = self.indexed.open_share(
            reserved=None, is_windowed=False, group=1, cache_dir=cache_dir, cache_bytes=None, verify=verify
        )
        self.stager = self.indexed.open_stager(self.share, num_fetchers=3)
        self.all = list(range(NUM_SHARDS))

    def wrong(self) -> list[int]:
        """The shards that differ in the cache file from their store, in their own bytes or in their index's."""
        return [shard for shard in self.all if not self._is_right(shard)]

    def _is_right(self, shard: int) -> bool:
        path = self.directory / self.indexed.manifest.names[shard]
        index = self.directory / index_name(path.name)
        return (
            self.share.shard_extent(shard).read() == path.read_bytes()
            and self.share.index_extent(shard).read() == index.read_bytes()
        )

    def close(self) -> None:
        self.stager.close()
        self.share.close()


@pytest.fixture
def open_job(shards: Path, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def open_(verify: Verify = "first") -> Job:
        jobs.append(Job(shards, tmp_path, verify=verify))
        return jobs[-1]

    yield open_
    for job in jobs:
        job.close()


def change(cache_dir: Path, *positions: int) -> None:
    (path,) = cache_root(cache_dir).glob("*.image")
    with path.open("r+b") as stream:
        for position in positions:
            stream.seek(position)
            (byte,) = stream.read(1)
            stream.seek(position)
            stream.write(bytes([byte ^ 0x40]))


def fill_and_close(open_job: Callable[..., Job]) -> list[int]:
    """Fill a cache file; returns where its shards start."""
    job = open_job()
    job.stager.need(job.all)
    starts: list[int] = job.share.starts.tolist()
    job.close()
    return starts


@pytest.mark.parametrize(("verify", "is_restarted"), [("first", False), ("always", False), ("first", True)])
def test_changed_shards_of_a_kept_cache_file_are_fetched_again(
    open_job: Callable[..., Job],
    tmp_path: Path,
    verify: Verify,
    is_restarted: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One byte changes in two shards and in an index: only these are fetched again, and the log says it.

    Also after a reboot, when a shard does not count as staged until it is checked.
    """
    starts = fill_and_close(open_job)
    job = open_job()
    index_start = job.share.index_extent(6).start
    job.close()
    change(tmp_path, starts[1] + 700, starts[4], index_start + 20)
    if is_restarted:
        monkeypatch.setattr(dali_pipes.cache.files, "boot_id", lambda: 4711)
    job = open_job(verify)
    with caplog.at_level(logging.WARNING):
        job.stager.need(job.all)
    assert job.wrong() == []
    assert job.stager.fetched_bytes == sum(
        job.share.shard_extent(shard).size + job.share.index_extent(shard).size for shard in (1, 4, 6)
    )
    assert "held other bytes than those of shard" in caplog.text


def test_never_believes_what_is_there(open_job: Callable[..., Job], tmp_path: Path) -> None:
    starts = fill_and_close(open_job)
    change(tmp_path, starts[2])
    job = open_job("never")
    job.stager.need(job.all)
    assert job.wrong() == [2]
    # A loader that joins it does not believe it, and mends the shard for both.
    other = open_job("first")
    other.stager.need(other.all)
    assert job.wrong() == other.wrong() == []


@pytest.mark.parametrize(("verify", "num_checks"), [("first", 1), ("always", 2), ("never", 0)])
def test_loaders_at_work_share_a_check(
    open_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, verify: Verify, num_checks: int
) -> None:
    """Two ranks, and what each reads twice: the shards are checked once, and by each rank under "always"."""
    fill_and_close(open_job)
    one, two = open_job(verify), open_job(verify)
    checked: list[int] = []
    checksum = Extent.checksum_unless

    def counted(extent: Extent, stopped: Callable[[], bool]) -> int | None:
        checked.append(extent.start)
        return checksum(extent, stopped)

    monkeypatch.setattr(Extent, "checksum_unless", counted)
    for job in (one, two, one):
        job.stager.need(job.all)
        job.stager.done(job.all)
    assert len(checked) == 2 * NUM_SHARDS * num_checks
    assert len(set(checked)) == (2 * NUM_SHARDS if num_checks else 0)


def test_no_space_after_all_is_an_error(
    open_job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program has filled the disk: the error names the shard, the number of bytes and the directory."""
    job = open_job()

    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(dali_pipes.cache.share, "reserve", fail)
    num_bytes = job.share.extent_bytes[7]
    with pytest.raises(CacheError, match=rf"no space for shard 'x' in '{tmp_path}': {num_bytes} bytes"):
        job.share.reserve_blocks(7, name="x")


def test_key_is_of_all_that_lies_in_the_cache_file(shards: Path) -> None:
    """A cache file belongs to one index: if the same shards are indexed again, they get another cache file."""
    whole = DataSet(resolve_shards(shards, endpoint=None)).whole
    key = cache_file_key(whole)
    assert cache_file_key(DataSet(resolve_shards(shards, endpoint=None)).whole) == key
    changed = whole.index_checksums.copy()
    changed[3] ^= 1
    object.__setattr__(whole, "index_checksums", changed)
    assert cache_file_key(whole) != key
