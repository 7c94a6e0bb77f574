"""Run the embedded node in a process of its own: a folder in, an endpoint out; it ends with its owner."""

import http.client
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

from dali_pipes.errors import StoreError

ALLOW_ETL = "DALI_PIPES_EMBEDDED_ETL"
"""The environment variable that lets an embedded node run transforms, when it is ``1``."""

_START_TIMEOUT_S = 20.0  # it takes 0.1 s; a machine under load, with a cold disk, takes longer
_STOP_TIMEOUT_S = 5.0
_CHECK_S = 0.5


class EmbeddedNode:
    """A running node. Close it, or leave the ``with`` block; when this process dies, in whatever way, it ends too."""

    endpoint: str
    """``http://127.0.0.1:PORT``."""

    def __init__(self, process: subprocess.Popen[bytes], endpoint: str) -> None:
        """Made by ``start``."""
        self._process = process
        self._owner = os.getpid()
        self.endpoint = endpoint

    def close(self) -> None:
        """End the node; twice is fine. Does nothing in a process forked from the owner: the node is not its own."""
        if os.getpid() != self._owner or self._process.stdin is None:
            return
        self._process.stdin.close()  # the node sees the end of its input, see ``end_with_owner``
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def start(directory: Path, *, port: int = 0, allow_etl: bool | None = None) -> EmbeddedNode:
    """Start a node over ``directory`` and wait until it answers.

    Args:
        directory: Made if need be. Several nodes may serve one folder at a time.
        port: 0 takes a free one.
        allow_etl: Whether who reaches the port may have transforms run, as this user; see ``serve_forever``. ``None``:
            as the environment's ``DALI_PIPES_EMBEDDED_ETL`` says, else not.

    Raises:
        StoreError: It did not start; with what it said.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # A pipe that nobody reads would fill; this file has no name, and goes with its last user.
        stderr = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  # closed below
    except OSError as exc:
        raise StoreError(f"the embedded node cannot use the folder '{directory}': {exc.strerror}") from exc
    root = str(Path(__file__).parents[2])  # where the package ``prep`` is, installed or not
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    arguments = ["--dir", str(directory.resolve()), "--port", str(port), "--owner", str(os.getpid())]
    environment = os.environ | {"PYTHONPATH": path}
    if allow_etl:
        arguments.append("--allow-etl")
    elif allow_etl is not None:
        environment.pop(ALLOW_ETL, None)  # else the node would do as it says
    with stderr:
        process = subprocess.Popen(  # noqa: S603  # our own interpreter and arguments
            [sys.executable, "-P", "-m", "prep.embedded", *arguments],  # -P: a folder "prep" in the cwd is not us
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            start_new_session=True,  # Ctrl-C is the owner's, which may need the node to clean up
        )
        node = EmbeddedNode(process, "")
        try:
            node.endpoint = _read_endpoint(process)
            _check_health(node.endpoint)
        except (OSError, http.client.HTTPException) as exc:
            node.close()
            stderr.seek(0)
            said = stderr.read().decode(errors="replace").strip()
            raise StoreError(f"the embedded node over '{directory}' did not start: {said or exc}") from exc
        except BaseException:
            node.close()
            raise
    return node


def end_with_owner(owner: int) -> None:
    """Return when the process ``owner``, this one's parent, has closed our standard input or is gone.

    The end of the pipe comes at once, but not while a process that the owner forked still holds its other end; a
    changed parent is noticed within half a second whatever was forked, and also when the owner died before we first
    looked, for its number came as an argument. The kernel's PR_SET_PDEATHSIG would not do: it fires when the *thread*
    that started us ends.
    """
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    while os.getppid() == owner and not poll.poll(_CHECK_S * 1000):
        pass


def _read_endpoint(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline_s - time.monotonic()))
        if not ready:
            raise TimeoutError(f"no answer after {_START_TIMEOUT_S:g} s")
        piece = os.read(process.stdout.fileno(), 4096)
        if not piece:
            raise ConnectionError(f"it ended with exit status {process.wait()}")
        line += piece
    return line.decode().strip()


def _check_health(endpoint: str) -> None:
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=_START_TIMEOUT_S)
    try:
        connection.request("GET", "/v1/health")
        if (status := connection.getresponse().status) != 200:
            raise ConnectionError(f"GET /v1/health answered {status}")
    finally:
        connection.close()
