"""An epoch, segment by segment: waits for what it names only, gives up what it has read, tells errors in their turn."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp
from dali_pipes.fetch.stager import Stager
from dali_pipes.reader.feed import Feed
from dali_pipes.reader.samples import Samples
from tests.dali_pipes.raw import check_rows, raw, read_epoch
from tests.loaders import open_windowed
from tests.programs import wait_until
from tests.shards import Sample, samples_and_shards

NUM_SAMPLES = 24


# Twelve shards.
samples, shards = samples_and_shards([(40 + 7 * (i % 5), 33) for i in range(NUM_SAMPLES)], per_shard=2)


@pytest.fixture
def open_loader(shards: Path, tmp_path: Path) -> Iterator[Callable[..., dp.Loader]]:
    """A loader of `raw` with windows of two shards, in a cache for six or so."""
    with contextlib.ExitStack() as loaders:

        def open_(**options: Any) -> dp.Loader:
            usual = {"batch_size": 2, "directory": tmp_path, "window_bytes": 30_000}
            return loaders.enter_context(open_windowed(shards, raw, **(usual | options)))

        yield open_


def check_nothing_is_held(loader: dp.Loader) -> None:
    """When its feeds are closed: no account of the stager's, nothing in the shared table."""
    loader.delivery.current.feed.close()
    if loader.parts.epochs.ahead is not None:
        loader.parts.epochs.ahead.close()
    stager = loader.parts.stager
    wait_until(lambda: not (stager._demand.held or stager._filling or stager._asking))
    assert not any(
        (stager._demand.needs, stager._demand.ahead, stager._demand.needed_missing, stager._demand.ahead_missing)
    )
    (status,) = loader.parts.share.status()
    assert status.num_held == 0
    assert not loader.delivery.current.feed._samples._tables


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 100, "last_batch_policy": "FILL"},  # the epoch several times over
        # Slices of 6, 6, 4, 4, 4 samples: the shorter ones wrap.
        {"batch_size": 10, "shuffle": dp.Shuffle(window_bytes=30_000, slices=5)},
    ],
    ids=str,
)
def test_epochs_hold_nothing_when_they_are_over(
    open_loader: Callable[..., dp.Loader], samples: list[Sample], options: dict[str, Any]
) -> None:
    loader = open_loader(**options)
    for _ in range(3):
        assert len(read_epoch([loader], samples)) == NUM_SAMPLES
    next(iter(loader), None)
    check_nothing_is_held(loader)


@pytest.mark.parametrize("where", ["taken", "opened", "staged", "needed"])
def test_ctrl_c_in_the_feed_leaves_nothing_held(
    open_loader: Callable[..., dp.Loader],
    samples: list[Sample],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    """Between taking a segment and having it, for instance: the epoch goes on, and its shards are released."""
    owner, name = {
        "taken": (Feed, "next"),
        "opened": (Feed, "_open_segment"),
        "staged": (Stager, "stage"),
        "needed": (Stager, "need_resident"),
    }[where]
    original = getattr(owner, name)
    calls = 0

    def interrupted(self: object, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        result = original(self, *arguments, **options)
        calls += 1
        if armed and calls in (2, 5):
            raise KeyboardInterrupt
        return result

    armed = False
    monkeypatch.setattr(owner, name, interrupted)
    loader = open_loader(cache=dp.Cache(directory=tmp_path, max_bytes=140_000))
    armed, calls = True, 0
    count: Counter[int] = Counter()
    num_cut = 0
    for _ in range(10):
        try:
            for (batch,) in loader:
                count.update(check_rows(batch, samples))
            break
        except KeyboardInterrupt:
            num_cut += 1
    assert num_cut >= 1
    assert count == Counter(range(NUM_SAMPLES))
    armed = False
    assert len(read_epoch([loader], samples)) == NUM_SAMPLES
    check_nothing_is_held(loader)


def test_segment_that_cannot_be_opened_ahead_is_told_in_its_turn(
    open_loader: Callable[..., dp.Loader], samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All batches before it are delivered first."""
    rows = Samples.rows

    def broken(self: Samples, ordinals: Any) -> Any:
        if armed and 12 in ordinals:
            raise dp.DataError("index of another data set")
        return rows(self, ordinals)

    armed = False
    loader = open_loader(shuffle=dp.Shuffle(enabled=False, window_bytes=30_000), batch_size=4)
    read_epoch([loader], samples)  # all is resident: segments are opened ahead
    loader.set_epoch(1)
    armed = True
    monkeypatch.setattr(Samples, "rows", broken)
    monkeypatch.setattr("dali_pipes.reader.feed.MAX_LINES", 4)
    seen: list[int] = []
    loader.set_epoch(2)
    with pytest.raises(dp.DataError, match="another data set"):  # noqa: PT012 (which batch it is in is checked below)
        for (batch,) in loader:
            seen += check_rows(batch, samples)
    assert seen == list(range(12))
    armed = False
    for (batch,) in loader:
        seen += check_rows(batch, samples)
    assert seen == list(range(NUM_SAMPLES))
    check_nothing_is_held(loader)


@pytest.mark.usefixtures("without_collector")
def test_loader_collected_in_one_of_its_own_threads_does_not_hang(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector can run anywhere, also in a thread that fetches, which has the lock that the others wait for."""
    is_dropped, is_collected = threading.Event(), threading.Event()
    hold = Stager._hold

    def collecting(self: Stager, shard: int) -> None:
        hold(self, shard)
        if is_dropped.is_set() and not is_collected.is_set():
            gc.collect()
            is_collected.set()

    monkeypatch.setattr(Stager, "_hold", collecting)
    before = set(threading.enumerate())
    loader = open_windowed(shards, raw, directory=tmp_path, window_bytes=1, batch_size=2)
    next(iter(loader))
    own = set(threading.enumerate()) - before
    stager = loader.parts.stager
    loader.itself = loader  # type: ignore[attr-defined]
    is_dropped.set()
    del loader
    with contextlib.suppress(ValueError):  # the stager is closed while need() waits
        stager.need(range(12))
    assert is_collected.is_set()
    wait_until(lambda: not any(thread.is_alive() for thread in own))
