"""Let one thread at a time use a loader: a second one gets an error, and the first goes on undisturbed.

Note [one thread]: a loader's uses are a dict that is empty or holds the running `Use`. ``setdefault`` puts a use there
or returns the one that is there, in one step. The user ends its use by assigning a new dict, with no call in between:
Python looks for Ctrl-C at calls, and a use that was not ended would lock the loader for ever. See also Note [counted
last] in `dali_pipes.iterator`.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar


class Use:
    """One call of a loader's method ``name``, in the current thread."""

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
        self._check_usable()  # before `try`: if a late loader cannot be opened, `finally` must not open it again
        try:
            if (running := self._uses.setdefault("now", use)) is not use:
                self._check_usable()  # it may be closed by now
                raise running.refusal(use)
            return method(self, *args, **kwargs)
        finally:
            uses = self._uses
            if "now" in uses and uses["now"] is use:
                self._uses = {}

    return used
