"""A loader over a bucket of a real S3 server, without AIStore: through faults, and over TLS."""

import hashlib
import os
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme

import dali_pipes as dp
from dali_pipes.errors import StoreError
from dali_pipes.store.urls import open_store, resolve_shards
from prep.index import index_shards
from tests.servers.clouds import cloud_bucket
from tests.servers.faulty import faulty


@pytest.fixture
def url(small_shards: Path, request: pytest.FixtureRequest) -> str:
    """The small shards, indexed in a bucket to which the environment leads."""
    url = f"{cloud_bucket('s3', request)}/train/s-"
    store, _ = open_store(url, endpoint=None)
    for path in small_shards.glob("*.tar"):
        store.upload(f"train/{path.name}", path)
    index_shards(resolve_shards(url, endpoint=None))
    return url


def batches_of(url: str, cache: Path | None = None) -> list[tuple[list[str], str]]:
    """Keys and a digest of all pixels of each batch; with a new cache, all shards are fetched."""
    if cache is not None:
        cache.mkdir()
    options: dict[str, Any] = {"cache": dp.Cache(directory=cache), "outputs": dp.Outputs(keys=True), "device": "cpu"}
    with dp.loader(url, dp.segmentation(crop=16), batch_size=5, seed=3, **options) as loader:
        return [(batch["key"], hashlib.sha256(batch["image"].numpy().tobytes()).hexdigest()) for (batch,) in loader]


def test_epochs_go_on_through_faults(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Resets, short and flipped bodies, 503 and 429: the same batches."""
    expected, server = batches_of(url), os.environ["AWS_ENDPOINT_URL"]
    kinds = ("reset", "reset_body", "short", "flip", "503", "429", "500")
    with faulty(server, rate=0.3, seed=1, kinds=kinds, objects=".tar", redirects=False, max_faults=12) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        assert batches_of(url, tmp_path / "faults") == expected
        assert proxy.faults.total() > 0


def test_bucket_over_tls_with_an_authority_of_its_own(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Listing, writes, ranges and a loader trust the certificate that a usual variable names; without it, an error."""
    expected = batches_of(url)
    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    with faulty(os.environ["AWS_ENDPOINT_URL"], redirects=False, context=context) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        assert proxy.endpoint.startswith("https://")
        # At once: with the usual patience, a fault that passes would be waited for.
        with pytest.raises(StoreError, match=r"certificate cannot be trusted \(\w+\); set SSL_CERT_FILE to the file"):
            resolve_shards(url, endpoint=None)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))
        index_shards(resolve_shards(url, endpoint=None), anew=True)
        assert batches_of(url, tmp_path / "tls") == expected
