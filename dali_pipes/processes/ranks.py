"""Find this process's rank, check it again, and compare the ranks' orders.

A rank is given by the caller, else by Accelerate's mesh, torch's or JAX's process group, else by the launcher:
``torchrun``, Slurm's ``srun`` and the MPI launchers set environment variables.

Under tensor, pipeline or context parallelism several processes train on the same samples: they have the same rank.

Orders are compared through the store of torch's process group, a table of small values that its processes share.
Nothing here is a collective operation, and nothing waits for another rank: if two ranks disagree, the one that comes
later finds out.
"""

import json
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dali_pipes.arguments import as_integer

_log = logging.getLogger(__name__)

_HARM = "otherwise some samples are read twice and others never"


class _Launcher(NamedTuple):
    """A launcher's name, and the names of its variables."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str  # the processes that it started on this host


# The first launcher whose rank and world size are set is taken. torchrun comes first: it is started inside a Slurm job
# more often than the other way round.
_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Launcher("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    _Launcher("Open MPI", *(f"OMPI_COMM_WORLD_{end}" for end in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    _Launcher("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)

# What can tell the rank, from the worst to the best.
_SOURCES = (
    "default", "the launcher's variables", "jax.distributed", "torch.distributed", "Accelerate's mesh",
    "arguments", "mesh=",
)  # fmt: skip
NOTHING, _LAUNCHER, _JAX, _TORCH, _ACCELERATE, GIVEN, _MESH = _SOURCES

# The dimensions of Accelerate's mesh along which processes train on other samples.
_DATA_DIMENSIONS = ("dp_replicate", "dp_shard")


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One of the processes that share an order.

    Raises:
        ValueError: If ``rank`` is not in ``[0, world_size)``.
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


def find_rank(
    *, rank: int | None, world_size: int | None, mesh: object = None, environment: Mapping[str, str] | None = None
) -> Rank:
    """Find the rank of this process.

    ===========================================  =============================================
    given                                        taken
    ===========================================  =============================================
    ``rank`` and ``world_size``                  these two
    ``mesh``                                     the process's place in it
    nothing, Accelerate has a mesh               its dimensions of data parallelism
    nothing, `torch.distributed` initialised     its default group
    nothing, `jax.distributed` initialised       its processes; JAX's backend is then made
    nothing, a launcher's variables              torchrun's, Slurm's, Open MPI's or MPICH's
    none of these                                one process
    ===========================================  =============================================

    ``local_rank`` is the launcher's; without a launcher it is 0.

    Raises:
        TypeError: If ``rank`` or ``world_size`` is not an integer, or ``mesh`` is neither mesh nor group.
        ValueError: If only one of ``rank`` and ``world_size`` is given, or the rank is not below the world size; if
            ``mesh`` has several dimensions, or not this process; or if a launcher's variable is not a number.
    """
    launched = rank_from_environment(os.environ if environment is None else environment)
    if (rank is None) != (world_size is None):
        given, missing = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        raise ValueError(f"{given} was given without {missing}; give both, or neither to find them automatically")
    if rank is not None and world_size is not None:
        found, source = (as_integer("rank", rank), as_integer("world_size", world_size)), GIVEN
    elif mesh is not None:
        found, source = _rank_in(mesh), _MESH
    elif (group := _accelerate_rank()) is not None:
        found, source = group, _ACCELERATE
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
        ValueError: Says what was found then and now.
    """
    if process.source in (GIVEN, _MESH):
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
    """
    launcher = _launcher(environment)
    if launcher is None:
        return Rank()
    numbers = {
        name: _number(environment, getattr(launcher, name), launcher) for name in ("rank", "world_size", "local_rank")
    }
    return Rank(**numbers, source=_LAUNCHER)


def distributed_rank() -> tuple[int, int] | None:
    """Rank and size of torch's default process group, if there is one."""
    import torch.distributed as distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _rank_in(mesh: object) -> tuple[int, int]:
    """Rank and size of a process group, or of a mesh of one dimension."""
    import torch.distributed as distributed
    from torch.distributed.device_mesh import DeviceMesh

    if distributed.is_available() and isinstance(mesh, distributed.ProcessGroup):
        rank, size = distributed.get_rank(mesh), mesh.size()
    elif distributed.is_available() and isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(
                f"mesh must have one dimension, that along which processes train on other samples, got {mesh}; pass "
                "mesh['dp'] or what it is called; of several such dimensions make one: mesh['dp', 'fsdp']._flatten()"
            )
        rank, size = (mesh.get_coordinate() or [-1])[0], mesh.size()
    elif distributed.is_available() and mesh == distributed.GroupMember.NON_GROUP_MEMBER:
        rank, size, mesh = -1, 0, "the process group"
    else:
        raise TypeError(f"mesh must be torch's DeviceMesh or a process group, got {mesh!r}")
    if rank < 0:
        raise ValueError(f"this process is not in {mesh}; give each process a mesh or group in which it is")
    return rank, size


def _accelerate_rank() -> tuple[int, int] | None:
    """The place of the process along the dimensions of data in Accelerate's mesh, if the program has made one."""
    state = sys.modules.get("accelerate.state")
    # Accelerate's own name for what all its states share; a state that is made here would begin one.
    mesh = None if state is None else state.AcceleratorState._shared_state.get("device_mesh")
    if mesh is None:
        return None
    rank, num_ranks = 0, 1
    for name, place, size in zip(mesh.mesh_dim_names, mesh.get_coordinate(), mesh.mesh.shape, strict=True):
        if name in _DATA_DIMENSIONS:
            rank, num_ranks = rank * size + place, num_ranks * size
    return rank, num_ranks


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
    """
    cores = os.sched_getaffinity(0)
    try:
        is_bound = cores != os.sched_getaffinity(os.getppid())  # the launcher's cores
    except OSError:  # the launcher has ended
        is_bound = False
    return len(cores) if is_bound else max(1, len(cores) // num_local_ranks(environment))


def num_local_ranks(environment: Mapping[str, str] | None = None) -> int:
    """Count the processes that the launcher started on this host; 1 without a launcher."""
    found = os.environ if environment is None else environment
    launcher = _launcher(found)
    return 1 if launcher is None else max(1, _number(found, launcher.local_world_size, launcher, default=1))


def _launcher(environment: Mapping[str, str]) -> _Launcher | None:
    return next((it for it in _LAUNCHERS if it.rank in environment and it.world_size in environment), None)


def _number(environment: Mapping[str, str], name: str, launcher: _Launcher, *, default: int = 0) -> int:
    text = environment.get(name, str(default))
    if not text.strip().isdecimal():
        raise ValueError(f"{launcher.name}'s variable {name} must be a number, got '{text}'")
    return int(text)


_numbers: Counter[str] = Counter()


def make_name(kind: str) -> str:
    """Name a loader for the comparison: the n-th one of a kind is compared with the n-th one of every other process.

    A kind is a world size, as rank 0 alone may open a loader to validate. Late loaders are a kind of their own, counted
    when they are made: ranks may open them in another order.
    """
    _numbers[kind] += 1
    return f"{kind}/{_numbers[kind]}"


class Agreement:
    """Compares one loader with what this process is by now, and with the same loader of the other processes.

    The latter needs a process group. It is left out for a loader that is of the only rank, such as one that rank 0 has
    to validate, unless the rank comes from a mesh: then several processes may be of it. ``name`` is the same on every
    process: see `make_name`.
    """

    def __init__(self, *, process: Rank, name: str) -> None:
        self._process, self._name = process, name
        self._start: tuple[int, int] | None = None
        self._group: tuple[int, int] | None = None
        self._num_starts = 0
        self._error: str | None = None

    def check(self, inputs: Callable[[], Mapping[str, str]], *, epoch: int, position: int) -> None:
        """Compare what has changed since the last batch; call it before each batch.

        Before the first batch, and before the first one after a process group was made, the rank is checked and all
        inputs are compared: ``inputs`` returns their names and values. Later, when another epoch or position is begun,
        this is compared in a thread, so that no step waits for the store; the batch after the comparison raises the
        error. An epoch that is begun anew at the same position counts once: a rank may look at a batch before the
        others start.

        Raises:
            ValueError: If something differs; names both ranks and both values. If more processes of the group have
                this rank than can. If this process has another rank by now.
        """
        group = distributed_rank()
        if (epoch, position) != self._start or group != self._group:
            refuse_changed_rank(self._process)
            if group is not None and (self._process.world_size > 1 or self._process.source in (_ACCELERATE, _MESH)):
                if self._start is None or group != self._group:
                    self._compare_inputs(inputs(), *group)
                else:
                    self._error, self._num_starts = None, self._num_starts + 1
                    begun = (self._num_starts, {"epoch": epoch, "position": position})
                    threading.Thread(
                        target=self._compare_start, args=begun, name="dali-pipes-agreement", daemon=True
                    ).start()
            self._start, self._group = (epoch, position), group
        if self._error is not None:
            raise ValueError(self._error)

    def _key(self, name: object) -> str:
        # torchrun's store outlives workers that are started again, and still has their values.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return f"dali-pipes/{attempt}/{self._name}/{name}"

    def _compare_inputs(self, inputs: Mapping[str, str], process: int, num_processes: int) -> None:
        """Compare the inputs with those of the first process, and claim one of the rank's places in the group."""
        store, (rank, world_size) = _store(), (self._process.rank, self._process.world_size)

        def first(name: str, value: Mapping[str, Any]) -> Any:
            return json.loads(store.compare_set(self._key(name), "", json.dumps(value)))

        num_places = max(1, num_processes // world_size)
        takers = {process}
        for place in range(num_places):
            if (taker := first(f"{rank}/{place}", {"process": process})["process"]) == process:
                break
            takers.add(taker)
        else:
            numbers = ", ".join(map(str, sorted(takers)))
            raise ValueError(
                f"too many processes took the same rank: the loaders of processes {numbers} of the group are of rank "
                f"{rank} of {world_size}, and with {num_processes} processes {num_places} can be; give each process "
                f"its own rank=, or leave rank= and world_size= out; {_HARM}"
            )
        theirs = first("inputs", {"rank": rank, "inputs": inputs})
        for name, ours in inputs.items():
            if (other := theirs["inputs"].get(name)) != ours:
                raise ValueError(
                    f"the ranks disagree: {name} is {ours} on rank {rank} and {other} on rank {theirs['rank']}; "
                    f"give every rank the same value; {_HARM}"
                )

    def _compare_start(self, number: int, start: Mapping[str, int]) -> None:
        """Compare with the rank that came first to its start of this number, in one operation of the store."""
        rank = self._process.rank
        try:
            # A connection of its own, so that the program's operations and this one do not wait for each other.
            found = _store().clone().compare_set(self._key(f"start/{number}"), "", json.dumps({"rank": rank, **start}))
            theirs = json.loads(found)
        except Exception:  # noqa: BLE001 (the group may have been destroyed, and with it the store)
            _log.debug("the start of an epoch could not be compared with other ranks", exc_info=True)
            return
        other = theirs.pop("rank")
        if theirs != start and number == self._num_starts:
            self._error = (
                f"the ranks have parted: rank {rank} reads epoch {start['epoch']} from position {start['position']} "
                f"on, and rank {other} epoch {theirs['epoch']} from position {theirs['position']} on; call reset(), "
                f"set_epoch() and load_state_dict() alike on every rank; {_HARM}"
            )


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
