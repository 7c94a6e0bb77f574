"""Count the bytes that each point copies to the GPU, with CUPTI, after everything is timed.

CUPTI slows a process down from its first use on. So this runs last, in a process of its own.
"""

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.engine.scenario import failure_text
from bench.gpu.points import Point
from bench.gpu.sweep import GpuScenario
from bench.reports.record import read_record, write_record
from bench.tools.folders import RunFolder

NUM_PROFILED = 4
"""Batches whose copies to the GPU are counted."""
COPIED = "copied_bytes_per_sample"
WHY_NOT = "copies_not_measured"


def count_copies(scenario: GpuScenario, path: Path) -> None:
    """Add the copied bytes of each point to the scenario's record, which is written after every point.

    A point whose copies an earlier process counted, or in which it ended, is not counted again.
    """
    report = read_record(path)
    records = {(one["variant"], one["label"]): one for one in report["records"] if "samples_per_s" in one}
    with RunFolder(scenario.work) as folder, ExitStack() as stack:
        points: list[Point] = list(scenario.subjects(scenario.prepare(folder, stack)))
        for point in points:
            record = records.get((point.case.variant, point.label))
            is_late = scenario.deadline is not None and time.monotonic() > scenario.deadline
            if record is None or WHY_NOT in record or is_late:
                continue
            record |= {COPIED: None, WHY_NOT: "the process ended while CUPTI counted"}
            write_record(report, path)
            record[COPIED], record[WHY_NOT] = _copied(scenario, point)
            write_record(report, path)


def is_counted(report: Mapping[str, Any]) -> bool:
    """Whether all points of a record that were timed have their copies, or a reason."""
    return all(WHY_NOT in one for one in report.get("records", ()) if "samples_per_s" in one)


def _copied(scenario: GpuScenario, point: Point) -> tuple[dict[str, float] | None, str | None]:
    """Count the bytes of a sample that are copied to the GPU, by the kind of host memory; or say why that failed."""
    if scenario.device == "cpu":
        return None, "no GPU is used"
    drawn: list[int] = []
    try:
        with point.case.open(scenario.workload, point.setting) as running:
            running.step()
            found = measure_copies(lambda: drawn.extend(running.step() for _ in range(NUM_PROFILED)))
    except Exception as exc:  # noqa: BLE001 (the other points must not be lost)
        return None, failure_text(exc)
    if not found:
        return None, "CUPTI reported no copy"
    # Includes copies for later batches; about as many copies for these batches were made before.
    return {place: num_bytes / sum(drawn) for place, num_bytes in found.items()}, None


def measure_copies(run: Callable[[], None]) -> dict[str, int]:
    """Count the bytes that ``run`` copies to the GPU: kind of host memory -> bytes; empty if CUPTI reports no copy.

    `torch.profiler` sees all copies of the process, DALI's too. It slows the process down, so nothing is timed with it.
    """
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="dali-pipes-bench-") as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return copied_bytes(json.loads(path.read_text()))


def copied_bytes(trace: Mapping[str, Any]) -> dict[str, int]:
    """Sum the bytes that a trace of `torch.profiler` shows as copied from the host to the GPU.

    Returns:
        Kind of host memory -> bytes.

    >>> copied_bytes({"traceEvents": [{"name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 4096}}]})
    {'pinned': 4096}
    """
    found: dict[str, int] = {}
    for event in trace.get("traceEvents", ()):
        name = str(event.get("name", ""))
        if not name.startswith("Memcpy HtoD"):
            continue
        place = name.partition("(")[2].partition(" ->")[0].lower() or "unknown"
        found[place] = found.get(place, 0) + int(event.get("args", {}).get("bytes", 0))
    return found
