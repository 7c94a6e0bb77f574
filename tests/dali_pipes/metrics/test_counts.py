"""Stages are timed once, never twice; a number that is read never goes backwards."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp
from dali_pipes.metrics.counts import Counts, ThreadsStage
from tests.dali_pipes.raw import raw

STAGES = ("hand_over", "inputs", "read", "shard_wait", "read_wait", "decode_wait")


def test_stage_inside_another_counts_for_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages add up to the time that the loop spent in the loader."""
    now_s = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    counts = Counts()
    with counts.hand_over, counts.inputs, counts.read:
        now_s += 1
        with counts.shard_wait:
            now_s += 2
        with counts.read_wait:
            now_s += 4
    assert [getattr(counts, name).seconds() for name in STAGES] == [0, 0, 1, 2, 4, 0]
    assert counts.in_loader_s() == 7


def test_stage_counts_while_it_runs() -> None:
    """A batch that waits when an epoch's figures are read belongs to them in part."""
    for stage in (Counts().shard_wait, ThreadsStage("fetch")):
        with stage:
            before = stage.seconds()
            assert stage.seconds() > before
        assert stage.seconds() == stage.seconds() > 0


def test_stage_that_was_cut_short_ends_with_the_one_around_it() -> None:
    """A Ctrl-C between begin and end must not leave a stage running for ever."""
    counts = Counts()
    with counts.hand_over:
        with counts.read, counts.read:  # inside itself
            pass
        counts.read.__enter__()  # its end is never reached
    before = counts.in_loader_s()
    assert counts.in_loader_s() == before


def test_wait_that_ends_while_it_is_read_does_not_go_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader's thread stood still between its two looks, at the stage and at the clock."""
    wait, clock = Counts().shard_wait, time.perf_counter

    def late() -> float:
        monkeypatch.setattr(time, "perf_counter", clock)
        wait.__exit__()
        return clock() + 1

    wait.__enter__()
    monkeypatch.setattr(time, "perf_counter", late)
    told = wait.seconds()
    assert wait.seconds() >= told > 1


def test_threads_of_a_stage_lose_nothing() -> None:
    """Each of eight threads counts for itself; the part inside is never longer than the whole."""
    stage, fetch = ThreadsStage("stage"), ThreadsStage("fetch")

    def work() -> None:
        for _ in range(100):
            with stage, fetch:
                pass
        with stage:
            time.sleep(0.02)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stage.seconds() >= 8 * 0.02 + fetch.seconds() > 8 * 0.02


def test_reading_thread_is_in_no_stage(small_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It works beside the step: only the waiting for it counts."""
    from dali_pipes.reader.aio_reader import AioReader

    read, pauses_s = AioReader._read, [0.5]

    def slow(*arguments: Any) -> Any:
        time.sleep(pauses_s.pop() if pauses_s else 0)
        return read(*arguments)

    monkeypatch.setattr(AioReader, "_read", slow)
    with dp.loader(small_shards, raw, batch_size=6, device="cpu", cache=dp.Cache(show_progress=False)) as loader:
        next(loader)
        counts = loader.parts.counts
        assert counts.read_wait.seconds() > counts.read.seconds()
