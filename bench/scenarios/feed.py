"""Time the path from the cache to the training step without decoding: what a decoder waits for.

The graph reads headers of photos and masks and decodes nothing (`bench.scenarios.feed_loaders`). All shards are in
memory. Before anything is timed, keys, labels and sizes of every loader are compared with what Pillow reads from the
shards. Each turn has a process of its own. It reads an epoch, which is not timed, and then times the next.
"""

import functools
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import psutil

from bench.compare.outputs import OutputError
from bench.engine.options import FORMS, ListOption, at_least, cache_option, option
from bench.engine.scenario import Measured, Rounds, Scenario
from bench.engine.turn_process import call_apart
from bench.loaders.encoded import KEY, label_of, samples_of
from bench.loaders.recipe import find_components
from bench.scenarios.feed_loaders import SUBJECTS, Array, Batch, FeedData, FeedOptions, copied, open_ours, size_of
from bench.tools.environment import available_cores
from bench.tools.folders import RunFolder, check_room
from bench.tools.repeat import MASK, PHOTO, draw_shards
from dali_pipes.cache.placement import file_system
from dali_pipes.commands.options import size
from dali_pipes.errors import DataError
from dali_pipes.formats.names import LABEL_COMPONENT
from dali_pipes.progress import progress
from dali_pipes.store.shard_set import ShardSet

OURS, LIMIT = "dali-pipes", "preadv"
ORDER_BATCH = 64
"""The batch size with which the order of our loader is read; the order does not depend on it."""
MASKS: Mapping[str, tuple[bool, ...]] = {"without": (False,), "with": (True,), "both": (False, True)}
NUM_DRAWN = 60
# Bytes a pixel of a drawn photo of quality 90.
BYTES_PER_PIXEL = 0.285
# Photos differ in size, in this proportion to the mean: with one size, the batches' buffers would all be alike.
AREAS = (0.6, 0.8, 1.0, 1.2, 1.4)

Expected = Mapping[str, tuple[Any, ...]]
"""Key -> label, and height and width of photo and mask."""


class FeedPoint(NamedTuple):
    photo_kb: int
    masks: bool
    batch_size: int
    loader: str


_Made = Mapping[int, tuple[FeedData, Array]]
"""Mean size of photos in kB -> data, and the rows of an epoch in the order of our loader."""


@dataclass(frozen=True, kw_only=True)
class FeedScenario(Scenario[_Made, FeedPoint, Measured]):
    """Time loaders without decoding: ours, DALI's own reader, an external source, and a loop of preadv, the limit.

    Each gives the sizes of photos, read from their headers, and labels. Photos are drawn, unless --shards names some.
    All shards are copied into a directory under --cache, which is deleted at the end. The record can be compared with
    another one: dali-pipes bench compare BEFORE.json AFTER.json.
    """

    kind = "feed"
    title = "time the feed"
    ratio_to = LIMIT

    shards: ShardSet | None = option(help=f"Real photos instead of drawn ones: {FORMS}")
    photo_kb: Sequence[int] = option(
        "110,20", type=ListOption(int), help="Comma separated: mean sizes of drawn photos in kB."
    )
    masks: str = option("both", type=click.Choice(list(MASKS)), help="Whether masks are read, too.")
    batch_sizes: Sequence[int] = option("16,64,256,408,1024", type=ListOption(int), help="Comma separated.")
    loaders: Sequence[str] = option(",".join(SUBJECTS), type=ListOption(str), help="Comma separated: some of these.")
    repeats: int = option(5, help="Turns of each loader under each setting.")
    # More than the caches of most processors hold.
    data_bytes: int = option("224MiB", type=size, help="Bytes of drawn photos, of each size.")
    # 2 s for our loader on 2 cores.
    passes: int = option(8, help="Passes over the samples in an epoch; one epoch is timed in each turn.")
    num_threads: int = option(factory=available_cores, type=at_least(1), help="DALI's threads.  [default: cores]")
    preadv_threads: int = option(1, help="Threads of preadv; the table says how many threads the others read with.")
    photo: str | None = option(help="Component that holds the photo.  [default: the only one]")
    mask: str | None = option(help="Component that holds the mask.  [default: the only one]")
    work: Path | None = cache_option("Where the shards are copied, and the directory of the cache file; in memory.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("photo_kb", "batch_sizes", "loaders"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name} must name each value once, got '{','.join(map(str, values))}'")
            if name != "loaders" and min(values) < 1:
                raise ValueError(f"{name} must be at least 1, got {min(values)}")
        if unknown := [name for name in self.loaders if name not in SUBJECTS]:
            raise ValueError(f"loaders must be among {', '.join(SUBJECTS)}, got '{unknown[0]}'")

    @functools.cached_property
    def components(self) -> Sequence[str]:
        """Photo, and mask if it is taken in any setting."""
        if self.shards is None:
            photo, mask = self.photo or PHOTO, self.mask or MASK
        else:
            photo, found = find_components(self.shards, photo=self.photo, mask=self.mask)
            if found is None and self.masks == "with":
                raise DataError(f"'{self.shards.url}': no component is a mask by its name; name it: --mask NAME")
            mask = found or ""
        return (photo, mask) if mask and self.masks != "without" else (photo,)

    def prepare(self, folder: RunFolder, stack: ExitStack) -> _Made:
        sources: Mapping[int | None, ShardSet]
        if self.shards is not None:
            sources = {None: self.shards}
        else:
            # The shards, and the cache file.
            needed = 2 * self.data_bytes * len(self.photo_kb)
            check_room(folder.parent, needed, what="drawn photos", option="--cache", less="lower --data-bytes")
            sources = {kb: _drawn(folder.new(), photo_bytes=1000 * kb) for kb in self.photo_kb}
        made = {}
        for kb, source in sources.items():
            data = copied(
                source,
                num_samples=None if kb is None else max(1, self.data_bytes // (1000 * kb)),
                components=self.components,
                new_folder=folder.new,
            )
            mean_kb = round(float(data.sizes[self.components[0]].mean()) / 1000)
            order = call_apart(_order_of, data, self._options(self.components[:1], ORDER_BATCH), name=OURS)
            made[mean_kb if kb is None else kb] = (data, order)
        expected = {kb: expected_samples(data.shards, components=self.components) for kb, (data, _) in made.items()}
        points = [point for point in self.subjects(made) if point.batch_size == min(self.batch_sizes)]
        for point in progress(points, what="compare outputs", unit="loader"):
            data, order = made[point.photo_kb]
            options = replace(self._options_of(point), passes=1, order=order, keys=True)
            call_apart(_check_outputs, data, options, point.loader, expected[point.photo_kb], name=self.name_of(point))
        return made

    def _options(self, components: Sequence[str], batch_size: int) -> FeedOptions:
        names = ("passes", "num_threads", "seed", "preadv_threads")
        same = {name: getattr(self, name) for name in names}
        return FeedOptions(components=components, batch_size=batch_size, **same)

    def _options_of(self, point: FeedPoint) -> FeedOptions:
        return self._options(self.components if point.masks else self.components[:1], point.batch_size)

    def subjects(self, made: _Made) -> Sequence[FeedPoint]:
        masks = MASKS[self.masks] if len(self.components) == 2 else (False,)
        settings = itertools.product(made, masks, self.batch_sizes, self.loaders)
        return [FeedPoint(*values) for values in settings]

    def name_of(self, subject: FeedPoint) -> str:
        masks = "with masks" if subject.masks else "without masks"
        return f"'{subject.loader}', batches of {subject.batch_size} photos of {subject.photo_kb} kB, {masks}"

    def measure(self, made: _Made, subject: FeedPoint, number: int) -> Measured:
        data, order = made[subject.photo_kb]
        options = replace(self._options_of(subject), order=order)
        with SUBJECTS[subject.loader](data, options) as epoch:
            for _ in epoch():
                pass
            processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
            before = _spent(processes)
            num_samples = sum(len(batch["label"]) for batch in epoch())
            wall_s, cpu_s, kernel_s, faults, bytes_read = (_spent(processes) - before).tolist()
            # The kernel does not count the bytes of a process that has a context for asynchronous I/O.
            has_aio = "/[aio] (deleted)\n" in Path("/proc/self/maps").read_text()
        # DALI's reader gives whole batches, so its epoch may have some samples more.
        mean_bytes = sum(float(data.sizes[name].mean()) for name in options.components)
        figures = {
            "samples_per_s": num_samples / wall_s,
            "cpu_us_per_sample": 1e6 * cpu_s / num_samples,
            "kernel_us_per_sample": 1e6 * kernel_s / num_samples,
            "faults_per_sample": faults / num_samples,
            "read_ratio": None if has_aio else bytes_read / (num_samples * mean_bytes),
        }
        return {"figures": figures}

    def record(self, made: _Made, subject: FeedPoint, rows: Sequence[Measured]) -> dict[str, Any]:
        record = super().record(made, subject, rows) | {"data": list(made).index(subject.photo_kb)}
        record["setting"] |= {"threads": self.num_threads, "masks": "yes" if subject.masks else "no"}
        return record

    def data(self, made: _Made) -> list[dict[str, Any]]:
        return [
            {
                "photo_kb": kb,
                "num_samples": len(data.keys),
                "num_shards": len(data.shards.names),
                "shard_bytes": sum(entry.size for entry in data.shards.entries()),
                "mean_bytes": {name: float(sizes.mean()) for name, sizes in data.sizes.items()},
            }
            for kb, (data, _) in made.items()
        ]

    def options_json(self) -> dict[str, Any]:
        source = "drawn photos" if self.shards is None else "given shards"
        photo, mask = (*self.components, None)[:2]
        return {**super().options_json(), "photo": photo, "mask": mask, "device": "cpu", "source": source}

    def notes(self, made: _Made, rounds: Rounds[FeedPoint, Measured]) -> list[str]:
        data = "; ".join(
            f"{one['num_samples']:,} samples, "
            + " and ".join(f"{name} of {mean / 1000:.1f} kB" for name, mean in one["mean_bytes"].items())
            for one in self.data(made)
        )
        cache = file_system(next(iter(made.values()))[0].cache)
        return [
            f"{data}; an epoch has {self.passes} passes over them; the cache is in {cache}; "
            f"threads of {LIMIT}: {self.preadv_threads}.",
            "Keys, labels and sizes of every loader are those of the shards. dali-webdataset touches only headers: "
            "pages of mapped files are not in read/delivered. -: asynchronous reads, which the kernel does not count.",
        ]


def _spent(processes: Sequence[psutil.Process]) -> Array:
    """What processes have spent so far: wall seconds, CPU seconds, those in the kernel, minor page faults, bytes read.

    Bytes are those of system calls, without pages of mapped files.
    """
    total = np.array([time.perf_counter(), 0, 0, 0, 0])
    for process in processes:
        times = process.cpu_times()
        # After the name, which may hold blanks: the eighth field is the number of minor faults.
        faults = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[7])
        total += (0, times.user + times.system, times.system, faults, process.io_counters().read_chars)
    return total


def _drawn(directory: Path, *, photo_bytes: int) -> ShardSet:
    """Draw photos with masks; the photos have about ``photo_bytes`` bytes on average."""
    sides = []
    for area in AREAS:
        height = round((area * photo_bytes / BYTES_PER_PIXEL * 3 / 4) ** 0.5)
        width = round(height * 4 / 3)
        sides += [(width, height), (height, width)]
    return draw_shards(directory, num=NUM_DRAWN, num_shards=1, sizes=sides)


def expected_samples(shards: ShardSet, *, components: Sequence[str]) -> Expected:
    """Read what every loader must give of each sample; the sizes are those that Pillow finds."""
    found: dict[str, tuple[Any, ...]] = {}
    for shard, sample in samples_of(shards):
        key = sample[KEY]
        if key in found:
            raise DataError(f"shard '{shard}': a second sample with the key '{key}'")
        label = label_of(sample[LABEL_COMPONENT], key=key, shard=shard)
        found[key] = (label, *(size_of(sample[name]) for name in components))
    return found


def check_epoch(batches: Iterator[Batch], expected: Expected, *, components: Sequence[str], loader: str) -> None:
    """Compare an epoch of one pass: each sample must come once, as it is in its shard.

    Further samples, with which DALI's reader fills its last batch, are ignored.
    """
    samples: list[tuple[Any, ...]] = []
    for batch in batches:
        sizes = ([tuple(size[:2]) for size in batch[name].tolist()] for name in components)
        samples += zip(batch["key"], batch["label"].tolist(), *sizes, strict=True)
    seen: Counter[str] = Counter()
    for key, *found in samples[: len(expected)]:
        seen[key] += 1
        if key not in expected or tuple(found) != expected[key][: len(found)]:
            wanted = expected.get(key, "none")
            raise OutputError(f"loader '{loader}', key '{key}': label and sizes must be {wanted}, got {tuple(found)}")
    if wrong := next((key for key in expected if seen[key] != 1), None):
        raise OutputError(f"loader '{loader}', key '{wrong}': came {seen[wrong]} times in one pass, expected once")


def _order_of(data: FeedData, options: FeedOptions) -> Array:
    """The rows of an epoch in the order of our loader: int64 [samples of the epoch]."""
    row_of = {key: row for row, key in enumerate(data.keys)}
    with open_ours(data, replace(options, keys=True)) as epoch:
        return np.array([row_of[key] for batch in epoch() for key in batch["key"]])


def _check_outputs(data: FeedData, options: FeedOptions, loader: str, expected: Expected) -> None:
    with SUBJECTS[loader](data, options) as epoch:
        check_epoch(epoch(), expected, components=options.components, loader=loader)
