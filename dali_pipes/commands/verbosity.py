"""How much a command says on stderr: ``--quiet``, ``--verbose``; the processes that it starts follow it.

Quiet: only errors. Verbose: each step, too, and the traceback of an error. Results go to stdout in all cases. A program
that imports `dali_pipes` decides by `logging` and by ``Cache(show_progress=)``; nothing here changes that.
"""

import logging
import os
from typing import Any, Literal, get_args

from dali_pipes.errors import printable

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


def current() -> Verbosity:
    """The verbosity of this process."""
    return _now


def use(verbosity: Verbosity) -> None:
    """Set it for this process, and for those that it starts from now on."""
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
    use(next((one for one in get_args(Verbosity) if one == told), "normal"))
    log_to_stderr()


_handler = logging.StreamHandler()
_handler.setFormatter(_PrintableFormatter("%(levelname)s %(name)s: %(message)s"))
