"""Decode with DALI's own operators, in plain pipelines like those of a script that does not use `dali_pipes`.

Photo and mask are decoded only in the window that the crop keeps (``fn.decoders.image_slice``), then normalised or
padded by ``fn.crop_mirror_normalize``. ``fn.decoders.image_crop`` computes the window itself, but it refuses a window
that is larger than the photo, and it rounds the start differently than ``CenterCrop``, with which outputs are compared.
So a photo's size is read from its header here.
"""

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.loaders.protocol import BenchBatch, LoaderOptions
from bench.loaders.recipe import NUM_CROPS, WHOLE, crop_table

if TYPE_CHECKING:
    from torch import Tensor


PREFETCH_QUEUE_DEPTH = 2  # DALI's default
MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)  # ImageNet, of levels
STD = (0.229 * 255, 0.224 * 255, 0.225 * 255)


def plain_pipeline(device: str, options: LoaderOptions, **arguments: Any) -> Any:
    """Make an empty pipeline with the settings that all loaders share, and further ``arguments`` of ``Pipeline``."""
    import torch
    from nvidia.dali.pipeline import Pipeline

    return Pipeline(
        batch_size=options.batch_size,
        num_threads=options.num_threads,
        device_id=None if device == "cpu" else torch.cuda.current_device(),
        prefetch_queue_depth=PREFETCH_QUEUE_DEPTH,
        exec_dynamic=True,
        **arguments,
    )


def decoded_outputs(photo: Any, mask: Any | None, options: LoaderOptions, *, device: str) -> list[Any]:
    """Convert encoded photo and mask to the image and mask of a `BenchBatch`; without a mask, to the image.

    The encoded recipe's photos are padded to one length, for DALI's iterator gives tensors only. Their lengths follow.
    """
    if options.recipe == "encoded":
        from nvidia.dali import fn, types

        return [fn.pad(photo), photo.shape(dtype=types.INT64)]
    if mask is None:
        return [_classification_image(photo, options, device=device)]
    from nvidia.dali import fn, math, types

    def window_of(encoded: Any, output_type: Any) -> Any:
        size = fn.peek_image_shape(encoded, dtype=types.INT32, adjust_orientation=False)[0:2]
        slack = math.max(size - options.crop, 0)
        return fn.decoders.image_slice(
            encoded,
            (slack + (slack // 2 & 1)) // 2,  # half of it, halves to even, as Python's round() in CenterCrop
            math.min(size, options.crop),
            axes=(0, 1),
            device="mixed" if device == "cuda" else "cpu",
            output_type=output_type,
            adjust_orientation=False,
        )

    crop: dict[str, Any] = {
        "crop": (options.crop, options.crop),
        "out_of_bounds_policy": "pad",
        "rounding": "truncate",  # the odd row or column of padding comes last, as in CenterCrop
        "output_layout": "CHW",
    }
    image = fn.crop_mirror_normalize(
        window_of(photo, types.RGB),
        mean=MEAN,
        std=STD,
        # The operator does not normalise padding; these are the normalised values of a pixel of 0.
        fill_values=[-mean / std for mean, std in zip(MEAN, STD, strict=True)],
        dtype=types.FLOAT,
        **crop,
    )
    return [image, fn.crop_mirror_normalize(window_of(mask, types.GRAY), dtype=types.UINT8, **crop)]


def _classification_image(photo: Any, options: LoaderOptions, *, device: str) -> Any:
    from nvidia.dali import fn, math, types

    # The arithmetic of `bench.loaders.recipe.crops_of`, in whole numbers.
    size = fn.peek_image_shape(photo, dtype=types.INT64, adjust_orientation=False)[0:2]
    crop = types.Constant(crop_table())[photo.shape(dtype=types.INT64)[0] & (NUM_CROPS - 1)]
    pixels = fn.decoders.image_slice(
        photo,
        fn.cast(crop[0:2] * size // WHOLE, dtype=types.INT32),
        fn.cast(math.max(crop[2:4] * size // WHOLE, 1), dtype=types.INT32),
        axes=(0, 1),
        device="mixed" if device == "cuda" else "cpu",
        output_type=types.RGB,
        adjust_orientation=False,
    )
    return fn.crop_mirror_normalize(
        fn.resize(pixels, size=(options.crop, options.crop), interp_type=types.INTERP_LINEAR, antialias=True),
        mirror=fn.cast(crop[4], dtype=types.INT32),
        mean=MEAN,
        std=STD,
        dtype=types.FLOAT,
        output_layout="CHW",
    )


class PlainEpochs:
    """A `BenchLoader` over one pipeline; `close` destroys it.

    Args:
        pipeline: A pipeline with the outputs image, mask if there is one, label and key.
        options: The run's options.
        labels: Converts the pipeline's labels to int64 [B].
        keys: Converts the pipeline's keys to texts.
        num_workers: The number of the pipeline's worker processes.
        arguments: Arguments of ``DALIGenericIterator`` that determine the length of an epoch.
    """

    decode = "dali"

    def __init__(
        self,
        pipeline: Any,
        *,
        options: LoaderOptions,
        labels: "Callable[[Tensor], Tensor]",
        keys: "Callable[[Tensor], list[str]]",
        num_workers: int = 0,
        **arguments: Any,
    ) -> None:
        from nvidia.dali.plugin.base_iterator import LastBatchPolicy
        from nvidia.dali.plugin.pytorch import DALIGenericIterator

        decoded = ["encoded", "num_bytes"] if options.recipe == "encoded" else ["image"]
        self._iterator = DALIGenericIterator(
            pipeline,
            [*decoded, *(["mask"] if options.mask is not None else []), "label", "key"],
            auto_reset=True,
            dynamic_shape=True,
            last_batch_policy=LastBatchPolicy.PARTIAL,
            prepare_first_batch=False,
            **arguments,
        )
        self._labels, self._keys = labels, keys
        self._epoch: Generator[BenchBatch] | None = None
        self._is_inside = False
        self.device = options.delivery_device
        self.num_workers = num_workers

    def epoch(self) -> Iterator[BenchBatch]:
        self._leave_epoch()
        if self._is_inside:  # DALI resets only at the end of an epoch, so the rest of the epoch is read
            with contextlib.suppress(StopIteration):
                while True:
                    next(self._iterator)
        self._is_inside = True
        self._epoch = self._batches()
        yield from self._epoch
        self._is_inside = False

    def close(self) -> None:
        """Destroy the pipeline, also if a caller still holds an epoch. Can be called twice."""
        self._leave_epoch()
        self._iterator = None

    def _batches(self) -> Generator[BenchBatch]:
        for (batch,) in self._iterator:
            batch["label"], batch["key"] = self._labels(batch["label"]), self._keys(batch["key"])
            yield _joined(batch) if "encoded" in batch else batch

    def _leave_epoch(self) -> None:
        if self._epoch is not None:
            self._epoch.close()
        self._epoch = None


def _joined(batch: dict[str, Any]) -> BenchBatch:
    """Join the padded rows of ``encoded``, without their padding."""
    import torch

    num_bytes = batch["num_bytes"].reshape(-1).tolist()
    return {
        "encoded": torch.cat([row[:size] for row, size in zip(batch["encoded"], num_bytes, strict=True)]),
        "cu_seqlens": torch.tensor([0, *itertools.accumulate(num_bytes)], dtype=torch.int32),
        "label": batch["label"],
        "key": batch["key"],
    }


def padded_keys(rows: Any) -> list[str]:
    """The texts of a tensor or array uint8 [B, length]."""
    return [padded_text(row) for row in np.asarray(rows)]


def padded_text(row: Any) -> str:
    """The text of a row of bytes, without the zeros that pad it."""
    return bytes(row).rstrip(b"\0").decode()
