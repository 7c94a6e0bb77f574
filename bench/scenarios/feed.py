"""Time the path from the cache to the training step without decoding: what a decoder waits for.

The graph reads headers of photos and masks and decodes nothing (`bench.feed.subjects`). All shards are in memory.
Before anything is timed, keys, labels and sizes of every loader are compared with what Pillow reads from the shards.
Each turn has a process of its own. It reads an epoch, which is not timed, and then times the next.
"""

import functools
import itertools
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from bench.engine.options import Listed, at_least, cache_option, option
from bench.engine.scenario import Rounds, Scenario
from bench.engine.turn_process import call_apart
from bench.feed.data import Array, Expected, FeedData, copied, drawn
from bench.feed.subjects import SUBJECTS, FeedOptions, open_ours
from bench.loaders.recipe import find_components
from bench.reports.figures import FIGURES
from bench.reports.intervals import paired_ratio
from bench.reports.summary import Record, Report, format_ratio, values_of
from bench.reports.tables import format_rows, table_rows
from bench.scenarios.on_shards import FORMS
from bench.tools.drawn_shards import MASK, PHOTO
from bench.tools.environment import available_cores
from bench.tools.folders import RunFolder, check_room
from bench.tools.threads import GROUPS, Spent, ThreadMeter
from dali_pipes.cache.free_space import file_system
from dali_pipes.commands.options import size
from dali_pipes.errors import DataError
from dali_pipes.progress import progress
from dali_pipes.store.shard_set import ShardSet

OURS, LIMIT = "dali-pipes", "preadv"
BASE_BATCH = 64
"""The batch size to whose samples/s those of the others are related."""
MASKS: Mapping[str, tuple[bool, ...]] = {"without": (False,), "with": (True,), "both": (False, True)}
SHOWN = (
    "samples_per_s",
    "cpu_us_per_sample",
    "kernel_us_per_sample",
    *(f"{group}_us_per_sample" for group in GROUPS),
    "faults_per_sample",
    "read_ratio",
    "num_reading",
)


class Point(NamedTuple):
    """A loader under one setting."""

    photo_kb: int
    masks: bool
    batch_size: int
    loader: str


class FeedTurn(NamedTuple):
    num_samples: int
    spent: Spent
    dali_environment: Mapping[str, str]
    """The environment variables that change how DALI works."""


_Made = Mapping[int, tuple[FeedData, Array]]
"""Mean size of photos in kB -> data, and the rows of an epoch in the order of our loader."""


@dataclass(frozen=True, kw_only=True)
class FeedScenario(Scenario[_Made, Point, FeedTurn]):
    """Time loaders without decoding: ours, DALI's own reader, an external source, and a loop of preadv, the limit.

    Each gives the sizes of photos, read from their headers, and labels. Photos are drawn, unless --shards names some.
    All shards are copied into a directory under --cache, which is deleted at the end. The record can be compared with
    another one: dali-pipes bench compare BEFORE.json AFTER.json.
    """

    kind = "feed"
    title = "time the feed"
    figures = FIGURES

    shards: ShardSet | None = option(help=f"Real photos instead of drawn ones: {FORMS}")
    photo_kb: Sequence[int] = option(
        "110,20", type=Listed(int), help="Comma separated: mean sizes of drawn photos in kB."
    )
    masks: str = option("both", type=click.Choice(list(MASKS)), help="Whether masks are read, too.")
    batch_sizes: Sequence[int] = option("16,64,256,408,1024", type=Listed(int), help="Comma separated.")
    loaders: Sequence[str] = option(",".join(SUBJECTS), type=Listed(str), help="Comma separated: some of these.")
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
        if self.masks not in MASKS:
            raise ValueError(f"masks must be one of {', '.join(MASKS)}, got '{self.masks}'")

    @property
    def components(self) -> Sequence[str]:
        """Photo, and mask if it is taken in any setting."""
        photo, mask = self._names
        return [photo] if mask is None else [photo, mask]

    @functools.cached_property
    def _names(self) -> tuple[str, str | None]:
        if self.shards is None:
            return self.photo or PHOTO, None if self.masks == "without" else self.mask or MASK
        photo, mask = find_components(self.shards, photo=self.photo, mask=self.mask)
        if mask is None and self.masks == "with":
            raise DataError(f"'{self.shards.url}': no component is a mask by its name; name it: --mask NAME")
        return photo, None if self.masks == "without" else mask

    def prepare(self, folder: RunFolder, stack: ExitStack) -> _Made:
        """Write the shards, and compare the outputs of all loaders.

        Raises:
            DataError: If a sample lacks its photo, mask or label.
            OutputError: If a loader does not give what the shards hold.
            ValueError: If there is too little space.
        """
        sources: Mapping[int | None, ShardSet]
        if self.shards is not None:
            sources = {None: self.shards}
        else:
            # The shards, and the cache file.
            needed = 2 * self.data_bytes * len(self.photo_kb)
            check_room(folder.parent, needed, what="drawn photos", option="--cache", less="lower --data-bytes")
            sources = {kb: drawn(folder.new(), photo_bytes=1000 * kb) for kb in self.photo_kb}
        made = {}
        for kb, source in sources.items():
            data = copied(
                source,
                num_samples=None if kb is None else max(1, self.data_bytes // (1000 * kb)),
                components=self.components,
                copies=folder.new(),
                indexes=folder.new(),
                cache=folder.new(),
            )
            mean_kb = round(float(data.sizes[self.components[0]].mean()) / 1000)
            made[mean_kb if kb is None else kb] = (data, call_apart(_order_of, data, self._options(), name=OURS))
        self._check(made)
        return made

    def _check(self, made: _Made) -> None:
        expected = {kb: Expected.read(data.shards, components=self.components) for kb, (data, _) in made.items()}
        points = [point for point in self.subjects(made) if point.batch_size == min(self.batch_sizes)]
        for point in progress(points, what="compare outputs", unit="loader"):
            data, order = made[point.photo_kb]
            options = replace(self._options(point), passes=1, order=order, keys=True)
            call_apart(_check_outputs, data, options, point.loader, expected[point.photo_kb], name=self.name_of(point))

    def _options(self, point: Point | None = None) -> FeedOptions:
        return FeedOptions(
            components=self.components if point is not None and point.masks else self.components[:1],
            batch_size=BASE_BATCH if point is None else point.batch_size,
            passes=self.passes,
            num_threads=self.num_threads,
            seed=self.seed,
            preadv_threads=self.preadv_threads,
        )

    def subjects(self, made: _Made) -> Sequence[Point]:
        """Every loader under every setting."""
        masks = MASKS[self.masks] if len(self.components) == 2 else (False,)
        settings = itertools.product(made, masks, self.batch_sizes, self.loaders)
        return [Point(*values) for values in settings]

    def name_of(self, subject: Point) -> str:
        masks = "with masks" if subject.masks else "without masks"
        return f"'{subject.loader}', batches of {subject.batch_size} photos of {subject.photo_kb} kB, {masks}"

    def measure(self, made: _Made, subject: Point, number: int) -> FeedTurn:
        data, order = made[subject.photo_kb]
        options = replace(self._options(subject), order=order)
        with SUBJECTS[subject.loader](data, options) as epoch:
            for _ in epoch():
                pass
            num_samples, meter = 0, ThreadMeter()
            for batch in epoch():
                num_samples += len(batch["label"])
                meter.tick()
            spent = meter.stop()
        return FeedTurn(num_samples, spent, {k: v for k, v in os.environ.items() if k.startswith("DALI_")})

    def speed(self, made: _Made, subject: Point, row: FeedTurn) -> str:
        return f"{row.num_samples / row.spent.wall_s:,.0f} samples/s"

    def report(self, made: _Made, rounds: Rounds[Point, FeedTurn]) -> dict[str, Any]:
        """``{"records": [one for each loader and setting], "data": [one for each size of photos], ...}``."""
        kept = ("seed", "repeats", "passes", "num_threads", "preadv_threads", "data_bytes")
        return {
            "records": [self._record(point, rounds.whole(point), made) for point in rounds.subjects],
            "baseline": LIMIT if LIMIT in self.loaders else self.loaders[0],
            "data": [
                {
                    "photo_kb": kb,
                    "num_samples": data.num_samples,
                    "num_shards": len(data.shards.names),
                    "shard_bytes": sum(entry.size for entry in data.shards.entries()),
                    "mean_bytes": {name: float(sizes.mean()) for name, sizes in data.sizes.items()},
                }
                for kb, (data, _) in made.items()
            ],
            "options": {
                **dict(zip(("photo", "mask"), self._names, strict=True)),
                **{name: getattr(self, name) for name in kept},
                "device": "cpu",
                "source": "drawn photos" if self.shards is None else "given shards",
            },
            "cache": file_system(next(iter(made.values()))[0].cache),
        }

    def _record(self, point: Point, turns: Sequence[FeedTurn], made: _Made) -> dict[str, Any]:
        data, _ = made[point.photo_kb]
        taken = self._options(point).components
        # DALI's reader gives whole batches, so its epoch may have some samples more.
        mean_bytes = sum(float(data.sizes[name].mean()) for name in taken)
        return {
            "loader": point.loader,
            "decode": "none",
            "device": "cpu",
            "setting": {
                "threads": self.num_threads,
                "photo_kb": point.photo_kb,
                "masks": "yes" if point.masks else "no",
                "batch_size": point.batch_size,
            },
            "data": list(made).index(point.photo_kb),
            "dali_environment": turns[0].dali_environment if turns else {},
            "repeats": [{"figures": _figures(turn, mean_bytes)} for turn in turns],
        }

    @staticmethod
    def table(report: Any) -> str:
        """Return a row for each loader and setting, with ratios to `LIMIT` and to batches of `BASE_BATCH`."""
        rows, num_names = table_rows(report, figures=SHOWN, intervals=False)
        rows[0].append(f"samples/s x batch {_base_batch(report)}")
        for row, record in zip(rows[1:], report["records"], strict=True):
            row.append(_batch_ratio(report, record))
        data = "; ".join(
            f"{one['num_samples']:,} samples, "
            + " and ".join(f"{name} of {mean / 1000:.1f} kB" for name, mean in one["mean_bytes"].items())
            for one in report["data"]
        )
        return (
            f"{format_rows(rows, left=num_names)}\n\n"
            f"{data}; an epoch has {report['options']['passes']} passes over them. CPU and page faults are those of a "
            f"sample; threads of {LIMIT}: {report['options']['preadv_threads']}.\n"
            "Keys, labels and sizes of every loader are those of the shards. webdataset-mapped touches only headers: "
            "pages of mapped files are not in read/delivered. -: asynchronous reads, which the kernel does not count."
        )


def _order_of(data: FeedData, options: FeedOptions) -> Array:
    """The rows of an epoch in the order of our loader: int64 [samples of the epoch]."""
    row_of = {key: row for row, key in enumerate(data.keys)}
    with open_ours(data, replace(options, keys=True)) as epoch:
        return np.array([row_of[key] for batch in epoch() for key in batch["key"]])


def _check_outputs(data: FeedData, options: FeedOptions, loader: str, expected: Expected) -> None:
    with SUBJECTS[loader](data, options) as epoch:
        expected.check(epoch(), components=options.components, loader=loader)


def _figures(turn: FeedTurn, mean_bytes: float) -> dict[str, float | None]:
    spent, num = turn.spent, turn.num_samples
    return {
        "samples_per_s": num / spent.wall_s,
        "cpu_us_per_sample": 1e6 * spent.cpu_s / num,
        "kernel_us_per_sample": 1e6 * spent.kernel_s / num,
        **{f"{group}_us_per_sample": 1e6 * cpu_s / num for group, cpu_s in spent.group_cpu_s.items()},
        "faults_per_sample": spent.faults / num,
        "read_ratio": None if spent.bytes_read is None else spent.bytes_read / (num * mean_bytes),
        "num_reading": spent.num_reading,
    }


def _base_batch(report: Report) -> int:
    sizes = [int(record["setting"]["batch_size"]) for record in report["records"]]
    return BASE_BATCH if BASE_BATCH in sizes else sizes[0]


def _batch_ratio(report: Report, record: Record) -> str:
    """The ratio of a record's samples/s to those of the same loader with batches of `BASE_BATCH`."""
    base = {**record["setting"], "batch_size": _base_batch(report)}
    (other,) = (one for one in report["records"] if one["loader"] == record["loader"] and one["setting"] == base)
    ratio = paired_ratio(values_of(record, "samples_per_s"), values_of(other, "samples_per_s"))
    return "-" if ratio is None else format_ratio(ratio)
