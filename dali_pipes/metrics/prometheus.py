"""Give the figures of loaders to Prometheus: by a collector, a file for its node exporter, or a port of the node.

Each process writes its figures to a file of its own again and again. It holds a lock on the file while it lives, so the
file of a process that was killed is known by its free lock: others skip and remove it. One process of a node, which
holds the lock of the port, answers for all: it adds what the others have written to its own figures. When it ends, in
whatever way, the kernel frees lock and port, and another process takes both.

prometheus_client's own mode for several processes cannot do this: it works only if a variable is set before anything
imports the package, takes no collectors, and counts processes that were killed for ever.
"""

import atexit
import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from dali_pipes.arguments import as_integer, as_number
from dali_pipes.errors import printable
from dali_pipes.metrics.figures import FIGURES, LOADERS

try:
    from prometheus_client import CollectorRegistry, Metric, generate_latest, make_wsgi_app
    from prometheus_client.parser import text_string_to_metric_families
    from prometheus_client.registry import Collector
except ImportError as exc:
    raise ImportError("dali_pipes.metrics needs a package; install: pip install 'dali-pipes[metrics]'") from exc

_log = logging.getLogger(__name__)

NODE_S = 2.0
"""Seconds after which the processes of a node write their figures again, and one of them takes a port that is free."""
REQUEST_S = 1.0
"""A client must send its request in this time. One is answered at a time: nobody can fill a job with threads."""
_OWN_LABELS = ("data_set", "loader", "rank")
_FILES = f"dali_pipes_{'[0-9a-f]' * 8}.prom"

# The writers of this process by their directory; each port has one.
_writers: "dict[Path, TextfileWriter]" = {}


class LoaderCollector(Collector):
    """The figures of all loaders of this process, also of those that are opened later.

    A program that has a registry of `prometheus_client` adds them to it:
    ``prometheus_client.REGISTRY.register(dp.metrics.LoaderCollector())``.

    Args:
        labels: Further labels of every series, ``{"run": "resnet-7"}``. Each series has ``data_set``, ``loader`` (see
            `Loader.name`) and ``rank``.

    Raises:
        ValueError: If a label has no proper name, or the name of one of these three.
    """

    def __init__(self, *, labels: Mapping[str, str] | None = None) -> None:
        for name in labels or {}:
            if name in _OWN_LABELS or not re.fullmatch(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", name):
                raise ValueError(
                    f"a label's name must have letters, digits and '_' only, and be none of {', '.join(_OWN_LABELS)}, "
                    f"got {name!r}"
                )
        self._labels = {name: printable(str(value)) for name, value in (labels or {}).items()}

    def collect(self) -> Iterator[Metric]:
        """Yield each figure as a metric, with a sample for each loader that has the figure."""
        loaders = LOADERS.read()
        for figure in FIGURES:
            kind = "counter" if figure.is_counter else "gauge"
            metric = Metric(figure.metric.removesuffix("_total"), figure.help, kind)
            for labels, figures in loaders.items():
                if figure.name in figures:
                    metric.add_sample(figure.metric, dict(labels) | self._labels, figures[figure.name])
            yield metric


class TextfileWriter:
    """Writes this process's file again and again until it is closed. Made by `write_textfile`; a context manager."""

    def __init__(self, directory: Path, *, every_s: float, labels: Mapping[str, str] | None, mode: int) -> None:
        self._collector = LoaderCollector(labels=labels)
        self.path: Path = directory / f"dali_pipes_{secrets.token_hex(4)}.prom"
        self._mode, self._every_s = mode, every_s
        self._pid, self._is_over = os.getpid(), threading.Event()
        self._file: IO[bytes] | None = None  # the written one, whose lock it holds
        self._thread = threading.Thread(target=self._work, name="dali-pipes-metrics", daemon=True)
        if directory in _writers:
            _writers[directory].close()
        _writers[directory] = self
        atexit.register(self.close)
        try:
            self.living_files()
            self.update()
        except BaseException:
            self.close()
            raise
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the file. Can be called twice; the end of the process does it, too."""
        if self._is_over.is_set() or os.getpid() != self._pid:
            return
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        atexit.unregister(self.close)
        if _writers.get(self.path.parent) is self:
            del _writers[self.path.parent]
        self.path.unlink(missing_ok=True)
        if self._file is not None:
            self._file.close()

    def forget(self) -> None:
        """Close the sockets that a forked child inherits; it inherits no locks."""

    def living_files(self) -> list[Path]:
        """Find the files of other processes that live, and remove those of others."""
        own = {writer.path for writer in list(_writers.values())}  # to look at a lock of this process would end it
        living = []
        for path in sorted({*self.path.parent.glob(_FILES)} - own):
            try:
                with path.open("r+b") as file:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            except (BlockingIOError, PermissionError):  # of another user: it may live
                living.append(path)
            except FileNotFoundError:
                pass
        return living

    def update(self) -> None:
        """Write the figures as they are now."""
        # Under a name that no exporter reads and nobody could foresee; locked before it gets its own name.
        number, name = tempfile.mkstemp(dir=self.path.parent, prefix=".dali_pipes_")
        with contextlib.ExitStack() as undone:
            undone.callback(Path(name).unlink, missing_ok=True)
            file = undone.enter_context(os.fdopen(number, "wb"))
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(generate_latest(self._collector))
            file.flush()
            os.fchmod(number, self._mode)
            Path(name).replace(self.path)
            undone.pop_all()
        if self._file is not None:
            self._file.close()
        self._file = file

    def _work(self) -> None:
        last_error = ""
        while not self._is_over.wait(self._every_s):
            try:
                self.update()
                last_error = ""
            except OSError as exc:
                if last_error != (last_error := str(exc.strerror or exc)):  # its name is new each time
                    _log.warning("cannot give metrics by '%s': %s; trying again", self.path, last_error)


class NodeMetrics(TextfileWriter, Collector):
    """The part of this process in serving a node. Made by `serve`; a context manager."""

    def __init__(self, *, host: str, port: int, labels: Mapping[str, str] | None) -> None:
        self._host, self._port = host, port
        self._server: Any = None
        self._port_lock: IO[bytes] | None = None
        self._has_warned = False
        self._registry = CollectorRegistry()
        self._registry.register(self)
        super().__init__(_node_directory(port), every_s=NODE_S, labels=labels, mode=0o600)

    @property
    def has_port(self) -> bool:
        """Whether this process answers Prometheus for all processes of the node."""
        return self._server is not None

    def collect(self) -> Iterator[Metric]:
        """Yield the figures of all processes of the node that serve at this port; each series once."""
        metrics = {metric.name: metric for metric in self._collector.collect()}
        known = {frozenset(sample.labels.items()) for metric in metrics.values() for sample in metric.samples}
        for path in self.living_files():
            try:
                families = list(text_string_to_metric_families(path.read_text()))
            except OSError:  # its process has ended meanwhile
                continue
            added = {frozenset(sample.labels.items()) for family in families for sample in family.samples}
            for family in families:
                new = [sample for sample in family.samples if frozenset(sample.labels.items()) not in known]
                if family.name in metrics:
                    metrics[family.name].samples += new
            if added & known and not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "two processes serve the same labels at port %d (%s), and only one of them is shown: tell the jobs "
                    "apart by labels={'run': ...}, or by another port",
                    self._port,
                    dict(next(iter(added & known))),
                )
            known |= added
        yield from metrics.values()

    def close(self) -> None:
        """Stop serving; another process of the node takes the port. Can be called twice."""
        super().close()
        if os.getpid() == self._pid:
            if self._server is not None:
                end_connection(self._server.answering)
                self._server.shutdown()
            self.forget()

    def forget(self) -> None:
        """Close the sockets of this process, and let go of the port's lock."""
        if self._server is not None:
            self._server.server_close()
        if self._port_lock is not None:
            self._port_lock.close()
        self._server = self._port_lock = None

    def update(self) -> None:
        """Write the figures as they are now, and take the port if no process of this user has it.

        Raises:
            OSError: If another program has the port, or the machine has no such address.
        """
        super().update()
        if self._port_lock is not None:
            return
        lock = (self.path.parent / "port.lock").open("ab")
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._server = _start_server(self._port, self._host, self._registry)
            self._port_lock = lock
        except OSError as exc:
            lock.close()
            if isinstance(exc, BlockingIOError):
                return
            reason = "another program has it; pass another port=" if exc.errno == errno.EADDRINUSE else exc.strerror
            raise OSError(exc.errno, f"cannot serve at port {self._port} of '{self._host}': {reason}") from exc


class _Request(WSGIRequestHandler):
    timeout = 10.0  # for what is sent

    def handle(self) -> None:
        server: Any = self.server
        server.answering = self.connection
        self._late = threading.Timer(REQUEST_S, end_connection, (self.connection,))
        self._late.daemon = True  # nobody who connects keeps a process from its end
        self._late.start()
        try:
            super().handle()
        finally:
            self._late.cancel()

    def get_environ(self) -> dict[str, Any]:
        self._late.cancel()
        return super().get_environ()

    def log_message(self, format: str, *args: Any) -> None: ...


def end_connection(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended by itself
        connection.shutdown(socket.SHUT_RDWR)


def _start_server(port: int, host: str, registry: CollectorRegistry) -> WSGIServer:
    class Server(WSGIServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        answering: socket.socket

        def server_activate(self) -> None:
            super().server_activate()
            self.answering = self.socket

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that goes away is no fault of the job."""

    server = make_server(host, port, make_wsgi_app(registry), Server, _Request)
    threading.Thread(target=server.serve_forever, name="dali-pipes-metrics-port", daemon=True).start()
    return server


def serve(port: int = 9464, *, host: str = "127.0.0.1", labels: Mapping[str, str] | None = None) -> NodeMetrics:
    """Serve the figures of all loaders of this node at ``http://HOST:PORT/metrics`` until the process ends.

    Call it in each process: whichever comes first answers for all of them, and if it ends, another one does. Figures of
    the others are at most two seconds old. A second call with the same port replaces the first.

    Args:
        port: One for all processes of the node; the default is that of OpenTelemetry's exporters for Prometheus.
        host: The address to answer at. The default answers this machine only. ``"0.0.0.0"`` answers everybody who can
            reach it, without a password: the names of data sets and the figures are no secret then.
        labels: See `LoaderCollector`.

    Raises:
        OSError: If another program has the port, or the machine has no such address.
        ValueError: If it is no port, or a label has no proper name.
    """
    if not 0 < as_integer("port", port) < 1 << 16:
        raise ValueError(f"port must be in [1, 65535], got {port}")
    return NodeMetrics(host=host, port=port, labels=labels)


def write_textfile(
    directory: str | os.PathLike[str], *, every_s: float = 15.0, labels: Mapping[str, str] | None = None
) -> TextfileWriter:
    """Write the figures of this process's loaders to a file for Prometheus' node exporter, from now on.

    Call it once in each process; a second call with the same directory replaces the first. The file is replaced as a
    whole, and removed when the process ends; a file that a killed process left is removed when the next one starts.

    Args:
        directory: The one that the node exporter was given as ``--collector.textfile.directory``.
        every_s: Seconds between two writes; Prometheus usually asks the exporter once in 15 to 60 seconds.
        labels: See `LoaderCollector`. The exporter's ``job`` is its own: name your run here.

    Raises:
        OSError: If nothing can be written there.
        ValueError: If ``every_s`` is not positive, or a label has no proper name.
    """
    if not as_number("every_s", every_s) > 0:
        raise ValueError(f"every_s must be positive, got {every_s}")
    path = Path(directory).resolve()
    if not path.is_dir():
        raise NotADirectoryError(
            f"'{directory}' is not a directory; name the one of the node exporter's --collector.textfile.directory"
        )
    return TextfileWriter(path, every_s=every_s, labels=labels, mode=0o644)  # the exporter is another user


def _node_directory(port: int) -> Path:
    """Make the directory in which the processes of this user meet that serve at a port; other users may not enter."""
    root = Path(tempfile.gettempdir()) / f"dali-pipes-metrics-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    status = root.lstat()
    if root.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"'{root}' must be a directory of this user alone; remove it, or set TMPDIR")
    directory = root / str(port)
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


def _forget_in_child() -> None:
    while _writers:
        _writers.popitem()[1].forget()


os.register_at_fork(after_in_child=_forget_in_child)
