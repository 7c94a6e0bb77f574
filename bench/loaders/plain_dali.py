"""Encoded components to batches by DALI's own operators, in plain pipelines as a script has them.

Nothing is taken of `dali_pipes`. Photo and mask are decoded in the window that the crop wants and no more
(``fn.decoders.image_slice``), then normalised, or padded, by ``fn.crop_mirror_normalize``. ``fn.decoders.image_crop``
would take the window by itself, but refuses one that a photo is too small for, and rounds its start otherwise than
``CenterCrop``, by which outputs are compared; so a photo's size is read from its header here.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

from bench.loaders import ALL_PARTS, Batch, LoaderOptions

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PREFETCH_QUEUE_DEPTH", "PlainEpochs", "padded_text", "plain_pipeline", "segmentation_outputs"]

PREFETCH_QUEUE_DEPTH = 2  # DALI's default
MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)  # ImageNet, of levels
STD = (0.229 * 255, 0.224 * 255, 0.225 * 255)


def plain_pipeline(device: str, options: LoaderOptions, **arguments: Any) -> Any:
    """A pipeline to be filled, with what all of them share; ``arguments`` are more of ``Pipeline``'s own."""
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


def segmentation_outputs(photo: Any, mask: Any, options: LoaderOptions, *, device: str) -> tuple[Any, Any]:
    """Image and trimap, as a `Batch` has them, of encoded photo and mask.

    Args:
        photo: Encoded.
        mask: Encoded.
        options: For the crop.
        device: Where batches are delivered, ``cpu`` or ``cuda``.
    """
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
        # Padding is not normalised by the operator: what a pixel of 0 becomes.
        fill_values=[-mean / std for mean, std in zip(MEAN, STD, strict=True)],
        dtype=types.FLOAT,
        **crop,
    )
    return image, fn.crop_mirror_normalize(window_of(mask, types.GRAY), dtype=types.UINT8, **crop)


class PlainEpochs:
    """A `Loader` over a DALI iterator.

    Args:
        iterator: A ``DALIGenericIterator`` of one pipeline, with ``auto_reset``.
        labels: From the pipeline's labels to int64 [B].
        keys: From what names the pipeline's samples to keys.
        device: Where it delivers.
        num_workers: Its worker processes.
    """

    decode = "dali"
    gives = ALL_PARTS

    def __init__(
        self,
        iterator: Any,
        *,
        labels: "Callable[[Tensor], Tensor]",
        keys: "Callable[[Tensor], list[str]]",
        device: str,
        num_workers: int = 0,
    ) -> None:
        self._iterator, self._labels, self._keys = iterator, labels, keys
        self._epoch: Generator[Batch] | None = None
        self._is_inside = False
        self.device = device
        self.num_workers = num_workers

    def epoch(self) -> Iterator[Batch]:
        self._leave_epoch()
        if self._is_inside:  # DALI resets at the end of an epoch only: what is left of this one is read
            with contextlib.suppress(StopIteration):
                while True:
                    next(self._iterator)
        self._is_inside = True
        self._epoch = self._batches()
        yield from self._epoch
        self._is_inside = False

    def close(self) -> None:
        """Destroy the pipeline, whoever still holds an epoch. Can be called twice."""
        self._leave_epoch()
        self._iterator = None

    def _batches(self) -> Generator[Batch]:
        for (batch,) in self._iterator:
            yield {
                "image": batch["image"],
                "trimap": batch["trimap"],
                "label": self._labels(batch["label"]),
                "key": self._keys(batch["key"]),
            }

    def _leave_epoch(self) -> None:
        if self._epoch is not None:
            self._epoch.close()
        self._epoch = None


def padded_text(row: Any) -> str:
    """A row of bytes, padded with zeros to the length of the longest, as text."""
    return bytes(row).rstrip(b"\0").decode()
