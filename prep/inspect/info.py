"""Describe a set of shards in numbers, from manifest and shard indexes, photo headers, and the pixels of a few photos.

`describe_buckets` says what aspect-ratio buckets make of them: samples, pixels lost by cropping, short last steps. Only
photos whose pixels are asked for are decoded. Without a manifest the shards are read once, in full.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dali_pipes.arrays import Int64s
from dali_pipes.data_set.data_set import DataSet, photo_sizes
from dali_pipes.formats.manifest import RecodedStep
from dali_pipes.formats.photo_header import MAX_PHOTO_BYTES, PHOTO_FORMATS, PhotoRules
from dali_pipes.formats.photo_names import ComponentCounts, find_photo
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.order.inputs import Buckets, OrderInputs
from dali_pipes.order.plan import Batching
from dali_pipes.order.selection import Selection
from dali_pipes.order.shaped import BucketGrouping, ShapedPlan
from dali_pipes.progress import bar
from dali_pipes.store.base import Store
from dali_pipes.store.patience import PatientThreads
from dali_pipes.store.shard_set import ShardSet
from prep.inspect.indexed_set import NUM_READERS, IndexedSet
from prep.photos.decoders import Undecodable, check_size, count_values, decode, open_decoder
from prep.photos.details import HEAD_BYTES, PhotoDetails, photo_details
from prep.workers import Report, Workers, WorkersKind, open_workers

MAX_BINS = 16
# A task reads so many photos.
_TASK_PHOTOS = 64
_PHOTO = np.dtype([("shard", "i4"), ("offset", "i8"), ("bytes", "i8"), ("height", "i4"), ("width", "i4")])
Photos = npt.NDArray[np.void]
"""Photos of one component, [photos]: row of the shard, place in it, height and width of the upright photo."""
Moments = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
"""Means of a photo's red, green and blue, and of their squares: float64 [3] each."""
Place = tuple[str, int, int]
"""Shard, offset and size of a component of a sample."""
Result = TypeVar("Result")


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
        least, *_, greatest = cuts
        powers = [1 << power for power in range(greatest.bit_length() + 1)]
        for halves in ([3 * power // 2 for power in powers], []):
            edges = sorted({0, *powers, *halves})
            first = int(np.searchsorted(edges, least, side="right")) - 1
            edges = edges[first : int(np.searchsorted(edges, greatest, side="right")) + 1]
            if len(edges) <= MAX_BINS + 1:
                break
        counts: list[int] = np.histogram(values, edges)[0].tolist()
        percentiles = dict(zip(("least", "percentile_5", "median", "percentile_95", "greatest"), cuts, strict=True))
        return cls(**percentiles, mean=float(values.mean()), edges=edges, counts=counts)


@dataclass(frozen=True)
class Pixels:
    """Mean and standard deviation of the pixels, as values in [0, 1]; every photo counts equally."""

    num_photos: int
    num_undecodable: int
    """Further photos that were drawn and cannot be decoded."""
    mean: tuple[float, ...]
    """Means of red, green and blue; 0 without a photo."""
    std: tuple[float, ...]


@dataclass(kw_only=True)
class PhotoInfo:
    """Description of one component that is a photo or a mask."""

    num_photos: int
    is_mask: bool
    formats: dict[str, int]
    num_turned: int
    """Photos whose EXIF orientation is not 1."""
    num_bytes: Distribution
    height: Distribution | None = None
    """Of the upright photos that have a readable size; ``None`` if there are none."""
    width: Distribution | None = None
    short_side: Distribution | None = None
    num_headers: int = 0
    """The number of headers that were read for the following fields."""
    kinds: dict[str, int] = field(default_factory=dict)
    """``JPEG baseline 4:2:0``, ``PNG 8-bit gray`` -> number of headers."""
    num_for_hardware: int = 0
    """Number of photos among them that the GPU's JPEG engine decodes: see `PhotoDetails.is_for_hardware`."""
    pixels: Pixels | None = None


@dataclass(frozen=True, kw_only=True)
class BucketInfo:
    """One bucket."""

    height: int
    width: int
    num_samples: int
    lost: float
    """Mean share of a photo's pixels that is cut off. If photos were fitted into the shape instead, the same share of
    each image would be padding."""
    num_enlarged: int
    """Samples whose photo has fewer rows or columns than the shape, after the cut."""
    num_left: int
    """Samples in the short last steps of the windows of an epoch. ``DROP`` leaves them out."""
    num_repeated: int
    """Samples that ``FILL`` adds to these steps."""


@dataclass(frozen=True, kw_only=True)
class BucketsInfo:
    """All buckets of a data set, for one global batch size and window."""

    photo: str
    global_batch_size: int
    window_bytes: int | str
    num_windows: int
    num_steps: int
    """Steps of an epoch under ``PARTIAL`` and ``FILL``."""
    num_unsized: int
    """Samples without a photo, or whose photo has no readable header; they count as square."""
    lost: float
    """Mean over all samples of `BucketInfo.lost`."""
    lost_if_square: float
    """The same if all photos were cut to squares."""
    buckets: list[BucketInfo] = field(default_factory=list)


@dataclass(kw_only=True)
class SetInfo:
    """Description of a set of shards."""

    url: str
    is_indexed: bool
    num_shards: int
    num_samples: int
    num_bytes: int
    components: dict[str, int]
    component_bytes: dict[str, int]
    recoded: list[RecodedStep]
    classes: dict[int, str]
    class_counts: dict[int, int]
    """Class id -> number of samples; 0 for classes of the table that have no sample."""
    photos: dict[str, PhotoInfo]
    buckets: BucketsInfo | None = None
    missing: list[str] = field(default_factory=list)
    """URLs or paths of shards that the manifest lists and the store lacks; nothing else here counts them."""
    beyond: list[str] = field(default_factory=list)
    """URLs or paths of shards that lie beside the others and that no manifest lists; nothing else here counts them."""


def describe_set(
    shards: ShardSet,
    *,
    num_headers: int = 2000,
    num_pixels: int = 256,
    seed: int = 0,
    on: WorkersKind = "processes",
    show_progress: bool = False,
) -> SetInfo:
    """Describe a set of shards. It takes 28 bytes of memory for each photo.

    Args:
        shards: The shards.
        num_headers: How many headers of each photo component are read; 0: all.
        num_pixels: How many photos of each component that is not a mask are decoded; 0: none.
        seed: Draws the photos.
        on: Who reads photos: threads of this process, or ``"ray"``: see `prep.workers.open_workers`.
        show_progress: Draw bars.

    Raises:
        DataError: If the manifest, an index or a shard cannot be read.
        PipesError: If Ray is not installed, or cannot be reached, or a node has another directory.
    """
    draw = np.random.default_rng(seed)
    # Reading waits, and decoders release the GIL: threads of this process do as much as several processes.
    with open_workers(on, 1 if on == "processes" else None) as workers:
        workers.check_reach(directory for directory in [shards.store.directory] if directory is not None)
        indexed = IndexedSet(shards, show_progress=show_progress)
        info, photos = sum_up(indexed, show_progress=show_progress)
        for component, photo in info.photos.items():
            rows = photos[component]
            look = partial(_look, workers, indexed, show_progress=show_progress)
            kinds = Counter[str]()
            for details in look(_details, NUM_READERS, _drawn(draw, rows, num_headers or len(rows)), "headers"):
                kinds[_kind(details)] += 1
                photo.num_for_hardware += details.is_for_hardware
            photo.num_headers, photo.kinds = kinds.total(), dict(kinds.most_common())
            if num_pixels and not photo.is_mask:
                # At most one thread for each core, because each thread holds a decoded photo.
                num_threads, drawn = len(os.sched_getaffinity(0)), _drawn(draw, rows, num_pixels)
                photo.pixels = _pixels(list(look(_moments, num_threads, drawn, f"pixels of {component}")))
    return info


# The shard indexes


def sum_up(
    indexed: IndexedSet, look: Callable[[ShardIndex], None] = lambda _: None, *, show_progress: bool
) -> tuple[SetInfo, dict[str, Photos]]:
    """What manifest and shard indexes say of a set, and its photos by component; ``look`` is called with each index."""
    manifest = indexed.manifest
    components, num_bytes, labels = Counter[str](), Counter[str](), Counter[int]()
    formats: defaultdict[str, Counter[str]] = defaultdict(Counter)
    parts: defaultdict[str, list[Photos]] = defaultdict(list)
    with bar(what="indexes", total=manifest.num_shards, unit="shards", shown=show_progress, delay_s=1) as drawn:
        for row, index in indexed.each():
            look(index)
            for component, offsets in index.offsets.items():
                is_there = offsets >= 0
                components[component] += int(is_there.sum())
                num_bytes[component] += int(index.sizes[component].sum())
                if component in index.photos:
                    photo, part = index.photos[component], np.zeros(index.num_samples, _PHOTO)
                    part["shard"], part["offset"], part["bytes"] = row, offsets, index.sizes[component]
                    part["height"], part["width"] = photo.upright_size
                    parts[component].append(part[is_there])
                    formats[component].update(map(PHOTO_FORMATS.__getitem__, photo.format[is_there].tolist()))
            if index.labels is not None:
                labels.update(index.labels[index.has_label].tolist())
            drawn.update(1)
    photos = {component: np.concatenate(parts.pop(component)) for component in sorted(parts)}
    photos = {component: rows for component, rows in photos.items() if len(rows)}
    info = SetInfo(
        url=indexed.shards.url,
        is_indexed=indexed.is_indexed,
        num_shards=manifest.num_shards,
        num_samples=manifest.num_samples,
        num_bytes=manifest.total_bytes,
        components=dict(sorted(components.items())),
        component_bytes=dict(sorted(num_bytes.items())),
        recoded=list(manifest.recoded),
        classes=dict(sorted(manifest.classes.items())),
        class_counts={label: labels[label] for label in sorted({*labels, *manifest.classes})},
        photos={},
    )
    for component, rows in photos.items():
        described = info.photos[component] = PhotoInfo(
            num_photos=len(rows),
            is_mask=component in indexed.roles.masks,
            formats=dict(formats[component].most_common()),
            num_turned=manifest.turned.get(component, 0),
            num_bytes=Distribution.of(rows["bytes"]),
        )
        sized = rows[(rows["height"] > 0) & (rows["width"] > 0)]
        if len(sized):
            described.height, described.width = Distribution.of(sized["height"]), Distribution.of(sized["width"])
            described.short_side = Distribution.of(np.minimum(sized["height"], sized["width"]))
    return info, photos


def _drawn(draw: np.random.Generator, photos: Photos, num: int) -> Photos:
    """``num`` of the photos, in their order."""
    return photos[np.sort(draw.choice(len(photos), min(len(photos), num), replace=False))]


# Photos, by the workers


def _look(
    workers: Workers,
    indexed: IndexedSet,
    function: Callable[[Store, Place], Result],
    num_threads: int,
    photos: Photos,
    what: str,
    *,
    show_progress: bool,
) -> Iterator[Result]:
    """Yield the results of a function for some photos, in their order; workers call it in ``num_threads`` threads."""
    names = indexed.manifest.names
    places = [(names[shard], offset, size) for shard, offset, size, _, _ in photos.tolist()]
    tasks = (places[start : start + _TASK_PHOTOS] for start in range(0, len(places), _TASK_PHOTOS))
    task_function = partial(_in_threads, partial(function, indexed.shards.store), num_threads)
    with bar(what=what, total=len(places), unit="photos", shown=show_progress, delay_s=1) as drawn:
        yield from chain.from_iterable(workers.map(task_function, tasks, on_progress=drawn.update))


def _in_threads(
    function: Callable[[Place], Result], num_threads: int, places: list[Place], report: Report
) -> list[Result]:
    with PatientThreads(num_threads) as threads:
        found = list(threads.map(function, places))
    report(len(found))
    return found


def _details(store: Store, place: Place) -> PhotoDetails:
    shard, offset, size = place
    for most in (HEAD_BYTES, MAX_PHOTO_BYTES):
        details = photo_details(store.read_range(shard, start=offset, size=min(size, most)))
        if details is not None:
            return details
    return PhotoDetails("JPEG", 0, 0)


def _kind(details: PhotoDetails) -> str:
    if details.format == "JPEG":
        colour = {1: "gray", 3: details.subsampling, 4: "CMYK"}.get(details.channels, "")
        return " ".join(filter(None, ["JPEG", details.process or "unreadable", colour]))
    if details.format == "PNG":
        colours = {1: "palette" if details.has_palette else "gray", 2: "gray and alpha", 3: "RGB", 4: "RGBA"}
        return f"PNG {details.bits}-bit {colours.get(details.channels, 'unreadable')}"
    return details.format


def _pixels(found: Sequence[Moments | None]) -> Pixels | None:
    moments = [one for one in found if one is not None]
    if not found:
        return None
    mean, squares = np.array(moments).mean(axis=0) if moments else np.zeros((2, 3))
    std = np.sqrt(np.maximum(squares - mean**2, 0))
    num_undecodable = len(found) - len(moments)
    return Pixels(len(moments), num_undecodable, mean=tuple(mean.tolist()), std=tuple(std.tolist()))


def _moments(store: Store, place: Place) -> Moments | None:
    """The moments of a photo; ``None`` if it cannot be decoded."""
    try:
        shard, offset, size = place
        check_size(size)
        data = store.read_range(shard, start=offset, size=size)
        _, pixels = decode(open_decoder("pillow"), data, rules=PhotoRules(), output="rgb")
    except Undecodable:
        return None
    # Compute with the counts of the 256 values: the pixels in floating point would take eight times the memory.
    counts = np.stack([count_values(pixels[..., channel]) for channel in range(3)])
    weights, values = counts / counts.sum(axis=1, keepdims=True), np.arange(256) / 255
    return weights @ values, weights @ values**2


# Buckets


def describe_buckets(
    shards: ShardSet, shapes: Buckets, *, global_batch_size: int = 256, window_bytes: int | None = None
) -> BucketsInfo:
    """Plan epoch 0 of seed 0 with buckets, and say what it does to the photos.

    ``global_batch_size`` is the number of samples of one step of all ranks; ``window_bytes`` is the
    option of `dali_pipes.options.Shuffle`. With ``None`` all shards are one window.

    Raises:
        DataError: If the column file has no heights and widths, or it is not clear which component is the photo.
        ValueError: If no sample is left.
    """
    data_set = DataSet(shards)
    manifest, whole = data_set.manifest, data_set.whole
    photo = shapes.photo or find_photo({"": ComponentCounts(whole.components, whole.num_samples)})
    height, width = photo_sizes(data_set, photo)
    grouping = BucketGrouping(shapes.of(height, width), shapes=shapes.shapes, group_size=global_batch_size)
    plan = ShapedPlan(
        grouping=grouping,
        shard_bytes=manifest.shard_bytes,
        shard_samples=manifest.samples,
        order=OrderInputs(shuffle_window="all" if window_bytes is None else window_bytes, shapes=shapes),
        selection=Selection(manifest.num_samples, excluded=manifest.removed),
    )
    is_kept = np.ones(manifest.num_samples, np.bool_)
    is_kept[manifest.removed] = False
    lost, square = (1 - some.cover(height, width) for some in (shapes, Buckets(area=1, step=1, max_aspect=1)))
    is_unsized = (height == 0) | (width == 0)
    chosen = shapes.shapes[grouping.of]
    is_enlarged = ((height < chosen[:, 0]) | (width < chosen[:, 1])) & ~is_unsized
    counts = grouping.counts(plan.pools)
    left = counts % global_batch_size
    found = BucketsInfo(
        photo=photo,
        global_batch_size=global_batch_size,
        window_bytes="all" if window_bytes is None else window_bytes,
        num_windows=len(counts),
        num_steps=plan.num_steps(Batching(batch_size=global_batch_size)),
        num_unsized=int((is_unsized & is_kept).sum()),
        lost=float(lost[is_kept].mean()),
        lost_if_square=float(square[is_kept].mean()),
    )
    for bucket, (rows, columns) in enumerate(shapes.shapes.tolist()):
        samples = is_kept & (grouping.of == bucket)
        found.buckets.append(
            BucketInfo(
                height=rows,
                width=columns,
                num_samples=int(samples.sum()),
                lost=float(lost[samples].mean()) if samples.any() else 0.0,
                num_enlarged=int((samples & is_enlarged).sum()),
                num_left=int(left[:, bucket].sum()),
                num_repeated=int((-counts[:, bucket] % global_batch_size).sum()),
            )
        )
    return found
