"""Memory for batches, of encoded bytes or of images, which is used again.

To allocate each batch anew would cost a page fault for every 4 KiB of it, which is more than to read it.
"""

import contextlib
import math
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.arrays import UInt8s

# A buffer has space for batches that are larger than its first by this factor.
HEADROOM = 1.25
HUGE_PAGE = 2 << 20
"""A buffer has a multiple of so many bytes."""
# Free buffers that are kept: a loop that has held many batches would leave as many.
_MOST_FREE = 8


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
            while memory is None or len(self._free) > _MOST_FREE:
                free = self._lent.pop(id(self._free.pop())).memory
                memory = free if memoryview(free).nbytes >= num_bytes else memory  # too small: dropped
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

    def array(self, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Take a buffer as an array of this shape and type, of any content."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        return self.take(num_bytes)[:num_bytes].view(dtype).reshape(shape)


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
