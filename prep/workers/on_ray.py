"""Run tasks on the nodes of a Ray cluster.

Ray repeats a task whose process or node died, and no other; an exception of a task is not repeated. Tasks are sent when
there is a CPU for them, so the memory of driver and nodes does not depend on their number. What a task prints stays in
Ray's own logs. On an error or Ctrl-C the tasks in flight are cancelled, after an error those that do not end soon: Ray
raises KeyboardInterrupt in them, so no half-written object remains.
"""

import contextlib
import logging
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dali_pipes.errors import PipesError
from prep.workers.processes import Report, Workers

# A node that dies takes its tasks with it; a task that kills each worker it gets fails after so many.
MAX_RETRIES = 5
# Of Ray's text for a function whose module a node does not have.
_NOT_IMPORTED = "failed to import on the worker"
_VERSION = version("dali-pipes")
_ADVICE = "look at memory and logs of the nodes; run the command again: what is written is kept"
# Seconds until a host that does not answer counts as away.
_CONNECT_S = 10.0
# Seconds to wait after an error until tasks end by themselves, and then until cancelled tasks have ended: a running
# task may leave partly written objects.
_STOP_S = 10.0
# A directory that others write to may change between the look here and the look on a node.
_LOOKS = 5


class RayWorkers(Workers):
    """Workers that are tasks of Ray; by default as many at a time as the cluster has CPUs when a task is sent."""

    def __init__(
        self,
        jobs: int | None = None,
        *,
        setup: Callable[[], object] | None = None,
        environment: Path | None = None,
        advice: str = _ADVICE,
    ) -> None:
        super().__init__(jobs, setup=setup, isolated=True, advice=advice)
        self._limit, self._runtime_env = jobs, environment
        self._ray: Any = None
        self._connection = contextlib.ExitStack()
        self._flying: dict[Any, tuple[int, str]] = {}  # reference -> number and name of the task
        self._sent: tuple[Callable[..., Any], Any, Any] | None = None  # the function, its reference, and Ray's `_run`

    def start(self) -> None:
        if self._ray is not None:
            return
        # Ray reads it when it is imported. Nobody who prepares data has agreed to it.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = os.environ.get("RAY_ADDRESS", "")
        if not address:  # a Ray of our own listens at the loopback address: with 0 on Linux, too
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        try:
            import ray
            import ray.util.scheduling_strategies
        except ImportError as exc:
            raise PipesError("--on ray needs the package ray: pip install 'dali-pipes[ray]'") from exc
        if not ray.is_initialized():
            # Ray reports workers that died on stdout, which is for a command's result.
            self._connection.enter_context(contextlib.redirect_stdout(sys.stderr))
            # Of this user alone: others could make /tmp/ray before. Not in TMPDIR: paths of sockets must be short.
            parent = os.environ.get("RAY_TMPDIR", "/tmp")  # noqa: S108 (it has a random name, and mode 0700)
            files = tempfile.TemporaryDirectory(prefix="dp-ray-", dir=parent, ignore_cleanup_errors=True)
            directory = self._connection.enter_context(files)
            self._connection.callback(ray.shutdown)
            environment = None if self._runtime_env is None else _read_environment(self._runtime_env)
            _connect(ray, address, num_cpus=self.jobs, directory=directory, environment=environment)
        self._ray = ray
        self.jobs = self._num_at_a_time()

    def _num_at_a_time(self) -> int:
        self.start()
        return self._limit or max(1, int(self._ray.cluster_resources().get("CPU", 1)))  # nodes come and go

    def _submit(self, number: int, function: Callable[[Any, Report], Any], task: object, name: str) -> None:
        if self._sent is None or self._sent[0] is not function:
            # Each call of `remote` stores the function in the cluster anew.
            run = self._ray.remote(num_cpus=1, max_retries=MAX_RETRIES, retry_exceptions=False)(_run)
            self._sent = function, self._ray.put((_VERSION, self._setup, function)), run
        _, shared, run = self._sent
        self._flying[run.remote(shared, task)] = number, name

    def _wait(self, on_progress: Report) -> Iterator[tuple[int, Any]]:
        """Wait for a task; its progress comes with its result."""
        errors = self._ray.exceptions
        ready, _ = self._ray.wait(list(self._flying), num_returns=1)
        number, name = self._flying.pop(ready[0])
        try:
            result, amount = self._get(ready[0])
        except errors.RayTaskError as exc:
            if isinstance(exc.cause, Exception):
                raise exc.cause from None
            raise PipesError(f"{name}: {exc}") from None
        except errors.RayError as exc:
            raise PipesError(f"the process or node that worked on {name} died: {exc}; {self._advice}") from exc
        on_progress(amount)
        yield number, result

    def _get(self, reference: Any) -> Any:
        """What a task returned.

        Raises:
            PipesError: If the node could not read the task, because it lacks a package.
        """
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as exc:
            if isinstance(exc.cause, errors.RaySystemError) or _NOT_IMPORTED in str(exc.cause):
                raise PipesError(
                    f"a node of Ray cannot read the task: {str(exc).strip().splitlines()[-1]}; install the same "
                    "dali-pipes[ray] on all nodes, or ship it by --runtime-env FILE"
                ) from None
            raise

    def _stop_tasks(self) -> None:
        left, self._flying = list(self._flying), {}
        # If a task answers just after its cancellation, Ray 2.60 aborts this process and the error is lost. So after an
        # error the tasks in flight get time to end; after Ctrl-C they are cancelled at once.
        if left and isinstance(sys.exception(), Exception):
            _, left = self._ray.wait(left, num_returns=len(left), timeout=_STOP_S)
        for reference in left:
            with contextlib.suppress(Exception):
                self._ray.cancel(reference)
        if left:
            self._ray.wait(left, num_returns=len(left), timeout=_STOP_S)

    def check_reach(self, directories: Iterable[Path]) -> None:
        """Refuse directories that are not the same on all nodes.

        Raises:
            PipesError: If one is another on a node, by inode and time, or does not exist there.
        """
        self.start()
        paths = sorted({str(path.absolute()) for path in directories})
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        ray_errors = self._ray.exceptions
        for node in self._ray.nodes():
            if not node["Alive"] or not node["Resources"].get("CPU"):
                continue
            look = self._ray.remote(num_cpus=0, scheduling_strategy=strategy(node["NodeID"], soft=False))(_marks)
            different: list[str] = []
            with contextlib.suppress(ray_errors.TaskUnschedulableError, ray_errors.NodeDiedError):  # it gets no task
                for _ in range(_LOOKS):
                    marks = zip(paths, self._get(look.remote(paths)), _marks(paths), strict=True)
                    different = [path for path, found, ours in marks if ours != found]
                    if not different:
                        break
            if different:
                raise PipesError(
                    f"'{different[0]}' on node '{node['NodeManagerHostname']}' is not the directory that it is "
                    "here; --on ray needs a bucket, or a file system that all nodes share"
                )

    def close(self) -> None:
        """Leave Ray; a Ray that was started here ends."""
        self._connection.close()
        self._ray = None


def _connect(
    ray: Any, address: str, *, num_cpus: int, directory: str, environment: dict[str, Any] | None = None
) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "runtime_env": environment}
    if address:
        _check_answers(address)
        options |= {"address": address}
    else:
        options |= {"address": "local", "num_cpus": num_cpus, "include_dashboard": False}
        options["_temp_dir"] = f"{directory}/r"  # which Ray opens for everybody
        if not any(name.startswith("RAY_AUTH_") for name in os.environ):
            # Else Ray would write a token to ~/.ray/auth_token, and each later Ray would ask for it.
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    try:
        ray.init(**options)
    except Exception as exc:
        raise PipesError(
            f"no Ray at '{options['address']}': {exc}; is RAY_ADDRESS right? A Ray that asks for a token needs "
            "RAY_AUTH_MODE=token"
        ) from exc


def _read_environment(path: Path) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped,unused-ignore]  # Ray needs it; JSON is YAML, too

    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as exc:
        raise PipesError(f"cannot read --runtime-env '{path}': {' '.join(str(exc).split())}") from exc
    if not isinstance(found, dict):
        raise PipesError(
            f"--runtime-env '{path}': expected names and values, as in Ray's runtime_env, found {found!r:.60}"
        )
    return found


def _check_answers(address: str) -> None:
    """Refuse ``HOST:PORT`` where no server is: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as exc:
        raise PipesError(f"no Ray answers at '{address}': {exc}; is RAY_ADDRESS right, and its head started?") from None


def _marks(paths: list[str]) -> list[tuple[str, int, int]]:
    """Path, inode and time of each directory, or of the nearest one above it that exists."""
    marks = []
    for path in paths:
        nearest = next(folder for folder in (Path(path), *Path(path).parents) if folder.is_dir())
        found = nearest.stat()
        marks.append((str(nearest), found.st_ino, found.st_ctime_ns))
    return marks


_set_up = cache(lambda setup: setup())


def _run(shared: tuple[str, Callable[[], object] | None, Callable[[Any, Report], Any]], task: Any) -> tuple[Any, int]:
    """Do a task in a worker of Ray; returns its result, and the progress that it reported."""
    expected, setup, function = shared
    if expected != _VERSION:
        raise PipesError(
            f"node '{socket.gethostname()}' has dali-pipes {_VERSION}, the command that was started has {expected}; "
            "install the same"
        )
    if setup is not None:
        _set_up(setup)
    reported: list[int] = []
    return function(task, reported.append), sum(reported)
