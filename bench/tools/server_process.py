"""Run one of our modules as a server in a process of its own, which ends when this process does."""

import argparse
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from dali_pipes.errors import StoreError
from dali_pipes.store.cluster.embedded_node import EmbeddedNode, end_with_owner


class ServerProcess:
    """A running server; a context manager. When this process dies, in whatever way, the server ends too.

    Args:
        module: Its ``main`` uses `server_arguments` and `announce`.
        arguments: Of the module.
        what: The server, for the error.

    Raises:
        StoreError: If it does not start.
    """

    endpoint: str
    """``http://127.0.0.1:PORT``."""
    pid: int

    def __init__(self, module: str, *arguments: str, what: str) -> None:
        process = subprocess.Popen(  # noqa: S603 (our own interpreter and arguments)
            module_command(module, *arguments, "--owner", str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=module_environment(),
            start_new_session=True,  # Ctrl-C is the owner's
        )
        self.pid = process.pid
        self._node = EmbeddedNode(process, "")
        assert process.stdout is not None
        # One line, or the end of the pipe. Why the server ended is on stderr, which is ours.
        self.endpoint = process.stdout.readline().decode().strip()
        if not self.endpoint:
            self.close()
            raise StoreError(f"{what} did not start, exit status {process.wait()}")

    def close(self) -> None:
        """End it. Can be called twice."""
        self._node.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def server_arguments(module: str, description: str | None) -> argparse.ArgumentParser:
    """A parser of what every server is told."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--latency-s", type=float, default=0.0, help="slept before each request is looked at")
    parser.add_argument("--owner", type=int, required=True, help="process whose end is ours")
    return parser


def announce(endpoint: str, *, owner: int) -> None:
    """Print the endpoint, and return when the owner is gone. Connections end where they stand."""
    print(endpoint, flush=True)  # what the command is run for
    with contextlib.suppress(KeyboardInterrupt):
        end_with_owner(owner)


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules in a fresh interpreter."""
    return [sys.executable, "-P", "-m", module, *arguments]  # -P: a folder "bench" in the cwd is not us


def module_environment() -> dict[str, str]:
    """Its environment: our packages are found, installed or not."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), root)))
    return os.environ | {"PYTHONPATH": path}
