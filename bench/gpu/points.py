"""List the points of each scenario of `bench gpu`: a case at a setting, one setting changed at a time."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bench.gpu.cases import CASES, Case
from bench.gpu.workload import GpuSetting
from bench.tools.environment import available_cores

CHECKS = ("path", "parity")
SCENARIOS = tuple(dict.fromkeys(case.scenario for case in CASES))
"""The scenarios in the order of their worth: first the checks, without which figures mean nothing."""

HW_DECODER_LOADS = (0.0, 0.12, 0.25, 0.5, 0.65, 0.8, 1.0)
BATCH_SIZES = (64, 128, 256, 512)
PHOTO_SIDES = (256, 512, 1024, 2048)
PROGRESSIVE_SHARES = (0.0, 0.25, 0.5, 1.0)
SWEPT = {
    "rn50": ("batch_size", "num_threads"),
    "masks": ("num_threads",),
    "decode": ("hw_decoder_load", "progressive_share", "photo_side", "size_hint", "batch_size", "num_threads"),
    "roi": ("photo_side",),
    "step": ("batch_size", "hw_decoder_load"),
}
"""The settings that are swept in each scenario: all settings in all scenarios would take hours."""

PUBLISHED = {"batch_size": 408, "num_threads": 70, "hw_decoder_load": 0.12, "size_hint": 6000}
"""The settings with which DALI's own test (qa/TL1_decoder_perf) runs its benchmark on x86 Hopper machines."""
PUBLISHED_NOTE = (
    f"As published: DALI's own test (NVIDIA/DALI, qa/TL1_decoder_perf/test.sh, with {PUBLISHED}) expects 19,000 photos "
    "a second of its own photos on x86 Hopper, 29,000 on Grace Hopper. Only the order of magnitude can be compared."
)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A case at a setting."""

    case: Case
    setting: GpuSetting
    label: str
    """The change from the base setting: ``base``, ``hw_decoder_load=0.12``, ``as published, 16 threads``."""

    @property
    def name(self) -> str:
        """``decode, batch_size=64``."""
        return f"{self.case.variant}, {self.label}"


def default_sweeps(device: str) -> dict[str, tuple[Any, ...]]:
    """Return the values of each setting that is swept. The CPU has no JPEG engines to set."""
    cores = available_cores()
    return {
        **({"hw_decoder_load": HW_DECODER_LOADS, "size_hint": (1024,)} if device == "gpu" else {}),
        "num_threads": tuple(sorted({max(1, cores // 4), max(1, cores // 2), cores})),
        "batch_size": BATCH_SIZES,
        "photo_side": PHOTO_SIDES,
        "progressive_share": PROGRESSIVE_SHARES,
    }


def points_of(
    scenario: str, base: GpuSetting, sweeps: Mapping[str, tuple[Any, ...]], *, has_masks: bool = True
) -> list[Point]:
    """Return all cases of a scenario at the base setting, then with one setting changed at a time.

    The most important points come first, and those that are compared stand together: the time may end before the last.
    Checks that need masks are left out of data without.
    """
    changes: dict[str, dict[str, Any]] = {"base": {}}
    if scenario == "rn50" and base.device == "gpu":
        threads = min(int(PUBLISHED["num_threads"]), available_cores())
        label = "as published" if threads == PUBLISHED["num_threads"] else f"as published, {threads} threads"
        changes = {label: {**PUBLISHED, "num_threads": threads}, **changes}
    for name in SWEPT.get(scenario, ()):
        changes |= {f"{name}={value}": {name: value} for value in sweeps.get(name, ()) if value != getattr(base, name)}
    return [
        Point(case=case, setting=replace(base, **{**change, **case.change}), label=label)
        for label, change in changes.items()
        for case in CASES
        if case.scenario == scenario
        and not (case.needs_gpu and base.device == "cpu")
        and not (case.needs_cpu and base.device == "gpu")
        and (has_masks or not (case.check and case.needs_masks))
        # A setting that the case fixes is not swept.
        and not set(change) & set(case.change)
    ]
