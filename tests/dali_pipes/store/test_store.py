"""Behaviour that all stores share, and answers that differ between kinds of stores."""

import contextlib
import errno
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

from dali_pipes.errors import StoreError
from dali_pipes.formats.shard_index import ComponentRange
from dali_pipes.store.base import Store
from dali_pipes.store.cluster import listing
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.endpoint import check_endpoint, endpoint_for
from dali_pipes.store.cluster.transformed import TransformedStore
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import open_store
from tests.programs import wait_until
from tests.servers import clouds
from tests.servers.scripted import says, scripted


@pytest.fixture(params=["directory", "bucket", *clouds.KINDS])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "directory":
        yield LocalStore(tmp_path / "store")
        return
    if request.param in clouds.KINDS:
        yield open_store(clouds.cloud_bucket(request.param, request), endpoint=None)[0]
        return
    made: AisStore = request.getfixturevalue("bucket")
    made.create()
    yield made


def test_store_written_object_is_read_back(store: Store) -> None:
    store.write("a/b.bin", b"12345")
    assert store.read("a/b.bin") == b"12345"
    assert store.size("a/b.bin") == 5
    assert store.find("a/b.bin") == store.read("a/b.bin")
    with store.open("a/b.bin") as stream:
        assert stream.read(2) == b"12"
        assert stream.read() == b"345"
    for start, size, expected in [(0, 5, b"12345"), (4, 1, b"5"), (3, 100, b"45"), (4, 0, b"")]:
        assert store.read_range("a/b.bin", start=start, size=size) == expected
    store.write("a/b.bin", b"new")
    assert store.read("a/b.bin") == b"new"


def test_store_creates_an_object_once(store: Store) -> None:
    assert store.write_new("a/new", b"first", by="one")
    assert not store.write_new("a/new", b"second", by="two")
    assert store.read("a/new") == b"first"
    assert [entry.name for entry in store.list_all("a/")] == ["a/new"]


def test_of_many_writers_one_creates_the_object(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are told. AIStore has no conditional writes: all may get an error there, and then a later one wins."""
    monkeypatch.setattr(listing, "LONGEST_PAUSE_S", 0.02)
    begin = threading.Barrier(8)

    def write(number: int) -> bool:
        begin.wait(timeout=120)
        with contextlib.suppress(StoreError):
            return store.write_new("new", b"%d" % number, by=f"job{number}")
        return False

    with ThreadPoolExecutor(8) as threads:
        created = list(threads.map(write, range(8)))
    assert sum(created) == 1 or (isinstance(store, AisStore) and not any(created))
    if any(created):
        assert store.read("new") == b"%d" % created.index(True)
    else:
        assert store.write_new("new", b"later", by="later")  # nobody is left behind
    assert [entry.name for entry in store.list_all("new")] == ["new"]


def test_store_list_gives_names_below_prefix_in_order(store: Store) -> None:
    for name in ("b-0", "a-1", "a-0", "sub/a-0"):
        store.write(name, name.encode())
    for prefix, names in {
        "": ["a-0", "a-1", "b-0", "sub/a-0"],
        "a-": ["a-0", "a-1"],
        "sub/": ["sub/a-0"],
        "sub/a": ["sub/a-0"],
        "s": ["sub/a-0"],  # a prefix of the name, not a folder
        "nope": [],
        "nope/nope": [],
    }.items():
        if isinstance(store, LocalStore):
            # A directory may be the root of everything: of it only the prefix's own folder is listed.
            names = [name for name in names if name.rpartition("/")[0] == prefix.rpartition("/")[0]]
        listed = store.list(prefix)
        assert [entry.name for entry in listed] == names
        assert [entry.size for entry in listed] == [len(name) for name in names]
        for entry in listed:
            assert entry.checksum in (None, xxhash.xxh64_hexdigest(entry.name.encode()))


def test_store_of_a_missing_object_says_which(store: Store) -> None:
    store.write("nope", b"1")
    store.delete("nope")
    assert store.list("") == []
    assert store.size("nope") is None
    assert store.find("nope") is None
    store.delete("nope")
    with pytest.raises(StoreError, match=f"{re.escape(store.locate('nope'))}"):
        store.read("nope")
    with pytest.raises(StoreError, match="nope"):
        store.read_range("nope", start=0, size=1)
    with pytest.raises(StoreError, match="nope"), store.open("nope"):
        pass


def test_local_store_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = LocalStore(tmp_path)
    with pytest.raises(StoreError, match=r"cannot write '.*/file/a'"):
        store.write("file/a", b"1")
    store.write("b", b"old")
    with pytest.raises(IsADirectoryError):
        store.upload("b", tmp_path)
    assert store.read("b") == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "file"]


def test_local_store_errors_name_the_file(tmp_path: Path) -> None:
    """The name is too long, a file stands in the place of a folder, or a folder in the place of the file."""
    store, long = LocalStore(tmp_path), "a" * 300
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match=rf"cannot write '{tmp_path}/folder': File exists"):
        store.write_new("folder", b"1", by="me")
    with pytest.raises(StoreError, match=rf"cannot read '{tmp_path}/{long}': File name too long"):
        store.find(long)
    with pytest.raises(StoreError, match=rf"cannot write '{tmp_path}/file/a': File exists"):
        store.write_new("file/a", b"1", by="me")
    with pytest.raises(StoreError, match=rf"cannot read '{tmp_path}/file/a': Not a directory"):
        store.range_ways()[0]([ComponentRange("file/a", 0, 1, 0, "a", "jpg")])


def test_local_store_without_unnamed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems, such as NFS, have none. There a file has a hidden name until it is whole."""
    open_file = os.open

    def open_named(path: object, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return open_file(path, flags, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", open_named)
    store = LocalStore(tmp_path)
    store.write("a", b"old")
    store.write("a", b"new")
    assert store.write_new("b", b"first", by="one")
    assert not store.write_new("b", b"second", by="two")
    with pytest.raises(ZeroDivisionError), store.replacing("a") as stream:  # noqa: PT012 (the block is what ends)
        stream.write(b"half")
        assert len(list(tmp_path.iterdir())) == 3
        assert [entry.name for entry in store.list("")] == ["a", "b"]
        1 / 0  # noqa: B018
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"new", "b": b"first"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o644}


def test_stores_answer_for_themselves(tmp_path: Path) -> None:
    directory: Store = LocalStore(tmp_path / "data")
    with pytest.raises(ValueError, match=f"'{tmp_path}/data' is a directory, dSort needs a bucket"):
        directory.need_cluster("dSort needs a bucket")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    assert LocalStore(tmp_path / "link").identity("x") == directory.identity("x") != directory.identity("y")
    store: Store = AisStore("http://localhost:1", "pets", provider="aws")
    assert store.cluster is store is store.need_cluster("dSort needs a bucket")
    transformed: Store = TransformedStore(store, "small")
    assert (transformed.cluster, transformed.etl, transformed.endpoint) == (store, "small", store.endpoint)
    with pytest.raises(ValueError, match="parts of an object's name must not be empty"):
        transformed.check_name("../other/x-")


def test_what_describes_transformed_shards_lies_in_their_bucket(bucket: AisStore, tmp_path: Path) -> None:
    """The names of manifests and indexes contain the ETL's name. A listing has the shards as they are stored."""
    store: Store = TransformedStore(bucket, "small-pets")
    assert not store.exists()
    store.create()
    bucket.write("x-0.tar", b"12345")
    store.write("x-manifest.safetensors", b"manifest")
    store.write_stream("x-0.index.safetensors", lambda: [memoryview(b"in"), memoryview(b"dex")], num_bytes=5)
    (tmp_path / "index").write_bytes(b"third")
    store.upload("x-3.index.safetensors", tmp_path / "index")
    store.write("x-classes.json", b"{}")
    assert store.write_new("x-1.index.safetensors", b"more", by="me")
    assert not store.write_new("x-1.index.safetensors", b"other", by="me")
    stored = [
        "x-0.index.small-pets.etl.safetensors",
        "x-0.tar",
        "x-1.index.small-pets.etl.safetensors",
        "x-3.index.small-pets.etl.safetensors",
        "x-classes.json",
        "x-manifest.small-pets.etl.safetensors",
    ]
    assert [entry.name for entry in store.list("x-")] == stored == [entry.name for entry in store.list_all("x-")]
    assert store.size("x-manifest.safetensors") == 8
    assert store.find("x-manifest.safetensors") == bucket.read(stored[-1]) == b"manifest"
    assert store.read_range("x-0.index.safetensors", start=2, size=3) == b"dex"
    found = store.find_all(["x-0.index.safetensors", "x-2.index.safetensors"])
    assert [entry and entry.size for entry in found] == [5, None]
    assert store.file("x-0.tar", size=5) == bucket.file("x-0.tar", size=5)
    store.delete("x-manifest.safetensors")
    assert store.find("x-manifest.safetensors") is None


def test_endpoint_for_reads_only_buckets_that_the_node_has_and_writes_any(tmp_path: Path) -> None:
    """A bucket that is read must be in the embedded node's folder; a bucket that is written may be new."""
    folder = tmp_path / "node"
    with endpoint_for([tmp_path, "file.tar"], endpoint=None, embedded_dir=folder) as endpoint:
        assert endpoint is None
    missing = (
        rf"no bucket 'ais://pets': AIS_ENDPOINT is not set.* folder '{folder}' holds no such bucket \(found: none\)"
    )
    with (
        pytest.raises(StoreError, match=missing),
        endpoint_for(["ais://pets/a-"], writes=["ais://new"], endpoint=None, embedded_dir=folder),
    ):
        pass
    assert not folder.exists()
    with endpoint_for((), writes=["ais://pets"], endpoint=None, embedded_dir=folder) as endpoint:
        assert endpoint is not None
        AisStore(endpoint, "pets").create()
    with endpoint_for(["ais://pets/a-"], endpoint=None, embedded_dir=folder) as endpoint:
        assert endpoint is not None


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch, closed_port: int) -> str:
    """A proxy in the environment at which nothing answers."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, f"http://user:secret@127.0.0.1:{closed_port}")
    return f"'http://127.0.0.1:{closed_port}'"


def test_proxy_that_does_not_answer_is_named(proxy: str) -> None:
    """Without its password, and with nothing of an exception's own spelling."""
    with pytest.raises(StoreError) as failed:
        check_endpoint("http://aistore.invalid:51080")
    assert f"through the proxy {proxy} (" in str(failed.value)
    assert "secret" not in str(failed.value)
    assert ")))" not in str(failed.value)


def test_check_endpoint_of_another_web_server_says_that_it_is_no_aistore() -> None:
    with (
        scripted(says(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>")) as server,
        pytest.raises(StoreError, match=f"the server at {server.endpoint} is not an AIStore"),
    ):
        check_endpoint(server.endpoint)


def test_ais_store_at_a_hung_endpoint_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is not asked again, not for a listing, a HEAD or a small object."""
    monkeypatch.setattr("dali_pipes.store.cluster.ais.SILENCE_S", 0.2)
    monkeypatch.setattr("dali_pipes.store.cluster.client.SILENCE_S", 0.2)
    monkeypatch.setattr("dali_pipes.store.cluster.ais.PROMPT_S", 0.2)
    with scripted(lambda visit: visit.server.closing.wait(120)) as server:
        store = AisStore(server.endpoint, "pets")
        asks: list[Callable[[], object]] = [store.exists, store.create]
        asks += [lambda: store.list(""), lambda: store.size("a"), lambda: store.read("a"), lambda: store.find("a")]
        for number, ask in enumerate(asks, 1):
            with pytest.raises(StoreError, match=rf"no answer from AIStore at {server.endpoint} \(no byte for 0.2 s"):
                ask()
            wait_until(lambda number=number: len(server.requests) >= number)  # the server may be slower than the client
            assert len(server.requests) == number
