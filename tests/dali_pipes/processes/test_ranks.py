"""Which process this is: arguments, then torch.distributed, then the launcher's variables."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp
from dali_pipes.processes.ranks import Rank, cores_of_rank, find_rank, rank_from_environment, refuse_changed_rank
from tests.loaders import open_loader

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
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


def test_arguments_come_before_the_launcher() -> None:
    """What is given counts; the local rank is still the launcher's."""
    assert find_rank(rank=1, world_size=2, environment=TORCHRUN) == Rank(rank=1, world_size=2, local_rank=1)


def test_process_group_comes_before_the_launcher() -> None:
    """An initialised default group knows best."""
    program = (
        "import torch.distributed as d; from dali_pipes.processes.ranks import find_rank\n"
        "d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)\n"
        "print(find_rank(rank=None, world_size=None, environment={'RANK': '5', 'WORLD_SIZE': '8'}))\n"
        "d.destroy_process_group()\n"
        "print(find_rank(rank=None, world_size=None, environment={'RANK': '5', 'WORLD_SIZE': '8'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    # Some versions of torch say on stdout that gloo is connected.
    assert [line for line in done.stdout.splitlines() if "[Gloo]" not in line] == [
        "Rank(rank=0, world_size=1, local_rank=0)",
        "Rank(rank=5, world_size=8, local_rank=0)",
    ], done.stderr


@pytest.mark.parametrize(
    ("given", "environment", "text"),
    [
        ((2, None), {}, "rank was given without world_size; give both"),
        ((None, 2), {}, "world_size was given without rank; give both"),
        ((2, 2), {}, r"rank must be in \[0, world_size\), got rank=2 with world_size=2"),
        ((None, None), {"RANK": "a", "WORLD_SIZE": "2"}, "torchrun's variable RANK must be a number, got 'a'"),
        ((None, None), {"SLURM_PROCID": "4", "SLURM_NTASKS": "4"}, "got rank=4 with world_size=4"),
    ],
)
def test_ranks_that_make_no_sense_are_refused(
    given: tuple[int | None, int | None], environment: dict[str, str], text: str
) -> None:
    """Named, with what was found."""
    with pytest.raises(ValueError, match=text):
        find_rank(rank=given[0], world_size=given[1], environment=environment)


def test_loader_takes_its_rank_from_the_launcher(small_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes of a launcher, without a word in the program: disjoint, and together all."""
    keys: list[str] = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        with open_loader(small_shards, dp.segmentation(crop=16), seed=1) as loader:
            assert len(loader) == 3
            keys += [key for (batch,) in loader for key in batch["key"][: loader.num_valid]]
    assert len(keys) == len(set(keys)) == 23


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
    ((1, 1), "", "agreed"),
    ((1, 2), "", "the ranks disagree: seed is 2 on rank 1 and 1 on rank 0; give every rank the same value"),
    ((1, 1), "validates", "agreed"),  # rank 0 has a loader of its own before
    (
        (1, 1),
        "same",
        "two processes took the same rank: the loaders of processes 0 and 1 of the group are both of rank 0",
    ),
    ((1, 1), "swapped", "agreed"),  # whose number is whose is not ours to say
    ((1, 2), "swapped", "the ranks disagree: seed is 2 on rank 0 and 1 on rank 1"),
    ((1, 1), "resumes", "the ranks disagree: the position in the epoch is 0 on rank 1 and 8 on rank 0"),
]


@pytest.fixture(scope="module")
def told(small_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What each of two processes was told, in a group and with a loader of its own for each case."""
    cases = json.dumps([(seeds, what) for seeds, what, _ in DISAGREEMENTS])
    return run_two_ranks(DISAGREEING, small_shards, tmp_path_factory.mktemp("stores"), cases)


@pytest.mark.parametrize("case", range(len(DISAGREEMENTS)), ids=lambda case: str(DISAGREEMENTS[case][:2]))
def test_ranks_that_disagree_are_found_at_the_first_step(told: list[list[str]], case: int) -> None:
    """Two processes of one group: the one that comes later is told what differs."""
    assert told[0][case] == "agreed"
    assert told[1][case].startswith(DISAGREEMENTS[case][2])


PARTING = """
import json, sys, time, torch.distributed as d, dali_pipes as dp
rank, shards, ports, cases = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])

def begun(loader):
    # The second batch comes long after the comparison that began with the first.
    next(loader)
    time.sleep(1)
    next(loader)

for port, case in zip(ports, cases):
    d.init_process_group('gloo', init_method=f'tcp://127.0.0.1:{port}', rank=rank, world_size=2)
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
            elif case == 'late':  # alike twice, and then not
                for epoch in (2, 7):
                    loader.set_epoch(epoch)
                    begun(loader)
                loader.set_epoch(8 + rank)
            elif case == 'gone':
                loader.set_epoch(1)
            else:
                loader.set_epoch(4)
            if case == 'gone' and rank == 1:
                d.destroy_process_group()
            begun(loader)
            if case == 'comes-back':
                loader.set_epoch(8 + rank)
                try:
                    next(loader)  # tells already, if the comparison is fast
                    time.sleep(1)
                    next(loader)
                except ValueError:
                    pass
                loader.set_epoch(6)
                begun(loader)
            print(json.dumps(f'agreed on {sum(1 for _ in loader)} more'), flush=True)
        except ValueError as exc:
            print(json.dumps(str(exc)), flush=True)
        if rank == 0:
            d.barrier()
    if d.is_initialized():
        d.barrier() if case != 'gone' else None
        d.destroy_process_group()
"""

# Case -> what rank 0 is told, which comes to its start first, and what rank 1 is told. 23 samples make 12 steps.
AGREED = "agreed on 10 more"
STARTS = {
    "parts": (
        AGREED,
        "the ranks have parted: rank 1 reads epoch 1 from position 0 on, and rank 0 epoch 5 from position 0 on; call "
        "reset(), set_epoch() and load_state_dict() alike on every rank; otherwise some samples are read twice and "
        "others never",
    ),
    "resumes": (
        "agreed on 8 more",
        "the ranks have parted: rank 1 reads epoch 3 from position 6 on, and rank 0 epoch 3 from position 4 on",
    ),
    "late": (
        AGREED,
        "the ranks have parted: rank 1 reads epoch 9 from position 0 on, and rank 0 epoch 8 from position 0 on",
    ),
    "alike": (AGREED, AGREED),
    "looks": (AGREED, AGREED),  # rank 0 alone takes a batch and begins again
    "comes-back": (AGREED, AGREED),  # told, and alike again
    "gone": (AGREED, AGREED),  # the group is destroyed while the loader is in use
}


@pytest.fixture(scope="module")
def told_of_starts(small_shards: Path) -> dict[str, tuple[str, str]]:
    """What each of two processes of a gloo group was told; each case has a group and a loader of its own."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in STARTS]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    lines = run_two_ranks(PARTING, small_shards, json.dumps(ports), json.dumps(list(STARTS)))
    return dict(zip(STARTS, zip(*lines, strict=True), strict=True))


@pytest.mark.parametrize("case", STARTS)
def test_ranks_that_part_after_the_first_step_are_told(told_of_starts: dict[str, tuple[str, str]], case: str) -> None:
    """Real processes and a real group: the rank that comes later is told both ranks' epochs, and none hangs."""
    first, second = told_of_starts[case]
    assert first == STARTS[case][0]
    assert second.startswith(STARTS[case][1])


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


@pytest.mark.parametrize(
    ("then", "now", "text"),
    [
        ({}, TORCHRUN, "now this is rank 5 of 8, by the launcher's variables"),
        (TORCHRUN, TORCHRUN | {"RANK": "4"}, "as that of rank 5 of 8, by the launcher's variables; now this is rank 4"),
        (TORCHRUN, TORCHRUN | {"LOCAL_RANK": "0"}, None),  # the same rank
        (TORCHRUN, {}, None),  # taken away, which says nothing
        ({}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),  # still the only process
    ],
)
def test_rank_that_a_launcher_gives_later_is_refused(
    monkeypatch: pytest.MonkeyPatch, then: dict[str, str], now: dict[str, str], text: str | None
) -> None:
    process = find_rank(rank=None, world_size=None, environment=then)
    for name, value in now.items():
        monkeypatch.setenv(name, value)
    if text is None:
        refuse_changed_rank(process)
    else:
        with pytest.raises(ValueError, match=text):
            refuse_changed_rank(process)
    refuse_changed_rank(find_rank(rank=0, world_size=1, environment=then))  # given on purpose


def test_jax_processes_are_ranks() -> None:
    """A real `jax.distributed` of one process, whose launcher says something else."""
    pytest.importorskip("jax")
    program = (
        "import socket, jax; from dali_pipes.processes.ranks import find_rank\n"
        "free = socket.create_server(('127.0.0.1', 0)); port = free.getsockname()[1]; free.close()\n"
        "environment = {'RANK': '5', 'WORLD_SIZE': '8'}\n"
        "print(find_rank(rank=None, world_size=None, environment=environment).source)\n"
        "jax.distributed.initialize(f'127.0.0.1:{port}', num_processes=1, process_id=0)\n"
        "found = find_rank(rank=None, world_size=None, environment=environment)\n"
        "print(found.source, found)\n"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.splitlines() == [
        "the launcher's variables",
        "jax.distributed Rank(rank=0, world_size=1, local_rank=0)",
    ], done.stderr


@pytest.mark.parametrize(
    ("environment", "share"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "2"}, 1),  # no launcher's rank: not started by it
        ({"RANK": "0", "WORLD_SIZE": "2"}, 1),
        ({"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "2"}, 2),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2"}, 2),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        # torchrun inside a Slurm job: its own variables count.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, 2),
    ],
)
def test_ranks_share_the_cores_of_their_launcher(environment: dict[str, str], share: int) -> None:
    assert cores_of_rank(environment) == max(1, len(os.sched_getaffinity(0)) // share)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be split")
def test_a_rank_that_is_bound_has_its_cores_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher may use all cores, this process all but one: they are not shared with anybody."""
    own = os.sched_getaffinity(0)
    mine = own - {min(own)}
    # The test runner itself stays unbound: its threads would inherit it.
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: mine if process == 0 else own)
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1000"}
    assert cores_of_rank(environment) == len(mine)
    mine = own
    assert cores_of_rank(environment) == max(1, len(own) // 1000)


def test_a_number_of_local_ranks_that_is_none_is_told() -> None:
    with pytest.raises(ValueError, match=r"torchrun's variable LOCAL_WORLD_SIZE must be a number, got 'eight'"):
        cores_of_rank({"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "eight"})
