from pathlib import Path

import pytest

from prep.errors import StoreError
from prep.store import AisStore, LocalStore
from prep.urls import is_remote, open_store, resolve_shards, shared_prefix

ENDPOINT = "http://127.0.0.1:1"  # never asked


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("ais://pets", True),
        ("s3://pets/a.tar", True),
        ("gs://pets", True),
        ("az://pets", True),
        ("ais:/pets", False),
        ("http://host/a.tar", False),  # no bucket of AIStore
        ("a/b.tar", False),
        (Path("ais:/pets"), False),
    ],
)
def test_is_remote_knows_buckets_from_paths(url: str | Path, expected: bool) -> None:
    assert is_remote(url) is expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["shuffled-000000.tar", "shuffled-000012.tar"], "shuffled-"),
        (["a/x-0.tar", "a/x-1.tar"], "a/x-"),
        (["only-000000.tar"], "only-"),  # its digits count too
        (["cat.tar", "dog.tar"], ""),
        (["x-1.tar", "x-10.tar"], "x-"),
    ],
)
def test_shared_prefix_ends_before_the_digits(names: list[str], expected: str) -> None:
    assert shared_prefix(names) == expected


@pytest.mark.parametrize(
    ("url", "store_url", "rest"),
    [
        ("ais://pets", "ais://pets", ""),
        ("ais://pets/", "ais://pets", ""),
        ("ais://pets/a/b-", "ais://pets", "a/b-"),
        ("s3://pets/b-", "s3://pets", "b-"),
        ("a/b/c.tar", "a/b", "c.tar"),
        ("c.tar", ".", "c.tar"),
        ("/c.tar", "/", "c.tar"),
    ],
)
def test_open_store_splits_store_from_name(url: str, store_url: str, rest: str) -> None:
    store, name = open_store(url, endpoint=ENDPOINT)
    assert (store.url, name) == (store_url, rest)
    assert isinstance(store, AisStore if "://" in url else LocalStore)


@pytest.mark.parametrize(
    ("url", "endpoint", "message"),
    [
        ("ais:///a.tar", ENDPOINT, "names no bucket; expected ais://BUCKET/PREFIX"),
        ("ais://pets/a.tar", None, "no AIStore endpoint is given; set AIS_ENDPOINT"),
        ("http://pets/a.tar", ENDPOINT, "scheme must be one of ais, s3, gs, az"),
    ],
)
def test_open_store_with_bad_url_says_what_is_expected(url: str, endpoint: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_store(url, endpoint=endpoint)


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    for name in ("a-000000.tar", "a-000001.tar", "b-000000.tar", "a-classes.json", "sub/c-0.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("a-{000000..000001}.tar", ["a-000000.tar", "a-000001.tar"]),
        ("a-{000001,000000}.tar", ["a-000001.tar", "a-000000.tar"]),  # the order that was named
        ("a-*.tar", ["a-000000.tar", "a-000001.tar"]),
        ("[ab]-000000.tar", ["a-000000.tar", "b-000000.tar"]),
        ("a-", ["a-000000.tar", "a-000001.tar"]),
        ("", ["a-000000.tar", "a-000001.tar", "b-000000.tar"]),  # a directory, not what is below it
        ("b-000000.tar", ["b-000000.tar"]),
        ("absent-{0..1}.tar", ["absent-0.tar", "absent-1.tar"]),  # named is not looked for
    ],
)
def test_resolve_shards_of_local_paths_gives_names_in_order(tars: Path, url: str, names: list[str]) -> None:
    shards = resolve_shards(f"{tars}/{url}", endpoint=None)
    assert list(shards.names) == names
    assert shards.store.url == str(tars)


def test_resolve_shards_of_a_list_shares_the_deepest_directory(tars: Path) -> None:
    shards = resolve_shards([tars / "b-000000.tar", tars / "sub" / "c-0.tar"], endpoint=None)
    assert shards.names == ("b-000000.tar", "sub/c-0.tar")
    assert shards.store.url == str(tars)


def test_resolve_shards_of_braces_in_a_bucket_asks_nobody() -> None:
    shards = resolve_shards("ais://pets/x/a-{0..2}.tar", endpoint=ENDPOINT)
    assert shards.names == ("x/a-0.tar", "x/a-1.tar", "x/a-2.tar")
    assert (shards.prefix, shards.url) == ("x/a-", "ais://pets/x/a-")


def test_resolve_shards_of_a_prefix_in_a_bucket_lists_tars(bucket: AisStore) -> None:
    bucket.create()
    for name in ("a-1.tar", "a-0.tar", "a-classes.json", "b-0.tar"):
        bucket.write(name, b"x")
    assert resolve_shards(f"{bucket.url}/a-", endpoint=bucket.endpoint).names == ("a-0.tar", "a-1.tar")


def test_resolve_shards_with_no_match_names_the_pattern(tars: Path) -> None:
    with pytest.raises(StoreError, match=r"nope-\*' matches no \.tar; expected shards such as .*/nope-000000\.tar"):
        resolve_shards(f"{tars}/nope-*", endpoint=None)


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ([], "got an empty list"),
        (["ais://a/x.tar", "ais://b/x.tar"], "must lie in one bucket, got 'ais://a' and 'ais://b/x.tar'"),
        (["ais://a/x.tar", "y.tar"], "must lie in one bucket or directory"),
        (["ais://a/x.tar", "ais://a/x.tar"], "'ais://a/x.tar' is named twice"),
    ],
)
def test_resolve_shards_with_bad_list_says_what_is_wrong(urls: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_shards(urls, endpoint=ENDPOINT)
