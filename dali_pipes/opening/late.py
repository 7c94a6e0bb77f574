"""A loader that is opened when it is first needed: by then the process group is there, and with it the rank."""

import contextlib
import os
import threading
from typing import Any

from dali_pipes.data_set.find import is_in_directories
from dali_pipes.description import describe_unopened
from dali_pipes.iterator import Loader
from dali_pipes.opening.checked import LoaderArguments
from dali_pipes.opening.parts import named_shards, open_parts, refuse_workers
from dali_pipes.processes.ranks import find_rank, make_name

# The attributes that `Loader` and DALI's base class set when they are made. Frameworks look for attributes of other
# names before they start their process group; these must not open a loader.
OPENED = frozenset(
    {
        *("_agreement", "_auto_reset", "_batching", "_closed", "_counter", "_counts", "_decode"),
        *("_enable_checkpointing", "_epoch", "_ever_consumed", "_ever_scheduled", "_feeds", "_first_batch", "_inputs"),
        *("_last_batch_padded", "_last_batch_policy", "_num_gpus", "_output_categories", "_outputs", "_pid", "_pipes"),
        *("_prepare_first_batch", "_reader_name", "_repair", "_resources", "_seen", "_shapes", "_size", "_uses"),
        *("batch_size", "num_substituted", "num_valid", "number", "output_map", "parts", "substituted", "taker"),
    }
)


class LateLoader(Loader):
    """A `Loader` that becomes whole when its length, its first batch or anything else of it is asked for.

    Raises:
        ValueError: If ``world_size`` is given.
        StoreError, DataError: If the shards are in a directory, and are not there. Those in a bucket are looked for
            when the loader is opened.
    """

    def __init__(self, arguments: LoaderArguments, *, world_size: int | None) -> None:
        if world_size is not None:
            raise ValueError(
                f"rank='late' finds the world size, too; leave world_size out, got world_size={world_size!r}"
            )
        refuse_workers()
        with contextlib.ExitStack() as resources:
            if is_in_directories(arguments.shards):
                named_shards(arguments, resources)
        self._arguments, self._name_to_compare = arguments, make_name("late")
        self._lock = threading.RLock()
        self._is_opening = False

    def __getattr__(self, name: str) -> Any:
        if name in OPENED:
            with self._lock:
                if "_closed" not in vars(self) and not self._is_opening:
                    self._open()
                if name in vars(self):
                    return vars(self)[name]
                if not self._is_opening:
                    raise ValueError("this loader is closed; make another")
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    @property
    def is_open(self) -> bool:
        """Whether the loader is opened."""
        return "_closed" in vars(self)

    def __repr__(self) -> str:
        if "parts" in vars(self):
            return super().__repr__()
        return describe_unopened(self._arguments, is_closed="_closed" in vars(self))

    def stats(self) -> dict[str, float]:
        """As `Loader.stats`; empty until the loader is opened, so that a callback does not open it too early."""
        return super().stats() if "parts" in vars(self) else {}

    def close(self) -> None:
        """As `Loader.close`; a loader that was never opened stays so."""
        with self._lock:
            if "_closed" not in vars(self):
                self._closed, self._pid = True, os.getpid()
        super().close()

    def _open(self) -> None:
        unopened = dict(vars(self))
        self._is_opening = True
        try:
            with contextlib.ExitStack() as resources:
                parts = open_parts(self._arguments, find_rank(rank=None, world_size=None), resources)
                super().__init__(parts, name_to_compare=self._name_to_compare)
        except BaseException as exc:
            self.__dict__ = unopened
            if isinstance(exc, AttributeError):  # it would say that the attribute asked for does not exist
                raise RuntimeError(f"the loader could not be opened: {exc}") from exc
            raise
        self._is_opening = False
