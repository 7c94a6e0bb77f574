import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from prep.endpoint import cluster
from prep.errors import StoreError
from prep.store import AisStore, LocalStore, Store, check_endpoint


@pytest.fixture(params=["directory", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "directory":
        yield LocalStore(tmp_path / "store")
        return
    made: AisStore = request.getfixturevalue("bucket")
    made.create()
    yield made


def test_store_written_object_is_read_back(store: Store) -> None:
    store.write("a/b.bin", b"12345")
    assert store.read("a/b.bin") == b"12345"
    assert store.size("a/b.bin") == 5
    with store.open("a/b.bin") as stream:
        assert stream.read(2) == b"12"
        assert stream.read() == b"345"


def test_store_write_replaces_the_object(store: Store) -> None:
    store.write("a", b"old and longer")
    store.write("a", b"new")
    assert store.read("a") == b"new"


def test_store_upload_has_the_bytes_of_the_file(store: Store, tmp_path: Path) -> None:
    data = bytes(range(256)) * 20_000  # several blocks
    (tmp_path / "file").write_bytes(data)
    store.upload("up", tmp_path / "file")
    assert store.read("up") == data
    assert store.size("up") == len(data)


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        ("", ["a-0", "a-1", "b-0", "sub/a-0"]),
        ("a-", ["a-0", "a-1"]),
        ("sub/", ["sub/a-0"]),
        ("sub/a", ["sub/a-0"]),
        ("s", ["sub/a-0"]),  # a prefix of the name, not a folder
        ("nope", []),
        ("nope/nope", []),
    ],
)
def test_store_list_gives_names_below_prefix_in_order(store: Store, prefix: str, names: list[str]) -> None:
    for name in ("b-0", "a-1", "a-0", "sub/a-0"):
        store.write(name, name.encode())
    if isinstance(store, LocalStore):
        # A directory may be the root of everything: of it only the prefix's own folder is listed.
        names = [name for name in names if name.rpartition("/")[0] == prefix.rpartition("/")[0]]
    listed = store.list(prefix)
    assert [entry.name for entry in listed] == names
    assert [entry.size for entry in listed] == [len(name) for name in names]
    for entry in listed:
        assert entry.checksum in (None, xxhash.xxh64_hexdigest(entry.name.encode()))


def test_store_of_a_missing_object_says_which(store: Store) -> None:
    assert store.size("nope") is None
    store.delete("nope")
    with pytest.raises(StoreError, match=f"{re.escape(store.locate('nope'))}"):
        store.read("nope")
    with pytest.raises(StoreError, match="nope"), store.open("nope"):
        pass


def test_store_deleted_object_is_gone(store: Store) -> None:
    store.write("a", b"1")
    store.delete("a")
    assert store.size("a") is None
    assert store.list("") == []


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


def test_ais_store_exists_only_once_created(bucket: AisStore) -> None:
    assert not bucket.exists()
    bucket.create()
    assert bucket.exists()
    bucket.create()  # kept


def test_ais_store_of_a_missing_bucket_says_how_to_make_one(bucket: AisStore) -> None:
    with pytest.raises(StoreError, match=f"no bucket '{bucket.url}' at {bucket.endpoint}; `dali-pipes prep pack`"):
        bucket.list("")


def test_ais_store_at_a_closed_port_fails_within_ten_seconds(closed_port: int) -> None:
    endpoint = f"http://127.0.0.1:{closed_port}"
    started = time.monotonic()
    with pytest.raises(StoreError, match=rf"no answer from AIStore at {endpoint} \(.*\); is it running\?"):
        AisStore(endpoint, "pets").list("")
    with pytest.raises(StoreError, match=endpoint):
        check_endpoint(endpoint)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("endpoint", ["localhost:8080", "nonsense", ""])
def test_check_endpoint_that_is_no_url_says_so(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"endpoint must be a URL such as http://localhost:51080, got"):
        check_endpoint(endpoint)


def test_cluster_without_endpoint_runs_a_node_for_as_long_as_needed(tmp_path: Path) -> None:
    with cluster(None, embedded_dir=tmp_path / "node") as endpoint:
        check_endpoint(endpoint)
    with pytest.raises(StoreError, match="no answer"):
        check_endpoint(endpoint)


def test_cluster_keeps_buckets_for_the_next_time(tmp_path: Path) -> None:
    for _ in range(2):
        with cluster(None, embedded_dir=tmp_path) as endpoint:
            store = AisStore(endpoint, "pets")
            store.create()
            kept = store.size("a")
            store.write("a", b"12")
    assert kept == 2
