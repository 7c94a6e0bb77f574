"""Decode all photos once, a pass, in one of three ways: in this thread, in a ``DataLoader``, or with DALI."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from bench.decode.decoders import DECODERS, Pixels
from bench.loaders.workers import PREFETCH_FACTOR, worker_context
from bench.tools.processes import end_with_main

DALI, OURS = "dali", "dali-pipes"
"""DALI's decoder, fed from memory; and our loader, which reads the photos from shards."""
BATCH_SIZE = 32


class Photos(NamedTuple):
    """The photos, in two places."""

    encoded: Sequence[bytes]
    shards: Path
    """The directory of the shards with the same photos, for our loader; their keys are the photos' numbers."""
    component: str
    cache: Path
    """The directory of our loader's cache file."""


Pass = Callable[[], Iterator[tuple[int, Pixels]]]
"""Decodes all photos; yields the number of each, and its pixels."""


@contextlib.contextmanager
def opened(name: str, photos: Photos, *, num_threads: int) -> Iterator[Pass]:
    """Open a decoder.

    Args:
        name: Of `DECODERS`, or `DALI`, or `OURS`.
        photos: What it decodes.
        num_threads: With 0 everything happens on one core: a decoder works in this thread, and DALI has one thread.
            Otherwise: workers of a ``DataLoader``, or DALI's threads.
    """
    # More of torch's threads would spin on the decoders' cores while they wait for each other.
    torch.set_num_threads(1)
    if name == DALI:
        with _dali(photos, num_threads) as one_pass:
            yield one_pass
    elif name == OURS:
        with _ours(photos, num_threads) as one_pass:
            yield one_pass
    elif num_threads:
        with _data_loader(name, photos, num_threads) as one_pass:
            yield one_pass
    else:
        decode = DECODERS[name].open()
        yield lambda: ((number, decode(data)) for number, data in enumerate(photos.encoded))


def stay_on_one_core() -> None:
    """Let this process, and all threads that it starts from now on, have one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


@contextlib.contextmanager
def _dali(photos: Photos, num_threads: int) -> Iterator[Pass]:
    from nvidia.dali import fn, types
    from nvidia.dali.pipeline import Pipeline

    waiting: Iterator[list[Any]] = iter(())
    pipeline = Pipeline(batch_size=BATCH_SIZE, num_threads=max(1, num_threads), device_id=None, prefetch_queue_depth=2)
    with pipeline:
        encoded = fn.external_source(source=lambda: next(waiting), dtype=types.UINT8, ndim=1, batch=True)
        pipeline.set_outputs(fn.decoders.image(encoded, device="cpu", output_type=types.RGB, adjust_orientation=False))
    pipeline.build()

    def one_pass() -> Iterator[tuple[int, Pixels]]:
        nonlocal waiting
        arrays = (np.frombuffer(data, np.uint8) for data in photos.encoded)
        waiting = iter(list(batch) for batch in _batched(arrays))
        number = 0
        with contextlib.suppress(StopIteration):
            while True:
                (decoded,) = pipeline.run()
                for row in range(len(decoded)):
                    yield number, np.asarray(decoded[row])
                    number += 1
        pipeline.reset()

    yield one_pass


def _batched(arrays: Iterator[Any]) -> Iterator[list[Any]]:
    while batch := list(itertools.islice(arrays, BATCH_SIZE)):
        yield batch


@contextlib.contextmanager
def _ours(photos: Photos, num_threads: int) -> Iterator[Pass]:
    from nvidia.dali import fn, types

    import dali_pipes as dp

    def graph(components: Any, random: Any) -> dict[str, Any]:
        photo = fn.decoders.image(
            components[photos.component], device=components.device, output_type=types.RGB, adjust_orientation=False
        )
        # Photos of many sizes in one batch: their pixels one after the other, [sum of pixels, 3].
        return {"pixels": components.packed(fn.reshape(photo, shape=[-1, 3])), "shape": photo.shape()}

    with dp.loader(
        str(photos.shards),
        graph,
        batch_size=BATCH_SIZE,
        last_batch_policy="PARTIAL",
        device="cpu",
        decode=dp.Decode(threads=max(1, num_threads)),
        cache=dp.Cache(directory=photos.cache),
        outputs=dp.Outputs(keys=True),
    ) as loader:
        is_new = True

        def one_pass() -> Iterator[tuple[int, Pixels]]:
            nonlocal is_new
            if not is_new:
                loader.reset()
            is_new = False
            for (batch,) in loader:
                pixels, ends = batch["pixels"].numpy(), batch["cu_seqlens"].tolist()
                places = zip(batch["key"], batch["shape"].tolist(), itertools.pairwise(ends), strict=True)
                for key, shape, (start, end) in places:
                    yield int(key), pixels[start:end].reshape(shape)

        yield one_pass


@contextlib.contextmanager
def _data_loader(name: str, photos: Photos, num_workers: int) -> Iterator[Pass]:
    loader: Any = DataLoader(
        _Decoded(name, photos.encoded),
        batch_size=BATCH_SIZE,
        collate_fn=list,
        num_workers=num_workers,
        multiprocessing_context=worker_context(),
        persistent_workers=True,
        prefetch_factor=PREFETCH_FACTOR,
    )

    def one_pass() -> Iterator[tuple[int, Pixels]]:
        for batch in loader:
            for number, pixels in batch:
                yield number, pixels.numpy()

    try:
        yield one_pass
    finally:
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()


class _Decoded(Dataset[Any]):
    """A map-style data set of decoded photos: tensors, which reach the main process through shared memory."""

    def __init__(self, name: str, encoded: Sequence[bytes]) -> None:
        self._name, self._encoded, self._main_pid = name, encoded, os.getpid()
        self._decode: Callable[[bytes], Pixels] | None = None

    def __len__(self) -> int:
        return len(self._encoded)

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        if self._decode is None:
            end_with_main(self._main_pid)
            self._decode = DECODERS[self._name].open()
        return number, torch.from_numpy(self._decode(self._encoded[number]))
