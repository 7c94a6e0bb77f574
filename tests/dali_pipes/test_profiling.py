"""Stages are shown to whoever listens, and to nobody otherwise."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp
from dali_pipes import profiling
from dali_pipes.iterator import Loader
from dali_pipes.metrics.counts import Counts
from tests.dali_pipes.raw import raw


@pytest.fixture(autouse=True)
def _as_found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is asked for, whatever the environment or another test says."""
    for name in (profiling.ANNOTATE_VARIABLE, *profiling._INJECTIONS):
        monkeypatch.delenv(name, raising=False)
    profiling.follow_environment()
    yield
    monkeypatch.undo()
    profiling.follow_environment()


def opened(shards: Path, *, cache_dir: Path | None = None) -> Loader:
    outputs, cache = dp.Outputs(keys=True), dp.Cache(directory=cache_dir, show_progress=False)
    return dp.loader(shards, raw, batch_size=6, device="cpu", seed=3, outputs=outputs, cache=cache)


def keys_of(loader: Loader) -> list[list[str]]:
    return [batch["key"] for (batch,) in loader]


def is_shown() -> bool:
    shown = profiling.begin_range("read")
    if shown is not None:
        shown.close()
    return shown is not None


def events_of(trace: profiling.Trace, path: Path) -> list[dict[str, Any]]:
    assert trace.write(path) == path.stat().st_size
    document = json.loads(path.read_text())
    assert document["displayTimeUnit"] == "ms"
    return list(document["traceEvents"])


def test_loader_records_its_stages_and_gives_the_same_batches(small_shards: Path, tmp_path: Path) -> None:
    """Recorded or not, an epoch is the same. The trace has its stages, by thread, each inside the one around it."""
    with opened(small_shards) as loader:
        expected = [keys_of(loader) for _ in range(2)]
    with profiling.recording() as trace, opened(small_shards, cache_dir=tmp_path) as loader:
        assert [keys_of(loader) for _ in range(2)] == expected
    events = events_of(trace, tmp_path / "trace.json")
    ranges = [event for event in events if event["ph"] == "X"]
    names = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    loop = names[threading.current_thread().name]
    in_loop = {event["name"] for event in ranges if event["tid"] == loop}
    # A shard that came in time is not waited for.
    assert in_loop - {"wait for shards"} == {"hand-over", "inputs", "read", "wait for bytes", "wait for decoding"}
    assert {event["name"] for event in ranges if event["tid"] != loop} == {"fetch", "stage"}
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in ranges)
    hands = [event for event in ranges if event["name"] == "hand-over"]
    waits = [event for event in ranges if event["name"] == "wait for decoding"]
    assert len(waits) == 8
    for wait in waits:
        begin, end = wait["ts"], wait["ts"] + wait["dur"]
        assert any(hand["ts"] <= begin <= end <= hand["ts"] + hand["dur"] for hand in hands)


def test_profilers_that_take_nvtx_are_found_by_what_they_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DALI finds them; the ranges go to a domain of our own."""
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/opt/nsight/libToolsInjection64.so")
    profiling.follow_environment()
    counts = Counts()
    assert is_shown()
    with counts.read, counts.decode_wait:
        pass
    for value in ("0", "1"):
        monkeypatch.setenv(profiling.ANNOTATE_VARIABLE, value)
        profiling.follow_environment()
        assert is_shown() == (value == "1")
