"""Batches to a data set: a loader as torch's ``DataLoader`` reads it and torchdata's ``StatefulDataLoader`` resumes it.

Both hand whole batches through: ``batch_size=None, num_workers=0``. Workers would be of no use: the loader has threads
of its own, and a worker that uses it is told so.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

if TYPE_CHECKING:
    from dali_pipes.iterator import Loader

__all__ = ["LoaderDataset"]


class LoaderDataset(IterableDataset[dict[str, Any]]):
    """The batches of a loader, as plain dicts. Made by `Loader.as_dataset`.

    Each time it is iterated it gives what is left of the loader's epoch, after the end the next one: see `Loader`. Of a
    loader that was opened with ``state=`` that is what is left there; ``load_state_dict`` to the same place costs
    nothing more.

    >>> from torchdata.stateful_dataloader import StatefulDataLoader  # doctest: +SKIP
    >>> batches = StatefulDataLoader(loader.as_dataset(), batch_size=None, num_workers=0)  # doctest: +SKIP
    """

    def __init__(self, loader: "Loader") -> None:
        super().__init__()
        self._loader = loader
        # Whether the next iteration is that of an epoch that was over when its state was taken.
        self._is_over = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # torchdata iterates a finished state's data set twice and draws from the second iterator only: by then the
        # epoch that was over is done with.
        is_over, self._is_over = self._is_over, False
        return iter(()) if is_over else self._loader.as_dicts()

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """The loader's: see `Loader.state_dict`."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken: the next iteration gives what was left of that epoch.

        After the last batch that is nothing: as in the job that goes on, one empty iteration ends the epoch, and the
        one after it is the next epoch's.

        Raises:
            StateError: If the state is of other shards or another order; the loader goes on as it was.
        """
        self._loader.load_state_dict(state)
        self._is_over = self._loader.num_batches_left == 0
