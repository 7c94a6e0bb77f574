"""Files of text, boxes and tokens: each reader takes one or refuses it with an error of ours."""

import json
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.data_set.indexing import parse_label, read_class_table
from dali_pipes.errors import PipesError
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import classes_name
from dali_pipes.graph.recipes.captions import pad_tokens, read_tokens
from dali_pipes.graph.recipes.detection import MAX_LABEL, check_boxes, move_boxes, read_boxes
from dali_pipes.order.inputs import OrderInputs
from dali_pipes.order.state import LoaderState
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_names import expand_braces
from dali_pipes.tuning import Machine, Settings, Tuning
from tests.fuzz.target import Answer, BrokenPromiseError, Target
from tests.shards import npy_bytes

SHARD = "s-000000.tar"


class Readers(Target):
    """Give every input to every reader: a file may have the name of another kind."""

    @cached_property
    def folder(self) -> Path:
        self._folder = tempfile.TemporaryDirectory(prefix="dali-pipes-fuzz-texts-")
        return Path(self._folder.name)

    def close(self) -> None:
        if "folder" in self.__dict__:
            self._folder.cleanup()

    def check(self, data: bytes) -> Answer:
        return "taken" if self.takers(data) else "refused"

    def takers(self, data: bytes) -> list[str]:
        """Give the input to all readers, and return the names of those that take it."""
        return [name for name, read in self.readers(data).items() if _is_taken(read)]

    @abstractmethod
    def readers(self, data: bytes) -> dict[str, Callable[[], Any]]:
        """The readers by name, each with this input."""


def _is_taken(read: Callable[[], Any]) -> bool:
    try:
        read()
    except PipesError as exc:
        if not str(exc).isprintable() or len(str(exc)) > 10_000:
            raise BrokenPromiseError(f"an error that cannot be shown: {str(exc)[:200]!r}") from exc
        return False
    return True


class Texts(Readers):
    """Read files that programs write and people may edit."""

    num_daily = 200

    def seeds(self) -> Sequence[bytes]:
        """A class table as `pack` writes it, a tuning file of some machine, a loader's state, and a label."""
        settings = Settings(num_threads=2, prefetch_queue_depth=2, hw_decoder_load=0.5)
        path = self.folder / "seed.json"
        Tuning(machine=Machine(cpu="some", cores=2, gpu=None), settings=settings).write(path)
        order = OrderInputs(seed=7, epoch=2, weights=(0.5, 0.5), epoch_samples=100)
        state = LoaderState(manifest="ab", selection="cd", order=order, delivered=64).to_dict()
        classes = {str(label): f"class {label}" for label in range(1, 6)}
        return [json.dumps(classes).encode(), path.read_bytes(), json.dumps(state).encode(), b" 7\n"]

    def readers(self, data: bytes) -> dict[str, Callable[[], Any]]:
        for name in ("tuning.json", classes_name("s-")):
            LocalStore(self.folder).write(name, data)
        _is_taken(lambda: _names(data))  # this reader takes almost any text as one name
        return {
            "class table": lambda: _check_classes(self.folder),
            "tuning": lambda: Tuning.read(self.folder / "tuning.json"),
            "state": lambda: _state(data),
            "label": lambda: parse_label(data, shard=SHARD, key="a"),
        }


def _check_classes(folder: Path) -> None:
    """A class table that was taken goes into a manifest, which can be read."""
    classes = read_class_table(LocalStore(folder), "s-")
    assert classes is not None
    none, no_sums = np.zeros(0, np.int64), np.zeros(0, np.uint64)
    columns: Any = {"shard_bytes": none, "samples": none, "index_bytes": none}
    manifest = Manifest(names=[], checksums=no_sums, index_checksums=no_sums, classes=classes, **columns)
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


HEIGHT, WIDTH, SIZE, LENGTH = 60, 80, 32, 8


class Annotations(Target):
    """Each input is read as JSON, as an array of boxes, and as an array of tokens."""

    def seeds(self) -> Sequence[bytes]:
        boxes = np.array([[1, 2, 30, 40, 7], [0, 0, 80, 60, 0]])
        lists = {"boxes": boxes[:, :4].tolist(), "labels": boxes[:, 4].tolist()}
        annotations = [{"bbox": [1, 2, 29.5, 38], "category_id": 7}, {"bbox": [], "category_id": 1, "iscrowd": 1}]
        arrays = (boxes.astype(np.float32), boxes.astype(">i2"), np.arange(20))
        return [*(json.dumps(each).encode() for each in (lists, annotations)), *map(npy_bytes, arrays)]

    def check(self, data: bytes) -> Answer:
        array = np.frombuffer(data, np.uint8)
        are_read = [self._are_boxes(array, is_npy=is_npy) for is_npy in (False, True)]
        return "taken" if any([*are_read, self._are_tokens(array)]) else "refused"

    def _are_boxes(self, data: npt.NDArray[np.uint8], *, is_npy: bool) -> bool:
        try:
            rows = read_boxes(data, is_npy=is_npy, box_format=None)
            check_boxes(rows, height=HEIGHT, width=WIDTH)
        except ValueError:
            return False
        window: dict[str, Any] = {"start": (10, 20), "shape": (30, 40)}
        moved = move_boxes(rows, **window, size=(SIZE, SIZE), is_flipped=True, min_size=1)
        in_bounds = ((moved[:, :4] >= 0) & (moved[:, :4] <= SIZE)).all()
        if not in_bounds or not ((moved[:, 4] >= 0) & (moved[:, 4] <= MAX_LABEL)).all():
            raise BrokenPromiseError(f"boxes off the crop, or class ids out of range: {moved.tolist()}")
        return True

    def _are_tokens(self, data: npt.NDArray[np.uint8]) -> bool:
        try:
            ids = read_tokens(data)
        except ValueError:
            return False
        padded = pad_tokens(ids, length=LENGTH, padding=0, end=None)
        if padded.shape != (2, LENGTH) or padded.min() < 0 or padded[1].sum() != min(len(ids), LENGTH):
            raise BrokenPromiseError(f"tokens of another shape or sign: {padded.tolist()}")
        return True
