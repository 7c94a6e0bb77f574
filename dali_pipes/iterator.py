"""The loader, which a training loop iterates epoch after epoch. `dali_pipes.opening.loader` makes it.

A loader owns its share of the cache file, the stager's threads, the decode pipeline and the feeds of its epochs. Except
for the work of the stager's and DALI's threads, everything runs in the thread that iterates.
"""

import dataclasses
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator
from torch.utils.dlpack import from_dlpack

from dali_pipes import profiling
from dali_pipes.arguments import as_integer
from dali_pipes.bad_samples.policy import BadSample
from dali_pipes.cache.directory import in_mutex
from dali_pipes.description import describe, shape_of
from dali_pipes.epoch import Epoch, LoaderParts
from dali_pipes.errors import DecodeError, WorkerProcessError
from dali_pipes.fetch.stager import in_fetcher
from dali_pipes.graph.asked import CU_SEQLENS
from dali_pipes.graph.batch_inputs import BatchInputs
from dali_pipes.graph.dali_internals import set_epoch_size, set_pipelines
from dali_pipes.graph.outputs import BatchDict
from dali_pipes.graph.packed import Packed
from dali_pipes.integrations.faces import Faces
from dali_pipes.metrics.figures import LOADERS, read_figures
from dali_pipes.order.state import LoaderState
from dali_pipes.processes.one_thread import Use, alone
from dali_pipes.processes.ranks import Agreement, make_name
from dali_pipes.reader.aio_reader import in_reader
from dali_pipes.reader.batch import Batch

_log = logging.getLogger(__name__)

# How often `Loader.close` looks whether another thread has its batch.
_POLL_S = 0.001


class Loader(Faces, DALIGenericIterator):  # type: ignore[misc]
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

    name: str = ""
    """The loader's name in metrics, such as ``"train"``: set it. Empty: the lowest number that no open loader of the
    process has."""

    def __init__(self, parts: LoaderParts, *, name_to_compare: str | None = None) -> None:
        self.parts: LoaderParts = parts  # for this package's commands, not for users
        self._inputs, self._batching, self._outputs = parts.inputs, parts.batching, parts.outputs
        self._decode, self._repair, self._seen = parts.decode, parts.repair, parts.seen
        self._feeds = parts.feeds
        self._counts = parts.counts
        self._uses: dict[str, Use] = {}  # Note [one thread]
        self._shapes: dict[str, str] = {}  # of the first batch's outputs
        self._pid = os.getpid()
        process, policy = parts.batching.process, LastBatchPolicy[parts.batching.last_batch_policy]
        name = name_to_compare or make_name(f"world size {process.world_size}")
        self._agreement = Agreement(process=process, name=name)
        self.num_valid = 0
        """The number of samples, from the front, in the last delivered batch that count: all, except those that
        ``FILL`` repeats in the epoch's last step, and none if a rank has no sample left in a ``PARTIAL`` one. A sample
        that replaces a bad one counts, too."""
        self.substituted: tuple[int, ...] = ()
        """Positions in the last delivered batch at which another sample replaces a bad one."""
        self.num_substituted: int = 0
        """The number of such positions in all delivered batches."""
        self.taker: object | None = None
        """A token of the face's iteration, or of the loader's own loop, that took the last batch; ``None``: the loader
        was put to another position since."""
        profiling.follow_environment()
        super().__init__(
            [parts.decode.pipeline],
            parts.decode.output_names,
            size=-1,
            last_batch_policy=policy,
            prepare_first_batch=False,
        )
        if parts.is_resumed:
            self._warn_of_random_operators()
        self._begin(parts.begun)
        # Loops that were written for DALI's iterators read these attributes; nothing here depends on them.
        drops = policy == LastBatchPolicy.DROP
        rank_samples = self.num_samples // process.world_size if drops else -(-self.num_samples // process.world_size)
        set_epoch_size(self, rank_samples, policy)
        self._resources = parts.resources.pop_all()  # from here on close() frees them
        self._closed = False
        self.number: int = LOADERS.join(self)

    def __repr__(self) -> str:
        current, names = self._epoch, (*self.output_map, *self.added_outputs)
        return describe(
            self.parts,
            position=f"{len(self)} in epoch {self.epoch}, {current.position} of {self.num_samples} samples delivered",
            outputs={name: self._shapes.get(name, "") for name in names},
            is_closed=self._closed,
        )

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
    def position(self) -> int:
        """Samples of the epoch that are delivered, on all ranks together."""
        return self._epoch.position

    @property
    def num_batches_ahead(self) -> int:
        """Batches that DALI has decoded, or is decoding."""
        return len(self._decode.scheduled)

    @property
    def is_open(self) -> bool:
        """Whether the loader is opened; only one with ``rank="late"`` is not, until it is needed."""
        return True

    @property
    def num_delivered(self) -> int:
        """Batches of this epoch that were delivered or lost since it was started or resumed."""
        return self._epoch.delivered

    @property
    def has_seen_end(self) -> bool:
        """Whether this epoch ended with `StopIteration`, and the next one has not begun."""
        return self._epoch.has_seen_end

    @property
    def data_wait_s(self) -> float:
        """Seconds for which batches had to wait for their shards, since the loader was made."""
        return self._counts.shard_wait.seconds()

    @property
    def bad_samples(self) -> list[BadSample]:
        """The bad samples that this rank has seen since the loader was made, in the order in which it saw them."""
        return list(self._seen.seen.values())

    @property
    def added_outputs(self) -> list[str]:
        """The names that are added to the graph's outputs: ``"cu_seqlens"``, ``"key"``, ``"valid"``, some or none."""
        added = ((CU_SEQLENS, self._decode.inputs.packed), ("key", self._outputs.keys), ("valid", self._outputs.valid))
        return [name for name, is_added in added if is_added]

    def __len__(self) -> int:
        """The number of batches of this epoch, exact before the first batch; after a resume still of the whole epoch.

        With several slices another epoch may have another number: see `num_samples`.
        """
        return self._batching.num_steps(self._epoch.feed.plan)

    @alone
    def __iter__(self) -> "Loader":
        if self._epoch.has_ended:
            self._start_epoch(self.epoch + 1)
        return self

    def __next__(self) -> list[BatchDict]:
        return [self.next_batch()]

    def next_batch(self, form: Callable[[dict[str, Any]], Any] | None = None, *, taker: object = "own loop") -> Any:
        """Return the next batch as a plain dict, or what ``form`` makes of it; remember the ``taker``.

        Raises:
            StopIteration: At the end of the epoch.
            DecodeError: See `dali_pipes.loader`.
        """
        profiling.look_for_profiler()
        # What `alone` does, but without its call: Python would look for Ctrl-C after it, when the batch is counted.
        use = Use("next_batch")
        self._check_usable()  # before `try`: see `alone`
        try:
            if (running := self._uses.setdefault("now", use)) is not use:
                self._check_usable()  # it may be closed by now
                raise running.refusal(use)
            with self._counts.hand_over, self._decode.as_current_device():
                self.taker = taker
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
            # Note [counted last]: a batch that is counted must reach the loop. Python looks for Ctrl-C when a function
            # is entered, after a call of C code, and when a loop goes round; none of these follows the counting.
            self._epoch.deliver()
            self._counts.batches += 1
            self._counts.samples += batch.num_valid
            self.num_valid, self.substituted, self.num_substituted = batch.num_valid, batch.substituted, num_substituted
        finally:
            uses = self._uses
            if "now" in uses and uses["now"] is use:
                self._uses = {}
        return formed

    def _take(self) -> tuple[BatchInputs, dict[str, Any]]:
        """Take the next decoded batch; if DALI refused it, put other samples in the places of the bad ones."""
        self._schedule(self._epoch.delivered, must_come=True)
        try:
            with self._counts.decode_wait:
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
        delivered: dict[str, Any] = {}
        for name, output in tensors.items():
            if isinstance(output, Packed):
                delivered[name], delivered[CU_SEQLENS] = output.tensor, output.offsets()
            elif isinstance(output, list):
                delivered[name] = output
            else:
                # On the CPU there is no stream to agree on, and with a capsule torch does not ask: 4 us less.
                delivered[name] = from_dlpack(output.__dlpack__() if is_on_cpu else output)
        if self._outputs.keys:
            delivered["key"] = batch.keys
        if self._outputs.valid:
            # Made on the device: a copy from pageable memory would wait for all earlier work of the stream.
            valid = torch.arange(len(batch), device=self._decode.torch_device) < batch.num_valid
            if batch.substituted:
                valid[list(batch.substituted)] = False
            delivered["valid"] = valid
        if not self._shapes:
            self._shapes = {name: shape_of(output) for name, output in delivered.items()}
        return delivered

    def stats(self) -> dict[str, float]:
        """Return the figures of this loader: counters since it was made, and what holds now. It takes some 20 us.

        ``wandb.log(loader.stats())`` and ``mlflow.log_metrics(loader.stats())`` take it as it is. Any thread may call
        it, also after `close`. The page "Watch a job" lists the figures.
        """
        return read_figures(self)

    @alone
    def reset(self) -> None:
        """Give up the rest of this epoch and start the next one. Before an epoch's first batch this does nothing."""
        if self._epoch.next_position:
            self._start_epoch(self.epoch + 1)

    @alone
    def set_epoch(self, epoch: int, *, batch: int = 0) -> None:
        """Start the given epoch, and give up the rest of the current one. The batches before ``batch`` are not read.

        Raises:
            ValueError: If ``epoch`` is negative, or the epoch has fewer batches than ``batch``.
        """
        epoch, batch = as_integer("epoch", epoch), as_integer("batch", batch)
        if epoch < 0:
            raise ValueError(f"epoch must not be negative, got {epoch}")
        plan = self._inputs.plan(epoch) if batch else None
        num_batches = 0 if plan is None else self._batching.num_steps(plan)
        if not 0 <= batch <= num_batches:
            raise ValueError(f"batch must be in [0, {num_batches}], the batches of epoch {epoch}, got {batch}")
        self._start_epoch(epoch, start=0 if plan is None else self._batching.position(plan, batch))

    def state_dict(self, num_samples: int | None = None, from_beginning: bool = True) -> dict[str, Any]:
        """Return the position of the job, as plain values: delivered batches count, batches decoded ahead do not.

        It is the same on every rank after the same number of batches. After an error the batch that was lost does not
        count until the loop has the batch after it: a job that resumes from this state is given the lost batch again.
        After `close` it is the last position. See `dali_pipes.order.state.LoaderState`.

        Args:
            num_samples: Samples of this epoch, over all ranks, that the trainer has used. Trainers tell it that take
                batches ahead, such as Composer; ``None``: those of the delivered batches.
            from_beginning: Whether ``num_samples`` counts from the beginning of the epoch, or from its resume.

        Raises:
            ValueError: If ``num_samples`` is negative, or is given to a loader with buckets under
                ``last_batch_policy="FILL"``.
        """
        self._check_process()
        epoch = self._epoch  # another thread may begin the next one meanwhile
        position = epoch.position
        if num_samples is not None:
            used = as_integer("num_samples", num_samples)
            if used < 0:
                raise ValueError(f"num_samples must not be negative, got {used}")
            start = 0 if from_beginning else epoch.start
            position = min(self._batching.position_of(epoch.feed.plan, used, start=start), position)
        return self._inputs.state(epoch.feed.plan, position).to_dict()

    def checkpoints(self) -> NoReturn:
        """Refuse: a loader's state takes the place of the checkpoints of DALI's iterators."""
        raise ValueError(
            "a loader has no checkpoints of DALI pipelines: save state_dict(), and pass it to "
            "dali_pipes.loader(state=) or load_state_dict()"
        )

    def state_at(self, epoch: int) -> dict[str, Any]:
        """Return the state of a loader that stands at the start of an epoch."""
        self._check_process()
        return self._inputs.state(self._inputs.plan(epoch), 0).to_dict()

    @alone
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken: the next batch begins with the exact next sample.

        No batch is replayed. Batch size and world size may differ from before. A job that is started again passes
        ``state=`` to `dali_pipes.loader` instead; then the start of the first epoch is not staged.

        Raises:
            StateError: If the state is of other shards or another order; the loader continues as before.
        """
        loaded = LoaderState.from_dict(state)
        self._inputs.check(loaded)
        self._warn_of_random_operators()
        self._start_epoch(loaded.order.epoch, start=loaded.delivered)

    def close(self) -> None:
        """Stop the threads and free the cache share. Can be called twice; afterwards the loader cannot be iterated.

        If another thread is taking a batch, this waits until it has it, or has the error that it must not wait for
        shards any more.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        try:
            self._end_uses()
        except BaseException:
            self._closed = False  # Ctrl-C: nothing is freed yet, and close() may be called again
            raise
        try:
            with self._resources:  # closed last, even after an error
                self._epoch.feed.close()
                self._feeds.close()
                self._repair.close()
                self._decode.close()
                set_pipelines(self, [])
        finally:
            LOADERS.leave(self, self.number)

    def _end_uses(self) -> None:
        """Wait for a running use of another thread; from now on there is no other one."""
        use = Use("close")
        while (running := self._uses.setdefault("now", use)) is not use:
            if running.thread is use.thread or sys.is_finalizing():
                return  # a signal's handler; or a thread that will not go on
            self.parts.stager.close()
            time.sleep(_POLL_S)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # There is nothing to close if the constructor failed, or a late loader was not opened. In a forked child the
        # loader belongs to the parent. At the end of the program the names of this module may be gone already; then all
        # that is open ends with the process.
        if vars(self).get("_closed", True) or globals()["os"] is None or os.getpid() != self._pid:
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
        self.taker = None
        if self._epoch.stands_at(epoch, start):
            self._epoch.has_seen_end = False
            return  # the right shards are staged already
        with self._counts.hand_over:
            was_cut_short = self._epoch.is_cut_short
            self._epoch.is_cut_short = True  # until the new epoch has begun
            if was_cut_short:
                self._start_anew()
            else:
                if self._epoch.is_running:
                    self._decode.drain()
                self._epoch.feed.close()
            self._begin(self._feeds.begin(epoch, start=start))

    def _start_anew(self) -> None:
        """Give up all work in progress: an interruption may have left any of it half done."""
        self._decode.rebuild()
        set_pipelines(self, [self._decode.pipeline])
        self._epoch.feed.close()
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
            with self._counts.read:
                read = epoch.feed.next()
            return None if read is None else self._repair.feed(*read)
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
            with self._counts.inputs:
                self._decode.schedule()
        if not epoch.has_failed:
            self._feeds.prepare_after(epoch.feed, is_read=delivered + len(scheduled) >= epoch.num_batches)

    def _check_usable(self) -> None:
        self._check_process()
        if self._closed:
            raise ValueError("this loader is closed; make another")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise WorkerProcessError(
                f"this loader was made in process {self._pid} and is used in process {os.getpid()}, probably a "
                "DataLoader worker; it has threads of its own and needs no workers: use it directly, or with "
                "DataLoader(num_workers=0)"
            )
