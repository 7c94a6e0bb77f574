"""A loader's figures are what it did, never go backwards, and outlive it."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import dali_pipes as dp
from dali_pipes.metrics.figures import FIGURES, LOADERS, labels_of
from tests.dali_pipes.raw import raw
from tests.shards import Sample, write_shards

COUNTERS = [figure.name for figure in FIGURES if figure.is_counter]


def opened(shards: Path, **options: object) -> dp.Loader:
    settings: dict[str, object] = {"batch_size": 4, "device": "cpu", "cache": dp.Cache(show_progress=False)}
    return dp.loader(shards, raw, **(settings | options))


@pytest.fixture
def loader(small_shards: Path, tmp_path: Path) -> Iterator[dp.Loader]:
    with opened(small_shards, cache=dp.Cache(directory=tmp_path, show_progress=False)) as made:
        yield made


def test_names_have_their_units_at_the_end_as_prometheus_wants() -> None:
    for figure in FIGURES:
        assert re.fullmatch(r"dali_pipes_[a-z_]+", figure.metric)
        assert figure.metric.endswith("_total") == figure.is_counter
        assert figure.help.endswith(".")


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
    files = [*small_shards.glob("*.tar"), *small_shards.glob("*.index.safetensors")]
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


def test_samples_that_fill_a_batch_do_not_count(small_shards: Path) -> None:
    with opened(small_shards, last_batch_policy="FILL", batch_size=12) as loader:
        assert sum(len(batch["label"]) for (batch,) in loader) == 24
        assert loader.stats()["samples"] == 23


def test_bad_samples_are_counted(tmp_path: Path, small_samples: list[Sample]) -> None:
    broken = [Sample(one.key, dict(one.components)) for one in small_samples[:6]]
    broken[2].components["image.jpg"] = b"GIF89a not a photo"
    shards = write_shards(tmp_path / "shards", broken, per_shard=3)
    bad = dp.BadSamples(on_error="substitute", quarantine=tmp_path / "bad.tsv")
    graph = dp.segmentation(crop=16)
    with dp.loader(shards, graph, batch_size=3, device="cpu", bad_samples=bad) as loader:
        for epoch in range(2):
            assert sum(1 for _ in loader) == 2
            assert (loader.stats()["bad_samples"], loader.stats()["substituted_samples"]) == (1, epoch + 1)


def test_counters_never_go_backwards(loader: dp.Loader) -> None:
    """Read by another thread without a pause, over ends of epochs, resets, an error in the loop, and the close."""
    seen: list[dict[str, float]] = [loader.stats()]
    is_over = threading.Event()
    failed: list[str] = []

    def watch() -> None:
        while not is_over.is_set():
            now = loader.stats()
            failed.extend(name for name in COUNTERS if now[name] < seen[-1][name])
            seen.append(now)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        for epoch in range(4):
            for number, _ in enumerate(loader):
                if number == 2 and epoch == 1:
                    break
            loader.reset()
        loader.set_epoch(9)
        next(loader)
        loader.close()
    finally:
        is_over.set()
        watching.join()
    assert not failed
    assert seen[-1]["batches"] <= loader.stats()["batches"] == 6 + 3 + 6 + 6 + 1


def test_closed_loaders_leave_their_counters_to_the_next_of_their_name(small_shards: Path) -> None:
    """A job that opens a loader for each validation has one series, which grows; nothing keeps the loaders."""
    totals = []
    for _ in range(3):
        with opened(small_shards) as loader:
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


def test_open_loaders_have_different_names(small_shards: Path) -> None:
    with opened(small_shards) as one, opened(small_shards) as two:
        labels = labels_of(one.parts)
        assert labels != labels_of(two.parts)
        one.close()
        with opened(small_shards) as three:
            assert labels_of(three.parts) == labels, "the lowest that is free: names stay few"
