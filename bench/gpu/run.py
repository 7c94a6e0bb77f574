"""Scenarios and a machine in, records out: what a GPU decodes, setting by setting, in order of worth and within a time.

Each scenario starts from one setting and changes one thing at a time. Points are opened in turns, repeat after repeat,
so that a drift of the machine meets all alike; one that fails is recorded as failed and the others go on: a GPU machine
is often there for an hour, and nobody watches.
"""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from bench.environment import describe_environment
from bench.gpu.cases import CASES, Case, Setting, Workload
from bench.gpu.checks import check_path, measure_parity
from bench.gpu.devices import (
    SETTLED_S,
    Nvml,
    Utilisation,
    count_jpeg_engines,
    has_video_library,
    measure_copies,
    sampling,
)
from bench.loaders import available_cores
from bench.timing.processes import ProcessTree
from dali_pipes.progress import bar

__all__ = ["SCENARIOS", "GpuOptions", "Point", "base_setting", "plan_points", "run_scenario"]

CHECKS = ("path", "parity")
SCENARIOS = (*CHECKS, *dict.fromkeys(case.scenario for case in CASES))
"""In order of worth: what must hold before a figure means anything, then what is published by others, then the rest."""

HW_DECODER_LOADS = (0.0, 0.12, 0.25, 0.5, 0.65, 0.8, 1.0)
BATCH_SIZES = (64, 128, 256, 512)
PHOTO_SIDES = (256, 512, 1024, 2048)
PROGRESSIVE_SHARES = (0.0, 0.25, 0.5, 1.0)
# With what DALI's own test (qa/TL1_decoder_perf) runs its benchmark on x86 Hopper machines, as far as there are cores,
# and what it expects there. It reads photos of its own, so only the order of magnitude can be held against it.
PUBLISHED = {"batch_size": 408, "num_threads": 70, "hw_decoder_load": 0.12, "size_hint": 6000}
PUBLISHED_FIGURES = {
    "source": "NVIDIA/DALI, qa/TL1_decoder_perf/test.sh",
    "photos": "DALI_extra, db/single/jpeg",
    "settings": PUBLISHED,
    "expected_samples_per_s": {"x86 Hopper": 19000, "Grace Hopper, 72 threads, hw_decoder_load 0.11": 29000},
}
# Batches that are not timed: the first allocate, on a GPU for the largest photo so far.
NUM_WARM_UP = 5
NUM_PROFILED = 4
MAX_ERROR_CHARS = 600


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """What all scenarios share."""

    device: Literal["gpu", "cpu"]
    num_threads: int
    batch_size: int
    hw_decoder_load: float = 0.65
    sweeps: Mapping[str, tuple[Any, ...]]
    """Name of a `Setting`'s field -> values; see `default_sweeps`."""
    seconds: float = 2.0
    """Each point is timed for, in each repeat."""
    repeats: int = 2

    def __post_init__(self) -> None:
        if self.seconds <= 0:
            raise ValueError(f"seconds must be positive, got {self.seconds}")
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")
        if unknown := set(self.sweeps) - set(asdict(base_setting(self))):
            raise ValueError(f"sweeps must be of settings' fields, got {', '.join(sorted(unknown))}")


@dataclass(frozen=True, kw_only=True)
class Point:
    """A case at a setting."""

    case: Case
    setting: Setting
    label: str
    """What is changed: ``base``, ``hw_decoder_load=0.12``, ``published``."""


def base_setting(options: GpuOptions) -> Setting:
    """From which each sweep departs."""
    return Setting(
        device=options.device,
        num_threads=options.num_threads,
        batch_size=options.batch_size,
        hw_decoder_load=options.hw_decoder_load,
    )


def default_sweeps(device: str) -> dict[str, tuple[Any, ...]]:
    """What is varied where nothing is said: on the CPU there is no share of engines."""
    cores = available_cores()
    sweeps: dict[str, tuple[Any, ...]] = {"hw_decoder_load": HW_DECODER_LOADS} if device == "gpu" else {}
    sweeps["num_threads"] = tuple(sorted({max(1, cores // 4), max(1, cores // 2), cores}))
    sweeps["batch_size"] = BATCH_SIZES
    sweeps["photo_side"] = PHOTO_SIDES
    sweeps["progressive_share"] = PROGRESSIVE_SHARES
    return sweeps


# Which sweeps tell something of which scenario: all of all would take hours.
_SWEPT = {
    "rn50": ("hw_decoder_load", "num_threads", "batch_size"),
    "decode": ("hw_decoder_load", "num_threads", "batch_size", "photo_side", "progressive_share"),
    "segmentation": ("hw_decoder_load", "num_threads", "batch_size"),
    "halves": ("batch_size",),
    "roi": ("hw_decoder_load", "photo_side"),
    "masks": ("batch_size",),
}


def plan_points(scenario: str, options: GpuOptions) -> list[Point]:
    """What is timed for a scenario, in order: each case at the base setting, then one thing changed at a time."""
    base = base_setting(options)
    points = []
    for case in (case for case in CASES if case.scenario == scenario):
        if case.needs_gpu and options.device == "cpu":
            continue
        points.append(Point(case=case, setting=base, label="base"))
        if scenario == "rn50" and options.device == "gpu":
            points.append(Point(case=case, setting=_published(base), label="as published"))
        for name in _SWEPT[scenario]:
            for value in options.sweeps.get(name, ()):
                if value == getattr(base, name):
                    continue
                points.append(Point(case=case, setting=replace(base, **{name: value}), label=f"{name}={value}"))
    return points


def _published(base: Setting) -> Setting:
    settings: dict[str, Any] = {**PUBLISHED, "num_threads": min(int(PUBLISHED["num_threads"]), available_cores())}
    return replace(base, **settings)


def run_scenario(
    scenario: str,
    workload: Workload,
    *,
    options: GpuOptions,
    deadline: float | None = None,
    bystanders: Sequence[int] = (),
    show: bool = True,
) -> dict[str, Any]:
    """One scenario's record.

    Args:
        scenario: One of `SCENARIOS`.
        workload: Photos and shards.
        options: What to vary and for how long.
        deadline: Of `time.monotonic`; what has not been begun then is left out, and named.
        bystanders: Processes below this one whose CPU is nobody's.
        show: Draw a bar.

    Returns:
        ``{"scenario": ..., "records": [...], "environment": {...}}``, ready for JSON; of a check ``"check"`` in place
        of records.

    Raises:
        ValueError: If there is no such scenario.
    """
    if scenario not in SCENARIOS:
        raise ValueError(f"scenarios must be of {', '.join(SCENARIOS)}, got '{scenario}'")
    report: dict[str, Any] = {"scenario": scenario}
    with contextlib.ExitStack() as stack:
        nvml, why_not = _open_nvml(options.device)
        if nvml is not None:
            stack.enter_context(nvml)
        if scenario in CHECKS:
            report["check"] = _check(scenario, workload, options=options)
        else:
            report |= _time_points(
                plan_points(scenario, options),
                workload,
                options=options,
                nvml=nvml,
                deadline=deadline,
                bystanders=bystanders,
                show=show,
            )
        if scenario == "rn50":
            report["published"] = PUBLISHED_FIGURES
        report["gpu"] = _describe_gpu(nvml, why_not, options.device)
    report["environment"] = describe_environment()
    report["options"] = {
        **asdict(options),
        "sweeps": {name: list(values) for name, values in options.sweeps.items()},
        "photos": workload.stored.to_json(),
        "num_shards": len(workload.shards.names),
    }
    return report


def _check(scenario: str, workload: Workload, *, options: GpuOptions) -> dict[str, Any]:
    def run() -> dict[str, Any]:
        if scenario == "parity":
            return measure_parity(workload, device=options.device)
        return check_path(
            workload, device=options.device, num_threads=options.num_threads, batch_size=options.batch_size
        )

    found, error = _guarded(run)
    return {"device": options.device, **(found or {}), **({} if error is None else {"error": error})}


def _time_points(
    points: Sequence[Point],
    workload: Workload,
    *,
    options: GpuOptions,
    nvml: Nvml | None,
    deadline: float | None,
    bystanders: Sequence[int],
    show: bool,
) -> dict[str, Any]:
    tree = ProcessTree(bystanders=bystanders)
    runs: list[list[dict[str, Any]]] = [[] for _ in points]
    errors: list[str | None] = [None] * len(points)
    with bar(what="time points", total=options.repeats * len(points), unit="point", shown=show) as drawn:
        for repeat in range(options.repeats):
            for number, point in enumerate(points):
                is_late = deadline is not None and time.monotonic() > deadline
                if errors[number] is None and not is_late:
                    found, errors[number] = _guarded(
                        functools.partial(
                            _time,
                            point,
                            workload,
                            seconds=options.seconds,
                            nvml=nvml,
                            tree=tree,
                            copies=repeat == 0,
                        )
                    )
                    runs[number] += [found] if found is not None else []
                drawn.update(1)
    records, left_out = [], []
    for point, taken, error in zip(points, runs, errors, strict=True):
        if taken or error is not None:
            records.append(_record(point, taken, error=error, workload=workload))
        else:
            left_out.append({"variant": point.case.variant, "label": point.label})
    return {"records": records, "left_out": left_out}


def _guarded(run: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any] | None, str | None]:
    """What it gives, or what went wrong: out of memory at one setting must not cost the others."""
    try:
        return run(), None
    except Exception as exc:  # noqa: BLE001 (recorded, whatever it is)
        return None, f"{type(exc).__name__}: {exc}"[:MAX_ERROR_CHARS]


def _time(
    point: Point, workload: Workload, *, seconds: float, nvml: Nvml | None, tree: ProcessTree, copies: bool
) -> dict[str, Any]:
    if point.case.needs_masks and not workload.stored.masks:
        raise ValueError(f"not all samples have a mask '{workload.mask}'; name the component: --mask")
    with point.case.open(workload, point.setting) as running:
        for _ in range(NUM_WARM_UP):
            running.step()
        _synchronise(point.setting)
        batch_s: list[float] = []
        num_samples = 0
        cpu_start, start = tree.cpu_s(), time.perf_counter()
        after_s = SETTLED_S if seconds > SETTLED_S else 0.0
        with sampling(None if nvml is None else nvml.sample, after_s=after_s) as samples:
            before = start
            while before - start < seconds or not batch_s:
                num_samples += running.step()
                now = time.perf_counter()
                batch_s.append(now - before)
                before = now
            _synchronise(point.setting)
            elapsed = time.perf_counter() - start
        cpu_s = tree.cpu_s() - cpu_start
        copied, why_not = _copied(running.step, point.setting) if copies else (None, None)
        return {
            "samples_per_s": num_samples / elapsed,
            "cpu_ms_per_sample": 1000 * cpu_s / num_samples,
            "cpu_share": cpu_s / elapsed / available_cores(),
            "num_samples": num_samples,
            "seconds": elapsed,
            "batch_ms": {
                "p50": 1000 * float(np.percentile(batch_s, 50)),
                "p99": 1000 * float(np.percentile(batch_s, 99)),
                "max": 1000 * max(batch_s),
            },
            "utilisation": asdict(Utilisation.of(samples)) if samples else None,
            "host_bytes_per_sample": running.host_bytes,
            "copied_bytes_per_sample": copied,
            "copies_not_measured": why_not,
        }


def _copied(step: Callable[[], int], setting: Setting) -> tuple[dict[str, float] | None, str | None]:
    """Bytes a sample that crossed to the GPU, by where they lay on the host; or why that is not known."""
    if setting.device == "cpu":
        return None, "no GPU is used"
    drawn: list[int] = []
    try:
        found = measure_copies(lambda: drawn.extend(step() for _ in range(NUM_PROFILED)))
    except Exception as exc:  # noqa: BLE001 (what was timed must not be lost for it)
        return None, f"{type(exc).__name__}: {exc}"[:MAX_ERROR_CHARS]
    if found is None:
        return None, "CUPTI told of no copy"
    # What was begun in the time and not drawn is in it, too: as much as was begun before and drawn.
    return {place: num_bytes / sum(drawn) for place, num_bytes in found.items()}, None


def _record(
    point: Point, runs: Sequence[Mapping[str, Any]], *, error: str | None, workload: Workload
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "scenario": point.case.scenario,
        "variant": point.case.variant,
        "label": point.label,
        "setting": point.setting.to_json(),
    }
    if error is not None:
        record["error"] = error
    if not runs:
        return record
    for name in ("samples_per_s", "cpu_ms_per_sample", "cpu_share"):
        values = [run[name] for run in runs]
        record[name] = statistics.median(values)
        record.setdefault("spread", {})[name] = [min(values), max(values)]
    record["photos"] = workload.photos(point.setting).to_json()
    record["host_bytes_per_sample"] = runs[0]["host_bytes_per_sample"]
    record["copied_bytes_per_sample"] = runs[0]["copied_bytes_per_sample"]
    record["utilisation"] = runs[-1]["utilisation"]
    record["repeats"] = list(runs)
    return record


def _open_nvml(device: str) -> tuple[Nvml | None, str | None]:
    if device == "cpu":
        return None, "no GPU is used"
    try:
        return Nvml(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)), None
    except (AttributeError, OSError) as exc:  # an older torch, or no NVML
        return None, str(exc)


def _describe_gpu(nvml: Nvml | None, why_not: str | None, device: str) -> dict[str, Any] | None:
    if device == "cpu":
        return None
    found: dict[str, Any] = {
        "name": torch.cuda.get_device_name(),
        "nvml": why_not or "read",
        # Without it the JPEG engines are not used, and nothing says so.
        "video_library": has_video_library(),
    }
    if nvml is not None:
        with contextlib.suppress(OSError):
            found["driver"] = nvml.driver_version()
        found["jpeg_engines_nvml"] = nvml.num_jpeg_engines()
    try:
        found["jpeg_engines_nvjpeg"], found["cores_per_jpeg_engine"] = count_jpeg_engines()
    except (AttributeError, OSError) as exc:  # an older nvJPEG, or none: what was timed must not be lost for it
        found["jpeg_engines_nvjpeg"], found["nvjpeg"] = None, str(exc)
    return found


def _synchronise(setting: Setting) -> None:
    if setting.device == "gpu":
        torch.cuda.synchronize()
