"""The cost of processes is measured, and folders of killed runs are removed."""

import json
import multiprocessing
import multiprocessing.connection
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.loaders.workers import worker_context
from bench.tools.folders import RunFolder, remove_leftovers
from bench.tools.processes import ProcessTree, child_pids

BURNT_S = 0.2
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


@pytest.mark.parametrize(
    ("work", "method"),
    [
        # The worker is a child of the fork server, which waits for it: its time must not be lost there.
        pytest.param(burn, "forkserver", id="worker of a fork server"),
        # A process that a worker starts also counts for the loader.
        pytest.param(burn_below, "fork", id="grandchild"),
    ],
)
def test_cpu_of_a_process_below_counts_alive_and_ended(work: object, method: str) -> None:
    """The CPU time of a process counts while the process lives and after it has ended. The time of a bystander, such
    as an embedded node, does not count.
    """
    context = worker_context() if method == "forkserver" else multiprocessing.get_context(method)
    done, done_end = context.Pipe(duplex=False)
    stay_end, stay = context.Pipe(duplex=False)
    # The server itself starts before the clock.
    warm = context.Process(target=int)
    warm.start()
    warm.join()
    before = child_pids()
    start = ProcessTree().cpu_s()
    process = context.Process(target=work, args=(done_end, stay_end))
    process.start()
    done.recv()
    of_others = ProcessTree(bystanders=child_pids() - before).cpu_s()
    assert ProcessTree().cpu_s() - start >= BURNT_S - TICKS_S
    assert ProcessTree().cpu_s() - of_others >= BURNT_S - TICKS_S
    stay.send(None)
    process.join()
    assert ProcessTree().cpu_s() - start >= BURNT_S - TICKS_S


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
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    before, grown, without = json.loads(done.stdout)
    libraries = 16 << 20
    assert 128 << 20 <= before < 192 << 20
    assert abs(grown - (64 << 20)) < libraries
    assert abs(without + (64 << 20)) < libraries


OWNER = """
import sys
from pathlib import Path
from bench.tools.folders import RunFolder
folder = RunFolder(Path(sys.argv[1]))
(folder.new() / "shard.tar").write_bytes(bytes(1000))
print("there", flush=True)
sys.stdin.read()
"""


def test_leftovers_of_killed_runs_are_removed_and_nothing_else(tmp_path: Path) -> None:
    """Only the folder of the killed run is removed, not the folders of two live runs, and no other directory."""
    other = tmp_path / "dali-pipes-bench-notes"
    other.mkdir()
    owners = [
        subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for owner in owners:
            assert owner.stdout is not None
            assert owner.stdout.readline() == b"there\n"
        known = set(tmp_path.iterdir())
        owners[0].send_signal(signal.SIGKILL)
        owners[0].wait()
        with RunFolder(tmp_path) as ours:
            ours.new()
            (removed,) = remove_leftovers(tmp_path)
            assert removed in known - {other}
            assert remove_leftovers(tmp_path) == []
            left = set(tmp_path.iterdir())
        assert known - left == {removed}
        assert other in left
        assert len(left) == 3
    finally:
        for owner in owners:
            owner.kill()
            owner.wait()
    assert len(remove_leftovers(tmp_path)) == 1, "the second was killed by now, too"
