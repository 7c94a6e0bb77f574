"""Short tracebacks in notebooks: the user's own lines and the error's text, without the frames of this package.

IPython asks an exception for a method ``_render_traceback_`` before it formats the traceback itself. Frames can also be
hidden by a local variable ``__tracebackhide__``, but every function would need one, and IPython still shows the last
frame, and all frames of the exception's causes. The exception itself keeps its traceback, for debuggers and logs.
"""

import copy
import functools
import sys
import sysconfig
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Returned = TypeVar("_Returned")


def shortens_traceback(function: Callable[_Arguments, _Returned]) -> Callable[_Arguments, _Returned]:
    """Make notebooks show errors of a public function without our frames: see `shorten`."""

    @functools.wraps(function)
    def shortened(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Returned:
        try:
            return function(*args, **kwargs)
        except Exception as exc:
            shorten(exc)
            raise

    return shortened


def shorten(error: Exception) -> None:
    """Let IPython show this error without our frames, if the program runs in IPython."""
    if _shell() is not None:
        # No method of the error's own: a cycle would keep its frames alive, and with them the batches in these.
        error._render_traceback_ = _render  # type: ignore[attr-defined]


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


class _Place(NamedTuple):
    frame: FrameType
    instruction: int
    line: int


def _render() -> list[str]:
    """Format the error that IPython is about to show. IPython keeps this error in `sys.last_value`."""
    error = sys.last_value
    assert error is not None
    places = _places(error.__traceback__)
    shown = _users(places)
    traceback: TracebackType | None = None
    for frame, instruction, line in reversed(shown):
        traceback = TracebackType(traceback, frame, instruction, line)
    # Our errors say all in their text; their causes would bring our frames and DALI's back.
    alone = error if places[-1] in shown else copy.copy(error)
    lines: list[str] = _shell().InteractiveTB.structured_traceback(type(error), alone, traceback)
    hint = "[frames of dali_pipes are hidden; `import traceback; traceback.print_last()` shows them]"
    return [*lines[:-1], hint, lines[-1]]


def _places(traceback: TracebackType | None) -> list[_Place]:
    places = []
    while traceback is not None:
        places.append(_Place(traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno))
        traceback = traceback.tb_next
    return places


def _users(places: list[_Place]) -> list[_Place]:
    """Select what is above our frames, and below them the user's functions that we called, such as a graph."""
    paths = sysconfig.get_paths()
    libraries = (*(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")), "<frozen", "<string>")
    shown, is_below = [], False
    for place in places:
        # The name, because the constructor of a dataclass has no file.
        is_ours = place.frame.f_globals.get("__name__", "").partition(".")[0] == "dali_pipes"
        is_below = is_below or is_ours
        if not is_ours and not (is_below and place.frame.f_code.co_filename.startswith(libraries)):
            shown.append(place)
    return shown
