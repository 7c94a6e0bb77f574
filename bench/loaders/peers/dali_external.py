"""Load with ``fn.external_source``: Python streams the tars in a worker process, and DALI decodes.

Settings, for DALI 2.4 (user guide, "Parallel External Source", and the arguments of ``fn.external_source``): an
iterable of batches with ``batch=True, parallel=True``. DALI runs it in one worker process, whatever ``py_num_workers``
says, because a stream cannot be asked for the n-th sample as the callables that several workers share can be. DALI's
tutorial prefers those callables (the sample mode). In a tar that is read front to back, from a bucket over one
connection, the n-th sample cannot be found without an index (`dali-s3` uses one). One worker is enough: it cuts tars,
while DALI decodes with one thread for each core. ``prefetch_queue_depth`` batches are read ahead into shared memory;
``bytes_per_sample_hint`` avoids growing it.

In a rank without CUDA the worker is forked ("Parallel External Source - Fork"): all its libraries are loaded there, and
none of their threads runs. With CUDA, and in a command's own process, which has threads, the worker is spawned, and its
imports take about 0.4 s.

Shards are shuffled and samples are not, because dSort has shuffled the samples, as in `webloader`.
"""

import contextlib
import itertools
import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.loaders.encoded import (
    ShuffledNames,
    components_of,
    encoded_samples,
    open_stream,
    shard_urls,
)
from bench.loaders.protocol import BenchLoader, LoaderOptions
from bench.tools.processes import end_with_main
from dali_pipes.store.shard_set import ShardSet

SOURCE_PREFETCH = 4
"""Batches that the worker reads ahead."""
BYTES_PER_SAMPLE = 256 << 10
"""Shared memory for one component of one sample; it grows if necessary."""

Encoded = npt.NDArray[np.uint8]


def open_loader(shards: ShardSet, *, options: LoaderOptions) -> contextlib.AbstractContextManager[BenchLoader]:
    """Open one worker that streams and one pipeline that decodes; each sample comes once an epoch."""
    from nvidia.dali import fn

    from bench.loaders.peers.plain_dali import PlainEpochs, decoded_outputs, padded_keys, plain_pipeline

    device = options.delivery_device
    pipeline = plain_pipeline(device, options, py_num_workers=1, py_start_method=start_method(device))
    source = ShardBatches(shard_urls(shards), endpoint=shards.store.endpoint, options=options)
    with pipeline:
        photo, *masks, label, key = source_nodes(source, options)
        decoded = decoded_outputs(photo, next(iter(masks), None), options, device=device)
        # The rows of a tensor must have one length.
        pipeline.set_outputs(*decoded, label, fn.pad(key))
    return contextlib.closing(
        PlainEpochs(
            pipeline,
            options=options,
            labels=lambda labels: labels.reshape(-1),
            keys=padded_keys,
            num_workers=1,
            # The source ends an epoch, and its last batch may be short.
            size=-1,
        )
    )


def source_nodes(source: "ShardBatches", options: LoaderOptions) -> list[Any]:
    """Return the nodes of photo, mask if the recipe takes it, label and key."""
    from nvidia.dali import fn, types

    num_encoded = 1 if options.mask is None else 2
    nodes: list[Any] = fn.external_source(
        source=source,
        num_outputs=num_encoded + 2,
        batch=True,
        parallel=True,
        cycle="raise",
        prefetch_queue_depth=SOURCE_PREFETCH,
        bytes_per_sample_hint=BYTES_PER_SAMPLE,
        dtype=[*[types.UINT8] * num_encoded, types.INT64, types.UINT8],
        ndim=[*[1] * num_encoded, 0, 1],
    )
    return nodes


def start_method(device: str) -> str:
    # A rank is a child of multiprocessing, forked from a server that has started no thread.
    return "fork" if device == "cpu" and multiprocessing.parent_process() is not None else "spawn"


class ShardBatches:
    """The encoded samples of shards, in batches; each epoch has the shards in another order.

    It runs in a worker process, so it must be picklable.
    """

    def __init__(self, urls: list[str], *, endpoint: str | None, options: LoaderOptions) -> None:
        self._urls, self._endpoint, self._options = ShuffledNames(urls, seed=options.seed), endpoint, options
        self._main_pid = os.getpid()

    def __iter__(self) -> Iterator[tuple[list[Any], ...]]:
        """Batches of photos, masks if the recipe takes them, labels and keys, as arrays: uint8 [bytes], uint8 [bytes],
        int64, uint8 [letters].
        """
        if os.getpid() != self._main_pid:
            end_with_main(self._main_pid)  # DALI's worker outlives a main process that is killed
            self._main_pid = os.getpid()
        samples = itertools.chain.from_iterable(map(self._samples, self._urls))
        while batch := list(itertools.islice(samples, self._options.batch_size)):
            yield tuple(map(list, zip(*batch, strict=True)))

    def _samples(self, url: str) -> Iterator[tuple[npt.NDArray[Any], ...]]:
        with open_stream(url, endpoint=self._endpoint) as stream:
            for sample in encoded_samples(stream, shard=url):
                photo, mask, label, key = components_of(sample, self._options, shard=url)
                encoded = [_array(data) for data in (photo, mask) if data is not None]
                yield *encoded, np.array(label, np.int64), _array(key.encode())


def _array(data: bytes) -> Encoded:
    return np.frombuffer(data, np.uint8)
