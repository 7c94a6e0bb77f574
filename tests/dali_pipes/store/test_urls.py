import os
import re
from pathlib import Path

import pytest
from braceexpand import braceexpand

import dali_pipes as dp
from dali_pipes.errors import DataError, StoreError
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_names import ObjectEntry
from dali_pipes.store.urls import is_remote, open_prefix, open_store, resolve_shards

ENDPOINT = "http://127.0.0.1:1"  # never asked


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("ais://pets", True),
        ("s3://pets/a.tar", True),
        ("gs://pets", True),
        ("az://pets", True),
        ("ais:/pets", False),
        ("http://host/a.tar", True),
        ("a/b.tar", False),
        (Path("ais:/pets"), False),
    ],
)
def test_is_remote_knows_buckets_from_paths(url: str | Path, expected: bool) -> None:
    assert is_remote(url) is expected


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
    assert isinstance(store, AisStore if is_remote(url) else LocalStore)


@pytest.mark.parametrize(
    ("url", "endpoint", "message"),
    [
        ("ais:///a.tar", ENDPOINT, "names no bucket; expected ais://BUCKET/PREFIX"),
        ("ais://pets/a.tar", None, "is in a bucket of AIStore, and no endpoint is given; set AIS_ENDPOINT"),
        (
            "ftp://pets/a.tar",
            ENDPOINT,
            "ftp:// is not supported; expected ais://, s3://, gs://, az://, https://, http:// or a local path",
        ),
        ("ais://pets/a\0-", ENDPOINT, r"'ais://pets/a\\0-': the parts of an object's name .* nor hold a NUL"),
        ("ais://pe ts/a.tar", ENDPOINT, "'ais://pe ts/a.tar': a bucket's name is .* got 'pe ts'"),
        ("ais://../a.tar", ENDPOINT, "a bucket's name is"),
        (f"ais://{'b' * 65}/a.tar", ENDPOINT, "at most 64 letters"),
        ("ais://pets/../dogs/a-", ENDPOINT, "'ais://pets/../dogs/a-': the parts of an object's name"),
        ("ais://pets/a//b-", ENDPOINT, "the parts of an object's name"),
        ("ais://pets/./b-", ENDPOINT, "the parts of an object's name"),
        ("ais://pets/..", ENDPOINT, "the parts of an object's name"),
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


def test_resolve_shards_of_a_directory_with_two_sets_is_refused(tars: Path) -> None:
    """What `pack` and `shuffle` leave in one place are two data sets, not one of every sample twice."""
    with pytest.raises(ValueError, match=r"holds shards of 2 sets: '.*a-', '.*b-'; name one"):
        resolve_shards(tars, endpoint=None)


def test_resolve_shards_stays_where_it_was_resolved(
    tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path means the directory of then, also after the program went elsewhere."""
    monkeypatch.chdir(tars)
    shards = resolve_shards("a-", endpoint=None)
    monkeypatch.chdir("/")
    assert shards.store.size("a-000000.tar") == 0


def test_resolve_shards_of_a_directory_with_brackets_in_its_name(tmp_path: Path) -> None:
    """A name that exists is that, whatever a glob or braces would make of it."""
    odd = tmp_path / "a[1]{2}"
    odd.mkdir()
    (odd / "x-0.tar").touch()
    assert resolve_shards(odd, endpoint=None).names == ("x-0.tar",)


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("a-{000001,000000}.tar", ["a-000001.tar", "a-000000.tar"]),  # the order that was named
        ("[ab]-000000.tar", ["a-000000.tar", "b-000000.tar"]),
        ("b-000000.tar", ["b-000000.tar"]),
        ("absent-{0..1}.tar", ["absent-0.tar", "absent-1.tar"]),  # named is not looked for
    ],
)
def test_resolve_shards_of_local_paths_gives_names_in_order(tars: Path, url: str, names: list[str]) -> None:
    shards = resolve_shards(f"{tars}/{url}", endpoint=None)
    assert list(shards.names) == names
    assert shards.store.url == str(tars)


def test_resolve_shards_with_no_match_names_the_pattern(tars: Path) -> None:
    with pytest.raises(StoreError, match=r"nope-\*' matches no \.tar; expected shards such as .*/nope-000000\.tar"):
        resolve_shards(f"{tars}/nope-*", endpoint=None)


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ([], "got an empty list"),
        (["ais://a/x.tar", "ais://b/x.tar"], "must lie in one bucket or directory, got 'ais://a' and 'ais://b/x.tar'"),
        (["ais://a/x.tar", "y.tar"], "must lie in one bucket or directory"),
        (["ais://a/x.tar", "ais://a/x.tar"], "'ais://a/x.tar' is named twice"),
        (["x.tar", "ais://a/x.tar"], "must lie in one bucket or directory, got 'x.tar' and 'ais://a/x.tar'"),
        (
            ["ftp://a/x.tar"],
            "ftp:// is not supported; expected ais://, .*https://, http://, file:// or a local path",
        ),
        (["https://u:p@a/x.tar"], "the URL at 'a' must not hold a password"),
        (["https://a/x.tar?sig=1"], "'https://a/x.tar': a URL of shards has no '\\?' or '#'"),
        (["file://host/a.tar"], "'file://host/a.tar': expected file:///PATH, with three slashes"),
        (["file:///a%00.tar"], "'file:///a%00.tar': a path holds no NUL"),
        (["a\0.tar"], r"'a\\0\.tar': a path holds no NUL"),
        (["ais://a/../b/x.tar"], "'ais://a/../b/x.tar': the parts of an object's name"),
        (["ais://a/{x,..}/x.tar"], "'ais://a/../x.tar': the parts of an object's name"),  # as the braces have it
    ],
)
def test_resolve_shards_with_bad_list_says_what_is_wrong(urls: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_shards(urls, endpoint=ENDPOINT)


@pytest.mark.parametrize(
    "braces",
    [
        "{0..1000000}",
        "{0..99999999999999}",
        "{-99999999999..9}",
        f"{{0..{'9' * 5000}}}",
        "{0..999}-{0..999}-{0..1}",
        "{a,b}" * 40,
    ],
)
@pytest.mark.timeout(20)  # without the check: until the memory is full
def test_resolve_shards_of_braces_for_too_many_names_is_refused(braces: str) -> None:
    with pytest.raises(ValueError, match=r"'ais://pets/x-.*\.tar' stands for more than 1,000,000 names"):
        resolve_shards(f"ais://pets/x-{braces}.tar", endpoint=ENDPOINT)


# --- every form that shards may be named in ---------------------------------------------------------------------------


@pytest.mark.parametrize("rest", ["a/x", "a/x-", "a/", "a"])
def test_resolve_shards_of_a_bare_prefix_lists_the_bucket(bucket: AisStore, rest: str) -> None:
    """Up to a name's middle, a dash, or a folder's slash."""
    bucket.create()
    for name in ("a/x-1.tar", "a/x-0.tar", "a/x-manifest.safetensors", "b-0.tar"):
        bucket.write(name, b"x")
    shards = resolve_shards(f"{bucket.url}/{rest}", endpoint=bucket.endpoint)
    assert shards.names == ("a/x-0.tar", "a/x-1.tar")
    assert shards.prefix == "a/x-"


A_SHARDS = ("a-000000.tar", "a-000001.tar")


@pytest.mark.parametrize(
    "url",
    [
        "file://{tars}/a-{{000000..000001}}.tar",
        "file://localhost{tars}/a-",
        "file://{tars}/a-*.tar",
        "{tars}/a-{{000000..000001}}.tar",
        "{tars}//a-",
        "{tars}/sub/../a-*",
        "a-",
        "./a-{{000000..000001}}.tar",
        "a-*",
        "~/a-",
        "~/a-{{000000..000001}}.tar",
    ],
)
@pytest.mark.parametrize("kind", [str, Path])
def test_resolve_shards_of_any_local_form(tars: Path, monkeypatch: pytest.MonkeyPatch, url: str, kind: type) -> None:
    """URLs of files, relative paths, the home directory, globs and braces, as texts and, but URLs, as paths."""
    if kind is Path and "://" in url:
        pytest.skip("a Path folds the slashes of a URL")
    monkeypatch.chdir(tars)
    monkeypatch.setenv("HOME", str(tars))
    shards = resolve_shards(kind(url.format(tars=tars)), endpoint=None)
    assert shards.names == A_SHARDS
    assert (shards.store.url, shards.url) == (str(tars), f"{tars}/a-")


def test_resolve_shards_of_a_file_url_decodes_it(tmp_path: Path) -> None:
    """As `Path.as_uri` writes it, braces and spaces encoded."""
    folder = tmp_path / "a b%"
    folder.mkdir()
    shards = resolve_shards((folder / "x-{0..1}.tar").as_uri(), endpoint=None)
    assert (shards.store.url, shards.names) == (str(folder), ("x-0.tar", "x-1.tar"))


@pytest.mark.parametrize(
    "urls",
    [["a/../../up.tar", "a/b.tar"], ["{a,b/..}/x.tar"], ["../x-{0..1}.tar"]],
)
def test_resolve_shards_gives_no_local_name_that_leaves_its_directory(
    urls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dots in a path move the directory that all shards lie in, never a shard out of it."""
    monkeypatch.chdir(tmp_path)
    shards = resolve_shards(urls, endpoint=None)
    assert not [name for name in shards.names if ".." in name or name.startswith("/")]
    found = [shards.store.locate(name) for name in shards.names]
    expected = [os.path.abspath(path) for url in urls for path in braceexpand(url)]  # noqa: PTH100
    assert found == expected


@pytest.mark.parametrize("odd", ["a/../../b.tar", "/abs.tar", "a//b.tar", "./a.tar", "a\0b.tar"])
def test_resolve_shards_of_a_listing_with_an_odd_name_is_refused(
    odd: str, bucket: AisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real cluster may hold such an object; the embedded node takes none, so its listing is made here."""
    listing = [ObjectEntry(name=name, size=1, checksum=None) for name in ("x-0.tar", odd)]
    monkeypatch.setattr(AisStore, "list", lambda self, prefix: listing)
    shown = re.escape(odd.replace("\0", "\\0"))
    with pytest.raises(DataError, match=rf"bucket '{bucket.url}' lists a shard '{shown}'; expected a name without NUL"):
        resolve_shards(f"{bucket.url}/", endpoint=bucket.endpoint)


@pytest.mark.parametrize("url", ["ais://pets/x/a-{0000000..0999999}.tar", "/data/x/a-{0000000..0999999}.tar"])
@pytest.mark.timeout(60)
def test_resolve_shards_of_a_million_names(url: str) -> None:
    """Some two seconds: the work for a name does not grow with their number."""
    shards = resolve_shards(url, endpoint=ENDPOINT)
    assert len(shards.names) == 1_000_000
    assert shards.names[-1].endswith("a-0999999.tar")
    assert shards.url == url.partition("{")[0]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """One set that is compressed, one that was unpacked beside, one of which a shard is missing among the plain."""
    for name in ("p-0.tgz", "p-1.tgz", "both-0.tgz", "both-0.tar", "some-0.tar", "some-1.tar.gz", "z-0.tar.lz4"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("url", "names", "refused"),
    [
        ("p-", ["p-0.tgz", "p-1.tgz"], "p-0.tgz"),
        ("p-{0..1}.tgz", ["p-0.tgz", "p-1.tgz"], "p-0.tgz"),
        ("p-*.tgz", ["p-0.tgz", "p-1.tgz"], "p-0.tgz"),
        ("p-1.tgz", ["p-1.tgz"], "p-1.tgz"),
        ("both-", ["both-0.tar"], None),  # the plain ones count
        ("some-", ["some-0.tar", "some-1.tar.gz"], "some-1.tar.gz"),  # none is left out
    ],
)
def test_compressed_shards_are_named_where_they_will_do_and_refused_where_not(
    packed: Path, url: str, names: list[str], refused: str | None
) -> None:
    """Who reads plain tars says so at once, by name, and what to do."""
    assert list(resolve_shards(f"{packed}/{url}", endpoint=None, compressed=True).names) == names
    if refused is None:
        assert list(resolve_shards(f"{packed}/{url}", endpoint=None).names) == names
        return
    text = rf"shard '{packed}/{refused}' is compressed.*: DALI reads .* plain \.tar; write plain shards: .* --extension"
    with pytest.raises(DataError, match=text):
        resolve_shards(f"{packed}/{url}", endpoint=None)


def test_resolve_shards_of_links_to_anywhere(tars: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A tree is its user's own: a shard may be a link out of it, and keeps the name that it has there."""
    outside = tmp_path_factory.mktemp("outside") / "real.tar"
    outside.write_bytes(b"12345")
    (tars / "l-0.tar").symlink_to(outside)
    shards = resolve_shards(tars / "l-", endpoint=None)
    assert shards.names == ("l-0.tar",)
    assert (shards.store.url, shards.store.size("l-0.tar")) == (str(tars), 5)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(("url", "ending"), [("z-", ".tar.lz4"), ("z-{0..1}.tar.zst", ".tar.zst"), ("z.zip", ".zip")])
def test_compression_that_nothing_here_reads_is_refused(packed: Path, url: str, ending: str, compressed: bool) -> None:
    with pytest.raises(DataError, match=rf"is compressed as \{ending}; DALI reads .*: unpack it"):
        resolve_shards(f"{packed}/{url}", endpoint=None, compressed=compressed)


@pytest.mark.parametrize("url", ["train-", "train-{000000..000003}.tar", "train-000000.tar"])
@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_wrong_name_is_told_with_the_data_sets_of_the_place(
    kind: str, url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Whoever split by --by split forgets that the names begin with the output's prefix."""
    store = LocalStore(tmp_path) if kind == "directory" else request.getfixturevalue("bucket")
    store.create()
    for name in ("shuffled-train-000000.tar", "shuffled-train-000001.tar", "samples-000000.tar", "notes.txt"):
        store.write(name, b"x")
    with pytest.raises(StoreError, match=rf"; found: '{store.url}/samples-', '{store.url}/shuffled-train-'$"):
        dp.loader(f"{store.url}/{url}", dp.classification_train(), batch_size=1, endpoint=store.endpoint)


def test_missing_directory_or_bucket_is_named(tmp_path: Path, bucket: AisStore) -> None:
    with pytest.raises(StoreError, match=rf"no such directory: '{tmp_path}/shard', of"):
        resolve_shards(tmp_path / "shard" / "x-", endpoint=None)
    bucket.create()
    with pytest.raises(StoreError, match=r"no bucket 'ais://no-such' at .* makes one \(found: 'ais://"):
        resolve_shards("ais://no-such/x-", endpoint=bucket.endpoint)


@pytest.mark.parametrize("url", ["s3:/b/x", "ais:b/x", "gs:/b/x", "https:/server/x", "file:a/x"])
def test_url_with_too_few_slashes_is_no_folder(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output would be written to a folder ``s3:`` here. A folder of this name that exists is meant, though."""
    monkeypatch.chdir(tmp_path)
    scheme, _, rest = url.partition(":")
    meant = f"{scheme}://{'/' if scheme == 'file' else ''}{rest.lstrip('/')}"
    for opened in (open_prefix, open_store, resolve_shards):
        with pytest.raises(
            ValueError, match=re.escape(f"'{url}': expected two slashes after the colon, '{meant}'; for")
        ):
            opened(url, endpoint=None)
    Path(url).parent.mkdir(parents=True)
    assert open_prefix(f"{url.partition('/')[0]}/x-", endpoint=None)[0].directory is not None
    assert open_prefix(Path("./s3:/new"), endpoint=None)[0].directory == Path("s3:/new")


def test_wildcard_in_a_bucket_is_told(bucket: AisStore) -> None:
    bucket.create()
    bucket.write("train-0.tar", b"")
    told = "'*' is no wildcard in a bucket: name the prefix alone"
    with pytest.raises(StoreError, match=re.escape(told)):
        resolve_shards(f"{bucket.url}/train-*.tar", endpoint=bucket.endpoint).entries()
