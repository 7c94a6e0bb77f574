"""`bench tfrecord` on a few samples: the record, what is left behind, and what is refused."""

import contextlib
import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.compare.outputs import OutputError, Reference, compare_epoch, tolerance_of
from bench.engine.scenario import run_scenario
from bench.loaders.peers.dali_readers import ReaderFiles, open_loader, webdataset_index, write_webdataset_indexes
from bench.loaders.protocol import BenchBatch, BenchLoader, LoaderOptions
from bench.reports.tables import report_text
from bench.scenarios.tfrecord import READER_NAMES, WRITER_NAMES, TfrecordScenario, masked_crc32c, write_tfrecords
from dali_pipes.errors import DataError
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from prep.inspect.indexed_set import IndexedSet
from tests.bench.conftest import CROP, NUM_SAMPLES, invoke
from tests.shards import Sample, make_samples, photo_bytes, write_tar


@pytest.fixture(scope="module", params=["webdataset", "tfrecord"])
def files(request: pytest.FixtureRequest, shards: ShardSet, tmp_path_factory: pytest.TempPathFactory) -> ReaderFiles:
    """What DALI's own reader of each kind is pointed at."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "webdataset":
        paths = [Path(shards.store.locate(name)) for name in shards.names]
        indexes = write_webdataset_indexes(IndexedSet(shards), folder)
        return ReaderFiles(kind="webdataset", paths=paths, index_paths=indexes)
    assert write_tfrecords(shards, folder, options=LoaderOptions()) == NUM_SAMPLES
    paths, indexes = (sorted(folder.glob(f"*.{ending}")) for ending in ("tfrecord", "idx"))
    return ReaderFiles(kind="tfrecord", paths=paths, index_paths=indexes)


@pytest.mark.parametrize("batch_size", [5, 64])
def test_plain_reader_gives_what_pillow_and_torchvision_make(
    files: ReaderFiles, shards: ShardSet, batch_size: int
) -> None:
    """Each sample once in each epoch, whatever is left over at the end: keys, labels and masks equal, photos too."""
    options = LoaderOptions(batch_size=batch_size, num_threads=2, crop=CROP, device="cpu")
    with Reference.open(shards, options=options) as reference, open_loader(files, options=options) as loader:
        assert (loader.decode, loader.device, loader.num_workers) == ("dali", "cpu", 0)
        for _ in range(3):
            found = compare_epoch(
                loader.epoch(), reference, loader=files.kind, tolerance=tolerance_of(decode="dali", device="cpu")
            )
            assert found.num_samples == NUM_SAMPLES


def test_tfrecord_files_have_the_checksums_and_the_index_of_the_format(shards: ShardSet, tmp_path: Path) -> None:
    """Each record has the right checksums, which DALI's reader does not check. DALI's own tool makes the same index."""
    program = Path(sys.executable).parent / "tfrecord2idx"
    write_tfrecords(shards, tmp_path, options=LoaderOptions())
    paths = sorted(tmp_path.glob("*.tfrecord"))
    assert len(paths) == len(shards.names)
    for path in paths:
        data, starts = path.read_bytes(), []
        while (at := sum(size for _, size in starts)) < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            assert data[at + 8 : at + 12] == masked_crc32c(data[at : at + 8])
            assert data[at + 12 + length :][:4] == masked_crc32c(data[at + 12 :][:length])
            starts.append((at, 16 + length))
        index = path.with_suffix(".idx").read_text()
        assert index == "".join(f"{start} {size}\n" for start, size in starts)
        subprocess.run([sys.executable, program, path, tmp_path / "dali"], check=True, capture_output=True, timeout=60)
        assert index == (tmp_path / "dali").read_text()


def test_webdataset_index_refuses_names_with_white_space(tmp_path: Path) -> None:
    write_tar(tmp_path / "s-000000.tar", [Sample("a b", {"jpg": photo_bytes(0, 8, 8)})])
    found = resolve_shards(tmp_path, endpoint=None)
    index_shards(found)
    with pytest.raises(DataError, match=r"key 'a b': DALI.s index cannot hold a name with white space"):
        webdataset_index(IndexedSet(found).read(0))


def test_tfrecord_writes_a_record_for_each_reader_and_writer(shards: ShardSet, tmp_path: Path) -> None:
    out, cache = tmp_path / "tfrecord.json", tmp_path / "cache"
    cache.mkdir()
    arguments = ["tfrecord", "--shards", shards.url, "--repeats", "1", "--epochs", "1", "--batch-size", "5"]
    arguments += ["--num-threads", "2", "--crop", str(CROP), "--device", "cpu", "--cache", str(cache)]
    arguments += ["--json", str(out)]
    done = invoke(*arguments)
    report = json.loads(out.read_text())
    assert [(record["setting"]["work"], record["loader"]) for record in report["records"]] == [
        *(("write", name) for name in WRITER_NAMES),
        *(("decode", name) for name in READER_NAMES),
    ]
    for record in report["records"]:
        (turn,) = record["repeats"]
        if record["setting"]["work"] != "write":
            assert record["outputs"]["num_samples"] == NUM_SAMPLES
        assert turn["num_samples"] % NUM_SAMPLES == 0
        assert turn["figures"]["samples_per_s"] > 0
    assert report["data"][0]["num_samples"] == NUM_SAMPLES
    assert f"{NUM_SAMPLES} samples of each reader are those of the shards" in done.stdout
    assert report_text(report) in done.stdout
    assert list(cache.iterdir()) == []


def test_tfrecord_reader_that_differs_is_named_and_nothing_is_timed(
    shards: ShardSet, options: LoaderOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A label off by one in one reader; what was written is gone."""

    class Wrong:
        num_workers, decode, device = 0, "dali", "cpu"

        def __init__(self, loader: BenchLoader) -> None:
            self._loader = loader

        def epoch(self) -> Iterator[BenchBatch]:
            for batch in self._loader.epoch():
                yield {**batch, "label": batch["label"] + 1}

    @contextlib.contextmanager
    def wrong(files: ReaderFiles, *, options: LoaderOptions) -> Iterator[Wrong]:
        with open_loader(files, options=options) as loader:
            yield Wrong(loader)

    monkeypatch.setattr("bench.scenarios.tfrecord.open_loader", wrong)
    monkeypatch.setattr("bench.engine.scenario.call_apart", lambda *_, **__: pytest.fail("timed"))
    with pytest.raises(OutputError, match=r"loader 'tar, readers.webdataset'.*label"):
        run_scenario(TfrecordScenario(shards=shards, batch_size=5, crop=CROP, device="cpu", repeats=1, work=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_tfrecord_of_shards_that_are_not_indexed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_tar(tmp_path / "in" / "s-000000.tar", make_samples([(8, 8)]))
    found = resolve_shards(tmp_path / "in", endpoint=None)
    with pytest.raises(DataError, match="is not indexed: dali-pipes prep index"):
        run_scenario(TfrecordScenario(shards=found, repeats=1, work=tmp_path))


def test_tfrecord_without_room_is_refused(shards: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1))
    with pytest.raises(ValueError, match=r"writing both formats needs .* has 1 B free; .* --cache DIRECTORY"):
        run_scenario(TfrecordScenario(shards=shards, work=tmp_path))
