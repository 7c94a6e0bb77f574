"""The files of a cache directory: whatever they hold, loaders read the right bytes and go on."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from dali_pipes.cache.files import cache_root
from tests.dali_pipes.cache.damage import Loader, copy, fill
from tests.fuzz.target import BrokenPromiseError, Target

KEY, OTHER = "a" * 32, "b" * 32


class _CacheFile(Target):
    """A file of a cache directory with two full cache files; "refused" is one that is fetched anew."""

    file: ClassVar[str]

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dali-pipes-fuzz-cache-")
        self._template, self._run = Path(self._folder.name) / "template", Path(self._folder.name) / "run"
        self._template.mkdir()
        fill(self._template, KEY, OTHER)

    def seeds(self) -> Sequence[bytes]:
        return [(cache_root(self._template) / self.file).read_bytes()]

    def check(self, data: bytes) -> Literal["taken", "refused"]:
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

    name = "cache-tables"
    file = f"{KEY}.table"


class CacheSlots(_CacheFile):
    """The table of a directory's loaders."""

    name = "cache-slots"
    file = "slots"
