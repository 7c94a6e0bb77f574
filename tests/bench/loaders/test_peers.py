"""Tests of single peers: the shards they need, the files they leave, and their errors when something is missing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import UnidentifiedImageError

from bench.loaders.protocol import LoaderOptions
from bench.loaders.registry import LOADERS, LoaderEntry, available_loaders, open_loader
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import open_store, resolve_shards
from prep.index import index_shards
from tests.servers.clouds import cloud_bucket
from tests.shards import make_samples, write_tar

ONE_THREAD = LoaderOptions(batch_size=4, num_threads=1, crop=8, device="cpu")


@pytest.mark.nightly
@pytest.mark.skipif(available_loaders()["spdl"] is not None, reason="needs the extra spdl")
def test_spdl_broken_photo_is_an_error_with_its_own_reason(tmp_path: Path) -> None:
    """A broken photo raises in its batch, if the loop asks for that batch. By default, SPDL logs and skips it."""
    samples = make_samples([(12, 12)] * 12)
    samples[9].components["image.jpg"] = b"no photo"
    write_tar(tmp_path / "odd-000000.tar", samples)
    broken = resolve_shards(tmp_path, endpoint=None)
    seen: list[str] = []
    with open_loader("spdl", broken, options=ONE_THREAD) as loader:
        epoch = loader.epoch()
        seen += next(epoch)["key"] + next(epoch)["key"]
        with pytest.raises(UnidentifiedImageError):
            next(epoch)
    assert seen == [f"s{row:05d}" for row in range(8)], "the two batches before it came"
    with open_loader("spdl", broken, options=ONE_THREAD) as loader:
        next(loader.epoch())


def test_copy_in_the_bucket_is_read_from_there_and_removed(
    bucket_shards: ShardSet, options: LoaderOptions, keys: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is in the bucket while the loader is open, as for ``litdata-s3`` and ``mosaic-s3``."""
    entry = LoaderEntry(module="tests.bench.loaders.copied_shards", prepares="prepare", source=("ais",), in_bucket=True)
    monkeypatch.setitem(LOADERS, "copied", entry)
    before = [found.name for found in bucket_shards.store.list("")]
    with open_loader("copied", bucket_shards, options=options) as loader:
        assert len(bucket_shards.store.list("dali-pipes-bench/")) == len(bucket_shards.names)
        assert {key for batch in loader.epoch() for key in batch["key"]} == keys
    assert [found.name for found in bucket_shards.store.list("")] == before


ON_S3 = (
    "dali",
    "obstore",
    "webloader:turbo",
    "dali-s3",
    "s3torchconnector:turbo",
    "litdata-s3:turbo",
    "mosaic-s3:turbo",
)


@pytest.mark.nightly
def test_bench_run_peers_read_one_bucket_and_leave_nothing(
    pets: ShardSet, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The command compares the outputs of all installed peers, and removes its objects from the bucket."""
    url = cloud_bucket("s3", request)
    store = open_store(url, endpoint=None)[0]
    for name in pets.names:
        store.upload(name, Path(pets.store.locate(name)))
    found = resolve_shards(f"{url}/pets-", endpoint=None)
    index_shards(found)
    before = sorted(entry.name for entry in store.list(""))
    reasons = available_loaders(found)
    loaders = [loader for loader in ON_S3 if reasons[loader.partition(":")[0]] is None]
    assert {"dali", "dali-s3", "webloader:turbo"} <= set(loaders)

    record = tmp_path / "s3.json"
    sizes = ["--crop", "64", "--batch-size", "5", "--repeats", "1", "--num-threads", "2"]
    arguments = ["--shards", f"{url}/pets-", "--loaders", ",".join(loaders), *sizes, "--json", str(record)]
    # In a new process: the fork server of this process may have started before the variables were set.
    run = subprocess.run(
        [sys.executable, "-m", "dali_pipes.cli", "bench", "run", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    turns = json.loads(record.read_text())["records"]
    assert {turn["loader"] for turn in turns} == {loader.partition(":")[0] for loader in loaders}
    assert sorted(entry.name for entry in store.list("")) == before
