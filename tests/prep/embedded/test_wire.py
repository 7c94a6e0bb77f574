"""Replay exchanges that were recorded on AIS 4.9 against the embedded node, and compare status, headers and bodies.

Allowed differences, all of them:

* headers that the recorder left out or that tell nothing (``EXTRA_HEADERS``), and a length where AIS sent chunks;
* a HEAD of an object is answered with all of AIS's headers, whichever the client asks for;
* numbers of jobs, listings and nodes, times, ports, and checksums of shards whose bytes the recording does not hold;
* one target where the recording has two: what comes "by node" is compared node by node, and a job may be past the
  state in which it was recorded;
* the steps in ``NOT_REPLAYED``, which the node does not do.
"""

import base64
import contextlib
import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec.msgpack
import pytest
from aistore.sdk.dsort.types import JobInfo

from tests.prep.embedded.conftest import node_server
from tests.programs import wait_until
from tests.shards import tar_bytes

RECORDING = Path(__file__).resolve().parents[4] / "shared" / "ais-wire" / "ais-4.9.jsonl"
EXTRA_HEADERS = {"Date", "Connection", "Hdr-Error", "Accept-Ranges", "Content-Length"}
NOT_REPLAYED = {
    "object.get archpath": "shards are read whole",
    "bucket.list_objects archive": "shards are read whole",
    "dsort.start framework content int": "the node shuffles only",
    "dsort.wait framework": "the node shuffles only",
    "dsort.wait ekm": "the node shuffles only",
    "batch.get streaming": "shards are read whole",
    "batch.get multipart": "shards are read whole",
    "bucket.info": "buckets are not summed up",
    "bucket.summary": "buckets are not summed up",
    "etl.init no kubernetes": "no ETL",
    "object.get etl missing": "no ETL",
}
NOT_REPLAYED_REQUESTS = {
    ("dsort.start ekm", "POST"): "the node shuffles only",
    ("bucket.copy", "copy-bck"): "buckets are not copied",
}
EXCHANGES: list[dict[str, Any]] = (
    [json.loads(line) for line in RECORDING.read_text().splitlines()] if RECORDING.exists() else []
)


def why_not_replayed(exchange: dict[str, Any]) -> str:
    request = exchange["request"]
    body = request.get("body")
    action = json.loads(body).get("action") if isinstance(body, str) and body.startswith("{") else None
    for what in (request["method"], action):
        if reason := NOT_REPLAYED_REQUESTS.get((exchange["step"], what)):
            return reason
    return NOT_REPLAYED.get(exchange["step"], "")


class Replay:
    """Sends recorded requests to a node, in order, with the numbers that it gave instead of the recorded ones."""

    def __init__(self, endpoint: str) -> None:
        self.address = endpoint.removeprefix("http://")
        self.job = self.listing = ""

    def send(self, request: dict[str, Any]) -> dict[str, Any]:
        url = urlsplit(request["url"])
        query = re.sub(r"uuid=srt-[^&]+", f"uuid={self.job}", url.query)
        body = request.get("body")
        if isinstance(body, dict):  # a shard of three samples, of which the recording holds the length
            first = int(url.path[-6:-4]) * 3
            sizes = (("cls", 1), ("image.jpg", 700), ("trimap.png", 300))
            body = tar_bytes(
                {f"s{at:04}.{part}": bytes(size) for at in range(first, first + 3) for part, size in sizes}
            )
            assert len(body) == request["body"]["len"]
        elif isinstance(body, str):
            body = re.sub(r'"uuid": "[^"]+"', f'"uuid": "{self.listing}"', body)
        connection = http.client.HTTPConnection(self.address, timeout=60)
        headers = {key: value for key, value in request["headers"].items() if key != "Content-Length"}
        connection.request(request["method"], f"{url.path}?{query}", body, headers)
        response = connection.getresponse()
        answer = {"status": response.status, "headers": dict(response.headers), "raw": response.read()}
        connection.close()
        if url.path == "/v1/sort" and request["method"] == "POST" and response.status == 200:
            self.job = answer["raw"].decode()
            wait_until(lambda: self._is_archived(self.job))
        if answer["headers"].get("Content-Type") == "application/msgpack":
            self.listing = msgspec.msgpack.decode(answer["raw"])["UUID"]
        return answer

    def _is_archived(self, job: str) -> bool:
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=60)) as connection:
            connection.request("GET", f"/v1/sort?uuid={job}")
            return all(node["archived"] for node in json.loads(connection.getresponse().read()).values())


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, dict[str, Any]]]:
    """The node's answer to every exchange that is replayed, by number."""
    with node_server(tmp_path_factory.mktemp("wire")) as node:
        replay = Replay(node.endpoint)
        yield {
            number: replay.send(exchange["request"])
            for number, exchange in enumerate(EXCHANGES)
            if not why_not_replayed(exchange)
        }


def shape(value: object) -> object:
    """Return keys and types; a list is described by its first item, a mapping of node names by its first value."""
    if isinstance(value, dict):
        if value and all(re.fullmatch(r"[A-Za-z]+\d+", key) and isinstance(item, dict) for key, item in value.items()):
            return {"by node": shape(next(iter(value.values())))}
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return type(value).__name__


def neutral(text: str) -> str:
    """Remove names of nodes and addresses from an error's text."""
    text = re.sub(r"([pt])\[\w+\]", r"\1[NODE]", text)
    return re.sub(r"127\.0\.0\.1:\d+", "ADDRESS", text)


def recorded_bytes(body: object) -> bytes:
    if isinstance(body, dict):
        return base64.b64decode(body["b64"])
    return str(body or "").encode()


NUMBERED = [
    pytest.param(number, exchange, id=f"{number}-{exchange['step'].replace(' ', '_')}")
    for number, exchange in enumerate(EXCHANGES)
]


@pytest.mark.skipif(not EXCHANGES, reason=f"no recording at {RECORDING}")
@pytest.mark.parametrize(("number", "exchange"), NUMBERED)
def test_exchange_is_answered_as_recorded(
    answers: dict[int, dict[str, Any]], number: int, exchange: dict[str, Any]
) -> None:
    """Status, header names and the body's structure are as in AIS; fixed values are equal."""
    if reason := why_not_replayed(exchange):
        pytest.skip(f"{exchange['step']}: {reason}")
    expected, found = exchange["response"], answers[number]
    assert found["status"] == expected["status"], found["raw"]
    check_headers(expected["headers"], found["headers"], exchange["step"])
    kind = expected["headers"].get("Content-Type", "")
    if kind == "application/msgpack":
        check_listing(recorded_bytes(expected["body"]), found["raw"], exchange["step"])
    elif "sort?uuid" in exchange["request"]["url"]:
        check_job(expected["body"], found["raw"].decode())
    elif kind.startswith("application/json") and expected.get("body"):
        check_json(json.loads(expected["body"]), json.loads(found["raw"]))
    elif kind.startswith("text/html") and expected.get("body"):
        assert re.fullmatch(
            r'<a href="http://127.+&amp;pid=\w+&amp;utm=\w+">Moved Permanently</a>.\n\n', found["raw"].decode()
        )
    elif kind == "application/octet-stream":
        assert len(found["raw"]) == int(expected["headers"]["Content-Length"])


def check_headers(expected: dict[str, str], found: dict[str, str], step: str) -> None:
    assert set(expected) - {"Transfer-Encoding"} <= set(found)
    extra = set(found) - set(expected) - EXTRA_HEADERS
    assert not extra or (step == "object.head" and all(name.startswith("Ais-") for name in extra))
    for name in ("Content-Type", "Content-Range", "Ais-Checksum-Type", "Ais-Version", "Ais-Present"):
        assert name in extra or found.get(name) == expected.get(name)
    if expected.get("Content-Type") == "application/octet-stream":
        assert found["Content-Length"] == expected["Content-Length"]
    if step == "dsort.start ekm" and "Ais-Checksum-Value" in expected:  # the one object whose bytes were recorded
        assert found["Ais-Checksum-Value"] == expected["Ais-Checksum-Value"]
    if "Ais-Bucket-Props" in expected:  # the node has fewer properties
        ours, theirs = (json.loads(headers["Ais-Bucket-Props"]) for headers in (found, expected))
        theirs["checksum"] = {name: theirs["checksum"][name] for name in ours["checksum"]}
        assert shape(ours) == shape({name: theirs[name] for name in ours})
    if "Location" in expected:
        there, here = urlsplit(expected["Location"]), urlsplit(found["Location"])
        assert here.path == there.path
        assert re.sub(r"(pid|utm)=\w+", r"\1", here.query) == re.sub(r"(pid|utm)=\w+", r"\1", there.query)


def check_json(expected: object, found: object) -> None:
    if isinstance(expected, dict) and "url_path" in expected:  # an error
        assert isinstance(found, dict)
        for name in ("tcode", "message", "method", "url_path", "caller", "node", "status"):
            assert neutral(str(found.get(name))) == neutral(str(expected.get(name)))
    assert shape(found) == shape(expected)


def check_listing(expected: bytes, found: bytes, step: str) -> None:
    theirs, ours = msgspec.msgpack.decode(expected), msgspec.msgpack.decode(found)
    assert list(ours) == list(theirs)  # in AIS's order too
    for page in (theirs, ours):
        assert len(page.pop("UUID")) > 5
        for entry in page["Entries"]:
            if "cs" in entry:
                assert re.fullmatch("[0-9a-f]{16}", entry["cs"])
                entry["cs"] = "checksum"
    if step == "bucket.list final":  # there the recording has what a sort by content left
        theirs["Entries"] = [entry for entry in theirs["Entries"] if not entry["n"].startswith("sorted-")]
    assert ours == theirs
    assert [list(entry) for entry in ours["Entries"]] == [list(entry) for entry in theirs["Entries"]]


def check_job(expected: str, found: str) -> None:
    """The SDK reads our status; it sums up to what the recorded job came to."""
    job_id = next(iter(json.loads(expected).values()))["id"]
    bodies = [each["response"]["body"] for each in EXCHANGES if f"uuid={job_id}" in each["request"]["url"]]
    [ours], theirs = (
        [JobInfo.model_validate(job) for job in json.loads(body).values()] for body in (found, bodies[-1])
    )
    errors = {error for job in theirs for error in job.metrics.errors or [] if "aborted" not in error}
    assert set(ours.metrics.errors or []) == errors
    assert ours.metrics.aborted == any(job.metrics.aborted for job in theirs)
    for name in ("extracted_count", "extracted_size", "extracted_record_count"):
        total = sum(int(getattr(job.metrics.local_extraction, name)) for job in theirs)
        assert int(getattr(ours.metrics.local_extraction, name)) == total
    for name in ("to_create", "created_count"):
        total = sum(int(getattr(job.metrics.shard_creation, name)) for job in theirs)
        assert int(getattr(ours.metrics.shard_creation, name)) == total
