"""The loader, which a training loop iterates epoch after epoch. `dali_pipes.open_loader` makes it.

A loader owns its share of the cache file, the stager's threads, the decode pipeline and the feeds of its epochs. Except
for the work of the stager's and DALI's threads, everything runs in the thread that iterates.
"""

import dataclasses
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator
from torch.utils.dlpack import from_dlpack

from dali_pipes import profiling
from dali_pipes.arguments import as_integer
from dali_pipes.bad_samples.policy import BadSample
from dali_pipes.cache.locks import in_mutex
from dali_pipes.epoch import Epoch, LoaderParts
from dali_pipes.errors import DecodeError, WorkerProcessError
from dali_pipes.fetch.stager import in_fetcher
from dali_pipes.graph.batch_inputs import BatchInputs
from dali_pipes.graph.dali_internals import set_epoch_size, set_pipelines
from dali_pipes.integrations.dali_iterator import DaliIterator
from dali_pipes.integrations.torch_dataset import DictBatches, LoaderDataset
from dali_pipes.order.state import LoaderState
from dali_pipes.processes.agreement import Agreement
from dali_pipes.reader.aio_reader import in_reader
from dali_pipes.reader.batch import Batch

_log = logging.getLogger(__name__)

# Loaders of this process, counted by rank and world size: the n-th loader of one rank is compared with the n-th loader
# of every other rank. A loader that rank 0 alone opens, to validate, has a world size of 1.
_numbers: Counter[tuple[int, int]] = Counter()


class Loader(DALIGenericIterator):  # type: ignore[misc]
    """Batches of one data set, in the order that a seed fixes. Made by `dali_pipes.loader`; a context manager.

    Iterating gives ``[{name: tensor}]``, a list of one dict, as DALI's own iterators do. The dict holds the graph's
    outputs by name, on the loader's device, each of shape [batch, ...]. With ``Outputs(keys=True)`` it also has
    ``"key"``, a list of str, and with ``Outputs(valid=True)`` ``"valid"``, bool [batch].

    An epoch ends with `StopIteration`. After `break`, iterating again continues the same epoch, as in DALI. After the
    end, iterating again, or `reset`, starts the next epoch. `reset` in mid-epoch gives up the rest of it.

    On a GPU a batch belongs to the stream of its device that is torch's current one when the batch is taken: that
    stream waits until the batch is decoded, the host does not. If another stream reads the batch, it must first wait
    for that one: ``other.wait_stream(torch.cuda.current_stream(device))``. A batch may be dropped at any time: DALI
    reuses its memory when the GPU has done all that was launched before. Capture a CUDA graph with
    ``capture_error_mode="thread_local"``, because DALI's threads use the GPU in the meantime.
    """

    def __init__(self, parts: LoaderParts, *, is_resumed: bool) -> None:
        self.parts = parts  # for this package's commands, not for users
        self._inputs, self._batching, self._outputs = parts.inputs, parts.batching, parts.outputs
        self._decode, self._repair, self._seen = parts.decode, parts.repair, parts.seen
        self._feeds = parts.feeds
        self._pid = os.getpid()
        process, policy = parts.batching.process, LastBatchPolicy[parts.batching.last_batch_policy]
        self._agreement = Agreement(process=process, number=_numbers[process.rank, process.world_size])
        _numbers[process.rank, process.world_size] += 1
        self.num_valid = 0
        """The number of samples, from the front, in the last delivered batch that count: all, except those that
        ``FILL`` repeats in the epoch's last step, and none if a rank has no sample left in a ``PARTIAL`` one. A sample
        that replaces a bad one counts, too."""
        self.substituted: tuple[int, ...] = ()
        """Positions in the last delivered batch at which another sample replaces a bad one."""
        self.num_substituted = 0
        """The number of such positions in all delivered batches."""
        profiling.follow_environment()
        super().__init__(
            [parts.decode.pipeline],
            parts.decode.output_names,
            size=-1,
            last_batch_policy=policy,
            prepare_first_batch=False,
        )
        if is_resumed:
            self._warn_of_random_operators()
        self._begin(parts.begun)
        # Loops that were written for DALI's iterators read these attributes; nothing here depends on them.
        drops = policy == LastBatchPolicy.DROP
        rank_samples = self.num_samples // process.world_size if drops else -(-self.num_samples // process.world_size)
        set_epoch_size(self, rank_samples, policy)
        if not self._epoch.num_batches:
            _log.warning(
                "an epoch has no batch: %d samples do not make one of %d on %d ranks, and last_batch_policy is DROP",
                self.num_samples,
                self.batch_size,
                process.world_size,
            )
        self._resources = parts.resources.pop_all()  # from here on close() frees them
        self._closed = False

    @property
    def num_samples(self) -> int:
        """The number of samples of this epoch, over all ranks; it is exact before the first batch.

        With several slices each epoch deals the shards to them anew, and slices shorter than the longest repeat their
        first samples. The number is then that of the longest slice times the number of slices, and may differ in the
        next epoch. ``Select(epoch_samples=)`` fixes it.
        """
        return self._epoch.num_samples

    @property
    def epoch(self) -> int:
        """The epoch that is iterated now or next; the first is 0."""
        return self._epoch.feed.epoch

    @property
    def num_batches_left(self) -> int:
        """Batches of the epoch that are still to come; at 0, iterating again starts the next."""
        return self._epoch.num_batches - self._epoch.delivered

    @property
    def data_wait_s(self) -> float:
        """Seconds for which batches had to wait for their shards, since the loader was made."""
        return self._feeds.waited_s + self._epoch.feed.wait_s

    @property
    def bad_samples(self) -> list[BadSample]:
        """The bad samples that this rank has seen since the loader was made, in the order in which it saw them."""
        return list(self._seen.seen.values())

    @property
    def added_outputs(self) -> list[str]:
        """The names that are added to the graph's outputs: ``"key"``, ``"valid"``, both or none."""
        return [name for name, is_added in (("key", self._outputs.keys), ("valid", self._outputs.valid)) if is_added]

    def __len__(self) -> int:
        """The number of batches of this epoch, exact before the first batch; after a resume still of the whole epoch.

        With several slices another epoch may have another number: see `num_samples`.
        """
        return self._batching.num_steps(self.num_samples)

    def __iter__(self) -> "Loader":
        self._check_usable()
        if self._epoch.has_ended:
            self._start_epoch(self.epoch + 1)
        return self

    def __next__(self) -> list[dict[str, Any]]:
        return [self.next_batch()]

    def next_batch(self, form: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> dict[str, Any]:
        """Return the next batch as a plain dict, or what ``form`` makes of it.

        Raises:
            StopIteration: At the end of the epoch.
            DecodeError: See `dali_pipes.loader`.
        """
        profiling.look_for_profiler()
        with profiling.busy("hand-over"), self._decode.as_current_device():
            self._check_usable()
            if self._epoch.is_over:
                self._epoch.end()
                raise StopIteration
            self._agreement.check(self._order_told, epoch=self.epoch, position=self._epoch.start)
            if self._epoch.is_cut_short:  # by an exception: go on after the last delivered batch
                self._start_anew()
                self._begin(self._feeds.begin_again(self._epoch))
            self._epoch.ask()
            inputs, tensors = self._take()
            batch = inputs.batch
            delivered = self._hand_over(batch, tensors)
            formed = delivered if form is None else form(delivered)
            num_substituted = self.num_substituted + len(batch.substituted)
        # Note [counted last]: a batch that is counted must reach the loop. Python looks for Ctrl-C when a function is
        # entered, after a call of C code, and when a loop goes round; none of these follows the counting.
        self._epoch.deliver()
        self.num_valid, self.substituted, self.num_substituted = batch.num_valid, batch.substituted, num_substituted
        return formed

    def _take(self) -> tuple[BatchInputs, dict[str, Any]]:
        """Take the next decoded batch; if DALI refused it, put other samples in the places of the bad ones."""
        self._schedule(self._epoch.delivered, must_come=True)
        try:
            inputs, tensors = self._decode.take()
        except StopIteration:  # the feed ended early
            raise self._epoch.take_error() from None
        except RuntimeError as exc:
            refused = self._decode.scheduled.popleft()
            self._schedule(self._epoch.delivered + 1, must_come=False)
            try:
                return self._repair.decode(refused, exc)
            except DecodeError:
                # The batch is lost. Other errors, of the store or of a disk, pass by here: the batch is tried again.
                self._epoch.lose()
                raise
        self._repair.note_decoded(inputs)
        self._schedule(self._epoch.delivered + 1, must_come=False)
        return inputs, tensors

    def _hand_over(self, batch: Batch, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Make the delivered dict: the outputs as torch tensors, and the names added to them."""
        is_on_cpu = self._decode.device_id is None
        delivered = {
            # On the CPU there is no stream to agree on, and with a capsule torch does not ask: 4 us less.
            name: output if isinstance(output, list) else from_dlpack(output.__dlpack__() if is_on_cpu else output)
            for name, output in tensors.items()
        }
        if self._outputs.keys:
            delivered["key"] = batch.keys
        if self._outputs.valid:
            # Made on the device: a copy from pageable memory would wait for all earlier work of the stream.
            valid = torch.arange(len(batch), device=self._decode.torch_device) < batch.num_valid
            if batch.substituted:
                valid[list(batch.substituted)] = False
            delivered["valid"] = valid
        return delivered

    def as_dali(
        self,
        *,
        output_map: Sequence[str] | None = None,
        column_labels: bool = False,
        auto_reset: bool | str | None = False,
    ) -> DaliIterator:
        """Give the batches to a loop that was written for ``DALIClassificationIterator`` or another DALI iterator.

        With ``output_map=["data", "label"], column_labels=True`` the loop runs unchanged.

        Args:
            output_map: New names of the graph's outputs, in their order; ``None``: the graph's own names.
            column_labels: Give ``"label"`` as [batch, 1] instead of [batch].
            auto_reset: Start the next epoch when one has ended, as DALI does.

        Raises:
            ValueError: If the names do not fit the graph's outputs, or there is no label.
        """
        return DaliIterator(self, output_map=output_map, column_labels=column_labels, auto_reset=auto_reset)

    def as_dicts(self) -> DictBatches:
        """Give the ``len(loader)`` batches of an epoch as plain dicts, without the list around each."""
        return DictBatches(self)

    def as_dataset(self) -> LoaderDataset:
        """Give the batches to torch's ``DataLoader(loader.as_dataset(), batch_size=None, num_workers=0)``, or to
        torchdata's ``StatefulDataLoader``, which resumes at the exact next batch.
        """
        return LoaderDataset(self)

    def reset(self) -> None:
        """Give up the rest of this epoch and start the next one. Before an epoch's first batch this does nothing."""
        self._check_usable()
        if self._epoch.next_position:
            self._start_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Start the given epoch from its first sample, and give up the rest of the current one.

        Raises:
            ValueError: If ``epoch`` is negative.
        """
        self._check_usable()
        epoch = as_integer("epoch", epoch)
        if epoch < 0:
            raise ValueError(f"epoch must not be negative, got {epoch}")
        self._start_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the job, as plain values: delivered batches count, batches decoded ahead do not.

        It is the same on every rank after the same number of batches. After an error the batch that was lost does not
        count until the loop has the batch after it: a job that resumes from this state is given the lost batch again.
        See `dali_pipes.order.state.LoaderState`.
        """
        self._check_usable()
        return self._inputs.state(self._epoch.feed.plan, self._epoch.position).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken: the next batch begins with the exact next sample.

        No batch is replayed. Batch size and world size may differ from before. A job that is started again passes
        ``state=`` to `dali_pipes.loader` instead; then the start of the first epoch is not staged.

        Raises:
            StateError: If the state is of other shards or another order; the loader continues as before.
        """
        self._check_usable()
        loaded = LoaderState.from_dict(state)
        self._inputs.check(loaded)
        self._warn_of_random_operators()
        self._start_epoch(loaded.order.epoch, start=loaded.delivered)

    def close(self) -> None:
        """Stop the threads and free the cache share. Can be called twice; afterwards the loader cannot be iterated."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        with self._resources:  # closed last, even after an error
            self._epoch.feed.close()
            self._feeds.close()
            self._repair.close()
            self._decode.close()
            set_pipelines(self, [])

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # There is nothing to close if the constructor failed. In a forked child the loader belongs to the parent.
        if getattr(self, "_closed", True) or os.getpid() != self._pid:
            return
        if in_mutex() or in_fetcher() or in_reader():
            # The garbage collector runs in the middle of work on a cache, of this loader or another one. The threads
            # that close() ends may wait for that work.
            threading.Thread(target=self.close, name="dali-pipes-close", daemon=True).start()
        else:
            self.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise WorkerProcessError(
            "a loader cannot be copied or sent to another process, such as a DataLoader worker: it has threads and "
            "buffers of its own; use it directly, or with DataLoader(num_workers=0)"
        )

    def _warn_of_random_operators(self) -> None:
        if self._decode.random_operators:
            _log.warning(
                "the graph has random operators of DALI's own (%s): pixels after a resume differ from those of an "
                "unbroken run; draw from the graph's second argument, whose numbers belong to the sample",
                ", ".join(self._decode.random_operators),
            )

    def _order_told(self) -> dict[str, str]:
        """Name what must be the same on every rank, for the comparison before the first batch."""
        order = dataclasses.replace(self._inputs.order, epoch=self.epoch)
        inputs = {
            "the manifest's digest": self._inputs.manifest.digest[:16],
            "the position in the epoch": str(self._epoch.start),
            "batch_size": str(self.batch_size),
            "last_batch_policy": self._batching.last_batch_policy,
            "the selection of samples (dali_pipes.Select)": self._inputs.selection.digest[:16],
        }
        return inputs | {field.name: str(getattr(order, field.name)) for field in dataclasses.fields(order)}

    def _start_epoch(self, epoch: int, *, start: int = 0) -> None:
        if self._epoch.stands_at(epoch, start):
            return  # the right shards are staged already
        with profiling.busy("hand-over"):
            was_cut_short = self._epoch.is_cut_short
            self._epoch.is_cut_short = True  # until the new epoch has begun
            if was_cut_short:
                self._start_anew()
            else:
                if self._epoch.is_running:
                    self._decode.drain()
                self._feeds.retire(self._epoch.feed)
            self._begin(self._feeds.begin(epoch, start=start))

    def _start_anew(self) -> None:
        """Give up all work in progress: an interruption may have left any of it half done."""
        self._decode.rebuild()
        set_pipelines(self, [self._decode.pipeline])
        self._feeds.retire(self._epoch.feed)
        self._feeds.close()
        self.parts.stager.give_up()

    def _begin(self, epoch: Epoch) -> None:
        self._epoch = epoch
        # A weak reference: the decode pipeline must not keep the loader, or a loader that is dropped is never closed.
        next_inputs = weakref.WeakMethod(self._next_inputs)
        self._decode.feed = lambda: method() if (method := next_inputs()) is not None else None

    def _next_inputs(self) -> BatchInputs | None:
        """Read the decode pipeline's next batch; ``None`` at the end, and after an error, which the epoch keeps."""
        epoch = self._epoch
        if epoch.has_failed:
            return None  # DALI asks for all inputs of an iteration, also if the first one said that the epoch is over
        try:
            with profiling.busy("read"):
                read = epoch.feed.next()
            if read is None:
                return None
            with profiling.busy("inputs"):
                return self._repair.feed(*read)
        except Exception as exc:  # noqa: BLE001 (raised when all batches before it are delivered)
            epoch.keep(exc)
            return None

    def _schedule(self, delivered: int, *, must_come: bool) -> None:
        """Fill the queue of batches decoded ahead; with ``must_come`` wait for shards if no batch is in flight.

        ``delivered`` counts the epoch's batches that are delivered, or taken to be delivered next.
        """
        epoch, scheduled = self._epoch, self._decode.scheduled
        while not epoch.has_failed and delivered + len(scheduled) < epoch.num_batches:
            must_wait = must_come and not scheduled
            if len(scheduled) >= self._decode.prefetch_queue_depth or not (epoch.feed.is_ready() or must_wait):
                break
            self._decode.schedule()
        if not epoch.has_failed:
            self._feeds.prepare_after(epoch.feed, is_read=delivered + len(scheduled) >= epoch.num_batches)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise WorkerProcessError(
                f"this loader was made in process {self._pid} and is used in process {os.getpid()}, probably a "
                "DataLoader worker; it has threads of its own and needs no workers: use it directly, or with "
                "DataLoader(num_workers=0)"
            )
        if self._closed:
            raise ValueError("this loader is closed; make another")
