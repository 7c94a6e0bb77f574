"""Decode with DALI's own operators, in plain pipelines like those of a script that does not use `dali_pipes`.

Photo and mask are decoded only in the window that the crop keeps (``fn.decoders.image_slice``), then normalised or
padded by ``fn.crop_mirror_normalize``. ``fn.decoders.image_crop`` refuses a window that is larger than the photo, and
rounds the start differently than ``CenterCrop``, so a photo's size is read from its header here.

``dali-external`` loads with ``fn.external_source``: Python streams the tars in a worker process. Settings, for DALI 2.4
(user guide, "Parallel External Source"): an iterable of batches with ``batch=True, parallel=True``, which DALI runs in
one worker process. DALI's tutorial prefers callables that several workers share, but in a tar that is read front to
back the n-th sample cannot be found without an index (`dali-s3` uses one). One worker is enough: it cuts tars, while
DALI decodes with one thread for each core. In a rank without CUDA the worker is forked: all its libraries are loaded
there, and none of their threads runs. Otherwise it is spawned, and its imports take about 0.4 s. While the worker cuts
one shard, it fetches the next ones, as many at a time as our loader (`NUM_FETCHERS`). Shards are shuffled and samples
are not, as in `webloader`.
"""

import contextlib
import functools
import itertools
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from bench.loaders.encoded import ShuffledNames, components_of, encoded_samples, fetched, shard_urls
from bench.loaders.protocol import BenchBatch, BenchLoader, LoaderOptions
from bench.loaders.recipe import NUM_CROPS, WHOLE, crop_table
from bench.tools.processes import end_with_main
from dali_pipes.fetch.fetcher import NUM_FETCHERS
from dali_pipes.store.shard_set import ShardSet

if TYPE_CHECKING:
    from torch import Tensor


PREFETCH_QUEUE_DEPTH = 2  # DALI's default
MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)  # ImageNet, of levels
STD = (0.229 * 255, 0.224 * 255, 0.225 * 255)
SOURCE_PREFETCH = 4
SHARDS_AHEAD = NUM_FETCHERS - 1
BYTES_PER_SAMPLE = 256 << 10
"""Shared memory for one component of one sample; it grows if necessary."""


def plain_pipeline(device: str, options: LoaderOptions, **arguments: Any) -> Any:
    """Make an empty pipeline with the settings that all loaders share, and further ``arguments`` of ``Pipeline``."""
    import torch
    from nvidia.dali.pipeline import Pipeline

    from dali_pipes.graph.dali_internals import pool_host_memory

    pool_host_memory()  # as our loader has it
    return Pipeline(
        batch_size=options.batch_size,
        num_threads=options.num_threads,
        device_id=None if device == "cpu" else torch.cuda.current_device(),
        prefetch_queue_depth=PREFETCH_QUEUE_DEPTH,
        exec_dynamic=True,
        **arguments,
    )


def decoded_outputs(photo: Any, mask: Any | None, options: LoaderOptions, *, device: str) -> list[Any]:
    """Convert encoded photo and mask to the image and mask of a `BenchBatch`; without a mask, to the image.

    The encoded recipe's photos stay as they are.
    """
    if options.recipe == "encoded":
        return [photo]
    if mask is None:
        make = _evaluation_image if options.recipe == "evaluation" else _classification_image
        return [make(photo, options, device=device)]
    from nvidia.dali import fn, math, types

    def window_of(encoded: Any, output_type: Any) -> Any:
        size = fn.peek_image_shape(encoded, dtype=types.INT32, adjust_orientation=False)[0:2]
        slack = math.max(size - options.crop, 0)
        return fn.decoders.image_slice(
            encoded,
            (slack + (slack // 2 & 1)) // 2,  # half of it, halves to even, as Python's round() in CenterCrop
            math.min(size, options.crop),
            axes=(0, 1),
            device="mixed" if device == "cuda" else "cpu",
            output_type=output_type,
            adjust_orientation=False,
        )

    crop: dict[str, Any] = {
        "crop": (options.crop, options.crop),
        "out_of_bounds_policy": "pad",
        "rounding": "truncate",  # the odd row or column of padding comes last, as in CenterCrop
        "output_layout": "CHW",
    }
    image = fn.crop_mirror_normalize(
        window_of(photo, types.RGB),
        # The operator does not normalise padding; these are the normalised values of a pixel of 0.
        fill_values=0 if options.dtype == "uint8" else [-mean / std for mean, std in zip(MEAN, STD, strict=True)],
        **values_of(options),
        **crop,
    )
    return [image, fn.crop_mirror_normalize(window_of(mask, types.GRAY), dtype=types.UINT8, **crop)]


def _classification_image(photo: Any, options: LoaderOptions, *, device: str) -> Any:
    from nvidia.dali import fn, math, types

    # The arithmetic of `bench.loaders.recipe.crops_of`, in whole numbers.
    size = fn.peek_image_shape(photo, dtype=types.INT64, adjust_orientation=False)[0:2]
    crop = types.Constant(crop_table())[photo.shape(dtype=types.INT64)[0] & (NUM_CROPS - 1)]
    pixels = fn.decoders.image_slice(
        photo,
        fn.cast(crop[0:2] * size // WHOLE, dtype=types.INT32),
        fn.cast(math.max(crop[2:4] * size // WHOLE, 1), dtype=types.INT32),
        axes=(0, 1),
        device="mixed" if device == "cuda" else "cpu",
        output_type=types.RGB,
        adjust_orientation=False,
    )
    return fn.crop_mirror_normalize(
        fn.resize(pixels, size=(options.crop, options.crop), interp_type=types.INTERP_LINEAR, antialias=True),
        mirror=fn.cast(crop[4], dtype=types.INT32),
        output_layout="CHW",
        **values_of(options),
    )


def _evaluation_image(photo: Any, options: LoaderOptions, *, device: str) -> Any:
    from nvidia.dali import fn, math, types

    # Sizes and offsets of torchvision's Resize and CenterCrop; DALI's own round otherwise.
    size = fn.peek_image_shape(photo, dtype=types.INT64, adjust_orientation=False)[0:2]
    resized = size * options.resize // math.min(size[0], size[1])
    slack = resized - options.crop
    start = fn.cast((slack + (slack // 2 & 1)) // 2, dtype=types.FLOAT)
    # Decode and resize what the crop keeps, and about it as many pixels as the filter reaches.
    scale = fn.cast(size, dtype=types.FLOAT) / fn.cast(resized, dtype=types.FLOAT)
    begin, end, reach = start * scale, (start + options.crop) * scale, math.max(scale, 1.0) + 1.0
    first = fn.cast(math.max(math.floor(begin - reach), 0.0), dtype=types.INT32)
    behind = math.min(fn.cast(math.ceil(end + reach), dtype=types.INT32), fn.cast(size, dtype=types.INT32))
    pixels = fn.decoders.image_slice(
        photo,
        first,
        behind - first,
        axes=(0, 1),
        device="mixed" if device == "cuda" else "cpu",
        output_type=types.RGB,
        adjust_orientation=False,
    )
    return fn.crop_mirror_normalize(
        fn.resize(
            pixels,
            size=(options.crop, options.crop),
            roi_start=begin - first,
            roi_end=end - first,
            interp_type=types.INTERP_LINEAR,
            antialias=True,
        ),
        output_layout="CHW",
        **values_of(options),
    )


def values_of(options: LoaderOptions) -> dict[str, Any]:
    """Return the arguments of ``fn.crop_mirror_normalize`` for normalised images, or for pixels as they are."""
    from nvidia.dali import types

    return {"dtype": types.UINT8} if options.dtype == "uint8" else {"dtype": types.FLOAT, "mean": MEAN, "std": STD}


@contextlib.contextmanager
def opened_pipeline(
    pipeline: Any,
    outputs: Sequence[Any],
    *,
    options: LoaderOptions,
    labels: "Callable[[Tensor], Tensor]",
    keys: "Callable[[Tensor], list[str]]",
    num_workers: int = 0,
    **arguments: Any,
) -> Iterator[BenchLoader]:
    """Open a loader over one pipeline with the outputs image, mask if there is one, label and key; it is destroyed with
    it. Encoded photos are joined into one tensor in the pipeline, before the training asks for them, as in our loader.

    ``labels`` converts the pipeline's labels to int64 [B], ``keys`` its keys to texts. ``arguments`` of
    ``DALIGenericIterator`` determine the length of an epoch.
    """
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIRaggedIterator

    from dali_pipes.graph.dali_internals import end_pipeline, keep_pipeline
    from dali_pipes.graph.finish import Packed, finish_packed

    is_encoded, joined = options.recipe == "encoded", None
    with pipeline:
        if is_encoded:
            joined, numbers = finish_packed(outputs[0])
            outputs = [numbers, *outputs[1:]]
        pipeline.set_outputs(*outputs)
    names = ["encoded" if is_encoded else "image", *(["mask"] if options.mask is not None else []), "label", "key"]
    iterator = DALIRaggedIterator(
        pipeline,
        names,
        output_types=[DALIRaggedIterator.DENSE_TAG] * len(names),
        auto_reset=True,
        dynamic_shape=True,
        last_batch_policy=LastBatchPolicy.PARTIAL,
        prepare_first_batch=False,
        **arguments,
    )
    is_inside = False

    def epoch() -> Iterator[BenchBatch]:
        nonlocal is_inside
        if is_inside:  # DALI resets only at the end of an epoch, so the rest of the epoch is read
            with contextlib.suppress(StopIteration):
                while True:
                    (batch,) = next(iterator)
                    if joined is not None:
                        joined.take(batch["encoded"])
        is_inside = True
        for (batch,) in iterator:
            batch["label"], batch["key"] = labels(batch["label"]), keys(batch["key"])
            if joined is not None:
                tensor, lengths = joined.take(batch["encoded"])
                lengths = lengths[: len(batch["key"])]  # without the padding of the last batch
                tensor = tensor[: sum(lengths)].to(options.delivery_device, non_blocking=True)
                packed = Packed(tensor, lengths)
                batch |= {"encoded": packed.tensor, "cu_seqlens": packed.offsets()}
            yield batch
        is_inside = False

    keep_pipeline(pipeline)
    try:
        with contextlib.closing(BenchLoader(epoch, options=options, decode="dali", num_workers=num_workers)) as loader:
            yield loader
    finally:
        end_pipeline(pipeline)


def padded_keys(rows: Any) -> list[str]:
    """The texts of a tensor or array uint8 [B, length]."""
    return [padded_text(row) for row in np.asarray(rows)]


def padded_text(row: Any) -> str:
    """The text of a row of bytes, without the zeros that pad it."""
    return bytes(row).rstrip(b"\0").decode()


def open_external(shards: ShardSet, *, options: LoaderOptions) -> contextlib.AbstractContextManager[BenchLoader]:
    """Open one worker that reads the shards and one pipeline that decodes. An epoch yields each sample once."""
    from nvidia.dali import fn

    device = options.delivery_device
    pipeline = plain_pipeline(device, options, py_num_workers=1, py_start_method=start_method(device))
    source = ShardBatches(shard_urls(shards), endpoint=shards.store.endpoint, options=options)
    with pipeline:
        photo, *masks, label, key = source_nodes(source, options)
        decoded = decoded_outputs(photo, next(iter(masks), None), options, device=device)
        outputs = [*decoded, label, fn.pad(key)]  # the rows of a tensor must have one length
    return opened_pipeline(
        pipeline,
        outputs,
        options=options,
        labels=lambda labels: labels.reshape(-1),
        keys=padded_keys,
        num_workers=1,
        size=-1,  # the source ends an epoch, and its last batch may be short
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
        self._has_begun = False

    def __iter__(self) -> Iterator[tuple[list[Any], ...]]:
        """Batches of photos, masks if the recipe takes them, labels and keys, as arrays: uint8 [bytes], uint8 [bytes],
        int64, uint8 [letters].
        """
        if os.getpid() != self._main_pid:
            end_with_main(self._main_pid)  # DALI's worker outlives a main process that is killed
            self._main_pid = os.getpid()
        if self._has_begun and not self._options.keeps_shards:
            return  # only one epoch is asked for, but DALI has the next one begin at once
        self._has_begun = True
        samples = itertools.chain.from_iterable(self._shards())
        while batch := list(itertools.islice(samples, self._options.batch_size)):
            yield tuple(map(list, zip(*batch, strict=True)))

    def _shards(self) -> Iterator[Iterator[tuple[npt.NDArray[Any], ...]]]:
        """The samples of each shard; the next shards are fetched meanwhile."""
        opened = functools.partial(fetched, endpoint=self._endpoint)
        with ThreadPoolExecutor(SHARDS_AHEAD) as pool:
            urls = iter(self._urls)
            ahead = deque((url, pool.submit(opened, url)) for url in itertools.islice(urls, SHARDS_AHEAD))
            while ahead:
                url, stream = ahead.popleft()
                ahead.extend((url, pool.submit(opened, url)) for url in itertools.islice(urls, 1))
                yield self._samples(url, stream.result())

    def _samples(self, url: str, opened: BinaryIO) -> Iterator[tuple[npt.NDArray[Any], ...]]:
        with opened as stream:
            for sample in encoded_samples(stream, shard=url):
                photo, mask, label, key = components_of(sample, self._options, shard=url)
                encoded = [np.frombuffer(data, np.uint8) for data in (photo, mask, key.encode()) if data is not None]
                yield *encoded[:-1], np.array(label, np.int64), encoded[-1]
