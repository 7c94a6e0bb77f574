"""List the ways to decode that `bench gpu` times, and the settings of each: its points.

A case is a pipeline that runs batch after batch; a point is a case at a setting, one setting changed at a time.
``decode`` and ``rn50`` hold the two recipes of DALI's own ``hw_decoder_bench.py``, operator for operator, so that their
figures can be compared with those that DALI's authors publish. Each case also runs on the CPU, as far as DALI supports
it there. ``path`` and ``parity`` are checks (`bench.gpu.checks`). DALI's memory pools keep what a case has freed, so
that no point pays for allocating it again; the points of a scenario share a process, and scenarios do not.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline

import dali_pipes as dp
from bench.gpu.checks import CPU_WAYS, MASK_GRAPHS, PATH_GRAPHS, WAYS, check_decoders, check_graph, check_parity
from bench.gpu.workload import GpuSetting, Workload
from bench.tools.environment import available_cores
from bench.tools.step import open_step
from dali_pipes.graph.definition import Graph

# Values of the recipe; mean and deviation are torchvision's.
_MEAN, _STD = [0.485 * 255, 0.456 * 255, 0.406 * 255], [0.229 * 255, 0.224 * 255, 0.225 * 255]
_SIDE = 224
# A window of half the height and width, anywhere: a quarter of the pixels.
_WINDOW = 0.5
STEP_SAMPLES_PER_S = 7010
"""Photos a second of the emulated training step: what a ResNet-50 trains on one fast GPU."""


class Running(NamedTuple):
    step: Callable[[], int]
    """Draws a batch and returns the number of its samples."""
    step_s: float = 0.0


@dataclass(frozen=True)
class Case:
    scenario: str
    variant: str
    _: KW_ONLY
    open: Callable[[Workload, GpuSetting], AbstractContextManager[Running]] | None = None
    """``None``: the case is a check."""
    check: Callable[[Workload, GpuSetting], dict[str, Any]] | None = None
    runs_on: tuple[str, ...] = ("gpu", "cpu")
    needs_masks: bool = False
    change: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Fields of `GpuSetting` that this case fixes."""


def pipeline_of(setting: GpuSetting) -> Pipeline:
    device_id = torch.cuda.current_device() if setting.device == "gpu" else None
    return Pipeline(batch_size=setting.batch_size, num_threads=setting.num_threads, device_id=device_id, seed=0)


def _pipeline(
    decode: Callable[[Any, GpuSetting], Any],
) -> Callable[[Workload, GpuSetting], AbstractContextManager[Running]]:
    """Open a pipeline of DALI's reader of local files and ``decode``."""

    @contextlib.contextmanager
    def open_case(workload: Workload, setting: GpuSetting) -> Iterator[Running]:
        pipeline = pipeline_of(setting)
        with pipeline:
            encoded, _ = fn.readers.file(file_root=str(workload.files(setting)))
            pipeline.set_outputs(decode(encoded, setting))
        pipeline.build()

        def step() -> int:
            pipeline.run()
            return setting.batch_size

        yield Running(step)

    return open_case


def _decoding(setting: GpuSetting) -> dict[str, Any]:
    return {
        "device": setting.decoder_device,
        "output_type": types.RGB,
        "hw_decoder_load": setting.hw_decoder_load,
        "preallocate_width_hint": setting.size_hint,
        "preallocate_height_hint": setting.size_hint,
    }


def _decode(encoded: Any, setting: GpuSetting) -> Any:
    return fn.decoders.image(encoded, **_decoding(setting))


def _rn50(encoded: Any, setting: GpuSetting) -> Any:
    pixels = fn.decoders.image_random_crop(encoded, **_decoding(setting))
    return fn.crop_mirror_normalize(
        fn.resize(pixels, resize_x=_SIDE, resize_y=_SIDE),
        dtype=types.FLOAT16,
        output_layout="CHW",
        crop=(_SIDE, _SIDE),
        mean=_MEAN,
        std=_STD,
        mirror=fn.random.coin_flip(probability=0.5),
    )


def _window() -> dict[str, Any]:
    start = fn.random.uniform(range=[0.0, 1.0 - _WINDOW], shape=[2], seed=7)
    return {"rel_start": start, "rel_shape": [_WINDOW, _WINDOW], "axes": (0, 1)}


def _whole_then_window(encoded: Any, setting: GpuSetting) -> Any:
    pixels = fn.slice(fn.decoders.image(encoded, **_decoding(setting)), **_window())
    return fn.resize(pixels, resize_x=_SIDE, resize_y=_SIDE)


def _window_only(encoded: Any, setting: GpuSetting) -> Any:
    pixels = fn.decoders.image_slice(encoded, **_window(), **_decoding(setting))
    return fn.resize(pixels, resize_x=_SIDE, resize_y=_SIDE)


def _loader(
    make_graph: Callable[[Workload], Graph], *, step_s: float = 0.0
) -> Callable[[Workload, GpuSetting], AbstractContextManager[Running]]:
    @contextlib.contextmanager
    def open_case(workload: Workload, setting: GpuSetting) -> Iterator[Running]:
        device = "cuda" if setting.device == "gpu" else "cpu"
        train = open_step(step_s * setting.batch_size, device=device)
        with workload.open_loader(
            make_graph(workload),
            device=setting.device,
            batch_size=setting.batch_size,
            decode=dp.Decode(threads=setting.num_threads, engine_share=setting.hw_decoder_load),
        ) as loader:
            for _ in loader:  # stages all shards
                pass

            def step() -> int:
                try:
                    (batch,) = next(loader)
                except StopIteration:
                    (batch,) = next(iter(loader))
                num_samples = len(batch["label"])
                train(num_samples / setting.batch_size)
                return num_samples

            yield Running(step, step_s)

    return open_case


def _rn50_graph(workload: Workload) -> Graph:
    """The recipe as our graph: a random crop of 224, float16, NCHW."""
    return dp.classification_train(crop=_SIDE, dtype="float16", photo=workload.photo)


def _segmentation_graph(mask_device: Literal["cpu", "mixed"]) -> Callable[[Workload], Graph]:
    return lambda workload: dp.segmentation(photo=workload.photo, mask=workload.mask, mask_device=mask_device)


_ENGINES_ONLY = {"hw_decoder_load": 1.0}

CASES: tuple[Case, ...] = (
    *(Case("path", name, check=partial(check_graph, name=name)) for name in PATH_GRAPHS),
    *(Case("path", name, check=partial(check_graph, name=name), needs_masks=True) for name in MASK_GRAPHS),
    *(Case("parity", name, check=partial(check_decoders, ways=ways), runs_on=("gpu",)) for name, ways in WAYS.items()),
    Case("parity", "cpu, fast idct", check=partial(check_decoders, ways=CPU_WAYS), runs_on=("cpu",)),
    Case("parity", "graph classification", check=partial(check_parity, name="classification_eval")),
    Case("parity", "graph segmentation", check=partial(check_parity, name="segmentation"), needs_masks=True),
    Case("rn50", "DALI's file reader", open=_pipeline(_rn50)),
    Case("rn50", "loader", open=_loader(_rn50_graph)),
    Case("masks", "loader, masks cpu", open=_loader(_segmentation_graph("cpu")), needs_masks=True),
    Case("masks", "loader, masks mixed", open=_loader(_segmentation_graph("mixed")), needs_masks=True),
    Case("decode", "decode", open=_pipeline(_decode)),
    Case("roi", "whole, then window", open=_pipeline(_whole_then_window)),
    Case("roi", "window only", open=_pipeline(_window_only)),
    *(
        Case("roi", f"{name}, all on engines", open=_pipeline(decode), runs_on=("gpu",), change=_ENGINES_ONLY)
        for name, decode in {"whole, then window": _whole_then_window, "window only": _window_only}.items()
    ),
    Case("step", "loader", open=_loader(_rn50_graph, step_s=1 / STEP_SAMPLES_PER_S)),
)


CHECKS = ("path", "parity")
SCENARIOS = tuple(dict.fromkeys(case.scenario for case in CASES))
"""The scenarios in the order of their worth: first the checks, without which figures mean nothing."""

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
class GpuPoint:
    case: Case
    setting: GpuSetting
    label: str
    """The change from the base setting: ``base``, ``hw_decoder_load=0.12``, ``as published, 16 threads``."""

    @property
    def name(self) -> str:
        return f"{self.case.variant}, {self.label}"


def default_sweeps(device: str) -> dict[str, tuple[Any, ...]]:
    """Return the values of each setting that is swept. The CPU has no JPEG engines to set."""
    cores = available_cores()
    engines = {"hw_decoder_load": (0.0, 0.12, 0.25, 0.5, 0.65, 0.8, 1.0), "size_hint": (1024,)}
    return {
        **(engines if device == "gpu" else {}),
        "num_threads": tuple(sorted({max(1, cores // 4), max(1, cores // 2), cores})),
        "batch_size": (64, 128, 256, 512),
        "photo_side": (256, 512, 1024, 2048),
        "progressive_share": (0.0, 0.25, 0.5, 1.0),
    }


def points_of(
    scenario: str, base: GpuSetting, sweeps: Mapping[str, tuple[Any, ...]], *, has_masks: bool = True
) -> list[GpuPoint]:
    """Return all cases of a scenario at the base setting, then with one setting changed at a time.

    The most important points come first, and those that are compared stand together: the time may end before the last.
    """
    changes: dict[str, dict[str, Any]] = {"base": {}}
    if scenario == "rn50" and base.device == "gpu":
        threads = min(int(PUBLISHED["num_threads"]), available_cores())
        label = "as published" if threads == PUBLISHED["num_threads"] else f"as published, {threads} threads"
        changes = {label: {**PUBLISHED, "num_threads": threads}, **changes}
    for name in SWEPT.get(scenario, ()):
        changes |= {f"{name}={value}": {name: value} for value in sweeps.get(name, ()) if value != getattr(base, name)}
    return [
        GpuPoint(case=case, setting=replace(base, **{**change, **case.change}), label=label)
        for label, change in changes.items()
        for case in CASES
        if case.scenario == scenario
        and base.device in case.runs_on
        and (has_masks or not (case.check and case.needs_masks))
        # A setting that the case fixes is not swept.
        and not set(change) & set(case.change)
    ]
