"""Open the workers that ``--on`` names."""

from typing import Literal, get_args

from prep.workers.processes import Workers

WorkersKind = Literal["processes", "ray"]
WORKERS_KINDS: tuple[WorkersKind, ...] = get_args(WorkersKind)


def open_workers(on: WorkersKind = "processes", jobs: int | None = None) -> Workers:
    """Workers of a kind; a context manager.

    Args:
        on: ``"processes"`` of this machine, or ``"ray"``: the cluster that ``RAY_ADDRESS`` names, or else a Ray on this
            machine, which is started and ended.
        jobs: The number of tasks at a time; ``None``: the number of cores, at most 16, or a Ray cluster's CPUs.

    Raises:
        PipesError: If Ray is not installed, or cannot be reached.
        ValueError: If ``on`` is not a kind, or ``jobs`` is not positive.
    """
    if on not in WORKERS_KINDS:
        raise ValueError(f"on must be one of {', '.join(WORKERS_KINDS)}, got '{on}'")
    if on == "processes":
        return Workers(jobs)
    from prep.workers.on_ray import RayWorkers

    return RayWorkers(jobs)
