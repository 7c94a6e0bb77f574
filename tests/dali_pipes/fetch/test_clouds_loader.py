"""A loader over a bucket of a real S3 server, without AIStore: the same batches as over a directory and a cluster."""

import hashlib
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

import dali_pipes as dp
from dali_pipes.errors import StoreError
from dali_pipes.store.cloud.bucket import CloudStore
from dali_pipes.store.cloud.settings import CloudSettings
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from tests.dali_pipes.fetch.s3_served import ACCESS_KEY, SECRET_KEY, s3_server, s3_store
from tests.faults import faulty

BUCKET = "pets"
URL = f"s3://{BUCKET}/train/s-"
OPTIONS: dict[str, Any] = {"batch_size": 5, "seed": 3, "device": "cpu", "outputs": dp.Outputs(keys=True)}
_SETTLE_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("buckets")
    (folder / BUCKET).mkdir()
    with s3_server(folder) as endpoint:
        yield endpoint


@pytest.fixture
def bucket(server: str, small_shards: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The small shards, indexed in the bucket: the server's endpoint; the environment leads to it."""
    monkeypatch.delenv("AIS_ENDPOINT", raising=False)
    lead_to(server, monkeypatch)
    store = s3_store(server, BUCKET)
    for path in small_shards.glob("*.tar"):
        store.put(f"train/{path.name}", path.read_bytes())
    index_shards(resolve_shards(URL, endpoint=None))
    return server


def lead_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)


def cache_in(directory: Path) -> dp.Cache:
    """A new cache, so that all shards are fetched."""
    directory.mkdir()
    return dp.Cache(directory=directory)


def batches_of(loader: dp.Loader) -> list[tuple[list[str], str]]:
    """Keys and a digest of all pixels of each batch."""
    return [(list(batch["key"]), hashlib.sha256(batch["image"].numpy().tobytes()).hexdigest()) for (batch,) in loader]


def open_loader(url: str | Path = URL, **options: Any) -> dp.Loader:
    return dp.loader(url, dp.segmentation(crop=16), **{**OPTIONS, **options})


def test_epochs_go_on_through_faults(bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Resets, short and flipped bodies, 503 and 429: the same batches."""
    with open_loader() as loader:
        expected = batches_of(loader)
    kinds = ("reset", "reset_body", "short", "flip", "503", "429", "500")
    with faulty(bucket, rate=0.3, seed=1, kinds=kinds, objects=".tar", redirects=False, max_faults=12) as proxy:
        lead_to(proxy.endpoint, monkeypatch)
        with open_loader(cache=cache_in(tmp_path / "faults")) as loader:
            assert batches_of(loader) == expected
        assert proxy.faults.total() > 0


def test_bucket_over_tls_with_an_authority_of_its_own(
    bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Listing, writes, ranges and a loader trust the certificate that a usual variable names; without it, an error."""
    with open_loader() as loader:
        expected = batches_of(loader)
    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    with faulty(bucket, redirects=False, context=context) as proxy:
        lead_to(proxy.endpoint, monkeypatch)
        assert proxy.endpoint.startswith("https://")
        # At once: with the usual patience, a fault that passes would be waited for.
        with pytest.raises(StoreError, match=r"certificate cannot be trusted \(\w+\); set SSL_CERT_FILE to the file"):
            resolve_shards(URL, endpoint=None)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))
        index_shards(resolve_shards(URL, endpoint=None), anew=True)
        with open_loader(cache=cache_in(tmp_path / "tls")) as loader:
            assert batches_of(loader) == expected


@pytest.mark.usefixtures("bucket")
def test_closed_loaders_leave_no_file_and_no_thread(tmp_path: Path) -> None:
    """After the first loaders, which start what stays for the process; each fetches all shards."""

    def left() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    caches = (tmp_path / str(num) for num in range(10))

    def run() -> None:
        with open_loader(cache=cache_in(next(caches))) as loader:
            batches_of(loader)

    run()
    run()
    before = left()
    for _ in range(3):
        run()
    until = time.monotonic() + _SETTLE_S
    while any(now > then for now, then in zip(left(), before, strict=True)) and time.monotonic() < until:
        time.sleep(0.1)
    assert all(now <= then for now, then in zip(left(), before, strict=True))


def test_who_pays_is_a_part_of_the_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 refuses a field x-amz-* that is not signed."""
    lead_to("https://s3.us-east-1.amazonaws.com", monkeypatch)
    monkeypatch.setenv("AWS_REQUEST_PAYER", "true")
    pytest.importorskip("obstore")
    request = CloudStore(CloudSettings.from_environment("s3", BUCKET))._requests.signed("x.tar")
    assert "x-amz-request-payer=requester" in request.url
    assert not request.headers
