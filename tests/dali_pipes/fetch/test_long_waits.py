"""A batch that waits long for its shards says why, once, and leaves the word to those who know more."""

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp
from dali_pipes.fetch import long_waits
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.fetch.local import LocalFetcher
from dali_pipes.fetch.long_waits import LongWaits, Progress
from dali_pipes.metrics import counts as counts_module
from dali_pipes.metrics.counts import Counts
from dali_pipes.store import patience
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.patience import Patience, Waiting
from tests.builders import samples_and_shards
from tests.dali_pipes.fetch.served import DATA, Place, checksum, fetching
from tests.dali_pipes.fetch.test_stager import Job
from tests.dali_pipes.raw import raw


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_waits, "LONG_WAIT_S", 0.5)


# Eight shards.
samples, shards = samples_and_shards([(40, 33)] * 16, per_shard=2)


@pytest.fixture
def job(shards: Path, tmp_path: Path) -> Iterator[Job]:
    job = Job(shards, tmp_path)
    yield job
    job.stager.close()
    job.share.close()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.message.startswith("a batch")]


MIB = 1 << 20
REASONS: list[tuple[dict[str, Any], str]] = [
    ({"state": "fetched", "since_s": 12.0}, "fetched for 12 s, and 0.0 MiB of 80.0 MiB have come: look at the store"),
    ({"state": "fetched", "since_s": 10.0, "received_bytes": 5 * MIB}, r"5.0 MiB of 80.0 MiB have come, 0.5 MiB/s: if"),
    ({"state": "checked", "since_s": 11.0}, "checksum has been taken for 11 s: is the disk"),
    ({"state": "elsewhere", "pid": 7}, "process 7 of this node is bringing 'ais://b/x.tar'"),
    (
        {"state": "queued", "num_fetched": 8},
        r"no thread is free for 'ais://b/x.tar', because 8 other.*Cache\(fetchers=\)",
    ),
]


@pytest.mark.parametrize(("fields", "expected"), REASONS, ids=[fields["state"] for fields, _ in REASONS])
def test_reasons(fields: dict[str, Any], expected: str) -> None:
    progress = Progress(4, 1, 80 * MIB, "ais://b/x.tar", **({"shard_bytes": 80 * MIB} | fields))
    assert re.search(expected, progress.reason())


def test_progress_tells_who_works_on_a_shard(job: Job, shards: Path, tmp_path: Path) -> None:
    """One thread: the first shard is fetched, the second waits for it; for another loader the first is elsewhere."""
    job.store.held_back = {job.names[0]}
    job.stager.stage([0])
    job.until(lambda: job.store.fetched == [job.names[0]])
    job.stager.stage([1])
    first, second = job.stager.progress([0]), job.stager.progress([1])
    assert (first.state, first.num_missing, first.num_shards, first.url) == ("fetched", 1, 1, f"store/{job.names[0]}")
    assert first.since_s > 0
    assert (second.state, second.num_fetched) == ("queued", 1)
    other = Job(shards, tmp_path)
    try:
        found = other.stager.progress([0])
        assert (found.state, found.pid) == ("elsewhere", os.getpid())
    finally:
        other.stager.close()
        other.share.close()
    job.store.held_back = set()
    job.stager.need([0, 1])
    assert job.stager.progress([0, 1]).num_missing == 0
    job.stager.done([0, 1])


def test_a_long_wait_of_a_loader_is_told_once(
    shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real loader, and a store that answers after a while."""
    may_go_on = threading.Event()
    fetch = LocalFetcher.fetch

    def later(self: LocalFetcher, wanted: list[Wanted], **options: Any) -> bool:
        may_go_on.wait(120)
        return fetch(self, wanted, **options)

    monkeypatch.setattr(LocalFetcher, "fetch", later)

    def let_go() -> None:
        deadline = time.monotonic() + 100
        while not lines(caplog) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(1.0)  # in which a second line could come
        may_go_on.set()

    letting_go = threading.Thread(target=let_go)
    cache = dp.Cache(directory=tmp_path, show_progress=False)
    with caplog.at_level(logging.WARNING), dp.loader(shards, raw, batch_size=4, device="cpu", cache=cache) as loader:
        letting_go.start()
        assert sum(1 for _ in loader) == 4
        letting_go.join()
        assert loader.stats()["shard_wait_seconds"] > 0.5
    (line,) = lines(caplog)
    assert f"'{shards}/s-" in line
    assert "are missing" in line
    assert "have come: look at the store" in line


def test_a_cluster_that_is_away_is_told_of_by_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other line names the cluster and the cause; when the cluster is back, the wait has its own time again."""
    monkeypatch.setattr(patience, "_QUIET_S", 0.0)
    waits = LongWaits(Counts(), lambda _: Progress(1, 1, 1, "ais://b/x.tar", "fetched"))
    request = Waiting(Patience(patience_s=60), "http://away")
    with caplog.at_level(logging.WARNING):
        look = waits.watch([0])
        request.next_pause_s("503")
        time.sleep(0.6)
        look(1)
        assert not lines(caplog)
        request.progress()
        look(1)
        assert not lines(caplog), "it came back just now"
        time.sleep(0.6)
        look(1)
        look(1)
        assert len(lines(caplog)) == 1
        again = waits.watch([1])
        time.sleep(0.6)
        again(1)
        assert len(lines(caplog)) == 1, "a store that is always slow is told of once a minute"


def test_space_is_told_of_by_the_stager_and_retries_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    found = [Progress(1, 1, 1, "ais://b/x.tar", "no space"), Progress(1, 1, 1, "ais://b/x.tar", "elsewhere", pid=3)]
    counts = Counts()
    look = LongWaits(counts, lambda _: found.pop(0)).watch([0])
    counts.add_retry()
    time.sleep(0.6)
    with caplog.at_level(logging.WARNING):
        look(1)
        assert not lines(caplog)
        look(1)
    assert lines(caplog)[0].endswith("; 1 requests were sent again meanwhile")


def test_bytes_are_counted_as_they_come(job: Job, store: AisStore) -> None:
    """Of a file, and over HTTP, so that a long wait can say how fast they come."""
    received: list[int] = []
    extent, checksum_of_shard = job.share.shard_extent(0), int(job.indexed.manifest.checksums[0])
    with contextlib.closing(job.store.open()) as files:
        wanted = [Wanted(job.names[0], extent, checksum_of_shard, received=received.append)]
        assert files.fetch(wanted, stopped=lambda: False)
    assert sum(received) == extent.size
    received.clear()
    place = Place()
    with fetching(store.endpoint, store.bucket) as objects:
        assert objects.fetch([Wanted("a/x.tar", place.extent, checksum(DATA), received=received.append)])
    assert sum(received) == len(DATA)
    assert len(received) > 1


def test_slow_decoding_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """After the wait: nobody can look into DALI meanwhile."""
    monkeypatch.setattr(counts_module, "LONG_WAIT_S", 0.0)
    monkeypatch.setattr(counts_module, "_SPAN_S", 0.0)
    counts = Counts()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with counts.decode_wait, counts.inputs:
                pass
    assert len(lines(caplog)) == 1
    assert "decoding took so long" in lines(caplog)[0]
