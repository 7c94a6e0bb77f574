"""Load tar shards or TFRecord files with DALI's own readers, like a script that does not use `dali_pipes`.

One pipeline has reader, decoders and crop (`plain_dali`). Samples come in the order of the files in each epoch: nothing
is shuffled.

The registry does not list this loader: its files must be made first, see `bench.scenarios.tfrecord`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.loaders.peers.plain_dali import (
    PlainEpochs,
    decoded_outputs,
    padded_keys,
    padded_text,
    plain_pipeline,
)
from bench.loaders.protocol import BenchLoader, LoaderOptions
from bench.tools.tfrecords import ENCODED, KEY, LABEL
from dali_pipes.errors import DataError
from dali_pipes.formats.names import split_key

if TYPE_CHECKING:
    from dali_pipes.formats.shard_index import ShardIndex
    from prep.inspect.indexed_set import IndexedSet


READER = "reader"


@dataclass(frozen=True, kw_only=True)
class ReaderFiles:
    """The files that one of DALI's readers reads."""

    kind: str
    """``webdataset`` or ``tfrecord``."""
    paths: Sequence[Path | str]
    """Paths, or URLs if the reader takes them."""
    index_paths: Sequence[Path]
    """One for each of ``paths``."""
    prefetch_queue_depth: int = 1
    """Batches that the reader keeps ready; DALI's default."""


def webdataset_index(index: "ShardIndex") -> str:
    """Return a shard's index of all its components for `fn.readers.webdataset`, version 1.2.

    Raises:
        DataError: If a name contains white space, which separates the fields of that format.
    """
    lines = []
    for row, key in enumerate(index.keys):
        if key.split() != [key]:
            raise DataError(f"shard '{index.shard}', key '{key}': DALI's index cannot hold a name with white space")
        places = [(c, int(index.offsets[c][row]), int(index.sizes[c][row])) for c in index.offsets]
        lines.append(" ".join(f"{c} {offset} {size} {key}.{c}" for c, offset, size in places if offset >= 0))
    return "\n".join([f"v1.2 {len(lines)}", *lines, ""])


def write_webdataset_indexes(indexed: "IndexedSet", directory: Path) -> list[Path]:
    """Write the `webdataset_index` of each shard to a file in ``directory``."""
    paths = []
    for row, index in indexed.each():
        paths.append(directory / f"{row:06d}.idx")
        paths[-1].write_text(webdataset_index(index))
    return paths


def open_loader(files: ReaderFiles, *, options: LoaderOptions) -> contextlib.AbstractContextManager[BenchLoader]:
    """Read, decode and crop; each sample comes once an epoch."""
    from nvidia.dali import fn

    device = options.delivery_device
    pipeline = plain_pipeline(device, options)
    with pipeline:
        photo, mask, label, key = _read(files, options)
        decoded = decoded_outputs(photo, mask, options, device=device)
        # The rows of a tensor must have one length.
        pipeline.set_outputs(*decoded, fn.pad(label), fn.pad(key))
    return contextlib.closing(
        PlainEpochs(pipeline, options=options, labels=_labels_of(files), keys=_keys_of(files), reader_name=READER)
    )


@contextlib.contextmanager
def open_reader(files: ReaderFiles, *, options: LoaderOptions) -> Iterator[Callable[[], int]]:
    """Open the reader alone: a function that reads photos, masks and labels of an epoch, and counts the samples."""
    pipeline = plain_pipeline("cpu", options)
    with pipeline:
        photo, mask, label, _ = _read(files, options)
        pipeline.set_outputs(photo, *([] if mask is None else [mask]), label)
    pipeline.build()
    num_samples = int(pipeline.reader_meta(READER)["epoch_size"])

    def epoch() -> int:
        # The last batch is padded with its last sample; the additional reads are too few to matter.
        for _ in range(-(-num_samples // options.batch_size)):
            pipeline.run()
        return num_samples

    yield epoch


def _read(files: ReaderFiles, options: LoaderOptions) -> tuple[Any, Any, Any, Any]:
    """Photo, mask (``None`` if the recipe takes none), label and key, as the reader returns them."""
    from nvidia.dali import fn, tfrecord

    paths = [str(path) for path in files.paths]
    index_paths = [str(path) for path in files.index_paths]
    if files.kind == "webdataset":
        photo, *masks, label = fn.readers.webdataset(
            paths=paths,
            ext=[options.photo, *masks_of(options), "cls"],
            missing_component_behavior="error",
            pad_last_batch=True,
            prefetch_queue_depth=files.prefetch_queue_depth,
            name=READER,
            index_paths=index_paths,
        )
        return photo, next(iter(masks), None), label, fn.get_property(photo, key="source_info")
    of_bytes = tfrecord.FixedLenFeature((), tfrecord.string, "")
    read = fn.readers.tfrecord(
        path=paths,
        features={
            ENCODED: of_bytes,
            **dict.fromkeys(masks_of(options), of_bytes),
            LABEL: tfrecord.FixedLenFeature([1], tfrecord.int64, -1),
            KEY: of_bytes,
        },
        pad_last_batch=True,
        name=READER,
        index_path=index_paths,
    )
    mask = next((read[name] for name in masks_of(options)), None)
    return read[ENCODED], mask, read[LABEL], read[KEY]


def masks_of(options: LoaderOptions) -> list[str]:
    """The mask's component, or none."""
    return [] if options.mask is None else [options.mask]


def _labels_of(files: ReaderFiles) -> Callable[[Any], Any]:
    """Return the function that converts the reader's padded labels to int64 [B]."""
    import torch

    if files.kind == "tfrecord":
        return lambda labels: labels.reshape(-1)
    return lambda digits: torch.tensor([int(padded_text(row)) for row in digits.numpy()])


def _keys_of(files: ReaderFiles) -> Callable[[Any], list[str]]:
    """Return the function that converts padded names, keys or ``PATH:OFFSET:KEY.COMPONENT``, to keys."""
    if files.kind == "tfrecord":
        return padded_keys
    starts = tuple(f"{path}:" for path in files.paths)

    def key_of(text: str) -> str:
        start = next(start for start in starts if text.startswith(start))
        names = split_key(text[len(start) :].partition(":")[2])
        assert names is not None, "our index names members of samples"
        return names[0]

    return lambda rows: [key_of(text) for text in padded_keys(rows)]
