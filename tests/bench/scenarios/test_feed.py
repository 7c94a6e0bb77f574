"""`bench feed` on a few samples: the record and its comparison, what is left behind, and what is refused."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from bench.compare.outputs import OutputError
from bench.engine.scenario import run_scenario
from bench.reports.tables import report_text
from bench.scenarios.feed import FeedScenario, check_epoch, expected_samples
from bench.scenarios.feed_loaders import SUBJECTS, FeedData, FeedOptions, copied
from dali_pipes.errors import DataError
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import resolve_shards
from tests.bench.conftest import NUM_SAMPLES, invoke
from tests.shards import Sample, photo_bytes, write_tar

COMPONENTS = ("image.jpg", "trimap.png")


@pytest.fixture(scope="module")
def data(shards: ShardSet, tmp_path_factory: pytest.TempPathFactory) -> FeedData:
    return copied(shards, num_samples=None, components=COMPONENTS, new_folder=lambda: tmp_path_factory.mktemp("feed"))


def options(
    data: FeedData,
    *,
    batch_size: int = 5,
    passes: int = 2,
    components: tuple[str, ...] = COMPONENTS,
    preadv_threads: int = 1,
) -> FeedOptions:
    return FeedOptions(
        components=components,
        batch_size=batch_size,
        passes=passes,
        num_threads=2,
        seed=7,
        preadv_threads=preadv_threads,
        order=np.tile(np.arange(len(data.keys))[::-1], passes),
        keys=True,
    )


@pytest.mark.parametrize("batch_size", [5, 64])
@pytest.mark.parametrize("components", [COMPONENTS, COMPONENTS[:1]], ids=["masks", "photos"])
@pytest.mark.parametrize("loader", SUBJECTS)
def test_feed_loader_gives_what_the_shards_hold(
    loader: str, components: tuple[str, ...], batch_size: int, data: FeedData
) -> None:
    """Each pass of each epoch; the batches are whole, except the last one of an epoch."""
    expected = expected_samples(data.shards, components=components)
    with SUBJECTS[loader](data, options(data, batch_size=batch_size, passes=1, components=components)) as epoch:
        for _ in range(1 if loader.startswith("webdataset") else 2):  # DALI's reader goes on where it was
            check_epoch(epoch(), expected, components=components, loader=loader)
        sizes = [len(batch["label"]) for batch in epoch()]
    assert sizes[:-1] == [batch_size] * (len(sizes) - 1)
    assert sum(sizes) >= NUM_SAMPLES


@pytest.mark.parametrize("preadv_threads", [1, 3])
def test_feed_preadv_reads_the_rows_in_the_given_order(preadv_threads: int, data: FeedData) -> None:
    given = options(data, preadv_threads=preadv_threads)
    assert given.order is not None
    with SUBJECTS["preadv"](data, given) as epoch:
        for _ in range(2):
            assert [key for batch in epoch() for key in batch["key"]] == [data.keys[row] for row in given.order]


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
    """Drawn photos of two sizes, in batches of two sizes; nothing is left behind."""
    out, cache = tmp_path / "feed.json", tmp_path / "cache"
    cache.mkdir()
    arguments = ["feed", "--data-bytes", "200kB", "--photo-kb", "20,10", "--batch-sizes", "4,64", "--passes", "2"]
    arguments += ["--masks", "without", "--loaders", "dali-pipes,webdataset,preadv"]
    arguments += ["--repeats", "1", "--num-threads", "2", "--cache", str(cache), "--json", str(out)]
    done = invoke(*arguments)
    report = json.loads(out.read_text())
    assert [data["num_samples"] for data in report["data"]] == [10, 20]
    found = [
        (*map(record["setting"].get, ("photo_kb", "masks", "batch_size")), record["loader"])
        for record in report["records"]
    ]
    assert found == [*itertools.product((20, 10), ("no",), (4, 64), ("dali-pipes", "webdataset", "preadv"))]
    for record in report["records"]:
        (repeat,) = record["repeats"]
        figures = repeat["figures"]
        assert min(value for value in figures.values() if value is not None) >= 0
        assert figures["samples_per_s"] > 0
        if record["loader"] == "preadv":  # the others also read ahead
            assert figures["read_ratio"] == pytest.approx(1, abs=0.1)
    assert report_text(report) in done.stdout
    assert list(cache.iterdir()) == []
    compared = invoke("compare", str(out), str(out))
    assert compared.exit_code == 0
    assert "dali-pipes CPU-us/sample" in " ".join(compared.stdout.split())


def test_feed_reads_given_shards(bucket: ShardSet, tmp_path: Path) -> None:
    """Shards of a bucket, without and with masks: all samples, in the settings that were asked for."""
    scenario = FeedScenario(
        shards=bucket, batch_sizes=(5,), loaders=("dali-pipes",), repeats=1, passes=1, work=tmp_path
    )
    report = run_scenario(scenario)
    assert [record["setting"]["masks"] for record in report["records"]] == ["no", "yes"]
    assert report["data"][0]["num_samples"] == NUM_SAMPLES
    assert list(report["data"][0]["mean_bytes"]) == ["image.jpg", "trimap.png"]


def test_feed_of_shards_without_the_component_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_tar(tmp_path / "in" / "s-000000.tar", [Sample("a", {"image.jpg": photo_bytes(0, 8, 8), "cls": b"1"})])
    found = resolve_shards(tmp_path / "in", endpoint=None)
    with pytest.raises(DataError, match=r"'repeated-000000.tar': a sample has no component 'trimap.png' \(found: "):
        run_scenario(FeedScenario(shards=found, mask="trimap.png", work=tmp_path))
    with pytest.raises(DataError, match="no component is a mask by its name; name it: --mask NAME"):
        run_scenario(FeedScenario(shards=found, masks="with", work=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_feed_of_shards_without_masks_reads_photos(tmp_path: Path) -> None:
    """Under the name that they have, and in no setting with masks."""
    (tmp_path / "in").mkdir()
    samples = [Sample(f"s{i}", {"jpg": photo_bytes(i, 8, 8), "cls": b"1"}) for i in range(6)]
    write_tar(tmp_path / "in" / "s-000000.tar", samples)
    found = resolve_shards(tmp_path / "in", endpoint=None)
    report = run_scenario(
        FeedScenario(shards=found, batch_sizes=(3,), loaders=("dali-pipes",), repeats=1, passes=1, work=tmp_path)
    )
    assert [record["setting"]["masks"] for record in report["records"]] == ["no"]
    assert (report["options"]["photo"], report["options"]["mask"]) == ("jpg", None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_sizes": (64, 0)}, "batch_sizes must be at least 1, got 0"),
        ({"batch_sizes": (64, 64)}, "batch_sizes must name each value once, got '64,64'"),
        ({"loaders": ()}, "loaders must name each value once, got ''"),
        ({"loaders": ("dali",)}, "loaders must be among dali-pipes, webdataset, .*, got 'dali'"),
    ],
)
def test_feed_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FeedScenario(**options)  # type: ignore[arg-type]
