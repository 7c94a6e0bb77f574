"""Time what comes before the first sample, from 100 to 1,000,000 shards: a simulated manifest in, its growth out.

Nothing is fetched: the manifest is read as any is, and its shards are never asked for. Each size is measured in a fresh
process, so that peak memory is that of one manifest, state table, plan and window, the interpreter and its libraries
included.
"""

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bench.reports.tables import format_rows
from bench.timing.object_server import module_command, module_environment
from dali_pipes.errors import PipesError
from dali_pipes.formats.manifest import Manifest
from dali_pipes.progress import bar

if TYPE_CHECKING:
    from dali_pipes.cache.share import CacheShare
    from dali_pipes.order.plan import OrderInputs

__all__ = ["ScaleOptions", "format_scale", "run_scale", "simulated_manifest"]

SHARD_SAMPLES = 1000
# Photos of 90 to 130 KB: shards of some 110 MB, as AIStore and WebDataset recommend.
MIN_SHARD_BYTES, MAX_SHARD_BYTES = 90 << 20, 130 << 20
INDEX_BYTES = 60_000
# After the first window; the tenth is in the same state as all that follow.
NUM_WINDOWS = 9
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """Which sizes."""

    num_shards: Sequence[int] = (100, 10_000, 1_000_000)
    window_shards: Sequence[int] = (10, 100)
    """Shards of a window, on average: the cost of one must grow with these, and with these only."""
    repeats: int = 3

    def __post_init__(self) -> None:
        for name in ("num_shards", "window_shards"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"{name} must be positive numbers, got {','.join(map(str, values)) or 'none'}")
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")


def run_scale(options: ScaleOptions) -> dict[str, Any]:
    """Measure each size with each window, ``repeats`` times in turns.

    Returns:
        ``{"records": [{"num_shards", "window_shards", "open_s", "stages", "first_window_s", "window_s",
        "peak_rss_mib", ...}]}``, for JSON. ``open_s`` is the sum of the stages, the first window included; ``window_s``
        the median of windows 2 to 10, ``None`` where there are no three: the last is not whole.

    Raises:
        PipesError: If a size cannot be measured, for want of memory say.
    """
    from bench.environment import describe_environment

    sizes = list(itertools.product(options.num_shards, options.window_shards))
    measured: dict[tuple[int, int], list[dict[str, Any]]] = {size: [] for size in sizes}
    with tempfile.TemporaryDirectory(prefix="dali-pipes-bench-scale-") as folder:
        for num_shards in options.num_shards:
            _manifest_path(folder, num_shards).write_bytes(simulated_manifest(num_shards).to_bytes())
        with bar(what="measure", total=options.repeats * len(sizes), unit="process") as drawn:
            for _ in range(options.repeats):
                for num_shards, window_shards in sizes:
                    path = _manifest_path(folder, num_shards)
                    measured[num_shards, window_shards].append(_measure_apart(path, window_shards))
                    drawn.update(1)
    return {
        "records": [_record(*size, repeats) for size, repeats in measured.items()],
        "shard_samples": SHARD_SAMPLES,
        "repeats": options.repeats,
        "environment": describe_environment(),
    }


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
    from dali_pipes.order.plan import OrderInputs, reserved_bytes

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
    with _timed(stages, "promise"):
        reserved = reserved_bytes(
            np.diff(starts), manifest.shard_bytes, manifest.samples, order=order, global_batch_size=256
        )
    # A cache of its own: others at work on this machine have promises in the one that loaders share.
    with tempfile.TemporaryDirectory(prefix="dali-pipes-bench-", dir=default_directories()[0]) as folder:
        with _timed(stages, "image"):
            # Nothing of it is filled: it takes the room of its state table.
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
    assert taken.fill is not None, "the image is empty"
    share.fail(taken.fill)


def format_scale(report: dict[str, Any]) -> str:
    """A row a size, and below how each window's cost grew from the smallest set to the largest."""
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


def _manifest_path(folder: str, num_shards: int) -> Path:
    return Path(folder) / f"simulated-{num_shards}-manifest.safetensors"


def _measure_apart(path: Path, window_shards: int) -> dict[str, Any]:
    done = subprocess.run(  # noqa: S603 (our own interpreter and module)
        module_command("bench.scenarios.scale", str(path), "--window-shards", str(window_shards)),
        env=module_environment(),
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise PipesError(f"'{path.name}' with windows of {window_shards} shards could not be measured: {last}")
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def _record(num_shards: int, window_shards: int, repeats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    stages = {stage: median(repeat["stages"][stage] for repeat in repeats) for stage in repeats[0]["stages"]}
    window_s = [median(repeat["window_s"]) for repeat in repeats if repeat["window_s"]]
    return {
        "num_shards": num_shards,
        "window_shards": window_shards,
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


def main(argv: list[str] | None = None) -> int:
    """Measure one manifest in this process; JSON to stdout."""
    parser = argparse.ArgumentParser(prog="python -m bench.scenarios.scale", description=__doc__)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--window-shards", type=int, required=True)
    options = parser.parse_args(argv)
    print(json.dumps(measure(options.manifest, window_shards=options.window_shards)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
