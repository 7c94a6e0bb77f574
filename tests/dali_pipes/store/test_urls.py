"""Which shards, outputs and stores a text or path names, and which texts and paths are refused."""

import re
from pathlib import Path

import pytest

from dali_pipes.errors import DataError, StoreError
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_names import ObjectEntry
from dali_pipes.store.urls import Pattern, open_prefix, open_store, parse_shards, resolve_shards

ENDPOINT = "http://127.0.0.1:1"  # never asked
A_SHARDS = ("a-000000.tar", "a-000001.tar")


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
        (f"ais://{'b' * 65}/a.tar", ENDPOINT, "at most 64 letters"),
        ("ais://#/pets/a-", ENDPOINT, "after a namespace: #NAME/BUCKET, @CLUSTER/BUCKET .* got '#/pets'"),
        ("ais://@#x/pets/a-", ENDPOINT, "after a namespace"),
        ("ais://#x@other/pets/a-", ENDPOINT, "after a namespace"),
        ("ais://#a b/pets/a-", ENDPOINT, "after a namespace"),
        ("ais://#x/", ENDPOINT, "after a namespace: .* got '#x/'"),
        ("ais://#x", ENDPOINT, "after a namespace: .* got '#x'"),
        ("ais://#x/pets/../a-", ENDPOINT, "the parts of an object's name"),
        ("s3://#x/pets/a-", "direct", "'s3://#x/pets/a-' names a namespace, which only AIStore has"),
        ("ais://pets/../dogs/a-", ENDPOINT, "'ais://pets/../dogs/a-': the parts of an object's name"),
        ("ais://pets/..", ENDPOINT, "the parts of an object's name"),
    ],
)
def test_open_store_with_bad_url_says_what_is_expected(url: str, endpoint: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_store(url, endpoint=endpoint)


@pytest.mark.parametrize(
    ("url", "bucket", "query", "rest"),
    [
        ("ais://#x/pets/a-", "#x/pets", {"provider": "ais", "namespace": "@#x"}, "a-"),
        ("ais://@other/pets", "@other/pets", {"provider": "ais", "namespace": "@other#"}, ""),
        ("s3://@other#x/pets/t/a-@3", "@other#x/pets", {"provider": "aws", "namespace": "@other#x"}, "t/a-@3"),
        ("ais://pets/#x/a-", "pets", {"provider": "ais"}, "#x/a-"),  # a folder
    ],
)
def test_namespace_is_a_part_of_the_bucket(url: str, bucket: str, query: dict[str, str], rest: str) -> None:
    store, name = open_store(url, endpoint=ENDPOINT)
    assert isinstance(store, AisStore)
    assert (store.bucket, store.query, name) == (bucket, query, rest)
    assert url.startswith(store.url)


def test_braces_and_versions_mean_the_same_in_a_namespace() -> None:
    urls = ["ais://@other#x/pets/a-{000000..000001}.tar", "ais://@other#x/pets/b-0.tar"]
    shards = resolve_shards(urls, endpoint=ENDPOINT)
    assert (shards.store.url, shards.names) == ("ais://@other#x/pets", (*A_SHARDS, "b-0.tar"))
    ((_, pattern),) = parse_shards("ais://#x/pets/a-@3", endpoint=ENDPOINT)
    assert isinstance(pattern, Pattern)
    assert (pattern.store.url, pattern.prefix, pattern.version) == ("ais://#x/pets", "a-", 3)
    with pytest.raises(ValueError, match="must lie in one bucket or directory, got 'ais://#x/pets' and 'ais://pets/b-"):
        resolve_shards(["ais://#x/pets/a-{0..1}.tar", "ais://pets/b-0.tar"], endpoint=ENDPOINT)


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    for name in ("a-000000.tar", "a-000001.tar", "b-000000.tar", ".dali-pipes/a-classes.json", "sub/c-0.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("{tars}/a-{{000001,000000}}.tar", A_SHARDS[::-1]),  # the given order stays
        ("{tars}/[ab]-000000.tar", ("a-000000.tar", "b-000000.tar")),
        ("{tars}/absent-{{0..1}}.tar", ("absent-0.tar", "absent-1.tar")),  # a shard that is named need not exist
        ("file://{tars}/a-{{000000..000001}}.tar", A_SHARDS),
        ("file://{tars}/a-*.tar", A_SHARDS),
        ("{tars}/sub/../a-*", A_SHARDS),
        ("./a-{{000000..000001}}.tar", A_SHARDS),
        ("~/a-*", A_SHARDS),
    ],
)
def test_resolve_shards_of_any_local_form(
    tars: Path, monkeypatch: pytest.MonkeyPatch, url: str, names: tuple[str, ...]
) -> None:
    """URLs of files, relative paths, the home directory, globs and braces. All but URLs may also be a `Path`."""
    monkeypatch.setenv("HOME", str(tars))
    for kind in (str,) if "://" in url else (str, Path):
        monkeypatch.chdir(tars)
        shards = resolve_shards(kind(url.format(tars=tars)), endpoint=None)
        monkeypatch.chdir("/")  # a relative path keeps the directory of the call
        assert tuple(shards.names) == names
        assert shards.store.url == str(tars)
        assert names[0].startswith("absent") or shards.store.size(names[0]) == 0


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ([], "got an empty list"),
        (["ais://a/x.tar", "ais://b/x.tar"], "must lie in one bucket or directory, got 'ais://a' and 'ais://b/x.tar'"),
        (["ais://a/x.tar", "ais://a/x.tar"], "'ais://a/x.tar' is named twice"),
        (["x.tar", "ais://a/x.tar"], "must lie in one bucket or directory, got 'x.tar' and 'ais://a/x.tar'"),
        (["ftp://a/x.tar"], "ftp:// is not supported; expected ais://, .*https://, http://, file:// or a local path"),
        (["ais://pets/x-{0..1000000}.tar"], "stands for more than 1,000,000 names"),  # before names fill the memory
        ([f"ais://pets/x-{{0..{'9' * 5000}}}.tar"], "stands for more than 1,000,000 names"),
        (["https://u:p@a/x.tar"], "the URL at 'a' must not hold a password"),
        (["https://a/x.tar?sig=1"], "'https://a/x.tar': a URL of shards has no '\\?' or '#'"),
        (["file://host/a.tar"], "'file://host/a.tar': expected file:///PATH, with three slashes"),
        (["file:///a%00.tar"], "'file:///a%00.tar': a path holds no NUL"),
        (["a\0.tar"], r"'a\\0\.tar': a path holds no NUL"),
        (["ais://a/{x,..}/x.tar"], "'ais://a/../x.tar': the parts of an object's name"),  # as the braces have it
    ],
)
def test_resolve_shards_with_bad_list_says_what_is_wrong(urls: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_shards(urls, endpoint=ENDPOINT)


def test_resolve_shards_of_a_place_that_does_not_have_them_says_what_there_is(tars: Path, bucket: AisStore) -> None:
    with pytest.raises(ValueError, match=r"holds shards of 2 sets: '.*a-', '.*b-'; name one"):
        resolve_shards(tars, endpoint=None)
    with pytest.raises(StoreError, match=r"nope-\*' matches no \.tar; expected shards such as .*/nope-000000\.tar"):
        resolve_shards(f"{tars}/nope-*", endpoint=None)
    (tars / "photo.jpg").touch()
    with pytest.raises(
        StoreError, match=r"/\*.jpg' holds photos, and no shards; make shards of them: dali-pipes prep m"
    ):
        resolve_shards(f"{tars}/*.jpg", endpoint=None)
    with pytest.raises(StoreError, match=rf"no such directory: '{tars}/shard', of"):
        resolve_shards(tars / "shard" / "x-", endpoint=None)
    bucket.create()
    bucket.write("train-0.tar", b"")
    with pytest.raises(StoreError, match=r"no bucket 'ais://no-such' at .* makes one \(found: 'ais://"):
        resolve_shards("ais://no-such/x-", endpoint=bucket.endpoint)
    with pytest.raises(StoreError, match=re.escape("'*' is no wildcard in a bucket: name the prefix alone")):
        resolve_shards(f"{bucket.url}/train-*.tar", endpoint=bucket.endpoint).entries()


@pytest.mark.parametrize("url", ["train-", "train-{000000..000003}.tar", "train-000000.tar"])
@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_wrong_name_is_told_with_the_data_sets_of_the_place(
    kind: str, url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """After --by split, users forget that the names begin with the output's prefix."""
    store = LocalStore(tmp_path) if kind == "directory" else request.getfixturevalue("bucket")
    store.create()
    for name in ("shuffled-train-000000.tar", "shuffled-train-000001.tar", "samples-000000.tar", "notes.txt"):
        store.write(name, b"x")
    with pytest.raises(StoreError, match=rf"; found: '{store.url}/samples-', '{store.url}/shuffled-train-'$"):
        resolve_shards(f"{store.url}/{url}", endpoint=store.endpoint).entries()


@pytest.mark.parametrize("odd", ["a/../../b.tar", "/abs.tar", "a//b.tar", "./a.tar", "a\0b.tar"])
def test_resolve_shards_of_a_listing_with_an_odd_name_is_refused(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real cluster may hold such an object; the embedded node takes none, so its listing is made here."""
    listing = [ObjectEntry(name=name, size=1, checksum=None) for name in ("x-0.tar", odd)]
    monkeypatch.setattr(AisStore, "list", lambda self, prefix: listing)
    monkeypatch.setattr(AisStore, "list_all", lambda self, prefix: listing)
    shown = re.escape(odd.replace("\0", "\\0"))
    with pytest.raises(DataError, match=rf"bucket 'ais://pets' lists a shard '{shown}'; expected a name without NUL"):
        resolve_shards("ais://pets/", endpoint=ENDPOINT)


@pytest.mark.parametrize("url", ["s3:/b/x", "ais:b/x", "https:/server/x", "file:a/x"])
def test_url_with_too_few_slashes_is_no_folder(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the output would go to a folder ``s3:``. An existing folder of this name is accepted."""
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


@pytest.mark.parametrize(("url", "ending"), [("z-", ".tar.lz4"), ("z-{0..1}.tar.zst", ".tar.zst")])
def test_compression_that_nothing_here_reads_is_refused(packed: Path, url: str, ending: str) -> None:
    for compressed in (False, True):
        with pytest.raises(DataError, match=rf"is compressed as \{ending}; DALI reads .*: unpack it"):
            resolve_shards(f"{packed}/{url}", endpoint=None, compressed=compressed)


def test_folder_of_photos_is_no_data_set(tmp_path: Path) -> None:
    """Nor is one with an archive of another kind: the error says what makes shards of photos."""
    (tmp_path / "data.zip").touch()
    with pytest.raises(StoreError, match=r"holds no \.tar; expected shards such as samples-000000\.tar"):
        resolve_shards(tmp_path, endpoint=None)
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.JPG").touch()
    with pytest.raises(StoreError, match="holds photos, and no shards; make shards of them: dali-pipes prep make /"):
        resolve_shards(tmp_path, endpoint=None)
