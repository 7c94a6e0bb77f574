"""Serve a folder of buckets to benchmarks: the embedded AIS node in a process of its own, slowed where that is asked.

What it answers is the node's: the proxy's redirect to the target's URL, listing, HEAD, ranges, checksum and version in
the headers, connections kept alive. So clients of every kind read it unmodified. Bodies go out by ``sendfile``, in
which a thread does not hold the interpreter's lock: one process serves as many connections as there are, on all cores,
and ``bench fetch`` measures with a client that drops what it receives how fast it is.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import psutil

from dali_pipes.errors import StoreError
from dali_pipes.store.embedded_node import EmbeddedNode, end_with_owner
from prep.embedded.server import NodeServer
from prep.embedded.storage import Storage

__all__ = ["ObjectServer", "module_command", "module_environment"]


class ObjectServer:
    """A running server; a context manager. When this process dies, in whatever way, it ends too.

    Args:
        directory: Holds the buckets, in the embedded node's format; made if need be. Several servers may share one.
        latency_s: Slept before each request is answered, the proxy's and the target's alike: an object's GET meets it
            twice. Connections do not wait for each other.

    Raises:
        StoreError: If it does not start.
    """

    endpoint: str
    """``http://127.0.0.1:PORT``."""

    def __init__(self, directory: Path, *, latency_s: float = 0.0) -> None:
        arguments = ["--dir", str(directory), "--latency-s", repr(latency_s), "--owner", str(os.getpid())]
        process = subprocess.Popen(  # noqa: S603 (our own interpreter and arguments)
            module_command("bench.timing.object_server", *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=module_environment(),
            start_new_session=True,  # Ctrl-C is the owner's
        )
        self._node = EmbeddedNode(process, "")
        assert process.stdout is not None
        # One line, or the end of the pipe; why it ended is on stderr, which is ours.
        self.endpoint = process.stdout.readline().decode().strip()
        if not self.endpoint:
            self._node.close()
            raise StoreError(f"the benchmark's server over '{directory}' did not start, exit status {process.wait()}")
        self._process = psutil.Process(process.pid)

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def cpu_s(self) -> float:
        """Seconds of CPU, user and system, that it has spent."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        """End it. Can be called twice."""
        self._node.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules in a fresh interpreter."""
    return [sys.executable, "-P", "-m", module, *arguments]  # -P: a folder "bench" in the cwd is not us


def module_environment() -> dict[str, str]:
    """Its environment: our packages are found, installed or not."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), root)))
    return os.environ | {"PYTHONPATH": path}


def main(argv: list[str] | None = None) -> int:
    """Serve until the owner goes; print the endpoint first."""
    parser = argparse.ArgumentParser(prog="python -m bench.timing.object_server", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="the folder that holds buckets and objects")
    parser.add_argument("--latency-s", type=float, default=0.0, help="slept before each answer")
    parser.add_argument("--owner", type=int, required=True, help="process whose end is ours")
    options = parser.parse_args(argv)
    try:
        with Storage(options.dir) as storage, NodeServer(storage, port=0) as server:
            if options.latency_s > 0:
                handler = cast("type[BaseHTTPRequestHandler]", server.RequestHandlerClass)
                server.RequestHandlerClass = _slowed(handler, options.latency_s)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            print(server.endpoint, flush=True)  # what this command is run for
            with contextlib.suppress(KeyboardInterrupt):
                end_with_owner(options.owner)
            # Connections end where they stand; their clients are the owner's.
    except OSError as exc:
        print(f"cannot serve '{options.dir}': {exc}", file=sys.stderr)
        return 1
    return 0


def _slowed(handler: type[BaseHTTPRequestHandler], latency_s: float) -> type[BaseHTTPRequestHandler]:
    """The handler with a wait before each request is looked at."""

    def parse_request(self: BaseHTTPRequestHandler) -> bool:
        time.sleep(latency_s)
        return handler.parse_request(self)

    return type(f"Slowed{handler.__name__}", (handler,), {"parse_request": parse_request})


if __name__ == "__main__":
    sys.exit(main())
