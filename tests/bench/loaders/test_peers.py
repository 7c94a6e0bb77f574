"""Peers, one by one: what each needs of the shards, and what it says when that is not there."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.loaders.peers import dali_readers
from bench.loaders.protocol import LoaderOptions
from bench.loaders.registry import open_loader
from bench.loaders.s3 import by_address, client_environment, s3_place
from dali_pipes.errors import StoreError
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import resolve_shards
from tests.shards import Sample, write_tar

SAMPLE = {"image.jpg": b"photo", "trimap.png": b"mask", "cls": b"3"}


def shards_of(directory: Path, *made: Sample) -> ShardSet:
    write_tar(directory / "odd-000000.tar", made)
    return resolve_shards(directory, endpoint=None)


# webloader


def test_webloader_fetches_a_shard_once(
    bucket: ShardSet, options: LoaderOptions, keys: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What lies in a bucket is kept for later epochs, which need the bucket no more; it goes with the loader."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # torch may make a directory of its own there
    fetched = copied(bucket, "fetched-once", names=bucket.names)
    with open_loader("webloader", fetched, options=options) as loader:
        seen = [[key for batch in loader.epoch() for key in batch["key"]]]
        assert len(list(tmp_path.rglob("*.tar"))) == len(fetched.names)
        for name in fetched.names:
            fetched.store.delete(name)
        seen += [[key for batch in loader.epoch() for key in batch["key"]]]
        held = loader.epoch()
        next(held)
    assert [sorted(epoch) for epoch in seen] == [sorted(keys)] * 2
    assert list(tmp_path.glob("dali-pipes-*")) == []
    del held


def test_webloader_of_one_epoch_keeps_nothing(
    bucket: ShardSet, options: LoaderOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A shard is decoded while it comes: a cold turn's first batch does not wait for a file."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with open_loader("webloader", bucket, options=replace(options, keeps_shards=False)) as loader:
        assert sum(len(batch["key"]) for batch in loader.epoch()) == 22
        assert list(tmp_path.glob("dali-pipes-*")) == []


def test_webloader_shards_of_one_name_are_not_taken_for_each_other(
    bucket: ShardSet, options: LoaderOptions, keys: set[str]
) -> None:
    """The library keeps a shard under the last part of its URL: the second would be the first once more."""
    names = [f"{row}/pets.tar" for row in range(len(bucket.names))]
    folders = copied(bucket, "folders", names=names)
    one_worker = replace(options, num_threads=1)
    with open_loader("webloader", folders, options=one_worker) as loader:
        seen = [sorted(key for batch in loader.epoch() for key in batch["key"]) for _ in range(2)]
    assert seen == [sorted(keys)] * 2


def copied(shards: ShardSet, bucket: str, *, names: Sequence[str]) -> ShardSet:
    """The same shards in another bucket, under other names."""
    endpoint = shards.store.endpoint
    assert endpoint is not None
    store = AisStore(endpoint, bucket)
    store.create()
    for name, new in zip(shards.names, names, strict=True):
        store.write(new, shards.store.read(name))
    return ShardSet(store=store, names=tuple(names))


# dali-external


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ({"image.jpg": b"photo", "cls": b"3"}, r"key 'a': no component 'trimap.png' \(found: cls, image.jpg\)"),
        ({**SAMPLE, "cls": b"cat"}, "key 'a': cls must be a number, got b'cat'"),
    ],
)
def test_dali_external_bad_sample_reaches_the_caller_by_name(
    tmp_path: Path, options: LoaderOptions, components: dict[str, bytes], message: str
) -> None:
    """Out of a worker process, through DALI."""
    shards = shards_of(tmp_path, Sample("a", components))
    with (
        pytest.raises(Exception, match=message),  # DALI's own
        open_loader("dali-external", shards, options=options) as loader,
    ):
        next(loader.epoch())


# dali-s3


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


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("http://localhost:51080", "http://127.0.0.1:51080"),  # else: http://pets.localhost:51080/...
        ("http://127.0.0.1:51080/", "http://127.0.0.1:51080"),
        ("http://localhost:9000/s3/", "http://127.0.0.1:9000/s3"),
        ("https://ais.example:51080", "https://ais.example:51080"),  # a certificate is for a name
    ],
)
def test_by_address_resolves_names(endpoint: str, expected: str) -> None:
    """With a name the client asks for the bucket's own host."""
    assert by_address(endpoint) == expected


def test_s3_place_of_a_cluster_and_of_the_environment(
    bucket: ShardSet, shards: ShardSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An AIStore serves S3 itself; else the variables say it that every S3 client reads, or it is Amazon's."""
    assert s3_place(bucket) == (f"{bucket.store.endpoint}/s3", "pets")
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:9000/")
    monkeypatch.setattr(type(shards.store), "url", "s3://photos")
    assert s3_place(shards) == ("http://127.0.0.1:9000", "photos")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert s3_place(shards) == (None, "photos")
