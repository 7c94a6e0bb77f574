"""Which process this is: arguments, then torch.distributed, then the launcher's variables."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dali_pipes.processes.ranks import cores_of_rank, find_rank, rank_from_environment

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPICH = {"PMI_RANK": "6", "PMI_SIZE": "7", "MPI_LOCALRANKID": "3"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, 0)),
        (TORCHRUN, (5, 8, 1)),
        (SLURM, (3, 4, 2)),
        (OPEN_MPI, (1, 2, 1)),
        (MPICH, (6, 7, 3)),
        (TORCHRUN | SLURM, (5, 8, 1)),  # torchrun inside a Slurm job: its processes are more than the tasks
        ({"RANK": "2"}, (0, 1, 0)),  # half of it says nothing
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 0)),
    ],
)
def test_rank_from_environment(environment: dict[str, str], expected: tuple[int, int, int]) -> None:
    """Each launcher's own names."""
    found = rank_from_environment(environment)
    assert (found.rank, found.world_size, found.local_rank) == expected


@pytest.mark.parametrize(
    ("given", "environment", "text"),
    [
        ((2, None), {}, "rank was given without world_size; give both"),
        ((None, 2), {}, "world_size was given without rank; give both"),
        ((2, 2), {}, r"rank must be in \[0, world_size\), got rank=2 with world_size=2"),
        ((None, None), {"RANK": "a", "WORLD_SIZE": "2"}, "torchrun's variable RANK must be a number, got 'a'"),
        ((None, None), TORCHRUN | {"LOCAL_RANK": "-1"}, "LOCAL_RANK must be a number, got '-1'"),
        ((None, None), TORCHRUN | {"RANK": "²"}, "RANK must be a number, got '²'"),
        ((None, None), {"SLURM_PROCID": "4", "SLURM_NTASKS": "4"}, "got rank=4 with world_size=4"),
    ],
)
def test_ranks_that_make_no_sense_are_refused(
    given: tuple[int | None, int | None], environment: dict[str, str], text: str
) -> None:
    """Named, with what was found."""
    with pytest.raises(ValueError, match=text):
        find_rank(rank=given[0], world_size=given[1], environment=environment)


def test_cores_are_shared_if_the_launcher_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing says whether a rank is bound to its cores. A rank that is bound uses all of its cores."""
    monkeypatch.setattr(os, "getppid", lambda: 4242)
    environment = {"LOCAL_WORLD_SIZE": "4", "RANK": "0", "WORLD_SIZE": "4"}

    def cores(launcher: set[int] | None) -> int:
        def cores_of(pid: int) -> set[int]:
            if pid and launcher is None:
                raise ProcessLookupError(3, "No such process")
            return (launcher or set()) if pid else set(range(8))

        monkeypatch.setattr(os, "sched_getaffinity", cores_of)
        return cores_of_rank(environment)

    assert (cores(None), cores(set(range(8))), cores(set(range(32)))) == (2, 2, 8)


ON_A_MESH = """
import json, sys, torch, torch.distributed as d
from torch.distributed.device_mesh import init_device_mesh
from dali_pipes.processes.ranks import find_rank
rank, store = int(sys.argv[1]), sys.argv[2]
d.init_process_group('gloo', store=d.FileStore(store, 2), rank=rank, world_size=2)
data, both = init_device_mesh('cpu', (1, 2), mesh_dim_names=('model', 'data')), d.new_group([0, 1])
other = d.new_group([1])
for mesh in (data['data'], data['model'], both, other, data, 'data'):
    try:
        found = find_rank(rank=None, world_size=None, mesh=mesh)
        print(json.dumps(f'{found.rank} of {found.world_size}'))
    except (TypeError, ValueError) as exc:
        print(json.dumps(str(exc)))
d.barrier()
d.destroy_process_group()
"""


def test_rank_in_a_mesh_or_group(tmp_path: Path) -> None:
    for rank, told in enumerate(run_two_ranks(ON_A_MESH, tmp_path / "store")):
        assert told[:3] == [f"{rank} of 2", "0 of 1", f"{rank} of 2"]
        assert told[3] == "0 of 1" if rank else "this process is not in" in told[3]
        assert "mesh must have one dimension, that along which processes train on other samples" in told[4]
        assert told[5] == "mesh must be torch's DeviceMesh or a process group, got 'data'"


def run_two_ranks(program: str, *arguments: object) -> list[list[Any]]:
    """Run a program as rank 0 and rank 1; returns the JSON lines that each printed."""
    words = [sys.executable, "-c", program]
    processes = [
        subprocess.Popen([*words, str(rank), *map(str, arguments)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=300)[0] for process in processes]
    # Some versions of torch say on stdout that gloo is connected.
    return [[json.loads(line) for line in text.splitlines() if line[:1] in ('"', "{")] for text in printed]


DISAGREEING = """
import json, sys, torch.distributed as d, dali_pipes as dp
rank, shards, folder, cases = int(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
for number, (seeds, what) in enumerate(cases):
    d.init_process_group('gloo', store=d.FileStore(f'{folder}/{number}', 2), rank=rank, world_size=2)
    if what == 'validates' and rank == 0:
        with dp.loader(shards, dp.segmentation(crop=16), batch_size=2, device='cpu', rank=0, world_size=1) as alone:
            next(alone)
    numbers = {'same': {'rank': 0, 'world_size': 2}, 'swapped': {'rank': 1 - rank, 'world_size': 2}}.get(what, {})
    with dp.loader(
        shards, dp.segmentation(crop=16), batch_size=4, seed=seeds[rank], device='cpu', **numbers
    ) as loader:
        if what == 'resumes' and rank == 0:
            loader.load_state_dict(loader.state_dict() | {'delivered': 8})
        if rank == 1:
            d.barrier()  # rank 0 has begun
        try:
            next(loader)
        except ValueError as exc:
            print(json.dumps(str(exc)))
        else:
            print(json.dumps('agreed'))
        if rank == 0:
            d.barrier()
    d.barrier()
    d.destroy_process_group()
"""

DISAGREEMENTS = [
    ((1, 2), "", "the ranks disagree: seed is 2 on rank 1 and 1 on rank 0; give every rank the same value"),
    ((1, 1), "validates", "agreed"),  # rank 0 has a loader of its own before
    ((1, 1), "same", "too many processes took the same rank: the loaders of processes 0, 1 of the group are of rank 0"),
    ((1, 2), "swapped", "the ranks disagree: seed is 2 on rank 0 and 1 on rank 1"),
    ((1, 1), "swapped", "agreed"),  # each process may have either rank
    ((1, 1), "resumes", "the ranks disagree: the position in the epoch is 0 on rank 1 and 8 on rank 0"),
]


def test_ranks_that_disagree_are_found_at_the_first_step(small_shards: Path, tmp_path: Path) -> None:
    """Two processes of one group: the one that comes later is told what differs."""
    cases = json.dumps([(seeds, what) for seeds, what, _ in DISAGREEMENTS])
    first, second = run_two_ranks(DISAGREEING, small_shards, tmp_path, cases)
    assert first == ["agreed"] * len(DISAGREEMENTS)
    for told, (*case, expected) in zip(second, DISAGREEMENTS, strict=True):
        assert told.startswith(expected), case


PARTING = """
import json, pathlib, sys, threading, torch.distributed as d, dali_pipes as dp
from tests.programs import wait_until
rank, shards, folder, cases = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]), json.loads(sys.argv[4])

def store_of(case):
    port = folder / case
    if rank == 1:
        wait_until(port.exists)
        return d.TCPStore('127.0.0.1', int(port.read_text()), is_master=False)
    store = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    (folder / 'new').write_text(str(store.port))
    (folder / 'new').rename(port)
    return store

def compared():
    for thread in threading.enumerate():
        if thread.name == 'dali-pipes-agreement':
            thread.join()

def begun(loader):
    # The first batch starts the comparison. The second batch comes after its end.
    next(loader)
    compared()
    next(loader)

for case in cases:
    d.init_process_group('gloo', store=store_of(case), rank=rank, world_size=2)
    with dp.loader(shards, dp.segmentation(crop=16), batch_size=1, device='cpu') as loader:
        try:
            if case == 'looks' and rank == 0:
                next(loader)
                loader.set_epoch(0)
            next(loader)
            state = loader.state_dict()
            if rank == 1:
                d.barrier()
            if case == 'parts':
                loader.set_epoch(5) if rank == 0 else loader.reset()
            elif case == 'resumes':
                loader.load_state_dict(state | {'epoch': 3, 'delivered': 4 + 2 * rank})
            else:
                loader.set_epoch(4)
            begun(loader)
            print(json.dumps(f'agreed on {sum(1 for _ in loader)} more'), flush=True)
        except ValueError as exc:
            print(json.dumps(str(exc)), flush=True)
        if rank == 0:
            d.barrier()
    d.barrier()
    d.destroy_process_group()
"""

# Case -> what rank 0 is told, which comes to its start first, and what rank 1 is told. 23 samples make 12 steps.
AGREED = "agreed on 10 more"
PARTED = "the ranks have parted: rank 1 reads epoch {} from position {} on, and rank 0 epoch {} from position {} on"
STARTS = {
    "parts": (AGREED, PARTED.format(1, 0, 5, 0)),
    "resumes": ("agreed on 8 more", PARTED.format(3, 6, 3, 4)),
    "looks": (AGREED, AGREED),  # rank 0 alone takes a batch and begins again
}


def test_ranks_that_part_after_the_first_step_are_told(small_shards: Path, tmp_path: Path) -> None:
    """Real processes and a real group: the rank that comes later is told both ranks' epochs, and none hangs."""
    lines = run_two_ranks(PARTING, small_shards, tmp_path, json.dumps(list(STARTS)))
    for (case, expected), *told in zip(STARTS.items(), *lines, strict=True):
        assert told[0] == expected[0], case
        assert told[1].startswith(expected[1]), case


EARLY = """
import json, os, sys, torch.distributed as d, dali_pipes as dp
rank, shards, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]

def opened(**options):
    return dp.loader(shards, dp.segmentation(crop=16), batch_size=4, device='cpu', **options)

def asked(loader):
    try:
        return len(next(loader)[0]['label'])
    except ValueError as exc:
        return str(exc)

loaders = {'early': opened(), 'looked': opened(), 'given': opened(rank=0, world_size=1)}
first = asked(loaders['looked'])
os.environ |= {'RANK': str(1 - rank), 'WORLD_SIZE': '2'}
loaders['launched'] = opened()
d.init_process_group('gloo', store=d.FileStore(folder + '/store', 2), rank=rank, world_size=2)
loaders['after'] = opened()
told = {name: asked(loader) for name, loader in loaders.items()}
again = asked(loaders['early'])
d.barrier()
d.destroy_process_group()
print(json.dumps({'first': first, **told, 'again': again, 'gone': asked(loaders['after'])}))
"""


def test_loader_opened_before_the_group_is_refused_at_its_first_batch(small_shards: Path, tmp_path: Path) -> None:
    """Each process would take itself for the only one, and read all 23 samples; also if it had read one alone."""
    for rank, ((told,),) in enumerate(zip(run_two_ranks(EARLY, small_shards, tmp_path), strict=True)):
        for name in ("early", "looked", "again"):
            assert told[name].startswith(
                "this loader was opened as that of the only process, because neither a process group nor a launcher's "
                f"variables were there; now this is rank {rank} of 2, by torch.distributed"
            )
            assert "open the loader after init_process_group(), Accelerator()" in told[name]
        assert told["launched"].startswith(
            f"this loader was opened as that of rank {1 - rank} of 2, by the launcher's variables; now this is rank "
            f"{rank} of 2, by torch.distributed"
        )
        assert [told[name] for name in ("first", "given", "after", "gone")] == [4, 4, 4, 4]


def test_jax_processes_are_ranks(closed_port: int) -> None:
    """A real `jax.distributed` of one process, whose launcher says something else."""
    pytest.importorskip("jax")
    program = (
        "import jax; from dali_pipes.processes.ranks import find_rank\n"
        "environment = {'RANK': '5', 'WORLD_SIZE': '8'}\n"
        "print(find_rank(rank=None, world_size=None, environment=environment).source)\n"
        f"jax.distributed.initialize('127.0.0.1:{closed_port}', num_processes=1, process_id=0)\n"
        "found = find_rank(rank=None, world_size=None, environment=environment)\n"
        "print(found.source, found)\n"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines() == [
        "the launcher's variables",
        "jax.distributed Rank(rank=0, world_size=1, local_rank=0)",
    ], done.stderr


@pytest.mark.parametrize(
    ("environment", "share"),
    [
        ({}, 1),
        ({"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "2"}, 2),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2"}, 2),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        # torchrun inside a Slurm job: its own variables count.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, 2),
    ],
)
def test_ranks_share_the_cores_of_their_launcher(environment: dict[str, str], share: int) -> None:
    assert cores_of_rank(environment) == max(1, len(os.sched_getaffinity(0)) // share)


def test_a_number_of_local_ranks_that_is_none_is_told() -> None:
    with pytest.raises(ValueError, match=r"torchrun's variable LOCAL_WORLD_SIZE must be a number, got 'eight'"):
        cores_of_rank({"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "eight"})
