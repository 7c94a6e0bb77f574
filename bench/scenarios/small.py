"""Time training from whole photos and from resized ones, and packing with resizing beside libjpeg alone.

Photos like ImageNet's are made from those of a directory, or from scikit-image's: 500 pixels on the longer side, of
``--photo-kb`` on average (ImageNet's have 110). They are packed whole, and once for each ``--short-sides``. A turn of
loading takes an epoch that is not timed, and times the next: random crops, resized to 224, on the CPU. A turn of
packing resizes the whole photos into new shards. Beside it, as many processes decode the same photos from memory, with
libjpeg's own scaling, and encode the resized ones; nothing else is timed.
"""

import io
import math
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Literal, NamedTuple

import click
import numpy as np
from PIL import Image

from bench.engine.options import Listed, at_least, cache_option, option
from bench.engine.scenario import Rounds, Scenario
from bench.reports.figures import Figure
from bench.reports.tables import records_table, summarised
from bench.tools.environment import available_cores
from bench.tools.folders import RunFolder, check_room
from dali_pipes.errors import DataError
from dali_pipes.progress import progress
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from prep.pack.pack import pack
from prep.recode.settings import DEFAULT_QUALITY, Recoding
from prep.sources.demo_photos import demo_photos
from prep.sources.imagefolder import photo_folder
from prep.sources.pets import PHOTO
from prep.sources.record import Record, Source
from prep.tar.writer import Files, Range
from prep.workers import Report, Workers

PREFIX = "a-"
LONG_SIDE, CROP = 500, 224
FFCV_GB = {0: 74.98, 512: 65.47, 384: 40.31, 256: 22.01}
"""Longer side in pixels (0: at most 1600, whole) -> GB of ImageNet in FFCV's format, as JPEGs of quality 90:
https://docs.ffcv.io/benchmarks.html. FFCV limits the longer side, so its photos of 256 are smaller than ours."""
QUALITIES = (98, 97, 96, 95, 94, 92, 90, 88, 85, 80, 75)
FIGURES = {
    "samples_per_s": Figure(title="samples/s", unit="samples/s", better="high", digits=0, about="Photos in a second."),
    "cpu_ms_per_sample": Figure(title="CPU-ms", unit="ms", better="low", digits=2, about="CPU time of a photo."),
    "of_libjpeg": Figure(title="of libjpeg", unit="", better="high", digits=2, about="Speed beside decode and encode."),
    "of_pillow": Figure(
        title="of libjpeg + resize", unit="", better="high", digits=2, about="The same, with Pillow's resize."
    ),
    "cpu_of_libjpeg": Figure(
        title="of its CPU", unit="", better="high", digits=2, about="CPU time of libjpeg's calls, by that of the pack."
    ),
}


class SmallTurn(NamedTuple):
    """The seconds for all photos."""

    wall_s: float
    cpu_s: float
    """CPU seconds of the process, and of those that it started; of libjpeg: of its calls alone."""
    with_resize_s: float = math.nan
    """Of libjpeg: wall time with the calls in which Pillow resizes."""


class SmallSubject(NamedTuple):
    """What a turn does, and with which photos."""

    what: Literal["load", "pack", "libjpeg"]
    short_side: int
    """0: whole photos."""


@dataclass(frozen=True, kw_only=True)
class SmallInputs:
    """The shards."""

    whole: Path
    folders: Mapping[int, Path]
    """Short side -> a directory of indexed shards."""
    num_bytes: Mapping[int, int]
    """Short side -> bytes of the photos."""
    work: Path
    """An empty directory for packs."""


@dataclass(frozen=True, kw_only=True)
class SmallScenario(Scenario[SmallInputs, SmallSubject, SmallTurn]):
    """Time training from whole and from resized photos, and packing with resizing beside libjpeg alone.

    Photos of 500 pixels are made from those under --photos and packed whole, and resized to each of --short-sides. All
    files lie under --cache, and are deleted at the end.
    """

    kind = "small"
    title = "small shards"
    runs_in: ClassVar[Literal["fork", "interpreter", "caller"]] = "interpreter"
    figures = FIGURES

    photos: Path | None = option(
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="A directory of photos.  [default: photographs from scikit-image]",
    )
    num_samples: int = option(2000, name="--samples", help="Photos; those of the directory are repeated.")
    photo_kb: int = option(110, help="Mean size of the whole photos, in kB.")
    short_sides: Sequence[int] = option("512,256", type=Listed(int), help="Comma separated, in pixels.")
    quality: int = option(DEFAULT_QUALITY, help="JPEG quality of resized photos.")
    batch_size: int = option(64, help="Samples a batch.")
    jobs: int = option(
        factory=available_cores, type=at_least(1), help="DALI's threads, and processes.  [default: cores]"
    )
    repeats: int = option(5, help="Turns of each.")
    work: Path | None = cache_option("Where photos, shards and the cache file lie.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.short_sides or min(self.short_sides) < 1 or len(set(self.short_sides)) < len(self.short_sides):
            raise ValueError(f"short_sides must name each side once, from 1 on, got {list(self.short_sides)}")
        if self.num_samples < self.batch_size:
            raise ValueError(f"num_samples must be at least the batch size, {self.batch_size}, got {self.num_samples}")

    def prepare(self, folder: RunFolder, stack: ExitStack) -> SmallInputs:
        """Make the photos and pack them.

        Raises:
            DataError: If there is no photo.
            ValueError: If there is too little free space.
        """
        needed = self.num_samples * self.photo_kb * 1000 * (3 + len(self.short_sides))
        check_room(folder.parent, needed, what="the photos", option="--cache")
        source = Source(name="bench", records=list(self._records()), classes={})
        folders, num_bytes = {}, {}
        for side in (0, *self.short_sides):
            place = folders[side] = folder.new()
            self._pack(source, place, side)
            index_shards(resolve_shards(f"{place}/{PREFIX}", endpoint=None))
            num_bytes[side] = sum(path.stat().st_size for path in place.glob("*.tar"))
        return SmallInputs(whole=folders[0], folders=folders, num_bytes=num_bytes, work=folder.new())

    def _records(self) -> Iterator[Record]:
        originals = list(self._originals())
        if not originals:
            raise DataError(f"'{self.photos}' holds no photo of {LONG_SIDE} pixels or more")
        quality = self._best_quality(originals[:40])
        for number in progress(range(self.num_samples), what="make photos", unit="photos"):
            photo = originals[number % len(originals)]
            # Each round takes away another edge, so no two photos are equal.
            cut = number // len(originals) % 8
            data = _jpeg(photo.crop((cut, 0, photo.width, photo.height)), quality)
            yield Record(key=f"{number:07d}", components={"jpg": data}, label=number % 10)

    def _originals(self) -> Iterator[Image.Image]:
        source = demo_photos(count=200) if self.photos is None else photo_folder(self.photos)
        for record in source.records:
            content = record.components.get(PHOTO) or next(iter(record.components.values()))
            try:
                with Image.open(content if isinstance(content, Path) else io.BytesIO(content)) as photo:  # type: ignore[arg-type]
                    photo.load()
            except (OSError, ValueError):
                continue  # one that cannot be decoded is no matter of this benchmark
            scale = LONG_SIDE / max(photo.size)
            if scale <= 1:
                size = (round(photo.width * scale), round(photo.height * scale))
                yield photo.convert("RGB").resize(size, Image.Resampling.LANCZOS)

    def _best_quality(self, photos: Sequence[Image.Image]) -> int:
        """The JPEG quality at which the photos have the wanted mean size."""

        def distance(quality: int) -> float:
            return abs(float(np.mean([len(_jpeg(photo, quality)) for photo in photos])) - 1000 * self.photo_kb)

        return min(QUALITIES, key=distance)

    def _pack(self, source: Source, place: Path, side: int) -> None:
        recode = Recoding(short_side=side, quality=self.quality) if side else None
        pack(source, store=LocalStore(place), prefix=PREFIX, recode=recode, jobs=self.jobs)

    def subjects(self, made: SmallInputs) -> Sequence[SmallSubject]:
        smaller = [side for side in self.short_sides if side < LONG_SIDE]
        return [
            *(SmallSubject("load", side) for side in made.folders),
            *(SmallSubject(what, side) for side in smaller for what in ("pack", "libjpeg")),
        ]

    def name_of(self, subject: SmallSubject) -> str:
        return f"'{subject.what} {subject.short_side or 'whole'}'"

    def speed(self, made: SmallInputs, subject: SmallSubject, row: SmallTurn) -> str:
        return f"{self.num_samples / row.wall_s:.0f} samples/s"

    def measure(self, made: SmallInputs, subject: SmallSubject, number: int) -> SmallTurn:
        if subject.what == "load":
            return self._load(made, subject.short_side)
        source = _photos_of(made.whole)
        if subject.what == "libjpeg":
            return self._run_libjpeg(source, subject.short_side)
        place = made.work / f"{subject.short_side}-{number}"
        started, cpu_s = time.perf_counter(), _cpu_s()
        self._pack(source, place, subject.short_side)
        turn = SmallTurn(wall_s=time.perf_counter() - started, cpu_s=_cpu_s() - cpu_s)
        for path in place.iterdir():
            path.unlink()
        return turn

    def _load(self, made: SmallInputs, side: int) -> SmallTurn:
        import dali_pipes as dp

        with dp.loader(
            f"{made.folders[side]}/{PREFIX}",
            dp.classification_train(crop=CROP),
            batch_size=self.batch_size,
            seed=self.seed,
            device="cpu",
            cache=dp.Cache(directory=made.work, show_progress=False),
            decode=dp.Decode(threads=self.jobs),
            last_batch_policy="DROP",
        ) as loader:
            for _ in loader:
                pass
            started, cpu = time.perf_counter(), time.process_time()
            num = sum(len(batch[0]["image"]) for batch in loader)
            share = self.num_samples / num
            return SmallTurn(wall_s=share * (time.perf_counter() - started), cpu_s=share * (time.process_time() - cpu))

    def _run_libjpeg(self, source: Source, side: int) -> SmallTurn:
        recoding = Recoding(short_side=side, quality=self.quality)
        parts = [part for record in source.records for part in record.components.values() if isinstance(part, Range)]
        photos = [part for part in parts if part.head]  # not the labels
        tasks = [_Libjpeg(photos[row :: self.jobs], recoding) for row in range(self.jobs)]
        with Workers(self.jobs, isolated=True) as workers:
            found = list(workers.map(_time_libjpeg, tasks))
        wall, cpu, with_resize = zip(*found, strict=True)
        return SmallTurn(wall_s=max(wall), cpu_s=sum(cpu), with_resize_s=max(with_resize))

    def report(self, made: SmallInputs, rounds: Rounds[SmallSubject, SmallTurn]) -> dict[str, Any]:
        """``{"records": [{"photos", "bytes", "ffcv_gb", "samples_per_s", ...}], "packs": [...], ...}``."""
        records: list[dict[str, Any]] = []
        packs: list[dict[str, Any]] = []
        for subject in rounds.subjects:
            turns = rounds.whole(subject)
            speeds = [self.num_samples / turn.wall_s for turn in turns]
            if subject.what == "load":
                cpu = [1000 * turn.cpu_s / self.num_samples for turn in turns]
                records.append(
                    {
                        "photos": _side_name(subject.short_side),
                        "mb": made.num_bytes[subject.short_side] / 1e6,
                        "share_of_bytes": made.num_bytes[subject.short_side] / made.num_bytes[0],
                        "ffcv_gb": FFCV_GB.get(subject.short_side),
                        **summarised({"samples_per_s": speeds, "cpu_ms_per_sample": cpu}),
                        "repeats": [turn._asdict() for turn in turns],
                    }
                )
            elif subject.what == "pack":
                limits = rounds.whole(SmallSubject("libjpeg", subject.short_side))
                pairs = list(zip(turns, limits, strict=True))
                figures = {
                    "samples_per_s": speeds,
                    "of_libjpeg": [limit.wall_s / turn.wall_s for turn, limit in pairs],
                    "of_pillow": [limit.with_resize_s / turn.wall_s for turn, limit in pairs],
                    "cpu_of_libjpeg": [limit.cpu_s / turn.cpu_s for turn, limit in pairs],
                }
                packs.append(
                    {
                        "photos": _side_name(subject.short_side),
                        **summarised(figures),
                        "repeats": [turn._asdict() for turn in turns],
                        "libjpeg": [limit._asdict() for limit in limits],
                    }
                )
        return {
            "records": records,
            "packs": packs,
            "num_samples": self.num_samples,
            "photo_kb": self.photo_kb,
            "quality": self.quality,
            "crop": CROP,
            "batch_size": self.batch_size,
            "jobs": self.jobs,
            "repeats": self.repeats,
        }

    @staticmethod
    def table(report: Any) -> str:
        """One row for each size, then how much faster small photos are loaded, and the packs."""
        loads = [
            {**record, "mb": f"{record['mb']:.1f}", "ffcv_gb": record["ffcv_gb"] or "-"} for record in report["records"]
        ]
        names = {"photos": "photos", "MB": "mb", "GB, FFCV's ImageNet": "ffcv_gb"}
        columns = names | {FIGURES[name].title: name for name in ("samples_per_s", "cpu_ms_per_sample")}
        lines = [records_table(loads, columns, FIGURES), ""]
        whole = report["records"][0]
        for record in report["records"][1:]:
            ratio = median(
                before["wall_s"] / after["wall_s"]
                for before, after in zip(whole["repeats"], record["repeats"], strict=True)
            )
            lines.append(
                f"short side {record['photos']}: {record['share_of_bytes']:.2f} of the bytes, {ratio:.2f} times the "
                "samples/s of whole photos"
            )
        if report["packs"]:
            columns = {"packed to": "photos"} | {
                FIGURES[name].title: name for name in ("samples_per_s", "of_libjpeg", "of_pillow", "cpu_of_libjpeg")
            }
            lines += ["", records_table(report["packs"], columns, FIGURES)]
        return "\n".join(lines)


class _Libjpeg(NamedTuple):
    photos: Sequence[Range]
    recoding: Recoding


def _time_libjpeg(task: _Libjpeg, report: Report) -> tuple[float, float, float]:
    """Wall and CPU seconds to decode and to encode photos that are in memory, and the wall time with resizing."""
    files = Files()
    photos = [files.read(files.open(part)) for part in task.photos]
    files.close()
    libjpeg_s = cpu_s = resize_s = 0.0
    for data in photos:
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as photo:
            started, cpu = time.perf_counter(), time.thread_time()
            size = task.recoding.new_size(photo.height, photo.width) or (photo.height, photo.width)
            photo.draft(None, (size[1], size[0]))
            photo.load()
            decoded, decoded_cpu = time.perf_counter(), time.thread_time()
            small = photo.resize((size[1], size[0]), Image.Resampling.HAMMING)
            resized, resized_cpu = time.perf_counter(), time.thread_time()
            small.save(io.BytesIO(), "JPEG", quality=task.recoding.quality)
            libjpeg_s += decoded - started + time.perf_counter() - resized
            cpu_s += decoded_cpu - cpu + time.thread_time() - resized_cpu
            resize_s += resized - decoded
        report(1)
    return libjpeg_s, cpu_s, libjpeg_s + resize_s


def _cpu_s() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _photos_of(folder: Path) -> Source:
    from prep.sources.tars import tars

    return tars(resolve_shards(f"{folder}/{PREFIX}", endpoint=None), jobs=1)


def _jpeg(photo: Image.Image, quality: int) -> bytes:
    stream = io.BytesIO()
    photo.save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def _side_name(side: int) -> str:
    return str(side) if side else "whole"
