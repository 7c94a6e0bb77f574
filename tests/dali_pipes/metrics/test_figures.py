"""A loader's figures count its work, and outlive the loader."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import dali_pipes as dp
from dali_pipes.metrics.counts import Counts
from dali_pipes.metrics.figures import LOADERS, labels_of
from tests.dali_pipes.raw import raw

if TYPE_CHECKING:
    from tests.shards import Sample


def opened(shards: Path, **options: object) -> dp.Loader:
    settings: dict[str, object] = {"batch_size": 4, "device": "cpu", "cache": dp.Cache(show_progress=False)}
    return dp.loader(shards, raw, **(settings | options))


@pytest.fixture
def loader(small_shards: Path, tmp_path: Path) -> Iterator[dp.Loader]:
    with opened(small_shards, cache=dp.Cache(directory=tmp_path, show_progress=False)) as made:
        yield made


def test_figures_of_an_epoch(loader: dp.Loader, small_shards: Path, small_samples: list[Sample]) -> None:
    """23 samples in batches of 4: all that can be counted by hand."""
    assert [number for number in loader.stats().values() if not isinstance(number, int | float)] == []
    first = loader.stats()
    assert (first["samples"], first["batches"], first["epoch"], first["epoch_samples"]) == (0, 0, 0, 23)
    next(loader)
    middle = loader.stats()
    assert (middle["samples"], middle["position_samples"]) == (4, 4)
    assert 1 <= middle["batches_ahead"] <= 2
    rest = sum(1 for _ in loader)
    after = loader.stats()
    assert (after["samples"], after["batches"], after["position_samples"]) == (23, rest + 1, 23)
    files = [*small_shards.glob("*.tar"), *small_shards.rglob("*.index.safetensors")]
    assert after["fetched_shards"] == 4
    assert after["fetched_bytes"] == sum(path.stat().st_size for path in files)
    # What the graph reads of a sample, and no other component.
    read = loader.parts.decode.inputs.read
    assert after["read_bytes"] == sum(len(sample.components[name]) for sample in small_samples for name in read)
    assert after["cache_resident_bytes"] >= after["cache_held_bytes"] > after["fetched_bytes"]
    assert after["cache_limit_bytes"] >= after["cache_reserved_bytes"] >= after["cache_held_bytes"]
    assert after["loader_seconds"] > after["decode_wait_seconds"] > 0
    assert after["loader_seconds"] > after["shard_wait_seconds"] == loader.data_wait_s
    loader.reset()
    assert loader.stats()["epoch"] == 1
    assert loader.stats()["position_samples"] == 0


def test_faces_have_the_figures_of_their_loader(loader: dp.Loader) -> None:
    faces = [loader.as_dataloader(outputs=("label",)), loader.as_dali()]
    assert sum(1 for _ in faces[0]) == 6
    assert [face.stats()["samples"] for face in faces] == [23, 23]


def test_closed_loaders_leave_their_counters_to_the_next_of_their_name(small_shards: Path) -> None:
    """A job that opens a loader for each validation has one growing series. The series keeps no loader alive.

    Samples that FILL repeats are not counted.
    """
    totals = []
    for _ in range(3):
        with opened(small_shards, last_batch_policy="FILL") as loader:
            loader.name = "val-of-this-test"
            sum(1 for _ in loader)
            labels = labels_of(loader.parts)
            totals.append(LOADERS.read()[labels]["samples"])
            assert LOADERS.read()[labels]["position_samples"] == 23
    assert [total - totals[0] for total in totals] == [0, 23, 46]
    figures = LOADERS.read()[labels]
    assert figures["samples"] == totals[-1]
    assert "position_samples" not in figures, "a closed loader has no position"
    opened(small_shards).name = "dropped-in-this-test"
    gc.collect()
    assert ("loader", "dropped-in-this-test") in [pair for labels in LOADERS.read() for pair in labels]


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
