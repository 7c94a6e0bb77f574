"""Shards to batches by Meta's SPDL: its pipeline, threads of this process, its tar reader, decoders that drop the GIL.

Settings, of SPDL 0.8 (documentation, "Execution Models": threads in one process where the heavy stages release the GIL,
which has the least overhead; the stages in the order shown there, read, ``aggregate``, then a transform of whole
batches, one thread a core; a continuous source, so that the pipeline lives for all epochs). ``iter_tarfile`` is given a
whole shard in memory, the fastest of its ways ("Benchmark tarfile"). Shards, not samples, are shuffled, because dSort
has shuffled the samples, as in `webloader`.

SPDL's own decoder is FFmpeg's, which it finds on the machine and does not bring. Its photos are others than Pillow's:
with FFmpeg 5.1, on 120 pets, by up to 39 of 255 levels and 0.22 on average at the most accurate of three settings, and
took 3.0 to 3.9 CPU-ms each, where Pillow took 1.8 and torchvision 1.3. So both are decoded as in `webloader`, the whole
photo of each, straight into the batch, in this process's own memory.
"""

import contextlib
import io
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from spdl.io import iter_tarfile
from spdl.pipeline import PipelineBuilder, PipelineFailure

from bench.loaders import ALL_PARTS, Batch, Loader, LoaderOptions
from bench.loaders.workers import endpoint_of, open_stream, shard_urls
from bench.transforms import BatchDecoder
from dali_pipes.formats.keys import split_key

if TYPE_CHECKING:
    from spdl.pipeline import Pipeline

    from dali_pipes.store.urls import ShardSet

__all__ = ["open_loader"]

READERS = 2
"""Shards read at a time; each is in memory until its samples are decoded. The documentation's 16 to 32 are for files of
one sample."""
SINK_BATCHES = 2
"""Batches ready beyond those in the making."""
READ_BYTES = 1 << 20

Encoded = dict[str, Any]
"""A sample as WebDataset has it: ``__key__``, and the bytes of each component."""


@contextlib.contextmanager
def open_loader(shards: "ShardSet", *, options: LoaderOptions) -> Iterator[Loader]:
    """The pipeline; every sample exactly once an epoch."""
    from bench.loaders.devices import delivery_device

    # Threads side by side, each with a torch thread of its own, as in a worker process; torch would start more in each.
    num_torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    epochs = _SpdlEpochs(shards, options, device=delivery_device(options.device))
    try:
        yield epochs
    finally:
        epochs.close()
        torch.set_num_threads(num_torch_threads)


class _SpdlEpochs:
    num_workers = 0
    gives = ALL_PARTS

    def __init__(self, shards: "ShardSet", options: LoaderOptions, *, device: str) -> None:
        self._source = _ShuffledShards(shard_urls(shards), seed=options.seed)
        self._endpoint = endpoint_of(shards)
        self._options = options
        self._decode = BatchDecoder(options)
        self._open = contextlib.ExitStack()
        self._pipeline: Pipeline[Batch] | None = None
        self.decode = options.decode
        self.device = device

    def epoch(self) -> Iterator[Batch]:
        # What an epoch that was left early has in its queues is no part of this one.
        if self._pipeline is None:
            self._pipeline = self._start()
        pipeline, self._pipeline = self._pipeline, None
        try:
            yield from pipeline
        except PipelineFailure as exc:
            # It says which stage failed; the reason is below it.
            raise next((failed.__cause__ for failed in exc.exceptions if failed.__cause__), exc) from None
        self._pipeline = pipeline

    def close(self) -> None:
        """End the threads; may be called twice."""
        self._pipeline = None
        self._open.close()

    def _start(self) -> "Pipeline[Batch]":
        self._open.close()
        num_threads = self._options.num_threads
        decoders = self._open.enter_context(ThreadPoolExecutor(num_threads, thread_name_prefix="spdl-decode"))
        pipeline: Pipeline[Batch] = (
            PipelineBuilder()
            .add_source(self._source, continuous=True)
            .pipe(self._read, concurrency=READERS, output_order="input")
            .disaggregate()
            .aggregate(self._options.batch_size)
            .pipe(self._make_batch, concurrency=num_threads, executor=decoders)
            .add_sink(SINK_BATCHES)
            # By default what fails is logged and left out.
            .build(num_threads=READERS, max_failures=0)
        )
        pipeline.start()
        self._open.callback(_stop, pipeline)
        return pipeline

    def _read(self, url: str) -> list[Encoded]:
        buffer = io.BytesIO()
        with open_stream(url, endpoint=self._endpoint) as stream:
            shutil.copyfileobj(stream, buffer, READ_BYTES)
        samples: list[Encoded] = []
        # The value is no copy. With views of the stream itself, which end with it when an error in a cycle holds both,
        # its finalizer cannot close it, and Python 3.13 says so.
        for name, data in iter_tarfile(buffer.getvalue()):
            if (names := split_key(name)) is None:
                continue
            key, component = names
            if not samples or samples[-1]["__key__"] != key:
                samples.append({"__key__": key})
            samples[-1][component.lower()] = data
        return samples

    def _make_batch(self, samples: list[Encoded]) -> Batch:
        return self._decode(
            [{name: data if name == "__key__" else bytes(data) for name, data in sample.items()} for sample in samples]
        )


def _stop(pipeline: "Pipeline[Batch]") -> None:
    # What failed and was not asked for is nobody's error.
    with contextlib.suppress(PipelineFailure):
        pipeline.stop()


class _ShuffledShards:
    """The shards' URLs, in another order each time they are iterated, the same in every run."""

    def __init__(self, urls: list[str], *, seed: int) -> None:
        self._urls, self._seed = urls, seed
        self._epochs = 0

    def __iter__(self) -> Iterator[str]:
        urls = list(self._urls)
        random.Random(f"{self._seed} {self._epochs}").shuffle(urls)
        self._epochs += 1
        yield from urls
