"""Listings of clouds that have no end: pages for ever, and the same page again and again."""

import re

import pytest

from dali_pipes.errors import StoreError
from dali_pipes.store import listings
from dali_pipes.store.urls import open_store
from tests.servers.scripted import Visit, scripted

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


@pytest.mark.parametrize("is_repeated", [False, True], ids=["other names", "the same name"])
@pytest.mark.parametrize("scheme", PAGES)
def test_listing_without_end_is_an_error(scheme: str, is_repeated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listings, "MAX_PAGES", 20)

    def script(visit: Visit) -> None:
        visit.say(200, PAGES[scheme].format("x" if is_repeated else f"x{visit.number:06d}").encode())

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
        store, _ = open_store(f"{scheme}://bucket", endpoint="direct")
        with pytest.raises(StoreError, match=re.escape(f"'{scheme}://bucket/x': its listing has more than 20 pages")):
            store.list("x")
        assert len(server.requests) <= 21_000
