"""A loader for torch's ``DataLoader``, and for torchdata's ``StatefulDataLoader``, which resumes it.

Both pass whole batches through: ``batch_size=None, num_workers=0``. Workers would not help: the loader has its own
threads, and cannot be used in a worker.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch.utils.data import IterableDataset


class LoaderLike(Protocol):
    """The part of a `dali_pipes.iterator.Loader` that the classes in this folder use; that module imports them."""

    output_map: Sequence[str]

    @property
    def added_outputs(self) -> Sequence[str]: ...
    @property
    def epoch(self) -> int: ...
    @property
    def num_batches_left(self) -> int: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> "LoaderLike": ...
    def __next__(self) -> list[dict[str, Any]]: ...
    def next_batch(self, form: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> dict[str, Any]: ...
    def close(self) -> None: ...
    def reset(self) -> None: ...
    def set_epoch(self, epoch: int) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class DictBatches(Iterator[dict[str, Any]]):
    """The rest of a loader's epoch, from the first ``next`` on, as plain dicts. Made by `Loader.as_dicts`."""

    def __init__(self, loader: LoaderLike) -> None:
        self._loader = loader
        self._has_begun = self._is_over = False

    def __len__(self) -> int:
        """Batches of the loader's whole epoch."""
        return len(self._loader)

    def __next__(self) -> dict[str, Any]:
        if self._is_over:
            raise StopIteration  # and not the next epoch's first batch
        if not self._has_begun:
            iter(self._loader)
            self._has_begun = True
        try:
            return self._loader.next_batch()
        except StopIteration:
            self._is_over = True
            raise


class LoaderDataset(IterableDataset[dict[str, Any]]):
    """The batches of a loader, as plain dicts. Made by `Loader.as_dataset`.

    Each iteration gives the rest of the loader's epoch, and after its end the next epoch: see `Loader`. If the loader
    was opened with ``state=``, the first iteration gives the rest of that state's epoch; a ``load_state_dict`` to the
    same position then does no further work.

    >>> from torchdata.stateful_dataloader import StatefulDataLoader  # doctest: +SKIP
    >>> batches = StatefulDataLoader(loader.as_dataset(), batch_size=None, num_workers=0)  # doctest: +SKIP
    """

    def __init__(self, loader: LoaderLike) -> None:
        super().__init__()
        self._loader = loader
        # Whether the next iteration is of an epoch that was over when its state was taken.
        self._is_over = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # torchdata iterates a finished state's data set twice and draws from the second iterator only; so the epoch
        # that was over ends when the first iterator is made.
        is_over, self._is_over = self._is_over, False
        return iter(()) if is_over else DictBatches(self._loader)

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state: see `Loader.state_dict`."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken: the next iteration gives the rest of that epoch.

        If the state was taken after the last batch, the next iteration is empty and ends the epoch, as in a job that
        was not interrupted. The iteration after it is the next epoch's.

        Raises:
            StateError: If the state is of other shards or another order; the loader continues as before.
        """
        self._loader.load_state_dict(state)
        self._is_over = self._loader.num_batches_left == 0
