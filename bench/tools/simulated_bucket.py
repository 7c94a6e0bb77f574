"""Serve a bucket of up to a million shards that exist nowhere: each is made from its number when it is asked for.

The server is the embedded node, over a storage that stores nothing. Its answers are those of AIStore and, below
``/s3``, of S3. `BODIES` different tars stand for all shards, so that the manifest's checksums are cheap to compute. The
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
from typing import BinaryIO, NamedTuple

import numpy as np
from PIL import Image

from bench.tools.repeat import encoded, write_shard
from dali_pipes.data_set.indexing import index_shard, sums_of
from dali_pipes.formats.manifest import Manifest, checksum
from dali_pipes.formats.names import INDEX_ENDING, MANIFEST_ENDING, index_name, manifest_name, start_of
from dali_pipes.formats.shard_index import ShardIndex
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


class SimulatedBucket(NamedTuple):
    """The running server, in threads of this process."""

    endpoint: str
    requests: Counter[str]
    """How many requests of each kind came so far: list, manifest, index, shard, redirect, other."""


@contextlib.contextmanager
def simulated_bucket(
    num_shards: int, *, shard_samples: int, page_latency_s: float = PAGE_LATENCY_S
) -> Iterator[SimulatedBucket]:
    """Run the server for less than 10**8 shards of so many samples, photos of 32 x 32 pixels with a class id.

    A page of a listing is answered after ``page_latency_s``.
    """
    requests: Counter[str] = Counter()
    lock = threading.Lock()

    def count(request: NodeConnection) -> None:
        kind = _kind(request)
        with lock:
            requests[kind] += 1
        if kind == "list":
            time.sleep(page_latency_s)

    with (
        tempfile.TemporaryDirectory(prefix="dali-pipes-simulated-") as folder,
        SimulatedStorage(Path(folder), num_shards, shard_samples=shard_samples) as storage,
        NodeServer(storage, port=0, before_request=count) as server,
    ):
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        before, wire.PAGE_SIZE = wire.PAGE_SIZE, PAGE_SIZE  # as many names as S3's pages have
        try:
            yield SimulatedBucket(server.endpoint, requests)
        finally:
            wire.PAGE_SIZE = before
            server.shutdown()
            thread.join()


class _Body(NamedTuple):
    """One of the tars that stand for all shards."""

    path: Path
    """The tar: a file, which the kernel sends."""
    num_bytes: int
    checksum: int
    shard_index: ShardIndex


class SimulatedStorage(Storage):
    """A bucket whose objects are made when they are opened. Nothing can be written."""

    def __init__(self, folder: Path, num_shards: int, *, shard_samples: int) -> None:
        super().__init__(folder)
        self.create_bucket(BUCKET)
        self.num_shards = num_shards
        self._bodies = [_make_body(folder / f"{kind}.tar", kind, shard_samples) for kind in range(BODIES)]
        # Two halves of each index, around the shard's name: a million are joined.
        self._halves = [body.shard_index.to_bytes().split(_shard_name(0).encode()) for body in self._bodies]
        self._manifest = folder / "manifest"
        self._manifest.write_bytes(self._make_manifest(shard_samples))

    def _make_manifest(self, shard_samples: int) -> bytes:
        """The manifest's file. It takes ten seconds for a million shards: each has an index of its own."""
        kinds = np.arange(self.num_shards) % BODIES
        totals = sums_of(body.shard_index for body in self._bodies)
        index_checksums = (checksum(self._index(number)) for number in range(self.num_shards))
        return Manifest(
            names=[_shard_name(number) for number in range(self.num_shards)],
            shard_bytes=np.array([body.num_bytes for body in self._bodies])[kinds],
            checksums=np.array([body.checksum for body in self._bodies], np.uint64)[kinds],
            samples=np.array([body.shard_index.num_samples for body in self._bodies])[kinds],
            index_bytes=np.array([len(self._index(kind)) for kind in range(BODIES)])[kinds],
            index_checksums=np.fromiter(index_checksums, np.uint64, self.num_shards),
            components=dict.fromkeys(totals["components"], shard_samples * self.num_shards),
            photos={PHOTO: {"JPEG": shard_samples * self.num_shards}},
            labels=totals["labels"],
            turned={},
        ).to_bytes()

    def open(self, bucket: str, name: str) -> tuple[BinaryIO, ObjectMeta]:
        meta = next(self.heads(bucket, [name]), None)
        if bucket != BUCKET or meta is None:
            raise ObjectMissingError(bucket, name)
        number = _number_of(name)
        if number is None:
            return self._manifest.open("rb", buffering=0), meta
        if name == _shard_name(number):
            return self._bodies[number % BODIES].path.open("rb", buffering=0), meta
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
        first, manifest = _number_of(after) or 0, manifest_name(PREFIX)
        shards = [_shard_name(number) for number in range(first, min(first + PAGE_SIZE + 2, self.num_shards))]
        # Nobody lists both kinds at once.
        is_before_shards = after < manifest and not prefix.startswith(PREFIX)
        names = [*map(index_name, shards), manifest] if is_before_shards else shards
        return [name for name in names if name.startswith(prefix) and name > after]

    def heads(self, bucket: str, names: Iterable[str]) -> Iterator[ObjectMeta]:
        self.created_ns(bucket)
        for name in names:
            number = _number_of(name)
            if name == manifest_name(PREFIX):
                yield _meta(name, self._manifest.stat().st_size, 0)
            elif number is not None and number < self.num_shards:
                body, index = self._bodies[number % BODIES], self._index(number)
                is_shard = name == _shard_name(number)
                size, value = (body.num_bytes, body.checksum) if is_shard else (len(index), checksum(index))
                yield _meta(name, size, value)

    def _index(self, number: int) -> bytes:
        return _shard_name(number).encode().join(self._halves[number % BODIES])


def _meta(name: str, num_bytes: int, value: int) -> ObjectMeta:
    return ObjectMeta(
        name=name,
        num_bytes=num_bytes,
        checksum=f"{value:016x}" if value else "",
        checksum_type=DEFAULT_CHECKSUM_TYPE if value else NO_CHECKSUM_TYPE,
        version=1,
        atime_ns=_MADE_NS,
    )


def _shard_name(number: int) -> str:
    return f"{PREFIX}{number:0{_DIGITS}d}.tar"


def _number_of(name: str) -> int | None:
    """The number of a shard, or of a shard's index; ``None`` for other names."""
    digits = start_of(name)[len(PREFIX) : len(PREFIX) + _DIGITS]
    if not digits.isdecimal():
        return None
    number = int(digits)
    return number if name in (_shard_name(number), index_name(_shard_name(number))) else None


def _make_body(path: Path, kind: int, shard_samples: int) -> _Body:
    draw = np.random.default_rng(kind)
    photo = encoded(Image.fromarray(draw.integers(0, 256, (32, 32, 3), np.uint8)), "JPEG", quality=50)
    members = (
        member
        for number in range(shard_samples)
        for member in ((f"{number:06d}.cls", str(1 + number % 9).encode()), (f"{number:06d}.{PHOTO}", photo))
    )
    write_shard(path, members)
    body = path.read_bytes()
    index = index_shard(io.BytesIO(body), shard=_shard_name(0), size=len(body))
    return _Body(path, len(body), checksum(body), index)


def _kind(request: NodeConnection) -> str:
    path, _, query = request.path.partition("?")
    if path.startswith("/v1/objects/") and "pid=" not in query:
        return "redirect"
    if request.command == "GET" and (path == f"/v1/buckets/{BUCKET}" or "list-type=2" in query):
        return "list"
    endings = {"shard": ".tar", "index": INDEX_ENDING, "manifest": MANIFEST_ENDING}
    kinds = [kind for kind, ending in endings.items() if path.endswith(ending)]
    return kinds[0] if kinds and request.command == "GET" else "other"
