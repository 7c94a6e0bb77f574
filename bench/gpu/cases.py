"""List the ways to decode that `bench gpu` times, each as a pipeline that runs batch after batch.

``decode`` and ``rn50`` hold the two recipes of DALI's own ``hw_decoder_bench.py``, operator for operator, so that their
figures can be compared with those that DALI's authors publish. The others are ours: loaders with our graphs, masks
decoded on the CPU or beside the photos, masks as PNG against LZ4 blocks, a window decoded against a whole photo, two
pipelines against one, a loader beside a training step. Each also runs on the CPU, as far as DALI supports it there.

DALI's memory pools keep what a case has freed: memory is not released between points, so that no point pays for
allocating it again. The points of a scenario share a process, and scenarios do not.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline

import dali_pipes as dp
from bench.gpu.mask_cases import Define, lz4_masks, png_masks, raw_masks
from bench.gpu.workload import GpuSetting, Workload
from bench.tools.step import open_step
from dali_pipes.graph.definition import Graph
from dali_pipes.reader.aio_reader import open_reader
from dali_pipes.reader.buffers import Buffers, as_dali, pinned_buffers
from dali_pipes.reader.webdataset import index_text

# Values of the recipe; mean and deviation are torchvision's.
_MEAN, _STD = [0.485 * 255, 0.456 * 255, 0.406 * 255], [0.229 * 255, 0.224 * 255, 0.225 * 255]
_SIDE = 224
# A window of half the height and width, anywhere: a quarter of the pixels.
_WINDOW = 0.5
STEP_SAMPLES_PER_S = 7010
"""Photos a second of the emulated training step: what a ResNet-50 trains on one fast GPU."""


class Running(NamedTuple):
    """An open case."""

    step: Callable[[], int]
    """Draws a batch and returns the number of its samples."""
    host_bytes: float | None
    """The smallest number of bytes of a sample that must cross to the device, computed; ``None``: it is not known."""
    step_s: float = 0.0
    """Seconds of the emulated training step, for each sample."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to decode."""

    scenario: str
    variant: str
    open: Callable[[Workload, GpuSetting], AbstractContextManager[Running]]
    needs_gpu: bool = False
    """Whether the case has no counterpart on the CPU."""
    needs_masks: bool = False
    change: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Fields of `GpuSetting` that this case fixes."""


def pipeline_of(setting: GpuSetting) -> Pipeline:
    device_id = torch.cuda.current_device() if setting.device == "gpu" else None
    return Pipeline(batch_size=setting.batch_size, num_threads=setting.num_threads, device_id=device_id, seed=0)


def _pipeline(define: Define) -> Callable[[Workload, GpuSetting], AbstractContextManager[Running]]:
    @contextlib.contextmanager
    def open_case(workload: Workload, setting: GpuSetting) -> Iterator[Running]:
        pipeline = pipeline_of(setting)
        with pipeline:
            outputs, host_bytes = define(workload, setting)
            pipeline.set_outputs(outputs)
        pipeline.build()

        def step() -> int:
            pipeline.run()
            return setting.batch_size

        yield Running(step, host_bytes)

    return open_case


def _decoding(setting: GpuSetting) -> dict[str, Any]:
    return {
        "device": setting.decoder_device,
        "output_type": types.RGB,
        "hw_decoder_load": setting.hw_decoder_load,
        "preallocate_width_hint": setting.size_hint,
        "preallocate_height_hint": setting.size_hint,
    }


def _recipe(decode: Callable[[Any, GpuSetting], Any]) -> Define:
    def define(workload: Workload, setting: GpuSetting) -> tuple[Any, float]:
        encoded, _ = fn.readers.file(file_root=str(workload.files(setting)))
        # The minimum: a hybrid decoder sends more to the device than the bytes that it read.
        return decode(encoded, setting), workload.photos(setting).encoded_bytes

    return define


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
    """Open the whole loader, with all shards staged; it delivers tensors to a step of ``step_s`` for each sample."""

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

            yield Running(step, None, step_s)

    return open_case


def _rn50_graph(workload: Workload) -> Graph:
    """The recipe as our graph: a random crop of 224, float16, NCHW."""
    return dp.classification_train(crop=_SIDE, dtype="float16", photo=workload.photo)


def _segmentation_graph(mask_device: Literal["cpu", "mixed"]) -> Callable[[Workload], Graph]:
    return lambda workload: dp.segmentation(photo=workload.photo, mask=workload.mask, mask_device=mask_device)


def _lines_reader(workload: Workload, setting: GpuSetting) -> Any:
    """Define DALI's own reader of the lines of an index, in order."""
    path, lines = workload.lines(setting)
    index_path = path.with_suffix(".idx")
    index_path.write_text(index_text(*lines))
    encoded = fn.readers.webdataset(paths=[str(path)], index_paths=[str(index_path)], ext=["c0"], dont_use_mmap=True)
    # For one component DALI returns a node or a list of one, depending on its version.
    return encoded[0] if isinstance(encoded, list | tuple) else encoded


def _one_pipeline(workload: Workload, setting: GpuSetting) -> tuple[Any, float]:
    return _decode(_lines_reader(workload, setting), setting), workload.photos(setting).encoded_bytes


def _two_halves(*, is_shared: bool) -> Define:
    """Read in one pipeline and decode in another, which gets shared or copied batches."""

    def define(workload: Workload, setting: GpuSetting) -> tuple[Any, float]:
        # As many threads as the one pipeline has, whose reader uses them, too. Without exec_dynamic the next run would
        # overwrite the batches that were handed on.
        reading = Pipeline(
            batch_size=setting.batch_size, num_threads=setting.num_threads, device_id=None, exec_dynamic=True
        )
        with reading:
            reading.set_outputs(_lines_reader(workload, setting))
        reading.build()
        return _decode_fed(lambda: reading.run()[0], workload, setting, is_shared=is_shared)

    return define


def _own_reader(*, is_pinned: bool) -> Define:
    """Read with our loader's reader: one system call a batch, into memory that is used again, page-locked or not."""

    def define(workload: Workload, setting: GpuSetting) -> tuple[Any, float]:
        path, lines = workload.lines(setting)
        # The GPU may still read a batch that DALI has let go: more are held than can be in flight.
        held: deque[Any] = deque(maxlen=8)

        def read() -> Iterator[Any]:
            pins = is_pinned and setting.device == "gpu"
            buffers = pinned_buffers(torch.cuda.current_device()) if pins else Buffers()
            reader = open_reader(str(path), kind="aio", buffers=buffers)
            with contextlib.closing(reader):
                while True:
                    with contextlib.closing(reader.open(lines, batch_size=setting.batch_size)) as segment:
                        for _ in range(len(lines.ordinals) // setting.batch_size):
                            held.append(segment.read()[0])
                            yield as_dali(held[-1])

        batches = read()
        return _decode_fed(lambda: next(batches), workload, setting, is_shared=True)

    return define


def _decode_fed(
    source: Callable[[], Any], workload: Workload, setting: GpuSetting, *, is_shared: bool
) -> tuple[Any, float]:
    encoded = fn.external_source(source=source, batch=True, dtype=types.UINT8, ndim=1, no_copy=is_shared)
    return _decode(encoded, setting), workload.photos(setting).encoded_bytes


_ENGINES_ONLY = {"hw_decoder_load": 1.0}

CASES: tuple[Case, ...] = (
    Case(scenario="rn50", variant="DALI's file reader", open=_pipeline(_recipe(_rn50))),
    Case(scenario="rn50", variant="loader", open=_loader(_rn50_graph)),
    Case(scenario="masks", variant="loader, masks cpu", open=_loader(_segmentation_graph("cpu")), needs_masks=True),
    Case(scenario="masks", variant="loader, masks mixed", open=_loader(_segmentation_graph("mixed")), needs_masks=True),
    Case(scenario="masks", variant="png cpu", open=_pipeline(png_masks("cpu")), needs_masks=True),
    Case(scenario="masks", variant="png mixed", open=_pipeline(png_masks("mixed")), needs_masks=True, needs_gpu=True),
    Case(scenario="masks", variant="lz4", open=_pipeline(lz4_masks), needs_masks=True),
    Case(scenario="masks", variant="raw", open=_pipeline(raw_masks), needs_masks=True),
    Case(scenario="decode", variant="decode", open=_pipeline(_recipe(_decode))),
    Case(scenario="roi", variant="whole, then window", open=_pipeline(_recipe(_whole_then_window))),
    Case(scenario="roi", variant="window only", open=_pipeline(_recipe(_window_only))),
    Case(
        scenario="roi",
        variant="whole, then window, all on engines",
        open=_pipeline(_recipe(_whole_then_window)),
        needs_gpu=True,
        change=_ENGINES_ONLY,
    ),
    Case(
        scenario="roi",
        variant="window only, all on engines",
        open=_pipeline(_recipe(_window_only)),
        needs_gpu=True,
        change=_ENGINES_ONLY,
    ),
    Case(scenario="halves", variant="one pipeline", open=_pipeline(_one_pipeline)),
    Case(scenario="halves", variant="two, shared", open=_pipeline(_two_halves(is_shared=True))),
    Case(scenario="halves", variant="two, copied", open=_pipeline(_two_halves(is_shared=False))),
    Case(scenario="halves", variant="two, our reader", open=_pipeline(_own_reader(is_pinned=False))),
    Case(
        scenario="halves",
        variant="two, our reader, pinned",
        open=_pipeline(_own_reader(is_pinned=True)),
        needs_gpu=True,
    ),
    Case(scenario="step", variant="loader", open=_loader(_rn50_graph, step_s=1 / STEP_SAMPLES_PER_S)),
)
"""All cases: scenarios in the order of their worth, and cases in the order of the tables."""
