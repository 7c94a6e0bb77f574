"""A bucket's shards to batches by DALI's own ``s3://`` reader: one ranged GET for each component of each sample.

Settings, of DALI 2.4: readers take ``s3://`` URLs (release notes of 1.38), ``AWS_ENDPOINT_URL`` names the server (its
``s3_client_manager.h``; the documentation does not say). ``index_paths``, made by DALI's own ``wds2idx`` (user guide,
"Data Loading: Webdataset"), are local files; without them it would read the headers of all members first. The reader
of tars asks for one range after the other over one connection, whatever ``num_threads`` says: seen with 8, and so in
``webdataset_loader.cc``. Its ``prefetch_queue_depth`` is raised, as its documentation says of a reader that the
pipeline waits for; batches come in the order of the files, which spares it the shuffle buffer.

AIStore serves S3 below ``/s3``, and must answer at the proxy's own address (see `_check_reads_ranges`). The client is
one a process, made by the first reader: a process reads from one cluster.
"""

import contextlib
import http.client
import os
import shutil
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import bench.loaders.dali_readers
from bench.loaders import Loader, LoaderOptions, Prepared
from bench.loaders.dali_readers import ReaderFiles
from bench.loaders.workers import endpoint_of
from dali_pipes.errors import DataError, PipesError, StoreError

if TYPE_CHECKING:
    from dali_pipes.store.urls import ShardSet

__all__ = ["open_loader", "prepare"]

READER_PREFETCH = 4
"""Batches that the reader holds ready."""
ANSWER_TIMEOUT_S = 10.0
# What DALI's client insists on and AIStore, or the embedded node, does not look at; the user's own go first.
_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "none",
    "AWS_SECRET_ACCESS_KEY": "none",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",  # else it asks a cloud's own address for credentials, and waits
}

_endpoint_in_use: str | None = None


def prepare(shards: "ShardSet", *, directory: Path) -> Prepared:
    """An index of each shard, made by DALI's ``wds2idx`` of a copy of it, one at a time.

    Raises:
        DataError: If there is no sample in a shard.
    """
    from wds2idx import IndexCreator

    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="dali-pipes-wds2idx-") as folder:
        for row, name in enumerate(shards.names):
            copy = Path(folder) / "shard.tar"
            with shards.store.open(name) as source, copy.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            with IndexCreator(str(copy), str(_index_path(directory, row)), verbose=False) as creator:
                try:
                    creator.create_index()
                except ValueError as exc:
                    raise DataError(f"shard '{shards.store.locate(name)}': wds2idx finds no sample in it") from exc
    return Prepared.of(directory, started=started)


@contextlib.contextmanager
def open_loader(shards: "ShardSet", *, options: LoaderOptions, prepared: Prepared) -> Iterator[Loader]:
    """The reader over ``s3://`` URLs, decoders and crop; each sample once an epoch, in the order of the files.

    Raises:
        PipesError: If this process has read from another cluster in this way before.
        StoreError: If the cluster does not answer a ranged GET at its own address.
    """
    endpoint, bucket = endpoint_of(shards), shards.store.url.partition("://")[2]
    assert endpoint is not None, "the registry lets nothing else than a bucket through"
    url = s3_endpoint(endpoint)
    _check_reads_ranges(url, bucket, shards.names[0])
    files = ReaderFiles(
        kind="webdataset",
        paths=[f"s3://{bucket}/{name}" for name in shards.names],
        index_paths=[_index_path(Path(prepared.url), row) for row in range(len(shards.names))],
        prefetch_queue_depth=READER_PREFETCH,
    )
    with _environment(url), bench.loaders.dali_readers.open_loader(files, options=options) as loader:
        yield loader


def s3_endpoint(endpoint: str) -> str:
    """Where the cluster at ``endpoint`` serves S3, as DALI's client needs it.

    The host becomes an address: with a host's name the client would put the bucket before it, and ask
    ``http://pets.localhost:51080/s3/...``. Under TLS the name stays, which the certificate is for.

    >>> s3_endpoint("http://127.0.0.1:51080")
    'http://127.0.0.1:51080/s3'
    """
    parts = urlsplit(endpoint)
    if parts.scheme == "https" or parts.hostname is None:
        return f"{endpoint.rstrip('/')}/s3"
    try:
        address = socket.gethostbyname(parts.hostname)
    except OSError as exc:
        raise StoreError(f"AIStore's endpoint '{endpoint}': no address for '{parts.hostname}'") from exc
    return f"http://{address}:{parts.port or 80}/s3"


def _check_reads_ranges(url: str, bucket: str, name: str) -> None:
    """Ask for the first bytes of a shard, as DALI will, which names neither a status nor a reason."""
    parts = urlsplit(url)
    if parts.scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only a status is looked at
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            parts.netloc, timeout=ANSWER_TIMEOUT_S, context=context
        )
    else:
        connection = http.client.HTTPConnection(parts.netloc, timeout=ANSWER_TIMEOUT_S)
    where = f"'s3://{bucket}/{name}' at {url}"
    try:
        with contextlib.closing(connection):
            connection.request("GET", f"{parts.path}/{bucket}/{quote(name)}", headers={"Range": "bytes=0-511"})
            status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as exc:
        raise StoreError(f"{where}: no answer ({exc}); is AIStore running there?") from exc
    if status in (301, 302, 307, 308):
        raise StoreError(
            f"{where}: AIStore redirects a GET, which DALI's S3 client does not follow; have it answer itself: "
            "ais config cluster features S3-Reverse-Proxy"
        )
    if status != 206:
        raise StoreError(f"{where}: a ranged GET was answered with {status}, expected 206")


@contextlib.contextmanager
def _environment(url: str) -> Iterator[None]:
    """The variables that DALI's client is made by, for as long as it may look at them."""
    global _endpoint_in_use
    if _endpoint_in_use not in (None, url):
        raise PipesError(
            f"DALI's S3 client reads from '{_endpoint_in_use}' for the life of a process, got '{url}'; "
            "use a process for each cluster"
        )
    _endpoint_in_use = url
    before = dict(os.environ)
    os.environ.update({name: os.environ.get(name, value) for name, value in _CREDENTIALS.items()})
    os.environ["AWS_ENDPOINT_URL"] = url
    try:
        yield
    finally:
        for name in (*_CREDENTIALS, "AWS_ENDPOINT_URL"):
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def _index_path(directory: Path, row: int) -> Path:
    return directory / f"{row:06d}.idx"
