"""Locks between processes: they end with their owner, part threads too, and no signal leaves one behind."""

import gc
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from dali_pipes.cache.directory import LockFile, Mutex, in_mutex

IMPORTS = """
import os, signal, sys, time
from pathlib import Path
from dali_pipes.cache.directory import LockFile, Mutex, in_mutex
"""


def start(program: str, *arguments: object) -> "tuple[subprocess.Popen[str], str]":
    """A Python process, and the first line that it prints."""
    command = [sys.executable, "-c", IMPORTS + program, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline()


def test_openings_exclude_each_other(tmp_path: Path) -> None:
    """Two loaders of one process are two openings; each byte is a lock of its own; its own may be asked for again."""
    one, two = LockFile(tmp_path / "lock"), LockFile(tmp_path / "lock")
    one.lock(3)
    assert one.held == {3}
    assert not two.try_lock(3)
    assert two.is_locked(3)
    assert not one.is_locked(3)  # its own: the kernel does not tell
    assert two.try_lock(4)
    assert one.try_lock(3)
    one.unlock(3)
    assert not two.is_locked(3)
    assert two.try_lock(3)
    two.close()
    two.close()
    assert not one.is_locked(3)
    one.close()


def test_forked_child_keeps_no_lock(tmp_path: Path) -> None:
    """A DataLoader's worker that outlives the loader's process must not keep its locks; and it drops none of them."""
    file = LockFile(tmp_path / "lock")
    program = """
file = LockFile(Path(sys.argv[1]))
file.lock(7)
if os.fork() == 0:
    print(os.getpid(), flush=True)  # it has run its handlers
time.sleep(600)
"""
    process, line = start(program, tmp_path / "lock")
    child = int(line)
    try:
        assert file.is_locked(7)
        process.kill()
        process.wait()
        assert not file.is_locked(7)
    finally:
        os.kill(child, signal.SIGKILL)  # an error if it did not live
        process.communicate()
        file.close()


def test_mutex_parts_processes_and_threads(tmp_path: Path) -> None:
    """Three processes of three threads each add one to a number 200 times a thread: none is lost."""
    (tmp_path / "number").write_bytes(bytes(8))
    program = """
import mmap, struct, threading
stream = open(sys.argv[2], "r+b")
number = mmap.mmap(stream.fileno(), 8)
mutex = Mutex(LockFile(Path(sys.argv[1])), 0)
def add():
    for _ in range(200):
        mutex.run(add_one)
def add_one():
    before = struct.unpack("q", number)[0]
    time.sleep(0)
    number[:] = struct.pack("q", before + 1)
print("ready", flush=True)
sys.stdin.read()
threads = [threading.Thread(target=add) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    processes = [start(program, tmp_path / "lock", tmp_path / "number")[0] for _ in range(3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    assert [process.wait(240) for process in processes] == [0, 0, 0]
    assert struct.unpack("q", (tmp_path / "number").read_bytes()) == (1800,)


class InterruptError(Exception):
    """What the test's signal handler raises."""


@pytest.fixture
def interrupts() -> Iterator[None]:
    def handler(number: int, frame: FrameType | None) -> None:
        raise InterruptError

    before = signal.signal(signal.SIGALRM, handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.timeout(120, method="thread")  # the other method needs the signal
@pytest.mark.usefixtures("interrupts")
def test_no_interrupt_leaves_the_mutex_locked(tmp_path: Path) -> None:
    """Five hundred interrupts at random moments of the main thread's changes: the mutex is free after each."""
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


@pytest.mark.timeout(120, method="thread")  # the other method needs the signal
@pytest.mark.usefixtures("interrupts")
def test_interrupt_ends_the_wait_for_the_mutex(tmp_path: Path) -> None:
    """Another process has it and is stopped, in a debugger for instance: Ctrl-C works."""
    file, other = LockFile(tmp_path / "lock"), LockFile(tmp_path / "lock")
    other.lock(0)
    mutex, done = Mutex(file, 0), threading.Event()
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(InterruptError):
        mutex.run(done.set)
    assert not done.is_set()
    other.unlock(0)
    mutex.run(done.set)
    assert done.is_set()
    file.close()
    other.close()


def test_in_mutex_tells_a_finalizer_where_it_runs(tmp_path: Path) -> None:
    """The garbage collector may run one while its thread has the mutex, for which it must not wait then."""
    file = LockFile(tmp_path / "lock")
    mutex, told = Mutex(file, 0), []

    class Collected:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            told.append(in_mutex())

    Collected()
    mutex.run(gc.collect)
    Collected()
    gc.collect()
    assert told == [True, False]
    other_thread: list[bool] = []
    thread = threading.Thread(target=lambda: other_thread.append(in_mutex()))

    def run_thread() -> None:
        thread.start()
        thread.join()

    mutex.run(run_thread)
    assert other_thread == [False]
    file.close()
