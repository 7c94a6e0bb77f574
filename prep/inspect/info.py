"""Shards to what they hold, in numbers: from manifest and shard indexes, photos' headers and a few photos' pixels.

Nothing is decoded but the photos whose pixels are asked for. Without a manifest the shards are read once, in full.
"""

import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from dali_pipes.data_set.indexing import find_manifest, index_in_memory
from dali_pipes.errors import DataError
from dali_pipes.formats.column_file import checksum
from dali_pipes.formats.names import LABEL_COMPONENT, index_name, manifest_name
from dali_pipes.formats.photo_header import MAX_PIXELS, PHOTO_FORMATS
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.progress import bar
from dali_pipes.store.urls import ShardSet
from prep.inspect.verify_shard import is_mask_name
from prep.photos.decoders import Undecodable, decode, open_decoder
from prep.photos.details import HEAD_BYTES, PhotoDetails, photo_details

if TYPE_CHECKING:
    from dali_pipes.formats.manifest import Manifest

__all__ = ["Distribution", "IndexedSet", "PhotoInfo", "Pixels", "Place", "SetInfo", "describe_set"]

# Objects and ranges asked for at a time: the wait is the store's latency.
NUM_READERS = 16
_AHEAD = 4 * NUM_READERS
MAX_BINS = 16

Int64s = npt.NDArray[np.int64]
Result = TypeVar("Result")


class IndexedSet:
    """Shards with their manifest and indexes, as they lie beside them or made now.

    Raises:
        DataError: If manifest or a shard cannot be read, or the manifest does not list a shard.
    """

    def __init__(self, shards: ShardSet, *, show_progress: bool = False) -> None:
        self.shards = shards
        found = find_manifest(shards)
        self.is_indexed = found is not None
        """Whether there is a manifest."""
        self._made: Mapping[str, bytes] = {}
        if found is None:
            made = index_in_memory(shards, show_progress=show_progress)
            found, self._made = made.manifest, made.indexes
        self.manifest: Manifest = found.select(shards.names, where=shards.store.locate(manifest_name(shards.prefix)))

    def read(self, row: int) -> ShardIndex:
        """The index of one shard.

        Raises:
            DataError: If it is not the one that the manifest was made with.
        """
        name = index_name(self.manifest.names[row])
        data = self._made[name] if name in self._made else self.shards.store.read(name)
        if len(data) != self.manifest.index_bytes[row] or checksum(data) != self.manifest.index_checksums[row]:
            raise DataError(
                f"'{self.shards.store.locate(name)}' is not the index that the manifest was made with; see what is "
                "wrong: dali-pipes prep verify URL, and index the shards anew: dali-pipes prep index URL"
            )
        return ShardIndex.from_bytes(data, where=name)

    def each(self) -> Iterator[tuple[int, ShardIndex]]:
        """All shards' indexes, in order, some read ahead; kept by nobody."""
        with ThreadPoolExecutor(NUM_READERS) as readers:
            for first in range(0, self.manifest.num_shards, _AHEAD):
                rows = range(first, min(first + _AHEAD, self.manifest.num_shards))
                yield from zip(rows, readers.map(self.read, rows), strict=True)


class Place(NamedTuple):
    """Where one component of one sample lies."""

    shard: str
    key: str
    component: str
    offset: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Many numbers in a few."""

    least: int
    percentile_5: int
    median: int
    percentile_95: int
    greatest: int
    mean: float
    edges: list[int]
    """Of the histogram's bins, from least to greatest: powers of two, and what is halfway between two where that makes
    `MAX_BINS` at most."""
    counts: list[int]
    """In each ``[edges[i], edges[i + 1])``; one less than edges."""

    @classmethod
    def of(cls, values: Int64s) -> "Distribution":
        """The distribution of at least one number, none of them negative."""
        cuts = np.percentile(values, [0, 5, 50, 95, 100], method="nearest")
        least, greatest = int(values.min()), int(values.max())
        powers = [1 << power for power in range(greatest.bit_length() + 1)]
        for halves in ([3 * power // 2 for power in powers], []):
            edges = sorted({0, *powers, *halves})
            first = int(np.searchsorted(edges, least, side="right")) - 1
            edges = edges[first : int(np.searchsorted(edges, greatest, side="right")) + 1]
            if len(edges) <= MAX_BINS + 1:
                break
        counts, _ = np.histogram(values, edges)
        return cls(
            least=int(cuts[0]),
            percentile_5=int(cuts[1]),
            median=int(cuts[2]),
            percentile_95=int(cuts[3]),
            greatest=int(cuts[4]),
            mean=float(values.mean()),
            edges=edges,
            counts=counts.tolist(),
        )


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """Mean and standard deviation of the pixels of some photos, of values in [0, 1]; each photo counts the same."""

    num_photos: int
    num_undecodable: int
    """Photos that were drawn too, and cannot be decoded."""
    mean: tuple[float, float, float]
    """Of red, green, blue."""
    std: tuple[float, float, float]


@dataclass(kw_only=True)
class PhotoInfo:
    """What is known of one component that is a photo or a mask."""

    num_photos: int = 0
    is_mask: bool = False
    """By its name."""
    formats: dict[str, int] = field(default_factory=dict)
    height: Distribution | None = None
    width: Distribution | None = None
    short_side: Distribution | None = None
    num_bytes: Distribution | None = None
    num_headers: int = 0
    """Headers that were looked at for what follows."""
    kinds: dict[str, int] = field(default_factory=dict)
    """``JPEG baseline 4:2:0``, ``PNG 8-bit gray`` -> how many of these headers."""
    traits: dict[str, int] = field(default_factory=dict)
    """``progressive``, ``CMYK``, ``gray``, ``alpha``, ``palette``, ``12-bit``, ``16-bit``, ``EXIF-rotated`` -> how
    many."""
    num_for_hardware: int = 0
    """How many of these the GPU's JPEG engine takes: see `prep.photos.details.PhotoDetails.is_for_hardware`."""
    pixels: Pixels | None = None


@dataclass(kw_only=True)
class SetInfo:
    """What a set of shards holds."""

    url: str
    is_indexed: bool
    num_shards: int
    num_samples: int
    num_bytes: int
    components: dict[str, int] = field(default_factory=dict)
    component_bytes: dict[str, int] = field(default_factory=dict)
    classes: dict[int, str] = field(default_factory=dict)
    class_counts: dict[int, int] = field(default_factory=dict)
    """Class id -> samples; classes of the table that none has are there with 0."""
    photos: dict[str, PhotoInfo] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """All of it in types that JSON has."""
        return asdict(self) | {
            "classes": {str(label): name for label, name in self.classes.items()},
            "class_counts": {str(label): number for label, number in self.class_counts.items()},
        }


def describe_set(
    shards: ShardSet, *, num_headers: int = 2000, num_pixels: int = 256, seed: int = 0, show_progress: bool = False
) -> SetInfo:
    """What a set of shards holds.

    Args:
        shards: The shards.
        num_headers: Of each photo component, how many photos' headers are read; 0: all.
        num_pixels: Of each that is no mask, how many photos are decoded; 0: none.
        seed: What these are drawn from.
        show_progress: Draw bars.

    Memory is 24 bytes a photo.

    Raises:
        DataError: If manifest, an index or a shard cannot be read.
        ValueError: If a number is negative.
    """
    for name, number in (("num_headers", num_headers), ("num_pixels", num_pixels)):
        if number < 0:
            raise ValueError(f"{name} must not be negative, got {number}")
    indexed = IndexedSet(shards, show_progress=show_progress)
    manifest = indexed.manifest
    info = SetInfo(
        url=shards.url,
        is_indexed=indexed.is_indexed,
        num_shards=manifest.num_shards,
        num_samples=manifest.num_samples,
        num_bytes=manifest.total_bytes,
        classes=dict(sorted(manifest.classes.items())),
    )
    columns = _Columns()
    draw = np.random.default_rng(seed)
    with bar(what="indexes", total=manifest.num_shards, unit="shards", shown=show_progress, delay_s=1) as drawn:
        for row, index in indexed.each():
            columns.add(row, index)
            drawn.update(1)
    columns.fill(info)
    for component, photo in info.photos.items():
        photo.is_mask = is_mask_name(component, columns.together[component])
        total = len(columns.sizes[component])
        chosen = np.arange(total) if not num_headers else _draw(draw, total, num_headers)
        places = columns.places(indexed, component, chosen)
        _look_at_headers(shards, places, photo, component, show_progress=show_progress)
        if num_pixels and not photo.is_mask:
            places = columns.places(indexed, component, _draw(draw, total, num_pixels))
            photo.pixels = _pixels(shards, places, component, show_progress=show_progress)
    return info


def _draw(draw: np.random.Generator, total: int, num: int) -> Int64s:
    """Which of ``total``, in order."""
    return np.sort(draw.choice(total, min(total, num), replace=False)).astype(np.int64)


class _Columns:
    """What all shard indexes say, summed up or a number a photo."""

    def __init__(self) -> None:
        self._components: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._labels: Counter[int] = Counter()
        self._formats: dict[str, Int64s] = {}
        self._parts: dict[str, list[Int64s]] = {}
        self._counts: dict[str, list[tuple[int, int]]] = {}
        self.together: dict[str, set[str]] = {}
        """component -> photo components that a sample has beside it, and itself."""
        self.sizes: dict[str, Int64s] = {}
        """component -> int64 [photos, 3]: bytes, height, width."""

    def add(self, row: int, index: ShardIndex) -> None:
        for component, offsets in index.offsets.items():
            is_there = offsets >= 0
            self._components[component] += int(is_there.sum())
            self._bytes[component] += int(index.sizes[component].sum())
            if component not in index.photos:
                continue
            together = self.together.setdefault(component, {component})
            together |= {name for name in index.photos if (is_there & (index.offsets[name] >= 0)).any()}
            photo = index.photos[component]
            columns = (index.sizes[component], photo.height, photo.width)
            part = np.stack([column[is_there].astype(np.int64) for column in columns], axis=1)
            self._parts.setdefault(component, []).append(part)
            self._counts.setdefault(component, []).append((row, len(part)))
            counts = np.bincount(photo.format[is_there], minlength=len(PHOTO_FORMATS))
            self._formats[component] = self._formats.get(component, np.zeros(len(PHOTO_FORMATS), np.int64)) + counts
        if index.labels is not None:
            labels, counts = np.unique(index.labels[index.offsets[LABEL_COMPONENT] >= 0], return_counts=True)
            self._labels.update(dict(zip(labels.tolist(), counts.tolist(), strict=True)))

    def fill(self, info: SetInfo) -> None:
        info.components, info.component_bytes = (
            dict(sorted(self._components.items())),
            dict(sorted(self._bytes.items())),
        )
        info.class_counts = {label: self._labels[label] for label in sorted({*self._labels, *info.classes})}
        for component in sorted(self._parts):
            sizes = self.sizes[component] = np.concatenate(self._parts.pop(component))
            if not len(sizes):
                continue
            formats = self._formats[component]
            photo = info.photos[component] = PhotoInfo(
                num_photos=len(sizes),
                formats={PHOTO_FORMATS[code]: int(formats[code]) for code in np.flatnonzero(formats)},
                num_bytes=Distribution.of(sizes[:, 0]),
            )
            sized = sizes[(sizes[:, 1] > 0) & (sizes[:, 2] > 0)]
            if len(sized):
                photo.height, photo.width = Distribution.of(sized[:, 1]), Distribution.of(sized[:, 2])
                photo.short_side = Distribution.of(sized[:, 1:].min(axis=1))

    def places(self, indexed: IndexedSet, component: str, chosen: Int64s) -> Iterator[Place]:
        """Where some of a component's photos lie, by their numbers in order; a shard's index is read once more."""
        first = 0
        for row, number in self._counts[component]:
            start, stop = np.searchsorted(chosen, [first, first + number])
            if start < stop:
                index = indexed.read(row)
                rows = np.flatnonzero(index.offsets[component] >= 0)[chosen[start:stop] - first]
                for at in rows.tolist():
                    offset, size = int(index.offsets[component][at]), int(index.sizes[component][at])
                    yield Place(indexed.manifest.names[row], index.keys[at], component, offset, size)
            first += number


def _look_at_headers(
    shards: ShardSet, places: Iterator[Place], photo: PhotoInfo, component: str, *, show_progress: bool
) -> None:
    kinds: Counter[str] = Counter()
    traits: Counter[str] = Counter()

    def look(place: Place) -> PhotoDetails:
        start, size = place.offset, min(place.size, HEAD_BYTES)
        details = photo_details(shards.store.read_range(place.shard, start=start, size=size))
        if details is None:
            details = photo_details(shards.store.read_range(place.shard, start=start, size=place.size))
        return details or PhotoDetails("JPEG", 0, 0, 0, 0, "", "", 0, False, 0)

    what = f"headers of {component}"
    for details in _in_threads(look, places, num_threads=NUM_READERS, what=what, show_progress=show_progress):
        kinds[_kind(details)] += 1
        traits.update(_traits(details))
        photo.num_headers += 1
        photo.num_for_hardware += details.is_for_hardware
    photo.kinds, photo.traits = dict(kinds.most_common()), dict(traits.most_common())


def _pixels(shards: ShardSet, places: Iterator[Place], component: str, *, show_progress: bool) -> Pixels | None:
    decoder = open_decoder("pillow")

    def look(place: Place) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None:
        data = shards.store.read_range(place.shard, start=place.offset, size=place.size)
        try:
            _, pixels = decode(decoder, data, max_pixels=MAX_PIXELS, output="rgb")
        except Undecodable:
            return None
        # By the 256 values that a pixel can have: a photo in floating point would take eight times its room.
        counts = np.stack([_count_values(pixels[..., channel]) for channel in range(3)])
        weights, values = counts / counts.sum(axis=1, keepdims=True), np.arange(256) / 255
        return weights @ values, weights @ values**2

    total, squares, num, bad = np.zeros(3), np.zeros(3), 0, 0
    # Not more than cores: each holds a decoded photo.
    num_threads, what = len(os.sched_getaffinity(0)), f"pixels of {component}"
    for moments in _in_threads(look, places, num_threads=num_threads, what=what, show_progress=show_progress):
        if moments is None:
            bad += 1
            continue
        total, squares, num = total + moments[0], squares + moments[1], num + 1
    if not num:
        return Pixels(num_photos=0, num_undecodable=bad, mean=(0, 0, 0), std=(0, 0, 0)) if bad else None
    mean = total / num
    std = np.sqrt(np.maximum(squares / num - mean**2, 0))
    red, green, blue = mean.tolist()
    return Pixels(num_photos=num, num_undecodable=bad, mean=(red, green, blue), std=tuple(std.tolist()))


def _count_values(channel: npt.NDArray[np.uint8]) -> Int64s:
    counts = np.zeros(256, np.int64)
    rows = max(1, (1 << 20) // channel.shape[1])
    for start in range(0, len(channel), rows):  # numpy counts in 8 bytes a pixel
        counts += np.bincount(channel[start : start + rows].ravel(), minlength=256)
    return counts


def _in_threads(
    look: Callable[[Place], Result], places: Iterator[Place], *, num_threads: int, what: str, show_progress: bool
) -> Iterator[Result]:
    """``look`` of each, in order; a few ahead of the one that is wanted."""
    ahead: deque[Future[Result]] = deque()
    drawn = bar(what=what, total=None, unit="photos", shown=show_progress, delay_s=1)
    with drawn, ThreadPoolExecutor(num_threads) as readers:
        try:
            while True:
                while len(ahead) < 4 * num_threads and (place := next(places, None)) is not None:
                    ahead.append(readers.submit(look, place))
                if not ahead:
                    return
                yield ahead.popleft().result()
                drawn.update(1)
        except BaseException:
            readers.shutdown(cancel_futures=True)
            raise


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
