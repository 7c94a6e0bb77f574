"""CPU time of workers is counted, whether they live on or have ended; and where they are forked from."""

import json
import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import pytest

from bench.engine.turn_process import server_state, take_server
from bench.loaders.workers import worker_context
from bench.tools.processes import ProcessTree, child_pids, shared_memory_bytes

BURNT_S = 0.3
# The kernel adds up whole ticks of 10 ms, for user and system time of each process.
TICKS_S = 0.05


def burn(done: "multiprocessing.connection.Connection", stay: "multiprocessing.connection.Connection") -> None:
    """Spend CPU time, however long that takes, then stay until told."""
    while time.process_time() < BURNT_S:
        pass
    done.send(time.process_time())
    stay.recv()


def burn_below(done: "multiprocessing.connection.Connection", stay: "multiprocessing.connection.Connection") -> None:
    """Have a process of one's own do it."""
    below = multiprocessing.get_context("fork").Process(target=burn, args=(done, stay))
    below.start()
    below.join()


def spent(target: object, *, method: str, bystanders: set[int] | None = None) -> tuple[float, float]:
    """CPU seconds seen while a process that burns them lives, and when it has ended."""
    context = worker_context() if method == "forkserver" else multiprocessing.get_context(method)
    done, done_end = context.Pipe(duplex=False)
    stay_end, stay = context.Pipe(duplex=False)
    # The server itself starts before the clock.
    warm = context.Process(target=int)
    warm.start()
    warm.join()
    before = child_pids()
    start = ProcessTree().cpu_s()
    process = context.Process(target=target, args=(done_end, stay_end))
    process.start()
    done.recv()
    if bystanders is not None:
        bystanders |= child_pids() - before
    alive = ProcessTree(bystanders=bystanders or ()).cpu_s() - start
    stay.send(None)
    process.join()
    return alive, ProcessTree().cpu_s() - start


@pytest.mark.parametrize(
    ("work", "method"),
    [
        pytest.param(burn, "fork", id="child"),
        # It is the fork server's child, which waits for it; its time must not be lost there.
        pytest.param(burn, "forkserver", id="worker of a fork server"),
        # What a worker starts is the loader's cost too.
        pytest.param(burn_below, "fork", id="grandchild"),
    ],
)
def test_cpu_of_a_process_below_counts_alive_and_ended(work: object, method: str) -> None:
    """Its time is there while it lives, and stays when it has ended."""
    alive, ended = spent(work, method=method)
    assert alive >= BURNT_S - TICKS_S
    assert ended >= BURNT_S - TICKS_S


def test_cpu_of_a_bystander_does_not_count() -> None:
    """An embedded AIS node spends CPU beside the loaders, and is none of them."""
    alive, _ = spent(burn, method="fork", bystanders=set())
    assert alive < BURNT_S - TICKS_S


MEMORY = """
import json, multiprocessing, os
from bench.tools.processes import ProcessTree

def hold(held, stay):
    block = bytearray(64 << 20)
    held.send(len(block))
    stay.recv()

shared = bytearray(128 << 20)
context = multiprocessing.get_context("fork")
held, held_end = context.Pipe(duplex=False)
stay_end, stay = context.Pipe(duplex=False)
before = ProcessTree().pss_bytes()
process = context.Process(target=hold, args=(held_end, stay_end))
process.start()
held.recv()
grown = ProcessTree().pss_bytes() - before
without = ProcessTree(bystanders={process.pid}).pss_bytes() - before
stay.send(None)
process.join()
print(json.dumps([before, grown, without]))
"""


@pytest.mark.fresh_interpreter
def test_memory_of_a_child_counts_and_what_is_shared_counts_once() -> None:
    """A child's own 64 MiB are added; the 128 MiB that it shares with its parent after the fork are not, and are half
    the parent's then.

    In a process without large libraries: those are shared with every test that runs at the same time, too.
    """
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, timeout=60)
    before, grown, without = json.loads(done.stdout)
    libraries = 16 << 20
    assert 128 << 20 <= before < 192 << 20
    assert abs(grown - (64 << 20)) < libraries
    assert abs(without + (64 << 20)) < libraries


def test_shared_memory_counts_files_that_nobody_maps() -> None:
    """A file of 8 MiB in /dev/shm, as an image or a batch on its way."""

    def grown() -> int:
        before = shared_memory_bytes()
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            file.write(bytes(8 << 20))
            file.flush()
            return shared_memory_bytes() - before

    # Others may be at it, too, and take theirs away in between.
    assert any(grown() >= 4 << 20 for _ in range(5))


def send_parent(found: "multiprocessing.connection.Connection") -> None:
    """Which process forked this one."""
    found.send(os.getppid())


def send_servers(found: "multiprocessing.connection.Connection", state: dict[str, Any]) -> None:
    """Which process forked this one, as a rank, and which its worker."""
    take_server(state)
    theirs, mine = multiprocessing.get_context("forkserver").Pipe(duplex=False)
    worker = multiprocessing.get_context("forkserver").Process(target=send_parent, args=(mine,))
    worker.start()
    found.send((os.getppid(), theirs.recv()))
    worker.join()


@pytest.mark.parametrize("is_told", [True, False])
def test_worker_of_a_rank_is_forked_from_the_ranks_server(is_told: bool) -> None:
    """Which the rank is told through what is private in this Python; where that is elsewhere it starts its own."""
    context = multiprocessing.get_context("forkserver")
    found, found_end = context.Pipe(duplex=False)
    rank = context.Process(target=send_servers, args=(found_end, server_state() if is_told else {}))
    rank.start()
    of_rank, of_worker = found.recv()
    rank.join()
    assert (of_rank == of_worker) == is_told
