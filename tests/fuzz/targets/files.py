"""Files that a data set, a cache or a source has: broken ones are refused, or read as they are."""

import contextlib
import io
import tarfile
import tempfile
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dali_pipes.cache.files import cache_root
from dali_pipes.data_set.indexing import index_shard
from dali_pipes.errors import DataError, PipesError
from dali_pipes.formats.manifest import Change, Manifest, ShardsPart
from dali_pipes.formats.shard_index import ShardIndex
from prep.sources.record import as_entry
from prep.tar.writer import Range
from tests.dali_pipes.cache.damage import Loader, copy, fill
from tests.fuzz.target import Answer, BrokenPromiseError, Target
from tests.shards import files_of, hf, make_samples, write_shards
from tests.simulated import read_column_file


def _tar(kind: int, folder: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=kind) as archive:
        archive.addfile(_member(tarfile.DIRTYPE, folder or "folder"))
        for sample in make_samples([(9, 8), (8, 9)]):
            for component, data in sample.components.items():
                member = _member(tarfile.REGTYPE, f"{folder}/{sample.key}.{component}".strip("/"))
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def _member(kind: bytes, name: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = kind
    return member


SHARD = "s-000000.tar"


class Archives(Target):
    """`index_shard` refuses a tar, or its index names members that are there."""

    def seeds(self) -> Sequence[bytes]:
        """Samples of a photo, a class id and a mask; long and non-ASCII names."""
        return [_tar(tarfile.USTAR_FORMAT, ""), _tar(tarfile.GNU_FORMAT, "x" * 120), _tar(tarfile.PAX_FORMAT, "é" * 90)]

    def check(self, data: bytes) -> Answer:
        try:
            index = index_shard(io.BytesIO(data), shard=SHARD, size=len(data))
        except DataError:
            return "refused"
        _check_places(index, data)
        if ShardIndex.from_bytes(index.to_bytes(), where=SHARD).keys != index.keys:
            raise BrokenPromiseError("the index has other keys when it is read again")
        return "taken"


def _check_places(index: ShardIndex, data: bytes) -> None:
    found = set(_members(data))
    last = max((offset for offset, _ in found), default=0)
    for component, offsets in index.offsets.items():
        for offset, size in zip(offsets.tolist(), index.sizes[component].tolist(), strict=True):
            if offset < 0:
                continue
            if offset % 512 or offset + size > len(data):
                raise BrokenPromiseError(f"{component} at {offset} with {size} bytes lies outside of {len(data)} bytes")
            # `tarfile` ends without an error at a member whose date or owner is not a number.
            if offset <= last and (offset, size) not in found:
                raise BrokenPromiseError(f"{component} at {offset} with {size} bytes is no member of the tar")


def _members(data: bytes) -> list[tuple[int, int]]:
    """Places of the members, up to the first header that `tarfile` cannot read."""
    places: list[tuple[int, int]] = []
    with contextlib.suppress(tarfile.ReadError), tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        # `tarfile` wants a member after a global PAX header, too.
        places.extend((member.offset_data, member.size) for member in archive)
    return places


class FormatTarget(Target):
    """A file that is refused with an error of ours, or read; what was read can be written, and read again."""

    @cached_property
    def files(self) -> dict[str, bytes]:
        """Name -> bytes, of a data set of two shards."""
        with tempfile.TemporaryDirectory(prefix="dali-pipes-seeds-") as folder:
            path = write_shards(Path(folder) / "s", make_samples([(9, 8)] * 5), per_shard=3)
            return files_of(path)

    def check(self, data: bytes) -> Answer:
        try:
            first = self.read(data)
        except PipesError:
            return "refused"
        if self.read(first) != first:
            raise BrokenPromiseError("the file has another content when it is written and read again")
        return "taken"

    @abstractmethod
    def read(self, data: bytes) -> bytes:
        """Read a file and write it again."""


class Manifests(FormatTarget):
    """`Manifest.from_bytes`."""

    def seeds(self) -> Sequence[bytes]:
        data = self.files[".dali-pipes/s-manifest.safetensors"]
        first = Manifest.from_bytes(data, where="m")
        texts = {"what": "add"} | dict.fromkeys(("date", "token", "command", "digest"), "")
        history = tuple(Change(version=version, num_samples=5, num_shards=2, **texts) for version in (1, 2))
        parts = (ShardsPart("", 1), ShardsPart("add-0123456789-", 1))
        second = replace(first, version=2, parts=parts, history=history, removed=np.array([1, 4]))
        return [data, second.to_bytes()]

    def read(self, data: bytes) -> bytes:
        return Manifest.from_bytes(data, where="m").to_bytes()


class ShardIndexes(FormatTarget):
    """`ShardIndex.from_bytes`."""

    def seeds(self) -> Sequence[bytes]:
        return [data for name, data in self.files.items() if name.endswith(".index.safetensors")]

    def read(self, data: bytes) -> bytes:
        return ShardIndex.from_bytes(data, where="i").to_bytes()


class ColumnFiles(FormatTarget):
    """Column files, read whole."""

    def seeds(self) -> Sequence[bytes]:
        return [self.files[".dali-pipes/s-columns.safetensors"]]

    def read(self, data: bytes) -> bytes:
        manifest = Manifest.from_bytes(self.files[".dali-pipes/s-manifest.safetensors"], where="m")
        return read_column_file(data, manifest=manifest).to_bytes(manifest=manifest.shards_digest)


def parquet(rows: list[dict[str, Any]]) -> bytes:
    """A Parquet file of these rows, in row groups of two."""
    import pyarrow
    import pyarrow.parquet

    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), stream, row_group_size=2)
    return stream.getvalue()


class ParquetFiles(Target):
    """`hf`, and the parts of its records."""

    num_daily = 200

    def seeds(self) -> Sequence[bytes]:
        photos = [{"bytes": b"\xff\xd8\xff" + bytes(range(number, 200)), "path": None} for number in range(5)]
        rows = [{"image": photo, "label": at, "text": f"photo {at}"} for at, photo in enumerate(photos)]
        return [parquet(rows)]

    def check(self, data: bytes) -> Answer:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a.parquet"
            path.write_bytes(data)
            try:
                source = hf([path], components={"caption.txt": "text"})
                for record in source.records:
                    _, parts = as_entry(record, source)
                    for _, part in parts:
                        if isinstance(part, Range) and _length(part) != part.size:
                            raise BrokenPromiseError("a cell has another number of bytes than was found")
            except PipesError:
                return "refused"
        return "taken"


def _length(part: Range) -> int:
    assert not isinstance(part.file, Path), "cells are no files"
    done, num = 0, 1
    while num and done < part.size:
        num = part.file.read_into(memoryview(bytearray(part.size - done)), offset=part.offset + done)
        done += num
    return done


KEY, OTHER = "a" * 32, "b" * 32


class _CacheFile(Target):
    """A file of a cache directory with two full cache files; "refused" is one that is fetched anew."""

    num_daily = 30

    file: ClassVar[str]

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dali-pipes-fuzz-cache-")
        self._template, self._run = Path(self._folder.name) / "template", Path(self._folder.name) / "run"
        self._template.mkdir()
        fill(self._template, KEY, OTHER)

    def seeds(self) -> Sequence[bytes]:
        return [(cache_root(self._template) / self.file).read_bytes()]

    def check(self, data: bytes) -> Answer:
        copy(self._template, self._run)
        (cache_root(self._run) / self.file).write_bytes(data)
        is_refused = False
        for key in (KEY, OTHER):
            loader = Loader(self._run, key)
            is_refused |= loader.hold_all() > 0
            if wrong := loader.wrong():
                raise BrokenPromiseError(f"a loader believes wrong bytes of shards {wrong}")
            loader.close()
        return "refused" if is_refused else "taken"

    def close(self) -> None:
        self._folder.cleanup()


class CacheTables(_CacheFile):
    """The table of one cache file."""

    file = f"{KEY}.table"


class CacheSlots(_CacheFile):
    """The table of a directory's loaders."""

    file = "slots"
