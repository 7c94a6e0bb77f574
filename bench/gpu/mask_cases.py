"""Define pipelines that decode masks alone: PNG on the CPU or by a mixed decoder, LZ4 blocks, raw pixels."""

import io
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from nvidia.dali import fn, types
from PIL import Image

from bench.gpu.workload import GpuSetting, Workload
from dali_pipes.errors import PipesError

Define = Callable[[Workload, GpuSetting], tuple[Any, float]]
"""Defines a pipeline: returns its outputs, and the smallest number of bytes of a sample that must cross to the
device."""


def png_masks(device: Literal["cpu", "mixed"]) -> Define:
    def define(workload: Workload, setting: GpuSetting) -> tuple[Any, float]:
        masks = workload.photos(setting).masks
        encoded = _fed([np.frombuffer(mask, np.uint8) for mask in masks], setting, ndim=1)
        where = setting.decoder_device if device == "mixed" else "cpu"
        decoded = fn.decoders.image(encoded, device=where, output_type=types.GRAY)
        # Also "mixed" decodes PNG on the CPU, so pixels cross.
        is_moved = setting.device == "gpu" and device == "cpu"
        return decoded.gpu() if is_moved else decoded, _mean_size([_pixels(mask) for mask in masks])

    return define


def raw_masks(workload: Workload, setting: GpuSetting) -> tuple[Any, float]:
    pixels = [_pixels(mask) for mask in workload.photos(setting).masks]
    masks = _fed(pixels, setting, ndim=3, layout="HWC")
    return masks.gpu() if setting.device == "gpu" else masks, _mean_size(pixels)


def lz4_masks(workload: Workload, setting: GpuSetting) -> tuple[Any, float]:
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
    """Make an input of the pipeline that feeds ``made(value)`` for each value, and starts again after the last."""
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
