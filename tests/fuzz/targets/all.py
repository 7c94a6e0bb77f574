"""All targets, by name; and those that fail on purpose, which the harness must see."""

import os
import signal
import time
from collections.abc import Callable, Sequence

from tests.fuzz.target import Answer, BrokenPromiseError, Target
from tests.fuzz.targets.files import (
    Archives,
    CacheSlots,
    CacheTables,
    ColumnFiles,
    Manifests,
    ParquetFiles,
    ShardIndexes,
)
from tests.fuzz.targets.http import ListingAnswers, NodeRequests, ObjectAnswers
from tests.fuzz.targets.photos import PhotoBatches, Photos
from tests.fuzz.targets.texts import Annotations, Texts

TARGETS: dict[str, Callable[[], Target]] = {
    "photos": Photos,
    "photo-batches": PhotoBatches,
    "archives": Archives,
    "manifests": Manifests,
    "shard-indexes": ShardIndexes,
    "column-files": ColumnFiles,
    "parquet": ParquetFiles,
    "texts": Texts,
    "annotations": Annotations,
    "cache-tables": CacheTables,
    "cache-slots": CacheSlots,
    "node-requests": NodeRequests,
    "http-answers": ObjectAnswers,
    "http-listings": ListingAnswers,
}
SEED = b"a valid input"


class _Broken(Target):
    def __init__(self, fail: Callable[[], object]) -> None:
        self._fail = fail

    def seeds(self) -> Sequence[bytes]:
        return [SEED]

    def check(self, data: bytes) -> Answer:
        if data != SEED:
            self._fail()
        return "taken"


def _lie() -> None:
    raise BrokenPromiseError("a wrong byte")


def _not_start() -> Target:
    raise OSError("no room")


BROKEN: dict[str, Callable[[], Target]] = {
    "cannot-start": _not_start,
    "crashes": lambda: _Broken(lambda: os.kill(os.getpid(), signal.SIGSEGV)),  # as a decoder in C does
    "hangs": lambda: _Broken(lambda: time.sleep(3600)),
    "lies": lambda: _Broken(_lie),
}
