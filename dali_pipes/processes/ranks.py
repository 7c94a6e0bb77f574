"""Find this process's rank: given by the caller, else by torch's or JAX's process group, else by the launcher.

``torchrun``, Slurm's ``srun`` and the MPI launchers set environment variables. They are read here; the number of
torchrun's attempt is read in `dali_pipes.processes.agreement`.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
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

# What can tell the rank, from the worst to the best.
_SOURCES = ("nothing", "the launcher's variables", "jax.distributed", "torch.distributed", "arguments")
NOTHING, _LAUNCHER, _JAX, _TORCH, GIVEN = _SOURCES


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
    source: str = field(default=NOTHING, compare=False, repr=False)
    """What told the rank: one of ``_SOURCES``."""

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
    neither, `jax.distributed` initialised      its processes; JAX's backend is then made
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
    if rank is not None and world_size is not None:
        found, source = (as_integer("rank", rank), as_integer("world_size", world_size)), GIVEN
    elif (group := distributed_rank()) is not None:
        found, source = group, _TORCH
    elif (group := _jax_rank()) is not None:
        found, source = group, _JAX
    else:
        found, source = (launched.rank, launched.world_size), launched.source
    return Rank(rank=found[0], world_size=found[1], local_rank=launched.local_rank, source=source)


def refuse_changed_rank(process: Rank) -> None:
    """Refuse a rank that was found before there was anything that knows the real one. A given rank is kept.

    =====================================  ===================================  ==========
    found when the loader was opened       found now
    =====================================  ===================================  ==========
    nothing: the only process              a group or launcher of 2 processes   refused
    nothing: the only process              a group of 1 process                 kept
    rank 0 of 2 by a launcher              rank 1 of 2 by a group               refused
    rank 0 of 2 by a group                 nothing: the group was destroyed     kept
    =====================================  ===================================  ==========

    Raises:
        ValueError: Says what was found then and now, and where to open the loader.
    """
    if process.source == GIVEN:
        return
    now = find_rank(rank=None, world_size=None)
    is_worse = _SOURCES.index(now.source) < _SOURCES.index(process.source)
    if is_worse or (now.rank, now.world_size) == (process.rank, process.world_size):
        return
    if process.source == NOTHING:
        then = "as that of the only process, because neither a process group nor a launcher's variables were there"
    else:
        then = f"as that of rank {process.rank} of {process.world_size}, by {process.source}"
    raise ValueError(
        f"this loader was opened {then}; now this is rank {now.rank} of {now.world_size}, by {now.source}; with the "
        "old rank some samples would be read twice or never; open the loader after init_process_group(), "
        "Accelerator() or whatever starts the group, or pass rank='late' to dali_pipes.loader, and ask for its length "
        "and batches after that; if each process is to read all samples, pass rank=0, world_size=1"
    )


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
        source=_LAUNCHER,
    )


def distributed_rank() -> tuple[int, int] | None:
    """Return rank and size of torch's default process group; ``None`` if there is none."""
    import torch.distributed as distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _jax_rank() -> tuple[int, int] | None:
    """Return rank and number of JAX's processes; ``None`` if the program does not use several."""
    jax = sys.modules.get("jax")
    # Older versions cannot say; a program with several of their processes gives rank= and world_size=.
    if jax is None or not getattr(jax.distributed, "is_initialized", lambda: False)():
        return None
    return jax.process_index(), jax.process_count()


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
