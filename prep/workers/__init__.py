"""Run tasks in worker processes of this machine, or on the nodes of a Ray cluster.

Both kinds run the same task functions: functions of a module, whose tasks and results pickle.
"""

import contextvars
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

from prep.workers.processes import MAX_JOBS, Report, WorkerDiedError, Workers, default_jobs

__all__ = [
    "MAX_JOBS",
    "RAY_ENVIRONMENT",
    "WORKERS_KINDS",
    "Report",
    "WorkerDiedError",
    "Workers",
    "WorkersKind",
    "default_jobs",
    "open_workers",
]

WorkersKind = Literal["processes", "ray"]
RAY_ENVIRONMENT: contextvars.ContextVar[Path | None] = contextvars.ContextVar("ray_environment", default=None)
"""A file with Ray's ``runtime_env``: what nodes get for the tasks, such as packages that they lack."""
WORKERS_KINDS: tuple[WorkersKind, ...] = get_args(WorkersKind)


def open_workers(
    on: WorkersKind = "processes",
    jobs: int | None = None,
    *,
    at_most: int | None = None,
    setup: Callable[[], object] | None = None,
    isolated: bool = False,
    advice: str | None = None,
) -> Workers:
    """Workers of a kind; a context manager. For the other arguments see `Workers`.

    Args:
        on: ``"processes"`` of this machine, or ``"ray"``: the cluster that ``RAY_ADDRESS`` names, or else a Ray on this
            machine, which is started and ended.
        jobs: The number of tasks at a time; ``None``: the number of cores, at most 16, or a Ray cluster's CPUs.
        at_most: Of no effect on Ray.
        setup: See `Workers`.
        isolated: Ray's always are.
        advice: ``None``: the kind's own.

    Raises:
        PipesError: If Ray is not installed, or cannot be reached.
        ValueError: If ``on`` is not a kind, or ``jobs`` is not positive.
    """
    if on not in WORKERS_KINDS:
        raise ValueError(f"on must be one of {', '.join(WORKERS_KINDS)}, got '{on}'")
    given: dict[str, Any] = {} if advice is None else {"advice": advice}
    if on == "processes":
        if RAY_ENVIRONMENT.get() is not None:
            raise ValueError("--runtime-env is for --on ray; give both, or none of them")
        return Workers(jobs, at_most=at_most, setup=setup, isolated=isolated, **given)
    from prep.workers.on_ray import RayWorkers

    return RayWorkers(jobs, setup=setup, environment=RAY_ENVIRONMENT.get(), **given)
