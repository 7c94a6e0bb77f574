"""Run a function as another user of the machine, in a child process."""

import encodings.idna  # noqa: F401  # sockets want it, and the other user may not be able to read Python's files
import os
from collections.abc import Callable

import pytest

NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_nobody(function: Callable[[], object]) -> str:
    """Return what the function gives, as text, or the name of its `OSError`."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                said = str(function())
            except OSError as exc:
                said = type(exc).__name__
            os.write(writing, said.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as result:
        said = result.read()
    os.waitpid(child, 0)
    return said
