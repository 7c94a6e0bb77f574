"""What a process spends, by group of threads."""

import subprocess
import sys
import threading
import time
from pathlib import Path

from bench.tools.threads import GROUPS, ThreadMeter
from dali_pipes.reader.aio_reader import Aio

MIB = 1 << 20
NUM_READS = 32


def burn() -> None:
    started = time.thread_time()
    while time.thread_time() - started < 0.05:
        pass


def test_meter_counts_bytes_and_finds_the_thread_that_reads(tmp_path: Path) -> None:
    """A thread without a known name reads 32 MiB, the main thread a few bytes of `/proc`."""
    (tmp_path / "data").write_bytes(bytes(MIB))
    has_read, is_over = threading.Event(), threading.Event()

    def read() -> None:
        for _ in range(NUM_READS):
            (tmp_path / "data").read_bytes()
        burn()  # the kernel may update its counters of a thread some milliseconds later
        has_read.set()
        is_over.wait()

    meter = ThreadMeter()
    thread = threading.Thread(target=read)
    thread.start()
    has_read.wait()
    spent = meter.stop()
    is_over.set()
    thread.join()
    assert spent.bytes_read is not None
    assert spent.bytes_read >= NUM_READS * MIB  # the fork server, a child of this process, may read libraries
    assert spent.num_reading >= 1
    assert spent.group_cpu_s["reader"] > 0
    assert set(spent.group_cpu_s) == set(GROUPS)


def test_meter_knows_readers_by_their_names_and_counts_ended_threads_as_other() -> None:
    is_over = threading.Event()

    def work() -> None:
        burn()
        is_over.wait()

    meter = ThreadMeter()
    reader = threading.Thread(target=work, name="dali-pipes-read_0")
    ended = threading.Thread(target=burn)
    for thread in (reader, ended):
        thread.start()
    ended.join()
    burn()
    meter.tick()
    is_over.set()
    reader.join()
    spent = meter.stop()
    assert spent.group_cpu_s["reader"] > 0
    assert spent.group_cpu_s["other"] > 0
    assert spent.group_cpu_s["main"] > 0
    assert sum(spent.group_cpu_s.values()) >= 0.999 * spent.cpu_s
    assert 0 <= spent.kernel_s <= spent.cpu_s


def test_meter_does_not_say_that_asynchronous_reads_are_none(tmp_path: Path) -> None:
    """The kernel counts no bytes of them."""
    assert ThreadMeter().stop().bytes_read is not None
    aio = Aio()
    try:
        assert ThreadMeter().stop().bytes_read is None
    finally:
        aio.close()
    assert ThreadMeter().stop().bytes_read is not None


def test_meter_counts_child_processes_as_workers() -> None:
    code = "input(); sum(range(5_000_000)); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        meter = ThreadMeter()
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        spent = meter.stop()
        child.kill()
    assert spent.group_cpu_s["worker"] > 0
    assert spent.cpu_s >= spent.kernel_s >= 0
