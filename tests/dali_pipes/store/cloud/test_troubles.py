"""Troubles on real servers: streams of a wrong length, forked processes, odd names, access signatures."""

import base64
import contextlib
import functools
import hashlib
import hmac
import os
import random
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlencode

import pytest

from dali_pipes.errors import StoreError
from dali_pipes.formats.names import manifest_name
from dali_pipes.store.base import Store
from dali_pipes.store.cloud.bucket import WHOLE_BYTES, CloudStore
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import open_store
from tests.servers.clouds import AZURE_ACCOUNT, AZURE_KEY, KINDS, cloud_bucket
from tests.servers.faulty import faulty

MIB = memoryview(bytes(1 << 20))


@contextlib.contextmanager
def serving(handler: Callable[..., SimpleHTTPRequestHandler]) -> Iterator[str]:
    """The address of a web server that answers with this handler."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest) -> Store:
    return open_store(cloud_bucket(request.param, request), endpoint=None)[0]


@pytest.mark.parametrize("num", [3, 5, 18])
def test_stream_of_another_length_leaves_no_object(store: Store, num: int) -> None:
    expected = (4 if num < 16 else 20) << 20
    assert (expected > WHOLE_BYTES) is (num > 16)
    store.write("x", b"before")
    with pytest.raises(StoreError, match=f"expected {expected} bytes, got .*did a file change"):
        store.access().write_stream("x", lambda: [MIB] * num, num_bytes=expected)
    assert store.read("x") == b"before"


def test_stream_that_fails_leaves_no_object(store: Store) -> None:
    def chunks() -> Iterator[memoryview]:
        yield from [MIB] * 35
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        store.access().write_stream("x", chunks, num_bytes=40 << 20)
    assert store.size("x") is None


def test_forked_process_gets_an_error_and_does_not_hang(store: Store) -> None:
    code = f"""
import os
from dali_pipes.store.urls import open_store
store = open_store({store.url!r}, endpoint=None)[0]
assert store.size("x") is None
pid = os.fork()
if not pid:
    try:
        store.size("x")
    except Exception as exc:
        print(type(exc).__name__, exc, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"StoreError '{store.url}' is used in a forked process"), done.stdout


def test_signed_url_of_an_odd_name_brings_it(store: Store) -> None:
    assert isinstance(store, CloudStore)
    names = ["a b/c d.tar", "p%20q", "p+q", "plain.tar", "{b}", "ü.tar", "日本.tar"]
    for name in names:
        store.write(name, name.encode())
        with urllib.request.urlopen(store.source.signed(name).url) as answer:
            assert answer.read() == name.encode()
    assert [entry.name for entry in store.list("")] == names


def test_container_is_read_by_an_access_signature(request: pytest.FixtureRequest) -> None:
    url = cloud_bucket("az", request)
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    endpoint = request.getfixturevalue("azure_server").endpoint
    signature = _container_signature(url.partition("://")[2])
    fields = f"BlobEndpoint={endpoint};AccountName={AZURE_ACCOUNT};SharedAccessSignature={signature}"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", fields)
    store = open_store(url, endpoint=None)[0]
    assert isinstance(store, CloudStore)
    store.write("a b.tar", b"bytes")
    with urllib.request.urlopen(store.source.signed("a b.tar").url) as answer:
        assert answer.read() == b"bytes"


def _container_signature(container: str) -> str:
    until = (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    place = f"/blob/{AZURE_ACCOUNT}/{container}"
    text = "\n".join(["rwdl", "", until, place, "", "", "", "2023-11-03", "c", *[""] * 7])
    digest = hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()
    signature = base64.b64encode(digest).decode()
    return urlencode({"sp": "rwdl", "se": until, "sv": "2023-11-03", "sr": "c", "sig": signature})


def test_odd_name_without_a_key_of_azure_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "me")
    monkeypatch.setenv("AZURE_STORAGE_TOKEN", "token-of-this-test")
    store = open_store("az://some", endpoint=None)[0]
    assert isinstance(store, CloudStore)
    with pytest.raises(StoreError, match=r"'az://some/a b.tar': a name with spaces.*AZURE_STORAGE_ACCOUNT_KEY"):
        store.source.signed("a b.tar")


def test_server_without_ranges_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "a b.tar").write_bytes(b"0123456789")
    LocalStore(tmp_path / "d").write(manifest_name("x-"), b"manifest")
    handler = functools.partial(QuietHandler, directory=str(tmp_path))
    with serving(handler) as address:
        store = open_store(f"http://{address}/a", endpoint=None)[0]
        assert store.read("a b.tar") == b"0123456789"
        found = store.find_all(["a b.tar", "none"])
        assert [entry and entry.name for entry in found] == ["a b.tar", None]
        # A server's files lie as in a directory.
        assert (store.read(manifest_name("d/x-")), store.size(manifest_name("d/x-"))) == (b"manifest", 8)
        assert store.locate(manifest_name("d/x-")) == f"http://{address}/d/.dali-pipes/x-manifest.safetensors"
        # It has answered: with the whole patience, a fault that passes would be waited for.
        with pytest.raises(StoreError, match="the server does not send ranges of objects"):
            store.read_range("a b.tar", start=5, size=3)


class QuietHandler(SimpleHTTPRequestHandler):
    """Files of a folder, without ranges."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_no_server_and_no_tls_are_named_with_their_cause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error says what the system said of the connection, and which variable names the server."""
    pytest.importorskip("obstore", reason="needs the extra cloud")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    handler = functools.partial(QuietHandler, directory=str(tmp_path))
    with serving(handler) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://{address}")
        with pytest.raises(StoreError, match=r"does not speak TLS .*; should the endpoint begin with http://"):
            open_store("s3://b", endpoint=None)[0].read("x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address}")
    with pytest.raises(
        StoreError, match=r"Connection (refused|reset by peer); is it the right address\? set AWS_ENDPOINT_URL for"
    ):
        open_store("s3://b", endpoint=None)[0].read("x")


@pytest.mark.parametrize("num_bytes", [5_000_000, WHOLE_BYTES + 1])
def test_bytes_that_break_on_the_way_to_s3_are_sent_again(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    """Each request, also of a part of a large object, is signed with the SHA-256 of its bytes, and S3 compares it."""
    url, data = cloud_bucket("s3", request), random.Random(0).randbytes(num_bytes)
    with faulty(os.environ["AWS_ENDPOINT_URL"], redirects=False, writes=["flip"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = open_store(url, endpoint=None)[0]
        store.write("x", data)
        assert store.read("x") == data


def test_new_object_whose_answer_was_lost_is_the_writers_own(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = cloud_bucket("s3", request)
    with faulty(os.environ["AWS_ENDPOINT_URL"], redirects=False, writes=["lost", "lost"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = open_store(url, endpoint=None)[0]
        assert store.write_new("x", b"mine", by="a")
        assert not store.write_new("x", b"theirs", by="b")
        assert store.read("x") == b"mine"
