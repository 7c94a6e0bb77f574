"""Memory for batches of encoded bytes, which is used again.

To allocate each batch anew would cost a page fault for every 4 KiB of it, which is more than to read it.
"""

import contextlib
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from nvidia.dali.tensors import TensorCPU, TensorListCPU

from dali_pipes.arrays import Int64s, UInt8s

# Samples begin at a cache line.
ALIGNMENT = 64
# A buffer has space for batches that are larger than its first by this factor.
HEADROOM = 1.25
HUGE_PAGE = 2 << 20
"""A buffer has a multiple of so many bytes."""


class _Lent(weakref.ref):  # type: ignore[type-arg]
    # A buffer that is in use; called back when it is not any more.
    memory: Any


class Buffers:
    """Buffers that come back by themselves. They do not shrink: each keeps the size of the largest batch that it held.

    ``allocate`` makes memory that numpy can view, of this number of bytes. Page-locked memory has ``set_device``, which
    makes its CUDA device that of the calling thread.
    """

    def __init__(
        self, allocate: Callable[[int], Any] | None = None, *, set_device: Callable[[], None] | None = None
    ) -> None:
        self._set_device = set_device
        self._allocate = allocate or _mapped
        self._lent: dict[int, _Lent] = {}
        self._free: list[_Lent] = []

    @property
    def is_pinned(self) -> bool:
        return self._set_device is not None

    def take(self, num_bytes: int) -> UInt8s:
        """Take a buffer of at least ``num_bytes``: uint8 [bytes], of any content.

        It is free again when this array, and everything that views it, is gone: also DALI's tensors. DALI notes the
        thread's CUDA device in page-locked tensors, and torch allocates for it: so it is set here, in the thread that
        makes both.
        """
        if self._set_device is not None:
            self._set_device()
        # A buffer may come back, and be taken, at any time, in any thread: only pop and append touch the list.
        memory = None
        with contextlib.suppress(IndexError):  # none is free
            while memory is None:
                free = self._lent.pop(id(self._free.pop())).memory
                memory = free if memoryview(free).nbytes >= num_bytes else None  # too small: dropped
        if memory is None:
            capacity = max(1, int(num_bytes * HEADROOM))
            memory = self._allocate(-(-capacity // HUGE_PAGE) * HUGE_PAGE)
        # A new array each time. Its base is no array: so numpy's views refer to it, and not to the memory itself.
        buffer = np.frombuffer(memoryview(memory), np.uint8)
        # It may come back in a thread of DALI's, where no code of Python's should run: so the callback is one of C.
        lent = _Lent(buffer, self._free.append)
        lent.memory = memory
        self._lent[id(lent)] = lent  # a weak reference that is gone calls nobody
        return buffer


def pinned_buffers(device_id: int) -> Buffers:
    """Make buffers in page-locked memory, from which a GPU copies by itself; from other memory DALI copies first."""
    import torch

    def allocate(num_bytes: int) -> UInt8s:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()

    return Buffers(allocate, set_device=lambda: torch.cuda.set_device(device_id))


def _mapped(num_bytes: int) -> mmap.mmap:
    # Private: by default the kernel gives shared memory no huge pages, and a forked child would see later batches.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)  # 512 times fewer page faults
    return memory


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
