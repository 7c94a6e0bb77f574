"""Describe a set of shards in numbers, from manifest and shard indexes, photo headers, and the pixels of a few photos.

Only photos whose pixels are asked for are decoded. Without a manifest the shards are read once, in full.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from dali_pipes.arrays import Int64s
from dali_pipes.formats.manifest import RecodedStep
from dali_pipes.formats.photo_header import MAX_PHOTO_BYTES, PHOTO_FORMATS
from dali_pipes.formats.photo_names import PhotoRoles
from dali_pipes.formats.photo_rules import PhotoRules
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.progress import bar
from dali_pipes.store.base import Store
from dali_pipes.store.shard_set import ShardSet
from prep.inspect.bucket_info import BucketsInfo
from prep.inspect.indexed_set import NUM_READERS, IndexedSet
from prep.photos.decoders import Undecodable, check_size, count_values, decode, open_decoder
from prep.photos.details import HEAD_BYTES, PhotoDetails, photo_details
from prep.threads import in_threads
from prep.workers import Report, Workers, WorkersKind, open_workers

MAX_BINS = 16
# A task reads so many shard indexes, or photos.
_TASK_SHARDS = 1024
_TASK_PHOTOS = 64

Result = TypeVar("Result")


class _Place(NamedTuple):
    """Position of a component of a sample."""

    shard: str
    offset: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Summary of many numbers."""

    least: int
    percentile_5: int
    median: int
    percentile_95: int
    greatest: int
    mean: float
    edges: list[int]
    """Edges of the histogram's bins: powers of two, and the numbers halfway if there are at most `MAX_BINS`."""
    counts: list[int]
    """How many numbers are in each bin ``[edges[i], edges[i + 1])``."""

    @classmethod
    def of(cls, values: Int64s) -> "Distribution":
        """The distribution of one or more numbers that are not negative."""
        cuts: list[int] = np.percentile(values, [0, 5, 50, 95, 100], method="nearest").tolist()
        least, percentile_5, median, percentile_95, greatest = cuts
        powers = [1 << power for power in range(greatest.bit_length() + 1)]
        for halves in ([3 * power // 2 for power in powers], []):
            edges = sorted({0, *powers, *halves})
            first = int(np.searchsorted(edges, least, side="right")) - 1
            edges = edges[first : int(np.searchsorted(edges, greatest, side="right")) + 1]
            if len(edges) <= MAX_BINS + 1:
                break
        counts, _ = np.histogram(values, edges)
        return cls(
            least=least,
            percentile_5=percentile_5,
            median=median,
            percentile_95=percentile_95,
            greatest=greatest,
            mean=float(values.mean()),
            edges=edges,
            counts=counts.tolist(),
        )


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """Mean and standard deviation of the pixels, as values in [0, 1]; every photo counts equally."""

    num_photos: int
    num_undecodable: int
    """Further photos that were drawn and cannot be decoded."""
    mean: tuple[float, float, float]
    """Means of red, green and blue."""
    std: tuple[float, float, float]


@dataclass(kw_only=True)
class PhotoInfo:
    """Description of one component that is a photo or a mask."""

    num_photos: int = 0
    is_mask: bool = False
    """See `dali_pipes.formats.photo_names.photo_roles`."""
    formats: dict[str, int] = field(default_factory=dict)
    height: Distribution | None = None
    width: Distribution | None = None
    short_side: Distribution | None = None
    num_turned: int | None = None
    """Photos whose EXIF orientation is not 1; ``None``: the shard indexes do not keep orientations."""
    num_bytes: Distribution | None = None
    num_headers: int = 0
    """The number of headers that were read for the following fields."""
    kinds: dict[str, int] = field(default_factory=dict)
    """``JPEG baseline 4:2:0``, ``PNG 8-bit gray`` -> number of headers."""
    traits: dict[str, int] = field(default_factory=dict)
    """``progressive``, ``CMYK``, ``gray``, ``alpha``, ``palette``, ``12-bit``, ``16-bit``, ``EXIF-rotated`` -> number
    of headers."""
    num_for_hardware: int = 0
    """Number of photos among them that the GPU's JPEG engine decodes: see `PhotoDetails.is_for_hardware`."""
    pixels: Pixels | None = None


@dataclass(kw_only=True)
class SetInfo:
    """Description of a set of shards."""

    url: str
    is_indexed: bool
    num_shards: int
    num_samples: int
    num_bytes: int
    components: dict[str, int] = field(default_factory=dict)
    component_bytes: dict[str, int] = field(default_factory=dict)
    recoded: list[RecodedStep] = field(default_factory=list)
    """What was done to the photos when they were packed."""
    classes: dict[int, str] = field(default_factory=dict)
    class_counts: dict[int, int] = field(default_factory=dict)
    """Class id -> number of samples; 0 for classes of the table that have no sample."""
    photos: dict[str, PhotoInfo] = field(default_factory=dict)
    buckets: BucketsInfo | None = None
    """What buckets make of the photos, if that was asked for."""
    missing: list[str] = field(default_factory=list)
    """URLs or paths of shards that the manifest lists and the store lacks; nothing else here counts them."""
    beyond: list[str] = field(default_factory=list)
    """URLs or paths of shards that lie beside the others and that no manifest lists; nothing else here counts them."""

    @classmethod
    def of(cls, indexed: IndexedSet) -> "SetInfo":
        """What the manifest says: the sums, and the class table."""
        manifest = indexed.manifest
        return cls(
            url=indexed.shards.url,
            is_indexed=indexed.is_indexed,
            num_shards=manifest.num_shards,
            num_samples=manifest.num_samples,
            num_bytes=manifest.total_bytes,
            recoded=list(manifest.recoded),
            classes=dict(sorted(manifest.classes.items())),
        )

    def as_json(self) -> dict[str, Any]:
        """All fields, with JSON's types."""
        return asdict(self) | {
            "classes": {str(label): name for label, name in self.classes.items()},
            "class_counts": {str(label): number for label, number in self.class_counts.items()},
        }


def describe_set(
    shards: ShardSet,
    *,
    num_headers: int = 2000,
    num_pixels: int = 256,
    seed: int = 0,
    on: WorkersKind = "processes",
    show_progress: bool = False,
) -> SetInfo:
    """Describe a set of shards. It takes 24 bytes of memory for each photo.

    Args:
        shards: The shards.
        num_headers: How many headers of each photo component are read; 0: all.
        num_pixels: How many photos of each component that is not a mask are decoded; 0: none.
        seed: Draws the photos.
        on: Who reads: threads of this process, or ``"ray"``: see `prep.workers.open_workers`. The result is the same.
        show_progress: Draw bars.

    Raises:
        DataError: If the manifest, an index or a shard cannot be read.
        PipesError: If Ray is not installed, or cannot be reached, or a node has another directory.
        ValueError: If a number is negative.
    """
    for name, number in (("num_headers", num_headers), ("num_pixels", num_pixels)):
        if number < 0:
            raise ValueError(f"{name} must not be negative, got {number}")
    # Reading waits, and decoders release the GIL: threads of this process do as much as several processes.
    with open_workers(on, 1 if on == "processes" else None) as workers:
        workers.check_reach(directory for directory in [shards.store.directory] if directory is not None)
        return _describe(shards, workers, num_headers, num_pixels, np.random.default_rng(seed), show_progress)


def _describe(
    shards: ShardSet,
    workers: Workers,
    num_headers: int,
    num_pixels: int,
    draw: np.random.Generator,
    show_progress: bool,
) -> SetInfo:
    indexed = IndexedSet(shards, workers=workers, show_progress=show_progress)
    manifest = indexed.manifest
    info = SetInfo.of(indexed)
    columns = IndexColumns()
    starts = range(0, manifest.num_shards, _TASK_SHARDS)
    parts = (indexed.part(range(start, min(start + _TASK_SHARDS, manifest.num_shards))) for start in starts)
    with bar(what="indexes", total=manifest.num_shards, unit="shards", shown=show_progress, delay_s=1) as drawn:
        for first, own in zip(starts, workers.map(_add_up, parts, on_progress=drawn.update), strict=True):
            columns.merge(own, first_row=first)
    columns.fill(info, indexed.roles)
    turned = indexed.manifest.turned
    for component, photo in info.photos.items():
        photo.num_turned = turned.get(component, 0)
        total = len(columns.sizes[component])
        chosen = np.arange(total) if not num_headers else _draw(draw, total, num_headers)
        _look_at_headers(workers, columns.photos(indexed, component, chosen), photo, show_progress=show_progress)
        if num_pixels and not photo.is_mask:
            photos = columns.photos(indexed, component, _draw(draw, total, num_pixels))
            photo.pixels = _pixels(workers, photos, component, show_progress=show_progress)
    return info


def _add_up(indexed: IndexedSet, report: Report) -> "IndexColumns":
    columns = IndexColumns()
    for row, index in indexed.each():
        columns.add(row, index)
        report(1)
    return columns


def _draw(draw: np.random.Generator, total: int, num: int) -> Int64s:
    """``num`` of ``total`` rows, sorted."""
    return np.sort(draw.choice(total, min(total, num), replace=False)).astype(np.int64)


class IndexColumns:
    """Adds up the shard indexes: counts, and three numbers for each photo."""

    def __init__(self) -> None:
        self._components: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._labels: Counter[int] = Counter()
        self._formats: dict[str, Int64s] = {}
        self._parts: dict[str, list[Int64s]] = {}
        self._counts: dict[str, list[tuple[int, int]]] = {}
        self.sizes: dict[str, Int64s] = {}
        """component -> int64 [photos, 3]: bytes, height and width of the upright photo."""

    def add(self, row: int, index: ShardIndex) -> None:
        for component, offsets in index.offsets.items():
            is_there = offsets >= 0
            self._components[component] += int(is_there.sum())
            self._bytes[component] += int(index.sizes[component].sum())
            if component not in index.photos:
                continue
            photo = index.photos[component]
            columns = (index.sizes[component], *photo.upright_size)
            part = np.stack([column[is_there].astype(np.int64) for column in columns], axis=1)
            self._parts.setdefault(component, []).append(part)
            self._counts.setdefault(component, []).append((row, len(part)))
            counts = np.bincount(photo.format[is_there], minlength=len(PHOTO_FORMATS))
            self._formats[component] = self._formats.get(component, np.zeros(len(PHOTO_FORMATS), np.int64)) + counts
        if index.labels is not None:
            labels, counts = np.unique(index.labels[index.has_label], return_counts=True)
            self._labels.update(dict(zip(labels.tolist(), counts.tolist(), strict=True)))

    def merge(self, other: "IndexColumns", *, first_row: int) -> None:
        """Add the sums of the shards from this row on."""
        self._components.update(other._components)
        self._bytes.update(other._bytes)
        self._labels.update(other._labels)
        for component, parts in other._parts.items():
            self._parts.setdefault(component, []).append(np.concatenate(parts))
            counts = [(first_row + row, number) for row, number in other._counts[component]]
            self._counts.setdefault(component, []).extend(counts)
            self._formats[component] = self._formats.get(component, 0) + other._formats[component]

    def fill(self, info: SetInfo, roles: PhotoRoles) -> None:
        """Write the sums into the description."""
        info.components = dict(sorted(self._components.items()))
        info.component_bytes = dict(sorted(self._bytes.items()))
        info.class_counts = {label: self._labels[label] for label in sorted({*self._labels, *info.classes})}
        for component in sorted(self._parts):
            sizes = self.sizes[component] = np.concatenate(self._parts.pop(component))
            if not len(sizes):
                continue
            formats = self._formats[component]
            photo = info.photos[component] = PhotoInfo(
                num_photos=len(sizes),
                is_mask=component in roles.masks,
                formats={PHOTO_FORMATS[code]: int(formats[code]) for code in np.flatnonzero(formats)},
                num_bytes=Distribution.of(sizes[:, 0]),
            )
            sized = sizes[(sizes[:, 1] > 0) & (sizes[:, 2] > 0)]
            if len(sized):
                photo.height, photo.width = Distribution.of(sized[:, 1]), Distribution.of(sized[:, 2])
                photo.short_side = Distribution.of(sized[:, 1:].min(axis=1))

    def photos(self, indexed: IndexedSet, component: str, chosen: Int64s) -> "Iterator[_Photos]":
        """The photos with these sorted numbers, in tasks of some `_TASK_PHOTOS`."""
        wanted: list[tuple[int, Int64s]] = []
        first = 0
        for row, number in self._counts[component]:
            start, stop = np.searchsorted(chosen, [first, first + number])
            # A shard of many photos is read by several tasks.
            for begin in range(start, stop, _TASK_PHOTOS):
                wanted.append((row, chosen[begin : min(begin + _TASK_PHOTOS, stop)] - first))
                if sum(len(rows) for _, rows in wanted) >= _TASK_PHOTOS:
                    yield _Photos.of(indexed, component, wanted)
                    wanted = []
            first += number
        if wanted:
            yield _Photos.of(indexed, component, wanted)


class _Photos(NamedTuple):
    """Some photos of a component: a task."""

    indexed: IndexedSet
    """The shards that hold them, each once for each entry of ``wanted``."""
    component: str
    wanted: list[Int64s]
    """For each of these shards, the numbers of photos among its photos."""

    @classmethod
    def of(cls, indexed: IndexedSet, component: str, wanted: Sequence[tuple[int, Int64s]]) -> "_Photos":
        return cls(indexed.part([row for row, _ in wanted]), component, [rows for _, rows in wanted])

    def places(self) -> Iterator[_Place]:
        """Where they lie; reads the shard indexes."""
        for row, numbers in enumerate(self.wanted):
            index = self.indexed.read(row)
            rows = np.flatnonzero(index.offsets[self.component] >= 0)[numbers]
            for at in rows.tolist():
                offset, size = int(index.offsets[self.component][at]), int(index.sizes[self.component][at])
                yield _Place(self.indexed.manifest.names[row], offset, size)

    def look(self, function: Callable[[Store, _Place], Result], num_threads: int, report: Report) -> list[Result]:
        found = []
        for result in in_threads(partial(function, self.indexed.shards.store), self.places(), num_threads):
            found.append(result)
            report(1)
        return found


def _look_at_headers(workers: Workers, photos: Iterator[_Photos], photo: PhotoInfo, *, show_progress: bool) -> None:
    kinds: Counter[str] = Counter()
    traits: Counter[str] = Counter()
    with bar(what="headers", total=None, unit="photos", shown=show_progress, delay_s=1) as drawn:
        for details in chain.from_iterable(workers.map(_all_details, photos, on_progress=drawn.update)):
            kinds[_kind(details)] += 1
            traits.update(_traits(details))
            photo.num_headers += 1
            photo.num_for_hardware += details.is_for_hardware
    photo.kinds, photo.traits = dict(kinds.most_common()), dict(traits.most_common())


def _all_details(photos: _Photos, report: Report) -> list[PhotoDetails]:
    return photos.look(_details, NUM_READERS, report)


def _details(store: Store, place: _Place) -> PhotoDetails:
    start = place.offset
    for most in (HEAD_BYTES, MAX_PHOTO_BYTES):
        details = photo_details(store.read_range(place.shard, start=start, size=min(place.size, most)))
        if details is not None:
            return details
    return PhotoDetails("JPEG", 0, 0, 0, 0, "", "", 0, False, 0)


def _pixels(workers: Workers, photos: Iterator[_Photos], component: str, *, show_progress: bool) -> Pixels | None:
    total, squares, num, bad = np.zeros(3), np.zeros(3), 0, 0
    with bar(what=f"pixels of {component}", total=None, unit="photos", shown=show_progress, delay_s=1) as drawn:
        for moments in chain.from_iterable(workers.map(_all_moments, photos, on_progress=drawn.update)):
            if moments is None:
                bad += 1
            else:
                total, squares, num = total + moments[0], squares + moments[1], num + 1
    if not num:
        return Pixels(num_photos=0, num_undecodable=bad, mean=(0, 0, 0), std=(0, 0, 0)) if bad else None
    mean = total / num
    std = np.sqrt(np.maximum(squares / num - mean**2, 0))
    red, green, blue = mean.tolist()
    return Pixels(num_photos=num, num_undecodable=bad, mean=(red, green, blue), std=tuple(std.tolist()))


def _all_moments(photos: _Photos, report: Report) -> "list[Moments | None]":
    # At most one thread for each core, because each thread holds a decoded photo.
    return photos.look(_moments, len(os.sched_getaffinity(0)), report)


Moments = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
"""Means of a photo's red, green and blue, and of their squares: float64 [3] each."""


def _moments(store: Store, place: _Place) -> Moments | None:
    """The moments of a photo; ``None`` if it cannot be decoded."""
    try:
        check_size(place.size)
        data = store.read_range(place.shard, start=place.offset, size=place.size)
        _, pixels = decode(open_decoder("pillow"), data, rules=PhotoRules(), output="rgb")
    except Undecodable:
        return None
    # Compute with the counts of the 256 values: the pixels in floating point would take eight times the memory.
    counts = np.stack([count_values(pixels[..., channel]) for channel in range(3)])
    weights, values = counts / counts.sum(axis=1, keepdims=True), np.arange(256) / 255
    return weights @ values, weights @ values**2


def _kind(details: PhotoDetails) -> str:
    if details.format == "JPEG":
        colour = {1: "gray", 3: details.subsampling, 4: "CMYK"}.get(details.channels, "")
        return " ".join(filter(None, ["JPEG", details.process or "unreadable", colour]))
    if details.format == "PNG":
        colours = {1: "palette" if details.has_palette else "gray", 2: "gray and alpha", 3: "RGB", 4: "RGBA"}
        return f"PNG {details.bits}-bit {colours.get(details.channels, 'unreadable')}"
    return details.format


def _traits(details: PhotoDetails) -> Sequence[str]:
    is_png = details.format == "PNG"
    found = {
        "progressive": details.process in ("progressive", "interlaced"),
        "CMYK": details.format == "JPEG" and details.channels == 4,
        "gray": details.channels == 1 and not details.has_palette,
        "alpha": is_png and details.channels in (2, 4),
        "palette": details.has_palette,
        f"{details.bits}-bit": 8 < details.bits <= 16,
        "EXIF-rotated": details.orientation > 1,
    }
    return [trait for trait, is_so in found.items() if is_so]
