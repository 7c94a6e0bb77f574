"""Objects of clouds: what is asked for, and what follows each answer, in the words of S3, GCS and Azure."""

import contextlib
import re
from collections.abc import Callable, Iterator

import pytest

from dali_pipes.errors import DataError, StoreError
from dali_pipes.store.cloud.objects import CloudObjects
from dali_pipes.store.http.answers import ObjectRequest
from dali_pipes.store.http.client import HttpAccess
from dali_pipes.store.http.objects import ObjectFetcher
from dali_pipes.store.patience import Patience
from tests.dali_pipes.fetch.served import BRIEF, DATA, OTHER, RETRY, Place, fails, fetch_object, ranged
from tests.servers.scripted import Script, ScriptedServer, Visit, scripted

ADVICE = "no credentials in the environment or a profile; log in"
ETAG = '"one-3"'


class Signer:
    """Signs requests as a store does: each signature has a number, from 1."""

    def __init__(self, endpoint: str, **headers: str) -> None:
        self._endpoint, self._headers = endpoint, tuple(headers.items())
        self.num = 0
        self.error: Exception | None = None

    def __call__(self, name: str) -> ObjectRequest:
        if self.error is not None:
            raise self.error
        self.num += 1
        return ObjectRequest(f"{self._endpoint}/pets/{name}?X-Amz-Signature={self.num}", self._headers, 600.0)


@contextlib.contextmanager
def fetching(
    endpoint: str,
    ask_for: Callable[[str], ObjectRequest] | None = None,
    *,
    scheme: str = "s3",
    patience: Patience = BRIEF,
) -> Iterator[ObjectFetcher]:
    source = CloudObjects(
        ask_for or Signer(endpoint),
        locate=lambda name: f"{scheme}://pets/{name}",
        access=HttpAccess.of_cloud(endpoint),
        service={"s3": "S3", "gs": "GCS"}.get(scheme, "HTTPS"),
        advice=ADVICE,
    )
    with ObjectFetcher(source, retry=RETRY, patience=patience) as fetcher:
        yield fetcher


def say_object(visit: Visit, data: bytes = DATA, *, etag: str = ETAG, **headers: str) -> None:
    """Answer as S3: the object or a range of it; 412 if it must match another ETag."""
    if visit.headers.get("If-Match", etag) != etag:
        visit.say(412, error("PreconditionFailed"))
    elif "Range" in visit.headers:
        visit.send(ranged(visit, data, version=f"ETag: {etag}".encode()))
    else:
        visit.say(200, data, ETag=etag, **headers)


def say_half(visit: Visit, *, etag: str = ETAG) -> None:
    """Begin an answer as `say_object`, and hang up in the middle."""
    visit.send(f"HTTP/1.1 200 OK\r\nContent-Length: {len(DATA)}\r\nETag: {etag}\r\n\r\n".encode())
    visit.send(DATA[: len(DATA) // 2])
    visit.hang_up()


def error(code: str, message: str = "made by the test", **more: str) -> bytes:
    """The body of an error, in XML."""
    elements = "".join(f"<{name}>{text}</{name}>" for name, text in {"Code": code, "Message": message, **more}.items())
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{elements}</Error>'.encode()


def then(*scripts: Script, last: Script = say_object) -> Script:
    """Answer the first requests by one script each, and all others by ``last``."""
    return lambda visit: (*scripts, last)[min(visit.number, len(scripts))](visit)


def says(status: int, body: bytes = b"", **headers: str) -> Script:
    return lambda visit: visit.say(status, body, **{name.replace("_", "-"): value for name, value in headers.items()})


def signatures(server: ScriptedServer) -> list[int]:
    """The number of the signature of each request."""
    return [int(path.rpartition("=")[2]) for path in server.paths]


# Requests


def test_redirect_of_a_web_server_is_followed_without_the_own_headers() -> None:
    """A token for one host is not for another; the ranges after a fault ask the first host again."""
    with scripted(say_object) as elsewhere:
        with scripted(says(302, Location=f"{elsewhere.endpoint}/cdn/x.tar")) as server:
            signer = Signer(server.endpoint, Authorization="Bearer t0ken")
            with fetching(server.endpoint, signer, scheme="https") as fetcher:
                fetch_object(fetcher)
            assert server.fields("Authorization") == ["Bearer t0ken"]
        assert elsewhere.fields("Authorization") == [None]


# What breaks and is mended


def test_object_replaced_between_two_attempts_is_no_mix() -> None:
    """The ETag does not match (412); from the start again, the manifest's checksum decides."""
    with scripted(then(lambda visit: say_half(visit, etag='"zero"'))) as server:
        with fetching(server.endpoint) as fetcher:
            fetch_object(fetcher)
        half = len(DATA) // 2
        assert server.ranges == [None, f"bytes={half}-{len(DATA) - 1}", None]
    other = lambda visit: say_object(visit, OTHER)  # noqa: E731
    replaced = scripted(then(lambda visit: say_half(visit, etag='"zero"'), last=other))
    with replaced as server, fetching(server.endpoint) as fetcher:
        fails(fetcher, DataError, "it was replaced since: put it back")


# Credentials


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (403, error("AccessDenied", "Request has expired")),
        (403, error("ExpiredToken")),
        (400, error("ExpiredToken", "The provided token has expired.")),
        (403, error("AuthenticationFailed", "Signature not valid in the specified time frame")),
        (401, b""),
    ],
)
def test_refused_signature_is_made_anew_once(status: int, body: bytes) -> None:
    """Also again later, after bytes came: a run outlives many credentials."""
    refused = says(status, body)
    with scripted(then(refused, say_half, refused)) as server:
        with fetching(server.endpoint) as fetcher:
            fetch_object(fetcher)
        assert signatures(server) == [1, 2, 2, 3]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("AccessDenied", f"403 AccessDenied: made by the test; {ADVICE}; an object that is missing is refused in the"),
        ("RequestTimeTooSkewed", "the clock of this machine is wrong"),
        ("SignatureDoesNotMatch", "the secret key is not the one that belongs to the access key"),
        ("InvalidAccessKeyId", "the access key does not exist there"),
        ("InvalidObjectState", "it is archived: restore it first"),
        ("ExpiredToken", ADVICE),
    ],
)
def test_credentials_that_are_refused_twice_are_an_error_with_advice(code: str, expected: str) -> None:
    """Object, endpoint, the store's words; no signature."""
    with scripted(says(403, error(code, StringToSign="s3cret"))) as server, fetching(server.endpoint) as fetcher:
        text = fails(fetcher, StoreError, re.escape(expected))
        assert signatures(server) == [1, 2]
    assert text.startswith(f"'s3://pets/a/x.tar' at {server.endpoint}: 403 {code}")
    assert "Signature=" not in text
    assert "s3cret" not in text


def test_source_of_credentials_that_is_away_is_waited_for_and_a_lack_of_them_is_told() -> None:
    """An instance's metadata may not answer for a moment."""
    with scripted(say_object) as server:
        signer = Signer(server.endpoint)
        signer.error = ConnectionError("no route to the metadata")
        with fetching(server.endpoint, signer) as fetcher:
            fails(fetcher, StoreError, "cannot sign a request for it: no route to the metadata")
            signer.error = StoreError("no credentials")
            fails(fetcher, StoreError, "^no credentials$")
        assert not server.paths


# Answers that cannot be mended


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (404, error("NoSuchKey", "The specified key does not exist."), "404 NoSuchKey: The .*; was it deleted"),
        (404, b"<html><body>no</body></html>", "404 Not Found; was it deleted"),
        (404, error("NoSuchBucket"), "404 NoSuchBucket: .*; is it the right name, endpoint and account"),
        (405, error("MethodNotAllowed"), "405 MethodNotAllowed: made by the test$"),
        (501, error("NotImplemented"), "501 NotImplemented"),
    ],
)
def test_lasting_refusal_is_told_at_once(status: int, body: bytes, expected: str) -> None:
    """One request: a cloud's listing is always right, so nothing comes back by itself."""
    with scripted(says(status, body)) as server, fetching(server.endpoint) as fetcher:
        fails(fetcher, StoreError, expected)
        assert len(server.paths) == 1


def test_bucket_in_another_region_is_told_with_the_setting() -> None:
    """The signature is for one region, so a redirect there would be refused."""
    location = "http://pets.s3.eu-west-1.amazonaws.com/a/x.tar"
    for answer in (
        says(301, error("PermanentRedirect"), X_Amz_Bucket_Region="eu-west-1", Location=location),
        says(400, error("AuthorizationHeaderMalformed", Region="eu-west-1")),
    ):
        with scripted(answer) as server, fetching(server.endpoint) as fetcher:
            fails(fetcher, StoreError, "the bucket is in the region 'eu-west-1'; set AWS_REGION=eu-west-1")
            assert len(server.paths) == 1


def test_other_size_is_the_manifests_error() -> None:
    """Before a byte is written; of a range, too, which the store refuses (416)."""
    place = Place(len(DATA) + 10)
    with scripted(say_object) as server, fetching(server.endpoint) as fetcher:
        fails(fetcher, DataError, f"has {len(DATA)} bytes, the manifest says {len(DATA) + 10}", place=place)
        assert place.holds(b"\xaa" * (len(DATA) + 10))
    short = says(416, error("InvalidRange"), Content_Range="bytes */10")
    with scripted(then(say_half, last=short)) as server, fetching(server.endpoint) as fetcher:
        fails(fetcher, DataError, f"has 10 bytes, the manifest says {len(DATA)}")


def test_object_that_is_unpacked_on_the_way_is_told() -> None:
    """The error says that Google Cloud Storage unpacks the object, or that the object came packed."""
    unpacked = lambda visit: say_object(visit, **{"X-Goog-Stored-Content-Encoding": "gzip"})  # noqa: E731
    with scripted(unpacked) as server, fetching(server.endpoint, scheme="gs") as fetcher:
        fails(fetcher, DataError, "'gs://pets/a/x.tar' is stored with the Content-Encoding 'gzip', and GCS unpacks")
    packed = lambda visit: say_object(visit, DATA[:-5], **{"Content-Encoding": "gzip"})  # noqa: E731
    with scripted(packed) as server, fetching(server.endpoint) as fetcher:
        fails(fetcher, DataError, "it came with the Content-Encoding 'gzip': shards must be stored and sent without")
