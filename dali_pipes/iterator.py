"""Batches out, epoch after epoch: what a training loop holds. `dali_pipes.open_loader` makes it.

Who owns what: the loader owns its share of the image, the stager's threads, the decode half, and at most three segments
at a time: the one that is read, the one opened ahead, and the next epoch's first. Everything but the stager and DALI's
own threads runs in the thread that iterates.
"""

import contextlib
import dataclasses
import logging
import operator
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

import torch
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator
from torch.utils.dlpack import from_dlpack

from dali_pipes import profiling as stages
from dali_pipes.bad_samples.policy import BadSample, BadSamplesSeen
from dali_pipes.bad_samples.repair import Repair
from dali_pipes.cache.locks import in_mutex
from dali_pipes.cache.share import CacheShare
from dali_pipes.errors import DecodeError, WorkerProcessError
from dali_pipes.fetch.stager import Stager, in_fetcher
from dali_pipes.graph.decode import BatchInputs, DecodePipeline
from dali_pipes.integrations.torch_dataset import LoaderDataset
from dali_pipes.order.inputs import OrderInputs
from dali_pipes.order.plan import LastBatchPolicyName, Plan, num_steps
from dali_pipes.order.selection import Selection
from dali_pipes.order.state import LoaderState
from dali_pipes.ranks import Rank, refuse_disagreement
from dali_pipes.reader.feed import Feed
from dali_pipes.reader.samples import Samples

__all__ = ["LABEL_OUTPUT", "Loader", "as_integer"]

_log = logging.getLogger(__name__)

# Loaders of this process, counted for each rank that they are of: the first of one rank is compared with the first of
# the others. What rank 0 alone reads, to validate, is a loader of a world of one.
_numbers: Counter[tuple[int, int]] = Counter()
LABEL_OUTPUT = "label"
"""What the graphs of `dali_pipes.graph.pipelines` call the class id."""


class Loader(DALIGenericIterator):  # type: ignore[misc]
    """Batches of one data set, in the order that a seed fixes. Made by `dali_pipes.loader`; a context manager.

    Iterating gives ``[{name: tensor}]``, a list of one dict as DALI's own iterators do: the graph's outputs by name, on
    the loader's device, each of shape [batch, ...]; with ``with_keys`` also ``"key"``, a list of str; with
    ``with_valid`` also ``"valid"``, bool [batch].

    An epoch ends with `StopIteration`. `break` and iterating again goes on with the same epoch, as DALI does; after the
    end, iterating again, or `reset`, starts the next. `reset` in mid-epoch gives the rest of it up.

    On a GPU a batch belongs to the stream that is torch's current one when it is taken: the host need not have waited
    for it, and its memory is written again when that stream has come past the last use. What another stream reads must
    be waited for by this one (``current_stream().wait_stream(other)``) before the tensors are dropped.
    """

    def __init__(
        self,
        decode: DecodePipeline,
        *,
        samples: Samples,
        share: CacheShare,
        stager: Stager,
        repair: Repair,
        met: BadSamplesSeen,
        selection: Selection,
        set_shards: Sequence[int],
        order: OrderInputs,
        state: LoaderState | None,
        process: Rank,
        last_batch_policy: LastBatchPolicyName,
        auto_reset: bool,
        with_keys: bool,
        with_valid: bool,
        names: Sequence[str],
        column_labels: bool,
        show_progress: bool,
        resources: contextlib.ExitStack,
    ) -> None:
        self._decode, self._samples, self._share, self._stager = decode, samples, share, stager
        self._repair, self._met = repair, met
        self._selection, self._set_shards = selection, set_shards
        self._depth = decode.prefetch_queue_depth
        self._process, self._policy = process, last_batch_policy
        self._number = _numbers[process.rank, process.world_size]
        _numbers[process.rank, process.world_size] += 1
        self._has_compared = False
        self._show_progress = show_progress
        self._is_windowed = share.reserved < int(share.extent_bytes.sum())
        self._waited_s = 0.0  # for shards, in epochs that are over
        self._order = order
        self._with_keys, self._with_valid = with_keys, with_valid
        # What batches call the graph's outputs, and whether its label is a column: DALIClassificationIterator's is.
        self._names, self._column_labels = dict(zip(decode.output_names, names, strict=True)), column_labels
        self._pid = os.getpid()
        stages.follow_environment()
        self._prepared: Feed | None = None
        self._error: Exception | None = None
        self._running = False
        self._interrupted = False
        self._delivered = 0  # batches, since the epoch was begun or resumed
        self.num_valid = 0
        """How many samples of the batch last delivered count; fewer than it holds only in a ``PARTIAL`` last batch."""
        self.substituted: tuple[int, ...] = ()
        """Where, in the batch last delivered, another sample stands in for a bad one: positions."""
        self.num_substituted = 0
        """How often that was so, in all batches that were delivered."""
        super().__init__(
            [decode.pipeline],
            list(names),
            size=-1,
            auto_reset=auto_reset,
            last_batch_policy=LastBatchPolicy[last_batch_policy],
            prepare_first_batch=False,
        )
        self._global_batch_size = int(self.batch_size * process.world_size)
        if state is None:
            self._begin(self._make_feed(order.epoch), start=0, delivered=0)
        else:
            self._tell_random_operators()
            self._begin_at(state.order.epoch, start=state.delivered)
        # What loops that were written for DALI's iterators look at, and nothing here depends on: of this rank's samples
        # as many as make `len(self)` batches, and the policy, which DALI takes to be FILL where it knows no size.
        self._size = self.num_samples // process.world_size
        if last_batch_policy != "DROP":
            self._size = -(-self.num_samples // process.world_size)
        self._last_batch_policy = LastBatchPolicy[last_batch_policy]
        if not self._num_batches:
            _log.warning(
                "an epoch has no batch: %d samples do not make one of %d on %d ranks, and last_batch_policy is DROP",
                self.num_samples,
                self.batch_size,
                process.world_size,
            )
        self._resources = resources.pop_all()  # from here on close() is what frees them
        self._closed = False

    @property
    def num_samples(self) -> int:
        """Samples of this epoch over all ranks, exact before the first batch.

        With several slices the shards are dealt anew to them in each epoch, and those that come out shorter than the
        longest repeat their first samples: the number is that of the longest times ``num_slices``, and may be another
        in the next epoch. ``epoch_samples`` fixes it.
        """
        return self._feed.plan.num_samples

    @property
    def epoch(self) -> int:
        """The epoch that is being, or is about to be, iterated; the first is 0."""
        return self._feed.plan.order.epoch

    @property
    def num_batches_left(self) -> int:
        """Batches of the epoch that are still to come; at 0, iterating again starts the next."""
        return self._num_batches - self._delivered

    @property
    def data_wait_s(self) -> float:
        """Seconds for which batches had to wait for their shards, since the loader was made."""
        return self._waited_s + self._feed.wait_s

    @property
    def bad_samples(self) -> list[BadSample]:
        """Those that this rank has met since the loader was made, in that order."""
        return list(self._met.met.values())

    def __len__(self) -> int:
        """Batches of this epoch, exact before the first; after a resume, too, they are those of the whole epoch.

        With several slices another epoch may have another number: see `num_samples`.
        """
        return self._num_steps(self.num_samples)

    def __iter__(self) -> "Loader":
        self._check_usable()
        if self._delivered == self._num_batches and not self._owes_end:
            self._start_epoch(self.epoch + 1)
        return self

    def __next__(self) -> list[dict[str, Any]]:
        stages.look_for_profiler()
        with stages.busy("hand-over"):
            return self._next_batch()

    def _next_batch(self) -> list[dict[str, Any]]:
        self._check_usable()
        if self._delivered == self._num_batches:
            self._owes_end = False
            if self._auto_reset == "yes":
                self._start_epoch(self.epoch + 1)
            raise StopIteration
        if not self._has_compared:
            self._compare_ranks()
        if self._interrupted:
            self._recover()
        # Whatever leaves this method but by the two known ways may have left DALI with half of a batch's inputs: until
        # the end is reached, a Ctrl-C for instance, the pipeline is taken to be broken.
        self._interrupted = True
        self._running = True
        self._schedule(self._delivered, may_wait=True)
        try:
            fed, tensors = self._decode.take()
        except RuntimeError as exc:
            refused = self._decode.scheduled.popleft()
            self._schedule(self._delivered + 1, may_wait=False)
            try:
                fed, tensors = self._repair.decode(refused, exc)
            except DecodeError:
                # The batch is lost; the next ones come. (What the store or a disk refused is tried again.)
                self._lose_batch()
                self._interrupted = False
                raise
        except StopIteration:
            # The feed ended early: what it could not read was kept, so that all before it was delivered first. The next
            # call tries again from here, or goes on behind a batch that cannot be.
            error_kept, self._error = self._error, None
            assert error_kept is not None, "the plan has as many steps as len() says"
            if isinstance(error_kept, DecodeError):
                self._lose_batch()
            raise error_kept from None
        else:
            self._repair.delivered(fed)
            self._schedule(self._delivered + 1, may_wait=False)
        batch = fed.batch
        delivered: dict[str, Any] = {
            self._names[name]: output if isinstance(output, list) else from_dlpack(output)
            for name, output in tensors.items()
        }
        if self._column_labels:
            label = self._names[LABEL_OUTPUT]
            delivered[label] = delivered[label].reshape(-1, 1)
        if self._with_keys:
            delivered["key"] = batch.keys
        if self._with_valid:
            # Made on the device: a copy from ordinary memory would wait for all that the stream has still to do.
            valid = torch.arange(len(batch), device=self._decode.torch_device) < batch.num_valid
            if batch.substituted:
                valid[list(batch.substituted)] = False
            delivered["valid"] = valid
        self.num_valid, self.substituted = batch.num_valid, batch.substituted
        self.num_substituted += len(batch.substituted)
        self._delivered, self._interrupted = self._delivered + 1, False
        return [delivered]

    def _lose_batch(self) -> None:
        """Go on behind a batch for which there is an error; if it was the epoch's last, the end is still to be told."""
        self._delivered += 1
        self._owes_end = self._delivered == self._num_batches

    def as_dicts(self) -> "DictBatches":
        """The batches of an epoch as plain dicts, without the list of one around them; as many as ``len(loader)``."""
        return DictBatches(self)

    def as_dataset(self) -> LoaderDataset:
        """For torch's ``DataLoader(loader.as_dataset(), batch_size=None, num_workers=0)``, or torchdata's
        ``StatefulDataLoader``, which resumes at the exact next batch.
        """
        return LoaderDataset(self)

    def reset(self) -> None:
        """Start the next epoch, giving up the rest of this one. Before an epoch's first batch it does nothing."""
        self._check_usable()
        if self._position:
            self._start_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Start this epoch from its first sample; what is left of the current one is given up.

        Raises:
            ValueError: If ``epoch`` is negative.
        """
        self._check_usable()
        epoch = as_integer("epoch", epoch)
        if epoch < 0:
            raise ValueError(f"epoch must not be negative, got {epoch}")
        self._start_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the job stands, as plain values: the batches that were delivered count, those decoded ahead do not.

        Every rank's is the same after the same number of batches. See `dali_pipes.order.state.LoaderState`.
        """
        self._check_usable()
        order = dataclasses.replace(self._order, epoch=self.epoch)
        return LoaderState(
            manifest=self._samples.manifest.digest,
            selection=self._selection.digest,
            order=order,
            delivered=self._position,
        ).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken: the next batch begins with the exact next sample; nothing is replayed.

        Batch size and world size may be others than they were. In a job that is started again, `dali_pipes.loader`'s
        ``state=`` does the same before the loader has begun to stage what its first epoch starts with.

        Raises:
            StateError: If the state is of other shards or another order; the loader goes on as it was.
        """
        self._check_usable()
        loaded = LoaderState.from_dict(state)
        loaded.check(
            manifest=self._samples.manifest.digest,
            selection=self._selection.digest,
            order=self._order,
            num_samples=self._plan(loaded.order.epoch).num_samples,
        )
        self._tell_random_operators()
        self._start_epoch(loaded.order.epoch, start=loaded.delivered)

    def close(self) -> None:
        """Stop threads, free the image. Can be called twice; the loader cannot be iterated afterwards."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        with self._resources:  # closed last, whatever happens before
            self._feed.close()
            if self._prepared is not None:
                self._prepared.close()
            self._repair.close()
            self._decode.close()
            self._pipes: list[object] = []

    def __enter__(self) -> "Loader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Only a loader whose constructor came to its end has something to close; in a forked child it is not its own.
        if getattr(self, "_closed", True) or os.getpid() != self._pid:
            return
        if in_mutex() or in_fetcher():
            # Collected in the middle of work on the cache, another loader's or its own, for which the threads that are
            # to be ended may wait.
            threading.Thread(target=self.close, name="dali-pipes-close", daemon=True).start()
        else:
            self.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise WorkerProcessError(
            "a loader cannot be copied or sent to another process, such as a DataLoader worker: it has threads and "
            "buffers of its own; use it directly, or with DataLoader(num_workers=0)"
        )

    def _tell_random_operators(self) -> None:
        if self._decode.random_operators:
            _log.warning(
                "the graph has random operators of DALI's own (%s): pixels after a resume differ from those of an "
                "unbroken run; draw from the graph's second argument, whose numbers belong to the sample",
                ", ".join(self._decode.random_operators),
            )

    def _compare_ranks(self) -> None:
        order = dataclasses.replace(self._order, epoch=self.epoch)
        inputs = {
            "the manifest's digest": self._samples.manifest.digest[:16],
            "the position in the epoch": str(self._position),
            "batch_size": str(self.batch_size),
            "last_batch_policy": self._policy,
        }
        inputs["what is left out, or comes more than once,"] = self._selection.digest[:16]
        inputs |= {field.name: str(getattr(order, field.name)) for field in dataclasses.fields(order)}
        refuse_disagreement(inputs, process=self._process, number=self._number)
        self._has_compared = True

    @property
    def _position(self) -> int:
        """Samples of this epoch that all ranks together were given."""
        return min(self._start + self._delivered * self._global_batch_size, self.num_samples)

    def _num_steps(self, num_samples: int) -> int:
        return num_steps(num_samples, global_batch_size=self._global_batch_size, last_batch_policy=self._policy)

    def _start_epoch(self, epoch: int, *, start: int = 0) -> None:
        with stages.busy("hand-over"):
            self._turn_to(epoch, start=start)

    def _turn_to(self, epoch: int, *, start: int) -> None:
        if not self._running and not self._interrupted and (epoch, start) == (self.epoch, self._start):
            return  # it stands there, and what is staged is what is wanted
        was_interrupted, self._interrupted = self._interrupted, True  # until it has begun
        if was_interrupted:
            self._start_anew()
        else:
            if self._running:
                self._decode.drain()
            self._close_feed()
        self._begin_at(epoch, start=start)

    def _begin_at(self, epoch: int, *, start: int) -> None:
        num_samples = self._plan(epoch).num_samples if start else 0
        is_over = start > 0 and not self._num_steps(num_samples - start)
        # Of an epoch that is over nothing is read, nor staged: what comes next is the start of the one after it.
        read = (epoch + 1, 0) if is_over else (epoch, start)
        if self._prepared is not None and (self._prepared.plan.order.epoch, 0) != read:
            self._prepared.close()
            self._prepared = None
        if is_over:
            feed = self._make_feed(epoch, start=num_samples)
            self._prepare(epoch + 1)
            self._begin(feed, start=start, delivered=0)
        else:
            self._begin(self._prepared or self._make_feed(epoch, start=start), start=start, delivered=0)
            self._prepared = None

    def _recover(self) -> None:
        """Go on with the epoch where it was cut short: the next batch is the one after the last that was delivered."""
        self._start_anew()
        feed = self._make_feed(self.epoch, start=self._start + self._delivered * self._global_batch_size)
        self._begin(feed, start=self._start, delivered=self._delivered)

    def _start_anew(self) -> None:
        """Give up all that was begun: what was cut short may have left any of it half done."""
        self._decode.rebuild()
        self._pipes = [self._decode.pipeline]
        self._close_feed()
        if self._prepared is not None:
            self._prepared.close()
            self._prepared = None
        self._stager.give_up()

    def _begin(self, feed: Feed, *, start: int, delivered: int) -> None:
        self._feed, self._start = feed, start
        # From the start on, which is in mid-epoch only after a resume.
        self._num_batches = self._num_steps(feed.plan.num_samples - start)
        self._running, self._interrupted, self._error, self._delivered = False, False, None, delivered
        self._owes_end = False
        # Weak: the decode half must not keep the loader, or nobody would close one that is dropped.
        next_fed = weakref.WeakMethod(self._next_fed)
        self._decode.feed = lambda: method() if (method := next_fed()) is not None else None

    def _close_feed(self) -> None:
        self._feed.close()
        self._waited_s, self._feed.wait_s = self.data_wait_s, 0.0

    def _plan(self, epoch: int) -> Plan:
        manifest = self._samples.manifest
        return Plan(
            shard_bytes=manifest.shard_bytes,
            shard_samples=manifest.samples,
            order=dataclasses.replace(self._order, epoch=epoch),
            set_shards=self._set_shards,
            selection=self._selection,
        )

    def _make_feed(self, epoch: int, *, start: int = 0) -> Feed:
        with stages.busy("read"):
            return self._open_feed(epoch, start=start)

    def _open_feed(self, epoch: int, *, start: int) -> Feed:
        plan = self._plan(epoch)
        slices = plan.slices_of(
            batch_size=self.batch_size, rank=self._process.rank, world_size=self._process.world_size
        )
        needed = plan.bytes_at_a_time(self._share.extent_bytes, slices, global_batch_size=self._global_batch_size)
        if needed > self._share.reserved:
            self._share.reserve_more(needed)
        return Feed(
            plan,
            samples=self._samples,
            components=self._decode.read_components,
            share=self._share,
            stager=self._stager,
            batch_size=self.batch_size,
            rank=self._process.rank,
            world_size=self._process.world_size,
            last_batch_policy=self._policy,
            start=start,
            show_progress=self._show_progress,
        )

    def _next_fed(self) -> BatchInputs | None:
        """The next batch for the decode half; an error ends the feed and is raised when all before it is delivered."""
        if self._error is not None:
            return None  # DALI asks for each input, also after the first has had nothing
        try:
            with stages.busy("read"):
                read = self._feed.next()
            if read is None:
                return None
            with stages.busy("seam"):
                return self._repair.feed(*read)
        except Exception as exc:  # noqa: BLE001 (handed on, whatever it is)
            self._error = exc
            return None

    def _schedule(self, delivered: int, *, may_wait: bool) -> None:
        """Have as many batches decoded ahead as were asked for, but wait for shards only if nothing else can be done.

        Nothing is decoded past the end of the epoch.
        """
        scheduled = self._decode.scheduled
        while self._error is None and delivered + len(scheduled) < self._num_batches:
            if len(scheduled) >= self._depth or not (self._feed.is_ready() or (may_wait and not scheduled)):
                break
            self._decode.schedule()
        if self._error is not None:
            return
        if delivered + len(scheduled) >= self._num_batches:
            # All is read; while the last batches are decoded there is time to have the next epoch's reader ready.
            if (prepared := self._prepare(self.epoch + 1)) is not None:
                try:
                    prepared.prepare()
                except Exception:  # noqa: BLE001 (raised again when that epoch is started)
                    _log.debug("the next epoch's reader could not be prepared", exc_info=True)
                    prepared.close()
                    self._prepared = None
        elif self._is_windowed and self._feed.has_staged_all:
            self._prepare(self.epoch + 1)  # its first windows are staged while this epoch's last ones are read

    def _prepare(self, epoch: int) -> Feed | None:
        """The next epoch's feed, made if it is not there; ``None`` where that fails, which its start will tell."""
        if self._prepared is None:
            try:
                self._prepared = self._make_feed(epoch)
            except Exception:  # noqa: BLE001 (raised again when that epoch is started)
                _log.debug("the next epoch's feed could not be prepared", exc_info=True)
        return self._prepared

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise WorkerProcessError(
                f"this loader was made in process {self._pid} and is used in process {os.getpid()}, probably a "
                "DataLoader worker; it has threads of its own and needs no workers: use it directly, or with "
                "DataLoader(num_workers=0)"
            )
        if self._closed:
            raise ValueError("this loader is closed; make another")


class DictBatches(Iterator[dict[str, Any]]):
    """What is left of a loader's epoch when the first is asked for, as plain dicts. Made by `Loader.as_dicts`."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._batches: Iterator[list[dict[str, Any]]] | None = None
        self._is_over = False

    def __len__(self) -> int:
        """The loader's: batches of the whole epoch."""
        return len(self._loader)

    def __next__(self) -> dict[str, Any]:
        if self._is_over:
            raise StopIteration  # and not the next epoch's first
        if self._batches is None:
            self._batches = iter(self._loader)
        try:
            (batch,) = next(self._batches)
        except StopIteration:
            self._is_over = True
            raise
        return batch


def as_integer(name: str, value: object) -> int:
    """``value`` as an int.

    Raises:
        TypeError: If it is none: a float would give another order.
    """
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
