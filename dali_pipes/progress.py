"""Write to stderr while a command or a loader works: the log and progress bars, as much as the verbosity says.

Quiet: only errors. Verbose: each step, too, and the traceback of an error. Results go to stdout in all cases. The
processes that a command starts follow its verbosity. A program that imports `dali_pipes` decides by `logging` and by
``Cache(show_progress=)``; nothing here changes that.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Literal, TypeVar, get_args

from dali_pipes.errors import printable

T = TypeVar("T")
_log = logging.getLogger(__name__)

Verbosity = Literal["quiet", "normal", "verbose"]

LINE_CHARS = 4000
"""A line may hold several names; what is longer is no line for people."""
_LEVELS = {"quiet": logging.ERROR, "normal": logging.WARNING, "verbose": logging.INFO}
# Only for the processes that a command starts.
_VARIABLE = "DALI_PIPES_VERBOSITY"
_now: Verbosity = "normal"


class _PrintableFormatter(logging.Formatter):
    """Shows what a terminal would obey as escapes: a message is one line, a traceback keeps its own lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        return printable(super().formatMessage(record), max_chars=LINE_CHARS)

    def formatException(self, ei: Any) -> str:  # noqa: N802 (logging's name)
        return "\n".join(printable(line, max_chars=LINE_CHARS) for line in super().formatException(ei).split("\n"))


def current_verbosity() -> Verbosity:
    return _now


def use_verbosity(verbosity: Verbosity) -> None:
    """Use it in this process, and in those that it starts from now on."""
    global _now
    _now = verbosity
    if verbosity == "normal":
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = verbosity
    if _handler in logging.getLogger().handlers:  # else the program that calls us has a logging of its own
        logging.getLogger().setLevel(_LEVELS[verbosity])


def log_to_stderr() -> None:
    """Log to stderr as much as the verbosity says, unless the process has a logging of its own."""
    logging.basicConfig(level=_LEVELS[_now], handlers=[_handler])


def follow_parent() -> None:
    """Take over the verbosity of the command that started this process, and log as it does."""
    told = os.environ.get(_VARIABLE)
    use_verbosity(next((one for one in get_args(Verbosity) if one == told), "normal"))
    log_to_stderr()


_handler = logging.StreamHandler()
_handler.setFormatter(_PrintableFormatter("%(levelname)s %(name)s: %(message)s"))


def progress(items: Iterable[T], *, what: str, unit: str, shown: bool = True) -> Iterator[T]:
    """Yield ``items`` under a bar labelled ``what``. The bar stays on the screen at the end."""
    with bar(what=what, total=len(items) if isinstance(items, Sized) else None, unit=unit, shown=shown) as drawn:
        for item in items:
            yield item
            drawn.update(1)


def bar(*, what: str, total: int | None, unit: str, shown: bool = True, delay_s: float = 0) -> Any:
    """A bar that the caller moves with ``update(n)``; a context manager. ``unit="B"`` shows KiB, MiB or GiB.

    It is drawn after ``delay_s`` seconds, if stderr is a terminal, ``shown`` is true and the command is not quiet. The
    log says that the step begins.
    """
    from tqdm import tqdm

    _log.info("%s%s", what, "" if total is None else f": {total} {unit}")

    scaled: dict[str, Any] = {"unit_scale": True, "unit_divisor": 1024} if unit == "B" else {}
    # For tqdm, None means: only if stderr is a terminal.
    disable = None if shown and current_verbosity() != "quiet" else True
    return tqdm(
        desc=what, total=total, unit=unit, leave=True, disable=disable, dynamic_ncols=True, delay=delay_s, **scaled
    )
