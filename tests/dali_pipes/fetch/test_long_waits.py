"""A batch that waits long for its shards says why in one line; not if the log says already that a cluster is away."""

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp
from dali_pipes.fetch import demand
from dali_pipes.fetch.demand import LongWaits
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.store import patience
from dali_pipes.store.local import LocalFetcher
from dali_pipes.store.patience import Patience, Waiting
from tests.dali_pipes.raw import raw
from tests.programs import wait_until
from tests.shards import samples_and_shards


class Clock:
    """A clock that moves only when the test moves it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


# Eight shards.
samples, shards = samples_and_shards([(40, 33)] * 16, per_shard=2)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.message.startswith("a batch")]


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
    monkeypatch.setattr(demand, "LONG_WAIT_S", 0.0)

    def let_go() -> None:
        wait_until(lambda: lines(caplog))
        may_go_on.set()

    letting_go = threading.Thread(target=let_go)
    cache = dp.Cache(directory=tmp_path, show_progress=False)
    with caplog.at_level(logging.WARNING), dp.loader(shards, raw, batch_size=4, device="cpu", cache=cache) as loader:
        letting_go.start()
        assert sum(1 for _ in loader) == 4
        letting_go.join()
        assert loader.stats()["shard_wait_seconds"] > 0
    (line,) = lines(caplog)
    assert f"'{shards}/s-" in line
    assert "look at the store, the network and the cache's disk" in line


def test_a_cluster_that_is_away_is_told_of_by_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other line names the cluster and the cause; when the cluster is back, the wait has its own time again."""
    clock = Clock()
    monkeypatch.setattr(demand, "time", clock)
    monkeypatch.setattr(patience, "time", clock)
    monkeypatch.setattr(patience, "_told_at", {})
    monkeypatch.setattr(patience, "_QUIET_S", 0.0)
    long_s = demand.LONG_WAIT_S + 1
    waits = LongWaits(lambda _: "1 of 1 are missing")
    request = Waiting(Patience(patience_s=60), "http://away")
    with caplog.at_level(logging.WARNING):
        look = waits.watch([0])
        request.next_pause_s("503")
        clock.now_s += long_s
        look(1)
        request.progress()
        look(1)
        assert not lines(caplog), "it came back just now"
        clock.now_s += long_s
        look(1)
        look(1)
        assert len(lines(caplog)) == 1
        again = waits.watch([1])
        clock.now_s += long_s
        again(1)
        assert len(lines(caplog)) == 1, "a store that is always slow is told of once a minute"
