"""The loaders of ``bench feed``, and the data that they read: each gives sizes of photos, and labels; none decodes.

All but ``preadv`` have the same graph, ``fn.peek_image_shape`` of photo and mask, and the label. ``preadv`` makes the
system calls for the same rows in the same order as ours, into a buffer that is used again, and nothing else: the limit.
It is a Python loop, which costs some 1 us a call.
"""

import contextlib
import functools
import io
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from bench.loaders.encoded import shard_urls
from bench.loaders.peers.dali_readers import ReaderFiles, keys_of, reader_nodes, write_webdataset_indexes
from bench.loaders.peers.plain_dali import ShardBatches, padded_keys, plain_pipeline, source_nodes, start_method
from bench.loaders.protocol import LoaderOptions
from bench.tools.repeat import repeat_shards
from dali_pipes.errors import DataError
from dali_pipes.formats.names import LABEL_COMPONENT
from dali_pipes.store.shard_set import ShardSet
from prep.index import index_shards
from prep.inspect.indexed_set import IndexedSet

NUM_SHARDS = 8
Array = npt.NDArray[Any]
Batch = Mapping[str, Any]
"""``label``, int64 [B]; for each component, int64 [B, 2 or more]: height, width and further numbers; ``key``, B texts.
Without keys, sizes may be left out."""
Epoch = Callable[[], Iterator[Batch]]


class FeedData(NamedTuple):
    """The shards that all loaders read, and the places of their components."""

    shards: ShardSet
    cache: Path
    index_paths: Sequence[Path]
    """The index of each shard for DALI's reader."""
    keys: Sequence[str]
    labels: Array
    """int64 [samples]"""
    shard: Array
    """int64 [samples], the number of each sample's shard."""
    offsets: Mapping[str, Array]
    """Component -> int64 [samples], bytes from the shard's start."""
    sizes: Mapping[str, Array]
    """Component -> int64 [samples], bytes."""


def copied(
    shards: ShardSet, *, num_samples: int | None, components: Sequence[str], new_folder: Callable[[], Path]
) -> FeedData:
    """Copy samples into indexed local shards; they are repeated up to ``num_samples``."""
    num_shards = None if num_samples is None else min(NUM_SHARDS, num_samples)
    written = repeat_shards(
        shards, directory=new_folder(), num_samples=num_samples, num_shards=num_shards, option="--cache"
    )
    index_shards(written)
    indexed = IndexedSet(written)
    found = [index for _, index in indexed.each()]
    for index, name in itertools.product(found, (*components, LABEL_COMPONENT)):
        if name not in index.offsets or (index.offsets[name] < 0).any():
            raise DataError(
                f"shard '{index.shard}': a sample has no component '{name}' (found: {', '.join(index.offsets)}); "
                "name the components: --photo, --mask, or leave masks out: --masks without"
            )
    return FeedData(
        shards=written,
        cache=new_folder(),
        index_paths=write_webdataset_indexes(indexed, new_folder()),
        keys=[key for index in found for key in index.keys],
        labels=np.concatenate([np.asarray(index.labels) for index in found]),
        shard=np.repeat(np.arange(len(found)), [index.num_samples for index in found]),
        offsets={name: np.concatenate([index.offsets[name] for index in found]) for name in components},
        sizes={name: np.concatenate([index.sizes[name] for index in found]) for name in components},
    )


def size_of(data: bytes) -> tuple[int, int]:
    """Height and width of a photo or mask, as Pillow reads them from its header."""
    with Image.open(io.BytesIO(data)) as image:
        return image.height, image.width


@dataclass(frozen=True, kw_only=True)
class FeedOptions:
    """What a loader gives, and with how many threads."""

    components: Sequence[str]
    """The photo, and the mask if it is taken."""
    batch_size: int
    passes: int
    num_threads: int
    seed: int
    preadv_threads: int = 1
    order: Array | None = None
    """int64 [samples of an epoch], the rows in the order of our loader, for `open_preadv`."""
    keys: bool = False
    """Give the keys, too, to compare outputs."""

    @property
    def plain(self) -> LoaderOptions:
        """The options of plain DALI pipelines."""
        photo, mask = (*self.components, None)[:2]
        return LoaderOptions(
            recipe="encoded" if mask is None else "segmentation",
            photo=str(photo),
            mask=mask,
            batch_size=self.batch_size,
            num_threads=self.num_threads,
            seed=self.seed,
            device="cpu",
        )


@contextlib.contextmanager
def open_ours(data: FeedData, options: FeedOptions) -> Iterator[Epoch]:
    import dali_pipes as dp

    def graph(components: Any, random: Any) -> dict[str, Any]:
        outputs = {name: _peeked(components[name]) for name in options.components}
        return {**outputs, "label": components.label}

    with dp.loader(
        shard_urls(data.shards),
        graph,
        batch_size=options.batch_size,
        seed=options.seed,
        last_batch_policy="PARTIAL",
        device="cpu",
        select=dp.Select(epoch_samples=len(data.keys) * options.passes),
        cache=dp.Cache(directory=data.cache, show_progress=False),
        decode=dp.Decode(threads=options.num_threads),
        outputs=dp.Outputs(keys=options.keys),
    ) as loader:
        yield lambda: (batch for (batch,) in loader)


@contextlib.contextmanager
def open_webdataset(data: FeedData, options: FeedOptions, *, mapped: bool = False) -> Iterator[Epoch]:
    """Open DALI's reader over the whole shards, in their order; after the last sample it goes on with the first.

    ``mapped``: the reader's default form. It maps the shards, and only the photos' headers are touched here.
    """
    from nvidia.dali import fn

    files = ReaderFiles(paths=shard_urls(data.shards), index_paths=data.index_paths)
    pipeline = plain_pipeline("cpu", options.plain)
    with pipeline:
        photo, mask, label, key = reader_nodes(files, options.plain, pad_last_batch=False, dont_use_mmap=not mapped)
        _set_outputs(pipeline, [photo, mask], fn.pad(label), key, options)
    num_batches = -(-len(data.keys) * options.passes // options.batch_size)
    key_of = keys_of(files)

    def epoch() -> Iterator[Batch]:
        for _ in range(num_batches):
            batch = _batch(pipeline.run(), options)
            digits = np.ascontiguousarray(batch["label"])
            batch["label"] = digits.view(f"S{digits.shape[1]}").ravel().astype(np.int64)
            if options.keys:
                batch["key"] = key_of(batch["key"])
            yield batch

    yield epoch


@contextlib.contextmanager
def open_external(data: FeedData, options: FeedOptions) -> Iterator[Epoch]:
    """Open an external source: one worker process streams the tars, as `dali-external` does."""
    source = ShardBatches(shard_urls(data.shards) * options.passes, endpoint=None, options=options.plain)
    pipeline = plain_pipeline("cpu", options.plain, py_num_workers=1, py_start_method=start_method("cpu"))
    with pipeline:
        photo, *mask, label, key = source_nodes(source, options.plain)
        _set_outputs(pipeline, [photo, *mask], label, key, options)

    def epoch() -> Iterator[Batch]:
        with contextlib.suppress(StopIteration):
            while True:
                batch = _batch(pipeline.run(), options)
                if options.keys:
                    batch["key"] = padded_keys(batch["key"])
                yield batch
        pipeline.reset()

    yield epoch


@contextlib.contextmanager
def open_preadv(data: FeedData, options: FeedOptions) -> Iterator[Epoch]:
    """Open the loop of system calls; each thread has one buffer for a whole batch."""
    assert options.order is not None, "the rows to read"
    cuts = range(0, len(options.order), options.batch_size)
    batches = [options.order[start : start + options.batch_size] for start in cuts]
    num = len(options.components)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(Path(path).open("rb")).fileno() for path in shard_urls(data.shards)]

        def calls_for(rows: Array) -> list[tuple[int, int, int]]:
            """File, size and offset of each system call for a batch: the components of one sample after another."""
            columns = (data.sizes, data.offsets)
            sizes, offsets = (np.stack([column[name][rows] for name in options.components], 1) for column in columns)
            numbers = data.shard[rows].repeat(num).tolist()
            located = zip(numbers, sizes.ravel().tolist(), offsets.ravel().tolist(), strict=True)
            return [(files[number], size, offset) for number, size, offset in located]

        calls = [calls_for(rows) for rows in batches]
        longest = max(sum(size for _, size, _ in batch) for batch in calls)
        buffers: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(options.preadv_threads):
            buffers.put(memoryview(bytearray(longest)))

        def read(number: int) -> Batch:
            buffer, end = buffers.get(), 0
            for file, size, offset in calls[number]:
                start, end = end, end + size
                os.preadv(file, (buffer[start:end],), offset)
            rows = batches[number]
            batch: dict[str, Any] = {"label": data.labels[rows]}
            if options.keys:
                ends = itertools.accumulate(size for _, size, _ in calls[number])
                parts = zip(ends, (size for _, size, _ in calls[number]), strict=True)
                found = [size_of(bytes(buffer[end - size : end])) for end, size in parts]
                batch |= {name: np.array(found[at::num]) for at, name in enumerate(options.components)}
                batch["key"] = [data.keys[row] for row in rows]
            buffers.put(buffer)
            return batch

        if options.preadv_threads == 1:
            yield lambda: map(read, range(len(batches)))
        else:
            pool = stack.enter_context(ThreadPoolExecutor(options.preadv_threads))
            yield lambda: pool.map(read, range(len(batches)))


def _peeked(encoded: Any) -> Any:
    """The node of height, width and channels, read from the header by DALI."""
    from nvidia.dali import fn

    return fn.peek_image_shape(encoded, adjust_orientation=False)


def _set_outputs(pipeline: Any, encoded: Sequence[Any], label: Any, key: Any, options: FeedOptions) -> None:
    """Make the sizes of the encoded components, the label and, if it is asked for, the key a pipeline's outputs."""
    from nvidia.dali import fn

    sizes = [_peeked(node) for node in encoded if node is not None]
    pipeline.set_outputs(*sizes, label, *([fn.pad(key)] if options.keys else []))
    pipeline.build()


def _batch(outputs: Sequence[Any], options: FeedOptions) -> dict[str, Any]:
    names = [*options.components, "label", *(["key"] if options.keys else [])]
    return {name: np.asarray(output.as_tensor()) for name, output in zip(names, outputs, strict=True)}


SUBJECTS: Mapping[str, Callable[[FeedData, FeedOptions], contextlib.AbstractContextManager[Epoch]]] = {
    "dali-pipes": open_ours,
    "dali-webdataset": functools.partial(open_webdataset, mapped=True),
    "dali-webdataset-read": open_webdataset,
    "external-source": open_external,
    "preadv": open_preadv,
}
