"""Tars to shards of another size: order, names and bytes stay, from a directory and from a bucket."""

import gzip
from pathlib import Path
from typing import Any

import pytest

from dali_pipes.errors import DataError, PipesError
from dali_pipes.store.base import Store
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from prep.sources.tars import tars
from tests.shards import Sample, encode_photo, make_source, members_of, pack, tar_bytes, write_tar


@pytest.fixture(params=["directory", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Seven shards of 23 samples, and their class table."""
    made: Store = LocalStore(tmp_path / "in") if request.param == "directory" else request.getfixturevalue("bucket")
    pack(make_source(23), store=made, max_count=3, jobs=1)
    return made


def _resolve(store: Store, prefix: str = "samples-") -> Any:
    return resolve_shards(f"{store.url}/{prefix}", endpoint=getattr(store, "endpoint", None))


def test_tars_keep_samples_order_bytes_and_classes(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prep.pack.target.MIN_SHARED_BYTES", 0)
    shards = _resolve(store)
    source = tars(shards, jobs=2)
    out = LocalStore(tmp_path / "out")
    report = pack(source, store=out, max_count=7, jobs=2)
    assert (len(report.shards), report.num_written) == (4, 4)
    assert members_of(out, report.shards) == members_of(store, shards.names)
    manifest = index_shards(resolve_shards(tmp_path / "out", endpoint=None))
    assert (manifest.num_samples, manifest.classes) == (23, {0: "zero", 1: "one", 2: "two"})


def _compress(store: Store, ending: str) -> None:
    """The shards, compressed, in the place of themselves."""
    for entry in store.list("samples-0"):
        store.write(entry.name.replace(".tar", ending), gzip.compress(store.read(entry.name)))
        store.delete(entry.name)


@pytest.mark.parametrize("ending", [".tgz", ".tar.gz"])
def test_tars_that_are_compressed_give_the_same_shards(
    store: Store, tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By prefix, by range and as a list; by processes, and compared when it is run again."""
    monkeypatch.setattr("prep.pack.target.MIN_SHARED_BYTES", 0)
    plain, out = LocalStore(tmp_path / "plain"), LocalStore(tmp_path / "out")
    shards = pack(tars(_resolve(store)), store=plain, max_count=2, jobs=1).shards
    _compress(store, ending)
    endpoint = getattr(store, "endpoint", None)
    names = [f"{store.url}/samples-{number:06d}{ending}" for number in range(8)]
    for number, urls in enumerate([f"{store.url}/samples-", f"{store.url}/samples-{{000000..000007}}{ending}", names]):
        jobs = 1 if number else 2
        source = tars(resolve_shards(urls, endpoint=endpoint, compressed=True), jobs=jobs)
        assert source.classes == {0: "zero", 1: "one", 2: "two"}
        report = pack(source, store=out, max_count=2, jobs=jobs)
        assert (report.shards, report.num_written) == (shards, 0 if number else len(shards))
    assert [out.read(name) for name in shards] == [plain.read(name) for name in shards]


def test_tars_that_are_no_whole_gzip_are_named(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "in")
    data = gzip.compress(tar_bytes({"a.jpg": encode_photo()}))
    for broken in (data[:-20], b"no gzip" * 90, data[:40] + bytes(100) + data[140:]):
        store.write("s-0.tgz", broken)
        with pytest.raises(DataError, match=rf"'{tmp_path}/in/s-0.tgz' is not a complete gzip file: .*; pack it anew"):
            tars(resolve_shards(store.locate("s-0.tgz"), endpoint=None, compressed=True))


def test_tars_into_the_same_bucket_need_another_prefix(store: Store) -> None:
    source = tars(_resolve(store))
    before = {entry.name: store.read(entry.name) for entry in store.list("samples-")}
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"samples-000000\.tar' is a shard of the input, and would be replaced or"):
            pack(source, store=store, max_count=7, overwrite=overwrite)
    assert pack(source, store=store, prefix="large-", max_count=7).num_written == 4
    assert {entry.name: store.read(entry.name) for entry in store.list("samples-")} == before


def test_tars_members_keep_the_order_of_the_archive(tmp_path: Path) -> None:
    """Not sorted, as `pack` does with files; upper case is WebDataset's lower."""
    photo = encode_photo()
    write_tar(tmp_path / "x-0.tar", [Sample("b/2", {"JPG": photo, "txt": b"t", "cls": b" 4\n"})])
    report = pack(tars(resolve_shards(tmp_path / "x-0.tar", endpoint=None)), store=LocalStore(tmp_path / "out"))
    found = members_of(LocalStore(tmp_path / "out"), report.shards)
    assert found == [("b/2.jpg", photo), ("b/2.txt", b"t"), ("b/2.cls", b" 4\n")]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (tar_bytes({"a.jpg": b"1", "a.JPG": b"2"}), r"shard 'x-0\.tar', key 'a': two members are component 'jpg'"),
        (tar_bytes([(f"{key}.json", b"1") for key in "aba"]), "key 'a' occurs twice, records 0 and 2"),
        (tar_bytes({"a.json": bytes(3000)})[:1500], r"shard 'x-0\.tar' is cut off"),
        (b"no tar" * 500, r"shard 'x-0\.tar' is not a readable tar"),
        (tar_bytes({}), r"x-' holds no sample; expected members such as"),
        (None, r"no shard '.*x-0\.tar'; 1 were named"),
    ],
)
def test_tars_that_are_broken_or_odd_are_named(tmp_path: Path, data: bytes | None, message: str) -> None:
    if data is not None:
        (tmp_path / "x-0.tar").write_bytes(data)
    with pytest.raises(PipesError, match=message):
        pack(tars(resolve_shards(tmp_path / "x-0.tar", endpoint=None)), store=LocalStore(tmp_path / "out"))
