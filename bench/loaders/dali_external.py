"""Shards to batches by ``fn.external_source``: Python streams the tars in a worker process, DALI decodes.

Settings, of DALI 2.4 (user guide, "Parallel External Source", and the arguments of ``fn.external_source``): an iterable
of batches with ``batch=True, parallel=True``, which DALI runs in one worker process, whatever ``py_num_workers`` says:
what streams cannot be asked for the n-th sample, as the callables that several workers share are. DALI's tutorial
calls those, the sample mode, the preferred way; a tar that is read front to back, from a bucket over one connection,
has no n-th sample without an index of it, and that is `dali-s3`'s way. One worker is enough: it cuts tars, DALI's
threads, one a core, decode. ``prefetch_queue_depth`` batches are read ahead into shared memory,
``bytes_per_sample_hint`` spares growing it.

The worker is forked ("Parallel External Source - Fork") in a rank that has no CUDA: all its libraries are loaded there,
and no thread of theirs runs. Beside CUDA, and in a command's own process, which has threads, it is spawned, and imports
for some 0.4 s.

Shards, not samples, are shuffled, because dSort has shuffled the samples, as in `webloader`.
"""

import contextlib
import multiprocessing
import os
import random
import tarfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from bench.loaders import Loader, LoaderOptions
from bench.loaders.workers import end_with_main, endpoint_of, open_stream, shard_urls
from dali_pipes.errors import DataError
from dali_pipes.formats.keys import split_key

if TYPE_CHECKING:
    from dali_pipes.store.urls import ShardSet

__all__ = ["ShardBatches", "open_loader"]

SOURCE_PREFETCH = 4
"""Batches that the worker reads ahead."""
BYTES_PER_SAMPLE = 256 << 10
"""Shared memory for one component of one sample; more is made where it is not enough."""

Encoded = npt.NDArray[np.uint8]


@contextlib.contextmanager
def open_loader(shards: "ShardSet", *, options: LoaderOptions) -> Iterator[Loader]:
    """One worker that streams, one pipeline that decodes; each sample once an epoch."""
    from nvidia.dali import fn, types
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    from bench.loaders.devices import delivery_device
    from bench.loaders.plain_dali import PlainEpochs, padded_text, plain_pipeline, segmentation_outputs

    device = delivery_device(options.device)
    source = ShardBatches(shard_urls(shards), endpoint=endpoint_of(shards), options=options)
    pipeline = plain_pipeline(device, options, py_num_workers=1, py_start_method=_start_method(device))
    with pipeline:
        photo, mask, label, key = fn.external_source(
            source=source,
            num_outputs=4,
            batch=True,
            parallel=True,
            cycle="raise",
            prefetch_queue_depth=SOURCE_PREFETCH,
            bytes_per_sample_hint=BYTES_PER_SAMPLE,
            dtype=[types.UINT8, types.UINT8, types.INT64, types.UINT8],
            ndim=[1, 1, 0, 1],
        )
        image, trimap = segmentation_outputs(photo, mask, options, device=device)
        # As a tensor, rows must be of one length.
        pipeline.set_outputs(image, trimap, label, fn.pad(key))
    iterator = DALIGenericIterator(
        pipeline,
        ["image", "trimap", "label", "key"],
        auto_reset=True,
        dynamic_shape=True,
        # The source says when an epoch ends, and its last batch is as short as it is.
        size=-1,
        last_batch_policy=LastBatchPolicy.PARTIAL,
        prepare_first_batch=False,
    )
    loader = PlainEpochs(
        iterator,
        labels=lambda labels: labels.reshape(-1),
        keys=lambda rows: [padded_text(row) for row in rows.numpy()],
        device=device,
        num_workers=1,
    )
    try:
        yield loader
    finally:
        loader.close()
        del iterator, pipeline


def _start_method(device: str) -> str:
    # A child of multiprocessing's, as ranks are: forked from a server that has started no thread.
    return "fork" if device == "cpu" and multiprocessing.parent_process() is not None else "spawn"


class ShardBatches:
    """The samples of shards, still encoded, in batches; iterated once an epoch, in another order of the shards each.

    Can be pickled: it runs in a worker process.

    Args:
        urls: Paths, or URLs such as ``ais://pets/shuffled-000000.tar``.
        endpoint: The cluster's, for URLs.
        options: For the batch size, the components' names and the seed.
    """

    def __init__(self, urls: list[str], *, endpoint: str | None, options: LoaderOptions) -> None:
        self._urls, self._endpoint, self._options = urls, endpoint, options
        self._main_pid = os.getpid()
        self._epoch = 0

    def __iter__(self) -> Iterator[tuple[list[Any], ...]]:
        """Batches of photos, masks, labels and keys, as arrays: uint8 [bytes], uint8 [bytes], int64, uint8 [letters].

        Raises:
            DataError: If a sample lacks a component, or its label is no number.
        """
        if not self._epoch and os.getpid() != self._main_pid:
            end_with_main(self._main_pid)  # DALI's worker outlives a main process that is killed
        urls = list(self._urls)
        random.Random(f"{self._options.seed} {self._epoch}").shuffle(urls)
        self._epoch += 1
        batch: list[tuple[Encoded, Encoded, npt.NDArray[np.int64], Encoded]] = []
        for url in urls:
            for sample in self._samples(url):
                batch.append(sample)
                if len(batch) == self._options.batch_size:
                    yield tuple(map(list, zip(*batch, strict=True)))
                    batch = []
        if batch:
            yield tuple(map(list, zip(*batch, strict=True)))

    def _samples(self, url: str) -> Iterator[tuple[Encoded, Encoded, npt.NDArray[np.int64], Encoded]]:
        current, members = "", dict[str, bytes]()
        with self._open(url) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                names = split_key(member.name) if member.isfile() else None
                if names is None:
                    continue
                key, component = names
                if key != current and members:
                    yield self._sample(url, current, members)
                    members = {}
                current = key
                file = archive.extractfile(member)
                assert file is not None, "a regular member has bytes"
                members[component] = file.read()
        if members:
            yield self._sample(url, current, members)

    def _open(self, url: str) -> BinaryIO:
        return open_stream(url, endpoint=self._endpoint)

    def _sample(
        self, url: str, key: str, members: dict[str, bytes]
    ) -> tuple[Encoded, Encoded, npt.NDArray[np.int64], Encoded]:
        for name in (self._options.photo, self._options.mask, "cls"):
            if name not in members:
                raise DataError(
                    f"shard '{url}', key '{key}': no component '{name}' (found: {', '.join(sorted(members))})"
                )
        try:
            label = int(members["cls"])
        except ValueError as exc:
            raise DataError(f"shard '{url}', key '{key}': cls must be a number, got {members['cls'][:40]!r}") from exc
        photo, mask, text = (
            np.frombuffer(data, np.uint8)
            for data in (members[self._options.photo], members[self._options.mask], key.encode())
        )
        return photo, mask, np.array(label, np.int64), text
