"""Find out that ranks read different orders, through the store of torch's process group.

The store is a table of small values that the processes of a group share. Nothing here is a collective operation, and
nothing waits for another rank: if two ranks disagree, the one that comes later finds out.
"""

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from dali_pipes.processes.ranks import Rank, distributed_rank

_log = logging.getLogger(__name__)

_HARM = "otherwise some samples are read twice and others never"


class Agreement:
    """Compares one loader with the same loader of the other ranks. Without a process group of this size, does nothing.

    ``number`` is the loader's number, counted in the same way on every rank.
    """

    def __init__(self, *, process: Rank, number: int) -> None:
        self._process, self._number = process, number
        self._start: tuple[int, int] | None = None
        self._num_starts = 0
        self._error: str | None = None

    def check(self, inputs: Callable[[], Mapping[str, str]], *, epoch: int, position: int) -> None:
        """Compare what has changed since the last batch; call it before each batch.

        Before the first batch all inputs are compared. Later, when another epoch or position is begun, this is compared
        in a thread, so that no step waits for the store; the batch after the comparison raises the error. An epoch that
        is begun anew at the same position counts once: a rank may look at a batch before the others start.

        Args:
            inputs: Returns names and values of the order's inputs, which must be the same on every rank.
            epoch: The epoch that is read.
            position: The position in it at which it was begun.

        Raises:
            ValueError: If something differs; names both ranks and both values.
        """
        if (epoch, position) != self._start:
            if self._start is None:
                self._compare_inputs(inputs())
            elif self._has_group():
                self._error = None
                self._num_starts += 1
                arguments = (self._num_starts, {"epoch": epoch, "position": position})
                threading.Thread(
                    target=self._compare_start, args=arguments, name="dali-pipes-agreement", daemon=True
                ).start()
            self._start = epoch, position
        if self._error is not None:
            raise ValueError(self._error)

    def _has_group(self) -> bool:
        ours = (self._process.rank, self._process.world_size)
        return self._process.world_size > 1 and distributed_rank() == ours

    def _key(self, name: object) -> str:
        # torchrun's store outlives workers that are started again, and still has their values.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return f"dali-pipes/{attempt}/{self._number}/{name}"

    def _compare_inputs(self, inputs: Mapping[str, str]) -> None:
        if not self._has_group():
            return
        store, rank = _store(), self._process.rank
        store.set(self._key(rank), json.dumps(dict(inputs)))
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
