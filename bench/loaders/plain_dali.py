"""Encoded components to batches by DALI's own operators, in plain pipelines as a script has them.

Photo and mask go through the operators of `dali_pipes.segmentation` with the same arguments; their sizes, which the
shard indexes tell it, are read from the headers in the graph here.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

from bench.loaders import ALL_PARTS, Batch, LoaderOptions

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PREFETCH_QUEUE_DEPTH", "PlainEpochs", "padded_text", "plain_pipeline", "segmentation_outputs"]

PREFETCH_QUEUE_DEPTH = 2  # dali_pipes.loader's default


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
    """`dali_pipes.segmentation`, its arrays computed by operators: image and trimap of encoded photo and mask.

    Args:
        photo: Encoded.
        mask: Encoded.
        options: For the crop.
        device: Where batches are delivered, ``cpu`` or ``cuda``.
    """
    from nvidia.dali import fn, math, types

    from dali_pipes.graph.pipelines import IMAGENET_MEAN, IMAGENET_STD, _normalised

    def window_of(encoded: Any, **normalised: Any) -> Any:
        size = fn.peek_image_shape(encoded, dtype=types.INT32, adjust_orientation=False)[0:2]
        # As `dali_pipes.graph.pipelines.center_crop_start`: half of what is more, halves to even; padding is half of
        # what is less, rounded down.
        slack = math.max(size - options.crop, 0)
        half = slack // 2
        start = half + (slack & 1) * (half & 1)
        shape = math.min(size, options.crop)
        deficit = options.crop - shape
        position = fn.cast(deficit // 2, dtype=types.FLOAT) / math.max(deficit, 1)
        pixels = fn.decoders.image_slice(
            encoded,
            start,
            shape,
            axes=(0, 1),
            device="mixed" if device == "cuda" else "cpu",
            output_type=types.RGB if normalised["dtype"] == "float32" else types.GRAY,
            adjust_orientation=False,
        )
        return _normalised(pixels, options.crop, position, layout="CHW", **normalised)

    return (
        window_of(photo, mean=IMAGENET_MEAN, std=IMAGENET_STD, dtype="float32"),
        window_of(mask, mean=(0,), std=(1,), dtype="uint8"),
    )


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
