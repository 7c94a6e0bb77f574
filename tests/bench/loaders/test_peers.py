"""Peers, one by one: what each needs of the shards, and what it says when that is not there."""

import os
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import bench.loaders.peers.dali_s3 as dali_s3
from bench.loaders.encoded import shard_urls
from bench.loaders.peers.dali_external import ShardBatches
from bench.loaders.protocol import LoaderOptions
from bench.loaders.s3 import by_address, s3_place
from bench.loaders.selection import open_loader, prepare_loader
from dali_pipes.errors import DataError, PipesError, StoreError
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import resolve_shards
from prep.inspect.indexed_set import IndexedSet
from tests.bench.conftest import samples
from tests.builders import Sample, write_tar

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


def test_shard_batches_have_an_order_of_their_own_each_epoch(shards: ShardSet, options: LoaderOptions) -> None:
    """Whole shards in another order, the same in every run; the last batch is short."""

    def orders() -> list[list[str]]:
        batches = ShardBatches(shard_urls(shards), endpoint=shards.store.endpoint, options=options)
        return [[key.tobytes().decode() for _, _, _, keys in batches for key in keys] for _ in range(6)]

    first = orders()
    assert len({tuple(order) for order in first}) > 1
    assert orders() == first
    sizes = [
        len(keys) for _, _, _, keys in ShardBatches(shard_urls(shards), endpoint=shards.store.endpoint, options=options)
    ]
    assert sizes == [5, 5, 5, 5, 2]


def test_shard_batches_hold_the_components_as_they_are(bucket: ShardSet, options: LoaderOptions) -> None:
    """Streamed out of a bucket, byte for byte."""
    found = {}
    for photos, masks, labels, keys in ShardBatches(
        shard_urls(bucket), endpoint=bucket.store.endpoint, options=options
    ):
        for photo, mask, label, key in zip(photos, masks, labels, keys, strict=True):
            found[key.tobytes().decode()] = (photo.tobytes(), mask.tobytes(), int(label))
    assert found == {
        sample.key: (
            sample.components["image.jpg"],
            sample.components["trimap.png"],
            int(sample.components["cls"]),
        )
        for sample in samples()
    }


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


def test_dali_s3_indexes_locate_what_the_shard_indexes_do(bucket: ShardSet, tmp_path: Path) -> None:
    """wds2idx, which reads tars with a program of its own, finds the samples where `prep index` does."""
    prepared = prepare_loader("dali-s3", bucket, directory=tmp_path)
    assert prepared is not None
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == ["000000.idx", "000001.idx", "000002.idx"]
    for (_, index), path in zip(IndexedSet(bucket).each(), paths, strict=True):
        head, *lines = path.read_text().splitlines()
        assert head == f"v1.2 {len(index.keys)}"
        for row, (key, line) in enumerate(zip(index.keys, lines, strict=True)):
            words = line.split()
            places = {words[i]: (int(words[i + 1]), int(words[i + 2]), words[i + 3]) for i in range(0, len(words), 4)}
            assert places == {
                component: (int(index.offsets[component][row]), int(index.sizes[component][row]), f"{key}.{component}")
                for component in index.offsets
            }


def test_dali_s3_empty_shard_is_named(tmp_path: Path) -> None:
    """Instead of `Webdataset Tar File empty`."""
    with tarfile.open(tmp_path / "odd-000000.tar", "w"):
        pass
    with pytest.raises(DataError, match=r"shard '.*odd-000000\.tar': wds2idx finds no sample in it"):
        dali_s3.prepare(resolve_shards(tmp_path, endpoint=None), directory=tmp_path)


@pytest.fixture
def endpoint(bucket: ShardSet) -> str:
    found = bucket.store.endpoint
    assert found is not None
    return found


def test_dali_s3_cluster_that_redirects_is_told_what_to_set(endpoint: str, bucket: ShardSet) -> None:
    """AIStore without S3-Reverse-Proxy; here AIS's own API, which redirects a GET in the same way."""
    with pytest.raises(StoreError, match=r"redirects a GET, .*: ais config cluster features S3-Reverse-Proxy"):
        dali_s3._check_reads_ranges(f"{endpoint}/v1/objects", "pets", bucket.names[0])


def test_dali_s3_shard_or_server_that_is_not_there_is_named(endpoint: str) -> None:
    """DALI would say that it cannot read a file."""
    with pytest.raises(StoreError, match=r"'s3://pets/none\.tar' at .*: .* answered with 404, expected 206"):
        dali_s3._check_reads_ranges(f"{endpoint}/s3", "pets", "none.tar")
    with pytest.raises(StoreError, match=r"'s3://pets/a\.tar' at http://127\.0\.0\.1:1/s3: no answer"):
        dali_s3._check_reads_ranges("http://127.0.0.1:1/s3", "pets", "a.tar")


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


@pytest.fixture
def unused_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not read through DALI's S3 client."""
    monkeypatch.setattr(dali_s3, "_endpoint_in_use", None)


@pytest.mark.usefixtures("unused_client")
def test_dali_s3_second_cluster_in_a_process_is_refused(bucket: ShardSet) -> None:
    """DALI makes its client once: it would go on to read from the first."""
    with dali_s3._environment(bucket, "http://127.0.0.1:1/s3"):
        pass
    with (
        pytest.raises(PipesError, match=r"from 'http://127\.0\.0\.1:1/s3' for the life of a process, got '.*:2/s3'"),
        dali_s3._environment(bucket, "http://127.0.0.1:2/s3"),
    ):
        pass


@pytest.mark.usefixtures("unused_client")
def test_dali_s3_environment_is_put_back(bucket: ShardSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's credentials go first, in case a gateway looks at them; an endpoint of another S3 does not."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://elsewhere")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    with dali_s3._environment(bucket, "http://127.0.0.1:1/s3"):
        assert os.environ["AWS_ACCESS_KEY_ID"] == "mine"
        assert os.environ["AWS_ENDPOINT_URL"] == "http://127.0.0.1:1/s3"
        assert os.environ["AWS_SECRET_ACCESS_KEY"]
    assert os.environ["AWS_ENDPOINT_URL"] == "https://elsewhere"
    assert "AWS_SECRET_ACCESS_KEY" not in os.environ
