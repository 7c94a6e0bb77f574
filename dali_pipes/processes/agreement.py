"""Find out that ranks are wrong or read different orders, through the store of torch's process group.

The store is a table of small values that the processes of a group share. Nothing here is a collective operation, and
nothing waits for another rank: if two ranks disagree, the one that comes later finds out.
"""

import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from dali_pipes.processes.ranks import Rank, distributed_rank, refuse_changed_rank

_log = logging.getLogger(__name__)

_HARM = "otherwise some samples are read twice and others never"

_numbers: Counter[str] = Counter()


def make_name(kind: str) -> str:
    """Name a loader for the comparison: the n-th one of a kind is compared with the n-th one of every other process.

    A kind is a world size: a loader that rank 0 alone opens, to validate, has a world size of 1. Late loaders are a
    kind of their own, counted when they are made: a rank may ask for lengths, which opens them, in another order.
    """
    _numbers[kind] += 1
    return f"{kind}/{_numbers[kind]}"


class Agreement:
    """Compares one loader with what this process is by now, and with the same loader of the other ranks.

    The latter needs a process group of the loader's world size. ``name`` is the same on every rank: see `make_name`.
    """

    def __init__(self, *, process: Rank, name: str) -> None:
        self._process, self._name = process, name
        self._start: tuple[int, int] | None = None
        self._group: tuple[int, int] | None = None
        self._num_starts = 0
        self._error: str | None = None

    def check(self, inputs: Callable[[], Mapping[str, str]], *, epoch: int, position: int) -> None:
        """Compare what has changed since the last batch; call it before each batch.

        Before the first batch, and before the first one after a process group was made, the rank is checked and all
        inputs are compared. Later, when another epoch or position is begun, this is compared in a thread, so that no
        step waits for the store; the batch after the comparison raises the error. An epoch that is begun anew at the
        same position counts once: a rank may look at a batch before the others start.

        Args:
            inputs: Returns names and values of the order's inputs, which must be the same on every rank.
            epoch: The epoch that is read.
            position: The position in it at which it was begun.

        Raises:
            ValueError: If something differs; names both ranks and both values. If another process of the group has the
                same rank. If this process has another rank by now: see `dali_pipes.processes.ranks`.
        """
        group = distributed_rank()
        if (epoch, position) != self._start or group != self._group:
            refuse_changed_rank(self._process)
            process, num_processes = group or (0, 1)
            if num_processes == self._process.world_size > 1:
                if self._start is None or group != self._group:
                    self._compare_inputs(inputs(), process=process)
                else:
                    self._begin_comparison({"epoch": epoch, "position": position})
            self._start, self._group = (epoch, position), group
        if self._error is not None:
            raise ValueError(self._error)

    def _begin_comparison(self, start: Mapping[str, int]) -> None:
        self._error = None
        self._num_starts += 1
        arguments = (self._num_starts, start)
        threading.Thread(target=self._compare_start, args=arguments, name="dali-pipes-agreement", daemon=True).start()

    def _key(self, name: object) -> str:
        # torchrun's store outlives workers that are started again, and still has their values.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return f"dali-pipes/{attempt}/{self._name}/{name}"

    def _compare_inputs(self, inputs: Mapping[str, str], *, process: int) -> None:
        store, rank = _store(), self._process.rank
        claimed = store.compare_set(self._key(rank), "", json.dumps({**inputs, "process": process}))
        if (claimant := json.loads(claimed)["process"]) != process:
            raise ValueError(
                f"two processes took the same rank: the loaders of processes {claimant} and {process} of the group are "
                f"both of rank {rank} of {self._process.world_size}; give each process its own rank=, or leave rank= "
                f"and world_size= out; {_HARM}"
            )
        for other in range(self._process.world_size):
            if other == rank or not store.check([self._key(other)]):
                continue
            theirs = json.loads(store.get(self._key(other)))
            for name, ours in inputs.items():
                if theirs.get(name) != ours:
                    raise ValueError(
                        f"the ranks disagree: {name} is {ours} on rank {rank} and {theirs.get(name)} on rank {other}; "
                        f"give every rank the same value; {_HARM}"
                    )

    def _compare_start(self, number: int, start: Mapping[str, int]) -> None:
        """Compare with the rank that came first to its start of this number, in one operation of the store."""
        rank = self._process.rank
        try:
            # A connection of its own, so that the program's operations and this one do not wait for each other.
            found = _store().clone().compare_set(self._key(f"start/{number}"), "", json.dumps({"rank": rank, **start}))
            theirs = json.loads(found)
        except Exception:  # noqa: BLE001 (the group may have been destroyed, and with it the store)
            _log.debug("the start of an epoch could not be compared with other ranks", exc_info=True)
            return
        other = theirs.pop("rank")
        if theirs != start and number == self._num_starts:
            self._error = (
                f"the ranks have parted: rank {rank} reads epoch {start['epoch']} from position {start['position']} "
                f"on, and rank {other} epoch {theirs['epoch']} from position {theirs['position']} on; call reset(), "
                f"set_epoch() and load_state_dict() alike on every rank; {_HARM}"
            )


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
