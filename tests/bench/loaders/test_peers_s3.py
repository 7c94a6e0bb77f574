"""Peers that read S3 themselves, on a server of S3 that is no AIStore."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.loaders.registry import LOADERS, available_loaders
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import open_store, resolve_shards
from prep.index import index_shards
from tests.servers.clouds import cloud_bucket

ON_S3 = ("dali", "webloader:turbo", "dali-s3", "s3torchconnector:turbo", "litdata-s3:turbo", "mosaic-s3:turbo")


def test_bench_run_peers_read_one_bucket_and_leave_nothing(
    shards: ShardSet, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The loaders that are installed: outputs are compared, and what was made in the bucket is gone."""
    url = cloud_bucket("s3", request)
    store = open_store(url, endpoint=None)[0]
    for name in shards.names:
        store.upload(name, Path(shards.store.locate(name)))
    found = resolve_shards(f"{url}/pets-", endpoint=None)
    index_shards(found)
    before = sorted(entry.name for entry in store.list(""))
    reasons = available_loaders(found)
    loaders = [loader for loader in ON_S3 if reasons[loader.partition(":")[0]] is None]
    assert {"dali", "dali-s3", "webloader:turbo"} <= set(loaders)

    record = tmp_path / "s3.json"
    sizes = ["--crop", "64", "--batch-size", "5", "--repeats", "1", "--num-threads", "2"]
    arguments = ["--shards", f"{url}/pets-", "--loaders", ",".join(loaders), *sizes, "--json", str(record)]
    # A process of its own: the server of this one's workers may have started before the variables were set.
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


def test_every_loader_that_reads_s3_alone_is_tried() -> None:
    """A new peer of S3 joins the test above."""
    tried = {loader.partition(":")[0] for loader in ON_S3}
    assert {name for name, entry in LOADERS.items() if set(entry.source) == {"ais", "s3"}} <= tried
