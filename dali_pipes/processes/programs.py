"""Start a program of this project in a process of its own, whatever modules the user has."""

import os
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Self

START_TIMEOUT_S = 20.0
"""A server must start within this time. It takes 0.1 s, and longer on a machine under load with a cold disk."""

_STOP_TIMEOUT_S = 5.0
_CHECK_S = 0.5
_ROOT = Path(__file__).parents[2]
"""The folder that holds our packages, installed or not."""

# Our packages are imported from their folder first: a user's prep.py cannot take their place. Then the folder goes to
# the end of the path. So all other modules, a user's transform for instance, are found in the same order as in the
# parent.
_START = """
import runpy, sys
root, module = sys.argv[1:3]
sys.path.insert(0, root)
import dali_pipes, prep
sys.path.remove(root)
sys.path.append(root)
sys.argv[:3] = [module]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def own_program(module: str, *arguments: str) -> list[str]:
    """Make the command that runs a module of ours, such as ``prep.embedded``; the caller sets its environment."""
    # -P: the working directory is not on the path.
    return [sys.executable, "-P", "-c", _START, str(_ROOT), module, *arguments]


class ServerProcess:
    """A server program of ours. It ends at `close`, after the ``with`` block, or when this process dies.

    The program prints its endpoint as its first line, and takes ``--owner PID`` for `end_with_owner`.

    Raises:
        OSError: If it does not start: `ConnectionError` if the program ended, `TimeoutError` if it printed no endpoint.
    """

    endpoint: str
    """``http://127.0.0.1:PORT``."""
    pid: int

    def __init__(
        self,
        module: str,
        *arguments: str,
        stderr: IO[bytes] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and arguments
            own_program(module, *arguments, "--owner", str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches only the owner, which may need the server to clean up
        )
        self.pid = self._process.pid
        self._owner = os.getpid()
        try:
            self.endpoint = _read_endpoint(self._process)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the server. Can be called twice. In a process that was forked from the owner it does nothing."""
        if os.getpid() != self._owner or self._process.stdin is None:
            return
        self._process.stdin.close()  # the server sees the end of its input, see `end_with_owner`
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def end_with_owner(owner: int) -> None:
    """Return when our parent, the process ``owner``, has closed our standard input or has ended.

    A closed pipe is noticed at once, unless a process that the owner forked still holds its other end; a changed parent
    within half a second. The kernel's PR_SET_PDEATHSIG does not work here: it fires when the *thread* that started this
    process ends.
    """
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    while os.getppid() == owner and not poll.poll(_CHECK_S * 1000):
        pass


def _read_endpoint(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
    if not ready:
        raise TimeoutError(f"no answer after {START_TIMEOUT_S:g} s")
    line = process.stdout.readline()
    if not line.endswith(b"\n"):
        raise ConnectionError(f"it ended with exit status {process.wait()}")
    return line.decode().strip()
