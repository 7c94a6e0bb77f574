"""Loaders on real servers of clouds give what they give on a directory."""

import os
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dali_pipes as dp
from dali_pipes.cli import main
from dali_pipes.errors import StoreError
from dali_pipes.store.base import DIRECT
from dali_pipes.store.urls import open_store, resolve_shards
from prep.index import index_shards
from tests.servers.clouds import AZURE_KEY, KINDS, S3_KEYS, cloud_bucket

OPTIONS: dict[str, Any] = {"batch_size": 5, "seed": 11}


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, small_shards: Path) -> str:
    """The small shards, with index, below a prefix."""
    bucket = cloud_bucket(request.param, request)
    store = open_store(bucket, endpoint=None)[0]
    for path in sorted(small_shards.glob("*.tar")):
        store.upload(f"set/{path.name}", path)
    index_shards(resolve_shards(f"{bucket}/set/s-", endpoint=None))
    return f"{bucket}/set/s-"


def batches(shards: object, **options: Any) -> list[Mapping[str, np.ndarray]]:
    with dp.loader(shards, dp.segmentation(crop=32), **OPTIONS | options) as loader:
        return [{name: value.numpy().copy() for name, value in batch[0].items()} for batch in loader]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        for name in other:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_batches_are_those_of_a_directory(url: str, small_shards: Path) -> None:
    assert_same(batches(url), batches(small_shards))
    assert_same(batches(url, endpoint=DIRECT), batches(small_shards))
    parts = [batches(url, rank=rank, world_size=2) for rank in range(2)]
    assert_same(parts[1], batches(small_shards, rank=1, world_size=2))


def test_missing_shard_and_bucket_are_named(url: str, tmp_path: Path) -> None:
    store, prefix = open_store(url, endpoint=None)
    name = next(entry.name for entry in store.list(prefix) if entry.name.endswith(".tar"))
    store.delete(name)
    with pytest.raises(StoreError, match=name):
        batches(url, cache=dp.Cache(directory=tmp_path))  # another process may have the same shards in the usual one
    bucket = url.removesuffix("/set/s-")
    with pytest.raises(StoreError, match=f"no bucket '{bucket}-none'"):
        batches(f"{bucket}-none/set/s-")


def test_wrong_keys_are_refused_with_advice_and_not_shown(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "c2VjcmV0LW9mLXRoaXMtdGVzdA=="
    if url.startswith("s3://"):
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    else:
        text = f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={secret};"
        endpoint = os.environ["AZURE_STORAGE_CONNECTION_STRING"].partition("BlobEndpoint=")[2]
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"{text}BlobEndpoint={endpoint}")
    with pytest.raises(StoreError, match=r"403 .*; credentials are looked for in this order: ") as caught:
        batches(url)
    assert secret not in f"{caught.value}{caught.value.__cause__}"


def test_store_travels_with_its_settings_and_shows_no_secret(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As to a worker process on another machine, whose environment has no keys."""
    store, prefix = open_store(url, endpoint=None)
    sent = pickle.dumps(store)
    listed = store.list(prefix)
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_"))]:
        monkeypatch.delenv(name)
    came = pickle.loads(sent)
    assert came.list(prefix) == listed
    view = memoryview(bytearray(4))
    assert came.access().file(listed[0].name, size=listed[0].size).read_into(view, offset=0) == 4
    assert bytes(view) == store.read_range(listed[0].name, start=0, size=4)
    for secret in (S3_KEYS[1], AZURE_KEY):
        assert secret not in f"{came!r}{came.settings!r}{came.access()!r}"


def test_cloud_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(
        StoreError, match=r"needs the package 'obstore'.*pip install 'dali-pipes\[cloud\]', or pass end"
    ):
        dp.loader("s3://pets/a-", dp.segmentation(crop=32), **OPTIONS)


def test_cloud_and_aistore_without_an_endpoint_are_not_mixed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prep", "shuffle", "ais://a/x-", "s3://b/y-"]) != 0
    assert "'ais://a/x-' is in AIStore, 's3://b/y-' is not, and no AIStore endpoint is given" in capsys.readouterr().err
