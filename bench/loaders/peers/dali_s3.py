"""Load a bucket's shards with DALI's own ``s3://`` reader: one ranged GET for each component of each sample.

Settings, for DALI 2.4: readers take ``s3://`` URLs (release notes of 1.38); ``AWS_ENDPOINT_URL`` names the server (its
``s3_client_manager.h``; the documentation does not say). ``index_paths`` (user guide, "Data Loading: Webdataset") are
local files; without them the reader would first read the headers of all members. It asks for one range after the other
over one connection, whatever ``num_threads`` says: seen with 8, and so in ``webdataset_loader.cc``. Its
``prefetch_queue_depth`` is raised, as its documentation recommends if the pipeline waits for the reader. Batches come
in the order of the files, so there is no shuffle buffer to fill.

An ``s3://`` bucket is read where the user's own ``AWS_*`` variables say. AIStore serves S3 below ``/s3``, and must
answer at the proxy's own address (see `_check_reads_ranges`). The first reader of a process makes its S3 client, so one
process reads from one server.
"""

import contextlib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from bench.loaders.peers import dali_readers
from bench.loaders.peers.dali_readers import ReaderFiles
from bench.loaders.protocol import BenchLoader, LoaderOptions, Prepared
from bench.loaders.s3 import client_environment, s3_place
from dali_pipes.errors import StoreError
from dali_pipes.store.shard_set import ShardSet

READER_PREFETCH = 4
"""Batches that the reader keeps ready."""
ANSWER_TIMEOUT_S = 10.0


def prepare(shards: ShardSet, *, directory: Path) -> None:
    """Write an index of each shard for DALI's reader, from the index beside the shards."""
    from prep.inspect.indexed_set import IndexedSet

    dali_readers.write_webdataset_indexes(IndexedSet(shards), directory)


@contextlib.contextmanager
def open_loader(shards: ShardSet, *, options: LoaderOptions, prepared: Prepared) -> Iterator[BenchLoader]:
    """Open the reader on ``s3://`` URLs; each sample comes once an epoch, in the order of the files."""
    url, bucket = s3_place(shards)
    if shards.store.endpoint is not None and url is not None and url.startswith("http://"):
        _check_reads_ranges(f"{url}/{bucket}/{quote(shards.names[0])}")
    files = ReaderFiles(
        kind="webdataset",
        paths=[f"s3://{bucket}/{name}" for name in shards.names],
        index_paths=sorted(Path(prepared.url).glob("*.idx")),
        prefetch_queue_depth=READER_PREFETCH,
    )
    with (
        client_environment(shards, AWS_ENDPOINT_URL=url),
        dali_readers.open_loader(files, options=options) as loader,
    ):
        yield loader


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Follow none, as DALI's client does."""


def _check_reads_ranges(url: str) -> None:
    """Request the first bytes of a shard, because DALI's own errors contain neither a status nor a reason."""
    request = urllib.request.Request(url, headers={"Range": "bytes=0-511"})  # noqa: S310 (http)
    try:
        urllib.request.build_opener(_NoRedirects).open(request, timeout=ANSWER_TIMEOUT_S).close()
    except OSError as exc:
        raise StoreError(
            f"'{url}': a ranged GET failed ({exc}). DALI's S3 client follows no redirect and sends no AIStore token: "
            "AIStore must answer itself, without AuthN: ais config cluster features S3-Reverse-Proxy"
        ) from exc
