"""Load with Meta's SPDL: its pipeline in threads of this process, its tar reader, and decoders that release the GIL.

Settings, for SPDL 0.8 (documentation, "Execution Models"): threads in one process; the stages in the order shown
there, read, ``aggregate``, then a transform of whole batches, one thread for each core. An aggregator of our own cuts a
shard's list into batches, for samples cost more where they pass the queues one by one. The source is continuous, so
that the pipeline lives for all epochs, unless there is only one. ``iter_tarfile`` is given a whole shard in memory, the
fastest of its ways ("Benchmark tarfile"). Stages have their own concurrency, as "Migration from Grain" advises: a
bucket is read by as many threads as our loader has for it (`NUM_FETCHERS`). Shards are shuffled and samples are not, as
in `webloader`.

SPDL's own decoder is FFmpeg, which must be installed on the machine, took twice the CPU time of Pillow, and gives other
pixels. So photos are decoded as in `webloader`, straight into the batch, in memory of this process that is used again.
"""

import contextlib
import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from spdl.io import iter_tarfile
from spdl.pipeline import PipelineBuilder, PipelineFailure
from spdl.pipeline.defs import Aggregator

from bench.loaders.encoded import KEY, EncodedSample, ShuffledNames, fetched, shard_urls
from bench.loaders.protocol import BenchBatch, BenchLoader, LoaderOptions
from bench.loaders.transforms import BatchDecoder
from dali_pipes.fetch.fetcher import NUM_FETCHERS
from dali_pipes.formats.names import split_key
from dali_pipes.store.shard_set import ShardSet

if TYPE_CHECKING:
    from spdl.pipeline import Pipeline


SINK_BATCHES = 2


@contextlib.contextmanager
def open_loader(shards: ShardSet, *, options: LoaderOptions) -> Iterator[BenchLoader]:
    """Every sample comes exactly once an epoch."""
    source = ShuffledNames(shard_urls(shards), seed=options.seed)
    ready: Pipeline[BenchBatch] | None = None

    def epoch() -> Iterator[BenchBatch]:
        # After an epoch that was left early, batches are in the pipeline's queues; so the next epoch starts a new one.
        nonlocal ready
        if ready is None:
            threads.close()
            ready = _start(source, shards, options, threads)
        pipeline, ready = ready, None
        try:
            yield from pipeline
        except PipelineFailure as exc:
            # The failure names only the stage; its cause is the error.
            raise next((failed.__cause__ for failed in exc.exceptions if failed.__cause__), exc) from None
        ready = pipeline if options.keeps_shards else None

    # One torch thread in each decoding thread, as in a worker process; by default torch starts more.
    num_torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with contextlib.ExitStack() as threads:
            yield BenchLoader(epoch, options=options)
    finally:
        torch.set_num_threads(num_torch_threads)


def _start(
    source: ShuffledNames, shards: ShardSet, options: LoaderOptions, threads: contextlib.ExitStack
) -> "Pipeline[BenchBatch]":
    """Start a pipeline, which `threads` ends."""
    num_readers = options.num_threads if shards.store.directory is not None else max(options.num_threads, NUM_FETCHERS)
    decoders = threads.enter_context(ThreadPoolExecutor(options.num_threads, thread_name_prefix="spdl-decode"))
    pipeline: Pipeline[BenchBatch] = (
        PipelineBuilder()
        .add_source(source, continuous=options.keeps_shards)
        # Each thread reads a whole shard, which stays in memory until its samples are decoded.
        .pipe(functools.partial(_read, endpoint=shards.store.endpoint), concurrency=num_readers, output_order="input")
        .aggregate(_Batches(options.batch_size))
        .disaggregate()
        .pipe(BatchDecoder(options), concurrency=options.num_threads, executor=decoders)
        .add_sink(SINK_BATCHES)
        # By default the library logs failures and leaves out their samples.
        .build(num_threads=num_readers, max_failures=0)
    )
    pipeline.start()
    threads.callback(_stop, pipeline)
    return pipeline


class _Batches(Aggregator):  # type: ignore[misc]  # has no types
    """Cuts lists of samples into lists of whole batches; the last batch of an epoch may be short."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._left: list[EncodedSample] = []

    def accumulate(self, samples: list[EncodedSample]) -> list[list[EncodedSample]] | None:
        self._left += samples
        size, whole = self._batch_size, len(self._left) // self._batch_size
        batches = [self._left[number * size : (number + 1) * size] for number in range(whole)]
        self._left = self._left[whole * size :]
        return batches or None

    def flush(self) -> list[list[EncodedSample]] | None:
        left, self._left = self._left, []
        return [left] if left else None


def _read(url: str, *, endpoint: str | None) -> list[EncodedSample]:
    with fetched(url, endpoint=endpoint) as stream:
        shard = stream.read()
    samples: list[EncodedSample] = []
    for name, data in iter_tarfile(shard):
        if (names := split_key(name)) is None:
            continue
        key, component = names
        if not samples or samples[-1][KEY] != key:
            samples.append({KEY: key})
        samples[-1][component.lower()] = data
    return samples


def _stop(pipeline: "Pipeline[BenchBatch]") -> None:
    # A failure in a batch that was not requested is not reported.
    with contextlib.suppress(PipelineFailure):
        pipeline.stop()
