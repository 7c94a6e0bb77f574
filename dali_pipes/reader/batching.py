"""Deal each step's samples to the ranks."""

from collections.abc import Iterator
from dataclasses import dataclass

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
