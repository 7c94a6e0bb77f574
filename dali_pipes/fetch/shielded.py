"""Run the main thread's calls where no signal interrupts them.

# Note [signals]: an exception from a signal's handler, Ctrl-C for instance, can come between any two instructions.
Handlers run in the main thread only. So `shielded` moves the main thread's work into another thread, while the main
thread waits: an exception ends the waiting, not the work.
"""

import _thread
import functools
import sys
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def shielded(call: Callable[[], Result]) -> Result:
    """Call a function and return its result; signals do not interrupt it. Note [signals]."""
    if threading.get_ident() != threading.main_thread().ident or sys.is_finalizing():
        return call()
    results: list[Result] = []
    errors: list[BaseException] = []
    ended = threading.Lock()
    ended.acquire()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as exc:  # noqa: BLE001 (raised below, in the thread that called)
            errors.append(exc)
        finally:
            ended.release()

    try:
        # Not a threading.Thread: its start and join are Python code, and break if an exception interrupts them.
        _thread.start_new_thread(run, ())
    except RuntimeError:  # the interpreter is about to end, and starts no thread
        return call()
    ended.acquire()
    if errors:
        # If this frame kept a reference to the error, the error would keep itself alive, and all that its frames hold.
        try:
            raise errors[0]
        finally:
            errors.clear()
    return results[0]


def uninterrupted(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function or method: each call is `shielded`. Note [signals]."""

    @functools.wraps(function)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return shielded(lambda: function(*args, **kwargs))

    return wrapped
