"""Measure decoding on a GPU, one setting changed at a time: the scenarios of `bench gpu`, for the engine.

Each timed scenario starts from one setting. Its points take turns in this process, because opening a CUDA context for
each point would take longer than timing it. If a point fails, its error is recorded and the others go on: a GPU machine
is often available for an hour only, and nobody watches. The checks, of the path and of pixels, take one turn each.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch

from bench.engine.scenario import MAX_ERROR_CHARS, Rounds, Scenario
from bench.gpu.cases import CASES, Case
from bench.gpu.checks import check_path, measure_parity
from bench.gpu.devices import (
    SETTLED_S,
    Nvml,
    count_jpeg_engines,
    has_video_library,
    measure_copies,
    sampling,
    utilisation,
)
from bench.gpu.tables import FIGURES, format_scenario
from bench.gpu.workload import Device, GpuSetting, Workload
from bench.reports.figures import Figure
from bench.reports.tables import summarised
from bench.tools.environment import available_cores
from bench.tools.folders import RunFolder
from bench.tools.processes import ProcessTree

CHECKS = ("path", "parity")
SCENARIOS = (*CHECKS, *dict.fromkeys(case.scenario for case in CASES))
"""The scenarios by importance: first the checks, without which figures mean nothing; then figures that others
publish."""

HW_DECODER_LOADS = (0.0, 0.12, 0.25, 0.5, 0.65, 0.8, 1.0)
BATCH_SIZES = (64, 128, 256, 512)
PHOTO_SIDES = (256, 512, 1024, 2048)
PROGRESSIVE_SHARES = (0.0, 0.25, 0.5, 1.0)
SWEPT = {
    "rn50": ("hw_decoder_load", "num_threads", "batch_size"),
    "decode": ("hw_decoder_load", "num_threads", "batch_size", "photo_side", "progressive_share"),
    "segmentation": ("hw_decoder_load", "num_threads", "batch_size"),
    "halves": ("batch_size",),
    "roi": ("hw_decoder_load", "photo_side"),
    "masks": ("batch_size",),
}
"""The settings that are swept in each scenario: all settings in all scenarios would take hours."""

PUBLISHED = {"batch_size": 408, "num_threads": 70, "hw_decoder_load": 0.12, "size_hint": 6000}
"""The settings with which DALI's own test (qa/TL1_decoder_perf) runs its benchmark on x86 Hopper machines."""
PUBLISHED_FIGURES = {
    "source": "NVIDIA/DALI, qa/TL1_decoder_perf/test.sh",
    # These are not our photos, so only the order of magnitude can be compared.
    "photos": "DALI_extra, db/single/jpeg",
    "settings": PUBLISHED,
    "expected_samples_per_s": {"x86 Hopper": 19000, "Grace Hopper, 72 threads, hw_decoder_load 0.11": 29000},
}
NUM_WARM_UP = 5
"""Batches before the timed ones: the first batches allocate memory, on a GPU for the largest photo so far."""
NUM_PROFILED = 4
"""Batches whose copies to the GPU are counted."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A case at a setting."""

    case: Case
    setting: GpuSetting
    label: str
    """The change from the base setting: ``base``, ``hw_decoder_load=0.12``, ``as published``."""


class Session(NamedTuple):
    """The sources from which turns measure."""

    nvml: Nvml | None
    no_nvml: str | None
    """Why NVML is missing."""
    tree: ProcessTree


def default_sweeps(device: str) -> dict[str, tuple[Any, ...]]:
    """Return the values of each setting that is swept. The CPU has no JPEG engines, so no ``hw_decoder_load``."""
    cores = available_cores()
    return {
        **({"hw_decoder_load": HW_DECODER_LOADS} if device == "gpu" else {}),
        "num_threads": tuple(sorted({max(1, cores // 4), max(1, cores // 2), cores})),
        "batch_size": BATCH_SIZES,
        "photo_side": PHOTO_SIDES,
        "progressive_share": PROGRESSIVE_SHARES,
    }


@dataclass(frozen=True, kw_only=True)
class GpuScenario(Scenario[Session, Any, dict[str, Any]]):
    """A scenario whose subjects are timed points; `GpuCheck` is the other kind."""

    kind = "gpu"
    title = "time points"
    runs_in: ClassVar[Literal["fork", "interpreter", "caller"]] = "caller"
    figures: ClassVar[Mapping[str, Figure]] = FIGURES

    name: str
    """One of `SCENARIOS`."""
    workload: Workload
    """Photos and shards; several scenarios share one."""
    device: Device
    num_threads: int
    batch_size: int
    hw_decoder_load: float = 0.65
    sweeps: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Field of `GpuSetting` -> values; see `default_sweeps`."""
    seconds: float = 2.0
    """The time of each point in each round."""
    repeats: int = 2
    bystanders: Collection[int] = ()
    """Child processes whose CPU time is not counted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seconds <= 0:
            raise ValueError(f"seconds must be positive, got {self.seconds}")
        if unknown := set(self.sweeps) - set(asdict(self.base_setting)):
            raise ValueError(f"sweeps must name fields of GpuSetting, got {', '.join(sorted(unknown))}")

    @property
    def base_setting(self) -> GpuSetting:
        """The setting from which each sweep departs."""
        return GpuSetting(
            device=self.device,
            num_threads=self.num_threads,
            batch_size=self.batch_size,
            hw_decoder_load=self.hw_decoder_load,
        )

    def goes_on_without(self, subject: Any) -> bool:
        return True

    def prepare(self, folder: RunFolder, stack: ExitStack) -> Session:
        """Open NVML, if there is a GPU."""
        nvml, why_not = None, None
        if self.device == "cpu":
            why_not = "no GPU is used"
        else:
            try:
                uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
                nvml = stack.enter_context(Nvml(str(uuid)))
            except (AttributeError, OSError) as exc:  # torch is too old, or NVML is missing
                why_not = str(exc)
        return Session(nvml, why_not, ProcessTree(bystanders=self.bystanders))

    def subjects(self, made: Session) -> Sequence[Any]:
        """Return the points."""
        return self.points()

    def points(self) -> list[Point]:
        """Return each case at the base setting, then with one setting changed at a time."""
        base = self.base_setting
        published = {**PUBLISHED, "num_threads": min(int(PUBLISHED["num_threads"]), available_cores())}
        points = []
        for case in (case for case in CASES if case.scenario == self.name):
            if case.needs_gpu and self.device == "cpu":
                continue
            points.append(Point(case=case, setting=base, label="base"))
            if self.name == "rn50" and self.device == "gpu":
                points.append(Point(case=case, setting=replace(base, **published), label="as published"))  # type: ignore[arg-type]
            points += [
                Point(case=case, setting=replace(base, **{name: value}), label=f"{name}={value}")
                for name in SWEPT[self.name]
                for value in self.sweeps.get(name, ())
                if value != getattr(base, name)
            ]
        return points

    def order(self, subjects: Sequence[Any], number: int) -> Sequence[Any]:
        """Keep the order in every round, the most important first: the time may end before the last subject."""
        return subjects

    def name_of(self, subject: Any) -> str:
        """``decode, batch_size=64``."""
        return f"{subject.case.variant}, {subject.label}" if isinstance(subject, Point) else str(subject)

    def measure(self, made: Session, subject: Any, number: int) -> dict[str, Any]:
        """Time one point; its copies to the GPU are counted in the first round."""
        setting = subject.setting
        if subject.case.needs_masks and not self.workload.stored.masks:
            raise ValueError(f"not all samples have a mask '{self.workload.mask}'; name the component: --mask")
        with subject.case.open(self.workload, setting) as running:
            for _ in range(NUM_WARM_UP):
                running.step()
            _synchronise(setting)
            batch_s: list[float] = []
            num_samples = 0
            cpu_start, start = made.tree.cpu_s(), time.perf_counter()
            after_s = SETTLED_S if self.seconds > SETTLED_S else 0.0
            with sampling(None if made.nvml is None else made.nvml.sample, after_s=after_s) as samples:
                before = start
                while before - start < self.seconds or not batch_s:
                    num_samples += running.step()
                    now = time.perf_counter()
                    batch_s.append(now - before)
                    before = now
                _synchronise(setting)
                elapsed = time.perf_counter() - start
            cpu_s = made.tree.cpu_s() - cpu_start
            copied, why_not = _copied(running.step, setting) if number == 0 else (None, None)
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
                "utilisation": utilisation(samples),
                "host_bytes_per_sample": running.host_bytes,
                "copied_bytes_per_sample": copied,
                "copies_not_measured": why_not,
            }

    def report(self, made: Session, rounds: Rounds[Any, dict[str, Any]]) -> dict[str, Any]:
        """``{"scenario", "records" or "check", "gpu", "options"}``."""
        return {
            "scenario": self.name,
            **self.found(rounds),
            **({"published": PUBLISHED_FIGURES} if self.name == "rn50" else {}),
            "gpu": _describe_gpu(made, self.device),
            "options": {
                **{name: getattr(self, name) for name in _OPTIONS},
                "sweeps": {name: list(values) for name, values in self.sweeps.items()},
                "photos": self.workload.stored.to_json(),
                "num_shards": len(self.workload.shards.names),
            },
        }

    def found(self, rounds: Rounds[Any, dict[str, Any]]) -> dict[str, Any]:
        """Return the records, and the points for which there was no time."""
        records: list[dict[str, Any]] = []
        left_out: list[dict[str, str]] = []
        for point in rounds.subjects:
            turns, error = rounds.rows[point], rounds.errors.get(point)
            if not turns and error is None:
                left_out.append({"variant": point.case.variant, "label": point.label})
                continue
            record = {
                "scenario": point.case.scenario,
                "variant": point.case.variant,
                "label": point.label,
                "setting": asdict(point.setting),
            }
            if error is not None:
                record["error"] = error
            if turns:
                record |= summarised({name: [turn[name] for turn in turns] for name in FIGURES}) | {
                    "photos": self.workload.photos(point.setting).to_json(),
                    "host_bytes_per_sample": turns[0]["host_bytes_per_sample"],
                    "copied_bytes_per_sample": turns[0]["copied_bytes_per_sample"],
                    "utilisation": turns[-1]["utilisation"],
                    "repeats": list(turns),
                }
            records.append(record)
        return {"records": records, "left_out": left_out}

    @staticmethod
    def table(report: Any) -> str:
        """Return the scenario's name, and its table or its check's result."""
        return f"{report['scenario']}\n{format_scenario(report)}\n"


_OPTIONS = ("num_threads", "batch_size", "hw_decoder_load", "device", "seconds", "repeats")


@dataclass(frozen=True, kw_only=True)
class GpuCheck(GpuScenario):
    """A check before anything is timed."""

    title = "check"
    repeats: int = 1

    def subjects(self, made: Session) -> Sequence[Any]:
        """Return the check itself."""
        return [self.name]

    def measure(self, made: Session, subject: Any, number: int) -> dict[str, Any]:
        """Run the check."""
        if self.name == "parity":
            return measure_parity(self.workload, device=self.device)
        return check_path(self.workload, device=self.device, num_threads=self.num_threads, batch_size=self.batch_size)

    def found(self, rounds: Rounds[Any, dict[str, Any]]) -> dict[str, Any]:
        """Return the check's result, or ``error``."""
        found = rounds.rows[self.name][0] if rounds.rows[self.name] else {}
        error = {"error": rounds.errors[self.name]} if self.name in rounds.errors else {}
        return {"check": {"device": self.device, **found, **error}}


def gpu_scenario(name: str, workload: Workload, **settings: Any) -> GpuScenario:
    """Make one of `SCENARIOS`; ``settings`` are fields of `GpuScenario`. A check has one round and no deadline.

    Raises:
        ValueError: If the name is unknown, or a setting is out of range.
    """
    if name not in SCENARIOS:
        raise ValueError(f"scenarios must be of {', '.join(SCENARIOS)}, got '{name}'")
    if name in CHECKS:
        return GpuCheck(name=name, workload=workload, **{**settings, "repeats": 1, "deadline": None})
    return GpuScenario(name=name, workload=workload, **settings)


def _copied(step: Callable[[], int], setting: GpuSetting) -> tuple[dict[str, float] | None, str | None]:
    """Count the bytes of a sample that are copied to the GPU, by the kind of host memory; or say why that failed."""
    if setting.device == "cpu":
        return None, "no GPU is used"
    drawn: list[int] = []
    try:
        found = measure_copies(lambda: drawn.extend(step() for _ in range(NUM_PROFILED)))
    except Exception as exc:  # noqa: BLE001 (the measured times must not be lost)
        return None, f"{type(exc).__name__}: {exc}"[:MAX_ERROR_CHARS]
    if found is None:
        return None, "CUPTI reported no copy"
    # Includes copies for later batches; about as many copies for these batches were made before.
    return {place: num_bytes / sum(drawn) for place, num_bytes in found.items()}, None


def _describe_gpu(session: Session, device: str) -> dict[str, Any] | None:
    if device == "cpu":
        return None
    found: dict[str, Any] = {
        "name": torch.cuda.get_device_name(),
        "nvml": session.no_nvml or "read",
        # Without this library the JPEG engines are not used, and there is no error.
        "video_library": has_video_library(),
    }
    if session.nvml is not None:
        with contextlib.suppress(OSError):
            found["driver"] = session.nvml.driver_version()
        found["jpeg_engines_nvml"] = session.nvml.num_jpeg_engines()
    try:
        found["jpeg_engines_nvjpeg"], found["cores_per_jpeg_engine"] = count_jpeg_engines()
    except (AttributeError, OSError) as exc:  # nvJPEG is too old or missing; the measured times must not be lost
        found["jpeg_engines_nvjpeg"], found["nvjpeg"] = None, str(exc)
    return found


def _synchronise(setting: GpuSetting) -> None:
    if setting.device == "gpu":
        torch.cuda.synchronize()
