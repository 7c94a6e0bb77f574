"""Read segments by DALI's `fn.readers.webdataset`: a pipeline for each segment, with an index of its samples."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from nvidia.dali import fn
from nvidia.dali.pipeline import Pipeline

from dali_pipes.arrays import Int64s
from dali_pipes.graph.dali_internals import end_pipeline, keep_pipeline
from dali_pipes.reader.feed import Lines

# A reader reads on past its last line while it waits, one batch by its own queue and one by the pipeline's. These
# batches have lines of zero bytes. With none of them 1.14 to 1.47 times the bytes of a segment were read.
NUM_EMPTY_BATCHES = 4


def index_text(ordinals: Int64s, offsets: Sequence[Int64s], sizes: Sequence[Int64s]) -> str:
    """Write a DALI index, version 1.2, with one line for each sample, in this order.

    The reader does not compare an index with the archive. So components are called ``c0``, ``c1``, ... here, whatever
    their names are in the archive. The member's name, which DALI repeats in its errors, is the sample's ordinal. So the
    index holds no names with white space, which its format does not allow.

    >>> print(index_text(np.array([42]), [np.array([512]), np.array([1536])], [np.array([7]), np.array([3])]), end="")
    v1.2 1
    c0 512 7 42 c1 1536 3 42
    """
    columns = [column.tolist() for pair in zip(offsets, sizes, strict=True) for column in (*pair, ordinals)]
    line = " ".join(f"c{number} %d %d %d" for number in range(len(offsets)))
    lines = [line % values for values in zip(*columns, strict=True)]
    return "\n".join([f"v1.2 {len(ordinals)}", *lines, ""])


class WebdatasetReader:
    """Makes a pipeline for each segment; see `dali_pipes.reader.feed.SegmentReader`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def open(self, lines: Lines, *, batch_size: int) -> "WebdatasetSegment":
        empty = np.zeros(NUM_EMPTY_BATCHES * batch_size, np.int64)
        index = index_text(
            np.concatenate([lines.ordinals, empty]),
            [np.concatenate([column, empty]) for column in lines.starts],
            [np.concatenate([column, empty]) for column in lines.sizes],
        )
        return WebdatasetSegment(self._path, index, num_components=len(lines.sizes), batch_size=batch_size)

    def close(self) -> None:
        """Do nothing: the segments share nothing."""


class WebdatasetSegment:
    """A `fn.readers.webdataset` over the cache file, alone in its pipeline; see `dali_pipes.reader.feed.Segment`.

    The pipeline has an output for each component of the ``index``. ``batch_size`` must divide the number of lines: a
    reader wraps round to fill its last batch.
    """

    def __init__(self, path: str, index: str, *, num_components: int, batch_size: int) -> None:
        # A file without a name: the reader needs a path, and the file is gone when it is closed.
        index_file = os.memfd_create("dali-pipes-index", os.MFD_CLOEXEC)
        try:
            with os.fdopen(os.dup(index_file), "w", encoding="ascii") as stream:
                stream.write(index)
            # Without exec_dynamic the next run would overwrite the TensorLists that were handed on.
            self._pipeline = Pipeline(batch_size=batch_size, num_threads=1, device_id=None, exec_dynamic=True)
            with self._pipeline:
                outputs = fn.readers.webdataset(
                    paths=[path],
                    index_paths=[f"/proc/self/fd/{index_file}"],
                    ext=[f"c{number}" for number in range(num_components)],
                    missing_component_behavior="error",
                    # A mapped read of unallocated blocks allocates pages on tmpfs, and it can end in SIGBUS.
                    dont_use_mmap=True,
                )
                # One component gives a node, several a list.
                self._pipeline.set_outputs(*(outputs if isinstance(outputs, list | tuple) else [outputs]))
            self._pipeline.build()
            self._pipeline.schedule_run()  # the reader begins to read
            keep_pipeline(self._pipeline)
        finally:
            os.close(index_file)

    def read(self) -> Sequence[Any]:
        self._pipeline.schedule_run()
        return self._pipeline.outputs()  # type: ignore[no-any-return]

    def close(self) -> None:
        end_pipeline(self._pipeline)
