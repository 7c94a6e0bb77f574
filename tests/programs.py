"""Start programs in tests, and wait for their effects."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

REPOSITORY = Path(__file__).parents[1]


def wait_until(is_true: Callable[[], object], what: str = "it never came") -> None:
    """Wait until ``is_true()`` holds; after two minutes (time enough on a loaded machine) fail with ``what``."""
    deadline_s = time.monotonic() + 120
    while not is_true():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


def free_port() -> int:
    """A port at which nobody listens; the system gives it to no program that asks for any free port."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(first // 2, first)
        with contextlib.suppress(OSError), socket.socket() as listening:
            listening.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def threads_that_start(most: int) -> Iterator[list[threading.Thread]]:
    """Let ``most`` threads of the product start; others fail, as at a process's limit. Yields those that tried."""
    tried: list[threading.Thread] = []
    start = threading.Thread.start

    def start_some(thread: threading.Thread) -> None:
        if thread.name.startswith("dali-pipes"):
            tried.append(thread)
            if len(tried) > most:
                raise RuntimeError("can't start new thread")
        start(thread)

    with mock.patch.object(threading.Thread, "start", start_some):
        yield tried


def start_python(script: str, *arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
    """Run a script in a new interpreter. It finds the packages from any working directory."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables)


def wait_while(process: "subprocess.Popen[str]", *, until: Callable[[], object]) -> None:
    """Wait until ``until()`` holds; fail if the process ends first."""
    wait_until(lambda: until() or process.poll() is not None)
    assert process.poll() is None, process.communicate()


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
