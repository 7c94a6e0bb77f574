"""Listings of clouds that have no end: pages for ever, and the same page again and again."""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator

import pytest

from dali_pipes.errors import StoreError
from dali_pipes.store import listings
from dali_pipes.store.base import Store
from dali_pipes.store.cloud import bucket
from dali_pipes.store.patience import IMPATIENT, use_patience
from dali_pipes.store.urls import open_store
from tests.programs import wait_until
from tests.servers.scripted import Script, ScriptedServer, Visit, scripted

TIME = "2026-01-01T00:00:00.000Z"
PAGES = {
    "s3": (
        "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>{0}</NextContinuationToken><Contents>"
        f"<Key>{{0}}</Key><Size>1</Size><ETag>1</ETag><LastModified>{TIME}</LastModified></Contents></ListBucketResult>"
    ),
    "az": (
        "<EnumerationResults><Blobs><Blob><Name>{0}</Name><Properties><Last-Modified>Thu, 01 Jan 2026 00:00:00 GMT"
        "</Last-Modified><Content-Length>1</Content-Length><Content-Type>a/b</Content-Type><Etag>1</Etag></Properties>"
        "</Blob></Blobs><NextMarker>{0}</NextMarker></EnumerationResults>"
    ),
}
PAGES["gs"] = PAGES["s3"]


def send_empty_pages(scheme: str) -> Script:
    empty = re.sub("<(Contents|Blob)>.*</\\1>", "", PAGES[scheme]).format("more").encode()
    return lambda visit: visit.say(200, empty)


@contextlib.contextmanager
def open_bucket(scheme: str, script: Script, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Store, ScriptedServer]]:
    """A bucket whose server follows the script."""
    with scripted(script) as server:
        for name, value in {
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_SKIP_SIGNATURE": "true",
            "STORAGE_EMULATOR_HOST": server.endpoint,
            "AZURE_STORAGE_ENDPOINT": f"{server.endpoint}/account",
            "AZURE_STORAGE_ACCOUNT_NAME": "account",
            "AZURE_SKIP_SIGNATURE": "true",
        }.items():
            monkeypatch.setenv(name, value)
        yield open_store(f"{scheme}://bucket", endpoint="direct")[0], server


@pytest.fixture
def no_threads() -> Iterator[None]:
    """Wait for the threads of listings that were given up: the server is gone, so they end."""
    yield
    wait_until(lambda: not any(thread.name == "dali-pipes-listing" for thread in threading.enumerate()))


@pytest.mark.parametrize("is_repeated", [False, True], ids=["other names", "the same name"])
@pytest.mark.parametrize("scheme", PAGES)
def test_listing_without_end_is_an_error(scheme: str, is_repeated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listings, "MAX_PAGES", 20)

    def script(visit: Visit) -> None:
        visit.say(200, PAGES[scheme].format("x" if is_repeated else f"x{visit.number:06d}").encode())

    with open_bucket(scheme, script, monkeypatch) as (store, server):
        with pytest.raises(StoreError, match=re.escape(f"'{scheme}://bucket/x': its listing has more than 20 pages")):
            store.list("x")
        assert len(server.requests) <= 21_000


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("scheme", PAGES)
def test_empty_pages_without_end_are_an_error(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "STALL_S", 0.5)
    with use_patience(IMPATIENT), open_bucket(scheme, send_empty_pages(scheme), monkeypatch) as (store, server):
        for ask in (store.exists, lambda: store.list("x")):
            with pytest.raises(StoreError, match=r"its listing brought no object from there on in 0\.5 s"):
                ask()
        assert len(server.requests) > 3


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("scheme", PAGES)
def test_an_interrupt_ends_the_wait_for_a_page(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "_LAST_PAGE_S", 0.0)

    def script(visit: Visit) -> None:
        if visit.number == 3:
            os.kill(os.getpid(), signal.SIGINT)
        send_empty_pages(scheme)(visit)

    with open_bucket(scheme, script, monkeypatch) as (store, _), pytest.raises(KeyboardInterrupt):
        store.list("x")
