"""A loader for torch's ``DataLoader``, and for torchdata's ``StatefulDataLoader``, which resumes it.

Both pass whole batches through: ``batch_size=None, num_workers=0``. Workers would not help: the loader has its own
threads, and cannot be used in a worker.
"""

import sys
from collections.abc import Iterator
from types import FrameType

from torch.utils.data import DataLoader, IterableDataset

from dali_pipes.graph.definition import BatchDict
from dali_pipes.integrations.data_loader import LoaderBatches

# Classes that give the batches of rank 0's data set to all ranks, or each rank a part of the batches of its own.
_DEALERS = {"DataLoaderDispatcher", "IterableDatasetShard"}
_WAY_OUT = (
    "give the trainer loader.as_dataloader() instead, which it leaves alone: see docs/how-to/trainers.md; or keep this "
    "DataLoader out of prepare()"
)


class LoaderDataset(IterableDataset[BatchDict]):
    """The batches of a loader, as plain dicts. Made by `Loader.as_dataset`.

    Each iteration gives the next epoch, also after `break`. So a program that takes one batch first, as Keras and
    Lightning's sanity check do, then trains on all samples. If the loader was opened with ``state=``, the first
    iteration gives the rest of that state's epoch; a ``load_state_dict`` to the same position then does no further
    work. ``set_epoch``, ``state_dict`` and ``load_state_dict`` are those of `LoaderBatches`.

    Raises:
        TypeError: While iterating: if the ``DataLoader`` has a ``batch_size``, and would stack batches.
        RuntimeError: While iterating: if several ranks have loaders of their own, and Accelerate or Transformers would
            deal out the batches of one of them.

    >>> from torchdata.stateful_dataloader import StatefulDataLoader  # doctest: +SKIP
    >>> batches = StatefulDataLoader(loader.as_dataset(), batch_size=None, num_workers=0)  # doctest: +SKIP
    """

    def __init__(self, batches: LoaderBatches) -> None:
        super().__init__()
        self._batches, self.set_epoch = batches, batches.set_epoch
        self.state_dict, self.load_state_dict = batches.state_dict, batches.load_state_dict

    def __iter__(self) -> Iterator[BatchDict]:
        self._check_callers(sys._getframe(1))
        batches = iter(self._batches)
        batches.is_announced = False
        return batches

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self._batches)

    def _check_callers(self, frame: FrameType | None) -> None:
        """Refuse a data loader that stacks batches, or that deals the batches of one rank to others.

        No object says what iterates a data set, so the running functions ``__iter__`` are asked. Others are not: to
        look at a function's variables keeps them alive until it ends (before Python 3.13), also those that it deletes.
        """
        num_ranks = self._batches.delivery.parts.batching.process.world_size
        while frame is not None:
            caller = frame.f_locals.get("self") if frame.f_code.co_name == "__iter__" else None
            if isinstance(caller, DataLoader) and caller.batch_size is not None:
                raise TypeError(
                    f"DataLoader(batch_size={caller.batch_size}) would stack whole batches; pass "
                    "DataLoader(loader.as_dataset(), batch_size=None, num_workers=0)"
                )
            if num_ranks > 1 and type(caller).__name__ in _DEALERS:
                raise RuntimeError(
                    f"{type(caller).__module__}.{type(caller).__name__} would deal the batches of one rank to all, and "
                    f"each of the {num_ranks} ranks has a loader of its own: samples would be lost; {_WAY_OUT}"
                )
            frame = frame.f_back
