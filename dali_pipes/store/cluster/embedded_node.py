"""Run the embedded node over a folder, in a process of its own that ends with its owner."""

import http.client
import os
import select
import subprocess
import tempfile
from pathlib import Path
from typing import Self

from dali_pipes.errors import StoreError
from dali_pipes.processes.programs import own_program

ALLOW_ETL = "DALI_PIPES_EMBEDDED_ETL"
"""The environment variable that allows an embedded node to run transforms, if it is ``1``."""

BUCKETS = "buckets"
"""The subfolder of a node's folder that has a folder for each bucket."""

_START_TIMEOUT_S = 20.0  # a start takes 0.1 s, and longer on a machine under load with a cold disk
_STOP_TIMEOUT_S = 5.0
_CHECK_S = 0.5


class EmbeddedNode:
    """A running node, made by `start`. It ends at `close`, after the ``with`` block, or when this process dies."""

    endpoint: str
    """``http://127.0.0.1:PORT``."""

    def __init__(self, process: subprocess.Popen[bytes], endpoint: str) -> None:
        self._process = process
        self._owner = os.getpid()
        self.endpoint = endpoint

    def close(self) -> None:
        """End the node. Can be called twice. In a process that was forked from the owner it does nothing."""
        if os.getpid() != self._owner or self._process.stdin is None:
            return
        self._process.stdin.close()  # the node sees the end of its input, see `end_with_owner`
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


def start(directory: Path, *, port: int = 0, allow_etl: bool | None = None) -> EmbeddedNode:
    """Start a node over ``directory`` and wait until it answers.

    Args:
        directory: Created if it does not exist. Several nodes may serve one folder at a time.
        port: The port; 0 for a free one.
        allow_etl: Whether any client that reaches the port may run transforms as this user; see ``serve_forever``.
            ``None``: only if the environment's ``DALI_PIPES_EMBEDDED_ETL`` is ``1``.

    Raises:
        StoreError: If the node did not start; shows its messages.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Not a pipe, which would fill if nobody reads it. This file has no name and goes with its last user.
        stderr = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  # closed below
    except OSError as exc:
        raise StoreError(f"the embedded node cannot use the folder '{directory}': {exc.strerror}") from exc
    arguments = ["--dir", str(directory.resolve()), "--port", str(port), "--owner", str(os.getpid())]
    environment = dict(os.environ)
    if allow_etl:
        arguments.append("--allow-etl")
    elif allow_etl is not None:
        environment.pop(ALLOW_ETL, None)  # otherwise the node would obey the variable
    with stderr:
        process = subprocess.Popen(  # noqa: S603  # our own interpreter and arguments
            own_program("prep.embedded", *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches only the owner, which may need the node to clean up
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
    """Return when our parent, the process ``owner``, has closed our standard input or has ended.

    A closed pipe is noticed at once, unless a process that the owner forked still holds its other end. A changed parent
    is noticed within half a second in all cases: also if the owner died before the first check, because its process id
    is an argument. The kernel's PR_SET_PDEATHSIG does not work here: it fires when the *thread* that started this
    process ends.
    """
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    while os.getppid() == owner and not poll.poll(_CHECK_S * 1000):
        pass


def _read_endpoint(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], _START_TIMEOUT_S)
    if not ready:
        raise TimeoutError(f"no answer after {_START_TIMEOUT_S:g} s")
    line = process.stdout.readline()
    if not line:
        raise ConnectionError(f"it ended with exit status {process.wait()}")
    return line.decode().strip()


def _check_health(endpoint: str) -> None:
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=_START_TIMEOUT_S)
    try:
        connection.request("GET", "/v1/health")
        if (status := connection.getresponse().status) != 200:
            raise ConnectionError(f"GET /v1/health answered {status}")
    finally:
        connection.close()
