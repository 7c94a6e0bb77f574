"""Find this process's rank: given by the caller, else by `torch.distributed`, else by the launcher's variables.

``torchrun``, Slurm's ``srun`` and the MPI launchers set environment variables. They are read here; the number of
torchrun's attempt is read in `dali_pipes.processes.agreement`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dali_pipes.arguments import as_integer


class _Launcher(NamedTuple):
    # A launcher's name, and the names of its variables.
    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    """The number of processes that it started on this host."""


# The first launcher whose rank and world size are set is taken. torchrun comes first: it is started inside a Slurm job
# more often than the other way round.
_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Launcher("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One of the processes that share an order.

    Raises:
        ValueError: If ``rank`` is not in ``[0, world_size)``, or ``local_rank`` is negative.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """The process's number on this host, which is also the number of its CUDA device."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be in [0, world_size), got rank={self.rank} with world_size={self.world_size}")
        if self.local_rank < 0:
            raise ValueError(f"local_rank must not be negative, got {self.local_rank}")


def find_rank(*, rank: int | None, world_size: int | None, environment: Mapping[str, str] | None = None) -> Rank:
    """Find the rank of this process.

    ==========================================  ==============================================
    given                                       taken
    ==========================================  ==============================================
    ``rank`` and ``world_size``                 these two
    neither, `torch.distributed` initialised    its default group
    neither, a launcher's variables             torchrun's, Slurm's, Open MPI's or MPICH's
    none of these                               one process
    ==========================================  ==============================================

    ``local_rank`` is the launcher's; without a launcher it is 0.

    Raises:
        TypeError: If ``rank`` or ``world_size`` is not an integer.
        ValueError: If only one of ``rank`` and ``world_size`` is given, or the rank is not below the world size.
    """
    launched = rank_from_environment(os.environ if environment is None else environment)
    if (rank is None) != (world_size is None):
        given, missing = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        raise ValueError(f"{given} was given without {missing}; give both, or neither to find them automatically")
    local = launched.local_rank
    if rank is not None and world_size is not None:
        return Rank(rank=as_integer("rank", rank), world_size=as_integer("world_size", world_size), local_rank=local)
    distributed = distributed_rank()
    if distributed is not None:
        return Rank(rank=distributed[0], world_size=distributed[1], local_rank=local)
    return Rank(rank=launched.rank, world_size=launched.world_size, local_rank=local)


def rank_from_environment(environment: Mapping[str, str]) -> Rank:
    """Read the rank from a launcher's variables; without them there is one process.

    >>> rank_from_environment({"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"})
    Rank(rank=3, world_size=8, local_rank=1)

    Raises:
        ValueError: If a variable is not a number.
    """
    launcher = _launcher(environment)
    if launcher is None:
        return Rank()
    return Rank(
        rank=_number(environment, launcher.rank, launcher),
        world_size=_number(environment, launcher.world_size, launcher),
        local_rank=_number(environment, launcher.local_rank, launcher),
    )


def distributed_rank() -> tuple[int, int] | None:
    """Return rank and size of torch's default process group; ``None`` if there is none."""
    import torch.distributed as distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def cores_of_rank(environment: Mapping[str, str] | None = None) -> int:
    """Count the cores that this process may keep busy: all that it may use, or its share of them.

    ``torchrun`` lets each rank use every core unless it is asked to bind ranks to cores; ``srun`` binds by default. A
    process that may use the same cores as its launcher is not bound, and shares them with the other ranks of the host.

    >>> cores_of_rank({"RANK": "0", "WORLD_SIZE": "1000000", "LOCAL_WORLD_SIZE": "1000000"})
    1

    Raises:
        ValueError: If a variable is not a number.
    """
    found = os.environ if environment is None else environment
    cores = os.sched_getaffinity(0)
    launcher = _launcher(found)
    if launcher is None or _is_bound(cores):
        return len(cores)
    return max(1, len(cores) // num_local_ranks(found))


def num_local_ranks(environment: Mapping[str, str] | None = None) -> int:
    """Count the processes that the launcher started on this host; 1 without a launcher.

    Raises:
        ValueError: If a variable is not a number.
    """
    found = os.environ if environment is None else environment
    launcher = _launcher(found)
    return 1 if launcher is None else max(1, _number(found, launcher.local_world_size, launcher, default=1))


def _launcher(environment: Mapping[str, str]) -> _Launcher | None:
    return next((it for it in _LAUNCHERS if it.rank in environment and it.world_size in environment), None)


def _number(environment: Mapping[str, str], name: str, launcher: _Launcher, *, default: int = 0) -> int:
    text = environment.get(name, str(default))
    if not text.strip().isdigit():
        raise ValueError(f"{launcher.name}'s variable {name} must be a number, got '{text}'")
    return int(text)


def _is_bound(cores: set[int]) -> bool:
    try:
        return cores != os.sched_getaffinity(os.getppid())  # the launcher's cores
    except OSError:  # the launcher has ended, or cannot be seen from this container
        return False
