"""What a segment is to its reader: lines to read, in batches.

There are two readers. `dali_pipes.reader.aio_reader` reads a batch with one system call into memory that is used again.
`dali_pipes.reader.webdataset` runs DALI's `fn.readers.webdataset`. `dali_pipes.reader.opening` chooses one of them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


class Lines(NamedTuple):
    """The places of a segment's samples in the cache file; one line a sample, in the order of the batches."""

    ordinals: Int64s
    """int64 [N]."""
    starts: Sequence[Int64s]
    """For each component, int64 [N]: the first byte of each sample's."""
    sizes: Sequence[Int64s]
    """For each component, int64 [N]: bytes; 0 where a sample lacks the component."""


class Segment(Protocol):
    """Some lines that are read in batches, in order."""

    def read(self) -> Sequence[Any]:
        """Read the next batch.

        Returns:
            For each component a sequence of uint8 arrays [bytes], one a sample: a TensorListCPU or an `EncodedBatch`.
        """

    def close(self) -> None:
        """Wait until nothing is read any more. Can be called twice. Batches that were read stay as they are."""


class SegmentReader(Protocol):
    """Opens the segments of one loader."""

    def open(self, lines: Lines, *, batch_size: int) -> Segment:
        """Open a segment, and begin to read its first batch. ``batch_size`` divides the number of lines."""

    def close(self) -> None:
        """Free what is shared by all segments, which are closed. Can be called twice."""
