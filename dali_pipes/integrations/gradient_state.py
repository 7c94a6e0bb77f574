"""Tell Accelerate which batch is an epoch's last one, as its own data loaders do.

Accelerate asks the data loader that gave the batch. After an epoch's last batch it applies the gradients, although
``gradient_accumulation_steps`` batches are not complete, and ``gather_for_metrics`` drops what repeats samples. A data
loader that it did not make says nothing, and both would be wrong without an error.
"""

import functools
import sys
from collections.abc import Sized
from typing import Any, Protocol

from torch import distributed

from dali_pipes.processes.ranks import GIVEN, Rank


class Announcement(Protocol):
    """One iteration of a data loader, in Accelerate's eyes."""

    def announce(self, *, is_last: bool) -> None:
        """Say before each batch that it is the next one, and whether it is the last."""

    def end(self) -> None:
        """Say that the iteration is over."""


def make_announcement(dataset: Sized, *, batch_size: int, process: Rank, drop_last: bool) -> Announcement | None:
    """Return what tells Accelerate of an iteration; ``None`` if the program has not imported Accelerate.

    Args:
        dataset: Its length is the number of samples of the epoch, over all ranks.
        batch_size: Samples of a step on one rank.
        process: The loader's rank.
        drop_last: Whether every step has as many samples.

    Raises:
        RuntimeError: If the loader has found several ranks, and Accelerate has not joined the processes.
    """
    if "accelerate.data_loader" not in sys.modules:
        return None
    from accelerate.state import PartialState, is_initialized

    is_found = process.world_size > 1 and process.source != GIVEN
    if is_found and is_initialized() and PartialState().num_processes == 1 and not distributed.is_initialized():
        raise RuntimeError(
            f"the loader is of one of {process.world_size} ranks, and Accelerate knows of one process: each would "
            "train a model of its own on a part of the samples; on CPUs pass Accelerator(cpu=True) or "
            "TrainingArguments(use_cpu=True)"
        )
    announcement: Announcement = _announcement_class()(dataset, batch_size * process.world_size, drop_last)
    return announcement


@functools.cache
def _announcement_class() -> Any:
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.state import GradientState

    class DataLoaderAnnouncement(DataLoaderStateMixin):  # type: ignore[misc]
        """``begin`` computes the remainder from these attributes, and registers this object; ``end`` removes it."""

        def __init__(self, dataset: Sized, global_batch_size: int, drop_last: bool) -> None:
            self.dataset, self.total_batch_size, self._drop_last = dataset, global_batch_size, drop_last
            self.gradient_state = GradientState()

        def announce(self, *, is_last: bool) -> None:
            # Anew for each batch: the newest one counts, and a loop that another loop left early is not the newest.
            self.end()
            self.begin()
            self.end_of_dataloader = is_last

    return DataLoaderAnnouncement
