"""The ``sampler``, ``batch_sampler`` and ``dataset`` of a loader's face for trainers.

Trainers ask them for lengths, and name epochs through them. Samples cannot be had by number: a loader reads whole
batches in its own order. So ``batch_sampler`` gives tokens instead of numbers, and ``dataset`` takes such tokens only.
Together they serve Accelerate's ``skip_first_batches``, which leaves out the first tokens and puts the rest into a new
``DataLoader``; the batches of these first tokens are then not read.
"""

import dataclasses
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from torch.utils.data import Dataset

if TYPE_CHECKING:
    from dali_pipes.integrations.data_loader import Iteration, LoaderBatches

_log = logging.getLogger(__name__)

_USE = "iterate what as_dataloader() gave, and do not let a trainer prepare, split or shuffle it"


@dataclasses.dataclass(frozen=True, eq=False)
class BatchToken:
    """A batch, by its number in an iteration."""

    iteration: "Iteration"
    number: int

    def __iter__(self) -> NoReturn:
        """Refuse: what splits batches among ranks looks into them."""
        raise TypeError(f"a batch of a loader has no sample numbers to split among ranks; {_USE}")

    __len__ = __iter__

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Become a text in a worker process, which the data set refuses there: an error while pickling would hang."""
        return str, ("a batch of the process that has the loader",)


class TokenSampler:
    """Counts samples or batches, and gives a token for each batch."""

    def __init__(self, face: "LoaderBatches", *, counts: Literal["samples", "batches"]) -> None:
        self._face, self._counts = face, counts

    @property
    def batch_size(self) -> int:
        """Samples in a batch of one rank."""
        return self._face.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether a last batch that is not full is left out."""
        return self._face.drop_last

    def __len__(self) -> int:
        """Batches of an epoch, or samples of an epoch on one rank.

        Samples are counted as torch's ``DistributedSampler`` does, the same on every rank: 31 samples on two ranks are
        16 on each, also where the second rank has only 15. Under ``DROP`` they are those of the whole batches.
        """
        face = self._face
        if self._counts == "batches":
            return len(face)
        if face.drop_last:
            return len(face) * face.batch_size
        return -(-face.num_samples // face.loader.parts.batching.process.world_size)

    def set_epoch(self, epoch: int) -> None:
        """Have the next iteration give this epoch: see `LoaderBatches.set_epoch`."""
        self._face.set_epoch(epoch)

    def __iter__(self) -> Iterator[BatchToken]:
        if self._counts == "samples":
            raise TypeError(f"the samples of a loader have no numbers to draw; {_USE}")
        return self._tokens()

    def _tokens(self) -> Iterator[BatchToken]:
        iteration = iter(self._face)
        num_batches, number = self._face.num_batches_to_come(), 0
        while number < num_batches:
            yield BatchToken(iteration, number)
            number += 1
        if num_batches and not iteration.has_begun:
            _log.warning(
                "all %d batches of an epoch were skipped: batch_sampler was gone through, dataset not asked", number
            )
            iteration.begin(skip=num_batches)
        if iteration.has_begun:
            next(iteration, None)  # the loader sees the epoch's end


class TokenDataset(Dataset[Any]):
    """Counts samples over all ranks, and gives the batch of a token."""

    def __init__(self, face: "LoaderBatches") -> None:
        self._face = face

    def __len__(self) -> int:
        """Samples of an epoch over all ranks."""
        return self._face.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Have the next iteration give this epoch: see `LoaderBatches.set_epoch`."""
        self._face.set_epoch(epoch)

    def state_dict(self, num_samples: int | None = None, from_beginning: bool = True) -> dict[str, Any]:
        """Return the position of the job: see `LoaderBatches.state_dict`."""
        return self._face.state_dict(num_samples, from_beginning)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken: see `LoaderBatches.load_state_dict`."""
        self._face.load_state_dict(state)

    def __getitem__(self, index: Any) -> NoReturn:
        """Refuse: samples have no numbers."""
        raise TypeError(f"a loader gives whole batches in its own order, and no sample {index!r}; {_USE}")

    def __getitems__(self, token: Any) -> Any:
        """Return the batch of a token of ``batch_sampler``, as torch's ``DataLoader`` asks for it."""
        if not isinstance(token, BatchToken):
            raise TypeError(f"a loader gives whole batches in its own order, and no samples {token!r}; {_USE}")
        iteration = token.iteration
        if not iteration.has_begun:
            iteration.begin(skip=token.number)
        if iteration.num_taken != token.number:
            raise RuntimeError(
                f"batch {token.number} was asked for, and batch {iteration.num_taken} comes next: the batches of "
                f"batch_sampler were dealt out or shuffled; {_USE}"
            )
        iteration.num_taken += 1
        return next(iteration)
