"""Make a batch's tensors on the CPU: images of decoded pixels where they are resized, and packed outputs.

DALI's operators do one step after the other, each for the whole batch. Here an image is resized, cut, flipped and
normalised while its pixels are in the core's cache, by torch's resize of uint8, which is torchvision's, and by numpy.
DALI calls this as an operator, ahead of the loop that takes the batch; it does not copy what the operator has made.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from nvidia.dali import fn
from nvidia.dali.data_node import DataNode

from dali_pipes.arrays import Float32s
from dali_pipes.reader.buffers import HUGE_PAGE, Buffers

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class FinishedOutput:
    """An output of a graph that is finished on the CPU. Nodes are per sample."""

    pixels: Any
    """A node: uint8 [H, W, 3]."""
    size: Any
    """Rows and columns of the resized photo, two numbers or a node of them. Without a crop, alike in a batch."""
    crop: tuple[int, int] | None
    """Rows and columns of the centre crop of the resized photo; ``None``: the whole resized photo."""
    region: Any
    """Only with ``crop``: a node, int32 [4, 2], of the fields of `CropRegions`. ``pixels`` are this region."""
    mirror: Any
    """A node, or 0: whether the image is flipped horizontally."""
    factors: tuple[Float32s, Float32s]
    """What is subtracted from the pixels, and the factors of the rest: float32 [3] each, or [1]."""
    dtype: npt.DTypeLike
    """With uint8 the pixels stay as they are."""
    is_chw: bool


# While these threads start, torch's number of threads is 1 for the whole process. A second loader that starts its own
# at that time would take 1 for the training's number.
_starting = threading.Lock()


class FinishThreads:
    """The threads that make images. In each of them, torch's operators use one thread."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.pool = ThreadPoolExecutor(num_threads, thread_name_prefix="dali-pipes-finish")
        self._is_started = False

    def start(self) -> None:
        """Start the threads, unless they have been started.

        By default torch shares a copy of 32,768 elements or more among OpenMP's threads, and these spin while they wait
        for the next copy. Two ranks with one thread each, on two cores, took 2.7 times the CPU time.

        If another thread uses torch for the first time while these start, torch uses one thread there, too.
        """
        with _starting:
            if not self._is_started:
                self._start()
                self._is_started = True

    def _start(self) -> None:
        import torch

        all_started = threading.Barrier(self.num_threads)  # a task keeps its thread, so that the next task starts one

        def use_one_thread() -> None:
            torch.get_num_threads()  # a thread's first call sets the process's number, and would undo the next line
            torch.set_num_threads(1)
            all_started.wait()

        num_torch_threads = torch.get_num_threads()
        try:
            for started in [self.pool.submit(use_one_thread) for _ in range(self.num_threads)]:
                started.result()
        except BaseException:
            all_started.abort()
            raise
        finally:
            torch.set_num_threads(num_torch_threads)  # for threads that start later

    def close(self) -> None:
        self.pool.shutdown()


class Packed(NamedTuple):
    """The samples of a packed output in one batch."""

    tensor: "Tensor"
    """[sum of lengths, ...], on the device of the pipeline's outputs."""
    lengths: list[int]
    """Rows of each sample."""

    @classmethod
    def on_cpu(cls, samples: Sequence[Any], *, buffers: Buffers) -> "Packed":
        """Join arrays by one copy."""
        import torch

        filled, lengths = _with_rows(samples), [len(sample) for sample in samples]
        # numpy has two types of 64 bits; torch takes the one that the name of ``dtype.str`` gives.
        shape, dtype = (sum(lengths), *filled[0].shape[1:]), filled[0].dtype.str
        # A buffer has at least 2 MiB. If a loop keeps its batches, small ones would waste most of that.
        is_small = sum(one.nbytes for one in filled) < HUGE_PAGE // 2
        joined = np.empty(shape, dtype) if is_small else buffers.array(shape, dtype)
        # torch.cat would share the copy among threads. These spin while DALI's threads have the cores: 870 CPU-us a
        # photo of 110 kB on two busy cores, where numpy takes 95.
        return cls(torch.from_numpy(np.concatenate(filled, out=joined)), lengths)

    @classmethod
    def on_gpu(cls, samples: Sequence[Any]) -> "Packed":
        """Join tensors of DALI or torch by one copy, in torch's current stream."""
        import torch
        from torch.utils.dlpack import from_dlpack

        tensors = [from_dlpack(samples[position]) for position in range(len(samples))]
        return cls(torch.cat(_with_rows(tensors)), [len(tensor) for tensor in tensors])

    def offsets(self) -> "Tensor":
        """Return where each sample begins, and the sum: int32 [B + 1] on the tensor's device; does not wait for it."""
        import torch

        offsets = torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32)
        if self.tensor.device.type == "cpu":
            return offsets
        # A copy from pageable memory would wait for all earlier work of the stream.
        return offsets.pin_memory().to(self.tensor.device, non_blocking=True)


class OutputValueError(ValueError):
    """The graph's values cannot become an output. The graph is wrong; the samples are not."""


def _with_rows(samples: Sequence[Any]) -> list[Any]:
    """Return the samples that have rows. If none has, return the first one.

    Raises:
        OutputValueError: If the samples have no axis, or if their shapes differ in an axis other than the first.
    """
    if not samples[0].shape:
        raise OutputValueError("each sample of a packed output needs a first axis, its length; got single numbers")
    filled = [one for one in samples if len(one)] or [samples[0]]
    first = filled[0].shape
    if odd := [one.shape for one in filled if one.shape[1:] != first[1:]]:
        raise OutputValueError(
            f"samples of a packed output may differ in their first axis only, got {[*first]} and {[*odd[0]]}"
        )
    return filled


class Finisher:
    """Makes one output of each batch.

    ``make`` gets the values of each node, one for each sample, and returns the output.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._numbers = itertools.count()
        self._made: dict[int, Any] = {}

    def node(self, *nodes: Any) -> Any:
        """Return a node for which DALI calls ``make``. Its value is the number of the batch, for each sample."""
        # This object does not keep the node, because the node refers to it: only Python's garbage collector would
        # free such a cycle.
        return fn.python_function(*nodes, function=self._finish_batch, batch_processing=True)

    def take(self, numbers: Any) -> Any:
        """Return the output of the batch with this number, and drop the outputs of earlier batches.

        Raises:
            OutputValueError: If the output could not be made.
        """
        number = int(np.asarray(numbers[0]))
        for one in list(self._made):  # a copy: a thread of DALI's may add a batch meanwhile
            if one < number:
                del self._made[one]
        made = self._made.pop(number)
        if isinstance(made, OutputValueError):
            raise made
        return made

    def clear(self) -> None:
        """Drop what was made: no batch is in flight."""
        self._made.clear()

    def close(self) -> None:
        """Drop what was made, and the buffers: DALI's operator keeps this object until the garbage collector runs."""
        self._made.clear()
        del self._make

    def _finish_batch(self, *values: Sequence[Any]) -> list[npt.NDArray[np.int64]]:
        number = next(self._numbers)
        try:
            self._made[number] = self._make(*values)
        except OutputValueError as exc:
            self._made[number] = exc
        return [np.array(number)] * len(values[0])


def finish_packed(node: Any) -> tuple[Finisher, Any]:
    """Join the samples of a node. Return the finisher, and the node for which it is called."""
    finisher = Finisher(partial(Packed.on_cpu, buffers=Buffers()))
    return finisher, finisher.node(node)


def finish_images(output: FinishedOutput, threads: FinishThreads) -> tuple[Finisher, Any]:
    """Make the images of an output. Return the finisher, and the node for which it is called."""
    given = {"size": output.size, "region": output.region, "mirror": output.mirror}
    nodes = {name: node for name, node in given.items() if isinstance(node, DataNode)}
    left: dict[str, Any] = dict.fromkeys(nodes, ())  # see `Finisher.node`
    kept = replace(output, pixels=None, **left)
    finisher = Finisher(partial(_images, kept, tuple(nodes), threads, Buffers()))
    return finisher, finisher.node(output.pixels, *nodes.values())


def _images(
    output: FinishedOutput,
    names: Sequence[str],
    threads: FinishThreads,
    buffers: Buffers,
    pixels: Sequence[Any],
    *values: Sequence[Any],
) -> "Tensor":
    """Make a batch of images. For each of ``names``, ``values`` has that node's value for each sample."""
    import torch

    given, count = dict(zip(names, values, strict=True)), len(pixels)
    odd = [one for one in pixels if one.dtype != np.uint8 or one.shape[2:] != (3,)]
    if odd:
        raise OutputValueError(f"an image is made of uint8 pixels [H, W, 3], got {odd[0].dtype} {[*odd[0].shape]}")
    sizes = given.get("size") or [output.size] * count
    rows, columns = output.crop or (int(side) for side in sizes[0])
    shape = (count, 3, rows, columns) if output.is_chw else (count, rows, columns, 3)
    made = buffers.array(shape, output.dtype)
    images = made if output.is_chw else made.transpose(0, 3, 1, 2)
    regions, mirrors = given.get("region"), given.get("mirror") or [output.mirror] * count
    waiting = iter(range(count))  # each number is taken by one thread

    def finish_some() -> None:
        for at in waiting:
            region = None if regions is None else np.asarray(regions[at])
            _write_image(output, images[at], pixels[at], sizes[at], region, mirrors[at])

    work: list[Future[None]] = []
    try:
        for _ in range(min(threads.num_threads, count)):
            work.append(threads.pool.submit(finish_some))  # noqa: PERF401 - after an error, `wait` needs the others
    finally:
        wait(work)  # DALI frees the pixels when this function returns, also if it raises an error
    for one in work:
        one.result()
    return torch.from_numpy(made)


def _write_image(
    output: FinishedOutput,
    image: npt.NDArray[Any],
    pixels: npt.NDArray[np.uint8],
    size: Any,
    region: npt.NDArray[np.int32] | None,
    mirror: Any,
) -> None:
    """Write one image, [3, H, W], of pixels [H, W, 3]."""
    import torch

    wanted = [int(side) for side in size]
    stacked = torch.from_numpy(pixels.transpose(2, 0, 1))[None]
    if region is None:
        photo = torch.nn.functional.interpolate(stacked, size=wanted, mode="bilinear", antialias=True)[0]
    else:
        photo = resized_crop(stacked, wanted, image.shape[1:], region)[0]
    if mirror:
        photo = photo.flip(2)  # torch's copy costs less than numpy's reading backwards
    if output.dtype == np.uint8:
        image[:] = photo.numpy()
        return
    mean, factor = (one[:, None, None] for one in output.factors)
    values = image if image.dtype == np.float32 else np.empty(image.shape, np.float32)
    values[:] = photo.numpy()  # before the arithmetic, which costs more on two types
    values -= mean
    np.multiply(values, factor, out=image, casting="same_kind")


def resized_crop(pixels: "Tensor", size: Sequence[int], crop: Sequence[int], region: npt.NDArray[np.int32]) -> "Tensor":
    """Resize a region of a photo to the crop, see `CropRegions`: bit for bit as if the whole photo were resized."""
    import torch

    photo_size, start, shape, crop_start = region.tolist()
    crop_end = [first + side for first, side in zip(crop_start, crop, strict=True)]
    scales = [after / before for before, after in zip(photo_size, size, strict=True)]
    if shape != photo_size:
        # torch starts at the photo's first row and column. The crop does not depend on pixels before or behind the
        # region: those before it stay uninitialised, those behind it are left out.
        photo = torch.empty((1, start[0] + shape[0], start[1] + shape[1], 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        photo[:, :, start[0] :, start[1] :] = pixels
        pixels, size = photo, crop_end
    # interpolate() calls this operator, but takes either the size or the scales.
    resized: Tensor = torch.ops.aten._upsample_bilinear2d_aa(pixels, size, False, *scales)
    return resized[:, :, crop_start[0] : crop_end[0], crop_start[1] : crop_end[1]]
