"""Test what the project needs of AIStore, through the SDK: on the embedded node, and on a cluster if one is named."""

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import requests
import xxhash
from aistore import Client
from aistore.sdk.bucket import Bucket
from aistore.sdk.errors import AISError, ErrBckAlreadyExists, ErrBckNotFound, ErrObjNotFound

from tests.prep.embedded.conftest import get, put


def ask(bucket: Bucket, method: str, name: str, **options: Any) -> requests.Response:
    """Return the answer with its headers; redirects are followed. Raises ``AISError``."""
    response: requests.Response = bucket.client.request(
        method, path=f"objects/{bucket.name}/{name}", params=bucket.qparam, **options
    )
    return response


def ask_range(bucket: Bucket, name: str, byte_range: str) -> requests.Response:
    return ask(bucket, "GET", name, headers={"Range": byte_range})


def ask_target(bucket: Bucket, location: str, **headers: str) -> requests.Response:
    """Return the answer at a redirect's address, with any status. The SDK's session asks: it knows the cluster's CA."""
    session: requests.Session = bucket.client.session_manager.session
    return session.get(location, headers=headers, timeout=60, allow_redirects=False)


def checksum_of(answer: requests.Response) -> tuple[str | None, str | None]:
    return answer.headers.get("Ais-Checksum-Type"), answer.headers.get("Ais-Checksum-Value")


# Cluster and buckets


def test_cluster_is_ready_and_tells_its_nodes_and_the_jobs_that_move_objects(client: Client) -> None:
    """The cluster names a primary and a target. At rest, it lists no such jobs, or only jobs that have ended."""
    cluster = client.cluster()
    assert cluster.is_ready()
    info = cluster.get_info()
    assert info.proxy_si.daemon_id in info.pmap
    assert info.tmap
    for kind in ("rebalance", "resilver"):
        jobs = client.job(job_kind=kind).get_details()
        assert jobs.root.keys() == info.tmap.keys()
        assert all(job.kind == kind and not job.end_time.startswith("0001-") for job in jobs.list_snapshots())


def test_bucket_create_list_destroy(client: Client, sdk_bucket: Bucket) -> None:
    """A bucket exists from its creation to its destruction; to do either twice is an error unless allowed."""
    assert sdk_bucket.name in [found.name for found in client.cluster().list_buckets()]
    with pytest.raises(ErrBckAlreadyExists):
        sdk_bucket.create()
    sdk_bucket.create(exist_ok=True)
    put(sdk_bucket, "a/b", b"x")
    sdk_bucket.delete()
    assert sdk_bucket.name not in [found.name for found in client.cluster().list_buckets()]
    with pytest.raises(ErrBckNotFound):
        sdk_bucket.delete()
    sdk_bucket.delete(missing_ok=True)
    sdk_bucket.create()
    assert sdk_bucket.list_all_objects() == []  # what it held is gone


def test_bucket_head_gives_properties(sdk_bucket: Bucket, client: Client) -> None:
    """Bucket properties name the checksum that objects carry."""
    props = json.loads(sdk_bucket.head()["Ais-Bucket-Props"])
    assert props["checksum"]["type"] == "xxhash2"
    assert props["provider"] == "ais"
    assert int(props["created"]) > 0
    with pytest.raises(AISError) as missing:
        client.bucket("contract-nosuch").head()
    assert missing.value.status_code == 404


def test_bucket_with_a_bad_name_is_refused(client: Client) -> None:
    for name in ("with space", "a" * 65, "@x"):
        with pytest.raises(AISError) as refused:
            client.bucket(name).create()
        assert refused.value.status_code == 400


# Objects


@pytest.mark.parametrize("num_bytes", [0, 513, 9 << 20])
def test_object_comes_back_as_it_went(sdk_bucket: Bucket, num_bytes: int) -> None:
    """Bytes, size and checksum (XXH64) are right for every size; the largest object is sent in pieces."""
    data = bytes(range(256)) * (num_bytes // 256) + bytes(num_bytes % 256)
    put(sdk_bucket, "dir/object", data)
    assert get(sdk_bucket, "dir/object") == data
    props = sdk_bucket.object("dir/object").props
    assert props.size == num_bytes
    assert (props.checksum_type, props.checksum_value) == ("xxhash2", xxhash.xxh64_hexdigest(data))
    assert props.obj_version == "1"
    assert props.present


def test_object_from_a_file_and_as_a_stream(sdk_bucket: Bucket, tmp_path: Path) -> None:
    """A file is uploaded, and downloaded in pieces, through the proxy and directly from the target."""
    data = b"0123456789" * 100_000
    (tmp_path / "file").write_bytes(data)
    sdk_bucket.object("file").get_writer().put_file(tmp_path / "file")
    assert b"".join(sdk_bucket.object("file").get_reader(chunk_size=4096)) == data
    assert bytes(sdk_bucket.object("file").get_reader(direct=True).read_all()) == data


def test_object_missing_or_deleted_is_gone(client: Client, sdk_bucket: Bucket) -> None:
    """The errors distinguish a missing object from a missing bucket."""
    for name in ("a", "b"):
        put(sdk_bucket, name, b"x")
    sdk_bucket.object("a").delete()
    with pytest.raises(ErrObjNotFound):
        get(sdk_bucket, "a")
    assert [entry.name for entry in sdk_bucket.list_all_objects()] == ["b"]
    with pytest.raises(AISError) as missing:
        sdk_bucket.object("a").head()
    assert missing.value.status_code == 404
    with pytest.raises(ErrObjNotFound):
        sdk_bucket.object("a").delete()
    nowhere = client.bucket("contract-nosuch")
    with pytest.raises(ErrBckNotFound):
        get(nowhere, "no")
    with pytest.raises(ErrBckNotFound):
        put(nowhere, "no", b"")
    with pytest.raises(ErrBckNotFound, match=r'"ErrBckNotFound"') as missing:  # the proxy does not redirect
        ask(nowhere, "GET", "no", allow_redirects=False)
    assert missing.value.status_code == 404


NAMES = [
    "plain",
    "deep/er/and-deeper/name.tar",
    "two words",
    "plus+plus",
    "per%41cent",
    "quest?ion",
    "ha#sh",
    "am&p=x",
    "umlaut-\u00e4\u6f22",
    "long-" + "n" * 300,
    "long/" + "n" * 200 + "/" + "m" * 200,
]


def test_object_names_of_all_sorts(sdk_bucket: Bucket) -> None:
    """Each name has its own bytes, and the listing has all names, in the order of code points."""
    for name in NAMES:
        put(sdk_bucket, name, name.encode())
    for name in NAMES:
        assert get(sdk_bucket, name) == name.encode()
    assert [entry.name for entry in sdk_bucket.list_all_objects()] == sorted(NAMES)


def test_object_put_by_many_at_once_is_one_of_them(sdk_bucket: Bucket) -> None:
    """Readers and writers of one object never see a mixture of two versions."""
    bodies = [bytes([65 + index]) * 300_000 for index in range(6)]
    put(sdk_bucket, "a", bodies[0])

    def run(body: bytes) -> list[bytes]:
        seen = []
        for _ in range(4):
            try:
                put(sdk_bucket, "a", body)
                seen.append(get(sdk_bucket, "a"))
            except AISError as exc:  # a cluster may say that the object is busy
                if exc.status_code not in (404, 409, 503):
                    raise
        return seen

    with ThreadPoolExecutor(len(bodies)) as pool:
        seen = {data for found in pool.map(run, bodies) for data in found}
    final = get(sdk_bucket, "a")
    assert seen | {final} <= set(bodies)
    assert sdk_bucket.object("a").props.checksum_value == xxhash.xxh64_hexdigest(final)


# What a transport of its own goes by: ranges, versions, redirects


@pytest.mark.parametrize(
    ("byte_range", "expected", "content_range"),
    [
        ("bytes=2-4", b"234", "bytes 2-4/10"),
        ("bytes=7-", b"789", "bytes 7-9/10"),
        ("bytes=-2", b"89", "bytes 8-9/10"),
        ("bytes=-100", b"0123456789", "bytes 0-9/10"),  # more than the object has: all of it
        ("bytes=8-100", b"89", "bytes 8-9/10"),  # the end is clipped
    ],
)
def test_range_answer_says_which_bytes_of_how_many(
    sdk_bucket: Bucket, byte_range: str, expected: bytes, content_range: str
) -> None:
    """The answer is 206 with range, length and version, and the checksum of the whole object."""
    put(sdk_bucket, "a", b"0123456789")
    assert bytes(sdk_bucket.object("a").get_reader(byte_range=byte_range).read_all()) == expected
    answer = ask_range(sdk_bucket, "a", byte_range)
    assert (answer.status_code, answer.content) == (206, expected)
    assert answer.headers["Content-Range"] == content_range
    assert answer.headers["Content-Length"] == str(len(expected))
    assert answer.headers["Accept-Ranges"] == "bytes"
    assert answer.headers["Ais-Version"] == "1"
    assert checksum_of(answer) == ("xxhash2", xxhash.xxh64_hexdigest(b"0123456789"))
    whole = ask(sdk_bucket, "GET", "a")
    assert (whole.status_code, whole.headers["Content-Length"]) == (200, "10")
    assert "Content-Range" not in whole.headers


@pytest.mark.parametrize(
    ("byte_range", "content_range"),
    [
        ("bytes=10-", "bytes */10"),
        ("bytes=10-20", "bytes */10"),
        ("bytes=5-3", None),  # an empty range
        ("bytes=0-1,3-4", None),  # two are not served
        ("rows=1-2", None),
    ],
)
def test_range_refused_says_how_many_bytes_there_are(
    sdk_bucket: Bucket, byte_range: str, content_range: str | None
) -> None:
    """The answer is 416. For a range outside the object it has the size: a client learns that the object has shrunk."""
    put(sdk_bucket, "a", b"0123456789")
    with pytest.raises(AISError) as refused:
        ask_range(sdk_bucket, "a", byte_range)
    assert refused.value.status_code == 416
    cause = refused.value.__cause__
    assert isinstance(cause, requests.HTTPError)
    assert cause.response is not None
    assert cause.response.headers.get("Content-Range") == content_range
    assert ask(sdk_bucket, "GET", "a").headers["Content-Length"] == "10"


def test_range_after_the_object_was_replaced_has_another_version(sdk_bucket: Bucket) -> None:
    """The version changes even if the bytes stay the same: two ranges with one version belong to one object.

    After a delete the version starts again at 1, and only the checksum distinguishes two objects.
    """
    answers = []
    for data in (b"0123456789", b"abcdefghij", b"abcdefghij"):
        put(sdk_bucket, "a", data)
        answers.append(ask_range(sdk_bucket, "a", "bytes=5-9"))
    sdk_bucket.object("a").delete()
    put(sdk_bucket, "a", b"another")
    answers.append(ask_range(sdk_bucket, "a", "bytes=0-4"))
    assert [answer.headers["Ais-Version"] for answer in answers] == ["1", "2", "3", "1"]
    first, second, third, last = map(checksum_of, answers)
    assert first != second == third != last != first


def test_redirect_can_be_used_again(sdk_bucket: Bucket) -> None:
    """A target's address serves any number of requests, with other ranges and any time in its query."""
    put(sdk_bucket, "a", b"0123456789")
    first = ask(sdk_bucket, "GET", "a", allow_redirects=False)
    assert first.status_code == 301
    location = first.headers["Location"]
    assert f"/v1/objects/{sdk_bucket.name}/a?provider=ais&pid=" in location
    assert "&utm=" in location
    for byte_range, expected in (("bytes=0-1", b"01"), ("bytes=8-", b"89")):
        for url in (location, location.partition("&utm=")[0]):
            answer = ask_target(sdk_bucket, url, Range=byte_range)
            assert (answer.status_code, answer.content) == (206, expected)


def test_redirect_of_a_head_is_307_and_of_a_missing_object_too(sdk_bucket: Bucket) -> None:
    """The proxy knows buckets, not objects: it also redirects requests for objects that the target will not find."""
    assert ask(sdk_bucket, "HEAD", "no", allow_redirects=False).status_code == 307
    missing = ask(sdk_bucket, "GET", "no", allow_redirects=False)
    assert missing.status_code == 301
    answer = ask_target(sdk_bucket, missing.headers["Location"])
    assert answer.status_code == 404
    assert answer.json()["tcode"] == "ErrNotFound"
    assert f"ais://{sdk_bucket.name}/no does not exist" in answer.json()["message"]


# Checksum types


CHECKSUMS: dict[str, Callable[[bytes], str]] = {
    "crc32c": lambda data: f"{google_crc32c.value(data):08x}",
    "md5": lambda data: hashlib.md5(data).hexdigest(),
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
    "sha512": lambda data: hashlib.sha512(data).hexdigest(),
    "xxhash": xxhash.xxh64_hexdigest,
    "xxhash2": xxhash.xxh64_hexdigest,
}
OBJECT = bytes(range(256)) * 4200  # past a chunk of 1 MiB


def new_bucket(client: Client, name: str, **checksum: object) -> Bucket:
    bucket = client.bucket(name)
    bucket.make_request("POST", "create-bck", value={"checksum": checksum})
    return bucket


@pytest.fixture
def typed(client: Client, request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """A new bucket with the checksum type of the test's parameter."""
    made = new_bucket(client, f"contract-{uuid.uuid4().hex[:12]}", type=request.param)
    yield made
    made.delete(missing_ok=True)


def each_type(*types: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("typed", "checksum_type"), [(name, name) for name in types], indirect=["typed"])


@each_type(*CHECKSUMS)
def test_checksum_of_the_buckets_type(typed: Bucket, checksum_type: str) -> None:
    """Every answer has the checksum in lower-case hex: PUT, GET, a range (the whole object's), HEAD, listing.

    With ``enable_read_range`` a part comes with its own checksum; the whole object comes with the object's.
    """
    value = CHECKSUMS[checksum_type]
    expected = (checksum_type, value(OBJECT))
    assert json.loads(typed.head()["Ais-Bucket-Props"])["checksum"]["type"] == checksum_type
    assert checksum_of(typed.object("a").get_writer().put_content(OBJECT)) == expected
    whole = ask(typed, "GET", "a")
    assert whole.content == OBJECT
    assert checksum_of(whole) == expected
    assert checksum_of(ask_range(typed, "a", "bytes=3-999")) == expected
    assert checksum_of(ask(typed, "HEAD", "a")) == expected
    assert [entry.checksum for entry in typed.list_all_objects(props="name,checksum")] == [expected[1]]
    typed.make_request("PATCH", "set-bprops", value={"checksum": {"enable_read_range": True}})
    checksum = json.loads(typed.head()["Ais-Bucket-Props"])["checksum"]
    assert (checksum["type"], checksum["enable_read_range"]) == (checksum_type, True)
    for start, stop in ((3, 1000), (5, len(OBJECT)), (0, len(OBJECT))):
        answer = ask_range(typed, "a", f"bytes={start}-{stop - 1}")
        assert answer.content == OBJECT[start:stop]
        assert checksum_of(answer) == (checksum_type, value(OBJECT[start:stop]))
    assert checksum_of(ask(typed, "GET", "a")) == expected


@each_type("none")
def test_checksum_type_none_has_no_headers(typed: Bucket, checksum_type: str) -> None:
    """Listings have no checksum either; version and bytes are as usual."""
    put(typed, "a", OBJECT)
    for answer in (ask(typed, "GET", "a"), ask_range(typed, "a", "bytes=3-999"), ask(typed, "HEAD", "a")):
        assert checksum_of(answer) == (None, None)
        assert answer.headers["Ais-Version"] == "1"
    assert [entry.checksum for entry in typed.list_all_objects(props="name,checksum")] == [""]


def test_checksum_type_set_later_is_for_later_objects(sdk_bucket: Bucket) -> None:
    """Stored objects keep their checksums."""
    put(sdk_bucket, "old", b"data")
    sdk_bucket.make_request("PATCH", "set-bprops", value={"checksum": {"type": "md5"}})
    put(sdk_bucket, "new", b"data")
    assert checksum_of(ask(sdk_bucket, "GET", "old")) == ("xxhash2", xxhash.xxh64_hexdigest(b"data"))
    assert checksum_of(ask(sdk_bucket, "HEAD", "old")) == ("xxhash2", xxhash.xxh64_hexdigest(b"data"))
    assert checksum_of(ask(sdk_bucket, "GET", "new")) == ("md5", hashlib.md5(b"data").hexdigest())


def test_checksum_type_that_is_none_is_refused(client: Client, sdk_bucket: Bucket) -> None:
    """The answer is 400; no bucket is made, and an existing bucket stays as it is."""
    for checksum_type in ("bogus", "XXHASH2", 5):
        with pytest.raises(AISError) as refused:
            new_bucket(client, f"{sdk_bucket.name}-x", type=checksum_type)
        assert refused.value.status_code == 400
        with pytest.raises(AISError) as refused:
            sdk_bucket.make_request("PATCH", "set-bprops", value={"checksum": {"type": checksum_type}})
        assert refused.value.status_code == 400
    assert f"{sdk_bucket.name}-x" not in [found.name for found in client.cluster().list_buckets()]
    assert json.loads(sdk_bucket.head()["Ais-Bucket-Props"])["checksum"]["type"] == "xxhash2"


@pytest.mark.parametrize("checksum_type", list(CHECKSUMS))
def test_put_is_held_against_a_checksum_of_any_type(sdk_bucket: Bucket, checksum_type: str) -> None:
    """A wrong checksum is answered with 500, and nothing is stored; else the bucket's type of checksum is stored."""

    def put_with(value: str) -> requests.Response:
        headers = {"Ais-Checksum-Type": checksum_type, "Ais-Checksum-Value": value}
        return ask(sdk_bucket, "PUT", "a", data=b"data", headers=headers)

    with pytest.raises(AISError, match="BAD DATA CHECKSUM") as refused:
        put_with(CHECKSUMS[checksum_type](b"other"))
    assert refused.value.status_code == 500
    assert sdk_bucket.list_all_objects() == []
    answer = put_with(CHECKSUMS[checksum_type](b"data"))
    assert checksum_of(answer) == ("xxhash2", xxhash.xxh64_hexdigest(b"data"))
    assert get(sdk_bucket, "a") == b"data"


# Listings


@pytest.fixture
def listed(sdk_bucket: Bucket) -> Bucket:
    for index in range(5):
        put(sdk_bucket, f"train-{index:02}.tar", b"x" * index)
    put(sdk_bucket, "val-00.tar", b"x")
    return sdk_bucket


def names_of(bucket: Bucket, **options: Any) -> list[str]:
    return [entry.name for entry in bucket.list_all_objects(**options)]


def test_listing_by_prefix_or_start(listed: Bucket) -> None:
    """A listing has the names that begin with a prefix, or that follow a name; an empty listing is not an error."""
    assert names_of(listed, prefix="train-") == [f"train-{index:02}.tar" for index in range(5)]
    assert names_of(listed, prefix="test-") == []
    assert names_of(listed, start_after="train-03.tar") == ["train-04.tar", "val-00.tar"]


def test_listing_in_pages_gives_each_name_once(listed: Bucket) -> None:
    """Pages of every size add up to the whole listing; a page is never longer than requested.

    A token does not mean that another name follows: the page after the last full page is empty.
    """
    expected = names_of(listed)
    for page_size in (1, 2, 5, 6, 7):
        assert names_of(listed, page_size=page_size) == expected
        page = listed.list_objects(page_size=page_size)
        assert [entry.name for entry in page.entries] == expected[:page_size]
    page = listed.list_objects(prefix="train-", page_size=5)
    assert page.continuation_token == "train-04.tar"
    rest = listed.list_objects(prefix="train-", page_size=5, uuid=page.uuid, continuation_token=page.continuation_token)
    assert (rest.entries, rest.continuation_token) == ([], "")


def test_listing_properties(listed: Bucket) -> None:
    """A listing has sizes by default, checksum and version on request, and only names on request."""
    default = listed.list_all_objects(prefix="train-03")[0]
    assert (default.size, default.checksum, default.version) == (3, "", "")
    full = listed.list_all_objects(prefix="train-03", props="name,size,checksum,version")[0]
    assert (full.size, full.checksum, full.version) == (3, xxhash.xxh64_hexdigest(b"xxx"), "1")
    assert listed.list_all_objects(prefix="train-03", props="name")[0].size == 0
