"""Time what comes before the first sample, for simulated data sets of 100 to 1,000,000 shards.

Nothing is fetched: the manifest is read as any is, and its shards are never asked for. Each turn runs in a new
interpreter, so that peak memory is that of one manifest, state table, plan and window, and of the interpreter and its
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

from bench.engine.scenario import Rounds, Scenario
from bench.reports.tables import format_rows
from bench.tools.folders import RunFolder
from dali_pipes.formats.manifest import Manifest

if TYPE_CHECKING:
    from dali_pipes.cache.share import CacheShare
    from dali_pipes.order.inputs import OrderInputs


SHARD_SAMPLES = 1000
# Photos of 90 to 130 KB: shards of some 110 MB, as AIStore and WebDataset recommend.
MIN_SHARD_BYTES, MAX_SHARD_BYTES = 90 << 20, 130 << 20
INDEX_BYTES = 60_000
# After the first window; the tenth is in the same state as all that follow.
NUM_WINDOWS = 9
MIB = 1 << 20


class Size(NamedTuple):
    """Shards of a data set, and of a window on average: a window's cost must grow with the second only."""

    num_shards: int
    window_shards: int


@dataclass(frozen=True, kw_only=True)
class ScaleScenario(Scenario[Path, Size, dict[str, Any]]):
    """Each size of a data set with each size of a window."""

    kind = "scale"
    title = "measure"
    runs_in: ClassVar[Literal["fork", "interpreter", "caller"]] = "interpreter"

    num_shards: Sequence[int] = (100, 10_000, 1_000_000)
    window_shards: Sequence[int] = (10, 100)
    repeats: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_shards", "window_shards"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"{name} must be positive numbers, got {','.join(map(str, values)) or 'none'}")

    def prepare(self, folder: RunFolder, stack: ExitStack) -> Path:
        """A directory with a manifest of each size."""
        made = folder.new()
        for num_shards in self.num_shards:
            (made / str(num_shards)).write_bytes(simulated_manifest(num_shards).to_bytes())
        return made

    def subjects(self, made: Path) -> Sequence[Size]:
        """All pairs."""
        return [Size(*pair) for pair in itertools.product(self.num_shards, self.window_shards)]

    def name_of(self, subject: Size) -> str:
        """``1000 shards with windows of 10``."""
        return f"{subject.num_shards} shards with windows of {subject.window_shards}"

    def measure(self, made: Path, subject: Size, number: int) -> dict[str, Any]:
        """Open the data set once."""
        return measure(made / str(subject.num_shards), window_shards=subject.window_shards)

    def report(self, made: Path, rounds: Rounds[Size, dict[str, Any]]) -> dict[str, Any]:
        """``{"records": [{"num_shards", "window_shards", "open_s", "stages", "window_s", "peak_rss_mib", ...}]}``.

        ``open_s`` is the sum of the stages, the first window included; ``window_s`` the median of windows 2 to 10,
        ``None`` where there are no three: the last is not whole.
        """
        return {
            "records": [_record(size, rounds.whole(size)) for size in rounds.subjects],
            "shard_samples": SHARD_SAMPLES,
            "repeats": self.repeats,
        }

    @staticmethod
    def table(report: Any) -> str:
        """See `format_scale`."""
        return format_scale(report)


def simulated_manifest(num_shards: int) -> Manifest:
    """A manifest of shards that are nowhere: 1,000 samples in each, 90 to 130 MiB; the same for the same number."""
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
    # Libraries are no part of the stages; the first use of some of them is (numpy's sort).
    from dali_pipes.cache.extents import extent_starts
    from dali_pipes.cache.free_space import FreeSpace
    from dali_pipes.cache.placement import default_directories
    from dali_pipes.cache.share import CacheShare
    from dali_pipes.order.inputs import OrderInputs
    from dali_pipes.order.reservation import reserved_bytes

    start_rss = _status_bytes("VmRSS")
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
    # A cache of its own: others at work on this machine have reservations in the one that loaders share.
    with tempfile.TemporaryDirectory(prefix="dali-pipes-bench-", dir=default_directories()[0]) as folder:
        with _timed(stages, "cache_file"):
            # Nothing of it is filled: it takes the space of its state table.
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
            return _measure_plan(manifest, share, order, stages, digest=digest, start_rss=start_rss)


def _measure_plan(
    manifest: Manifest,
    share: "CacheShare",
    order: "OrderInputs",
    stages: dict[str, float],
    *,
    digest: str,
    start_rss: int,
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
            # The last one is what was left: its cost says nothing about a whole one's.
            del window_s[-1:]
            break
        window_s.append(elapsed_s)
    assert len(digest) == 64
    return {
        "stages": stages,
        "window_s": window_s,
        "window_samples": len(first.ordinals),
        "start_rss_mib": start_rss / MIB,
        # Of this process alone: getrusage() would also count what its parent once had.
        "peak_rss_mib": _status_bytes("VmHWM") / MIB,
    }


def _take(share: "CacheShare", shards: npt.NDArray[np.int64]) -> None:
    """Ask the state table for a window, and give up the shard that is to be filled."""
    taken = share.take(shards.tolist())
    assert taken.fill is not None, "the cache file is empty"
    share.fail(taken.fill)


def format_scale(report: dict[str, Any]) -> str:
    """A row a size, and how the cost of a window grew from the smallest data set to the largest."""
    records = report["records"]
    stages = list(records[0]["stages"])
    rows = [["shards", "window", "samples", *(f"{stage.replace('_', ' ')} s" for stage in stages)]]
    rows[0] += ["all s", "next window s", "peak MiB"]
    rows += [
        [
            f"{record['num_shards']:,}",
            str(record["window_shards"]),
            f"{record['window_samples']:,}",
            *(f"{record['stages'][stage]:.4f}" for stage in stages),
            f"{record['open_s']:.3f}",
            "-" if record["window_s"] is None else f"{record['window_s']:.4f}",
            f"{record['peak_rss_mib']:.0f} ({record['start_rss_mib']:.0f} at start)",
        ]
        for record in records
    ]
    return "\n".join([format_rows(rows), "", *_growth(records)])


def _growth(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    for window_shards in sorted({record["window_shards"] for record in records}):
        timed = [row for row in records if row["window_shards"] == window_shards and row["window_s"] is not None]
        timed.sort(key=lambda row: int(row["num_shards"]))
        if len(timed) > 1:
            small, large = timed[0], timed[-1]
            yield (
                f"a window of {window_shards} shards costs {large['window_s'] / small['window_s']:.2f} times as much "
                f"in {large['num_shards']:,} shards as in {small['num_shards']:,}, which are "
                f"{large['num_shards'] / small['num_shards']:,.0f} times as many"
            )


def _record(size: Size, repeats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    stages = {stage: median(repeat["stages"][stage] for repeat in repeats) for stage in repeats[0]["stages"]}
    window_s = [median(repeat["window_s"]) for repeat in repeats if repeat["window_s"]]
    return {
        **size._asdict(),
        "window_samples": repeats[0]["window_samples"],
        "open_s": median(sum(repeat["stages"].values()) for repeat in repeats),
        "stages": stages,
        "first_window_s": stages["first_window"],
        "window_s": median(window_s) if window_s else None,
        "peak_rss_mib": max(repeat["peak_rss_mib"] for repeat in repeats),
        "start_rss_mib": max(repeat["start_rss_mib"] for repeat in repeats),
        "repeats": list(repeats),
    }


@contextlib.contextmanager
def _timed(stages: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    stages[name] = time.perf_counter() - started


def _status_bytes(name: str) -> int:
    """A figure of ``/proc/self/status``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
