"""A batch of encoded bytes in one buffer, as DALI takes it."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from nvidia.dali.tensors import TensorCPU, TensorListCPU

from dali_pipes.arrays import Int64s, UInt8s
from dali_pipes.reader.buffers import Buffers

# Samples begin at a cache line.
ALIGNMENT = 64


class EncodedBatch(Sequence[UInt8s]):
    """One component of the samples of a batch: each sample's encoded bytes, uint8 [bytes], in one buffer.

    ``starts`` and ``sizes`` are int64 [B], in the ``buffer`` from `Buffers.take`; ``is_pinned``: it is page-locked.
    """

    def __init__(self, buffer: UInt8s, starts: Int64s, sizes: Int64s, *, is_pinned: bool = False) -> None:
        self.buffer, self.starts, self.sizes = buffer, starts, sizes
        self._stops = starts + sizes
        views = memoryview(buffer)  # type: ignore[arg-type]  # mypy does not know numpy's buffers
        samples = [views[start:stop] for start, stop in zip(starts.tolist(), self._stops.tolist(), strict=True)]
        # DALI needs half as long again if it is told that memory is not page-locked.
        tensors = [TensorCPU(data, is_pinned=True) for data in samples] if is_pinned else list(map(TensorCPU, samples))
        self.tensor_list = TensorListCPU(tensors, contiguous=False)
        """The same bytes as DALI takes them, without a copy."""

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return [self[number] for number in range(*position.indices(len(self)))]
        return self.buffer[self.starts[position] : self._stops[position]]

    def __iter__(self) -> Iterator[UInt8s]:
        return (self[number] for number in range(len(self)))


def take_batch(buffers: Buffers, sizes: Int64s) -> tuple[UInt8s, list[EncodedBatch], Int64s]:
    """Take a buffer for a batch, whose bytes are not read yet.

    Args:
        buffers: Where to take it from.
        sizes: int64 [components, B].

    Returns:
        The buffer, uint8 [bytes]; the batch's components; where each sample's bytes begin, int64 [components, B].
    """
    padded = -(-sizes // ALIGNMENT) * ALIGNMENT
    starts = np.cumsum(padded).reshape(padded.shape) - padded
    buffer = buffers.take(int(padded.sum()))
    is_pinned = buffers.is_pinned
    batch = [EncodedBatch(buffer, *columns, is_pinned=is_pinned) for columns in zip(starts, sizes, strict=True)]
    return buffer, batch, starts
