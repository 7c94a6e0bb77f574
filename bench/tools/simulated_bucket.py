"""Serve a bucket of up to a million shards that exist nowhere: each is made from its number when it is asked for.

The server is the embedded node, over a storage that stores nothing. Its answers are those of AIStore and, below
``/s3``, of S3: listings of 1,000 names a page, redirects, ranges, checksums. So loaders and commands read the bucket as
any other. `BODIES` different tars stand for all shards, so that the manifest's checksums are cheap to compute. The
index of each shard has the shard's own name.
"""

import contextlib
import io
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
from PIL import Image

from bench.tools.repeat import encoded, write_shard
from dali_pipes.data_set.indexing import index_shard, sums_of
from dali_pipes.formats.manifest import Manifest, checksum
from dali_pipes.formats.names import index_name, manifest_name
from dali_pipes.store.checksums import DEFAULT_CHECKSUM_TYPE, NO_CHECKSUM_TYPE
from prep.embedded import wire
from prep.embedded.connection import NodeConnection
from prep.embedded.server import NodeServer
from prep.embedded.storage import BucketProps, ObjectMeta, ObjectMissingError, Storage

BUCKET, PREFIX, PHOTO = "simulated", "shard-", "image.jpg"
BODIES = 4
PAGE_SIZE, PAGE_LATENCY_S = 1000, 0.02
_DIGITS = 8
_MADE_NS = 1_700_000_000 * 10**9


class SimulatedBucket:
    """The running server, in threads of this process; a context manager.

    Args:
        num_shards: Shards of the bucket.
        shard_samples: Samples of each: photos of 32 x 32 pixels with a class id.
        page_latency_s: Seconds until a page of a listing is answered.
    """

    endpoint: str

    def __init__(self, num_shards: int, *, shard_samples: int, page_latency_s: float = PAGE_LATENCY_S) -> None:
        if not 1 <= num_shards < 10**_DIGITS or shard_samples < 1:
            raise ValueError(
                f"num_shards must be in [1, 10**{_DIGITS}) and shard_samples at least 1, got {num_shards} and "
                f"{shard_samples}"
            )
        self._num_shards, self._shard_samples, self._page_latency_s = num_shards, shard_samples, page_latency_s
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        folder = self._open.enter_context(tempfile.TemporaryDirectory(prefix="dali-pipes-simulated-"))
        storage = SimulatedStorage(Path(folder), self._num_shards, shard_samples=self._shard_samples)
        self._open.enter_context(_page_size())
        self._open.enter_context(storage)
        server = self._open.enter_context(NodeServer(storage, port=0, before_request=self._count))
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        self._open.callback(thread.join)
        self._open.callback(server.shutdown)
        self.endpoint = server.endpoint
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def counts(self) -> Counter[str]:
        """How many requests of each kind came so far: list, manifest, columns, index, shard, redirect, other."""
        with self._lock:
            return Counter(self._counts)

    def _count(self, request: NodeConnection) -> None:
        kind = _kind(request)
        with self._lock:
            self._counts[kind] += 1
        if kind == "list":
            time.sleep(self._page_latency_s)


@contextlib.contextmanager
def _page_size() -> Iterator[None]:
    """Give the pages of AIStore's listings as many names as S3's."""
    before, wire.PAGE_SIZE = wire.PAGE_SIZE, PAGE_SIZE
    try:
        yield
    finally:
        wire.PAGE_SIZE = before


class SimulatedStorage(Storage):
    """A bucket whose objects are made when they are opened. Nothing can be written."""

    def __init__(self, folder: Path, num_shards: int, *, shard_samples: int) -> None:
        super().__init__(folder)
        self.create_bucket(BUCKET)
        self.num_shards = num_shards
        self._bodies = [_tar_body(number, shard_samples) for number in range(BODIES)]
        self._shard_indexes = [
            index_shard(io.BytesIO(body), shard=shard_name(0), size=len(body)) for body in self._bodies
        ]
        self._checksums = [checksum(body) for body in self._bodies]
        self._indexes = [index.to_bytes().split(shard_name(0).encode()) for index in self._shard_indexes]
        # In files: the kernel sends them.
        self._files = [folder / f"{kind}.tar" for kind in range(BODIES)]
        for path, body in zip(self._files, self._bodies, strict=True):
            path.write_bytes(body)
        self._manifest = folder / "manifest"
        self._manifest.write_bytes(self._make_manifest(shard_samples))

    def _make_manifest(self, shard_samples: int) -> bytes:
        """The manifest's file. It takes ten seconds for a million shards: each has an index of its own."""
        kinds = np.arange(self.num_shards) % BODIES
        names = [shard_name(number) for number in range(self.num_shards)]
        totals = sums_of(self._shard_indexes[kind] for kind in range(BODIES))
        return Manifest(
            names=names,
            shard_bytes=np.array([len(body) for body in self._bodies])[kinds],
            checksums=np.array(self._checksums, np.uint64)[kinds],
            samples=np.array([index.num_samples for index in self._shard_indexes])[kinds],
            index_bytes=np.array([len(self._index(kind)) for kind in range(BODIES)])[kinds],
            index_checksums=np.fromiter((checksum(self._index(n)) for n in range(len(names))), np.uint64, len(names)),
            components=dict.fromkeys(totals["components"], shard_samples * self.num_shards),
            photos={PHOTO: {"JPEG": shard_samples * self.num_shards}},
            labels=totals["labels"],
            turned={},
        ).to_bytes()

    def open(self, bucket: str, name: str) -> tuple[BinaryIO, ObjectMeta]:
        meta = next(self.heads(bucket, [name]), None)
        if bucket != BUCKET or meta is None:
            raise ObjectMissingError(bucket, name)
        number = number_of(name)
        if number is None:
            return self._manifest.open("rb", buffering=0), meta
        if name == shard_name(number):
            return self._files[number % BODIES].open("rb", buffering=0), meta
        return io.BytesIO(self._index(number)), meta

    def head(self, bucket: str, name: str) -> ObjectMeta:
        file, meta = self.open(bucket, name)
        file.close()
        return meta

    def bucket_props(self, bucket: str) -> BucketProps:
        self.created_ns(bucket)
        return BucketProps()

    def list_names(self, bucket: str, *, prefix: str = "", after: str = "") -> list[str]:
        self.created_ns(bucket)
        number = number_of(after)
        first = 0 if number is None else number
        names: list[str] = []
        for each in range(first, min(first + PAGE_SIZE, self.num_shards)):
            names += [index_name(shard_name(each)), shard_name(each)]
        if first + PAGE_SIZE >= self.num_shards:
            names.append(manifest_name(PREFIX))
        return [name for name in names if name.startswith(prefix) and name > after]

    def heads(self, bucket: str, names: Iterable[str]) -> Iterator[ObjectMeta]:
        self.created_ns(bucket)
        for name in names:
            number = number_of(name)
            if name == manifest_name(PREFIX):
                yield _meta(name, self._manifest.stat().st_size, 0)
            elif number is not None and number < self.num_shards:
                kind = number % BODIES
                is_shard = name == shard_name(number)
                yield _meta(
                    name,
                    len(self._bodies[kind] if is_shard else self._index(number)),
                    self._checksums[kind] if is_shard else checksum(self._index(number)),
                )

    def _index(self, number: int) -> bytes:
        return shard_name(number).encode().join(self._indexes[number % BODIES])


def _meta(name: str, num_bytes: int, value: int) -> ObjectMeta:
    return ObjectMeta(
        name=name,
        num_bytes=num_bytes,
        checksum=f"{value:016x}" if value else "",
        checksum_type=DEFAULT_CHECKSUM_TYPE if value else NO_CHECKSUM_TYPE,
        version=1,
        atime_ns=_MADE_NS,
    )


def shard_name(number: int) -> str:
    return f"{PREFIX}{number:0{_DIGITS}d}.tar"


def number_of(name: str) -> int | None:
    """The number of a shard, or of a shard's index; ``None`` for other names."""
    digits = name[len(PREFIX) : len(PREFIX) + _DIGITS]
    if not (name.startswith(PREFIX) and digits.isdecimal() and len(digits) == _DIGITS):
        return None
    number = int(digits)
    return number if name in (shard_name(number), index_name(shard_name(number))) else None


def _tar_body(kind: int, shard_samples: int) -> bytes:
    draw = np.random.default_rng(kind)
    photo = encoded(Image.fromarray(draw.integers(0, 256, (32, 32, 3), np.uint8)), "JPEG", quality=50)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard.tar"
        members = [
            member
            for number in range(shard_samples)
            for member in ((f"{number:06d}.cls", str(1 + number % 9).encode()), (f"{number:06d}.{PHOTO}", photo))
        ]
        write_shard(path, members)
        return path.read_bytes()


def _kind(request: NodeConnection) -> str:
    path, _, query = request.path.partition("?")
    name = path.rpartition("/")[2]
    if path.startswith("/v1/objects/") and "pid=" not in query:
        return "redirect"
    if request.command == "GET" and (path == f"/v1/buckets/{BUCKET}" or "list-type=2" in query):
        return "list"
    for kind, ending in {"shard": ".tar", "index": index_name("").lstrip("-"), "manifest": manifest_name("")}.items():
        if request.command == "GET" and name.endswith(ending):
            return kind
    return "other"
