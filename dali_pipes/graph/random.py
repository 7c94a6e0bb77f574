"""Random numbers that belong to the sample, as inputs of the decode pipeline."""

from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.arguments import as_number
from dali_pipes.graph.crop import CROP_TRIES, Int32s, resized_crop
from dali_pipes.graph.inputs import Components, once_a_batch
from dali_pipes.reader.batch import Batch


class Random:
    """Random numbers that belong to the sample; the second argument of a graph.

    Each call opens a stream of its own, named by the call's kind and number. Pass ``stream=`` to name the stream, so
    that it stays the same when calls are added before this one.

    A sample's numbers from a stream are a function of ``(seed, epoch, ordinal, occurrence, stream)``: they are the same
    with another batch size, with another number of ranks and in a resumed run. (On a GPU the same numbers do not always
    give the same pixels to the last bit, see `dali_pipes.tuning`.)
    """

    def __init__(self, components: Components) -> None:
        self._components = components
        self._num_streams = 0

    def uniform(self, low: float = 0.0, high: float = 1.0, *, stream: str | None = None) -> Any:
        """Draw numbers uniform in ``[low, high)``: a node of float32 scalars."""
        name = self._stream_name("uniform", stream)
        # The largest float32 below high: rounding to float32 could reach it.
        last = np.nextafter(np.float32(high), np.float32(low))

        def draw(batch: Batch) -> npt.NDArray[np.float32]:
            return np.minimum((low + (high - low) * batch.uniforms(name, 1)[:, 0]).astype(np.float32), last)

        return self._components.array(draw)

    def coin_flip(self, probability: float = 0.5, *, stream: str | None = None) -> Any:
        """Draw 1 with this probability, else 0: a node of int32 scalars, as ``mirror=`` takes it.

        Raises:
            TypeError: If the probability is not a number.
            ValueError: If it is not in [0, 1].
        """
        if not 0 <= as_number("probability", probability) <= 1:
            raise ValueError(f"probability must be in [0, 1], got {probability}")
        name = self._stream_name("coin_flip", stream)
        return self._components.array(lambda batch: (batch.uniforms(name, 1)[:, 0] < probability).astype(np.int32))

    def resized_crop(
        self,
        component: str,
        *,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        stream: str | None = None,
    ) -> tuple[Any, Any]:
        """Draw a random crop of a photo as torchvision's ``RandomResizedCrop`` does.

        It is computed from the photo's height and width in the shard index, so that `fn.decoders.image_slice` decodes
        the crop only.

        Args:
            component: The photo.
            scale: Smallest and largest share of the photo's area.
            ratio: Smallest and largest width / height.
            stream: Name of the stream.

        Returns:
            Nodes of the crop's start and of its shape, each int32 [2] (rows, columns) in pixels.
        """
        name = self._stream_name("resized_crop", stream)
        size = self._components.size(component)

        @once_a_batch
        def crop(batch: Batch) -> Int32s:
            height, width = size(batch)
            return resized_crop(height, width, batch.uniforms(name, 2 * CROP_TRIES + 2), scale=scale, ratio=ratio)

        return (
            self._components.array(lambda batch: crop(batch)[:, :2]),
            self._components.array(lambda batch: crop(batch)[:, 2:]),
        )

    def _stream_name(self, kind: str, stream: str | None) -> str:
        self._num_streams += 1
        return stream if stream is not None else f"{kind}/{self._num_streams - 1}"
