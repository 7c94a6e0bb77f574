"""Serve the figures of all processes of a node at one port.

Every process offers its figures at a Unix socket whose name the others know. One of them has the port: whenever
Prometheus asks, it collects the figures of all. No process is special. When the one that has the port ends, in whatever
way, the kernel frees the port, and another process takes it within `TAKE_OVER_S`.

# Note [names]: the sockets are abstract: they belong to the network namespace, as the port does, and the kernel removes
them with their process. No file is left, and none has to be found. Any user may connect to such a socket, or take its
name, so both sides ask the kernel for the other's user.
"""

import contextlib
import errno
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server

from dali_pipes.arguments import as_integer
from dali_pipes.metrics.collector import LoaderCollector, Series

_log = logging.getLogger(__name__)

TAKE_OVER_S = 2.0
# Processes of one node at one port.
_MAX_PROCESSES = 256
# A process answers in a thread of its own, but must get Python's lock for that.
_ANSWER_S = 2.0
# When several processes start at once, one that has no port yet may be about to take it.
_STARTING_S = 1.0
_CREDENTIALS = struct.Struct("=iII")  # ucred: process, user, group

_serving: dict[int, "NodeMetrics"] = {}


class NodeMetrics(LoaderCollector):
    """The part of this process in serving a node. Made by `serve`; a context manager."""

    def __init__(self, *, host: str, port: int, labels: Mapping[str, str] | None) -> None:
        super().__init__(labels=labels)
        self._host, self._port = host, port
        self._has_warned = False
        self._is_over = threading.Event()
        self._server: Any = None
        self._registry = CollectorRegistry()
        self._listening, self._name = _listen(port)
        try:
            self._registry.register(self)
            self._thread = threading.Thread(target=self._work, name="dali-pipes-metrics", daemon=True)
            self._thread.start()  # first: processes that start at once ask each other
        except BaseException:
            self.forget()
            raise
        try:
            deadline = time.monotonic() + _STARTING_S
            while not (self.has_port or self._take_port() or self._is_served()):
                if time.monotonic() > deadline and not self.has_port:
                    raise OSError(
                        errno.EADDRINUSE, f"port {port} of '{host}' is taken by another program; pass another port="
                    )
                time.sleep(0.05)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "NodeMetrics":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def has_port(self) -> bool:
        """Whether this process answers Prometheus for all processes of the node."""
        return self._server is not None

    def series(self) -> list[Series]:
        """Read the figures of all processes of the node that serve at this port."""
        found: dict[tuple[tuple[str, str], ...], Series] = {}
        theirs = [Series(*one) for answer in self._others() if answer is not None for one in answer["series"]]
        for one in (*super().series(), *theirs):
            if found.setdefault(tuple(sorted(one.labels.items())), one) is not one and not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "two processes serve the same labels at port %d (%s), and only one of them is shown: tell the "
                    "jobs apart by labels={'run': ...}, or by another port",
                    self._port,
                    ", ".join(f"{name}='{value}'" for name, value in one.labels.items()),
                )
        return list(found.values())

    def close(self) -> None:
        """Stop serving; another process of the node takes the port. Can be called twice."""
        if _serving.get(self._port) is self:
            del _serving[self._port]
        self._is_over.set()
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waking:
            waking.settimeout(_ANSWER_S)
            waking.connect(self._name)
        self._thread.join()
        if self._server is not None:
            self._server.shutdown()
        self.forget()

    def forget(self) -> None:
        """Close the sockets of this process."""
        if self._server is not None:
            self._server.server_close()
            self._server = None
        self._listening.close()

    def _take_port(self) -> bool:
        try:
            self._server, _ = start_http_server(self._port, self._host, self._registry)
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE:
                return False
            raise OSError(exc.errno, f"cannot serve at port {self._port} of '{self._host}': {exc.strerror}") from exc
        return True

    def _work(self) -> None:
        self._listening.settimeout(TAKE_OVER_S)
        while not self._is_over.is_set():
            try:
                asking, _ = self._listening.accept()
            except TimeoutError:
                if self._server is None and not self._is_over.is_set():
                    with contextlib.suppress(OSError):
                        self._take_port()
                continue
            with asking, contextlib.suppress(OSError):
                asking.settimeout(_ANSWER_S)
                if _is_own_user(asking):
                    answer = {"serves": self.has_port, "series": LoaderCollector.series(self)}
                    asking.sendall(json.dumps(answer).encode())

    def _is_served(self) -> bool:
        """Whether another process of ours has the port. One that is too busy to answer may have it."""
        return any(answer is None or answer["serves"] for answer in self._others())

    def _others(self) -> list[dict[str, Any] | None]:
        """Ask the other processes of this user for their figures; ``None``: one did not answer in time."""
        with contextlib.ExitStack() as closing:
            asked = []
            for name in _names(self._port):
                if name == self._name:
                    continue
                asking = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                with contextlib.suppress(OSError):
                    asking.setblocking(False)  # the queue of a process that hangs is full some day
                    asking.connect(name)
                    if _is_own_user(asking):
                        asked.append(asking)
            deadline = time.monotonic() + _ANSWER_S
            return [_answer(asking, deadline) for asking in asked]


def serve(port: int = 9464, *, host: str = "127.0.0.1", labels: Mapping[str, str] | None = None) -> NodeMetrics:
    """Serve the figures of all loaders of this node at ``http://HOST:PORT/metrics`` until the process ends.

    Call it in each process: whichever comes first answers for all of them, and if it ends, another one does. A second
    call with the same port replaces the first.

    Args:
        port: One for all processes of the node; the default is that of OpenTelemetry's exporters for Prometheus.
        host: The address to answer at. The default answers this machine only. ``"0.0.0.0"`` answers everybody who can
            reach it, without a password: the names of data sets and the figures are no secret then.
        labels: See `LoaderCollector`.

    Raises:
        ImportError: If prometheus-client is not installed: ``pip install 'dali-pipes[metrics]'``.
        OSError: If another program has the port, or the machine has no such address.
        ValueError: If it is no port, or a label has no proper name.
    """
    if not 0 < as_integer("port", port) < 1 << 16:
        raise ValueError(f"port must be in [1, 65535], got {port}")
    if (earlier := _serving.get(port)) is not None:
        earlier.close()
    _serving[port] = served = NodeMetrics(host=host, port=port, labels=labels)
    return served


def _names(port: int) -> list[str]:
    return [f"\0dali-pipes-metrics/{os.getuid()}/{port}/{number}" for number in range(_MAX_PROCESSES)]


def _listen(port: int) -> tuple[socket.socket, str]:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    for name in _names(port):
        with contextlib.suppress(OSError):
            listening.bind(name)
            listening.listen(16)
            return listening, name
    listening.close()
    raise OSError(errno.EADDRINUSE, f"{_MAX_PROCESSES} processes serve metrics at port {port}, which is the most")


def _answer(asking: socket.socket, deadline: float) -> dict[str, Any] | None:
    received = bytearray()
    try:
        while True:
            asking.settimeout(max(0.001, deadline - time.monotonic()))
            if not (part := asking.recv(1 << 16)):
                break
            received += part
        answer: dict[str, Any] = json.loads(received)
    except (OSError, ValueError):
        return None
    return answer


def _is_own_user(connected: socket.socket) -> bool:
    """Whether the process at the other end is of this process's user. Note [names]."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())


def _forget_in_child() -> None:
    # Otherwise a worker that outlives this process would keep the port, and never answer.
    while _serving:
        _serving.popitem()[1].forget()


os.register_at_fork(after_in_child=_forget_in_child)
