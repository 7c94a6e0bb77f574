"""Load a bucket's shards with DALI's own ``s3://`` reader: one ranged GET for each component of each sample.

Settings, for DALI 2.4: readers take ``s3://`` URLs (release notes of 1.38); ``AWS_ENDPOINT_URL`` names the server (its
``s3_client_manager.h``; the documentation does not say). ``index_paths``, made by DALI's own ``wds2idx`` (user guide,
"Data Loading: Webdataset"), are local files; without them the reader would first read the headers of all members. It
asks for one range after the other over one connection, whatever ``num_threads`` says: seen with 8, and so in
``webdataset_loader.cc``. Its ``prefetch_queue_depth`` is raised, as its documentation recommends if the pipeline waits
for the reader. Batches come in the order of the files, so there is no shuffle buffer to fill.

An ``s3://`` bucket is read where the user's own ``AWS_*`` variables say. AIStore serves S3 below ``/s3``, and must
answer at the proxy's own address (see `_check_reads_ranges`). The first reader of a process makes its S3 client, so one
process reads from one server.
"""

import contextlib
import http.client
import shutil
import ssl
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

from bench.loaders.peers import dali_readers
from bench.loaders.peers.dali_readers import ReaderFiles
from bench.loaders.protocol import BenchLoader, LoaderOptions, Prepared
from bench.loaders.s3 import client_environment, s3_place
from dali_pipes.errors import DataError, PipesError, StoreError
from dali_pipes.store.shard_set import ShardSet

READER_PREFETCH = 4
"""Batches that the reader keeps ready."""
ANSWER_TIMEOUT_S = 10.0
_endpoint_in_use: str | None = None


def prepare(shards: ShardSet, *, directory: Path) -> None:
    """Write an index of each shard with DALI's ``wds2idx``, which reads a local copy, one at a time.

    Raises:
        DataError: If a shard holds no sample.
    """
    from wds2idx import IndexCreator

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


@contextlib.contextmanager
def open_loader(shards: ShardSet, *, options: LoaderOptions, prepared: Prepared) -> Iterator[BenchLoader]:
    """Open the reader on ``s3://`` URLs; each sample comes once an epoch, in the order of the files.

    Raises:
        PipesError: If this process has already read from another cluster in this way.
        StoreError: If the cluster does not answer a ranged GET at its own address.
    """
    url, bucket = s3_place(shards)
    if shards.store.endpoint is not None and url is not None:
        _check_reads_ranges(url, bucket, shards.names[0])
    files = ReaderFiles(
        kind="webdataset",
        paths=[f"s3://{bucket}/{name}" for name in shards.names],
        index_paths=[_index_path(Path(prepared.url), row) for row in range(len(shards.names))],
        prefetch_queue_depth=READER_PREFETCH,
    )
    with _environment(shards, url), dali_readers.open_loader(files, options=options) as loader:
        yield loader


def _check_reads_ranges(url: str, bucket: str, name: str) -> None:
    """Request the first bytes of a shard, because DALI's own errors contain neither a status nor a reason."""
    parts = urlsplit(url)
    if parts.scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only the status is used
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
            f"{where}: AIStore redirects a GET, which DALI's S3 client does not follow; make it answer itself: "
            "ais config cluster features S3-Reverse-Proxy"
        )
    if status in (401, 403):
        raise StoreError(
            f"{where}: AIStore refuses the request ({status}); DALI's S3 client does not send AIStore's token, so it "
            "reads from clusters without AuthN only"
        )
    if status != 206:
        raise StoreError(f"{where}: a ranged GET was answered with {status}, expected 206")


@contextlib.contextmanager
def _environment(shards: ShardSet, url: str | None) -> Iterator[None]:
    """Set the variables that configure DALI's client while the loader is open."""
    if url is None:
        yield  # Amazon's own: the client finds everything by itself
        return
    global _endpoint_in_use
    if _endpoint_in_use not in (None, url):
        raise PipesError(
            f"DALI's S3 client reads from '{_endpoint_in_use}' for the life of a process, got '{url}'; "
            "use a process for each cluster"
        )
    _endpoint_in_use = url
    with client_environment(shards, AWS_ENDPOINT_URL=url):
        yield


def _index_path(directory: Path, row: int) -> Path:
    return directory / f"{row:06d}.idx"
