"""Answers of a server: a fetch gives the right bytes or an error of ours, and the next fetch is right again.

Our client reads AIStore's answers; our client and `obstore` read S3's, Google Cloud Storage's and Azure's.
"""

import json
import random
import tempfile
import threading
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import xxhash

from dali_pipes.cache.extents import Extent
from dali_pipes.errors import PipesError
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.store.cloud.bucket import BucketObjects, CloudStore
from dali_pipes.store.cloud.settings import CloudSettings
from dali_pipes.store.cluster.access import ClusterAccess
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.objects import StoredObjects
from dali_pipes.store.http.objects import ObjectFetcher, RetryPolicy
from dali_pipes.store.patience import Patience, use_patience
from tests.fuzz.target import Answer, BrokenPromiseError, Target
from tests.servers.scripted import ScriptedServer, Visit

BODY = random.Random(3).randbytes(1500)
ENTRY_NAMES = [f"a/{number:04d}.tar" for number in range(9)]
LOCATION = "/v1/objects/b/o?elsewhere=1"


def _answer(status: bytes, *headers: bytes, body: bytes = b"", chunks: Sequence[bytes] = ()) -> bytes:
    """An HTTP answer whose body has a length or comes in chunks."""
    if chunks:
        pieces = b"".join(b"%x;a=b\r\n%b\r\n" % (len(piece), piece) for piece in chunks)
        headers, body = (*headers, b"Transfer-Encoding: chunked"), pieces + b"0\r\nX-Trailer: y\r\n\r\n"
    else:
        headers = (*headers, b"Content-Length: %d" % len(body))
    return b"HTTP/1.1 " + b"\r\n".join([status, *headers, b"", body])


def object_answers() -> Sequence[bytes]:
    """Answers to a GET of an object whose bytes are `BODY`: the object, redirects, a server that is busy."""
    chunks = BODY[:700], BODY[700:1499], BODY[1499:]
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    checksum = b"Ais-Checksum-Type: unknown", b"Ais-Checksum-Value: 0123456789abcdef0123456789abcdef", b"Ais-Version: 7"
    error = b'{"status": 503, "message": "ais://b/o is busy", "method": "GET"}'
    folded = _answer(b"200 OK", b"Connection: keep-alive", b"X: folded\r\n over lines", body=BODY)
    location = b"Location: " + LOCATION.encode()
    return [
        _answer(b"200 OK", body=BODY),
        _answer(b"200 OK", b"Date: " + MODIFIED, b"Connection: close", body=BODY),
        early + _answer(b"200 OK", chunks=chunks),
        _answer(b"200 OK", chunks=chunks),
        b"HTTP/1.1 200 OK\r\n\r\n" + BODY,
        folded.replace(b"HTTP/1.1", b"HTTP/1.0"),
        _answer(b"307 Temporary Redirect", location),
        b"HTTP/1.1 301 Moved\r\n" + location + b"\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        _answer(b"503 Busy", body=error),
        _answer(b"503 Busy", b"Hdr-Error: starting"),
        _answer(b"429 Slow down", b"Retry-After: 0", b"Content-Range: bytes */1500"),
        _answer(b"200 OK", *checksum, body=BODY),
    ]


def listing_answers() -> Sequence[bytes]:
    """Answers to a listing with `ENTRY_NAMES`, in one page."""
    entries = [{"name": name, "size": "5", "checksum": "0123456789abcdef"} for name in ENTRY_NAMES]
    body = json.dumps({"uuid": "u", "continuation_token": "", "flags": 0, "entries": entries}).encode()
    kind = b"Content-Type: application/json"
    return [_answer(b"200 OK", kind, body=body), _answer(b"200 OK", kind, chunks=[body])]


# After a truncated answer the client waits this long, until the server closes the connection.
IDLE_S = 0.2
PATIENCE = Patience(patience_s=30.0, longest_pause_s=0.001)
MODIFIED = b"Sun, 22 Nov 2026 14:24:02 GMT"


def cloud_settings(cloud: str, endpoint: str) -> CloudSettings:
    """The bucket ``b`` of a cloud whose server is at this endpoint."""
    keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "aws_region": "us-east-1"}
    azure = {"account_name": "me", "account_key": "a2V5", "endpoint": f"{endpoint}/me"}
    options = {
        "s3": {"aws_endpoint_url": endpoint, **keys},
        "gs": {"google_base_url": endpoint, "google_skip_signature": "true"},
        "az": {f"azure_storage_{name}": value for name, value in azure.items()},
    }
    return CloudSettings(scheme=cloud, bucket="b", options=options[cloud])


def cloud_listing(cloud: str) -> bytes:
    """The answer of a cloud to a listing with `ENTRY_NAMES`, in one page."""
    names = [name.encode() for name in ENTRY_NAMES]
    if cloud == "az":
        properties = b"<Last-Modified>%b</Last-Modified><Etag>0x8D</Etag><Content-Length>5</Content-Length>" % MODIFIED
        properties += b"<Content-Type>application/x-tar</Content-Type>"
        blobs = [b"<Blob><Name>%b</Name><Properties>%b</Properties></Blob>" % (name, properties) for name in names]
        body = b"<EnumerationResults><Blobs>%b</Blobs><NextMarker /></EnumerationResults>" % b"".join(blobs)
    else:
        fields = b"<LastModified>2026-11-22T14:24:02.000Z</LastModified><ETag>&quot;e&quot;</ETag><Size>5</Size>"
        objects = [b"<Contents><Key>%b</Key>%b</Contents>" % (name, fields) for name in names]
        body = b"<ListBucketResult><IsTruncated>false</IsTruncated>%b</ListBucketResult>" % b"".join(objects)
    return _xml(b"200 OK", b'<?xml version="1.0" encoding="utf-8"?>' + body)


def _xml(status: bytes, body: bytes) -> bytes:
    return _answer(status, b"Content-Type: application/xml", b'ETag: "e"', body=body)


def _error(status: bytes, code: bytes, more: bytes = b"<Message>Why</Message>") -> bytes:
    return _xml(status, b"<Error><Code>%b</Code>%b</Error>" % (code, more))


# The client repeats the request after these errors: the server is busy, or the signature is too old.
CLOUD_ERRORS = [_error(b"503 Slow Down", b"SlowDown"), _error(b"500 Internal", b"InternalError")]
# The client gives up after one or two of these errors.
CLOUD_REFUSALS = [
    _error(b"403 Forbidden", b"ExpiredToken"),
    _error(b"404 Not Found", b"NoSuchKey", b"<Message>No such key</Message><Key>o</Key>"),
    _error(b"404 Not Found", b"ContainerNotFound"),
    _error(b"301 Moved", b"PermanentRedirect", b"<Region>eu-west-1</Region>"),
    _error(b"412 Precondition Failed", b"ConditionNotMet", b""),
]


class _Answers(Target):
    """A server whose next answer is the input, in pieces; ``_honest`` answers all other requests."""

    def __init__(self) -> None:
        self._input: bytes | None = None
        self._is_sent = threading.Event()
        self._server = ScriptedServer(self._answer, None)

    def close(self) -> None:
        self._server.close()

    def strangers(self) -> Sequence[bytes]:
        return CLOUD_REFUSALS

    def _serve_next(self, data: bytes) -> None:
        self._is_sent.clear()
        self._input = data

    def _answer(self, visit: Visit) -> None:
        self._server.requests.clear()
        data, self._input = self._input, None
        if data is None:
            visit.send(self._honest(visit.request))
            return
        try:
            draw = crc32(data)
            step = (len(data), 1 + draw % 700, 1 + draw % 7)[draw % 3] or 1
            for start in range(0, len(data), max(step, len(data) // 300)):
                visit.send(data[start : start + max(step, len(data) // 300)])
            if draw % 16:  # a few connections stay open
                visit.hang_up()
            else:
                visit.hang_up_if_idle(IDLE_S)
        finally:
            self._is_sent.set()

    @abstractmethod
    def _honest(self, request: bytes) -> bytes:
        """The right answer to a request."""


class ObjectAnswers(_Answers):
    """The fetch client reads objects from answers of AIStore or of a cloud."""

    num_daily = 120

    def __init__(self, cloud: str = "") -> None:
        super().__init__()
        self._cloud, endpoint = cloud, self._server.endpoint
        source: Any = StoredObjects(ClusterAccess(endpoint=endpoint), "b")
        if cloud:
            source = BucketObjects(cloud_settings(cloud, endpoint), PATIENCE)
        self._fetcher = ObjectFetcher(source, retry=RetryPolicy(attempts=3, max_broken=6), patience=PATIENCE)
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self._wanted = Wanted("o", Extent(self._file.fileno(), 0, len(BODY)), xxhash.xxh64_intdigest(BODY))

    def close(self) -> None:
        self._fetcher.close()
        self._file.close()
        super().close()

    def seeds(self) -> Sequence[bytes]:
        if not self._cloud:
            return object_answers()
        return [*(each for each in object_answers() if b"Location:" not in each), *CLOUD_ERRORS]

    def check(self, data: bytes) -> Answer:
        self._serve_next(data)
        try:
            self._fetch()
        except PipesError:
            result: Answer = "refused"
        else:
            result = "taken"
        if not self._is_sent.wait(300):
            raise BrokenPromiseError("the answer was not read, nor its connection closed")
        self._fetch()  # from an honest server, on the same connection if it is kept
        return result

    def _fetch(self) -> None:
        self._wanted.extent.write(bytes(len(BODY)), 0)
        if not self._fetcher.fetch([self._wanted]) or self._wanted.extent.read(0, len(BODY)) != BODY:
            raise BrokenPromiseError("other bytes were delivered")

    def _honest(self, request: bytes) -> bytes:
        asked = request.partition(b"Range: bytes=")[2].partition(b"\r\n")[0]
        if not asked:
            return _answer(b"200 OK", body=BODY)
        start, last = (int(number) for number in asked.split(b"-"))
        place = b"Content-Range: bytes %d-%d/%d" % (start, last, len(BODY))
        return _answer(b"206 Partial Content", place, body=BODY[start : last + 1])


class ListingAnswers(_Answers):
    """AIStore's SDK or `obstore` reads listings."""

    num_daily = 60

    def __init__(self, cloud: str = "") -> None:
        super().__init__()
        self._cloud, endpoint = cloud, self._server.endpoint
        with use_patience(PATIENCE):
            self._store: Any = CloudStore(cloud_settings(cloud, endpoint)) if cloud else AisStore(endpoint, "b")

    def seeds(self) -> Sequence[bytes]:
        return [cloud_listing(self._cloud), *CLOUD_ERRORS] if self._cloud else listing_answers()

    def check(self, data: bytes) -> Answer:
        self._serve_next(data)
        try:
            entries = self._store.list("a/")
        except PipesError:
            return "refused"
        for entry in entries:
            if not entry.name or entry.size < 0 or (self._cloud and not entry.name.startswith("a/")):
                raise BrokenPromiseError(f"an entry that cannot be one: {entry}")
        return "taken"

    def _honest(self, request: bytes) -> bytes:
        return cloud_listing(self._cloud) if self._cloud else listing_answers()[0]
