"""Time JPEG decoders on one core, and with all cores: the table of ternaus/imread_benchmark, with DALI and our loader.

Photos are in memory; our loader reads them from shards in memory, so its figures include the whole path. Each decoder's
pixels are compared with Pillow's first. On one core nothing else works beside the decoder: DALI's own threads and our
loader's have the same core. With all cores, Python's decoders work in a torch ``DataLoader``, whose best number of
workers is taken.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from bench.compare.outputs import OutputError
from bench.decode.decoders import DECODERS
from bench.decode.passes import DALI, OURS, Photos, opened, stay_on_one_core
from bench.engine.options import Listed, cache_option, option
from bench.engine.scenario import Rounds, Scenario
from bench.engine.turn_process import call_apart
from bench.reports.figures import Figure
from bench.reports.tables import Columns, records_table, summarised
from bench.tools.environment import available_cores
from bench.tools.folders import RunFolder
from bench.tools.processes import ProcessTree
from bench.tools.repeat import write_shard
from dali_pipes.commands.output import print_note
from dali_pipes.errors import PipesError
from dali_pipes.formats.names import LABEL_COMPONENT
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_set import ShardSet
from prep.index import index_shards
from prep.sources.demo_photos import demo_photos
from prep.sources.pets import PHOTO

NAMES = (*DECODERS, DALI, OURS)
REFERENCE = "pillow"
NUM_SHARDS = 4
MAX_MEAN_LEVELS = 4.0
"""Decoders differ by their inverse transforms and by how they interpolate chroma: by less than a level on average. A
photo in another colour order, or another photo, differs by more than this."""
FIGURES = {
    "one_photos_per_s": Figure(title="photos/s, one core", unit="photos/s", better="high", digits=0, about="One core."),
    "one_cpu_ms": Figure(title="CPU-ms/photo", unit="ms", better="low", digits=3, about="CPU time, on one core."),
    "all_photos_per_s": Figure(title="photos/s, all", unit="photos/s", better="high", digits=0, about="All cores."),
    "all_cpu_ms": Figure(title="CPU-ms/photo, all", unit="ms", better="low", digits=3, about="CPU time, all cores."),
}


class Way(NamedTuple):
    """A decoder and its threads or workers; 0: one core."""

    name: str
    num_threads: int


class DecodeTurn(NamedTuple):
    num_photos: int
    wall_s: float
    cpu_s: float


class Difference(NamedTuple):
    """How a decoder's pixels differ from Pillow's, in levels of 255."""

    num_photos: int
    """Photos that differ at all."""
    largest: int
    mean: float
    """Over all values of all photos."""


class _Made(NamedTuple):
    photos: Photos
    differences: Mapping[str, Difference]
    skipped: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class DecodeScenario(Scenario[_Made, Way, DecodeTurn]):
    """Time JPEG decoders on photos that any machine has: on one core, and in a DataLoader or DALI with all cores.

    The photos are cut from the photographs in scikit-image, the same on every machine. Decoders whose package is not
    installed are left out, and named. Writes into a directory under --cache, which is deleted at the end, and the file
    that --json names.
    """

    kind = "decode"
    title = "decode"
    figures = FIGURES

    decoders: Sequence[str] = option(
        type=Listed(str), help=f"Comma separated: {', '.join(NAMES)}.  [default: all that are there]"
    )
    num_photos: int = option(300, help="Photos; at least 8.")
    passes: int = option(3, help="Passes over the photos that are timed in a turn, after one that is not.")
    workers: Sequence[int] = option(
        type=Listed(int),
        help="Comma separated: numbers of workers, or of DALI's threads, of which the best is shown.  "
        "[default: half of the cores, and all]",
    )
    repeats: int = option(5, help="Turns of each decoder and number of workers.")
    work: Path | None = cache_option("Where the shards of our loader and its cache file are; in memory.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, values in (("decoders", self.decoders or ()), ("workers", self.workers or ())):
            if len(set(values)) != len(values):
                raise ValueError(f"{name} must name each once, got '{','.join(map(str, values))}'")
        if unknown := [name for name in self.decoders or () if name not in NAMES]:
            raise ValueError(f"decoders must be among {', '.join(NAMES)}, got '{unknown[0]}'")
        if any(number < 1 for number in self.workers or ()):
            raise ValueError(f"workers must be at least 1, got {min(self.workers)}")
        if not self.chosen[0]:
            raise PipesError("; ".join(f"decoder '{name}' {reason}" for name, reason in self.chosen[1].items()))

    @property
    def chosen(self) -> tuple[list[str], dict[str, str]]:
        """The decoders that can be opened here, and the reasons against the others.

        Raises:
            PipesError: If a decoder that was named cannot be opened.
        """
        reasons = {
            name: reason
            for name in (self.decoders or NAMES)
            if name in DECODERS and (reason := DECODERS[name].reason_against()) is not None
        }
        if self.decoders and reasons:
            raise PipesError("; ".join(f"decoder '{name}' {reason}" for name, reason in reasons.items()))
        return [name for name in (self.decoders or NAMES) if name not in reasons], reasons

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of workers or threads that are tried."""
        cores = available_cores()
        return self.workers or sorted({max(1, cores // 2), cores})

    def prepare(self, folder: RunFolder, stack: ExitStack) -> _Made:
        """Cut the photos, pack them, and compare the decoders' pixels.

        Raises:
            OutputError: If a decoder's pixels are not those of the photo.
            PipesError: If scikit-image is not installed.
        """
        names, skipped = self.chosen
        for name, reason in skipped.items():
            print_note(f"decoder '{name}' is left out: it {reason}")
        records = demo_photos(count=self.num_photos, seed=self.seed).records
        encoded = [record.components[PHOTO] for record in records]
        photos = Photos(_bytes_of(encoded), _pack(_bytes_of(encoded), folder.new()), PHOTO, folder.new())
        differences = {
            name: call_apart(compared, name, photos, name=f"comparing '{name}'") for name in names if name != REFERENCE
        }
        return _Made(photos, differences, skipped)

    def subjects(self, made: _Made) -> Sequence[Way]:
        """Each decoder on one core, and with each number of workers."""
        return [Way(name, number) for name in self.chosen[0] for number in (0, *self.numbers)]

    def name_of(self, subject: Way) -> str:
        return f"'{subject.name}' " + (f"with {subject.num_threads}" if subject.num_threads else "on one core")

    def measure(self, made: _Made, subject: Way, number: int) -> DecodeTurn:
        if not subject.num_threads:
            stay_on_one_core()
        with opened(subject.name, made.photos, num_threads=subject.num_threads) as one_pass:
            for _ in one_pass():
                pass
            # Workers are the fork server's children, as this process is.
            tree = ProcessTree(root=os.getppid())
            num_photos, cpu_start, started = 0, tree.cpu_s(), perf_counter()
            for _ in range(self.passes):
                num_photos += sum(1 for _ in one_pass())
            return DecodeTurn(num_photos, perf_counter() - started, tree.cpu_s() - cpu_start)

    def speed(self, made: _Made, subject: Way, row: DecodeTurn) -> str:
        return f"{row.num_photos / row.wall_s:,.0f} photos/s"

    def report(self, made: _Made, rounds: Rounds[Way, DecodeTurn]) -> dict[str, Any]:
        """``{"records": [one a decoder], ...}``."""
        sizes = [len(data) for data in made.photos.encoded]
        return {
            "records": [self._record(name, made, rounds) for name in self.chosen[0]],
            "reference": REFERENCE,
            "skipped": [{"decoder": name, "reason": reason} for name, reason in made.skipped.items()],
            "num_photos": len(sizes),
            "mean_bytes": sum(sizes) / len(sizes),
            "options": {name: getattr(self, name) for name in ("passes", "repeats", "seed")}
            | {"workers": list(self.numbers)},
        }

    def _record(self, name: str, made: _Made, rounds: Rounds[Way, DecodeTurn]) -> dict[str, Any]:
        turns = {number: rounds.whole(Way(name, number)) for number in (0, *self.numbers)}
        rates = {number: [turn.num_photos / turn.wall_s for turn in row] for number, row in turns.items()}
        best = max(self.numbers, key=lambda number: float(np.median(rates[number])))

        def cpu_ms(number: int) -> list[float]:
            return [1000 * turn.cpu_s / turn.num_photos for turn in turns[number]]

        figures = {
            "one_photos_per_s": rates[0],
            "one_cpu_ms": cpu_ms(0),
            "all_photos_per_s": rates[best],
            "all_cpu_ms": cpu_ms(best),
        }
        difference = made.differences.get(name)
        return {
            "decoder": name,
            "best_workers": best,
            **summarised(figures),
            "difference": None if difference is None else difference._asdict(),
            "repeats": {str(number): [turn._asdict() for turn in row] for number, row in turns.items()},
        }

    @staticmethod
    def table(report: Any) -> str:
        """A row for each decoder."""

        def difference(record: Mapping[str, Any]) -> str:
            found = record["difference"]
            if found is None:
                return "-"
            return (
                f"{found['num_photos']} photos, {found['mean']:.3f} ({found['largest']})"
                if found["largest"]
                else "none"
            )

        columns: Columns = {
            "decoder": "decoder",
            **{FIGURES[name].title: name for name in ("one_photos_per_s", "one_cpu_ms", "all_photos_per_s")},
            "workers": "best_workers",
            FIGURES["all_cpu_ms"].title: "all_cpu_ms",
            "differs from Pillow": difference,
        }
        notes = [
            f"{report['num_photos']} photos of {report['mean_bytes'] / 1000:.1f} kB on average, cut from photographs "
            "in scikit-image, some grey, some progressive; decoded as a whole to RGB.",
            f"Medians of {report['num_rounds']} interleaved turns (smallest to largest). all: the best of "
            f"{' and '.join(map(str, report['options']['workers']))} workers of a DataLoader, or threads of DALI.",
            f"{OURS} is the whole loader: it reads the photos from shards through its cache file. {DALI} is fed from "
            "memory.",
            "differs: photos with any other pixel; the mean difference of all values in levels of 255 (the largest).",
        ]
        notes += [f"'{one['decoder']}' is left out: it {one['reason']}" for one in report["skipped"]]
        return "\n".join([records_table(report["records"], columns, FIGURES), "", *notes])


def compared(name: str, photos: Photos) -> Difference:
    """Compare a decoder's pixels with Pillow's.

    Raises:
        OutputError: If a photo is missing, or has another shape or dtype, or its mean difference is above
            `MAX_MEAN_LEVELS`.
    """
    decode = DECODERS[REFERENCE].open()
    num_differing = largest = num_values = 0
    total = 0.0
    seen = set()
    with opened(name, photos, num_threads=0) as one_pass:
        for number, pixels in one_pass():
            wanted = decode(photos.encoded[number])
            if pixels.shape != wanted.shape or pixels.dtype != wanted.dtype:
                raise OutputError(
                    f"decoder '{name}', photo {number}: expected {wanted.dtype} {list(wanted.shape)}, found "
                    f"{pixels.dtype} {list(pixels.shape)}"
                )
            levels = np.abs(pixels.astype(np.int16) - wanted)
            if (mean := float(levels.mean())) > MAX_MEAN_LEVELS:
                raise OutputError(
                    f"decoder '{name}', photo {number}: differs from Pillow by {mean:.1f} levels on average, expected "
                    f"at most {MAX_MEAN_LEVELS:g}"
                )
            num_differing += bool(levels.any())
            largest, total, num_values = (
                max(largest, int(levels.max())),
                total + float(levels.sum()),
                num_values + levels.size,
            )
            seen.add(number)
    if len(seen) != len(photos.encoded):
        raise OutputError(f"decoder '{name}': {len(seen)} of {len(photos.encoded)} photos came")
    return Difference(num_differing, largest, total / num_values)


def _bytes_of(encoded: Sequence[object]) -> list[bytes]:
    assert all(isinstance(data, bytes) for data in encoded), "demo photos are in memory"
    return [data for data in encoded if isinstance(data, bytes)]


def _pack(encoded: Sequence[bytes], directory: Path) -> Path:
    """Write indexed shards; the key of a photo is its number."""
    names = [f"photos-{shard:06d}.tar" for shard in range(NUM_SHARDS)]
    for shard, name in enumerate(names):
        members = []
        for number in range(shard, len(encoded), NUM_SHARDS):
            members += [(f"{number:06d}.{LABEL_COMPONENT}", b"1"), (f"{number:06d}.{PHOTO}", encoded[number])]
        write_shard(directory / name, members)
    index_shards(ShardSet(store=LocalStore(directory), names=tuple(names)))
    return directory
