"""Files of text: each reader takes one or refuses it with an error of ours, whatever kind of file it is."""

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dali_pipes.data_set.indexing import parse_label, read_class_table
from dali_pipes.errors import PipesError
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.quarantine import read_exclusions
from dali_pipes.order.state import LoaderState
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_names import expand_braces
from dali_pipes.tuning import Tuning
from prep.shuffle.key_map import parse_key_map
from prep.shuffle.request import read_spec
from tests.fuzz.seeds.texts import SHARD, texts
from tests.fuzz.target import BrokenPromiseError, Target
from tests.sources import table

SPECS = ("spec.json", "spec.yaml")
TABLES = ("t.csv", "t.tsv", "t.json", "t.jsonl")


class Texts(Target):
    """Every reader gets every input: a file may lie where another kind is expected."""

    name = "texts"

    @cached_property
    def _folder(self) -> "tempfile.TemporaryDirectory[str]":
        return tempfile.TemporaryDirectory(prefix="dali-pipes-fuzz-texts-")

    def close(self) -> None:
        self._folder.cleanup()

    def seeds(self) -> Sequence[bytes]:
        return texts()

    def check(self, data: bytes) -> Literal["taken", "refused"]:
        _is_taken(lambda: _names(data))  # takes almost any text, as one name
        return "taken" if self.takers(data) else "refused"

    def takers(self, data: bytes) -> list[str]:
        """Give the input to all readers, and return the names of those that take it."""
        readers = self._readers(data)
        return [name for name, read in readers.items() if _is_taken(read)]

    def _readers(self, data: bytes) -> dict[str, Callable[[], Any]]:
        folder = Path(self._folder.name)
        for name in ("bad.tsv", "tuning.json", "s-classes.json", *SPECS, *TABLES):
            (folder / name).write_bytes(data)
        return {
            "quarantine": lambda: read_exclusions(folder / "bad.tsv"),
            "class table": lambda: _check_classes(folder),
            "tuning": lambda: Tuning.read(folder / "tuning.json"),
            "state": lambda: _state(data),
            "key map": lambda: parse_key_map(data, where="map"),
            "label": lambda: parse_label(data, shard=SHARD, key="a"),
            **{name: partial(read_spec, folder / name) for name in SPECS},
            **{name: partial(_records, folder / name) for name in TABLES},
        }


def _is_taken(read: Callable[[], Any]) -> bool:
    try:
        read()
    except PipesError as exc:
        if not str(exc).isprintable() or len(str(exc)) > 10_000:
            raise BrokenPromiseError(f"an error that cannot be shown: {str(exc)[:200]!r}") from exc
        return False
    return True


def _records(path: Path) -> None:
    for record in table(path).records:
        assert record.key


def _check_classes(folder: Path) -> None:
    """A class table that was taken goes into a manifest, which can be read."""
    classes = read_class_table(LocalStore(folder), "s-")
    assert classes is not None
    none, no_sums = np.zeros(0, np.int64), np.zeros(0, np.uint64)
    manifest = Manifest(
        names=[],
        shard_bytes=none,
        checksums=no_sums,
        samples=none,
        index_bytes=none,
        index_checksums=no_sums,
        classes=classes,
    )
    if Manifest.from_bytes(manifest.to_bytes(), where="m").classes != classes:
        raise BrokenPromiseError("a class table becomes another one in the manifest")
    np.array([*classes], np.int64)


def _state(data: bytes) -> None:
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        raise PipesError("a program that keeps states reads its own files") from None
    if not isinstance(LoaderState.from_dict(values), LoaderState):
        raise BrokenPromiseError("a state is of another type")


def _names(data: bytes) -> None:
    """A URL with braces, as an argument: bad ones are a `ValueError`."""
    try:
        expand_braces(data.decode("utf-8", "replace")[:200])
    except ValueError as exc:
        raise PipesError(str(exc)) from exc
