"""A loader for trainers: an object that they take for a data loader, and neither reshard nor replace.

Trainers of other people iterate a data loader once an epoch, name the epoch, save a state and load it. `LoaderBatches`
says what each of these means for a loader, which only knows where it stands. The position is the loader's own; a face
adds the epoch that ``set_epoch`` named, and which of its iterators is the newest.

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

This is decided when an iterator is asked for its first batch, not when it is made: some trainers make the iterator
first, and name the epoch or load the state afterwards. A state says what the next batch will be: when the loop has
seen the end of epoch e, or the next iterator is made, it is a state of epoch e + 1.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, get_args

from dali_pipes.arguments import as_integer
from dali_pipes.graph.outputs import LABEL_OUTPUT, label_advice
from dali_pipes.integrations.batch_tokens import TokenDataset, TokenSampler
from dali_pipes.integrations.gradient_state import make_announcement
from dali_pipes.processes.one_thread import Use, alone

if TYPE_CHECKING:
    from dali_pipes.iterator import Loader

_log = logging.getLogger(__name__)

OWN_LOADER = (
    "use data parallelism alone, or open dali_pipes.loader(rank=..., world_size=...) with the data-parallel ranks in a "
    "loop of your own"
)
"""What to do where several processes share the batches of one data-parallel rank."""

EachIter: TypeAlias = Literal["next", "rest", "same"]
"""What each iteration of `LoaderBatches` gives."""

OutputNames: TypeAlias = Sequence[str] | Mapping[str, str] | None
"""Names of outputs for tuples, new names with the loader's names for dicts, or ``None``."""


class LoaderBatches:
    """The batches of a loader for a trainer. Made by `Loader.as_dataloader`, which says what the arguments mean.

    It is no ``torch.utils.data.DataLoader``: each rank has a loader of its own, and a trainer that dealt the batches of
    one rank to all would lose those of the others.
    """

    num_workers = 0
    pin_memory = False
    prefetch_factor = None  # as torch has it without workers

    def __init__(self, loader: "Loader", *, outputs: OutputNames, each_iter: EachIter) -> None:
        if each_iter not in get_args(EachIter):
            raise ValueError(f"each_iter must be one of {', '.join(get_args(EachIter))}, got {each_iter!r}")
        self.loader = loader
        self._outputs, self._each_iter = outputs, each_iter
        self._named_epoch: int | None = None  # by set_epoch, until an iterator begins
        self._same_epoch: int | None = None
        # A token stands for the newest iterator. A reference to the iterator would be a cycle, and a loader that the
        # program has dropped would stay open.
        self._newest: object | None = None
        self._is_new = False  # whether the newest iterator has not begun

    def __len__(self) -> int:
        """Batches of an epoch, on each rank; also during and after the epoch, and after a resume.

        With several slices the next epoch may have another number: see `Loader.num_samples`.
        """
        loader, named = self.loader, self._named_epoch
        if named in (None, loader.epoch):
            return len(loader)
        return loader.parts.batching.num_steps(loader.parts.inputs.plan(named))

    @property
    def num_samples(self) -> int:
        """Samples of the epoch over all ranks."""
        loader, named = self.loader, self._named_epoch
        return loader.num_samples if named in (None, loader.epoch) else loader.parts.inputs.plan(named).num_samples

    @property
    def batch_size(self) -> int:
        """Samples in a batch of one rank."""
        return int(self.loader.batch_size)

    @property
    def drop_last(self) -> bool:
        """Whether a last batch that is not full is left out."""
        return self.loader.parts.batching.last_batch_policy == "DROP"

    @property
    def sampler(self) -> TokenSampler:
        """Its length is the samples of a rank; it has ``set_epoch``."""
        return TokenSampler(self, counts="samples")

    @property
    def batch_sampler(self) -> TokenSampler:
        """Gives a token for each batch, which ``dataset`` takes."""
        return TokenSampler(self, counts="batches")

    @property
    def dataset(self) -> TokenDataset:
        """Its length is the samples over all ranks; it gives no samples by number."""
        return TokenDataset(self)

    def __iter__(self) -> "Iteration":
        self._newest, self._is_new = object(), True
        return Iteration(self, token=self._newest)

    def set_epoch(self, epoch: int) -> None:
        """Have the next iteration give this epoch, from its start; but the rest of it if a state of it was loaded."""
        epoch = as_integer("epoch", epoch)
        if epoch < 0:
            raise ValueError(f"epoch must not be negative, got {epoch}")
        self._named_epoch = epoch

    def state_dict(self, num_samples: int | None = None, from_beginning: bool = True) -> dict[str, Any]:
        """Return the position of the job: it says what the next batch is. For the arguments see `Loader.state_dict`."""
        loader = self.loader
        is_between = self._named_epoch is not None or self._is_new or loader.has_seen_end
        epoch = self._epoch_to_start() if is_between and not num_samples else None
        return loader.state_dict(num_samples, from_beginning) if epoch is None else loader.state_at(epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken: the next iteration gives the rest of that epoch.

        If the state was taken in the loop's body after the last batch, that is none. ``set_epoch`` with another epoch
        takes precedence.

        Raises:
            StateError: If the state is of other shards or another order; the loader continues as before.
        """
        self.loader.load_state_dict(state)
        self._named_epoch = None

    def stats(self) -> dict[str, float]:
        """Return the loader's figures: see `Loader.stats`."""
        return self.loader.stats()

    def close(self) -> None:
        """Close the loader."""
        self.loader.close()

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

    def _epoch_to_start(self) -> int | None:
        """The epoch that the next iterator starts; ``None``: it goes on where the loader stands."""
        loader, named = self.loader, self._named_epoch
        if not loader.num_delivered and not loader.has_seen_end:
            return None if named in (None, loader.epoch) else named
        if named is not None:
            return named
        if self._each_iter == "same":
            return loader.epoch if self._same_epoch is None else self._same_epoch
        return None if self._each_iter == "rest" and loader.num_batches_left else loader.epoch + 1

    def begin(self, token: object, *, skip: int = 0) -> None:
        """Have the loader stand where an iterator begins, after ``skip`` batches that are not read."""
        self.check_newest(token)
        loader, epoch = self.loader, self._epoch_to_start()
        is_resumed = not loader.num_delivered and loader.position > 0 < loader.num_batches_left
        if epoch is not None and 0 < loader.num_batches_left < len(loader) - loader.num_delivered:
            _log.warning(
                "epoch %d was resumed in the middle, and epoch %d begins before its end: the rest of epoch %d, %d "
                "batches, is given up",
                loader.epoch,
                epoch,
                loader.epoch,
                loader.num_batches_left,
            )
        if skip:
            if epoch is None and is_resumed:
                raise ValueError(
                    f"{skip} batches are to be skipped, and a state of epoch {loader.epoch} was loaded, which stands "
                    "in mid-epoch already; load the state or skip the batches, not both"
                )
            loader.set_epoch(loader.epoch if epoch is None else epoch, batch=skip)
        elif epoch is not None:
            loader.set_epoch(epoch)
        loader.taker = token
        self._named_epoch, self._same_epoch, self._is_new = None, loader.epoch, False

    def check_newest(self, token: object) -> None:
        """Refuse an iterator that is not the newest."""
        if self._newest is not token:
            raise RuntimeError(
                "this iterator ended when another one was made from the same as_dataloader(); both would take batches "
                "of one loader; use the newer one, or open a loader for each"
            )

    def num_batches_to_come(self) -> int:
        """Batches of an iterator that has not begun."""
        loader, epoch = self.loader, self._epoch_to_start()
        if epoch is None:
            return loader.num_batches_left
        return loader.parts.batching.num_steps(loader.parts.inputs.plan(epoch))

    def check_outputs(self) -> Callable[[dict[str, Any]], Any]:
        """Return what makes a batch of the loader's dict.

        Raises:
            TypeError: If ``outputs`` is neither a sequence of names nor a mapping.
            ValueError: If the loader gives no such output.
        """
        return _form(self._outputs, [*self.loader.output_map, *self.loader.added_outputs])


class Iteration(Iterator[Any]):
    """One iteration. The loader knows by the token what takes its batches."""

    def __init__(self, face: LoaderBatches, *, token: object) -> None:
        self._face, self._token = face, token
        self._uses: dict[str, Use] = {}  # Note [one thread] in `dali_pipes.processes.one_thread`
        self.has_begun = self._is_over = False
        self.num_taken = 0
        """Batches of this iteration that were taken or skipped."""
        self.is_announced = True
        """Whether Accelerate is told of the last batch: not if a data loader is around this, which takes one ahead."""

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        if not self.has_begun:
            self.begin()
        loader = self._loader
        self._face.check_newest(self._token)
        if loader.taker is not self._token:
            raise iterated_elsewhere()
        if self._announcement is not None:
            self._announcement.announce(is_last=loader.num_batches_left == 1)
        try:
            # Nothing is called after it: see Note [counted last] in `dali_pipes.iterator`.
            return loader.next_batch(self._form, taker=self._token)
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
        self._loader, self._form = self._face.loader, self._face.check_outputs()
        self._face.begin(self._token, skip=skip)
        self._announcement = (
            make_announcement(
                self._face.dataset,
                batch_size=self._face.batch_size,
                process=self._loader.parts.batching.process,
                # With buckets Accelerate cannot drop what repeats samples: it knows of one short batch only.
                drop_last=self._face.drop_last or self._loader.parts.inputs.grouping is not None,
            )
            if self.is_announced
            else None
        )
        self.has_begun, self.num_taken = True, skip

    def _check_usable(self) -> None:
        self._face.check_newest(self._token)


def iterated_elsewhere() -> RuntimeError:
    """Make the error of an iterator that is not the last one that took a batch: the batches between would be lost."""
    return RuntimeError(
        "the loader was iterated elsewhere, or put to another position, since this iterator's last batch; make a new "
        "iterator, or open a loader for each loop"
    )


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
