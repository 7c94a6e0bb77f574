"""Run tasks on the nodes of a Ray cluster.

Ray repeats a task whose process or node died, and no other; an exception of a task is not repeated. Tasks are sent when
there is a CPU for them, so the memory of driver and nodes does not depend on their number. What a task prints stays in
Ray's own logs.

# Note [ray's ends]: on an error or Ctrl-C the tasks in flight are cancelled. Ray raises KeyboardInterrupt in them, so
no half-written object is left. A Ray that was there before is left as it was.
"""

import contextlib
import logging
import os
import platform
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO, cast

from dali_pipes.errors import PipesError
from prep.workers.processes import Report, Workers

# A node that dies takes its tasks with it; a task that kills each worker it gets is told after so many.
MAX_RETRIES = 5
_VERSIONS = (version("dali-pipes"), ".".join(platform.python_version_tuple()[:2]))
_ADVICE = "look at memory and logs of the nodes; run the command again: what is written is kept"


class RayWorkers(Workers):
    """Workers that are tasks of Ray; see `Workers`.

    Args:
        jobs: Tasks at a time; ``None``: the cluster's CPUs, as they are when `map` is called.
        setup: Each worker process calls it once, before its first task.
        advice: The end of the error when a task's process died again and again.
    """

    def __init__(
        self, jobs: int | None = None, *, setup: Callable[[], object] | None = None, advice: str = _ADVICE
    ) -> None:
        super().__init__(jobs, setup=setup, isolated=True, advice=advice)
        self._limit = jobs
        self._is_ours = False
        self._is_open = False
        self._has_token = False
        self._stdout: _OwnStdout | None = None
        self._flying: dict[Any, tuple[int, str]] = {}  # reference -> number and name of the task
        self._shared: tuple[Callable[..., Any], Any] | None = None  # the function, and its reference
        self._remote: Any = None

    def start(self) -> None:
        """Connect to Ray, or start one."""
        if self._is_open:
            return
        # Ray reads it when it is imported. Nobody who prepares data has agreed to it.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray = _ray()
        except ImportError as exc:
            raise PipesError("--on ray needs the package ray: pip install 'dali-pipes[ray]'") from exc
        if not ray.is_initialized():
            address = os.environ.get("RAY_ADDRESS")
            if address:
                _check_answers(address)
            options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
            try:
                if address:
                    ray.init(address=address, **options)
                else:
                    self._set_token()
                    ray.init(address="local", num_cpus=self.jobs, include_dashboard=False, **options)
            except Exception as exc:
                self._unset_token()
                where = f"the Ray at '{address}' cannot be reached" if address else "no Ray can be started here"
                raise PipesError(
                    f"{where}: {exc}; is RAY_ADDRESS right? A Ray that asks for a token needs RAY_AUTH_MODE=token"
                ) from exc
            self._is_ours = True
            self._stdout = _OwnStdout(sys.stdout)
            sys.stdout = cast("TextIO", self._stdout)
        self._is_open = True
        self.jobs = self._num_at_a_time()

    def _num_at_a_time(self) -> int:
        self.start()
        return self._limit or max(1, int(_ray().cluster_resources().get("CPU", 1)))  # nodes come and go

    def _submit(self, number: int, function: Callable[[Any, Report], Any], task: object, name: str) -> None:
        ray = _ray()
        if self._shared is None or self._shared[0] is not function:
            self._shared = function, ray.put((_VERSIONS, self._setup, function))
            self._remote = ray.remote(num_cpus=1, max_retries=MAX_RETRIES, retry_exceptions=False)(_run)
        self._flying[self._remote.remote(self._shared[1], task)] = number, name

    def _wait(self, on_progress: Report) -> Iterator[tuple[int, Any]]:
        """Wait for a task; its progress comes with its result."""
        ray = _ray()
        ready, _ = ray.wait(list(self._flying), num_returns=1)
        number, name = self._flying.pop(ready[0])
        try:
            result, amount = ray.get(ready[0])
        except ray.exceptions.RayTaskError as exc:
            if isinstance(exc.cause, Exception):
                raise exc.cause from None
            raise PipesError(f"{name}: {exc}") from None
        except ray.exceptions.RayError as exc:
            raise PipesError(f"the process or node that worked on {name} died: {exc}; {self._advice}") from exc
        on_progress(amount)
        yield number, result

    def _stop_tasks(self) -> None:
        """Cancel the tasks in flight: Note [ray's ends]."""
        if not self._flying:
            return
        ray = _ray()
        for reference in self._flying:
            with contextlib.suppress(Exception):
                ray.cancel(reference)
        # Until the tasks have ended, their objects may still be there in part.
        ray.wait(list(self._flying), num_returns=len(self._flying), timeout=_STOP_S)
        self._flying = {}

    def check_reach(self, directories: Iterable[Path]) -> None:
        """Refuse directories that are not the same on all nodes.

        Raises:
            PipesError: If one is another on a node, by inode and time, or is not there.
        """
        self.start()
        ray = _ray()
        paths = sorted({str(path.absolute()) for path in directories})
        for node in ray.nodes() if paths else []:
            if not node["Alive"] or not node["Resources"].get("CPU"):
                continue
            strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            look = ray.remote(num_cpus=0, scheduling_strategy=strategy)(_marks)
            others = paths
            for _ in range(_LOOKS):
                if not others:
                    break
                try:
                    theirs = ray.get(look.remote(others))
                except (ray.exceptions.TaskUnschedulableError, ray.exceptions.NodeDiedError):
                    others = []  # the node died: it gets no task
                    break
                pairs = zip(others, _marks(others), theirs, strict=True)
                others = [path for path, our, their in pairs if our != their]
            for path in others:
                raise PipesError(
                    f"'{path}' on node '{node['NodeManagerHostname']}' is not the directory that it is here; "
                    "--on ray needs a bucket, or a file system that all nodes share"
                )

    def close(self) -> None:
        """Leave Ray; a Ray that was started here ends. Can be called twice."""
        if self._is_ours:
            _ray().shutdown()
            self._unset_token()
            if self._stdout is not None and cast("object", sys.stdout) is self._stdout:
                sys.stdout = self._stdout.stream
        self._is_ours = self._is_open = False

    def _set_token(self) -> None:
        """Give a Ray of our own a token that ends with it.

        Ray would leave one in ``~/.ray/auth_token``, and each Ray that is started there later would ask for it.
        """
        if not any(name in os.environ for name in (*_TOKEN, "RAY_AUTH_TOKEN_PATH")):
            self._has_token = True
            os.environ["RAY_AUTH_TOKEN"] = _own_token()  # Ray itself sets the mode

    def _unset_token(self) -> None:
        if self._has_token:
            for name in _TOKEN:
                os.environ.pop(name, None)
        self._has_token = False


class _OwnStdout:
    """Stdout without what Ray says there of workers that died, which goes to stderr: stdout is for a result.

    No setting of Ray 2.60 does that; a thread of this name prints it.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        is_rays = threading.current_thread().name == "ray_listen_error_messages"
        return (sys.stderr if is_rays else self.stream).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@lru_cache
def _own_token() -> str:
    """The token of all Rays that this process starts: Ray's client keeps the first one that it reads."""
    return secrets.token_hex(32)


def _check_answers(address: str) -> None:
    """Refuse ``HOST:PORT`` where no server is: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise PipesError(f"no Ray answers at '{address}': {why}; is RAY_ADDRESS right, and its head started?") from None


_TOKEN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
# Seconds until a host that does not answer counts as away.
_CONNECT_S = 10.0
# A directory that others write to may change between the look here and the look on a node.
_LOOKS = 5
# Seconds for which tasks that are cancelled are waited for.
_STOP_S = 10.0

_is_set_up = False


def _ray() -> Any:
    """The package, which is imported only where somebody asks for it. Its stubs do not know options of all versions."""
    import ray
    import ray.util.scheduling_strategies

    return ray


def _marks(paths: Sequence[str]) -> list[tuple[str, int, int]]:
    """What tells each directory, or the nearest one above it that there is, from others."""
    marks = []
    for path in paths:
        there = next(folder for folder in (Path(path), *Path(path).parents) if folder.is_dir())
        found = there.stat()
        marks.append((str(there), found.st_ino, found.st_ctime_ns))
    return marks


def _run(shared: tuple[Any, Callable[[], object] | None, Callable[[Any, Report], Any]], task: Any) -> tuple[Any, int]:
    """Do a task in a worker of Ray; its result, and the progress that it reported."""
    global _is_set_up
    versions, setup, function = shared
    if versions != _VERSIONS:
        found, expected = (f"dali-pipes {release} on Python {python}" for release, python in (_VERSIONS, versions))
        raise PipesError(
            f"node '{platform.node()}' has {found}, the command that was started has {expected}; install the same"
        )
    if setup is not None and not _is_set_up:
        setup()
        _is_set_up = True
    done = 0

    def report(num: int) -> None:
        nonlocal done
        done += num

    return function(task, report), done
