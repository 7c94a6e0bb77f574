"""`bench feed` and `bench tfrecord` on a few samples compare readers, write records and leave no file behind."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.compare.outputs import OutputError
from bench.reports.tables import report_text
from bench.scenarios.feed import check_epoch, expected_samples
from bench.scenarios.feed_loaders import SUBJECTS, FeedData, FeedOptions, copied
from dali_pipes.store.shard_set import ShardSet
from tests.bench.conftest import NUM_SAMPLES, invoke

COMPONENTS = ("image.jpg", "trimap.png")


@pytest.fixture(scope="module")
def data(pets: ShardSet, tmp_path_factory: pytest.TempPathFactory) -> FeedData:
    return copied(pets, num_samples=None, components=COMPONENTS, new_folder=lambda: tmp_path_factory.mktemp("feed"))


def feed_options(data: FeedData, *, passes: int = 2, **given: Any) -> FeedOptions:
    usual = {"components": COMPONENTS, "batch_size": 5, "num_threads": 2, "seed": 7, "keys": True} | given
    order = np.tile(np.arange(len(data.keys))[::-1], passes)
    return FeedOptions(**({"preadv_threads": len(usual["components"]), "passes": passes, "order": order} | usual))


@pytest.mark.parametrize(("components", "batch_size"), [(COMPONENTS, 5), (COMPONENTS[:1], 64)], ids=["masks", "photos"])
@pytest.mark.parametrize("loader", SUBJECTS)
def test_feed_loader_gives_what_the_shards_hold(
    loader: str, components: tuple[str, ...], batch_size: int, data: FeedData
) -> None:
    """Each epoch has the samples of the shards. All batches are whole, except the last batch of an epoch."""
    expected = expected_samples(data.shards, components=components)
    with SUBJECTS[loader](data, feed_options(data, batch_size=batch_size, passes=1, components=components)) as epoch:
        for _ in range(1 if loader.startswith("dali-webdataset") else 2):  # DALI's reader continues where it stopped
            check_epoch(epoch(), expected, components=components, loader=loader)
        sizes = [len(batch["label"]) for batch in epoch()]
    assert sizes[:-1] == [batch_size] * (len(sizes) - 1)
    assert sum(sizes) >= NUM_SAMPLES


@pytest.mark.parametrize(
    ("keys", "labels", "sizes", "message"),
    [
        ("ab", [1, 3], [(8, 9), (8, 8)], r"loader 'x', key 'b': label and sizes must be \(2, \(8, 8\)\), got \(3, "),
        ("ab", [1, 2], [(9, 8), (8, 8)], r"key 'a': label and sizes must be \(1, \(8, 9\)\), got \(1, \(9, 8\)\)"),
        ("aa", [1, 1], [(8, 9), (8, 9)], "loader 'x', key 'a': came 2 times in one pass, expected once"),
        ("ac", [1, 2], [(8, 9), (8, 8)], "loader 'x', key 'c': label and sizes must be none"),
        ("a", [1], [(8, 9)], "loader 'x', key 'b': came 0 times in one pass, expected once"),
    ],
)
def test_feed_outputs_that_differ_are_named(
    keys: str, labels: list[int], sizes: list[tuple[int, int]], message: str
) -> None:
    expected = {"a": (1, (8, 9)), "b": (2, (8, 8))}
    batch = {"key": list(keys), "label": np.array(labels), "jpg": np.array([(*size, 3) for size in sizes])}
    with pytest.raises(OutputError, match=message):
        check_epoch(iter([batch]), expected, components=["jpg"], loader="x")


def test_feed_writes_a_record_that_can_be_compared(tmp_path: Path) -> None:
    """The command times photos of two sizes, each turn in its own process, and leaves no file behind."""
    out, cache = tmp_path / "feed.json", tmp_path / "cache"
    cache.mkdir()
    arguments = ["--data-bytes", "200kB", "--photo-kb", "20,10", "--batch-sizes", 8, "--passes", 2, "--repeats", 1]
    arguments += ["--masks", "without", "--loaders", "dali-pipes,preadv", "--num-threads", 2]
    arguments += ["--cache", cache, "--json", out]
    done = invoke("feed", *arguments)
    report = json.loads(out.read_text())
    assert [data["num_samples"] for data in report["data"]] == [10, 20]
    names = ("photo_kb", "masks", "batch_size")
    found = [(*map(record["setting"].get, names), record["loader"]) for record in report["records"]]
    assert found == [*itertools.product((20, 10), ("no",), (8,), ("dali-pipes", "preadv"))]
    for record in report["records"]:
        figures = record["repeats"][0]["figures"]
        assert min(value for value in figures.values() if value is not None) >= 0
        assert figures["samples_per_s"] > 0
        if record["loader"] == "preadv":  # dali-pipes also reads ahead
            assert figures["read_ratio"] == pytest.approx(1, abs=0.1)
    assert report_text(report) in done.stdout
    assert list(cache.iterdir()) == []
    compared = invoke("compare", out, out)
    assert "dali-pipes CPU-us/sample" in " ".join(compared.stdout.split())
