"""Data sets in a directory or a bucket, made from class folders, and stores that fail."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dali_pipes.data_set.data_set import DataSet
from dali_pipes.data_set.named import name_shards
from dali_pipes.store.base import Store
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import open_store, resolve_shards
from prep.index import index_shards
from prep.pack.pack import open_target
from prep.sources.folders import imagefolder
from prep.versions.add import AddReport, add
from prep.versions.publish import Newest, open_newest
from prep.versions.remove import CompactReport, RemoveReport, compact, remove
from tests.shards import contents_of, pack, photo_bytes


class Place(NamedTuple):
    """A data set, by the beginning of its shards' URLs."""

    url: str
    endpoint: str | None

    @property
    def store(self) -> Store:
        return open_store(self.url, endpoint=self.endpoint)[0]

    def newest(self) -> Newest:
        return open_newest(self.url, endpoint=self.endpoint)

    def open(self, version: str = "") -> DataSet:
        return DataSet(name_shards(f"{self.url}{version}", endpoint=self.endpoint))

    def keys(self, version: str = "") -> list[str]:
        """The keys of the samples that are not removed, in order."""
        data_set = self.open(version)
        removed = set(data_set.manifest.removed.tolist())
        return [key for row, key in enumerate(data_set.columns().samples.keys) if row not in removed]

    def add(self, folder: Path, **options: Any) -> AddReport:
        return add(imagefolder(folder), self.newest(), **options)

    def remove(self, *keys: str, **options: Any) -> RemoveReport:
        return remove(self.newest(), keys=keys, **options)

    def compact(self, **options: Any) -> CompactReport:
        return compact(self.newest(), **options)

    def objects(self) -> dict[str, bytes]:
        """Name -> bytes of all that lies in the store."""
        return contents_of(self.store)


def class_folders(directory: Path, names: dict[str, int], *, first: int = 0) -> Path:
    """Photos of these classes: name -> number."""
    for name, number in names.items():
        (directory / name).mkdir(parents=True)
        for row in range(first, first + number):
            (directory / name / f"{row:03d}.jpg").write_bytes(photo_bytes(row, 40, 30))
    return directory


def make_set(folder: Path, place: Place, *, per_shard: int = 2) -> Place:
    """Pack and index the class folders."""
    store, prefix = open_target(place.url, endpoint=place.endpoint)
    pack(imagefolder(folder), store=store, prefix=prefix, max_count=per_shard)
    index_shards(resolve_shards(place.url, endpoint=place.endpoint))
    return place


class StoppedError(Exception):
    """The process is killed here."""


_WRITES: tuple[tuple[type, str], ...] = (
    (LocalStore, "write"),
    (LocalStore, "write_new"),
    (LocalStore, "write_stream"),
    (LocalStore, "delete"),
    (AisStore, "write"),
    (AisStore, "delete"),
    (AisStore, "write_stream"),
)
"""What changes a store. (A bucket's `write_new` is some of these.)"""


@contextmanager
def stopped_at(number: int) -> Iterator[None]:
    """Stop the process before the change of a store with this number, from 0."""
    changes = 0

    def stopping(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any, **options: Any) -> Any:
            nonlocal changes
            changes += 1
            if changes > number:
                raise StoppedError  # also for what a finally block would change
            return change(*arguments, **options)

        return changed

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in _WRITES:
            patch.setattr(owner, name, stopping(getattr(owner, name)))
        yield


def copy_set(source: Place, target: Place) -> Place:
    """The same objects in another place."""
    if target.endpoint is None:
        shutil.copytree(Path(source.url).parent, Path(target.url).parent)
        return target
    target.store.create()
    for name, data in source.objects().items():
        target.store.write(name, data)
    return target
