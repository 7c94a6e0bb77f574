"""Shards in a cache file: each at its address with its index, shared by processes, found again by the next job."""

import contextlib
import dataclasses
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import dali_pipes.cache.cache
import dali_pipes.cache.files
import dali_pipes.cache.share
from dali_pipes.cache.cache import NodeCache
from dali_pipes.cache.files import cache_root
from dali_pipes.cache.share import cache_file_key
from dali_pipes.cache.table import State, StateTable
from dali_pipes.data_set.data_set import DataSet
from dali_pipes.errors import CacheError
from dali_pipes.store.urls import resolve_shards
from tests.dali_pipes.cache.job import Job
from tests.dali_pipes.cache.member import blocks
from tests.programs import wait_until
from tests.shards import samples_and_shards

if TYPE_CHECKING:
    from collections.abc import Iterator

# A process that stages the shards that it is told, and waits for its end. It writes each object in two halves, with a
# pause between them.
PROGRAM = """
import sys, time
from pathlib import Path
import dali_pipes.store.local
import dali_pipes.fetch.stager
from dali_pipes.store.local import LocalFetcher
from dali_pipes.data_set.data_set import DataSet
from dali_pipes.store.urls import resolve_shards

class HaltingFetcher(LocalFetcher):
    def fetch(self, wanted, **options):
        for name, extent, *_ in wanted:
            data = (self._directory / name).read_bytes()
            extent.write(data[: len(data) // 2], 0)
            time.sleep(float(sys.argv[4]))
        return super().fetch(wanted, **options)

dali_pipes.store.local.LocalFetcher = HaltingFetcher
dali_pipes.fetch.stager.NUM_TOGETHER = 1  # as large shards
indexed = DataSet(resolve_shards(Path(sys.argv[1]), endpoint=None))
share = indexed.open_share(reserved=None, is_windowed=False, group=1, cache_dir=Path(sys.argv[2]), cache_bytes=None)
stager = indexed.open_stager(share, num_fetchers=2)
print("open", flush=True)
sys.stdin.readline()
stager.need([int(shard) for shard in sys.argv[3].split(",")])
sys.stdin.readline()
stager.close()
share.close()
"""


# Eight shards.
samples, shards = samples_and_shards([(40 + 7 * (i % 5), 33 + 5 * (i % 7)) for i in range(16)], per_shard=2)


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


FILE_SYSTEM_BLOCK = 4096


@contextlib.contextmanager
def process(shards: Path, cache_dir: Path, *needed: int, pause_s: float = 0.0) -> "Iterator[subprocess.Popen[str]]":
    """A process of `PROGRAM`, with its cache file open."""
    arguments = (shards, cache_dir, ",".join(map(str, needed)), pause_s)
    started = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert started.stdout is not None
        assert started.stdout.readline() == "open\n"
        yield started
    finally:
        started.kill()
        started.communicate()


def go(started: "subprocess.Popen[str]") -> None:
    assert started.stdin is not None
    started.stdin.write("\n")
    started.stdin.flush()


def test_each_shard_lies_at_its_address_with_its_index(shards: Path, cache_dir: Path) -> None:
    """In whatever order they came; the rest of the file has no blocks."""
    job = Job(shards, cache_dir)
    job.stager.need([6, 1, 3])
    job.check(6, 1, 3)
    assert job.stager.fetched_bytes == sum(job.object_bytes(shard) for shard in (6, 1, 3))
    assert blocks(cache_dir) == job.share.extent_bytes[[6, 1, 3]].sum()
    assert os.pread(job.share._file, 1 << 20, int(job.share.starts[4]))[:4096] == bytes(4096)
    job.close()
    job.share.close()


def test_job_that_was_killed_is_gone_on_with(shards: Path, cache_dir: Path) -> None:
    """SIGKILL in the middle of staging: what was whole is found, what was half filled is fetched again."""
    with process(shards, cache_dir, *range(8), pause_s=0.05) as started:
        go(started)
        (path,) = cache_root(cache_dir).glob("*.table")
        table = StateTable(path)
        wait_until(lambda: np.count_nonzero(table.state == State.READY) > 2 and (table.state == State.FILLING).any())
        started.kill()
        started.wait()
        is_ready = table.state == State.READY
        num_half = int(np.count_nonzero(table.state == State.FILLING))
        table.close()
    assert num_half > 0
    job = Job(shards, cache_dir)
    # The halves were freed, of more than a block each; ext4 takes one of its own for a file in more than four pieces.
    assert blocks(cache_dir) - job.share.extent_bytes[is_ready].sum() in (0, FILE_SYSTEM_BLOCK)
    job.stager.need(job.all)
    job.check(*job.all)
    assert job.stager.fetched_bytes == sum(job.object_bytes(shard) for shard in job.all if not is_ready[shard])
    job.close()


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


def test_component_without_bytes_is_not_read_ahead(
    shards: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the kernel no bytes are all bytes up to the end of the file."""
    job = Job(shards, cache_dir)
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(job.share, "space", dataclasses.replace(job.share.space, is_memory=False))
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *asked_for: asked.append(asked_for[:2]))
    job.share.read_ahead(np.array([512, 1024, 2048]), np.array([7, 0, 9]))
    assert asked == [(512, 7), (2048, 9)]
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


def test_cache_file_is_closed_if_it_cannot_be_opened(shards: Path, cache_dir: Path) -> None:
    """No slot is kept by one that failed."""
    indexed = DataSet(resolve_shards(shards, endpoint=None))
    job = Job(shards, cache_dir)
    for reserved, text in ((1 << 62, "bytes"), (job.share.cache_bytes, "reserved for other loaders")):
        with pytest.raises(CacheError, match=text):
            indexed.open_share(reserved=reserved, is_windowed=True, group=3, cache_dir=cache_dir, cache_bytes=None)
    job.close()
    with contextlib.closing(NodeCache(cache_dir)) as cache:
        assert cache.status()[0].pids == ()


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
