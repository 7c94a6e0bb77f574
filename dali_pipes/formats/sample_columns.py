"""The column file: one file beside the manifest with the key, the label and the components of every sample.

A loader reads a shard's index when it reads the shard. To choose samples by key or label before the first batch, it
would have to read all indexes, with one request each. The column file holds these columns in one file, in the
manifest's order.

``samples-columns.safetensors``, version 2, for N samples; a file as in `dali_pipes.formats.column_file`:

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
Every sample has each component that has no column ``has/C``. If a data set has more than `MAX_COMPONENTS` components,
the header lists the first ones and ``cls``.

A data set that has grown has several column files, one for each part of its shards: see `dali_pipes.formats.manifest`.

Version 1 had no heights and widths; a file without photos still is of version 1.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dali_pipes.arrays import Bools, Int64s
from dali_pipes.errors import DataError
from dali_pipes.formats.column_file import ColumnFile, save_columns
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import LABEL_COMPONENT
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.formats.texts import Texts, join_texts, pack_texts

COLUMNS_VERSIONS = (1, 2)
COLUMNS_KIND = "dali-pipes column file"

MAX_COMPONENTS = 64
"""The limit for a column file. If names hold a date, each sample can have a component of its own; a bitmap for each
would grow with the square of the data set."""
NO_LABEL = -1
"""The label of a sample without ``cls`` in `Columns.labels`."""

SIZE_TYPES = (np.uint16, np.int32)
LABEL_TYPES = (np.int8, np.int16, np.int32, np.int64)
# Keys decoded at a time: as Python strings they take five times the space.
_ROWS_AT_A_TIME = 1 << 16
# Shards whose columns are joined before all of them are, and their samples.
_SHARDS_JOINED, _ROWS_JOINED = 256, 1 << 17

Sizes = npt.NDArray[np.uint16] | npt.NDArray[np.int32]
Strings = npt.NDArray[Any]
"""Arrays of numpy's ``StringDType``, which its type stubs cannot express."""


@dataclass(frozen=True, kw_only=True)
class SampleColumns:
    """The content of a column file, for all samples in the manifest's order or for some of its shards."""

    keys: Texts
    labels: npt.NDArray[np.signedinteger[Any]] | None
    """int8 to int64 [N]; 0 if a sample lacks it. ``None`` if no sample has a label."""
    has: Mapping[str, Bools | None]
    """component -> bool [N], whether each sample has it; ``None`` if all have it."""
    sizes: Mapping[str, tuple[Sizes, Sizes]] = field(default_factory=dict)
    """component -> heights and widths of the upright photos: uint16 or int32 [N] each, 0 if a sample lacks it. A file
    of version 1 has none."""

    def __len__(self) -> int:
        return len(self.keys)

    def lack(self, names: Sequence[str]) -> Bools | None:
        """Whether each sample lacks all of these components: bool [N]; ``None`` if one of them is not listed here."""
        return lack(self, names)

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
        ordinals = offsets + np.arange(len(offsets), dtype=np.int64)
        ends = np.append(0, self.keys.ends)
        runs = [self.keys.data[ends[start] : ends[start + count]] for start, count in zip(starts, counts, strict=True)]
        lengths = self.keys.ends[ordinals] - ends[ordinals]
        data = np.concatenate([np.empty(0, np.uint8), *runs])
        return SampleColumns(
            keys=Texts(data, np.cumsum(lengths, dtype=np.int64)),
            labels=None if self.labels is None else self.labels[ordinals],
            has={name: None if mask is None else mask[ordinals] for name, mask in self.has.items()},
            sizes={name: (height[ordinals], width[ordinals]) for name, (height, width) in self.sizes.items()},
        )

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
        columns: dict[str, npt.NDArray[Any]] = {"key/bytes": self.keys.data, "key/ends": self.keys.ends}
        if self.labels is not None:
            columns["label"] = self.labels
        for name, mask in self.has.items():
            if mask is not None:
                columns[f"has/{name}"] = np.packbits(mask)
        for name, (height, width) in self.sizes.items():
            columns[f"height/{name}"], columns[f"width/{name}"] = height, width
        return save_columns(columns, columns_header(manifest=manifest, components=self.has, has_sizes=bool(self.sizes)))

    @classmethod
    def from_bytes(cls, data: bytes, *, manifest: Manifest, where: str) -> "SampleColumns":
        """Read the column file of the samples of ``manifest``.

        Raises:
            DataError: If ``data`` is not a column file of this version, holds invalid values, or belongs to another
                manifest; ``where`` names the file.
        """
        file = ColumnFile.open(data, where=where, kind=COLUMNS_KIND, version=COLUMNS_VERSIONS)
        components = checked_components(file, manifest)
        keys = file.texts("key")
        if len(keys) != manifest.num_samples:
            raise file.refused(f"{manifest.num_samples} samples, the manifest's", str(len(keys)))
        labels = file.column("label", label_type(file), len(keys)) if LABEL_COMPONENT in components else None
        has = {name: _unpacked(file, name, len(keys)) for name in components}
        sizes = {
            name: (take_sizes(file, f"height/{name}", len(keys)), take_sizes(file, f"width/{name}", len(keys)))
            for name in components
            if f"height/{name}" in file.columns
        }
        file.expect_no_more()
        return cls(keys=keys, labels=labels, has=has, sizes=sizes)


def columns_header(*, manifest: str, components: Iterable[str], has_sizes: bool) -> dict[str, Any]:
    """The header of a column file."""
    return {
        "kind": COLUMNS_KIND,
        "version": 2 if has_sizes else 1,
        "manifest": manifest,
        "components": sorted(components),
    }


class AnyColumns(Protocol):
    """What `SampleColumns` and a part of a file that is read when it is needed have in common."""

    @property
    def keys(self) -> Texts: ...
    @property
    def labels(self) -> npt.NDArray[np.signedinteger[Any]] | None: ...
    @property
    def has(self) -> Mapping[str, Bools | None]: ...
    @property
    def sizes(self) -> Mapping[str, tuple[Sizes, Sizes]]: ...
    def __len__(self) -> int: ...


def lack(columns: AnyColumns, names: Sequence[str]) -> Bools | None:
    """Whether each sample lacks all of these components: bool [N]; ``None`` if one of them is not listed."""
    if any(name not in columns.has for name in names):
        return None
    lacking = np.ones(len(columns), np.bool_)
    for name in names:
        mask = columns.has[name]
        lacking &= False if mask is None else ~mask
    return lacking


class Columns:
    """Columns of all samples in the loader's order, known before a shard is read; the argument of ``where=``.

    Args:
        samples: The columns as the file has them: all of them, or a part of a large data set's.
        names: The loader's shards.
        counts: int64 [shards], the number of samples in each.
    """

    def __init__(self, samples: AnyColumns, *, names: Sequence[str], counts: Int64s) -> None:
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
        samples = SampleColumns(
            keys=self.samples.keys[start:stop],
            labels=None if self.samples.labels is None else self.samples.labels[rows],
            has={name: None if mask is None else mask[rows] for name, mask in self.samples.has.items()},
            sizes={name: (height[rows], width[rows]) for name, (height, width) in self.samples.sizes.items()},
        )
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
        """The names of the components that samples have, at most `MAX_COMPONENTS` and ``cls``."""
        return sorted(self.samples.has)

    def has(self, component: str) -> Bools:
        """Whether each sample has a component: bool [N].

        Raises:
            DataError: If it is not one of `components`.
        """
        lacking = lack(self.samples, [component])
        if lacking is None:
            raise self._lacks(f"component '{component}'")
        return ~lacking

    def size(self, component: str) -> tuple[Sizes, Sizes]:
        """Heights and widths of a component's upright photos: uint16 or int32 [N] each; 0 if a sample lacks it.

        Raises:
            DataError: If it is not a photo, or the shards were indexed before column files had sizes.
        """
        sizes = self.samples.sizes.get(component)
        if sizes is None:
            raise self._lacks(f"heights and widths of '{component}'", sorted(self.samples.sizes))
        return sizes

    def _lacks(self, what: str, found: Sequence[str] | None = None) -> DataError:
        return DataError(
            f"no {what} to choose by, in {len(self)} samples from shard '{self._names[0]}' on "
            f"(found: {', '.join(self.components if found is None else found) or 'none'})"
        )


Where = Callable[[Columns], Bools]
"""A predicate of samples: which of them stay, bool [samples]."""


class ColumnsBuilder:
    """Collects the columns of shards, in the manifest's order, without a Python object per sample."""

    def __init__(self) -> None:
        self._parts: list[SampleColumns] = []
        self._last: list[SampleColumns] = []
        self._last_rows = 0
        self._restart()
        self.components: dict[str, None] = {}
        """The components that are collected, in the order in which they were found."""
        self.is_cut = False
        """Whether a component was left out, because there are too many."""

    def add(self, index: ShardIndex) -> None:
        """Add the columns of the next shard."""
        taken = self._admit(index.offsets)
        masks = {name: index.offsets[name] >= 0 for name in taken}
        # Masks without a gap are not kept: they would take a byte for each sample and component.
        has = {name: None if mask.all() else mask for name, mask in masks.items()}
        sizes = {name: photo.upright_size for name, photo in index.photos.items() if name in self.components}
        self._last.append(SampleColumns(keys=Texts(*pack_texts(index.keys)), labels=index.labels, has=has, sizes=sizes))
        self._last_rows += index.num_samples
        if len(self._last) == _SHARDS_JOINED or self._last_rows >= _ROWS_JOINED:
            self._join_last()

    def add_columns(self, columns: SampleColumns, components: Iterable[str]) -> None:
        """Add the columns of the next shards, whose components were found in this order: see `components`."""
        self._join_last()
        taken = set(self._admit(components))
        has = {name: mask for name, mask in columns.has.items() if name in taken}
        sizes = {name: pair for name, pair in columns.sizes.items() if name in taken}
        self._append(replace(columns, has=has, sizes=sizes))

    def finish(self) -> SampleColumns:
        """The columns of all shards that were added."""
        self._join_last()
        return _joined(self._parts)

    def _admit(self, names: Iterable[str]) -> list[str]:
        taken = []
        for name in names:
            if len(self.components) < MAX_COMPONENTS or name == LABEL_COMPONENT:
                self.components[name] = None
            if name in self.components:
                taken.append(name)
            else:
                self.is_cut = True
        return taken

    def _join_last(self) -> None:
        """Join the columns of small shards, whose arrays take more memory than their values."""
        if self._last:
            joined = _joined(self._last)
            self._last, self._last_rows = [], 0
            self._append(joined)

    def _append(self, part: SampleColumns) -> None:
        self._parts.append(part)

    def _restart(self) -> None:
        # The first part is empty, because there may be no shard.
        self._parts = [SampleColumns(keys=Texts(*pack_texts(())), labels=None, has={})]


def _joined(parts: Sequence[SampleColumns]) -> SampleColumns:
    joined = join_columns([(part, {}) for part in parts])
    return joined if joined.labels is None else replace(joined, labels=_smallest(joined.labels, LABEL_TYPES))


def join_columns(parts: Sequence[tuple[SampleColumns, Mapping[str, int]]]) -> SampleColumns:
    """The columns of several data sets or shards, one after the other.

    Args:
        parts: For each of them its columns and its `Manifest.components`. If a component is counted there but missing
            in the column file, the joined columns leave it out.
    """
    labels = None
    if any(columns.labels is not None for columns, _ in parts):
        labels = np.concatenate(
            [np.zeros(len(columns), np.int8) if columns.labels is None else columns.labels for columns, _ in parts]
        )
    has: dict[str, Bools | None] = {}
    for name in sorted({name for columns, _ in parts for name in columns.has}):
        if any(name not in columns.has and counted.get(name, 0) for columns, counted in parts):
            continue
        masks = [_mask(columns, name) for columns, _ in parts]
        has[name] = None if all(mask.all() for mask in masks) else np.concatenate(masks)
    keys = join_texts([columns.keys for columns, _ in parts])
    return SampleColumns(keys=keys, labels=labels, has=has, sizes=_joined_sizes(parts))


def _joined_sizes(parts: Sequence[tuple[SampleColumns, Mapping[str, int]]]) -> dict[str, tuple[Sizes, Sizes]]:
    joined = {}
    for name in sorted({name for columns, _ in parts for name in columns.sizes}):
        if any(name not in columns.sizes and counted.get(name, 0) for columns, counted in parts):
            continue
        none = [(np.zeros(len(columns), np.uint16),) * 2 for columns, _ in parts]
        sizes = [columns.sizes.get(name, zeros) for (columns, _), zeros in zip(parts, none, strict=True)]
        height, width = (_smallest(np.concatenate(column), SIZE_TYPES) for column in zip(*sizes, strict=True))
        joined[name] = height, width
    return joined


def _mask(columns: SampleColumns, name: str) -> Bools:
    mask = columns.has.get(name)
    return np.full(len(columns), name in columns.has) if mask is None else mask


def _smallest(values: npt.NDArray[Any], kinds: Sequence[type[np.integer[Any]]]) -> npt.NDArray[Any]:
    """Convert integers to the first of these types that holds all of them."""
    return values.astype(smallest_type(int(values.min(initial=0)), int(values.max(initial=0)), kinds))


def smallest_type(least: int, greatest: int, kinds: Iterable[type[np.integer[Any]]]) -> type[np.integer[Any]]:
    """The first of these types that holds both numbers; the last one does."""
    return next(kind for kind in kinds if np.iinfo(kind).min <= least and greatest <= np.iinfo(kind).max)


def _strings(texts: Texts) -> Strings:
    strings = np.empty(len(texts), np.dtypes.StringDType())
    for start in range(0, len(texts), _ROWS_AT_A_TIME):
        strings[start : start + _ROWS_AT_A_TIME] = list(texts[start : start + _ROWS_AT_A_TIME])
    return strings


def checked_components(file: ColumnFile, manifest: Manifest) -> list[str]:
    """The components that a column file lists.

    Raises:
        DataError: If the file belongs to another manifest.
    """
    digest = file.text("manifest")
    if digest != manifest.shards_digest:
        raise DataError(
            f"'{file.where}' is the column file of another manifest: {digest:.12}..., beside it lies "
            f"{manifest.shards_digest[:12]}...; index the shards anew: dali-pipes prep index URL"
        )
    components: list[str] = file.entry("components", "names in order", _are_names_in_order)
    return components


def label_type(file: ColumnFile) -> type[np.signedinteger[Any]]:
    """The type that the file's labels should have: their own, if it is one of those that are allowed."""
    found = file.columns.get("label")
    return next((kind for kind in LABEL_TYPES if found is not None and found.dtype == kind), np.int64)


def _are_names_in_order(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value) and sorted(set(value)) == value


def _unpacked(file: ColumnFile, component: str, num_samples: int) -> Bools | None:
    if f"has/{component}" not in file.columns:
        return None
    bits = np.unpackbits(file.column(f"has/{component}", np.uint8, -(-num_samples // 8)))
    if bits[num_samples:].any():
        raise file.refused(f"column 'has/{component}' of {num_samples} bits", "more")
    return bits[:num_samples].astype(np.bool_)


def take_sizes(file: ColumnFile, name: str, num_samples: int) -> Sizes:
    """Take a column of heights or widths, checked."""
    found = file.columns.get(name)
    sizes: Sizes = file.column(
        name, np.uint16 if found is not None and found.dtype == np.uint16 else np.int32, num_samples
    )
    if sizes.min(initial=0) < 0:
        raise file.refused(f"column '{name}' without negative numbers", str(sizes.min()))
    return sizes
