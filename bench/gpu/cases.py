"""List the ways to decode that `bench gpu` times, each as a pipeline that runs batch after batch.

``decode`` and ``rn50`` are the two recipes of DALI's own ``hw_decoder_bench.py``, operator for operator, so that their
figures can be compared with those that its authors publish. The others are this project's: the segmentation graph in a
real loader, two pipelines against one, a window decoded against a whole photo, masks as PNG against LZ4 blocks. Each
runs on the CPU too, as far as DALI supports it there.
"""

import contextlib
import io
import itertools
from collections.abc import Callable, Iterator
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
from dali_pipes.reader.segments import Segment

# Of the recipe; torchvision's constants.
_MEAN, _STD = [0.485 * 255, 0.456 * 255, 0.406 * 255], [0.229 * 255, 0.224 * 255, 0.225 * 255]
_SIDE = 224
# A window of half the height and width, anywhere: a quarter of the pixels.
_WINDOW = 0.5


class Running(NamedTuple):
    """An open case."""

    step: Callable[[], int]
    """Draws a batch and returns the number of its samples."""
    host_bytes: float | None
    """Computed bytes of a sample that must cross to the device at least; ``None`` if that depends on the decoder."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to decode."""

    scenario: str
    variant: str
    open: Callable[[Workload, GpuSetting], "contextlib.AbstractContextManager[Running]"]
    needs_gpu: bool = False
    """Whether the CPU has no counterpart."""
    needs_masks: bool = False


def _device(setting: GpuSetting) -> Literal["mixed", "cpu"]:
    return "mixed" if setting.device == "gpu" else "cpu"


def pipeline_of(setting: GpuSetting) -> Pipeline:
    device_id = torch.cuda.current_device() if setting.device == "gpu" else None
    return Pipeline(batch_size=setting.batch_size, num_threads=setting.num_threads, device_id=device_id, seed=0)


def _decoding(setting: GpuSetting) -> dict[str, Any]:
    return {
        "device": _device(setting),
        "output_type": types.RGB,
        "hw_decoder_load": setting.hw_decoder_load,
        "preallocate_width_hint": setting.size_hint,
        "preallocate_height_hint": setting.size_hint,
    }


@contextlib.contextmanager
def _running(pipeline: Pipeline, setting: GpuSetting, host_bytes: float | None) -> Iterator[Running]:
    pipeline.build()
    # The only reference: its threads and buffers must be gone before the next one is timed, even if `step` is kept.
    held = [pipeline]
    del pipeline

    def step() -> int:
        held[0].run()
        return setting.batch_size

    try:
        yield Running(step, host_bytes)
    finally:
        held.clear()
        if setting.device == "gpu":
            # DALI's pool would keep the memory of one point, which may be half of the GPU's, from all later points.
            backend.ReleaseUnusedMemory()


def _recipe(define: Callable[[Any, GpuSetting], Any]) -> Callable[[Workload, GpuSetting], Any]:
    """One pipeline over files, as in the recipes. A hybrid decoder sends more to the device than the bytes it read."""

    def open_case(workload: Workload, setting: GpuSetting) -> Any:
        pipeline = pipeline_of(setting)
        with pipeline:
            encoded, _ = fn.readers.file(file_root=str(workload.files(setting)))
            pipeline.set_outputs(define(encoded, setting))
        return _running(pipeline, setting, workload.photos(setting).encoded_bytes)

    return open_case


def _decode(encoded: Any, setting: GpuSetting) -> Any:
    return fn.decoders.image(encoded, **_decoding(setting))


def _rn50(encoded: Any, setting: GpuSetting) -> Any:
    pixels = fn.decoders.image_random_crop(encoded, **_decoding(setting))
    return _finished(fn.resize(pixels, resize_x=_SIDE, resize_y=_SIDE))


def _finished(pixels: Any) -> Any:
    return fn.crop_mirror_normalize(
        pixels,
        dtype=types.FLOAT16,
        output_layout="CHW",
        crop=(_SIDE, _SIDE),
        mean=_MEAN,
        std=_STD,
        mirror=fn.random.coin_flip(probability=0.5),
    )


def _window(seed: int = 7) -> dict[str, Any]:
    start = fn.random.uniform(range=[0.0, 1.0 - _WINDOW], shape=[2], seed=seed)
    return {"rel_start": start, "rel_shape": [_WINDOW, _WINDOW], "axes": (0, 1)}


def _whole_then_window(encoded: Any, setting: GpuSetting) -> Any:
    pixels = fn.slice(fn.decoders.image(encoded, **_decoding(setting)), **_window())
    return fn.resize(pixels, resize_x=_SIDE, resize_y=_SIDE)


def _window_only(encoded: Any, setting: GpuSetting) -> Any:
    pixels = fn.decoders.image_slice(encoded, **_window(), **_decoding(setting))
    return fn.resize(pixels, resize_x=_SIDE, resize_y=_SIDE)


@contextlib.contextmanager
def _loader(workload: Workload, setting: GpuSetting) -> Iterator[Running]:
    """The whole loader, with all shards staged; batches are delivered as tensors."""
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


@contextlib.contextmanager
def _one_pipeline(workload: Workload, setting: GpuSetting) -> Iterator[Running]:
    path, index = workload.lines(setting)
    index_path = path.with_suffix(".idx")
    index_path.write_text(index)
    pipeline = pipeline_of(setting)
    with pipeline:
        encoded = fn.readers.webdataset(
            paths=[str(path)], index_paths=[str(index_path)], ext=["c0"], dont_use_mmap=True
        )
        # For one component DALI returns a node or a list of one, depending on its version.
        encoded = encoded[0] if isinstance(encoded, list | tuple) else encoded
        pipeline.set_outputs(_decode(encoded, setting))
    with _running(pipeline, setting, workload.photos(setting).encoded_bytes) as running:
        yield running


def _two_halves(kind: Literal["shared", "copied", "pinned"]) -> Callable[[Workload, GpuSetting], Any]:
    """A reader pipeline that passes TensorLists on: shared, as in the loader; copied by DALI; or in pinned memory."""

    @contextlib.contextmanager
    def open_case(workload: Workload, setting: GpuSetting) -> Iterator[Running]:
        path, index = workload.lines(setting)
        with contextlib.ExitStack() as stack:
            segment = stack.enter_context(
                contextlib.closing(Segment(str(path), index, num_components=1, batch_size=setting.batch_size))
            )
            source = _pinned_source(segment, setting) if kind == "pinned" else lambda: segment.read()[0]
            pipeline = pipeline_of(setting)
            with pipeline:
                encoded = fn.external_source(
                    source=source, batch=True, dtype=types.UINT8, ndim=1, no_copy=kind != "copied"
                )
                pipeline.set_outputs(_decode(encoded, setting))
            yield stack.enter_context(_running(pipeline, setting, workload.photos(setting).encoded_bytes))

    return open_case


def _pinned_source(segment: Segment, setting: GpuSetting) -> Callable[[], list[Any]]:
    """Copy each batch into page-locked memory, in turns into more buffers than batches can be in flight.

    On the CPU, where no memory can be locked, the memory is ordinary: this only exercises the code.
    """
    arenas: list[Any] = [None] * 8
    is_pinned = setting.device == "gpu"
    turns = itertools.cycle(range(len(arenas)))

    def source() -> list[Any]:
        encoded = segment.read()[0]
        samples = [np.asarray(encoded[number]) for number in range(setting.batch_size)]
        turn, needed = next(turns), sum(len(sample) for sample in samples)
        if arenas[turn] is None or len(arenas[turn]) < needed:
            arenas[turn] = torch.empty(2 * needed, dtype=torch.uint8, pin_memory=is_pinned)
        arena, at, given = arenas[turn].numpy(), 0, []
        for sample in samples:
            place = arena[at : at + len(sample)]
            place[:] = sample
            given.append(tensors.TensorCPU(place, is_pinned=is_pinned))
            at += len(sample)
        return given

    return source


@contextlib.contextmanager
def _fed(
    batches: Callable[[], Any], define: Callable[[Any], Any], setting: GpuSetting, host_bytes: float
) -> Iterator[Running]:
    pipeline = pipeline_of(setting)
    with pipeline:
        pipeline.set_outputs(define(batches))
    with _running(pipeline, setting, host_bytes) as running:
        yield running


def _png_masks(workload: Workload, setting: GpuSetting) -> Any:
    masks = workload.photos(setting).masks
    files = [np.frombuffer(mask, np.uint8) for mask in masks]
    # PNG is decoded on the CPU, also by "mixed", so pixels cross.
    host_bytes = sum(_pixels(mask).size for mask in masks) / len(masks)

    def define(batches: Callable[[], Any]) -> Any:
        encoded = fn.external_source(source=batches, batch=True, dtype=types.UINT8, ndim=1)
        return fn.decoders.image(encoded, device=_device(setting), output_type=types.GRAY)

    return _fed(_in_turns(files, setting), define, setting, host_bytes)


def _raw_masks(workload: Workload, setting: GpuSetting) -> Any:
    pixels = [_pixels(mask) for mask in workload.photos(setting).masks]

    def define(batches: Callable[[], Any]) -> Any:
        masks = fn.external_source(source=batches, batch=True, dtype=types.UINT8, ndim=3, layout="HWC")
        return masks.gpu() if setting.device == "gpu" else masks

    return _fed(_in_turns(pixels, setting), define, setting, sum(mask.size for mask in pixels) / len(pixels))


def _lz4_masks(workload: Workload, setting: GpuSetting) -> Any:
    try:
        import lz4.block  # type: ignore[import-untyped]
    except ImportError as exc:
        raise PipesError("masks as LZ4 blocks need lz4; install: pip install 'dali-pipes[gpu-bench]'") from exc
    pixels = [_pixels(mask) for mask in workload.photos(setting).masks]
    blocks = [np.frombuffer(lz4.block.compress(mask.tobytes(), store_size=False), np.uint8) for mask in pixels]
    shapes = [np.array(mask.shape, np.int32) for mask in pixels]
    host_bytes = sum(len(block) for block in blocks) / len(blocks)
    if setting.device == "cpu":
        # DALI inflates on the GPU only. On the CPU the thread that iterates does it.
        numbers = itertools.cycle(range(len(blocks)))

        def inflate() -> Any:
            at = next(numbers)
            data = lz4.block.decompress(blocks[at].tobytes(), uncompressed_size=pixels[at].size)
            return np.frombuffer(data, np.uint8).reshape(pixels[at].shape)

        def define_inflated(batches: Callable[[], Any]) -> Any:
            return fn.external_source(source=batches, batch=True, dtype=types.UINT8, ndim=3, layout="HWC")

        return _fed(lambda: [inflate() for _ in range(setting.batch_size)], define_inflated, setting, host_bytes)

    def define(batches: Callable[[], Any]) -> Any:
        encoded = fn.external_source(source=batches, batch=True, dtype=types.UINT8, ndim=1)
        # Shapes come in the same order as blocks.
        shape = fn.external_source(source=_in_turns(shapes, setting), batch=True, dtype=types.INT32, ndim=1)
        return fn.decoders.inflate(encoded.gpu(), shape=shape, layout="HWC")

    return _fed(_in_turns(blocks, setting), define, setting, host_bytes)


def _in_turns(values: list[Any], setting: GpuSetting) -> Callable[[], list[Any]]:
    turns = itertools.cycle(values)
    return lambda: [next(turns) for _ in range(setting.batch_size)]


def _pixels(mask: bytes) -> Any:
    with Image.open(io.BytesIO(mask)) as image:
        return np.ascontiguousarray(np.asarray(image.convert("L"))[:, :, None])


CASES: tuple[Case, ...] = (
    Case(scenario="rn50", variant="rn50", open=_recipe(_rn50)),
    Case(scenario="decode", variant="decode", open=_recipe(_decode)),
    Case(scenario="segmentation", variant="loader", open=_loader, needs_masks=True),
    Case(scenario="halves", variant="one pipeline", open=_one_pipeline),
    Case(scenario="halves", variant="two, shared", open=_two_halves("shared")),
    Case(scenario="halves", variant="two, copied", open=_two_halves("copied")),
    Case(scenario="halves", variant="two, pinned", open=_two_halves("pinned"), needs_gpu=True),
    Case(scenario="roi", variant="whole, then window", open=_recipe(_whole_then_window)),
    Case(scenario="roi", variant="window only", open=_recipe(_window_only)),
    Case(scenario="masks", variant="png", open=_png_masks, needs_masks=True),
    Case(scenario="masks", variant="lz4", open=_lz4_masks, needs_masks=True),
    Case(scenario="masks", variant="raw", open=_raw_masks, needs_masks=True),
)
"""In the order of the tables."""
