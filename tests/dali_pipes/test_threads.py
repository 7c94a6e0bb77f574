"""One thread at a time may use a loader. Beside it another one gets an error, and never a batch of other samples."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp
from dali_pipes import delivery
from dali_pipes.store.local import LocalFetcher
from tests.dali_pipes.test_contract import graph
from tests.programs import wait_until
from tests.shards import samples_and_shards

KEYS = [f"s{i:05d}" for i in range(31)]
ADVICE = "hand the batches over by a queue.Queue, or take a threading.Lock around each call"


samples, shards = samples_and_shards([(24, 20)] * len(KEYS), per_shard=9)


@pytest.fixture
def loader(shards: Path) -> Iterator[dp.Loader]:
    with dp.loader(shards, graph, batch_size=2, seed=1, device="cpu", outputs=dp.Outputs(keys=True)) as opened:
        yield opened


def in_threads(*targets: Callable[[], None]) -> None:
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "it hangs"


def test_threads_at_once_get_each_sample_once_or_an_error(loader: dp.Loader) -> None:
    """Three threads read two epochs. A refused thread tries again. Together they get each sample once an epoch."""
    refused: set[str] = set()
    for _ in range(2):
        keys: list[str] = []

        def read(keys: list[str] = keys) -> None:
            while True:
                try:
                    keys.extend(next(loader)[0]["key"])
                except StopIteration:
                    return
                except RuntimeError as exc:
                    refused.add(str(exc).rpartition(" and ")[2])

        in_threads(*[read] * 3)
        assert sorted(keys) == KEYS
        iter(loader)
    assert refused <= {ADVICE}


@pytest.fixture
def waiting(loader: dp.Loader) -> Iterator[Callable[[], list[Any]]]:
    """A thread is in `next_batch` until the returned function ends it; that returns its batch or error."""
    has_begun, may_end = threading.Event(), threading.Event()
    found: list[Any] = []

    def form(batch: dict[str, Any]) -> dict[str, Any]:
        has_begun.set()
        assert may_end.wait(60)
        return batch

    def read() -> None:
        try:
            found.append(loader.delivery.next_batch(form, taker="test"))
        except BaseException as exc:  # noqa: BLE001 (the test looks at it)
            found.append(exc)

    thread = threading.Thread(target=read, name="reading")
    thread.start()
    assert has_begun.wait(60)

    def end() -> list[Any]:
        may_end.set()
        thread.join(60)
        assert not thread.is_alive()
        return found

    yield end
    end()


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("next_batch", lambda loader, state: next(loader)),
        ("begin", lambda loader, state: iter(loader)),
        ("reset", lambda loader, state: loader.reset()),
        ("set_epoch", lambda loader, state: loader.set_epoch(3)),
        ("load_state_dict", lambda loader, state: loader.load_state_dict(state)),
    ],
)
def test_use_beside_a_running_one_is_refused_and_changes_nothing(
    loader: dp.Loader, waiting: Callable[[], list[Any]], name: str, use: Callable[[dp.Loader, dict[str, Any]], object]
) -> None:
    """The other thread gets its batch, and the epoch goes on with the next one."""
    state = loader.state_dict()
    assert state["delivered"] == 0  # may be asked at any time: the batch is not delivered yet
    text = rf"'MainThread' called {name}\(\) while thread 'reading' was in next_batch\(\), .* {ADVICE}"
    with pytest.raises(RuntimeError, match=text):
        use(loader, state)
    (batch,) = waiting()
    assert sorted(batch["key"] + [key for (rest,) in loader for key in rest["key"]]) == KEYS


def test_close_beside_a_running_use_waits_for_it(loader: dp.Loader, waiting: Callable[[], list[Any]]) -> None:
    """The batch is whole; afterwards the loader is closed for both threads."""
    closing = threading.Thread(target=loader.close)
    closing.start()
    (batch,) = waiting()
    assert len(batch["key"]) == 2
    closing.join(60)
    assert not closing.is_alive()
    with pytest.raises(ValueError, match="this loader is closed"):
        next(loader)


def test_close_ends_a_wait_for_shards(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for a store that does not answer has an error; neither it nor close() waits on."""
    is_asked = threading.Event()

    def fetch(self: LocalFetcher, wanted: Any, *, stopped: Callable[[], bool], **options: Any) -> bool:
        is_asked.set()
        wait_until(stopped)
        return False

    monkeypatch.setattr(LocalFetcher, "fetch", fetch)
    loader = dp.loader(shards, graph, batch_size=2, device="cpu", cache=dp.Cache(directory=tmp_path))
    errors: list[Exception] = []

    def read() -> None:
        try:
            next(loader)
        except Exception as exc:  # noqa: BLE001 (the test looks at it)
            errors.append(exc)

    def close() -> None:
        wait_until(lambda: loader.delivery._uses)
        assert is_asked.wait(60)
        loader.close()

    in_threads(read, close)
    assert "closed" in str(errors[0])


def test_daemon_thread_ends_its_epoch_also_while_the_program_ends(
    loader: dp.Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever joins the thread at exit would wait for ever. An error keeps the thread: it would be printed."""
    ending = threading.Event()
    ending.set()
    monkeypatch.setattr(delivery, "_ending", ending)
    thread = threading.Thread(target=lambda: list(loader), daemon=True)
    thread.start()
    thread.join()
    assert loader.num_batches_left == 0
