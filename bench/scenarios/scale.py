"""Time the steps before the first sample, for simulated data sets of 100 to 1,000,000 shards.

Nothing is fetched: the manifest is read like any other, and no shard of it is ever requested. Each turn runs in a new
interpreter. So the peak memory is that of one manifest, state table, plan and window, and of the interpreter and its
libraries.
"""

import contextlib
import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.engine.options import Listed, option
from bench.engine.scenario import Measured, Rounds, Scenario
from bench.tools.folders import RunFolder
from bench.tools.memory import status_mib
from dali_pipes.formats.manifest import Manifest

if TYPE_CHECKING:
    from dali_pipes.cache.share import CacheShare
    from dali_pipes.order.inputs import OrderInputs


SHARD_SAMPLES = 1000
# Photos of 90 to 130 KB: shards of some 110 MB, as AIStore and WebDataset recommend.
MIN_SHARD_BYTES, MAX_SHARD_BYTES = 90 << 20, 130 << 20
INDEX_BYTES = 60_000
# Timed after the first one. The tenth window finds the same state as all later ones.
NUM_WINDOWS = 9


class Size(NamedTuple):
    """Shards of a data set, and of a window on average: a window's cost must grow with the second only."""

    num_shards: int
    window_shards: int


@dataclass(frozen=True, kw_only=True)
class ScaleScenario(Scenario[Path, Size, Measured]):
    """Time the steps before the first sample, and each window, for data sets of up to a million shards.

    Reads nothing: makes manifests of shards that do not exist, with 1,000 samples in each. Writes nothing but the file
    that --json names.
    """

    kind = "scale"
    title = "measure"
    runs_in: ClassVar[Literal["fork", "interpreter", "caller"]] = "interpreter"

    num_shards: Sequence[int] = option("100,10000,1000000", type=Listed(int), help="Sizes of the simulated data set.")
    window_shards: Sequence[int] = option("10,100", type=Listed(int), help="Shards of a shuffle window.")
    repeats: int = option(3, help="Processes for each pair.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_shards", "window_shards"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"{name} must be positive numbers, got {','.join(map(str, values)) or 'none'}")

    def prepare(self, folder: RunFolder, stack: ExitStack) -> Path:
        made = folder.new()
        for num_shards in self.num_shards:
            (made / str(num_shards)).write_bytes(simulated_manifest(num_shards).to_bytes())
        return made

    def subjects(self, made: Path) -> Sequence[Size]:
        return [Size(*pair) for pair in itertools.product(self.num_shards, self.window_shards)]

    def name_of(self, subject: Size) -> str:
        return f"{subject.num_shards} shards with windows of {subject.window_shards}"

    def measure(self, made: Path, subject: Size, number: int) -> Measured:
        """Measure one size.

        ``open_s`` is the sum of the stages, including the first window. ``next_window_s`` is the median of windows 2
        to 10, or ``None`` if there are fewer than three windows: the last one may hold less, and is not counted.
        """
        found = measure(made / str(subject.num_shards), window_shards=subject.window_shards)
        return {
            "figures": {
                "open_s": sum(found["stages"].values()),
                "next_window_s": median(found["window_s"]) if found["window_s"] else None,
                "peak_mib": found["peak_rss_mib"] - found["start_rss_mib"],
            },
            **found,
        }

    def notes(self, made: Path, rounds: Rounds[Size, Measured]) -> list[str]:
        """The stages of each size, in seconds."""
        return [
            f"{self.name_of(size)}: "
            + ", ".join(f"{stage.replace('_', ' ')} {seconds:.4f} s" for stage, seconds in row["stages"].items())
            for size in rounds.subjects
            for row in rounds.whole(size)[:1]
        ]


def simulated_manifest(num_shards: int) -> Manifest:
    """A manifest of shards that do not exist: 1,000 samples and 90 to 130 MiB in each; a function of the number."""
    draw = np.random.default_rng(num_shards)
    return Manifest(
        names=[f"simulated-{shard:08d}.tar" for shard in range(num_shards)],
        # Tars are padded to 10,240 bytes.
        shard_bytes=draw.integers(MIN_SHARD_BYTES, MAX_SHARD_BYTES, num_shards) // 10_240 * 10_240,
        checksums=draw.integers(0, 2**64, num_shards, np.uint64),
        samples=np.full(num_shards, SHARD_SAMPLES, np.int64),
        index_bytes=np.full(num_shards, INDEX_BYTES, np.int64),
        index_checksums=draw.integers(0, 2**64, num_shards, np.uint64),
        components={"cls": SHARD_SAMPLES * num_shards, "jpg": SHARD_SAMPLES * num_shards},
    )


def measure(path: Path, *, window_shards: int) -> dict[str, Any]:
    """Open the manifest at ``path`` as a loader does, to its first window and the nine after it, in this process."""
    # The stages do not include imports, but the first use of a library (numpy's sort).
    from dali_pipes.cache.extents import extent_starts
    from dali_pipes.cache.free_space import FreeSpace
    from dali_pipes.cache.placement import default_directories
    from dali_pipes.cache.share import CacheShare
    from dali_pipes.order.inputs import OrderInputs
    from dali_pipes.order.reservation import reserved_bytes

    start_rss_mib = status_mib("VmRSS")
    stages: dict[str, float] = {}
    with _timed(stages, "manifest"):
        manifest = Manifest.from_bytes(path.read_bytes(), where=str(path))
    with _timed(stages, "digest"):
        digest = manifest.digest
    with _timed(stages, "extents"):
        starts = extent_starts(manifest.shard_bytes, manifest.index_bytes)
    window_bytes = window_shards * (MIN_SHARD_BYTES + MAX_SHARD_BYTES) // 2
    order = OrderInputs(seed=7, shuffle_window=window_bytes)
    with _timed(stages, "reservation"):
        reserved = reserved_bytes(
            np.diff(starts), manifest.shard_bytes, manifest.samples, order=order, global_batch_size=256
        )
    # A separate cache: other loaders on this machine have reservations in the shared one.
    with tempfile.TemporaryDirectory(prefix="dali-pipes-bench-", dir=default_directories()[0]) as folder:
        with _timed(stages, "cache_file"):
            # Nothing is filled, so only the state table takes space.
            share = CacheShare(
                manifest,
                np.arange(manifest.num_shards),
                space=FreeSpace.of(Path(folder)),
                source="simulated",
                group=0,
                reserved=reserved,
                cache_bytes=reserved,
                keep=False,
            )
        with contextlib.closing(share):
            return _measure_plan(manifest, share, order, stages, digest=digest, start_rss_mib=start_rss_mib)


def _measure_plan(
    manifest: Manifest,
    share: "CacheShare",
    order: "OrderInputs",
    stages: dict[str, float],
    *,
    digest: str,
    start_rss_mib: float,
) -> dict[str, Any]:
    from dali_pipes.order.plan import Plan

    with _timed(stages, "plan"):
        plan = Plan(shard_bytes=manifest.shard_bytes, shard_samples=manifest.samples, order=order)
        plan.bytes_at_a_time(share.extent_bytes, [0], global_batch_size=256)
        windows = plan.windows()
    with _timed(stages, "first_window"):
        first = next(windows)
        _take(share, first.shards)
    window_s: list[float] = []
    for _ in range(NUM_WINDOWS):
        started = time.perf_counter()
        window = next(windows, None)
        if window is not None:
            _take(share, window.shards)
        elapsed_s = time.perf_counter() - started
        if window is None:
            # The last window is only the rest of the shards: its cost says nothing about a whole one's.
            del window_s[-1:]
            break
        window_s.append(elapsed_s)
    assert len(digest) == 64
    return {
        "stages": stages,
        "window_s": window_s,
        "window_samples": len(first.ordinals),
        "start_rss_mib": start_rss_mib,
        "peak_rss_mib": status_mib("VmHWM"),
    }


def _take(share: "CacheShare", shards: npt.NDArray[np.int64]) -> None:
    """Ask the state table for a window, and give back the shards that this process would fill."""
    taken = share.take(shards.tolist())
    assert len(taken.fill), "the cache file is empty"
    share.fail(taken.fill.tolist())


@contextlib.contextmanager
def _timed(stages: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    stages[name] = time.perf_counter() - started
