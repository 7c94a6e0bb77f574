"""List the ways to decode that `bench gpu` times, each as a pipeline that runs batch after batch.

``decode`` and ``rn50`` are the two recipes of DALI's own ``hw_decoder_bench.py``, operator for operator, so that their
figures can be compared with those that DALI's authors publish. The others are ours: the segmentation graph in a real
loader, two pipelines against one, a window decoded against a whole photo, masks as PNG against LZ4 blocks. Each also
runs on the CPU, as far as DALI supports it there.
"""

import contextlib
import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from nvidia.dali import backend, fn, tensors, types
from nvidia.dali.pipeline import Pipeline
from PIL import Image

import dali_pipes as dp
from bench.gpu.workload import GpuSetting, Workload
from dali_pipes.errors import PipesError
from dali_pipes.reader.webdataset import WebdatasetSegment

# Values of the recipe; mean and deviation are torchvision's.
_MEAN, _STD = [0.485 * 255, 0.456 * 255, 0.406 * 255], [0.229 * 255, 0.224 * 255, 0.225 * 255]
_SIDE = 224
# A window of half the height and width, anywhere: a quarter of the pixels.
_WINDOW = 0.5


class Running(NamedTuple):
    """An open case."""

    step: Callable[[], int]
    """Draws a batch and returns the number of its samples."""
    host_bytes: float | None
    """The smallest number of bytes of a sample that must cross to the device, computed; ``None``: it is not known."""


Define = Callable[[Workload, GpuSetting, ExitStack], tuple[Any, float]]
"""Defines a pipeline: returns its outputs and `Running.host_bytes`. The stack closes what its inputs need."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to decode."""

    scenario: str
    variant: str
    open: Callable[[Workload, GpuSetting], AbstractContextManager[Running]]
    needs_gpu: bool = False
    """Whether the case has no counterpart on the CPU."""
    needs_masks: bool = False


def pipeline_of(setting: GpuSetting) -> Pipeline:
    device_id = torch.cuda.current_device() if setting.device == "gpu" else None
    return Pipeline(batch_size=setting.batch_size, num_threads=setting.num_threads, device_id=device_id, seed=0)


def _pipeline(define: Define) -> Callable[[Workload, GpuSetting], AbstractContextManager[Running]]:
    @contextlib.contextmanager
    def open_case(workload: Workload, setting: GpuSetting) -> Iterator[Running]:
        with ExitStack() as stack:
            pipeline = pipeline_of(setting)
            with pipeline:
                outputs, host_bytes = define(workload, setting, stack)
                pipeline.set_outputs(outputs)
            pipeline.build()
            # The only reference: threads and buffers must be gone before the next case is timed, even if `step` stays.
            held = [pipeline]
            del pipeline, outputs

            def step() -> int:
                held[0].run()
                return setting.batch_size

            try:
                yield Running(step, host_bytes)
            finally:
                held.clear()
                if setting.device == "gpu":
                    # DALI's pool would keep the memory of one point, perhaps half of the GPU's, from all later points.
                    backend.ReleaseUnusedMemory()

    return open_case


def _device(setting: GpuSetting) -> Literal["mixed", "cpu"]:
    return "mixed" if setting.device == "gpu" else "cpu"


def _decoding(setting: GpuSetting) -> dict[str, Any]:
    return {
        "device": _device(setting),
        "output_type": types.RGB,
        "hw_decoder_load": setting.hw_decoder_load,
        "preallocate_width_hint": setting.size_hint,
        "preallocate_height_hint": setting.size_hint,
    }


def _recipe(decode: Callable[[Any, GpuSetting], Any]) -> Define:
    def define(workload: Workload, setting: GpuSetting, stack: ExitStack) -> tuple[Any, float]:
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


@contextlib.contextmanager
def _loader(workload: Workload, setting: GpuSetting) -> Iterator[Running]:
    """Open the whole loader, with all shards staged; batches are delivered as tensors."""
    with workload.open_loader(
        dp.segmentation(photo=workload.photo, mask=workload.mask),
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
            return len(batch["label"])

        yield Running(step, None)


def _one_pipeline(workload: Workload, setting: GpuSetting, stack: ExitStack) -> tuple[Any, float]:
    path, index = workload.lines(setting)
    index_path = path.with_suffix(".idx")
    index_path.write_text(index)
    encoded = fn.readers.webdataset(paths=[str(path)], index_paths=[str(index_path)], ext=["c0"], dont_use_mmap=True)
    # For one component DALI returns a node or a list of one, depending on its version.
    encoded = encoded[0] if isinstance(encoded, list | tuple) else encoded
    return _decode(encoded, setting), workload.photos(setting).encoded_bytes


def _two_halves(kind: Literal["shared", "copied", "pinned"]) -> Define:
    """Read in one pipeline and decode in another, which gets shared, copied or page-locked (pinned) batches."""

    def define(workload: Workload, setting: GpuSetting, stack: ExitStack) -> tuple[Any, float]:
        path, index = workload.lines(setting)
        segment = WebdatasetSegment(str(path), index, num_components=1, batch_size=setting.batch_size)
        stack.callback(segment.close)
        source = _pinned_source(segment, setting) if kind == "pinned" else lambda: segment.read()[0]
        encoded = fn.external_source(source=source, batch=True, dtype=types.UINT8, ndim=1, no_copy=kind != "copied")
        return _decode(encoded, setting), workload.photos(setting).encoded_bytes

    return define


def _pinned_source(segment: WebdatasetSegment, setting: GpuSetting) -> Callable[[], list[Any]]:
    """Copy each batch into page-locked memory, in turns into more buffers than batches can be in flight.

    Without a GPU the memory is ordinary, which only exercises the code.
    """
    is_pinned = setting.device == "gpu"
    arenas: list[Any] = [torch.empty(0, dtype=torch.uint8)] * 8
    turns = itertools.cycle(range(len(arenas)))

    def source() -> list[Any]:
        encoded = segment.read()[0]
        samples = [np.asarray(encoded[number]) for number in range(setting.batch_size)]
        turn, needed = next(turns), sum(len(sample) for sample in samples)
        if len(arenas[turn]) < needed:
            arenas[turn] = torch.empty(2 * needed, dtype=torch.uint8, pin_memory=is_pinned)
        arena, at, given = arenas[turn].numpy(), 0, []
        for sample in samples:
            place = arena[at : at + len(sample)]
            place[:] = sample
            given.append(tensors.TensorCPU(place, is_pinned=is_pinned))
            at += len(sample)
        return given

    return source


def _png_masks(workload: Workload, setting: GpuSetting, stack: ExitStack) -> tuple[Any, float]:
    masks = workload.photos(setting).masks
    encoded = _fed([np.frombuffer(mask, np.uint8) for mask in masks], setting, ndim=1)
    decoded = fn.decoders.image(encoded, device=_device(setting), output_type=types.GRAY)
    # Also "mixed" decodes PNG on the CPU, so pixels cross.
    return decoded, _mean_size([_pixels(mask) for mask in masks])


def _raw_masks(workload: Workload, setting: GpuSetting, stack: ExitStack) -> tuple[Any, float]:
    pixels = [_pixels(mask) for mask in workload.photos(setting).masks]
    masks = _fed(pixels, setting, ndim=3, layout="HWC")
    return masks.gpu() if setting.device == "gpu" else masks, _mean_size(pixels)


def _lz4_masks(workload: Workload, setting: GpuSetting, stack: ExitStack) -> tuple[Any, float]:
    try:
        import lz4.block  # type: ignore[import-untyped]
    except ImportError as exc:
        raise PipesError("masks as LZ4 blocks need lz4; install: pip install 'dali-pipes[gpu-bench]'") from exc
    pixels = [_pixels(mask) for mask in workload.photos(setting).masks]
    blocks = [np.frombuffer(lz4.block.compress(mask.tobytes(), store_size=False), np.uint8) for mask in pixels]
    host_bytes = _mean_size(blocks)
    if setting.device == "gpu":
        # The two inputs give shapes and blocks in the same order.
        shape = _fed([np.array(mask.shape, np.int32) for mask in pixels], setting, ndim=1, dtype=types.INT32)
        return fn.decoders.inflate(_fed(blocks, setting, ndim=1).gpu(), shape=shape, layout="HWC"), host_bytes

    def inflate(number: int) -> Any:
        data = lz4.block.decompress(blocks[number].tobytes(), uncompressed_size=pixels[number].size)
        return np.frombuffer(data, np.uint8).reshape(pixels[number].shape)

    # DALI inflates on the GPU only. On the CPU the thread that iterates does it.
    return _fed(range(len(blocks)), setting, made=inflate, ndim=3, layout="HWC"), host_bytes


def _fed(
    values: Sequence[Any], setting: GpuSetting, *, made: Callable[[Any], Any] = lambda value: value, **options: Any
) -> Any:
    """Make an input that feeds ``made(value)`` for each value in turn, again and again."""
    turns = map(made, itertools.cycle(values))
    return fn.external_source(
        source=lambda: list(itertools.islice(turns, setting.batch_size)),
        batch=True,
        **{"dtype": types.UINT8, **options},
    )


def _mean_size(arrays: Sequence[Any]) -> float:
    return float(np.mean([array.size for array in arrays]))


def _pixels(mask: bytes) -> Any:
    with Image.open(io.BytesIO(mask)) as image:
        return np.ascontiguousarray(np.asarray(image.convert("L"))[:, :, None])


CASES: tuple[Case, ...] = (
    Case(scenario="rn50", variant="rn50", open=_pipeline(_recipe(_rn50))),
    Case(scenario="decode", variant="decode", open=_pipeline(_recipe(_decode))),
    Case(scenario="segmentation", variant="loader", open=_loader, needs_masks=True),
    Case(scenario="halves", variant="one pipeline", open=_pipeline(_one_pipeline)),
    Case(scenario="halves", variant="two, shared", open=_pipeline(_two_halves("shared"))),
    Case(scenario="halves", variant="two, copied", open=_pipeline(_two_halves("copied"))),
    Case(scenario="halves", variant="two, pinned", open=_pipeline(_two_halves("pinned")), needs_gpu=True),
    Case(scenario="roi", variant="whole, then window", open=_pipeline(_recipe(_whole_then_window))),
    Case(scenario="roi", variant="window only", open=_pipeline(_recipe(_window_only))),
    Case(scenario="masks", variant="png", open=_pipeline(_png_masks), needs_masks=True),
    Case(scenario="masks", variant="lz4", open=_pipeline(_lz4_masks), needs_masks=True),
    Case(scenario="masks", variant="raw", open=_pipeline(_raw_masks), needs_masks=True),
)
"""All cases, in the order of the tables."""
