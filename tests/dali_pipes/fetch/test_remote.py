"""The loader over a bucket: the embedded node, or any cluster that AIS_ENDPOINT names."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import dali_pipes as dp
from dali_pipes.store.cluster import embedded_node
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from tests.loaders import keys_of
from tests.shards import Sample, fill_bucket, write_tar

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


def test_a_batch_of_bad_samples_is_made_up_from_the_bucket(
    bucket: AisStore, small_samples: list[Sample], tmp_path: Path
) -> None:
    """Its shard's windows are over when DALI fails: the neighbour's bytes are asked for, and no more."""
    for shard in range(4):
        samples = small_samples[6 * shard : 6 * shard + 6]
        if shard == 1:
            # Cut off near the end: nobody knows before they are decoded. All but the shard's fourth.
            samples = [
                Sample(s.key, s.components | {"image.jpg": s.components["image.jpg"][:-40]}) if i != 3 else s
                for i, s in enumerate(samples)
            ]
        bucket.upload(f"train/s-{shard:06d}.tar", write_tar(tmp_path / "s.tar", samples))
    index_shards(resolve_shards(f"{bucket.url}/train/s-", endpoint=bucket.endpoint))
    with dp.loader(
        f"{bucket.url}/train/s-",
        dp.segmentation(crop=96),  # of all rows: a window of the first ones could be decoded
        batch_size=3,
        device="cpu",
        outputs=dp.Outputs(keys=True),
        shuffle=False,
        endpoint=bucket.endpoint,
        bad_samples=dp.BadSamples(on_error="substitute", quarantine=tmp_path / "quarantine.tsv"),
    ) as loader:
        keys = keys_of(loader)
        assert keys[:6] == KEYS[:6]
        assert keys[6:12] == ["s00009"] * 6
        assert keys[12:] == KEYS[12:]
        assert sorted(bad.key for bad in loader.bad_samples) == [f"s{i:05d}" for i in (6, 7, 8, 10, 11)]


def test_loader_shard_gone_from_the_bucket_is_named(bucket: AisStore) -> None:
    """A shard deleted after it was indexed: the error names it."""
    bucket.delete("train/s-000002.tar")
    url = f"{bucket.url}/train/s-{{000000..000003}}.tar"
    loader = dp.loader(url, dp.segmentation(crop=16), batch_size=5, device="cpu", endpoint=bucket.endpoint)
    with (
        loader,
        pytest.raises(dp.StoreError, match=r"'ais://.*/train/s-000002.tar' at http.*: 404 .*was it deleted"),
    ):
        list(loader)


def test_endpoint_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch, closed_port: int) -> None:
    """Read from AIS_ENDPOINT, refused before anything starts."""
    monkeypatch.setenv("AIS_ENDPOINT", f"http://127.0.0.1:{closed_port}")
    with pytest.raises(
        dp.StoreError, match=rf"no answer from AIStore at http://127.0.0.1:{closed_port} .*AIS_ENDPOINT"
    ):
        dp.loader("ais://pets/shuffled-", dp.segmentation(), batch_size=5)


def test_without_an_endpoint_an_embedded_node_serves_the_default_folder(
    tmp_path: Path, small_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one command packed is there for the loader, with no server and no setting; the node ends with the loader."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with embedded_node.start(tmp_path / "dali-pipes" / "embedded") as node:
        store = AisStore(node.endpoint, "pets")
        store.create()
        for path in small_shards.glob("s-*"):
            store.upload(path.name, path)
    with dp.loader(
        "ais://pets/s-", dp.segmentation(crop=16), batch_size=5, device="cpu", outputs=dp.Outputs(keys=True)
    ) as loader:
        assert sorted(keys_of(loader)) == KEYS
