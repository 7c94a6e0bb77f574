"""Stages tell what they do to whoever listens, and to nobody otherwise."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dali_pipes as dp
from dali_pipes import profiling as stages
from dali_pipes.iterator import Loader
from dali_pipes.reader.aio_reader import AioReader
from tests.dali_pipes.raw import raw


@pytest.fixture(autouse=True)
def _as_found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is asked for, whatever the environment or another test says."""
    for name in (stages.ANNOTATE_VARIABLE, *stages._INJECTIONS):
        monkeypatch.delenv(name, raising=False)
    stages.annotate(None)
    yield
    stages.annotate(None)


def opened(shards: Path) -> Loader:
    return dp.loader(
        shards,
        raw,
        batch_size=6,
        device="cpu",
        seed=3,
        outputs=dp.Outputs(keys=True),
        cache=dp.Cache(show_progress=False),
    )


def keys_of(loader: Loader) -> list[list[str]]:
    return [batch["key"] for (batch,) in loader]


def test_what_runs_inside_counts_for_itself_alone() -> None:
    """A thread's stages add up to the time it spent in them: nothing is counted twice."""
    with stages.recording() as recorder:
        with stages.busy("hand-over"), stages.busy("inputs"), stages.waiting("read"):
            pass
        with stages.busy("hand-over"):
            pass
    seconds = recorder.seconds()
    assert set(seconds) == {("hand-over", "busy"), ("inputs", "busy"), ("read", "waiting")}
    assert recorder.in_loader_s() == pytest.approx(sum(seconds.values()), abs=1e-9)


def test_threads_of_the_stager_are_not_in_the_step_s_waiting() -> None:
    """What the step waits for is what the thread that iterates does."""
    with stages.recording() as recorder, stages.busy("stage"), stages.busy("fetch"):
        pass
    assert set(recorder.seconds()) == {("stage", "busy"), ("fetch", "busy")}
    assert recorder.in_loader_s() == 0.0


def test_what_has_not_ended_counts_as_far_as_it_has_come() -> None:
    """A shard that is being fetched when an epoch ends belongs to it in part."""
    with stages.recording() as recorder, stages.busy("fetch"):
        first = recorder.seconds()["fetch", "busy"]
        assert recorder.seconds()["fetch", "busy"] > first > 0
    assert recorder.seconds()["fetch", "busy"] > first


def test_many_threads_lose_nothing() -> None:
    """Every span of every thread is ended, and none of another's."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(300):
                with stages.busy("stage"), stages.busy("fetch"):
                    pass
        except BaseException as exc:  # noqa: BLE001 (told by the test)
            failed.append(exc)

    with stages.recording() as recorder:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed
    assert recorder._stacks == {}
    assert set(recorder.seconds()) == {("stage", "busy"), ("fetch", "busy")}


def test_a_span_that_was_cut_short_ends_with_the_one_around_it() -> None:
    """A Ctrl-C between beginning and end must not leave a stage at work for ever."""
    with stages.recording() as recorder:
        depth = recorder.enter("hand-over", "busy")
        recorder.enter("read", "busy")  # its end is never reached
        recorder.leave(depth)
        before = recorder.seconds()
        assert recorder.seconds() == before


def test_nobody_listens_nothing_is_made() -> None:
    """Off, all stages share one context that does nothing."""
    assert stages.busy("read") is stages.waiting("hand-over")
    with stages.recording():
        assert stages.busy("read") is not stages.busy("read")
    assert stages.busy("read") is stages.waiting("hand-over")


def test_one_recording_at_a_time() -> None:
    """Two would each have half."""
    with stages.recording():
        with pytest.raises(RuntimeError, match="being recorded already"), stages.recording():
            pass
        assert stages.busy("read") is not stages.busy("read"), "the first goes on"


def test_loader_records_its_stages_and_gives_the_same_batches(small_shards: Path) -> None:
    """Measured or not, an epoch is the same; reading, the inputs and the hand-over are in it."""
    with opened(small_shards) as loader:
        expected = [keys_of(loader) for _ in range(2)]
    with stages.recording() as recorder, opened(small_shards) as loader:
        assert [keys_of(loader) for _ in range(2)] == expected
    seconds = recorder.seconds()
    assert seconds.keys() >= {("read", "busy"), ("inputs", "busy"), ("hand-over", "busy"), ("hand-over", "waiting")}
    assert seconds.keys() >= {("fetch", "busy"), ("stage", "busy")}
    assert all(value > 0 for value in seconds.values())


def test_the_reading_thread_is_not_in_the_step_s_waiting(small_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It works beside the step: as the stages of the iterating thread, only the waiting for it counts."""
    read = AioReader._read
    threads = set()

    def noted(*arguments: Any) -> Any:
        threads.add(threading.get_ident())
        return read(*arguments)

    with stages.recording() as recorder:
        entered = recorder.enter
        by_thread: dict[str, set[int]] = {}

        def enter(stage: Any, kind: Any) -> int:
            by_thread.setdefault(stage, set()).add(threading.get_ident())
            return entered(stage, kind)

        monkeypatch.setattr(AioReader, "_read", noted)
        monkeypatch.setattr(recorder, "enter", enter)
        with opened(small_shards) as loader:
            keys_of(loader)
    assert len(threads) == 1
    assert by_thread["read"] == {threading.get_ident()}


def test_torch_profiler_shows_stages_while_it_is_at_work(small_shards: Path) -> None:
    """Started in mid-epoch it finds them; stopped, they cost nothing again."""
    with opened(small_shards) as loader:
        next(loader)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            next(loader)
        next(loader)
        assert stages.busy("read") is stages.waiting("read")
    shown = {event.key: event.count for event in profiler.key_averages() if event.key.startswith("dali-pipes")}
    assert shown["dali-pipes: hand-over"] == 1
    assert "dali-pipes: hand-over waits" in shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("1", True),
        ("0", False),  # although the profiler is at work
    ],
)
def test_the_environment_decides(value: str, shown: bool, small_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DALI_PIPES_ANNOTATE is stronger than what is found."""
    monkeypatch.setenv(stages.ANNOTATE_VARIABLE, value)
    with opened(small_shards) as loader, torch.profiler.profile() as profiler:
        next(loader)
    assert any(event.key == "dali-pipes: hand-over" for event in profiler.key_averages()) is shown


def test_environment_with_another_value_is_refused(small_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not taken for either."""
    monkeypatch.setenv(stages.ANNOTATE_VARIABLE, "yes")
    with pytest.raises(ValueError, match="DALI_PIPES_ANNOTATE must be 0 or 1, got 'yes'"):
        opened(small_shards)


def test_what_a_program_says_is_stronger_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that is made later does not undo it."""
    monkeypatch.setenv(stages.ANNOTATE_VARIABLE, "0")
    stages.annotate(True)
    stages.follow_environment()
    assert stages.busy("read") is not stages.busy("read")


def test_profilers_that_take_nvtx_are_found_by_what_they_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DALI finds them; the ranges go to a domain of our own."""
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/opt/nsight/libToolsInjection64.so")
    stages.follow_environment()
    assert stages._nvtx is not None
    with stages.busy("read"), stages.waiting("hand-over"):
        pass
    monkeypatch.setenv(stages.ANNOTATE_VARIABLE, "0")
    stages.follow_environment()
    assert stages._nvtx is None
