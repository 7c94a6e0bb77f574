"""All targets, by name; and those that fail on purpose, which the harness must see."""

import importlib
import os
import signal
import time
from collections.abc import Callable, Sequence

from tests.fuzz.target import Answer, BrokenPromiseError, Target, watch

_CLASSES = {
    "photos": "photos.Photos",
    "photo-batches": "photos.PhotoBatches",
    "archives": "files.Archives",
    "manifests": "files.Manifests",
    "shard-indexes": "files.ShardIndexes",
    "column-files": "files.ColumnFiles",
    "parquet": "files.ParquetFiles",
    "texts": "texts.Texts",
    "lists": "lists.Lists",
    "annotations": "texts.Annotations",
    "cache-tables": "files.CacheTables",
    "cache-slots": "files.CacheSlots",
    "node-requests": "node.NodeRequests",
    "http-answers": "http.ObjectAnswers",
    "http-listings": "http.ListingAnswers",
}


def _maker(path: str, *arguments: str) -> Callable[[], Target]:
    """A function that imports the module when it is called, because some modules need DALI."""
    module, _, name = path.partition(".")

    def make() -> Target:
        target: Target = getattr(importlib.import_module(f"tests.fuzz.targets.{module}"), name)(*arguments)
        return target

    return make


TARGETS = {name: _maker(path) for name, path in _CLASSES.items()}
for _cloud in ("s3", "gs", "az"):
    TARGETS[f"{_cloud}-answers"] = _maker("http.ObjectAnswers", _cloud)
    TARGETS[f"{_cloud}-listings"] = _maker("http.ListingAnswers", _cloud)
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
    raise BrokenPromiseError("a wrong byte", files={"photo.bin": b"a photo"})


BROKEN: dict[str, Callable[[], Target]] = {
    "crashes": lambda: _Broken(lambda: os.kill(os.getpid(), signal.SIGSEGV)),  # as a decoder in C does
    "hangs": lambda: _Broken(lambda: (watch(0.1), time.sleep(3600))),
    "lies": lambda: _Broken(_lie),
}
