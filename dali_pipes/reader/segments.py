"""Which samples a rank's batches take, and the segments of lines in which a reader reads them.

There are two readers. `dali_pipes.reader.aio_reader` reads a batch with one system call into memory that is used again.
`dali_pipes.reader.webdataset` runs DALI's `fn.readers.webdataset`. `dali_pipes.reader.aio_reader.open_reader` chooses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from dali_pipes.arrays import Int64s
from dali_pipes.order.plan import LastBatchPolicyName, Plan, Step
from dali_pipes.processes.ranks import Rank


@dataclass(frozen=True, kw_only=True)
class Batching:
    """Batch size, rank and last-batch policy."""

    batch_size: int
    """Samples in a batch of one rank."""
    process: Rank
    last_batch_policy: LastBatchPolicyName = "PARTIAL"

    @property
    def global_batch_size(self) -> int:
        """Samples of one step over all ranks."""
        return self.batch_size * self.process.world_size

    def num_steps(self, plan: Plan, *, start: int = 0) -> int:
        """Count the steps of an epoch from position ``start`` on; see `dali_pipes.order.plan.Plan.num_steps`."""
        return plan.num_steps(
            start=start, global_batch_size=self.global_batch_size, last_batch_policy=self.last_batch_policy
        )

    def position(self, plan: Plan, num_steps: int, *, start: int = 0) -> int:
        """Return the position after some steps from ``start`` on; see `dali_pipes.order.plan.Plan.position`."""
        return plan.position(
            num_steps,
            start=start,
            global_batch_size=self.global_batch_size,
            last_batch_policy=self.last_batch_policy,
        )

    def position_of(self, plan: Plan, num_used: int, *, start: int = 0) -> int:
        """Return the position after some samples from ``start`` on; see `dali_pipes.order.plan.Plan.position_of`."""
        return plan.position_of(
            num_used,
            start=start,
            global_batch_size=self.global_batch_size,
            last_batch_policy=self.last_batch_policy,
        )

    def lanes_of(self, plan: Plan) -> list[int]:
        """List the lanes from which the rank takes samples; see `dali_pipes.order.plan.Plan.lanes_of`."""
        return plan.lanes_of(batch_size=self.batch_size, rank=self.process.rank, world_size=self.process.world_size)

    def steps_of(self, plan: Plan, *, start: int) -> Iterator[Step]:
        """Yield the batches of the rank; see `dali_pipes.order.plan.Plan.steps`."""
        return plan.steps(
            batch_size=self.batch_size,
            rank=self.process.rank,
            world_size=self.process.world_size,
            last_batch_policy=self.last_batch_policy,
            start=start,
        )


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
