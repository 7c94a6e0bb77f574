"""Run the embedded node over a folder, in a process of its own that ends with its owner."""

import contextlib
import http.client
import os
import tempfile
from pathlib import Path

from dali_pipes.errors import StoreError
from dali_pipes.processes.programs import START_TIMEOUT_S, ServerProcess

ALLOW_ETL = "DALI_PIPES_EMBEDDED_ETL"
"""The environment variable that allows an embedded node to run transforms, if it is ``1``."""

BUCKETS = "buckets"
"""The subfolder of a node's folder that has a folder for each bucket."""


def start(directory: Path, *, port: int = 0, allow_etl: bool | None = None, latency_s: float = 0.0) -> ServerProcess:
    """Start a node over ``directory`` and wait until it answers.

    Args:
        directory: Created if it does not exist. Several nodes may serve one folder at a time.
        port: The port; 0 for a free one.
        allow_etl: Whether any client that reaches the port may run transforms as this user; see ``serve_forever``.
            ``None``: only if the environment's ``DALI_PIPES_EMBEDDED_ETL`` is ``1``.
        latency_s: Slept before each request is answered: an object's GET waits twice, for the redirect and for the
            bytes. Connections do not wait for each other.

    Raises:
        StoreError: If the node did not start; shows its messages.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Not a pipe, which would fill if nobody reads it. This file has no name and goes with its last user.
        stderr = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  # closed below
    except OSError as exc:
        raise StoreError(f"the embedded node cannot use the folder '{directory}': {exc.strerror}") from exc
    arguments = ["--dir", str(directory.resolve()), "--port", str(port), "--latency-s", repr(latency_s)]
    environment = dict(os.environ)
    if allow_etl:
        arguments.append("--allow-etl")
    elif allow_etl is not None:
        environment.pop(ALLOW_ETL, None)  # otherwise the node would obey the variable
    with stderr, contextlib.ExitStack() as cleanup:
        try:
            node = cleanup.enter_context(
                ServerProcess("prep.embedded", *arguments, stderr=stderr, environment=environment)
            )
            _check_health(node.endpoint)
        except (OSError, http.client.HTTPException) as exc:
            cleanup.close()
            stderr.seek(0)
            said = stderr.read().decode(errors="replace").strip()
            raise StoreError(f"the embedded node over '{directory}' did not start: {said or exc}") from exc
        cleanup.pop_all()
    return node


def _check_health(endpoint: str) -> None:
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=START_TIMEOUT_S)
    try:
        connection.request("GET", "/v1/health")
        if (status := connection.getresponse().status) != 200:
            raise ConnectionError(f"GET /v1/health answered {status}")
    finally:
        connection.close()
