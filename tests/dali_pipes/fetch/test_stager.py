"""Staging: what is wanted is held, in the order of its urgency; errors are told once; nothing stays held by mistake."""

import _thread
import contextlib
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dali_pipes.fetch.stager
from dali_pipes.cache.files import cache_root
from dali_pipes.data_set.data_set import DataSet
from dali_pipes.errors import CacheError, StoreError
from dali_pipes.fetch.fetcher import Fetcher, Wanted
from dali_pipes.fetch.stager import Stager
from dali_pipes.formats.names import index_name
from dali_pipes.store.local import LocalFetcher
from dali_pipes.store.urls import resolve_shards
from tests.programs import threads_that_start, wait_until
from tests.shards import samples_and_shards

NUM_SHARDS = 8


class Store:
    """Opens fetchers of a directory, and says for each shard whether it may come: at once, later, or not at all."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.fetched: list[str] = []
        self.most_together = 0
        self.broken: set[str] = set()
        self.held_back: set[str] = set()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.can_open: Callable[[], bool] = lambda: True
        self.num_open = 0

    def open(self) -> Fetcher:
        if not self.can_open():
            raise StoreError("no connection to be had")
        self.num_open += 1
        return StoreFetcher(self)


class StoreFetcher(LocalFetcher):
    def __init__(self, store: Store) -> None:
        super().__init__(store.directory)
        self._store = store

    def fetch(self, wanted: Sequence[Wanted], *, stopped: Callable[[], bool], num_connections: int = 1) -> bool:
        self._store.most_together = max(self._store.most_together, len(wanted) // 2)
        if len(wanted) > 2:  # several shards, each with its index
            pairs = [wanted[row : row + 2] for row in range(0, len(wanted), 2)]
            return all(self.fetch(pair, stopped=stopped, num_connections=num_connections) for pair in pairs)
        name = wanted[0].name
        self._store.fetched.append(name)
        while not self._store.may_go_on.wait(0.01) or name in self._store.held_back:
            if stopped():
                return False
        if name in self._store.broken:
            wanted[0].report(StoreError(f"'{name}' cannot be had"))  # type: ignore[misc]
            return True
        return super().fetch(wanted, stopped=stopped, num_connections=num_connections)

    def close(self) -> None:
        self._store.num_open -= 1


class Job:
    """A stager over a real image of some shards."""

    def __init__(self, shards: Path, cache_dir: Path, *, num_shards: int = NUM_SHARDS, num_fetchers: int = 1) -> None:
        self.indexed = DataSet(resolve_shards(shards, endpoint=None))
        self.names = list(self.indexed.manifest.names)
        self.store = Store(shards)
        num_bytes = int(np.sort(self.indexed.extent_bytes)[::-1][:num_shards].sum())
        self.share = self.indexed.open_share(
            reserved=num_bytes, is_windowed=True, group=1, cache_dir=cache_dir, cache_bytes=num_bytes
        )
        self.stager = Stager(
            self.share,
            self.indexed.manifest,
            open_fetcher=self.store.open,
            locate=lambda name: f"store/{name}",
            num_fetchers=num_fetchers,
        )

    def fetched(self) -> list[int]:
        return [self.names.index(name) for name in self.store.fetched]

    def check(self, *shards: int) -> None:
        for shard in shards:
            name = self.names[shard]
            assert self.share.shard_extent(shard).read() == (self.store.directory / name).read_bytes()
            assert self.share.index_extent(shard).read() == (self.store.directory / index_name(name)).read_bytes()

    def check_nothing_is_held(self) -> None:
        """Neither by this loader's own account nor by the table that all loaders share."""
        wait_until(lambda: not (self.stager._demand.held or self.stager._filling or self.stager._asking))
        stager, demand = self.stager, self.stager._demand
        assert not any((demand.needs, demand.ahead, demand.needed_missing, demand.ahead_missing))
        assert not any((stager._filling, stager._urgent))
        assert demand.held_bytes == demand.ahead_bytes == 0
        (status,) = self.share.status()
        assert status.num_held == 0

    def close(self) -> None:
        self.stager.close()
        self.share.close()


samples, shards = samples_and_shards([(40, 33)] * (2 * NUM_SHARDS), per_shard=2)


@pytest.fixture
def open_job(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    """Jobs whose threads take one shard at a time, as if they were large, or as many as ``together`` says."""
    with contextlib.ExitStack() as jobs:

        def open_(*, together: int = 1, **options: int) -> Job:
            monkeypatch.setattr(dali_pipes.fetch.stager, "NUM_TOGETHER", together)
            job = Job(shards, tmp_path, **options)
            jobs.callback(job.close)
            jobs.callback(job.store.may_go_on.set)
            return job

        yield open_


# --- order and space --------------------------------------------------------------------------------------------------


def test_needed_goes_before_ahead_and_ahead_is_in_order(open_job: Callable[..., Job]) -> None:
    """One thread: what was begun, then what is needed, then the windows as they were staged."""
    job = open_job()
    job.store.may_go_on.clear()
    job.stager.stage([5, 2])
    job.stager.stage([7, 0, 2])
    wait_until(lambda: bool(job.store.fetched))
    needing = threading.Thread(target=job.stager.need, args=([4],))
    needing.start()
    wait_until(lambda: 4 in job.stager._demand.needs)
    job.store.may_go_on.set()
    needing.join()
    wait_until(lambda: job.stager.num_missing([5, 2, 7, 0])[0] == 0)
    assert job.fetched() == [5, 4, 2, 7, 0]
    job.stager.done([4])
    job.stager.unstage([5, 2])
    assert job.stager.num_missing([2])[0] == 0  # the second window has it, too
    job.stager.unstage([7, 0, 2])
    job.check_nothing_is_held()


def test_urgent_shard_takes_the_thread_of_one_that_can_wait(open_job: Callable[..., Job]) -> None:
    """One thread, held up by a shard that is only ahead: it is left off, and fetched anew when its turn comes."""
    job = open_job()
    job.store.held_back = {job.names[5]}
    job.stager.stage([5, 2])
    wait_until(lambda: job.fetched() == [5])
    job.stager.need([4], urgent=True)  # comes back although nobody lets the other go on
    job.check(4)
    job.store.held_back = set()
    wait_until(lambda: job.stager.num_missing([5, 2])[0] == 0)
    job.check(5, 2)
    assert job.fetched() == [5, 4, 5, 2]
    job.stager.done([4])
    job.stager.unstage([5, 2])
    job.check_nothing_is_held()


def test_progress_says_what_holds_a_shard_up(open_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """It says whether the store is slow, all threads are busy, or another process fetches; empty when all are there."""
    job = open_job()
    job.store.held_back = {job.names[5]}
    job.stager.stage([5, 2])
    wait_until(lambda: job.fetched() == [5])
    assert job.stager.progress([2]) == (
        f"1 of 1 are missing, 'store/{job.names[2]}' among them: all threads are busy with other shards: "
        "Cache(fetchers=) makes more"
    )
    job.stager._filling[5].received_bytes = 5 << 20
    told = f"2 of 2 are missing, 'store/{job.names[5]}' among them: 5.0 of 0.0 MiB came in"
    assert told in job.stager.progress([2, 5])
    monkeypatch.setattr(job.share, "filled_by", lambda shard: 1234)
    assert job.stager.progress([2]).endswith("process 1234 of this node is bringing it: look at its log")
    job.store.held_back = set()
    wait_until(lambda: job.stager.num_missing([5, 2])[0] == 0)
    assert job.stager.progress([2, 5]) == ""
    job.stager.unstage([5, 2])


def test_the_threads_that_may_start_do_the_work(open_job: Callable[..., Job]) -> None:
    """``ulimit -u`` or a pod may forbid more threads. If no thread can start, the caller gets the error."""
    job = open_job(num_fetchers=4)
    with threads_that_start(2) as tried:
        job.stager.need(range(NUM_SHARDS))
    assert len(tried) > 2
    job.check(*range(NUM_SHARDS))
    job.stager.done(range(NUM_SHARDS))
    job.check_nothing_is_held()
    other = open_job(num_fetchers=4)
    with threads_that_start(0):
        for want in (other.stager.need, other.stager.stage):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                want([0])
    other.check_nothing_is_held()
    other.stager.need([0])
    other.stager.done([0])
    other.check_nothing_is_held()


def test_a_shard_for_which_the_disk_has_no_blocks_fails_alone(
    open_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = open_job(together=4)
    reserve = job.share.reserve_blocks

    def reserve_all_but_one(shard: int, **options: Any) -> None:
        if shard == 1:
            raise CacheError("the disk is full")
        reserve(shard, **options)

    monkeypatch.setattr(job.share, "reserve_blocks", reserve_all_but_one)
    job.stager.stage([0, 1, 2])
    wait_until(lambda: job.stager.num_missing([0, 2])[0] == 0)
    with pytest.raises(CacheError, match="the disk is full"):
        job.stager.need([1])
    job.check(0, 2)
    job.stager.unstage([0, 1, 2])
    job.check_nothing_is_held()


def test_what_is_needed_takes_the_space_of_what_is_ahead(open_job: Callable[..., Job]) -> None:
    """Samples of the first windows that fill the last batch: needed, while the cache is full of windows ahead."""
    job = open_job(num_shards=3)
    job.stager.stage([0, 1, 2])
    wait_until(lambda: job.stager.num_missing([0, 1, 2])[0] == 0)
    job.stager.need([5, 6])
    job.check(5, 6)
    job.stager.done([5, 6])
    job.stager.need([0, 1, 2])  # its turn came again
    job.check(0, 1, 2)
    job.stager.done([0, 1, 2])
    job.stager.unstage([0, 1, 2])
    job.check_nothing_is_held()


def test_more_is_needed_than_the_cache_can_hold(open_job: Callable[..., Job]) -> None:
    """No hang: an error that says what to do."""
    job = open_job(num_shards=3)
    with pytest.raises(CacheError, match=r"no space for shard 'store/s-00000\d.tar', and all loaders"):
        job.stager.need(range(NUM_SHARDS))
    job.check_nothing_is_held()
    job.stager.need([7, 6, 5])
    job.stager.done([7, 6, 5])


# --- small shards -----------------------------------------------------------------------------------------------------


def test_shards_are_fetched_together_up_to_a_sum_of_bytes(
    open_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = open_job(together=8)
    monkeypatch.setattr(dali_pipes.fetch.stager, "TOGETHER_BYTES", 3 * int(job.indexed.extent_bytes.max()))
    job.stager.need(range(NUM_SHARDS))
    assert job.store.most_together == 3


def test_broken_shard_fails_alone(open_job: Callable[..., Job]) -> None:
    """The others that were fetched with it are ready; its error goes to who needs it."""
    job = open_job(together=8)
    job.store.broken = {job.names[2]}
    with pytest.raises(StoreError, match=f"{job.names[2]}' cannot be had"):
        job.stager.need(range(NUM_SHARDS))
    job.store.broken = set()
    job.stager.need(range(NUM_SHARDS))
    job.check(*range(NUM_SHARDS))
    assert sorted(job.fetched()) == sorted([*range(NUM_SHARDS), 2])


# --- errors -----------------------------------------------------------------------------------------------------------


def test_error_is_told_once_then_the_shard_is_tried_again(open_job: Callable[..., Job]) -> None:
    """Each call tries again, and what failed holds nothing."""
    job = open_job()
    job.store.broken = {job.names[2]}
    for number in (1, 2):
        with pytest.raises(StoreError, match=r"'s-000002.tar' cannot be had"):
            job.stager.need([1, 2, 3])
        assert job.fetched().count(2) == number
    job.store.broken.clear()
    job.stager.need([1, 2, 3])
    job.check(1, 2, 3)
    job.stager.done([1, 2, 3])
    job.check_nothing_is_held()


def test_no_fetcher_can_be_opened(open_job: Callable[..., Job]) -> None:
    """All threads end: told, not waited for; the next call starts others."""
    job = open_job(num_fetchers=3)
    job.store.can_open = lambda: False
    for _ in range(3):
        with pytest.raises(StoreError, match="no connection to be had"):
            job.stager.need(range(NUM_SHARDS))
        wait_until(lambda: not job.stager._threads)
    job.store.can_open = lambda: True
    job.stager.need(range(NUM_SHARDS))
    job.check(*range(NUM_SHARDS))
    job.stager.done(range(NUM_SHARDS))


def test_cache_removed_under_a_loader_is_told_each_time(open_job: Callable[..., Job], tmp_path: Path) -> None:
    """`rm -r` of the cache: an error for each need, no hang, and closing works."""
    job = open_job(num_fetchers=2)
    job.stager.need([0])
    shutil.rmtree(cache_root(tmp_path))
    for _ in range(2):
        with pytest.raises(CacheError, match=r"was removed or taken from this loader"):
            job.stager.need([1, 2])
    job.stager.close()


# --- cut short --------------------------------------------------------------------------------------------------------


def test_give_up_ends_all_after_each_of_40_interrupts(open_job: Callable[..., Job]) -> None:
    """They come at random moments of a busy loop, other ones in each run. Nothing is held; the next window comes."""
    job = open_job(num_shards=4, num_fetchers=3)
    draw = random.Random(5)
    for _ in range(40):
        timer = threading.Timer(draw.uniform(0, 0.012), _thread.interrupt_main)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 (wherever in the loop it comes)
            timer.start()
            for first in range(0, NUM_SHARDS, 2):
                window = [first, first + 1]
                job.stager.stage(window)
                job.stager.need(window)
                job.stager.done(window)
                job.stager.unstage(window)
            wait_until(lambda: False, "the interrupt did not come")
        job.stager.give_up()
        wait_until(lambda: not job.stager._filling)
        job.check_nothing_is_held()
    job.stager.need([0, 3, 5])
    job.check(0, 3, 5)
    job.stager.done([0, 3, 5])


def test_close_does_not_wait_for_a_silent_store(open_job: Callable[..., Job]) -> None:
    """Its threads end, their fetchers are closed, and a call that waits gets an error. A second close does nothing."""
    job = open_job(num_fetchers=2)
    job.store.may_go_on.clear()
    errors: list[Exception] = []

    def wait() -> None:
        try:
            job.stager.need([0, 1, 2])
        except ValueError as exc:
            errors.append(exc)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(lambda: len(job.store.fetched) == 2)
    job.stager.close()
    job.stager.close()
    waiting.join()
    assert "closed while it waited" in str(errors[0])
    assert job.store.num_open == 0
    with pytest.raises(ValueError, match="was closed while it waited"):
        job.stager.need([0])


def test_ctrl_c_in_close_comes_after_the_threads_have_ended(open_job: Callable[..., Job]) -> None:
    """They write to the descriptor of the cache file, which is closed next, and may be another file's then."""
    job = open_job(num_fetchers=2)
    main = threading.main_thread().ident
    is_filling, has_returned = threading.Event(), threading.Event()
    num_waits = 0

    class Slow(StoreFetcher):
        def fetch(self, *arguments: object, **options: object) -> bool:
            over = job.stager._threads[0].over
            wait = over.wait

            def counted() -> bool:
                nonlocal num_waits
                num_waits += 1
                return wait()

            over.wait = counted  # type: ignore[assignment,method-assign]
            is_filling.set()
            wait_until(lambda: num_waits == 1)
            signal.pthread_kill(main, signal.SIGINT)  # type: ignore[arg-type]
            wait_until(lambda: num_waits == 2 or has_returned.is_set())  # `close` waits again, or it is wrong
            return False

    job.stager._open_fetcher = lambda: Slow(job.store)
    job.stager.stage([0])
    assert is_filling.wait(120)
    with pytest.raises(KeyboardInterrupt):
        job.stager.close()
    running = [thread for thread in job.stager._threads if thread.is_running]
    has_returned.set()
    assert not running
