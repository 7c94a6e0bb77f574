"""The column file: one file beside the manifest with the key, the label and the components of every sample.

A loader reads a shard's index when it reads the shard. To choose samples by key or label before the first batch, it
would have to read all indexes, with one request each. The column file holds these columns in one file, in the
manifest's order.

``samples-columns.safetensors``, version 3, for N samples; a file as in `dali_pipes.formats.column_file`:

=============  ==========  ===========================================================================================
column         dtype       holds
=============  ==========  ===========================================================================================
``key/bytes``  uint8       the keys, one after the other
``key/ends``   int64 N     where each key ends
``label``      int8 to 64  the class id in ``cls``, 0 if a sample lacks it, in the smallest type that holds all ids;
                           only if some sample has ``cls``
``has/C``      uint8       whether each sample has component C: one bit for each sample, the first in the highest bit;
                           only for components that some samples lack
``height/C``   uint16 or   the rows of the upright photo C of each sample, 0 if the sample lacks it or its header cannot
               int32 N     be read, in the smaller type that holds all of them
``width/C``    likewise    its columns
=============  ==========  ===========================================================================================

The header, in JSON, has ``manifest``, the `Manifest.shards_digest` of these shards, and ``components``, sorted by name.
Every sample has each component that has no column ``has/C``. A data set has at most `MAX_COMPONENTS` components.

A data set that has grown has several column files, one for each part of its shards: see `dali_pipes.formats.manifest`.

The columns of a billion samples do not fit in memory. So a file is read by ranges, and in *parts*: some shards at a
time (`read_parts`), of which a column is read when it is first asked for. A predicate that looks at labels only reads
2 bytes a sample, and no keys. `dali_pipes.formats.column_spool` collects the columns of a new file.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from dali_pipes.arguments import as_integer
from dali_pipes.arrays import Bools, Int64s
from dali_pipes.errors import DataError, printable
from dali_pipes.formats.column_file import (
    KEY_TYPES,
    ColumnFile,
    ColumnStream,
    FileStream,
    ReadRange,
    fits,
    is_text,
    stream_columns,
)
from dali_pipes.formats.names import LABEL_COMPONENT
from dali_pipes.formats.texts import Texts, join_texts, pack_texts

COLUMNS_VERSION = 3
COLUMNS_KIND = "dali-pipes column file"

SAMPLES_AT_A_TIME = 1 << 20
"""Samples of a part: 100 MB with keys of 20 bytes; 1e9 samples have a thousand parts."""
MAX_COMPONENTS = 1024
"""The limit for a data set. If names hold a date, each sample can have a component of its own; a bitmap for each would
grow with the square of the data set."""
NO_LABEL = -1
"""The label of a sample without ``cls`` in `Columns.labels`."""

_SIZE_TYPES = (np.uint16, np.int32)
_LABEL_TYPES = (np.int8, np.int16, np.int32, np.int64)
# Keys decoded at a time: as Python strings they take five times the space.
_ROWS_AT_A_TIME = 1 << 16
Sizes = npt.NDArray[np.uint16] | npt.NDArray[np.int32]
Strings = npt.NDArray[Any]
"""Arrays of numpy's ``StringDType``, which its type stubs cannot express."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SampleColumns:
    """The content of a column file, for all samples in the manifest's order or for some of its shards."""

    keys: Texts
    labels: npt.NDArray[np.signedinteger[Any]] | None
    """int8 to int64 [N]; 0 if a sample lacks it. ``None`` if no sample has a label."""
    has: Mapping[str, Bools | None]
    """component -> bool [N], whether each sample has it; ``None`` if all have it."""
    sizes: Mapping[str, tuple[Sizes, Sizes]] = field(default_factory=dict)
    """component -> heights and widths of the upright photos: uint16 or int32 [N] each, 0 if a sample lacks it."""

    def __len__(self) -> int:
        return len(self.keys)

    def read(self) -> "SampleColumns":
        """Itself; a `ColumnsPart` has this method, too."""
        return self

    def of_shards(self, samples: Int64s, rows: Int64s) -> "SampleColumns":
        """The columns of the shards ``rows``, in the order given; itself if these are all shards in their own order.

        ``samples`` is int64 [shards], the number of samples in each shard of these columns.
        """
        if np.array_equal(rows, np.arange(len(samples))):
            return self
        stops = np.cumsum(samples, dtype=np.int64)
        starts, counts = (stops - samples)[rows], samples[rows]
        # ordinal = the shard's first ordinal - start of its run in the result + position in the result
        offsets = np.repeat(starts - (np.cumsum(counts) - counts), counts)
        return self.take(offsets + np.arange(len(offsets), dtype=np.int64))

    def take(self, rows: Int64s) -> "SampleColumns":
        """The columns of some samples, in the order given."""
        return SampleColumns(
            keys=self.keys.take(rows),
            labels=None if self.labels is None else self.labels[rows],
            has={name: None if mask is None else mask[rows] for name, mask in self.has.items()},
            sizes={name: (height[rows], width[rows]) for name, (height, width) in self.sizes.items()},
        )

    def to_bytes(self, *, manifest: str) -> bytes:
        """The column file, with the `Manifest.shards_digest` of its shards; equal columns give equal bytes."""
        return b"".join(stream_parts(lambda: [self], manifest=manifest).chunks())


class Columns:
    """Columns of all samples in the loader's order, known before a shard is read; the argument of ``where=``.

    Args:
        samples: The columns as the file has them, of all samples or of a part.
        names: The loader's shards.
        counts: int64 [shards], the number of samples in each.
    """

    def __init__(self, samples: "SampleColumns | ColumnsPart", *, names: Sequence[str], counts: Int64s) -> None:
        self.samples = samples
        """The columns as the file has them: keys are not decoded, labels have their smallest type."""
        self._names, self._counts = names, counts

    def __len__(self) -> int:
        return len(self.samples)

    def between(self, start: int, stop: int) -> "Columns":
        """The columns of some of these samples."""
        rows = np.arange(start, stop)
        # The shards of which these samples are, each with the number of them.
        bounds = np.clip(np.append(0, np.cumsum(self._counts)), start, stop)
        samples = self.samples.read().take(rows)
        return Columns(samples, names=self._names, counts=np.diff(bounds))

    @cached_property
    def keys(self) -> Strings:
        """Each sample's key: ``StringDType`` [N], for ``np.strings.startswith(columns.keys, "cat/")``. 0.2 us a key."""
        return _strings(self.samples.keys)

    @cached_property
    def labels(self) -> Int64s:
        """Each sample's class id, as ``cls`` holds it: int64 [N]; `NO_LABEL` if a sample lacks it.

        Raises:
            DataError: If no sample has a label.
        """
        if self.samples.labels is None:
            raise self._lacks(f"labels (component '{LABEL_COMPONENT}')")
        labels = self.samples.labels.astype(np.int64)
        mask = self.samples.has[LABEL_COMPONENT]
        if mask is not None:
            labels[~mask] = NO_LABEL
        return labels

    @cached_property
    def shards(self) -> Strings:
        """The name of each sample's shard: ``StringDType`` [N]. In a mixture it starts with the data set's name."""
        return np.repeat(_strings(Texts(*pack_texts(self._names))), self._counts)

    @property
    def components(self) -> list[str]:
        """The names of the components that samples have."""
        return sorted(self.samples.has)

    def has(self, component: str) -> Bools:
        """Whether each sample has a component: bool [N].

        Raises:
            DataError: If it is not one of `components`.
        """
        if component not in self.samples.has:
            raise self._lacks(f"component '{component}'")
        return ~lack(self.samples, [component])

    def size(self, component: str) -> tuple[Sizes, Sizes]:
        """Heights and widths of a component's upright photos: uint16 or int32 [N] each; 0 if a sample lacks it.

        Raises:
            DataError: If it is not a photo.
        """
        sizes = self.samples.sizes.get(component)
        if sizes is None:
            raise self._lacks(f"heights and widths of '{component}'", sorted(self.samples.sizes))
        return sizes

    def fold(self, number: int, *, seed: int = 0) -> Int64s:
        """Each sample's fold of ``number``, for cross-validation: int64 [N], from 0. It is XXH64 of seed and key,
        modulo ``number``: a sample keeps its fold when others are added, and folds differ in size as random draws do.

        >>> validation = lambda columns: columns.fold(5) == 0
        >>> training = lambda columns: columns.fold(5) != 0
        """
        number, seed = as_integer("number", number), as_integer("seed", seed)
        if number < 2:
            raise ValueError(f"number must be 2 or more folds, got {number}")
        drawn = (xxhash.xxh64_intdigest(f"{seed}/{key}".encode()) % number for key in self.samples.keys)
        return np.fromiter(drawn, np.int64, len(self))

    def _lacks(self, what: str, found: Sequence[str] | None = None) -> DataError:
        return DataError(
            f"no {what} to choose by, in {len(self)} samples from shard '{self._names[0]}' on "
            f"(found: {', '.join(self.components if found is None else found) or 'none'})"
        )


Where = Callable[[Columns], Bools]
"""A predicate of samples: which of them stay, bool [samples]."""


def lack(columns: "SampleColumns | ColumnsPart", names: Sequence[str]) -> Bools:
    """Whether each sample lacks all of these components: bool [N]."""
    lacking = np.ones(len(columns), np.bool_)
    for name in names:
        if name in columns.has:
            mask = columns.has[name]
            lacking &= False if mask is None else ~mask
    return lacking


def join_columns(parts: Sequence[SampleColumns]) -> SampleColumns:
    """The columns of several shards, one after the other, in the smallest types that hold them."""
    labels: Any = None
    if any(part.labels is not None for part in parts):
        zeros = (np.zeros(len(part), np.int8) if part.labels is None else part.labels for part in parts)
        labels = _smallest(list(zeros), _LABEL_TYPES)
    has: dict[str, Bools | None] = {}
    for name in sorted({name for part in parts for name in part.has}):
        masks = [~lack(part, [name]) for part in parts]
        has[name] = None if all(mask.all() for mask in masks) else np.concatenate(masks)
    sizes: dict[str, Any] = {}
    for name in sorted({name for part in parts for name in part.sizes}):
        both = [part.sizes.get(name, (np.zeros(len(part), np.uint16),) * 2) for part in parts]
        sizes[name] = tuple(_smallest(side, _SIZE_TYPES) for side in zip(*both, strict=True))
    return SampleColumns(keys=join_texts([part.keys for part in parts]), labels=labels, has=has, sizes=sizes)


def _smallest(parts: Sequence[npt.NDArray[Any]], kinds: Sequence[type[np.integer[Any]]]) -> npt.NDArray[Any]:
    """Join integers to one array of the first of these types that holds all of them."""
    values = np.concatenate(parts)
    least, greatest = int(values.min(initial=0)), int(values.max(initial=0))
    return values.astype(next(k for k in kinds if np.iinfo(k).min <= least and greatest <= np.iinfo(k).max))


def _strings(texts: Texts) -> Strings:
    strings = np.empty(len(texts), np.dtypes.StringDType())
    for start in range(0, len(texts), _ROWS_AT_A_TIME):
        strings[start : start + _ROWS_AT_A_TIME] = list(texts[start : start + _ROWS_AT_A_TIME])
    return strings


def stream_parts(parts: "Callable[[], Iterable[SampleColumns | ColumnsPart]]", *, manifest: str) -> FileStream:
    """The column file of samples whose columns come in parts, with the `Manifest.shards_digest` of their shards.

    Args:
        parts: Each call gives the parts anew; all have the same components.
        manifest: The digest.
    """
    num_samples = num_key_bytes = 0
    components: set[str] = set()
    dtypes: dict[str, np.dtype[Any]] = {}
    for part in parts():
        num_samples += len(part)
        num_key_bytes += len(part.keys.data)
        components |= part.has.keys()
        numbers = [] if part.labels is None else ["label"]
        numbers += [f"{side}/{name}" for name in part.sizes for side in ("height", "width")]
        for name in numbers:
            dtype = _numbers(part, name).dtype
            dtypes[name] = np.promote_types(dtypes.get(name, dtype), dtype)
        dtypes |= {
            f"has/{name}": np.dtype(np.uint8) for name, mask in part.has.items() if mask is not None and not mask.all()
        }

    def key_ends() -> Iterator[Int64s]:
        start = 0
        for part in parts():
            yield part.keys.ends + start
            start += len(part.keys.data)

    def bits(name: str) -> Iterator[npt.NDArray[np.uint8]]:
        rest = np.empty(0, np.bool_)
        for part in parts():
            mask = np.concatenate([rest, ~lack(part, [name])])
            num_whole = len(mask) // 8 * 8
            yield np.packbits(mask[:num_whole])
            rest = mask[num_whole:]
        yield np.packbits(rest)

    def column(name: str, dtype: np.dtype[Any]) -> ColumnStream:
        if name.startswith("has/"):
            return ColumnStream(dtype, -(-num_samples // 8), lambda: bits(name.removeprefix("has/")))
        return ColumnStream(dtype, num_samples, lambda: (_numbers(part, name).astype(dtype) for part in parts()))

    columns = {name: column(name, dtype) for name, dtype in dtypes.items()}
    key_bytes = ColumnStream(np.dtype(np.uint8), num_key_bytes, lambda: (part.keys.data for part in parts()))
    columns |= {"key/bytes": key_bytes, "key/ends": ColumnStream(np.dtype(np.int64), num_samples, key_ends)}
    header = {"kind": COLUMNS_KIND, "version": COLUMNS_VERSION, "manifest": manifest, "components": sorted(components)}
    return stream_columns(columns, header)


def _numbers(part: "SampleColumns | ColumnsPart", name: str) -> npt.NDArray[Any]:
    """The column of labels, heights or widths."""
    if name == "label":
        assert part.labels is not None
        return part.labels
    side, component = name.split("/", 1)
    return part.sizes[component][side == "width"]


class ColumnRanges:
    """A column file of which only the header was read.

    Args:
        read: ``read(start, size)`` gives bytes of the file.
        samples: int64 [shards], the number of samples in each shard of the file.
        manifest: The `Manifest.shards_digest` of these shards.
        where: The file's name, for errors.

    Raises:
        DataError: If it is not a column file of this version, or belongs to another manifest.
    """

    def __init__(self, read: ReadRange, *, samples: Int64s, manifest: str, where: str) -> None:
        self.samples = samples
        """int64 [shards], the number of samples in each shard of the file."""
        self._file = file = ColumnFile(read, where=where, kind=COLUMNS_KIND, version=COLUMNS_VERSION)
        with file.checking():
            if (digest := file.header["manifest"]) != manifest:
                found = printable(str(digest))
                raise DataError(
                    f"'{where}' is the column file of another manifest: '{found:.12}...', beside it lies "
                    f"'{manifest:.12}...'; index the shards anew: dali-pipes prep index URL"
                )
            self.components: list[str] = file.header["components"]
            if not fits(self.components, [is_text]) or sorted(set(self.components)) != self.components:
                raise ValueError("its components are not names in order")
            self.photos = [name for name in self.components if f"height/{name}" in file]
            """The components with heights and widths."""
            num = int(samples.sum())
            columns: dict[str, tuple[Sequence[Any], int]] = {name: ([kind], num) for name, kind in KEY_TYPES.items()}
            if self.has_labels:
                columns["label"] = _LABEL_TYPES, num
            bitmaps = (f"has/{name}" for name in self.components)
            columns |= {name: ([np.uint8], -(-num // 8)) for name in bitmaps if name in file}
            columns |= {f"{side}/{name}": (_SIZE_TYPES, num) for name in self.photos for side in ("height", "width")}
            file.declare(columns)

    @property
    def has_labels(self) -> bool:
        return LABEL_COMPONENT in self.components

    def column(self, name: str, start: int, stop: int) -> Any:
        """Some rows of ``key``, ``label``, ``has/C``, ``height/C`` or ``width/C``; zeros where the file has none.

        ``None`` for ``has/C`` means that all samples of the file have the component.
        """
        kind, _, component = name.partition("/")
        with self._file.checking():
            if kind == "key":
                return self._file.texts("key", start, stop)
            if name not in self._file:
                is_in_all = kind == "has" and component in self.components
                dtype = {"label": np.int8, "has": np.bool_}.get(kind, np.uint16)
                return None if is_in_all else np.zeros(stop - start, dtype)
            if kind == "has":
                first = start // 8
                bits = np.unpackbits(self._file.rows(name, first, -(-stop // 8)))
                return bits[start - 8 * first : stop - 8 * first].astype(np.bool_)
            values = self._file.rows(name, start, stop)
            if kind != "label" and values.min(initial=0) < 0:
                raise ValueError(f"column '{name}' has negative values")
            return values

    def check_unchanged(self) -> None:
        """Refuse a file that was replaced by one of other columns since it was opened."""
        with self._file.checking():
            self._file.check_unchanged()


class ColumnsPart:
    """Some rows of one of the ``files`` of a data set, as `SampleColumns`; a column is read when needed.

    ``rows`` are those that are wanted, counted from ``start``; ``None``: all.
    """

    def __init__(
        self, file: ColumnRanges, start: int, stop: int, rows: Int64s | None, *, files: Sequence[ColumnRanges]
    ) -> None:
        self._num = stop - start if rows is None else len(rows)
        self._has_labels = any(each.has_labels for each in files)

        # It does not refer to the part: in a cycle, its columns would stay until Python looks for cycles.
        def column(name: str) -> Any:
            found = file.column(name, start, stop)
            return found if found is None or rows is None else found.take(rows)

        self._column = column
        components = sorted({name for each in files for name in each.components})
        photos = sorted({name for each in files for name in each.photos})
        self.has: Mapping[str, Bools | None] = _Lazily(components, lambda name: column(f"has/{name}"))
        self.sizes: Mapping[str, tuple[Sizes, Sizes]] = _Lazily(
            photos, lambda name: (column(f"height/{name}"), column(f"width/{name}"))
        )

    def __len__(self) -> int:
        return self._num

    @cached_property
    def keys(self) -> Texts:
        keys: Texts = self._column("key")
        return keys

    @cached_property
    def labels(self) -> npt.NDArray[np.signedinteger[Any]] | None:
        return self._column("label") if self._has_labels else None

    def read(self) -> SampleColumns:
        """All columns of the part, in memory."""
        return SampleColumns(keys=self.keys, labels=self.labels, has=dict(self.has), sizes=dict(self.sizes))


class _Lazily(Mapping[str, T]):
    """A table whose values are read when they are first asked for."""

    def __init__(self, names: Iterable[str], read: Callable[[str], T]) -> None:
        self._names, self._read = dict.fromkeys(names), read
        self._values: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._values:
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


def read_parts(files: Sequence[ColumnRanges], rows: Int64s) -> Iterator[tuple[Run, ColumnsPart]]:
    """Yield the columns of shards in the order given, some shards at a time: see `runs_of`.

    Raises:
        DataError: While iterating, if a file holds invalid values, or was replaced.
    """
    firsts = np.cumsum([0, *(len(file.samples) for file in files)])
    bounds = [np.append(0, np.cumsum(file.samples, dtype=np.int64)) for file in files]
    for run in runs_of([file.samples for file in files], rows, max_samples=SAMPLES_AT_A_TIME):
        own = rows[run.first : run.stop] - firsts[run.file]
        starts, stops = bounds[run.file][own], bounds[run.file][own + 1]
        start, stop = int(starts[0]), int(stops[-1])
        counts = stops - starts
        wanted = None
        if counts.sum() != stop - start:
            wanted = np.concatenate([np.arange(*pair) for pair in zip(starts - start, stops - start, strict=True)])
        yield run, ColumnsPart(files[run.file], start, stop, wanted, files=files)
    for file in files:
        file.check_unchanged()


def read_columns(files: Sequence[ColumnRanges], rows: Int64s) -> SampleColumns:
    """Read all columns of some shards, in the order given, into memory.

    Raises:
        DataError: See `read_parts`.
    """
    samples = np.concatenate([file.samples for file in files])
    in_order = np.sort(rows)  # neighbours are read together
    parts = [part.read() for _, part in read_parts(files, in_order)]
    columns = parts[0] if len(parts) == 1 else join_columns(parts)
    return columns.of_shards(samples[in_order], np.searchsorted(in_order, rows))
