"""Python programs that tests start, forked from one process that has torch and DALI imported.

To import both takes 2 to 4 CPU seconds, and some two hundred tests start a program that needs them. `fork_server`
replaces `subprocess.Popen`: ``python -c PROGRAM``, ``python -m tests...`` and ``python -m dali_pipes`` become children
of the server, with the arguments, environment, directory and files that a fresh interpreter would have. A program that
looks at `sys.modules` is started anew, and so is one with other variables that Python or a library reads at its start.
A test of other things of a fresh interpreter (memory, signals before Python starts) has the mark ``fresh_interpreter``.

What differs: all programs hash strings with one seed, `tests` is imported without PYTHONPATH, the parent process is the
server, and warnings that libraries give when they are imported were given before.

The server handles one message at a time in one thread: a program to fork, or the end of one. Each program has a
connection of its own, on which it sends its process id when it is ready, and the server at the end its wait status.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRELOADED = ("torch", "nvidia.dali.fn", "nvidia.dali.plugin.pytorch", "nvidia.dali.plugin.base_iterator")
READ_AT_START = (
    "PYTHON",
    "LD_",
    "MKL_",
    "OMP_",
    "KMP_",
    "OPENBLAS_",
    "MALLOC_",
    "GLIBC_",
    "DALI_MALLOC_",
    "LC_",
    "LANG",
)
"""Variables that an interpreter or a library reads when it is loaded. A program that has others needs a fresh one."""
MODULES = ("dali_pipes", "tests")
"""Packages whose modules the server runs: they import torch and DALI, or run so often that start-up takes long."""
FRESH_ONLY = ("preexec_fn", "pass_fds", "shell", "executable", "user", "group", "extra_groups", "process_group")
"""Options of `subprocess.Popen` that the server does not follow."""

FreshPopen = subprocess.Popen


class ForkedPopen(FreshPopen):  # type: ignore[type-arg]
    """`subprocess.Popen`, whose process is a child of the fork server if the server can run the command."""

    server: "Server | None" = None
    _connection: socket.socket | None = None

    def __init__(self, args: Any, *more: Any, **options: Any) -> None:
        self._is_forked = not more and self.server is not None and self.server.can_run(args, options)
        super().__init__(args, *more, **options)

    def _execute_child(self, args: Any, *more: Any) -> None:
        if not self._is_forked:
            return super()._execute_child(args, *more)  # type: ignore[misc, no-any-return]
        _, _, _, _, cwd, env, _, _, _, *pipes = more[:15]
        request = {
            "words": [os.fspath(word) for word in args[1:]],
            "cwd": os.fspath(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "new_session": more[-2],
            "umask": umask(),
            "cores": [*os.sched_getaffinity(0)],
        }
        assert self.server is not None
        files = [pipe if pipe != -1 else at for at, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
        self._connection = self.server.start(request, files)
        self.pid = int(receive_line(self._connection))
        self._child_created = True
        return self._close_pipe_fds(*pipes)  # type: ignore[attr-defined, no-any-return]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._connection is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc, no-any-return]
        if wait_flags & os.WNOHANG and not select.select([self._connection], [], [], 0)[0]:
            return 0, 0
        with self._connection:
            return self.pid, int(receive_line(self._connection))

    def _internal_poll(self, *more: Any, **options: Any) -> int | None:
        if self._connection is None:
            return super()._internal_poll(*more, **options)  # type: ignore[misc, no-any-return]
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None and (ended := self._try_wait(os.WNOHANG))[0]:
                self._handle_exitstatus(ended[1])  # type: ignore[attr-defined]
        return self.returncode


def receive_line(connection: socket.socket) -> str:
    """One line, byte for byte: what follows it belongs to the next call."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            raise ChildProcessError("the fork server is gone")
        line += byte
    return line.decode().strip()


class Server:
    """The process that forks, which starts with the first program, and ends with this process."""

    def __init__(self, directory: Path) -> None:
        self._address = str(directory / "fork.sock")
        self._environment = dict(os.environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def can_run(self, args: Any, options: dict[str, Any]) -> bool:
        """Whether a command is a Python program that a forked child runs as a fresh interpreter does."""
        if not isinstance(args, list | tuple) or len(args) < 3 or any(options.get(name) for name in FRESH_ONLY):
            return False
        environment = os.environ if options.get("env") is None else options["env"]
        program = str(args[2])
        is_ours = "sys.modules" not in program if args[1] == "-c" else program.partition(".")[0] in MODULES
        is_ours = is_ours and args[1] in ("-c", "-m")
        return args[0] == sys.executable and is_ours and read_at_start(environment) == read_at_start(self._environment)

    def start(self, request: dict[str, Any], files: list[int]) -> socket.socket:
        """Sends a program and its three standard files. The answers come on the connection."""
        with self._lock:
            self._process = self._process or self._start_server()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        data = json.dumps(request).encode()
        socket.send_fds(connection, [len(data).to_bytes(4)], files)
        connection.sendall(data)
        return connection

    def _start_server(self) -> "subprocess.Popen[bytes]":
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(self._address)
            listening.listen(64)
            command = [sys.executable, "-m", "tests.fork_server", str(listening.fileno())]
            return FreshPopen(
                command, cwd=ROOT, env=self._environment, stdin=subprocess.PIPE, pass_fds=[listening.fileno()]
            )

    def close(self) -> None:
        """The server ends when its standard input does."""
        if self._process is not None:
            self._process.communicate()


def umask() -> int:
    """That of this process, which can only be read by setting it."""
    os.umask(before := os.umask(0))
    return before


def read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a program of the server cannot have for itself."""
    return {
        name: value for name, value in environment.items() if name.startswith(READ_AT_START) and name != "PYTHONPATH"
    }


@contextlib.contextmanager
def fork_server(directory: Path) -> Iterator[None]:
    """Python programs are forked from a server meanwhile."""
    server = Server(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForkedPopen, "server", server)
        patch.setattr(subprocess, "Popen", ForkedPopen)
        yield
    server.close()


def serve(listening: socket.socket) -> dict[str, Any]:
    """Forks programs. Returns in each child, with the request that it is to run."""
    connections: dict[int, socket.socket] = {}
    woken, waker = socket.socketpair()
    for end in (woken, waker):
        end.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    while True:
        ready, _, _ = select.select([listening, woken, 0], [], [])
        if 0 in ready:
            os._exit(0)
        if woken in ready:
            woken.recv(4096)
            report_ends(connections)
        if listening not in ready:
            continue
        connection, _ = listening.accept()
        header, files, _, _ = socket.recv_fds(connection, 4, 3)
        with connection.makefile("rb") as stream:
            request: dict[str, Any] = json.loads(stream.read(int.from_bytes(header)))
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, on_interrupt)
            for at, file in enumerate(files):
                os.dup2(file, at)
                os.close(file)
            for owned in (listening, woken, waker, *connections.values()):
                owned.close()
            become(request)
            with connection:
                tell(connection, os.getpid())
            return request
        for file in files:
            os.close(file)
        connections[pid] = connection


def report_ends(connections: dict[int, socket.socket]) -> None:
    """Tells each starter of a program that has ended its wait status."""
    while connections:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with connections.pop(pid) as connection:
            tell(connection, status)


def tell(connection: socket.socket, number: int) -> None:
    """A starter that has gone needs no answer."""
    with contextlib.suppress(OSError):
        connection.sendall(f"{number}\n".encode())


def become(request: dict[str, Any]) -> None:
    """Sets environment, directory, arguments and import path as a fresh interpreter has them."""
    if request["new_session"]:
        os.setsid()
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cores"])
    os.chdir(request["cwd"])
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = "" if request["words"][0] == "-c" else request["cwd"]
    sys.path[:] = [first, *own, *(path for path in sys.path[1:] if path not in inherited)]
    sys.argv = ["-c", *request["words"][2:]]


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    kind, program, *_ = request["words"]
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), sys.modules["__main__"].__dict__)
