"""An epoch, segment by segment: waits for what it names only, gives up what it has read, tells errors in their turn."""

import contextlib
import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dali_pipes as dp
from dali_pipes.cache.files import cache_root
from dali_pipes.cache.share import CacheShare
from dali_pipes.epoch import PlanInputs
from dali_pipes.fetch.local import LocalFetcher
from dali_pipes.fetch.stager import Stager
from dali_pipes.order.plan import Plan
from dali_pipes.reader import buffers
from dali_pipes.reader.aio_reader import AioReader
from dali_pipes.reader.feed import Feed
from dali_pipes.reader.samples import Samples
from dali_pipes.reader.segments import Lines
from tests.builders import Sample, open_windowed, photo_bytes, samples_and_shards, write_shards
from tests.dali_pipes.raw import check_rows, raw, read_epoch

NUM_SAMPLES = 24


# Twelve shards.
samples, shards = samples_and_shards([(40 + 7 * (i % 5), 33) for i in range(NUM_SAMPLES)], per_shard=2)


@pytest.fixture
def open_loader(shards: Path, tmp_path: Path) -> Iterator[Callable[..., dp.Loader]]:
    """A loader of `raw` with windows of two shards, in a cache for six or so."""
    with contextlib.ExitStack() as loaders:

        def open_(**options: Any) -> dp.Loader:
            settings = {
                "batch_size": 2,
                "device": "cpu",
                "decode": dp.Decode(threads=1),
                "shuffle": dp.Shuffle(window_bytes=30_000),
                "cache": dp.Cache(directory=tmp_path),
            } | options
            return loaders.enter_context(dp.loader(str(shards), raw, **settings))

        yield open_


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "never came"
        time.sleep(0.002)


def check_nothing_is_held(loader: dp.Loader) -> None:
    """When its feeds are closed: no account of the stager's, nothing in the shared table."""
    loader.delivery.current.feed.close()
    if loader.parts.epochs.ahead is not None:
        loader.parts.epochs.ahead.close()
    stager = loader.parts.stager
    until(lambda: not (stager._demand.held or stager._filling or stager._asking))
    assert not any(
        (stager._demand.needs, stager._demand.ahead, stager._demand.needed_missing, stager._demand.ahead_missing)
    )
    (status,) = loader.parts.share._cache.status()
    assert status.num_held == 0
    assert not loader.delivery.current.feed._samples._tables


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 15},  # several windows a batch
        {"batch_size": 24},  # an epoch of one batch
        {"batch_size": 100},
        {"batch_size": 100, "last_batch_policy": "FILL"},  # the epoch several times over
        {"batch_size": 7, "last_batch_policy": "FILL"},
        {"batch_size": 7, "last_batch_policy": "DROP"},
        {"batch_size": 3, "shuffle": dp.Shuffle(window_bytes=30_000, ramp_up=True)},
        {"batch_size": 6, "shuffle": dp.Shuffle(window_bytes=30_000, slices=3)},
        {
            "batch_size": 10,
            "shuffle": dp.Shuffle(window_bytes=30_000, slices=5),
        },  # slices of 6, 6, 4, 4, 4 samples: the shorter ones wrap
        {"batch_size": 5, "shuffle": dp.Shuffle(enabled=False, window_bytes=30_000)},
    ],
    ids=str,
)
def test_epochs_hold_nothing_when_they_are_over(
    open_loader: Callable[..., dp.Loader], samples: list[Sample], options: dict[str, Any]
) -> None:
    """Whatever spans windows, repeats or wraps: three epochs are right, and nothing stays held."""
    loader = open_loader(**options)
    for _ in range(3):
        count = read_epoch([loader], samples)
        assert len(count) == NUM_SAMPLES or options.get("last_batch_policy") == "DROP"
    next(iter(loader), None)
    check_nothing_is_held(loader)


@pytest.mark.parametrize("policy", ["PARTIAL", "FILL"])
def test_more_ranks_than_samples(open_loader: Callable[..., dp.Loader], samples: list[Sample], policy: str) -> None:
    """30 ranks of 24 samples: each has as many batches, six have none of their own. DROP is refused."""
    loaders = [
        open_loader(
            batch_size=1, rank=rank, world_size=30, last_batch_policy=policy, shuffle=dp.Shuffle(window_bytes="all")
        )
        for rank in (0, 23, 24, 29)
    ]
    for _ in range(2):
        assert {len(loader) for loader in loaders} == {1}
        read = [list(loader) for loader in loaders]
        if policy == "PARTIAL":
            assert [loader.num_valid for loader in loaders] == [1, 1, 0, 0]
        for batches in read:
            for (batch,) in batches:
                assert len(check_rows(batch, samples)) == 1


def test_set_epoch_gives_up_the_epoch_that_was_prepared(
    open_loader: Callable[..., dp.Loader], samples: list[Sample]
) -> None:
    """The next epoch's windows are staged while the last batches are read; another epoch does not keep them."""
    loader = open_loader()
    for epoch in (5, 9, 9, 2):
        batches = iter(loader)
        for _ in range(len(loader) - 1):
            next(batches)
        assert loader.parts.epochs.ahead is not None
        loader.set_epoch(epoch)
        assert loader.parts.epochs.ahead is None
        wanted = sum(len(window) for staged in loader.delivery.current.feed._staged.values() for _, window in staged)
        assert sum(loader.parts.stager._demand.ahead.values()) == wanted
    assert len(read_epoch([loader], samples)) == NUM_SAMPLES
    check_nothing_is_held(loader)


def test_epoch_that_cannot_be_begun_leaves_the_old_one(
    open_loader: Callable[..., dp.Loader], samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`set_epoch` that fails, for want of room for instance: the error, and then the rest of the epoch before."""
    loader = open_loader(shuffle=dp.Shuffle(enabled=False, window_bytes=30_000), batch_size=4)
    seen = check_rows(next(iter(loader))[0], samples)
    make_plan = PlanInputs.plan

    def fail(self: PlanInputs, epoch: int) -> Plan:
        if epoch == 3:
            raise dp.CacheError("no room")
        return make_plan(self, epoch)

    monkeypatch.setattr(PlanInputs, "plan", fail)
    with pytest.raises(dp.CacheError):
        loader.set_epoch(3)
    for (batch,) in loader:
        seen += check_rows(batch, samples)
    assert seen == list(range(NUM_SAMPLES))
    assert loader.epoch == 0


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
        "taken": (Feed, "_take_segment"),
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


def test_ctrl_c_with_alternatives_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`"jpg;jpeg"` is looked for in all shard indexes, once: when the graph is built anew they cannot all be read."""
    photos = [Sample(f"k{i}", {("jpg", "jpeg")[i % 2]: photo_bytes(i, 20, 20), "cls": b"1"}) for i in range(12)]
    shards = write_shards(tmp_path / "shards", photos, per_shard=2)
    (tmp_path / "cache").mkdir()
    graph = dp.classification_eval(resize=16, crop=16, photo="jpg;jpeg")
    with open_windowed(
        shards, graph, directory=tmp_path / "cache", window_bytes=1, batch_size=2, outputs=dp.Outputs(keys=True)
    ) as loader:
        keys = next(iter(loader))[0]["key"]
        read = Feed.next

        def interrupted(self: Feed) -> Any:
            monkeypatch.setattr(Feed, "next", read)
            raise KeyboardInterrupt

        monkeypatch.setattr(Feed, "next", interrupted)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 (a batch that is decoded already may come first)
            for (batch,) in loader:
                keys += batch["key"]
        keys += [key for (batch,) in loader for key in batch["key"]]
        assert sorted(keys) == sorted(sample.key for sample in photos)


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


def test_read_shards_can_be_punched_at_once(
    open_loader: Callable[..., dp.Loader], samples: list[Sample], tmp_path: Path
) -> None:
    """What is read is nobody's: cleared from the cache while the epoch goes on, which does not notice."""
    from dali_pipes.cache.cache import NodeCache

    loader = open_loader(cache=dp.Cache(directory=tmp_path, max_bytes=160_000))
    count: Counter[int] = Counter()
    freed = 0
    for (batch,) in loader:
        count.update(check_rows(batch, samples))
        with contextlib.closing(NodeCache(tmp_path)) as cache:
            freed += cache.clear()[0]
    assert count == Counter(range(NUM_SAMPLES))
    # All but what was still ahead at the end: the next epoch's.
    assert freed >= int(loader.parts.share.extent_bytes.sum()) // 2
    assert sum(path.stat().st_blocks for path in cache_root(tmp_path).glob("*.image")) * 512 <= 160_000


def test_data_wait_is_the_time_for_which_shards_were_waited_for(
    open_loader: Callable[..., dp.Loader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over epochs, with what an epoch that was given up has waited; nothing while all is resident."""
    fetch = LocalFetcher.fetch

    def slow(self: LocalFetcher, *arguments: Any, **options: Any) -> bool:
        time.sleep(0.2)
        return fetch(self, *arguments, **options)

    monkeypatch.setattr(LocalFetcher, "fetch", slow)
    loader = open_loader(cache=dp.Cache(directory=tmp_path, fetchers=1))
    started = time.perf_counter()
    next(iter(loader))
    first = loader.data_wait_s
    assert 0.1 <= first <= time.perf_counter() - started
    loader.set_epoch(1)
    assert loader.data_wait_s >= first
    list(loader)
    list(loader)
    waited = loader.data_wait_s
    list(loader)
    assert loader.data_wait_s - waited < 0.2  # one fetch would take as long


def test_bar_is_drawn_to_its_end(open_loader: Callable[..., dp.Loader], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its total is what is missing, all of which comes; once a loader."""
    from dali_pipes.progress import bar
    from dali_pipes.reader import feed

    bars: list[Any] = []

    def drawn(**options: Any) -> Any:
        assert options["delay_s"] > 0
        bars.append(bar(**options | {"shown": False, "delay_s": 0}))
        bars[-1].update = lambda num: setattr(bars[-1], "n", bars[-1].n + num)  # tqdm's own does nothing unshown
        return bars[-1]

    fetch = LocalFetcher.fetch

    def slow(self: LocalFetcher, *arguments: Any, **options: Any) -> bool:
        time.sleep(0.05)
        return fetch(self, *arguments, **options)

    monkeypatch.setattr(LocalFetcher, "fetch", slow)  # so that there is something to wait for
    monkeypatch.setattr(feed, "bar", drawn)
    loader = open_loader()
    list(loader)
    list(loader)
    (only,) = bars
    assert only.n == only.total > 0


def test_loader_collected_in_one_of_its_own_threads_does_not_hang(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector can run anywhere, also in a thread that fetches, which has the lock that the others wait for."""
    before = threading.active_count()
    is_dropped, is_collected = threading.Event(), threading.Event()
    take_over = Stager._take_over

    def collecting(self: Stager, taken: Any) -> None:
        take_over(self, taken)
        if is_dropped.is_set() and not is_collected.is_set():
            gc.collect()
            is_collected.set()

    monkeypatch.setattr(Stager, "_take_over", collecting)
    gc.collect()
    gc.disable()
    try:
        loader = open_windowed(shards, raw, directory=tmp_path, window_bytes=1, batch_size=2)
        next(iter(loader))
        stager = loader.parts.stager
        loader.itself = loader  # type: ignore[attr-defined]
        is_dropped.set()
        del loader
        with contextlib.suppress(ValueError):  # it is closed while this waits
            stager.need(range(12))
        assert is_collected.is_set()
        until(lambda: threading.active_count() <= before)
    finally:
        gc.enable()


@pytest.mark.parametrize("num_shards", [1, 12])
def test_no_more_threads_than_shards(shards: Path, tmp_path: Path, num_shards: int) -> None:
    """One shard needs one thread, whatever ``num_fetchers`` says."""
    named = [shards / f"s-{number:06d}.tar" for number in range(num_shards)]
    with dp.loader(named, raw, batch_size=2, device="cpu", cache=dp.Cache(directory=tmp_path, fetchers=50)) as loader:
        list(loader)
        assert 1 <= len(loader.parts.stager._threads) <= num_shards


def test_a_rank_that_breaks_off_holds_only_its_windows(
    open_loader: Callable[..., dp.Loader], samples: list[Sample]
) -> None:
    """`break`, epochs long: what is held does not grow."""
    loader = open_loader()
    held = []
    for epoch in range(6):
        loader.set_epoch(epoch)
        for number, (batch,) in enumerate(loader):
            check_rows(batch, samples)
            if number == 3:
                break
        stager = loader.parts.stager
        until(lambda stager=stager: not stager._filling)
        held.append(stager._demand.held_bytes)
    assert max(held) <= loader.parts.share.reserved
    assert np.ptp([len(loader.parts.stager._demand.needs) for _ in held]) == 0
    assert sys.getrefcount(loader) < 10


def test_loader_keeps_few_buffers(
    open_loader: Callable[..., dp.Loader], samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many batches pass: the bytes of none wait for the garbage collector."""
    made: list[int] = []
    mapped = buffers._mapped
    monkeypatch.setattr(buffers, "_mapped", lambda num_bytes: made.append(num_bytes) or mapped(num_bytes))
    loader = open_loader(shuffle=True)
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            read_epoch([loader], samples)
    finally:
        gc.enable()
    # Two batches are decoded ahead, one is delivered, and this segment and the next one read two ahead each. (These
    # batches are small: one buffer holds all that is read at a time.)
    assert 1 < len(made) <= 7


def test_bytes_are_requested_from_the_disk_before_they_are_read(
    open_loader: Callable[..., dp.Loader], samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the first batches, too, which are read when the segment is opened; and of small batches."""
    requested: set[int] = set()
    late: list[int] = []
    begin = AioReader.begin

    def read_ahead(_: object, starts: Any, sizes: Any) -> None:
        requested.update(starts.tolist())

    def checked(reader: AioReader, lines: Lines, rows: slice, *, batch_size: int) -> Any:
        late.extend(start for column in lines.starts for start in column[rows].tolist() if start not in requested)
        return begin(reader, lines, rows, batch_size=batch_size)

    monkeypatch.setattr(CacheShare, "read_ahead", read_ahead)
    monkeypatch.setattr(AioReader, "begin", checked)
    loader = open_loader(shuffle=True, batch_size=1)
    for _ in range(2):
        read_epoch([loader], samples)
    assert requested
    assert not late
