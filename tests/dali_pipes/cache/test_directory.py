"""Locks between processes: they end with their owner, part threads too, and no signal leaves one behind."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import pytest

from dali_pipes.cache.directory import LockFile, Mutex, in_mutex


def test_forked_child_keeps_no_lock(tmp_path: Path) -> None:
    """A DataLoader's worker that outlives the loader's process must not keep its locks; and it drops none of them."""
    file = LockFile(tmp_path / "lock")
    program = """
import os, sys, time
from pathlib import Path
from dali_pipes.cache.directory import LockFile
file = LockFile(Path(sys.argv[1]))
file.lock(7)
if os.fork() == 0:
    print(os.getpid(), flush=True)  # the child has run its fork handlers
time.sleep(600)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "lock")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        assert file.is_locked(7)
        process.kill()
        process.wait()
        assert not file.is_locked(7)
    finally:
        os.kill(child, signal.SIGKILL)  # raises an error if the child is not alive
        process.communicate()
        file.close()


class InterruptError(Exception):
    """What the test's signal handler raises."""


def interrupt(number: int, frame: FrameType | None) -> None:
    raise InterruptError


@pytest.mark.timeout(120, method="thread")  # the other method needs the signal
def test_no_interrupt_leaves_the_mutex_locked(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The mutex is free after each of 500 interrupts at random moments, while the main thread locks and unlocks it."""
    before = signal.signal(signal.SIGALRM, interrupt)
    request.addfinalizer(lambda: (signal.setitimer(signal.ITIMER_REAL, 0), signal.signal(signal.SIGALRM, before)))
    file, other = LockFile(tmp_path / "lock"), LockFile(tmp_path / "lock")
    mutex = Mutex(file, 0)
    draw = random.Random(0)
    for _ in range(500):
        with pytest.raises(InterruptError):  # noqa: PT012 (wherever in the loop it comes)
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 4e-4))
            while True:
                mutex.run(lambda: time.sleep(0))
        assert other.try_lock(0)
        other.unlock(0)
        assert not in_mutex()
    thread = threading.Thread(target=mutex.run, args=(lambda: None,))
    thread.start()
    thread.join()
    file.close()
    other.close()
