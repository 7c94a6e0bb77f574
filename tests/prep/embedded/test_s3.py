"""Test the S3 requests of DALI's reader: on the embedded node, and on a cluster if one is named."""

import email.utils
import xml.etree.ElementTree as ET

import pytest
import requests
from aistore import Client
from aistore.sdk.bucket import Bucket

BODY = b"0123456789"


@pytest.fixture
def stored(sdk_bucket: Bucket) -> Bucket:
    """A bucket with the objects ``a`` and ``dir/b``, ten bytes each."""
    for name in ("a", "dir/b"):
        sdk_bucket.object(name).get_writer().put_content(BODY)
    return sdk_bucket


def ask(bucket: Bucket, method: str, name: str, *, of: str | None = None, **headers: str) -> requests.Response:
    """Return the answer. A cluster without the feature S3-Reverse-Proxy redirects a GET; the redirect is followed."""
    session: requests.Session = bucket.client.session_manager.session
    url = f"{bucket.client.base_url.removesuffix('/v1')}/s3/{of or bucket.name}/{name}"
    return session.request(method, url, headers=headers, timeout=60, allow_redirects=True)


def code_of(answer: requests.Response) -> str:
    assert answer.headers["Content-Type"] == "application/xml"
    return ET.fromstring(answer.content).findtext("Code") or ""


def test_s3_head_tells_size_age_and_checksum(stored: Bucket) -> None:
    """A reader first asks for an object's size."""
    answer = ask(stored, "HEAD", "dir/b")
    assert (answer.status_code, answer.headers["Content-Length"], answer.content) == (200, "10", b"")
    assert answer.headers["Etag"].startswith('"v1-')
    assert email.utils.parsedate_to_datetime(answer.headers["Last-Modified"]).year >= 2024
    assert answer.headers["X-Amz-Meta-Ais-Cksum-Type"] == "xxhash2"
    assert len(answer.headers["X-Amz-Meta-Ais-Cksum-Val"]) == 16


@pytest.mark.parametrize(
    ("wanted", "body", "content_range"),
    [
        ("bytes=0-3", b"0123", "bytes 0-3/10"),
        ("bytes=-2", b"89", "bytes 8-9/10"),
        ("bytes=8-99", b"89", "bytes 8-9/10"),  # what there is
    ],
)
def test_s3_get_of_a_range_gives_it(stored: Bucket, wanted: str, body: bytes, content_range: str) -> None:
    """A reader asks for one range for each component of a sample."""
    answer = ask(stored, "GET", "a", Range=wanted)
    assert (answer.status_code, answer.content, answer.headers["Content-Range"]) == (206, body, content_range)
    assert (answer.headers["Content-Length"], answer.headers["Accept-Ranges"]) == (str(len(body)), "bytes")


def test_s3_get_without_a_range_gives_all(stored: Bucket) -> None:
    """GET and HEAD give the same Etag; another object with the name has another Etag."""
    answer = ask(stored, "GET", "dir/b")
    assert (answer.status_code, answer.content) == (200, BODY)
    assert "Content-Range" not in answer.headers
    assert answer.headers["Etag"] == ask(stored, "HEAD", "dir/b").headers["Etag"]
    stored.object("dir/b").get_writer().put_content(b"another")
    assert ask(stored, "HEAD", "dir/b").headers["Etag"] != answer.headers["Etag"]


@pytest.mark.parametrize(
    ("name", "of", "headers", "status", "code"),
    [
        ("none", None, {}, 404, "NoSuchKey"),
        ("a", "nosuchbucket", {}, 404, "NoSuchBucket"),
        ("a", None, {"Range": "bytes=10-"}, 416, "ErrRangeNotSatisfiable"),
        ("a", None, {"Range": "bytes=0-1,4-5"}, 416, "ErrUnsupp"),
    ],
)
def test_s3_error_has_a_code_that_clients_know(
    stored: Bucket, name: str, of: str | None, headers: dict[str, str], status: int, code: str
) -> None:
    """The error is XML; a HEAD has the same status without a body; the connection stays open."""
    answer = ask(stored, "GET", name, of=of, **headers)
    assert (answer.status_code, code_of(answer)) == (status, code)
    if code == "ErrRangeNotSatisfiable":
        assert answer.headers["Content-Range"] == "bytes */10"
    if not headers:
        assert (ask(stored, "HEAD", name, of=of).status_code, ask(stored, "HEAD", "a").status_code) == (status, 200)


@pytest.mark.parametrize("client", ["embedded"], indirect=True)
def test_s3_of_the_embedded_node_answers_itself_whatever_the_signature(client: Client, stored: Bucket) -> None:
    """DALI's client follows no redirects, so the node sends none. It accepts any signature."""
    assert client is not None
    credential = "none/20260101/us-east-1/s3/aws4_request"
    signature = f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders=host, Signature=00"
    answer = ask(stored, "GET", "a", Range="bytes=2-3", Authorization=signature)
    assert (answer.history, answer.content) == ([], b"23")


@pytest.mark.parametrize("client", ["embedded"], indirect=True)
@pytest.mark.parametrize(
    ("method", "name", "status", "code"),
    [
        ("GET", "", 501, "ErrUnsupp"),  # a listing
        ("PUT", "new", 501, "ErrUnsupp"),
        ("GET", "dir%2f..%2fa", 400, "errInvalidObjName"),
    ],
)
def test_s3_of_the_embedded_node_says_what_it_does_not_do(
    client: Client, stored: Bucket, method: str, name: str, status: int, code: str
) -> None:
    """Only reads of objects are answered, and only under their exact names."""
    assert client is not None
    answer = ask(stored, method, name)
    assert (answer.status_code, code_of(answer)) == (status, code)
    assert ask(stored, "GET", "a").content == BODY


def test_s3_listing_gives_names_and_sizes(stored: Bucket) -> None:
    """What a client of S3 asks for. Pages are tested in tests/bench/tools: AIS does not keep to ``max-keys``."""
    session: requests.Session = stored.client.session_manager.session
    url = f"{stored.client.base_url.removesuffix('/v1')}/s3/{stored.name}"
    for prefix, expected in {"": [("a", "10"), ("dir/b", "10")], "dir/": [("dir/b", "10")], "x": []}.items():
        answer = session.get(url, params={"list-type": "2", "prefix": prefix}, timeout=60)
        assert answer.status_code == 200
        root = ET.fromstring(answer.content)
        space = root.tag.removesuffix("ListBucketResult")
        assert root.findtext(f"{space}IsTruncated") == "false"
        entries = list(root.iter(f"{space}Contents"))
        assert [(one.findtext(f"{space}Key"), one.findtext(f"{space}Size")) for one in entries] == expected
