"""Read a column file by ranges, for data sets whose columns do not fit in memory at once.

`dali_pipes.formats.sample_columns` says what the file holds. Here a *part* is some of its rows, and a column of a part
is read when it is first asked for. A predicate that looks at labels only reads 2 bytes a sample, and no keys.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from dali_pipes.arrays import Bools, Int64s
from dali_pipes.formats.column_file import ColumnFile, ReadRange
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import LABEL_COMPONENT
from dali_pipes.formats.sample_columns import (
    COLUMNS_KIND,
    COLUMNS_VERSIONS,
    MAX_COMPONENTS,
    SampleColumns,
    Sizes,
    checked_components,
    label_type,
    take_sizes,
)
from dali_pipes.formats.texts import Texts

T = TypeVar("T")


class ColumnRanges:
    """A column file of which only the header was read.

    Args:
        read: ``read(start, size)`` gives bytes of the file.
        manifest: The manifest of the file's shards.
        where: The file's name, for errors.

    Raises:
        DataError: If it is not a column file of this version, or belongs to another manifest.
    """

    def __init__(self, read: ReadRange, *, manifest: Manifest, where: str) -> None:
        self._read = read
        self._num_samples = manifest.num_samples
        self._file, self._starts = ColumnFile.open_header(
            read, where=where, kind=COLUMNS_KIND, version=COLUMNS_VERSIONS
        )
        file = self._file
        self.samples = manifest.samples
        """int64 [shards], the number of samples in each shard of the file."""
        self.components = checked_components(file, manifest)
        self.counted = {name for name, count in manifest.components.items() if count}
        """The components that samples of the manifest have, listed in the file or not."""
        self.photos = [name for name in self.components if f"height/{name}" in file.columns]
        """The components with heights and widths."""
        self._columns: dict[str, npt.NDArray[Any]] = {
            "key/bytes": file.column("key/bytes", np.uint8),
            "key/ends": file.column("key/ends", np.int64),
        }
        if len(self._columns["key/ends"]) != self._num_samples:
            raise file.refused(f"{self._num_samples} samples, the manifest's", str(len(self._columns["key/ends"])))
        if self.has_labels:
            self._columns["label"] = file.column("label", label_type(file), self._num_samples)
        for name in self.components:
            if f"has/{name}" in file.columns:
                self._columns[f"has/{name}"] = file.column(f"has/{name}", np.uint8, -(-self._num_samples // 8))
        for name in self.photos:
            for side in (f"height/{name}", f"width/{name}"):
                self._columns[side] = take_sizes(file, side, self._num_samples)
        file.expect_no_more()

    @property
    def has_labels(self) -> bool:
        return LABEL_COMPONENT in self.components

    def keys(self, start: int, stop: int) -> Texts:
        """The keys of some rows."""
        before = self._rows("key/ends", start - 1, stop) if start else np.append(0, self._rows("key/ends", 0, stop))
        first, last = int(before[0]), int(before[-1])
        if not 0 <= first <= last <= len(self._columns["key/bytes"]):
            raise self._file.refused("ends of keys that rise", f"{first} and {last}")
        # Texts compares the ends before it uses them.
        texts = Texts(self._rows("key/bytes", first, last), before[1:] - first)
        try:
            texts.check()
        except ValueError as exc:
            raise self._file.refused("columns 'key/bytes' and 'key/ends' that hold texts", str(exc)) from exc
        return texts

    def labels(self, start: int, stop: int) -> npt.NDArray[np.signedinteger[Any]]:
        """The labels of some rows; int8 zeros if the file has none."""
        return self._rows("label", start, stop) if self.has_labels else np.zeros(stop - start, np.int8)

    def has(self, component: str, start: int, stop: int) -> Bools | None:
        """Whether some rows have a component: bool [stop - start]; ``None`` if all samples of the file have it."""
        if component not in self.components:
            return np.zeros(stop - start, np.bool_)
        if f"has/{component}" not in self._columns:
            return None
        first = start // 8
        bits = np.unpackbits(self._rows(f"has/{component}", first, -(-stop // 8)))
        return bits[start - 8 * first : stop - 8 * first].astype(np.bool_)

    def sizes(self, component: str, start: int, stop: int) -> tuple[Sizes, Sizes]:
        """Heights and widths of some rows; 0 if the file has none."""
        if component not in self.photos:
            return (np.zeros(stop - start, np.uint16),) * 2
        height, width = (self._rows(f"{side}/{component}", start, stop) for side in ("height", "width"))
        if min(height.min(initial=0), width.min(initial=0)) < 0:
            raise self._file.refused(f"heights and widths of '{component}' without negative numbers", "others")
        return height, width

    def check_unchanged(self) -> None:
        """Refuse a file that was replaced by one of other columns since it was opened."""
        again, starts = ColumnFile.open_header(
            self._read, where=self._file.where, kind=COLUMNS_KIND, version=COLUMNS_VERSIONS
        )
        if (starts, again.header) != (self._starts, self._file.header):
            raise self._file.refused(
                "the same file from its first part to its last", "another; was it indexed meanwhile?"
            )

    def _rows(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        dtype = self._columns[name].dtype
        size = (stop - start) * dtype.itemsize
        data = self._read(self._starts[name] + start * dtype.itemsize, size) if size else b""
        if len(data) != size:
            raise self._file.refused(f"rows {start} to {stop} of column '{name}': {size} bytes", str(len(data)))
        return np.frombuffer(data, dtype)


class Listed(NamedTuple):
    """What all files of a data set list together, as `dali_pipes.formats.sample_columns.join_columns` joins them."""

    components: list[str]
    photos: list[str]
    has_labels: bool

    @classmethod
    def of(cls, files: Sequence[ColumnRanges]) -> "Listed":
        """Leave out a component that a file does not list, although its samples may have it."""
        components = {name for file in files for name in file.components}
        photos = {name for file in files for name in file.photos}
        for file in files:
            unlisted = file.counted - set(file.components) if len(file.components) >= MAX_COMPONENTS else set()
            components -= unlisted
            photos -= (unlisted | set(file.components)) - set(file.photos)
        return cls(sorted(components), sorted(photos), any(file.has_labels for file in files))


class ColumnsPart:
    """Some rows of a file, with the columns that all files list; each column is read when it is first asked for.

    It has what `dali_pipes.formats.sample_columns.SampleColumns` has.
    """

    def __init__(self, file: ColumnRanges, listed: Listed, start: int, stop: int, rows: Int64s | None) -> None:
        self._file, self._listed = file, listed
        self._start, self._stop = start, stop
        # The rows that are wanted, counted from ``start``; None: all.
        self._rows = rows

        # These do not refer to the part: in a cycle, its columns would stay until Python looks for cycles.
        def read_has(component: str) -> Bools | None:
            mask = file.has(component, start, stop)
            return None if mask is None else _chosen(mask, rows)

        def read_sizes(component: str) -> tuple[Sizes, Sizes]:
            height, width = file.sizes(component, start, stop)
            return _chosen(height, rows), _chosen(width, rows)

        self.has: Mapping[str, Bools | None] = _Lazily(listed.components, read_has)
        self.sizes: Mapping[str, tuple[Sizes, Sizes]] = _Lazily(listed.photos, read_sizes)

    def __len__(self) -> int:
        return self._stop - self._start if self._rows is None else len(self._rows)

    @cached_property
    def keys(self) -> Texts:
        keys = self._file.keys(self._start, self._stop)
        return keys if self._rows is None else keys.take(self._rows)

    @cached_property
    def labels(self) -> npt.NDArray[np.signedinteger[Any]] | None:
        labels = self._file.labels(self._start, self._stop)
        return _chosen(labels, self._rows) if self._listed.has_labels else None

    def read(self) -> SampleColumns:
        """All columns of the part, in memory."""
        return SampleColumns(keys=self.keys, labels=self.labels, has=dict(self.has), sizes=dict(self.sizes))


def _chosen(column: npt.NDArray[Any], rows: Int64s | None) -> npt.NDArray[Any]:
    return column if rows is None else column[rows]


class _Lazily(Mapping[str, T]):
    """A table whose values are read when they are first asked for."""

    def __init__(self, names: Iterable[str], read: Callable[[str], T]) -> None:
        self._names, self._read = dict.fromkeys(names), read
        self._values: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._values:
            if name not in self._names:
                raise KeyError(name)
            self._values[name] = self._read(name)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Run(NamedTuple):
    """Shards of one file that are read together."""

    file: int
    first: int
    stop: int
    """Positions in the list of shards, ``[first, stop)``."""


def runs_of(samples: Sequence[Int64s], rows: Int64s, *, max_samples: int) -> Iterator[Run]:
    """Cut a list of shards into runs of rising rows of one file that span at most ``max_samples``, or one shard.

    Args:
        samples: For each file, the number of samples in each of its shards.
        rows: The shards, as positions in all files together.
        max_samples: Samples from a run's first shard to its last.

    >>> list(runs_of([np.array([5, 5, 5]), np.array([5])], np.array([0, 1, 2, 3]), max_samples=12))
    [Run(file=0, first=0, stop=2), Run(file=0, first=2, stop=3), Run(file=1, first=3, stop=4)]
    """
    stops = np.cumsum(np.concatenate(samples), dtype=np.int64)
    starts = np.append(0, stops[:-1])
    files = np.searchsorted(np.cumsum([len(column) for column in samples]), rows, side="right")
    first = 0
    for place in range(1, len(rows) + 1):
        if (
            place == len(rows)
            or rows[place] <= rows[place - 1]
            or files[place] != files[first]
            or stops[rows[place]] - starts[rows[first]] > max_samples
        ):
            yield Run(int(files[first]), first, place)
            first = place


def read_parts(files: Sequence[ColumnRanges], rows: Int64s, *, max_samples: int) -> Iterator[tuple[Run, ColumnsPart]]:
    """Yield the columns of shards in the order given, some shards at a time: see `runs_of`.

    Raises:
        DataError: While iterating, if a file holds invalid values, or was replaced.
    """
    listed = Listed.of(files)
    firsts = np.cumsum([0, *(len(file.samples) for file in files)])
    bounds = [np.append(0, np.cumsum(file.samples, dtype=np.int64)) for file in files]
    for run in runs_of([file.samples for file in files], rows, max_samples=max_samples):
        own = rows[run.first : run.stop] - firsts[run.file]
        starts, stops = bounds[run.file][own], bounds[run.file][own + 1]
        start, stop = int(starts[0]), int(stops[-1])
        counts = stops - starts
        wanted = None
        if counts.sum() != stop - start:
            wanted = np.concatenate([np.arange(*pair) for pair in zip(starts - start, stops - start, strict=True)])
        yield run, ColumnsPart(files[run.file], listed, start, stop, wanted)
    for file in files:
        file.check_unchanged()
