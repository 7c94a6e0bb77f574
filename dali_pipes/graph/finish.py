"""Make images of decoded pixels on the CPU: resize, cut, flip and normalise them, photo by photo.

DALI's operators do one step after the other, each for the whole batch. Here all steps of a photo follow one another
while its pixels are in the core's cache, by torch's resize of uint8, which is torchvision's, and by numpy. DALI calls
it as an operator, after its decoders; it does not copy what the operator has made.
"""

import itertools
import math
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from nvidia.dali import fn
from nvidia.dali.data_node import DataNode

from dali_pipes.arrays import Float32s

if TYPE_CHECKING:
    from torch import Tensor

# Batches of memory that no tensor uses and that are kept for the next ones; a loop that holds batches needs more, once.
_KEPT = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class FinishedOutput:
    """An output of a graph that is finished on the CPU. Nodes are per sample."""

    pixels: Any
    """A node: uint8 [H, W, 3]."""
    size: Any
    """Rows and columns of the resized photo, two numbers or a node of them; ``None``: as it is."""
    crop: tuple[int, int] | None
    """Rows and columns that are cut out of it, or to which it is padded; ``None``: all."""
    position: Any
    """A node of two shares: the crop's start, of the rows and columns that are not in it. ``None``: 0."""
    mirror: Any
    """A node, or 0: whether the image is flipped horizontally."""
    factors: tuple[Float32s, Float32s]
    """What is subtracted from the pixels, and the factors of the rest: float32 [3] each, or [1]."""
    dtype: npt.DTypeLike
    """With uint8 the pixels stay as they are."""
    is_chw: bool


class FinishThreads:
    """The threads, besides DALI's own one, and the memory of a pipeline's finishers."""

    def __init__(self, num_threads: int) -> None:
        self.num_others = num_threads - 1
        self.pool = ThreadPoolExecutor(max(self.num_others, 1), thread_name_prefix="dali-pipes-finish")
        self.memory = BatchMemory()

    def start(self) -> None:
        """Start the threads. If a thread of DALI's did it, Python would keep an object for that thread for ever."""
        started = threading.Event()
        try:
            for _ in range(self.num_others):
                self.pool.submit(started.wait)  # a thread that is free would take the next task, too
        finally:
            started.set()

    def close(self) -> None:
        self.pool.shutdown()


class Finisher:
    """Finishes the batches of one output, in its pipeline's threads and the one of DALI's that calls it."""

    def __init__(self, output: FinishedOutput, threads: FinishThreads) -> None:
        self._threads = threads
        self._numbers = itertools.count()
        self._made: dict[int, Tensor | ValueError] = {}
        given = {"size": output.size, "position": output.position, "mirror": output.mirror}
        nodes = {name: node for name, node in given.items() if isinstance(node, DataNode)}
        # The nodes are not kept: with them the pipeline would be a cycle, and end with the garbage only.
        left: dict[str, Any] = dict.fromkeys(nodes, ())
        self._output, self._inputs = replace(output, pixels=None, **left), tuple(nodes)
        self.node = fn.python_function(output.pixels, *nodes.values(), function=self._finish, batch_processing=True)
        """Makes DALI finish each batch, and gives a batch's number, for each sample."""

    def take(self, numbers: Any) -> "Tensor":
        """Return the images of the batch with these numbers; earlier ones that are there were given up.

        Raises:
            ValueError: If they are not all of one shape.
        """
        number = int(np.asarray(numbers[0]))
        for earlier in [one for one in self._made if one < number]:
            del self._made[earlier]
        made = self._made.pop(number)
        if isinstance(made, ValueError):
            raise made
        return made

    def clear(self) -> None:
        """Drop what was made: no batch is in flight."""
        self._made.clear()

    def _finish(self, pixels: Sequence[Any], *inputs: Sequence[Any]) -> list[npt.NDArray[np.int64]]:
        number = next(self._numbers)
        try:
            self._made[number] = self._batch(pixels, dict(zip(self._inputs, inputs, strict=True)))
        except ValueError as exc:
            self._made[number] = exc
        return [np.array(number)] * len(pixels)

    def _batch(self, pixels: Sequence[Any], inputs: dict[str, Sequence[Any]]) -> "Tensor":
        output, threads, count = self._output, self._threads, len(pixels)
        sizes = inputs.get("size") or [output.size or one.shape[:2] for one in pixels]
        shapes = {output.crop or tuple(np.asarray(size, np.int64).tolist()) for size in sizes}
        if len(shapes) > 1:
            raise ValueError("an image of the graph has samples of different shapes; crop, resize or pad them alike")
        rows, columns = shapes.pop()
        shape = (count, 3, rows, columns) if output.is_chw else (count, rows, columns, 3)
        tensor = threads.memory.tensor(shape, np.dtype(output.dtype))
        images = tensor.numpy() if output.is_chw else tensor.numpy().transpose(0, 3, 1, 2)
        positions, mirrors = inputs.get("position"), inputs.get("mirror") or [output.mirror] * count
        waiting = iter(range(count))  # each number is taken by one thread

        def finish_some() -> None:
            for at in waiting:
                position = None if positions is None else positions[at]
                _finish(output, images[at], pixels[at], sizes[at], position, mirrors[at])

        work = [threads.pool.submit(finish_some) for _ in range(min(threads.num_others, count - 1))]
        try:
            finish_some()
        finally:
            for _ in waiting:  # after an error nobody goes on: the pixels are DALI's, and there until this ends
                pass
            wait(work)
        for one in work:
            one.result()
        return tensor


def _finish(
    output: FinishedOutput,
    image: npt.NDArray[Any],
    pixels: npt.NDArray[np.uint8],
    size: Any,
    position: Any,
    mirror: Any,
) -> None:
    """Write one image, [3, H, W], of pixels [H, W, 3]."""
    import torch

    photo = pixels.transpose(2, 0, 1)
    if output.size is not None:
        wanted = [int(side) for side in size]
        stacked = torch.from_numpy(photo)[None]
        photo = torch.nn.functional.interpolate(stacked, size=wanted, mode="bilinear", antialias=True)[0].numpy()
    start = [0, 0]
    if position is not None:
        slack = np.subtract(photo.shape[1:], image.shape[1:])
        start = np.rint(slack * np.asarray(position, np.float64)).astype(int).tolist()
    if mirror:
        image = image[:, :, ::-1]
    is_normalised = output.dtype != np.uint8
    mean, factor = (one[:, None, None] for one in output.factors)
    # Rows and columns of the image that the photo fills, and where they lie in the photo.
    filled = [
        slice(max(-first, 0), min(side - first, most))
        for first, side, most in zip(start, photo.shape[1:], image.shape[1:], strict=True)
    ]
    place = image[:, filled[0], filled[1]]
    if place.shape != image.shape:
        image[:] = -mean * factor if is_normalised else 0  # pixels outside a photo are 0
    rows, columns = (slice(one.start + first, one.stop + first) for one, first in zip(filled, start, strict=True))
    photo = photo[:, rows, columns]
    if not is_normalised:
        place[:] = photo
        return
    values = place if place.dtype == np.float32 else np.empty(place.shape, np.float32)
    np.subtract(photo, mean, out=values)
    np.multiply(values, factor, out=place, casting="same_kind")


class BatchMemory:
    """Memory of batches that is used again when no tensor is left: new pages would have to be zeroed and mapped.

    What gives memory back is a method of C, which Ctrl-C cannot end: it may run when a loop drops its last batch.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lent: dict[int, tuple[object, npt.NDArray[np.uint8]]] = {}
        self._dropped: deque[object] = deque()
        self._free: defaultdict[int, list[npt.NDArray[np.uint8]]] = defaultdict(list)

    def tensor(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> "Tensor":
        """A tensor whose values are not set."""
        import torch

        num_bytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            while self._dropped:
                _, memory = self._lent.pop(id(self._dropped.popleft()))
                if len(free := self._free[memory.nbytes]) < _KEPT:
                    free.append(memory)
            if not self._free[num_bytes] and sum(map(len, self._free.values())) >= 2 * _KEPT:
                self._free.clear()  # of other shapes
            free = self._free[num_bytes]
            memory = free.pop() if free else torch.empty(num_bytes, dtype=torch.uint8).numpy()
            view = memory.view(dtype)  # lives as long as a tensor of these bytes
            reference = weakref.ref(view, self._dropped.append)
            self._lent[id(reference)] = reference, memory
        return torch.from_numpy(view).view(shape)
