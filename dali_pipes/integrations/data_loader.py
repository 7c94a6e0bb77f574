"""A loader for trainers: an object that they take for a data loader, and neither reshard nor replace; and a data set.

Trainers iterate a data loader once an epoch, name the epoch, save a state and load it. The position is the loader's
own; `LoaderBatches` adds the epoch that ``set_epoch`` named, and which of its iterators is the newest.

What the first batch of a new iterator is, with the loader in epoch e:

==========================================  ========================  ================  ================
the loader                                  ``each_iter="next"``      ``"rest"``        ``"same"``
==========================================  ========================  ================  ================
has given no batch of epoch e               the first of epoch e      the same          the same
was put in mid-epoch by a state             the rest of epoch e       the same          the same
was put at the end of epoch e by a state    none, and e is over       the same          the same
has given a batch, and is in mid-epoch      the first of epoch e + 1  the rest of e     the first of e
has given the last batch, or seen the end   the first of epoch e + 1  the same          the first of e
==========================================  ========================  ================  ================

``set_epoch(n)`` comes before this table: the first of epoch n, except in its first three lines if n is e.

This is decided when an iterator is asked for its first batch, not when it is made: some trainers name the epoch or load
the state afterwards. A state says what the next batch will be: when the loop has seen the end of epoch e, or the next
iterator is made, it is a state of epoch e + 1.

Trainers ask ``sampler``, ``batch_sampler`` and ``dataset`` for lengths, and name epochs through them. Samples cannot be
had by number: a loader reads whole batches in its own order. So ``batch_sampler`` gives tokens instead of numbers, and
``dataset`` takes such tokens only. Together they serve Accelerate's ``skip_first_batches``, which leaves out the first
tokens and puts the rest into a new ``DataLoader``; the batches of these first tokens are then not read.
"""

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TypeAlias

from torch import distributed
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dali_pipes.arguments import as_integer, check_choice
from dali_pipes.delivery import Delivery, Use, alone, iterated_elsewhere
from dali_pipes.graph.definition import LABEL_OUTPUT, BatchDict, label_advice
from dali_pipes.processes.ranks import GIVEN

_log = logging.getLogger(__name__)

EachIter: TypeAlias = Literal["next", "rest", "same"]
OutputNames: TypeAlias = Sequence[str] | Mapping[str, str] | None

# Data loaders of other packages that lose batches: of Accelerate, Transformers and fastai; of Accelerate and Ray Train.
_DEALERS = {"DataLoaderDispatcher", "IterableDatasetShard", "DistributedDL"}
_AHEAD = {"DataLoaderDispatcher", "DataLoaderShard", "_WrappedDataLoader"}
_USE = "iterate what as_dataloader() gave, and do not let a trainer prepare, split or shuffle it"


class LoaderBatches:
    """The batches of a loader for a trainer. Made by `Loader.as_dataloader`, which says what the arguments mean.

    It is no ``torch.utils.data.DataLoader``: each rank has a loader of its own, and a trainer that dealt the batches of
    one rank to all would lose those of the others.
    """

    num_workers = 0
    pin_memory = False
    prefetch_factor = None  # as torch has it without workers

    def __init__(self, delivery: Delivery, *, outputs: OutputNames, each_iter: EachIter) -> None:
        check_choice("each_iter", each_iter, EachIter)
        self.delivery = delivery
        self._outputs, self._each_iter = outputs, each_iter
        self._named_epoch: int | None = None  # by set_epoch, until an iterator begins
        self._same_epoch: int | None = None
        # A token stands for the newest iterator. A reference to the iterator would be a cycle, and a loader that the
        # program has dropped would stay open.
        self._newest: object | None = None
        self._is_new = False  # whether the newest iterator has not begun
        if delivery.is_open:
            self.check_outputs()

    def __len__(self) -> int:
        """Batches of an epoch, on each rank; also during and after the epoch, and after a resume."""
        return self.delivery.num_batches_of(self._named_epoch)

    @property
    def num_samples(self) -> int:
        """Samples of the epoch over all ranks."""
        delivery, named = self.delivery, self._named_epoch
        return delivery.current.num_samples if named is None else delivery.parts.inputs.plan(named).num_samples

    @property
    def batch_size(self) -> int:
        """Samples in a batch of one rank."""
        return self.delivery.arguments.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether a last batch that is not full is left out."""
        return self.delivery.arguments.last_batch_policy == "DROP"

    @property
    def sampler(self) -> "TokenSampler":
        """Its length is the samples of a rank; it has ``set_epoch``."""
        return TokenSampler(self, counts="samples")

    @property
    def batch_sampler(self) -> "TokenSampler":
        """Gives a token for each batch, which ``dataset`` takes."""
        return TokenSampler(self, counts="batches")

    @property
    def dataset(self) -> "TokenDataset":
        """Its length is the samples over all ranks; it gives no samples by number."""
        return TokenDataset(self)

    def __iter__(self) -> "Iteration":
        self._check_callers(sys._getframe(1))
        self._newest, self._is_new = object(), True
        return Iteration(self, token=self._newest)

    if not TYPE_CHECKING:  # or a type checker would take any attribute

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"'{type(self).__name__}' object has no attribute '{name}': it is no torch DataLoader, and what is the "
                "loader's is on the loader; iterate it, and let nothing wrap it: see docs/how-to/trainers.md"
            )

    def set_epoch(self, epoch: int) -> None:
        """Have the next iteration give this epoch, from its start; but the rest of it if a state of it was loaded."""
        epoch = as_integer("epoch", epoch)
        if epoch < 0:
            raise ValueError(f"epoch must not be negative, got {epoch}")
        self._named_epoch = epoch

    def state_dict(self, num_samples: int | None = None, from_beginning: bool = True) -> dict[str, Any]:
        """Return the position of the job, which says what the next batch is: see `Loader.state_dict`."""
        delivery = self.delivery
        is_between = self._named_epoch is not None or self._is_new or delivery.current.has_seen_end
        epoch = self._epoch_to_start() if is_between and not num_samples else None
        return delivery.state_dict(num_samples, from_beginning) if epoch is None else delivery.state_at(epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken: the next iteration gives the rest of that epoch, which is none after
        the last batch. ``set_epoch`` with another epoch takes precedence. See `Loader.load_state_dict`.
        """
        self.delivery.load_state_dict(state)
        self._named_epoch = None

    def stats(self) -> dict[str, float]:
        """Return the loader's figures: see `Loader.stats`."""
        return self.delivery.stats()

    def close(self) -> None:
        """Close the loader."""
        self.delivery.close()

    @staticmethod
    def collate_fn(batch: Any) -> Any:
        """Return the batch as it is; for those who put this object's parts into a ``DataLoader``."""
        return batch

    def __getitems__(self, numbers: Any) -> NoReturn:
        """Refuse to be the data set of torch's ``DataLoader``, which asks so for samples."""
        raise TypeError(
            f"as_dataloader() gives whole batches in the loader's order, and no samples {numbers!r}; iterate it, and "
            "put no DataLoader around it"
        )

    def _check_callers(self, frame: FrameType | None) -> None:
        """Refuse a data loader that stacks batches or loses some.

        No object says what iterates this one, so the running functions ``__iter__`` are asked. Others are not: to look
        at a function's variables keeps them alive until it ends (before Python 3.13), also those that it deletes.
        """
        while frame is not None:
            caller = frame.f_locals.get("self") if frame.f_code.co_name == "__iter__" else None
            if isinstance(caller, DataLoader) and getattr(caller, "batch_size", None) is not None:
                raise TypeError(
                    f"DataLoader(batch_size={caller.batch_size}) would stack whole batches; pass "
                    "DataLoader(loader.as_dataset(), batch_size=None, num_workers=0); if a data set of yours takes the "
                    "batches apart, write its __iter__ as a generator"
                )
            name, loss = type(caller).__name__, ""
            if name in _DEALERS and (num_ranks := self.delivery.parts.batching.process.world_size) > 1:
                loss = f"would deal the batches of one rank to all, and each of the {num_ranks} ranks has a loader"
            elif name in _AHEAD:
                loss = "takes one batch ahead, and the loader's state counts that batch as used"
            if loss:
                raise RuntimeError(
                    f"{type(caller).__module__}.{name} {loss}: samples would be lost; iterate loader.as_dataloader() "
                    "yourself, or give it to a trainer that leaves it alone: see docs/how-to/trainers.md"
                )
            frame = frame.f_back

    def _epoch_to_start(self) -> int | None:
        """The epoch that the next iterator starts; ``None``: it goes on where the loader stands."""
        current, named = self.delivery.current, self._named_epoch
        if not current.delivered and not current.has_seen_end:
            return None if named in (None, current.number) else named
        if named is not None:
            return named
        if self._each_iter == "same":
            return current.number if self._same_epoch is None else self._same_epoch
        return None if self._each_iter == "rest" and not current.is_over else current.number + 1

    def begin(self, token: object, *, skip: int = 0) -> None:
        """Have the loader stand where an iterator begins, after ``skip`` batches that are not read."""
        self.check_newest(token)
        delivery, current, epoch = self.delivery, self.delivery.current, self._epoch_to_start()
        if epoch is not None and current.start and current.num_batches_left:
            _log.warning(
                "epoch %d was resumed in the middle, and epoch %d begins before its end: the rest of epoch %d, %d "
                "batches, is given up",
                current.number,
                epoch,
                current.number,
                current.num_batches_left,
            )
        if skip:
            if epoch is None and not current.delivered and current.start and current.num_batches_left:
                raise ValueError(
                    f"{skip} batches are to be skipped, and a state of epoch {current.number} was loaded, which stands "
                    "in mid-epoch already; load the state or skip the batches, not both"
                )
            delivery.set_epoch(current.number if epoch is None else epoch, batch=skip)
        elif epoch is not None:
            delivery.set_epoch(epoch)
        delivery.taker = token
        self._named_epoch, self._same_epoch, self._is_new = None, delivery.current.number, False

    def check_newest(self, token: object) -> None:
        """Refuse an iterator that is not the newest."""
        if self._newest is not token:
            raise RuntimeError(
                "this iterator ended when another one was made from the same as_dataloader(); both would take batches "
                "of one loader; use the newer one, or open a loader for each"
            )

    def num_batches_to_come(self) -> int:
        """Batches of an iterator that has not begun."""
        epoch = self._epoch_to_start()
        return self.delivery.current.num_batches_left if epoch is None else self.delivery.num_batches_of(epoch)

    def check_outputs(self) -> Callable[[dict[str, Any]], Any]:
        """Return what makes a batch of the loader's dict; refuse names that the loader does not give."""
        return _form(self._outputs, [*self.delivery.parts.decode.output_names, *self.delivery.added_outputs])


class DictBatches(Protocol):
    """The type of `LoaderBatches` that give plain dicts."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[BatchDict]: ...


class Iteration(Iterator[Any]):
    """One iteration. The loader knows by the token what takes its batches."""

    def __init__(self, face: LoaderBatches, *, token: object) -> None:
        self._face, self._token = face, token
        self._uses: dict[str, Use] = {}  # Note [one thread] in `dali_pipes.delivery`
        self.has_begun = self._is_over = False
        self.num_taken = 0  # or skipped
        # Whether Accelerate is told of the last batch: not if a data loader is around this, which takes one ahead.
        self.is_announced = True

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        if not self.has_begun:
            self.begin()
        delivery = self._face.delivery
        self._face.check_newest(self._token)
        if delivery.taker is not self._token:
            raise iterated_elsewhere()
        if self._announcement is not None:
            self._announcement.announce(is_last=delivery.current.num_batches_left == 1)
        try:
            # Nothing is called after it: see Note [counted last] in `dali_pipes.delivery`.
            return delivery.next_batch(self._form, taker=self._token)
        except StopIteration:
            self._is_over = True
            if self._announcement is not None:
                self._announcement.end()
            raise

    @alone
    def begin(self, *, skip: int = 0) -> None:
        """Put the loader to the first batch, after ``skip`` batches; once, whatever other threads do."""
        if self.has_begun:
            return
        self._form = self._face.check_outputs()
        self._face.begin(self._token, skip=skip)
        self._announcement = _make_announcement(self._face) if self.is_announced else None
        self.has_begun, self.num_taken = True, skip

    def check_usable(self) -> None:
        """Refuse an iterator that is not the newest."""
        self._face.check_newest(self._token)


@dataclasses.dataclass(frozen=True, eq=False)
class BatchToken:
    """A batch, by its number in an iteration."""

    iteration: Iteration
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

    def __init__(self, face: LoaderBatches, *, counts: Literal["samples", "batches"]) -> None:
        self._face, self._counts = face, counts
        self.batch_size, self.drop_last, self.set_epoch = face.batch_size, face.drop_last, face.set_epoch

    def __len__(self) -> int:
        """Batches of an epoch, or its samples on one rank as torch's ``DistributedSampler`` counts them: 31 samples on
        two ranks are 16 on each. Under ``DROP`` they are those of the whole batches.
        """
        face = self._face
        if self._counts == "batches":
            return len(face)
        if face.drop_last:
            return len(face) * face.batch_size
        return -(-face.num_samples // face.delivery.parts.batching.process.world_size)

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

    def __init__(self, face: LoaderBatches) -> None:
        self._face, self.set_epoch = face, face.set_epoch
        self.state_dict, self.load_state_dict = face.state_dict, face.load_state_dict

    def __len__(self) -> int:
        return self._face.num_samples

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


class LoaderDataset(IterableDataset[BatchDict]):
    """The batches of a loader, as plain dicts. Made by `Loader.as_dataset`.

    Both data loaders pass whole batches through: ``batch_size=None, num_workers=0``. Each iteration gives the next
    epoch, also after `break`; if the loader was opened with ``state=``, the first one gives the rest of that state's
    epoch. ``set_epoch``, ``state_dict`` and ``load_state_dict`` are those of `LoaderBatches`.

    Raises:
        TypeError: While iterating: if the ``DataLoader`` has a ``batch_size``, and would stack batches.
        RuntimeError: While iterating: if several ranks have loaders, and Accelerate, Transformers or fastai
            would deal out the batches of one of them; if Accelerate or Ray Train would take a batch ahead.

    >>> from torchdata.stateful_dataloader import StatefulDataLoader  # doctest: +SKIP
    >>> batches = StatefulDataLoader(loader.as_dataset(), batch_size=None, num_workers=0)  # doctest: +SKIP
    """

    def __init__(self, batches: LoaderBatches) -> None:
        super().__init__()
        self._batches, self.set_epoch = batches, batches.set_epoch
        self.state_dict, self.load_state_dict = batches.state_dict, batches.load_state_dict

    def __iter__(self) -> Iterator[BatchDict]:
        batches = iter(self._batches)
        batches.is_announced = False
        return batches

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self._batches)


def _form(outputs: OutputNames, given: Sequence[str]) -> Callable[[dict[str, Any]], Any]:
    if outputs is None:
        return lambda batch: batch
    if isinstance(outputs, str) or not isinstance(outputs, Sequence | Mapping):
        raise TypeError(
            f"outputs must be a tuple of names, ('image', 'label'), or a dict of new names, got {outputs!r}; this "
            f"loader gives {', '.join(given)}"
        )
    names = list(outputs.values() if isinstance(outputs, Mapping) else outputs)
    unknown = [name for name in names if name not in given]
    if unknown or not names:
        named = ", ".join(map(repr, unknown)) or "no name"
        advice = label_advice(given) if LABEL_OUTPUT in unknown else ""
        raise ValueError(f"outputs must name what the loader gives ({', '.join(given)}), got {named}{advice}")
    if isinstance(outputs, Mapping):
        renamed = dict(outputs)
        return lambda batch: {new: batch[name] for new, name in renamed.items()}
    return lambda batch: tuple([batch[name] for name in names])


def _make_announcement(face: LoaderBatches) -> Any:
    """Make what tells Accelerate which batch is an iteration's last one; ``None`` if the program has no Accelerate.

    After it Accelerate applies the gradients, although ``gradient_accumulation_steps`` batches are not complete, and
    ``gather_for_metrics`` drops what repeats samples. Both would be wrong without an error.
    """
    if "accelerate.data_loader" not in sys.modules:
        return None
    from accelerate.state import PartialState, is_initialized

    parts = face.delivery.parts
    process = parts.batching.process
    is_found = process.world_size > 1 and process.source != GIVEN
    if is_found and is_initialized() and PartialState().num_processes == 1 and not distributed.is_initialized():
        raise RuntimeError(
            f"the loader is of one of {process.world_size} ranks, and Accelerate knows of one process: each would "
            "train a model of its own on a part of the samples; on CPUs pass Accelerator(cpu=True) or "
            "TrainingArguments(use_cpu=True)"
        )
    # With buckets Accelerate cannot drop what repeats samples: it knows of one short batch only.
    drop_last = face.drop_last or parts.inputs.grouping is not None
    return _announcement_class()(face.dataset, parts.batching.global_batch_size, drop_last)


@functools.cache
def _announcement_class() -> Any:
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.state import GradientState

    class DataLoaderAnnouncement(DataLoaderStateMixin):  # type: ignore[misc]
        """``begin`` computes the remainder from these attributes, and registers this object; ``end`` removes it."""

        def __init__(self, dataset: TokenDataset, global_batch_size: int, drop_last: bool) -> None:
            self.dataset, self.total_batch_size, self._drop_last = dataset, global_batch_size, drop_last
            self.gradient_state = GradientState()

        def announce(self, *, is_last: bool) -> None:
            # Anew for each batch: the newest one counts, and a loop that another loop left early is not the newest.
            self.end()
            self.begin()
            self.end_of_dataloader = is_last

    return DataLoaderAnnouncement
