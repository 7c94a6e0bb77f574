"""Ranks that read different orders are told: before the first batch, and whenever an epoch is begun."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = """
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
CASES = {
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
def told(small_shards: Path) -> dict[str, tuple[str, str]]:
    """What each of two processes of a gloo group was told; each case has a group and a loader of its own."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in CASES]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(rank), str(small_shards), json.dumps(ports), json.dumps(list(CASES))],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=300)[0] for process in processes]
    lines = [[json.loads(line) for line in text.splitlines() if line.startswith('"')] for text in printed]
    return dict(zip(CASES, zip(*lines, strict=True), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_part_after_the_first_step_are_told(told: dict[str, tuple[str, str]], case: str) -> None:
    """Real processes and a real group: the rank that comes later is told both ranks' epochs, and none hangs."""
    assert told[case][0] == CASES[case][0]
    assert told[case][1].startswith(CASES[case][1])
