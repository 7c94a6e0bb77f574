"""Deliver a loader's batches to the loop that iterates, one thread at a time; keep the position.

A delivery owns the parts of the loader: its share of the cache file, the stager's threads, the decode pipeline and the
feeds of its epochs. `dali_pipes.iterator.Loader` and its faces iterate a delivery. Except for the work of the threads
that stage, read and decode, everything runs in the thread that iterates.

Note [one thread]: the uses of a delivery are a dict that is empty or holds the running `Use`. ``setdefault`` puts a use
there or returns the one that is there, in one step. The user ends its use by assigning a new dict, with no call in
between: Python looks for Ctrl-C at calls, and a use that was not ended would lock the loader for ever.
"""

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import torch
from torch.utils.dlpack import from_dlpack

from dali_pipes import profiling
from dali_pipes.arguments import as_integer
from dali_pipes.cache.directory import in_mutex
from dali_pipes.epoch import Epoch, LoaderParts
from dali_pipes.errors import DecodeError, WorkerProcessError
from dali_pipes.fetch.stager import in_own_thread
from dali_pipes.graph.decode import BatchInputs
from dali_pipes.graph.definition import CU_SEQLENS
from dali_pipes.graph.finish import Packed
from dali_pipes.metrics.counts import Counts
from dali_pipes.metrics.figures import LOADERS, read_figures
from dali_pipes.opening import LoaderArguments, check_late, open_parts
from dali_pipes.order.state import LoaderState
from dali_pipes.processes.ranks import Agreement, find_rank, make_name
from dali_pipes.reader.batch import Batch

_log = logging.getLogger(__name__)

# How often `Delivery.close` looks whether another thread has its batch.
_POLL_S = 0.001

# Set when the program ends: from then on DALI ends its pipelines, also those that a daemon thread iterates.
_ending = threading.Event()
atexit.register(_ending.set)


class Use:
    """One call of a method ``name``, in the current thread."""

    def __init__(self, name: str) -> None:
        self.name, self.thread = name, threading.current_thread()

    def refusal(self, other: "Use") -> RuntimeError:
        """Make the error of another use that comes while this one runs."""
        return RuntimeError(
            f"this loader is in use: thread '{other.thread.name}' called {other.name}() while thread "
            f"'{self.thread.name}' was in {self.name}(), and would get its batches; use a loader in one thread and "
            "hand the batches over by a queue.Queue, or take a threading.Lock around each call"
        )


_Arguments = ParamSpec("_Arguments")
_Returned = TypeVar("_Returned")


def alone(
    method: Callable[Concatenate[Any, _Arguments], _Returned],
) -> Callable[Concatenate[Any, _Arguments], _Returned]:
    """Make a method refuse to run beside another use of its object: Note [one thread]."""

    @functools.wraps(method)
    def used(self: Any, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Returned:
        use = Use(method.__name__)
        self.check_usable()  # before `try`: if a late loader cannot be opened, `finally` must not open it again
        try:
            if (running := self._uses.setdefault("now", use)) is not use:
                self.check_usable()  # it may be closed by now
                raise running.refusal(use)
            return method(self, *args, **kwargs)
        except Exception as exc:
            _stay_if_ending(exc)
            raise
        finally:
            uses = self._uses
            if "now" in uses and uses["now"] is use:
                self._uses = {}

    return used


def _stay_if_ending(exc: Exception) -> None:
    """Keep a daemon thread with an error until the program that ends has stopped it: these errors are DALI's, and of no
    use. The end of an epoch is none: who joins the thread would wait for ever.
    """
    if _ending.is_set() and threading.current_thread().daemon and not isinstance(exc, StopIteration):
        threading.Event().wait()


class Delivery:
    """The batches of one loader, in order, and the position in them; raises what `dali_pipes.loader` raises.

    With ``rank="late"`` it opens its parts when they are first needed: by then the process group is there, and with it
    the rank. Otherwise they are open from the beginning.
    """

    parts: LoaderParts

    def __init__(self, arguments: LoaderArguments) -> None:
        self.arguments = arguments
        self.counts = Counts()
        self.num_valid = 0
        self.substituted: tuple[int, ...] = ()
        self.taker: object | None = None
        """A token of the face's iteration, or of the loader's own loop, that took the last batch; ``None``: the loader
        was put to another position since."""
        self._has_told_rest = False
        self._has_told_reset = self._has_told_random = False
        self.is_closed = False
        self._pid = 0
        self._uses: dict[str, Use] = {}  # Note [one thread]
        self._opening = threading.RLock()
        if arguments.rank == "late":
            check_late(arguments)
            self._name = make_name("late")
        else:
            self._open()

    def __getattr__(self, name: str) -> Any:
        if name != "parts":
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        with self._opening:
            if not self.is_open:
                try:
                    self._open()
                except AttributeError as exc:  # it would say that the attribute asked for does not exist
                    raise RuntimeError(f"the loader could not be opened: {exc}") from exc
            return vars(self)["parts"]

    def _open(self) -> None:
        if self.is_closed:
            raise _closed()
        profiling.follow_environment()
        arguments, is_late = self.arguments, self.arguments.rank == "late"
        rank = None if arguments.rank == "late" else arguments.rank
        process = find_rank(rank=rank, world_size=arguments.world_size, mesh=arguments.mesh)
        with contextlib.ExitStack() as resources:
            parts = open_parts(arguments, process, self.counts, resources)
            # A signal's handler may have closed or used a late loader meanwhile: then these parts are freed at once.
            if self.is_closed:
                raise _closed()
            if self.is_open:
                return
            name = self._name if is_late else make_name(f"world size {process.world_size}")
            self._agreement = Agreement(process=process, name=name)
            self.pipelines = [parts.decode.pipeline]  # the list that DALI's iterator keeps
            # It must not keep this object: a loader that is dropped would never be closed.
            self._next_inputs = functools.partial(parts.epochs.next_inputs, parts.repair.feed)
            parts.decode.feed = self._next_inputs
            self._pid = os.getpid()
            self._resources, self.parts = resources.pop_all(), parts  # from here on close() frees them
        if arguments.state is not None:
            self._warn_of_random_operators()
        LOADERS.join(parts)

    @property
    def is_open(self) -> bool:
        return "parts" in vars(self)

    @property
    def current(self) -> Epoch:
        return self.parts.epochs.current

    @property
    def added_outputs(self) -> list[str]:
        """The names that are added to the graph's outputs: ``"cu_seqlens"``, ``"key"``, ``"valid"``, some or none."""
        outputs = self.arguments.outputs
        added = ((CU_SEQLENS, self.parts.decode.inputs.packed), ("key", outputs.keys), ("valid", outputs.valid))
        return [name for name, is_added in added if is_added]

    def num_batches_of(self, epoch: int | None = None) -> int:
        """Batches of a whole epoch; ``None``: the current one."""
        plan = self.current.feed.plan if epoch is None else self.parts.inputs.plan(epoch)
        return plan.num_steps(self.parts.batching)

    @alone
    def begin(self) -> None:
        """Begin an iteration: the next epoch if this one has ended, else the rest of this one."""
        current = self.current
        if current.has_ended:
            self._start_epoch(current.number + 1)
        elif current.delivered and not self._has_told_rest:
            self._has_told_rest = True
            num_batches = self.num_batches_of()
            _log.warning(
                "this iteration is the rest of epoch %d, after %d of its %d batches, as with DALI's iterators; to "
                "begin the next epoch instead, call reset() before, or iterate loader.as_dataloader()",
                current.number,
                num_batches - current.num_batches_left,
                num_batches,
            )

    def claim(self, token: object | None) -> object:
        """Return the token of a loop that is to take the next batch, a new one if it has none yet.

        Raises:
            RuntimeError: If another loop has taken a batch since this one's last.
        """
        if token is not None and self.taker not in (None, token):
            raise iterated_elsewhere()
        return token or object()

    def next_batch(self, form: Callable[[dict[str, Any]], Any], *, taker: object) -> Any:
        """Return what ``form`` makes of the next batch, a plain dict; `StopIteration` at the epoch's end.

        ``taker`` is the token of the loop that takes it.
        """
        profiling.look_for_profiler()
        # What `alone` does, but without its call: Python would look for Ctrl-C after it, when the batch is counted.
        use = Use("next_batch")
        self.check_usable()  # before `try`: see `alone`
        try:
            if (running := self._uses.setdefault("now", use)) is not use:
                self.check_usable()  # it may be closed by now
                raise running.refusal(use)
            parts, epochs, counts = self.parts, self.parts.epochs, self.counts
            with counts.hand_over, parts.decode.as_current_device():
                self.taker = taker
                epoch = epochs.current
                if epoch.is_over:
                    epoch.end()
                    raise StopIteration
                compared = functools.partial(
                    parts.inputs.compared, parts.batching, epoch=epoch.number, start=epoch.start
                )
                self._agreement.check(compared, epoch=epoch.number, position=epoch.start)
                if epoch.is_cut_short:  # by an exception: go on after the last delivered batch
                    self._start_anew()
                    epochs.begin_again()
                    epoch = epochs.current
                epoch.ask()
                inputs, tensors = self._take(epoch)
                batch = inputs.batch
                formed = form(self._hand_over(batch, tensors))
                num_substituted = counts.substituted + len(batch.substituted)
            # Note [counted last]: a batch that is counted must reach the loop. Python looks for Ctrl-C when a function
            # is entered, after a call of C code, and when a loop goes round; none of these follows the counting.
            epoch.deliver()
            counts.batches += 1
            counts.samples += batch.num_valid
            self.num_valid, self.substituted, counts.substituted = batch.num_valid, batch.substituted, num_substituted
        except Exception as exc:
            _stay_if_ending(exc)
            raise
        finally:
            uses = self._uses
            if "now" in uses and uses["now"] is use:
                self._uses = {}
        return formed

    def _take(self, epoch: Epoch) -> tuple[BatchInputs, dict[str, Any]]:
        """Take the next decoded batch; if DALI refused it, put other samples in the places of the bad ones."""
        decode, repair = self.parts.decode, self.parts.repair
        self._schedule(epoch, epoch.delivered, must_come=True)
        try:
            with self.counts.decode_wait:
                inputs, tensors = decode.take()
        except StopIteration:  # the feed ended early
            raise epoch.take_error() from None
        except RuntimeError as exc:
            refused = decode.scheduled.popleft()
            self._schedule(epoch, epoch.delivered + 1, must_come=False)
            try:
                return repair.decode(refused, exc)
            except DecodeError:
                # The batch is lost. Other errors, of the store or of a disk, pass by here: the batch is tried again.
                epoch.lose()
                raise
        repair.note_decoded(inputs)
        self._schedule(epoch, epoch.delivered + 1, must_come=False)
        return inputs, tensors

    def _schedule(self, epoch: Epoch, delivered: int, *, must_come: bool) -> None:
        """Fill the queue of batches decoded ahead; with ``must_come`` wait for shards if no batch is in flight."""
        decode, scheduled = self.parts.decode, self.parts.decode.scheduled
        while epoch.error is None and delivered + len(scheduled) < epoch.num_batches:
            must_wait = must_come and not scheduled
            if len(scheduled) >= decode.prefetch_queue_depth or not (epoch.feed.is_ready() or must_wait):
                break
            with self.counts.inputs:
                decode.schedule()
        if epoch.error is None:
            self.parts.epochs.prepare_next(is_read=delivered + len(scheduled) >= epoch.num_batches)

    def _hand_over(self, batch: Batch, tensors: Mapping[str, Any]) -> dict[str, Any]:
        decode, outputs = self.parts.decode, self.arguments.outputs
        is_on_cpu = decode.device_id is None
        delivered: dict[str, Any] = {}
        for name, output in tensors.items():
            if isinstance(output, Packed):
                delivered[name], delivered[CU_SEQLENS] = output.tensor, output.offsets()
            elif isinstance(output, list | torch.Tensor):
                delivered[name] = output
            else:
                # On the CPU there is no stream to agree on, and with a capsule torch does not ask: 4 us less.
                delivered[name] = from_dlpack(output.__dlpack__() if is_on_cpu else output)
        if outputs.keys:
            delivered["key"] = batch.keys
        if outputs.valid:
            # Made on the device: a copy from pageable memory would wait for all earlier work of the stream.
            valid = torch.arange(len(batch), device=decode.torch_device) < batch.num_valid
            if batch.substituted:
                valid[list(batch.substituted)] = False
            delivered["valid"] = valid
        return delivered

    @alone
    def reset(self) -> None:
        """See `dali_pipes.iterator.Loader.reset`; so are the methods below."""
        current = self.current
        if current.num_batches_left and current.next_position and not self._has_told_reset:
            self._has_told_reset = True
            _log.warning(
                "reset() in mid-epoch gives up the rest of epoch %d, %d batches, where DALI's iterators go on with it; "
                "leave reset() out to have the rest",
                current.number,
                current.num_batches_left,
            )
        if current.next_position:
            self._start_epoch(current.number + 1)

    @alone
    def set_epoch(self, epoch: int, *, batch: int = 0) -> None:
        epoch, batch = as_integer("epoch", epoch), as_integer("batch", batch)
        if epoch < 0:
            raise ValueError(f"epoch must not be negative, got {epoch}")
        num_batches = self.num_batches_of(epoch) if batch else 0
        if not 0 <= batch <= num_batches:
            raise ValueError(f"batch must be in [0, {num_batches}], the batches of epoch {epoch}, got {batch}")
        inputs, batching, current = self.parts.inputs, self.parts.batching, self.current
        if (epoch or batch) and not current.number and not current.is_over:  # a job that resumes by its own count
            self._warn_of_random_operators()
        self._start_epoch(epoch, start=inputs.plan(epoch).position(batch, batching) if batch else 0)

    def state_dict(self, num_samples: int | None = None, from_beginning: bool = True) -> dict[str, Any]:
        self._check_process()
        epoch = self.current  # another thread may begin the next one meanwhile
        position = epoch.position
        if num_samples is not None:
            used = as_integer("num_samples", num_samples)
            if used < 0:
                raise ValueError(f"num_samples must not be negative, got {used}")
            start = 0 if from_beginning else epoch.start
            position = min(epoch.feed.plan.position_of(used, self.parts.batching, start=start), position)
        elif epoch.has_seen_end:
            return self.state_at(epoch.number + 1)
        return self.parts.inputs.state(epoch.feed.plan, position).to_dict()

    def state_at(self, epoch: int) -> dict[str, Any]:
        """Return the state of a loader that stands at the start of an epoch."""
        self._check_process()
        inputs = self.parts.inputs
        return inputs.state(inputs.plan(epoch), 0).to_dict()

    @alone
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loaded = LoaderState.from_dict(state)
        self.parts.inputs.check(loaded)
        self._warn_of_random_operators()
        self._start_epoch(loaded.order.epoch, start=loaded.delivered)

    def stats(self) -> dict[str, float]:
        """Return the loader's figures; none until it is opened, so that a callback does not open it too early."""
        return read_figures(self.parts) if self.is_open else {}

    def close(self) -> None:
        with self._opening:
            # At the end of the program Python has stopped the daemon threads: a join would never return.
            if self.is_closed or not self.is_open or sys.is_finalizing():
                self.is_closed = True
                return
        if os.getpid() != self._pid:
            return
        self.is_closed = True
        try:
            self._end_uses()
        except BaseException:
            self.is_closed = False  # Ctrl-C: nothing is freed yet, and close() may be called again
            raise
        try:
            with self._resources:  # closed last, even after an error
                self.parts.epochs.close()
                self.parts.decode.close()
                self.pipelines.clear()
        finally:
            LOADERS.leave(self.parts)

    def _end_uses(self) -> None:
        """Wait for a running use of another thread; from now on there is no other one."""
        use = Use("close")
        while (running := self._uses.setdefault("now", use)) is not use:
            if running.thread is use.thread:
                return  # a signal's handler
            self.parts.stager.close()
            time.sleep(_POLL_S)

    def __del__(self) -> None:
        # There is nothing to close if the constructor failed, or a late loader was not opened. When the program ends,
        # everything that is open ends with the process: see `close`. This module's names may be cleared by then.
        if "parts" not in vars(self) or self.is_closed or globals()["sys"] is None or sys.is_finalizing():
            return
        if in_mutex() or in_own_thread():
            # The garbage collector runs in the middle of work on a cache, of this loader or another one. The threads
            # that close() ends may wait for that work.
            threading.Thread(target=self.close, name="dali-pipes-close", daemon=True).start()
        else:
            self.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise WorkerProcessError(
            "a loader cannot be copied, pickled or sent to another process, such as a DataLoader worker: it has "
            "threads and buffers of its own; use it directly, or with DataLoader(num_workers=0); a checkpoint keeps "
            "its state_dict()"
        )

    def _warn_of_random_operators(self) -> None:
        if self.parts.decode.random_operators and not self._has_told_random:
            self._has_told_random = True
            _log.warning(
                "the graph has random operators of DALI's own (%s): if this job goes on with another one, its pixels "
                "differ from those of an unbroken run; draw from the graph's second argument, whose numbers belong to "
                "the sample",
                ", ".join(self.parts.decode.random_operators),
            )

    def _start_epoch(self, epoch: int, *, start: int = 0) -> None:
        self.taker = None
        epochs, current = self.parts.epochs, self.current
        if current.stands_at(epoch, start):
            current.has_seen_end = False
            return  # the right shards are staged already
        with self.counts.hand_over:
            was_cut_short = current.is_cut_short
            current.is_cut_short = True  # until the new epoch has begun
            if was_cut_short:
                self._start_anew()
            else:
                if current.is_running:
                    self.parts.decode.drain()
                    self.pipelines[:] = [self.parts.decode.pipeline]  # it may be another one now
                    self.parts.decode.feed = self._next_inputs
                current.feed.close()
            epochs.begin(epoch, start=start)

    def _start_anew(self) -> None:
        """Give up all work in progress: an interruption may have left any of it half done."""
        decode = self.parts.decode
        decode.rebuild()
        decode.feed = self._next_inputs
        self.pipelines[:] = [decode.pipeline]
        self.parts.epochs.close()
        self.parts.stager.give_up()

    def check_usable(self) -> None:
        self._check_process()
        if self.is_closed:
            raise _closed()

    def _check_process(self) -> None:
        if self.is_open and os.getpid() != self._pid:
            raise WorkerProcessError(
                f"this loader was made in process {self._pid} and is used in process {os.getpid()}, probably a "
                "DataLoader worker; it has threads of its own and needs no workers: use it directly, or with "
                "DataLoader(num_workers=0)"
            )


def iterated_elsewhere() -> RuntimeError:
    """Make the error of an iterator that is not the last one that took a batch: the batches between would be lost."""
    return RuntimeError(
        "the loader was iterated elsewhere, or put to another position, since this iterator's last batch; make a new "
        "iterator, or open a loader for each loop"
    )


def _closed() -> ValueError:
    return ValueError("this loader is closed; make another")
