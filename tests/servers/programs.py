"""Find servers, start them, and end them with the tests, however these end."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_START_S = 120.0


def find_program(name: str) -> str:
    """A server's program; skips the test without it, and fails it under REQUIRE_SERVERS=1."""
    named = os.environ.get("DALI_PIPES_SERVERS", "")
    places = [named, str(ROOT / ".servers" / "bin"), str(ROOT / ".servers" / "node_modules" / ".bin")]
    found = shutil.which(name, path=os.pathsep.join([*filter(None, places), os.environ.get("PATH", "")]))
    if found is None:
        text = f"no '{name}' in PATH, DALI_PIPES_SERVERS or .servers: make test-servers"
        if os.environ.get("REQUIRE_SERVERS") == "1":
            pytest.fail(text)
        pytest.skip(text)
    return found


@contextlib.contextmanager
def serving(command: Sequence[str], address: str) -> Iterator[None]:
    """Run a server until the block ends, or this process does; begins when it answers at ``address``."""
    # A shell that ends the server when its input ends: with `close`, or with this process.
    shell = ["/bin/sh", "-c", '"$@" & cat >/dev/null; kill $!; wait', "sh"]
    server = subprocess.Popen(
        [*shell, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait_for(address, server)
        yield
    finally:
        assert server.stdin is not None
        server.stdin.close()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    host, _, port = address.partition(":")
    until = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            if server.poll() is not None or time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return
