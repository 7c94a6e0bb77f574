"""Make the ranks of a turn take their steps together, as the exchange of gradients makes data-parallel training do."""

import contextlib
import threading
from multiprocessing.context import ForkServerContext
from multiprocessing.synchronize import Barrier
from typing import NamedTuple


class Pace(NamedTuple):
    """Two barriers of all ranks; it is sent to their processes when these start.

    DLIO has the same: a barrier after each step (argonne-lcf/dlio_benchmark 2.0.0, ``dlio_benchmark/main.py``,
    ``_train``). There all ranks have the same number of steps. Here loaders may cut a rank's last batches otherwise, so
    ranks wait for each other until the first one has no more batches.
    """

    starts: Barrier
    steps: Barrier

    @classmethod
    def of(cls, num_ranks: int, context: ForkServerContext) -> "Pace | None":
        """Return the pace of this many ranks; ``None`` if a single one waits for nobody."""
        return cls(context.Barrier(num_ranks), context.Barrier(num_ranks)) if num_ranks > 1 else None

    def begin_epoch(self) -> None:
        """Wait until all ranks begin an epoch."""
        if self.starts.wait() == 0:
            self.steps.reset()
        self.starts.wait()

    def end_step(self) -> None:
        """Wait until all ranks have taken the step, if all are still in their epoch."""
        with contextlib.suppress(threading.BrokenBarrierError):
            self.steps.wait()

    def end_epoch(self) -> None:
        """Let the other ranks take their last steps alone."""
        self.steps.abort()
