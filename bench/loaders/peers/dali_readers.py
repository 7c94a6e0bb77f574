"""Load with DALI's own readers, like a script without `dali_pipes`: one pipeline has reader, decoders and crop.

Each epoch takes the shards in another order (``shuffle_after_epoch``). The samples of a shard keep theirs.

``dali-webdataset`` maps local shards, the reader's default. ``dali-s3`` reads a bucket's shards with ``s3://`` URLs
(DALI's release notes of 1.38): one ranged GET for each component of each sample, over one connection, whatever
``num_threads`` says. ``AWS_ENDPOINT_URL`` names the server. ``index_paths`` (user guide, "Data Loading: Webdataset")
are local files; without them the reader would first read the headers of all members. Its ``prefetch_queue_depth`` is
raised, as its documentation recommends if the pipeline waits for the reader. An ``s3://`` bucket is read where the
user's own ``AWS_*`` variables say. AIStore serves S3 below ``/s3``, and must answer at the proxy's own address (see
`_check_reads_ranges`). The first reader of a process makes its S3 client, so one process reads from one server.
"""

import contextlib
import re
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from bench.loaders.encoded import shard_urls
from bench.loaders.peers.plain_dali import (
    decoded_outputs,
    opened_pipeline,
    padded_keys,
    padded_text,
    plain_pipeline,
)
from bench.loaders.protocol import BenchLoader, LoaderOptions
from bench.loaders.s3 import client_environment, s3_place
from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.names import split_key
from dali_pipes.store.shard_set import ShardSet

if TYPE_CHECKING:
    from dali_pipes.formats.shard_index import ShardIndex
    from prep.inspect.indexed_set import IndexedSet

READ_AHEAD = 4  # batches
ANSWER_TIMEOUT_S = 10.0

READER = "reader"


@dataclass(frozen=True, kw_only=True)
class ReaderFiles:
    """The shards that DALI's reader reads."""

    paths: Sequence[Path | str]
    """Paths, or URLs if the reader takes them."""
    index_paths: Sequence[Path]


def webdataset_index(index: "ShardIndex") -> str:
    """Return a shard's index of all its components for `fn.readers.webdataset`, version 1.2."""
    lines = []
    for row, key in enumerate(index.keys):
        if key.split() != [key]:
            raise DataError(f"shard '{index.shard}', key '{key}': DALI's index cannot hold a name with white space")
        places = [(c, int(index.offsets[c][row]), int(index.sizes[c][row])) for c in index.offsets]
        lines.append(" ".join(f"{c} {offset} {size} {key}.{c}" for c, offset, size in places if offset >= 0))
    return "\n".join([f"v1.2 {len(lines)}", *lines, ""])


def write_webdataset_indexes(indexed: "IndexedSet", directory: Path) -> list[Path]:
    """Write the `webdataset_index` of each shard to a file in ``directory``."""
    paths = []
    for row, index in indexed.each():
        paths.append(directory / f"{row:06d}.idx")
        paths[-1].write_text(webdataset_index(index))
    return paths


def open_loader(files: ReaderFiles, *, options: LoaderOptions) -> contextlib.AbstractContextManager[BenchLoader]:
    """Read, decode and crop; each sample comes once an epoch."""
    from nvidia.dali import fn

    device = options.delivery_device
    pipeline = plain_pipeline(device, options)
    with pipeline:
        photo, mask, label, key = reader_nodes(files, options, shuffle_after_epoch=True)
        decoded = decoded_outputs(photo, mask, options, device=device)
        outputs = [*decoded, fn.pad(label), fn.pad(key)]  # the rows of a tensor must have one length
    return opened_pipeline(pipeline, outputs, options=options, labels=_labels, keys=keys_of(files), reader_name=READER)


def reader_nodes(files: ReaderFiles, options: LoaderOptions, **arguments: Any) -> tuple[Any, Any, Any, Any]:
    """Return the nodes of photo, mask (``None`` if the recipe takes none), label and key.

    ``arguments`` are further ones of the reader.
    """
    from nvidia.dali import fn

    masks = [] if options.mask is None else [options.mask]
    photo, *mask, label = fn.readers.webdataset(
        paths=[str(path) for path in files.paths],
        index_paths=[str(path) for path in files.index_paths],
        ext=[options.photo, *masks, "cls"],
        missing_component_behavior="error",
        prefetch_queue_depth=READ_AHEAD,
        **{"pad_last_batch": True, "name": READER, **arguments},
    )
    return photo, next(iter(mask), None), label, fn.get_property(photo, key="source_info")


def _labels(digits: Any) -> Any:
    """Convert the reader's padded labels to int64 [B]."""
    import torch

    return torch.tensor([int(padded_text(row)) for row in digits.numpy()])


def keys_of(files: ReaderFiles) -> Callable[[Any], list[str]]:
    """Return the function that converts padded names, ``PATH:OFFSET:KEY.COMPONENT``, to keys."""
    path_of = re.compile("|".join(re.escape(f"{path}:") for path in files.paths))

    def key_of(text: str) -> str:
        path = path_of.match(text)
        assert path is not None, "the reader names its files"
        names = split_key(text[path.end() :].partition(":")[2])
        assert names is not None, "our index names members of samples"
        return names[0]

    return lambda rows: [key_of(text) for text in padded_keys(rows)]


def prepare_index(shards: ShardSet, *, directory: Path) -> None:
    """Write an index of each shard for DALI's reader, from the index beside the shards."""
    from prep.inspect.indexed_set import IndexedSet

    write_webdataset_indexes(IndexedSet(shards), directory)


def open_local(
    shards: ShardSet, *, options: LoaderOptions, place: str
) -> contextlib.AbstractContextManager[BenchLoader]:
    files = ReaderFiles(paths=shard_urls(shards), index_paths=sorted(Path(place).glob("*.idx")))
    return open_loader(files, options=options)


@contextlib.contextmanager
def open_s3(shards: ShardSet, *, options: LoaderOptions, place: str) -> Iterator[BenchLoader]:
    """Open the reader on ``s3://`` URLs, with the indexes in the directory ``place``."""
    url, bucket = s3_place(shards)
    if shards.store.endpoint is not None and url is not None and url.startswith("http://"):
        _check_reads_ranges(f"{url}/{bucket}/{quote(shards.names[0])}")
    files = ReaderFiles(
        paths=[f"s3://{bucket}/{name}" for name in shards.names],
        index_paths=sorted(Path(place).glob("*.idx")),
    )
    with client_environment(shards, AWS_ENDPOINT_URL=url), open_loader(files, options=options) as loader:
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
