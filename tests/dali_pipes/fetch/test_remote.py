"""The loader over a bucket: the embedded node, or any cluster that AIS_ENDPOINT names."""

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from subprocess import run

import pytest

import dali_pipes as dp
from dali_pipes.store.cluster import embedded_node
from dali_pipes.store.cluster.ais import AisStore
from tests.loaders import keys_of
from tests.shards import copy_files, fill_bucket

KEYS = [f"s{i:05d}" for i in range(23)]


@pytest.fixture(params=["embedded", pytest.param("cluster", marks=pytest.mark.aistore)])
def bucket(request: pytest.FixtureRequest, small_shards: Path) -> Iterator[AisStore]:
    """A bucket of its own with the small shards, indexed there."""
    if request.param == "cluster":
        endpoint = os.environ.get("AIS_ENDPOINT")
        if not endpoint:
            pytest.skip("AIS_ENDPOINT names no cluster")
        yield from filled(endpoint, small_shards)
    else:
        yield from filled(request.getfixturevalue("node"), small_shards)


def filled(endpoint: str, shards: Path) -> Iterator[AisStore]:
    store = AisStore(endpoint, f"test-loader-{uuid.uuid4().hex[:8]}")
    try:
        fill_bucket(store, shards, folder="train/")
        yield store
    finally:
        store.client.bucket(store.bucket).delete(missing_ok=True)


def test_loader_reads_a_bucket(bucket: AisStore, small_shards: Path) -> None:
    """By braces, a prefix or a folder; the same batches as from local files, since the shards are the same."""
    options = {"batch_size": 5, "seed": 3, "device": "cpu", "outputs": dp.Outputs(keys=True)}
    with dp.loader(small_shards, dp.segmentation(crop=16), **options) as loader:
        local = [keys_of(loader), keys_of(loader)]
    assert sorted(local[0]) == KEYS
    for form in ("train/s-{000000..000003}.tar", "train/s-", "train/"):
        url = f"{bucket.url}/{form}"
        with dp.loader(url, dp.segmentation(crop=16), endpoint=bucket.endpoint, **options) as loader:
            assert [keys_of(loader), keys_of(loader)] == local


@pytest.mark.fresh_interpreter
def test_loader_does_not_import_the_sdk(node: str, small_shards: Path) -> None:
    """Its import takes longer than all else that opening does, also where the bucket must be listed."""
    store = AisStore(node, f"no-sdk-{uuid.uuid4().hex[:8]}")
    fill_bucket(store, small_shards, folder="train/")
    code = (
        "import sys, dali_pipes as dp\n"
        f"with dp.loader('{store.url}/train/', dp.segmentation(crop=16), endpoint='{node}', batch_size=4, seed=1,\n"
        "               device='cpu') as loader:\n"
        "    next(iter(loader))\n"
        "    print({'aistore', 'requests', 'pydantic'} & set(sys.modules))"
    )
    assert run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"


def test_without_an_endpoint_an_embedded_node_serves_the_default_folder(
    tmp_path: Path, small_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one command packed is there for the loader, with no server and no setting; the node ends with the loader."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with embedded_node.start(tmp_path / "dali-pipes" / "embedded") as node:
        store = AisStore(node.endpoint, "pets")
        store.create()
        copy_files(small_shards, store)
    with dp.loader(
        "ais://pets/s-", dp.segmentation(crop=16), batch_size=5, device="cpu", outputs=dp.Outputs(keys=True)
    ) as loader:
        assert sorted(keys_of(loader)) == KEYS
