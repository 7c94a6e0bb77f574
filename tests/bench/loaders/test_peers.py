"""Tests of single peers: the shards they need, the files they leave, and their errors when something is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import UnidentifiedImageError

from bench.loaders.peers import dali_readers
from bench.loaders.protocol import LoaderOptions
from bench.loaders.registry import LOADERS, LoaderEntry, available_loaders, open_loader
from bench.loaders.s3 import client_environment, s3_place
from dali_pipes.errors import StoreError
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import open_store, resolve_shards
from prep.index import index_shards
from tests.servers.clouds import cloud_bucket
from tests.shards import make_samples, write_tar


def test_dali_s3_cluster_that_does_not_answer_a_range_is_named(bucket: ShardSet) -> None:
    """AIStore without S3-Reverse-Proxy redirects, as its own API does here; DALI names neither status nor reason."""
    endpoint = bucket.store.endpoint
    for url, reason in (
        (f"{endpoint}/v1/objects/pets/{bucket.names[0]}", "HTTP Error 301"),
        (f"{endpoint}/s3/pets/none.tar", "HTTP Error 404"),
        ("http://127.0.0.1:1/s3/pets/a.tar", "Connection refused"),
    ):
        with pytest.raises(StoreError, match=rf"'{url}': a ranged GET failed \(.*{reason}.*S3-Reverse-Proxy"):
            dali_readers._check_reads_ranges(url)


def test_environment_of_s3_clients_is_put_back(bucket: ShardSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's credentials go first, in case a gateway looks at them; an endpoint of another S3 does not."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://elsewhere")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    with client_environment(bucket, AWS_ENDPOINT_URL="http://127.0.0.1:1/s3"):
        assert os.environ["AWS_ACCESS_KEY_ID"] == "mine"
        assert os.environ["AWS_ENDPOINT_URL"] == "http://127.0.0.1:1/s3"
        assert os.environ["AWS_SECRET_ACCESS_KEY"]
    assert os.environ["AWS_ENDPOINT_URL"] == "https://elsewhere"
    assert "AWS_SECRET_ACCESS_KEY" not in os.environ


def test_s3_place_of_a_cluster_and_of_the_environment(
    bucket: ShardSet, shards: ShardSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AIStore serves S3 itself. For other buckets, S3's environment variables give the endpoint; the default is Amazon.

    ``localhost`` becomes an address: with a host name, the client would put the bucket into the host name.
    """
    assert s3_place(bucket) == (f"{bucket.store.endpoint}/s3", "pets")
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.setattr(type(shards.store), "url", "s3://photos")
    for endpoint, expected in (
        ("http://localhost:9000/s3/", "http://127.0.0.1:9000/s3"),
        ("https://ais.example:51080", "https://ais.example:51080"),  # HTTPS keeps the name, as in the certificate
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        assert s3_place(shards) == (expected, "photos")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert s3_place(shards) == (None, "photos")


ONE_THREAD = LoaderOptions(batch_size=4, num_threads=1, crop=8, device="cpu")


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
    bucket: ShardSet, options: LoaderOptions, keys: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is in the bucket while the loader is open, as for ``litdata-s3`` and ``mosaic-s3``."""
    entry = LoaderEntry(module="tests.bench.loaders.copied_shards", prepares="prepare", source=("ais",), in_bucket=True)
    monkeypatch.setitem(LOADERS, "copied", entry)
    before = [found.name for found in bucket.store.list("")]
    with open_loader("copied", bucket, options=options) as loader:
        assert len(bucket.store.list("dali-pipes-bench/")) == len(bucket.names)
        assert {key for batch in loader.epoch() for key in batch["key"]} == keys
    assert [found.name for found in bucket.store.list("")] == before


ON_S3 = ("dali", "webloader:turbo", "dali-s3", "s3torchconnector:turbo", "litdata-s3:turbo", "mosaic-s3:turbo")


@pytest.mark.nightly
def test_bench_run_peers_read_one_bucket_and_leave_nothing(
    shards: ShardSet, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The command compares the outputs of all installed peers, and removes its objects from the bucket."""
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
