"""The files that describe a data set: a broken one is refused, or it is a valid one."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal

import numpy as np

from dali_pipes.errors import PipesError
from dali_pipes.formats.manifest import Change, Manifest, ShardsPart
from dali_pipes.formats.shard_index import ShardIndex
from tests.fuzz.seeds.data_sets import IndexFiles, index_files
from tests.fuzz.target import BrokenPromiseError, Target
from tests.simulated import read_column_file


class FormatTarget(Target):
    """A file that is refused with an error of ours, or read; what was read can be written, and read again."""

    @cached_property
    def files(self) -> IndexFiles:
        return index_files()

    def check(self, data: bytes) -> Literal["taken", "refused"]:
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

    name = "manifests"

    def seeds(self) -> Sequence[bytes]:
        first = Manifest.from_bytes(self.files.manifest, where="m")
        entries = [
            Change(version=version, date="", what="add", token="", command="", num_samples=5, num_shards=2, digest="")
            for version in (1, 2)
        ]
        parts = (ShardsPart("", 1), ShardsPart("add-0123456789-", 1))
        second = replace(first, version=2, parts=parts, history=tuple(entries), removed=np.array([1, 4]))
        return [self.files.manifest, second.to_bytes()]

    def read(self, data: bytes) -> bytes:
        return Manifest.from_bytes(data, where="m").to_bytes()


class ShardIndexes(FormatTarget):
    """`ShardIndex.from_bytes`."""

    name = "shard-indexes"

    def seeds(self) -> Sequence[bytes]:
        return self.files.indexes

    def read(self, data: bytes) -> bytes:
        return ShardIndex.from_bytes(data, where="i").to_bytes()


class ColumnFiles(FormatTarget):
    """Column files, read whole."""

    name = "column-files"

    def seeds(self) -> Sequence[bytes]:
        return [self.files.columns]

    def read(self, data: bytes) -> bytes:
        manifest = Manifest.from_bytes(self.files.manifest, where="m")
        return read_column_file(data, manifest=manifest).to_bytes(manifest=manifest.shards_digest)
