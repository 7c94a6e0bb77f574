"""Shards, or TFRecord files, to batches by DALI's own readers: what a script has that takes nothing of `dali_pipes`.

One pipeline: reader, decoders, crop. Photo and mask go through the operators of `dali_pipes.segmentation` with the same
arguments; their sizes, which the shard indexes tell it, are read from the headers in the graph here. Samples come in
the order of the files, the same in each epoch: nothing is shuffled.

Not in the registry of loaders: what these read must be made first, see `bench.tfrecord`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.loaders import Batch, Loader, LoaderOptions
from bench.loaders.devices import delivery_device
from prep.errors import DataError
from prep.export import ENCODED, KEY, LABEL
from prep.keys import split_key

if TYPE_CHECKING:
    from prep.info import IndexedSet
    from prep.manifest import ShardIndex

__all__ = ["ReaderFiles", "open_loader", "open_reader", "webdataset_index"]

READER = "reader"
PREFETCH_QUEUE_DEPTH = 2  # dali_pipes.loader's default


@dataclass(frozen=True, kw_only=True)
class ReaderFiles:
    """What one of DALI's readers is pointed at."""

    kind: str
    """``webdataset`` or ``tfrecord``."""
    paths: Sequence[Path]
    index_paths: Sequence[Path]
    """As many."""


def webdataset_index(index: "ShardIndex") -> str:
    """A shard's index for `fn.readers.webdataset`, version 1.2, of all its components.

    Raises:
        DataError: If a name holds white space, at which that format cuts.
    """
    lines = []
    for row, key in enumerate(index.keys):
        if key.split() != [key]:
            raise DataError(f"shard '{index.shard}', key '{key}': DALI's index holds no name with white space")
        places = [(c, int(index.offsets[c][row]), int(index.sizes[c][row])) for c in index.offsets]
        lines.append(" ".join(f"{c} {offset} {size} {key}.{c}" for c, offset, size in places if offset >= 0))
    return "\n".join([f"v1.2 {len(lines)}", *lines, ""])


def write_webdataset_indexes(indexed: "IndexedSet", directory: Path) -> list[Path]:
    """`webdataset_index` of each shard, as a file in ``directory``."""
    paths = []
    for row, index in indexed.each():
        paths.append(directory / f"{row:06d}.idx")
        paths[-1].write_text(webdataset_index(index))
    return paths


@contextlib.contextmanager
def open_loader(files: ReaderFiles, *, options: LoaderOptions) -> Iterator[Loader]:
    """Read, decode and crop; each sample once an epoch."""
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    device = delivery_device(options.device)
    pipeline = _pipeline(device, options)
    with pipeline:
        photo, mask, label, key = _read(files, options)
        from nvidia.dali import fn

        image, trimap = _segmentation(photo, mask, options, device="mixed" if device == "cuda" else "cpu")
        # As tensors, rows must be of one length.
        pipeline.set_outputs(image, trimap, fn.pad(label), fn.pad(key))
    iterator = DALIGenericIterator(
        pipeline,
        ["image", "trimap", "label", "key"],
        reader_name=READER,
        auto_reset=True,
        dynamic_shape=True,
        last_batch_policy=LastBatchPolicy.PARTIAL,
        prepare_first_batch=False,
    )
    loader = _Epochs(iterator, _labels_of(files), _keys_of(files), device=device)
    try:
        yield loader
    finally:
        loader.close()
        del iterator, pipeline


class _Epochs:
    num_workers = 0
    decode = "dali"

    def __init__(
        self, iterator: Any, labels: Callable[[Any], Any], keys: Callable[[Any], list[str]], *, device: str
    ) -> None:
        self._iterator, self._labels, self._keys = iterator, labels, keys
        self.device = device

    def epoch(self) -> Iterator[Batch]:
        for (batch,) in self._iterator:
            yield {
                "image": batch["image"],
                "trimap": batch["trimap"],
                "label": self._labels(batch["label"]),
                "key": self._keys(batch["key"]),
            }

    def close(self) -> None:
        """Destroy the pipeline. Can be called twice."""
        self._iterator = None


@contextlib.contextmanager
def open_reader(files: ReaderFiles, *, options: LoaderOptions) -> Iterator[Callable[[], int]]:
    """The reader alone: a function that reads an epoch, photos, masks and labels, and returns its samples."""
    pipeline = _pipeline("cpu", options)
    with pipeline:
        photo, mask, label, _ = _read(files, options)
        pipeline.set_outputs(photo, mask, label)
    pipeline.build()
    num_samples = int(pipeline.reader_meta(READER)["epoch_size"])

    def epoch() -> int:
        # The last batch is padded with its last sample: that many are read, too few to matter.
        for _ in range(-(-num_samples // options.batch_size)):
            pipeline.run()
        return num_samples

    yield epoch


def _pipeline(device: str, options: LoaderOptions) -> Any:
    import torch
    from nvidia.dali.pipeline import Pipeline

    return Pipeline(
        batch_size=options.batch_size,
        num_threads=options.num_threads,
        device_id=None if device == "cpu" else torch.cuda.current_device(),
        prefetch_queue_depth=PREFETCH_QUEUE_DEPTH,
        exec_dynamic=True,
    )


def _read(files: ReaderFiles, options: LoaderOptions) -> tuple[Any, Any, Any, Any]:
    """Photo, mask, label and key, each as the reader gives it."""
    from nvidia.dali import fn, tfrecord

    paths = [str(path) for path in files.paths]
    places: dict[str, Any] = {
        "index_paths" if files.kind == "webdataset" else "index_path": list(map(str, files.index_paths))
    }
    if files.kind == "webdataset":
        photo, mask, label = fn.readers.webdataset(
            paths=paths,
            ext=[options.photo, options.mask, "cls"],
            missing_component_behavior="error",
            pad_last_batch=True,
            name=READER,
            **places,
        )
        return photo, mask, label, fn.get_property(photo, key="source_info")
    of_bytes = tfrecord.FixedLenFeature((), tfrecord.string, "")
    read = fn.readers.tfrecord(
        path=paths,
        features={
            ENCODED: of_bytes,
            options.mask: of_bytes,
            LABEL: tfrecord.FixedLenFeature([1], tfrecord.int64, -1),
            KEY: of_bytes,
        },
        pad_last_batch=True,
        name=READER,
        **places,
    )
    return read[ENCODED], read[options.mask], read[LABEL], read[KEY]


def _segmentation(photo: Any, mask: Any, options: LoaderOptions, *, device: str) -> tuple[Any, Any]:
    """`dali_pipes.segmentation`, its arrays computed by operators."""
    from nvidia.dali import fn, math, types

    from dali_pipes.graph.pipelines import IMAGENET_MEAN, IMAGENET_STD, _normalised

    def window_of(encoded: Any, **normalised: Any) -> Any:
        size = fn.peek_image_shape(encoded, dtype=types.INT32, adjust_orientation=False)[0:2]
        # As `dali_pipes.graph.pipelines.center_crop_start`: half of what is more, halves to even; padding is half of
        # what is less, rounded down.
        slack = math.max(size - options.crop, 0)
        half = slack // 2
        start = half + (slack & 1) * (half & 1)
        shape = math.min(size, options.crop)
        deficit = options.crop - shape
        position = fn.cast(deficit // 2, dtype=types.FLOAT) / math.max(deficit, 1)
        pixels = fn.decoders.image_slice(
            encoded,
            start,
            shape,
            axes=(0, 1),
            device=device,
            output_type=types.RGB if normalised["dtype"] == "float32" else types.GRAY,
            adjust_orientation=False,
        )
        return _normalised(pixels, options.crop, position, layout="CHW", **normalised)

    return (
        window_of(photo, mean=IMAGENET_MEAN, std=IMAGENET_STD, dtype="float32"),
        window_of(mask, mean=(0,), std=(1,), dtype="uint8"),
    )


def _labels_of(files: ReaderFiles) -> Callable[[Any], Any]:
    """From the reader's labels, padded, to int64 [B]."""
    import torch

    if files.kind == "tfrecord":
        return lambda labels: labels.reshape(-1)
    return lambda digits: torch.tensor([int(_text(row)) for row in digits.numpy()])


def _keys_of(files: ReaderFiles) -> Callable[[Any], list[str]]:
    """From what names a sample, padded: the key, or where the photo lies, ``PATH:OFFSET:KEY.COMPONENT``."""
    if files.kind == "tfrecord":
        return lambda rows: [_text(row) for row in rows.numpy()]
    starts = tuple(f"{path}:" for path in files.paths)

    def key_of(text: str) -> str:
        start = next(start for start in starts if text.startswith(start))
        names = split_key(text[len(start) :].partition(":")[2])
        assert names is not None, "our index names members of samples"
        return names[0]

    return lambda rows: [key_of(_text(row)) for row in rows.numpy()]


def _text(row: Any) -> str:
    return bytes(row).rstrip(b"\0").decode()
