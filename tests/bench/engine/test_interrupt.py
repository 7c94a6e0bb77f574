"""Ctrl-C ends a benchmark with one line, and nothing of it is left."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from bench.engine.turn_process import TurnProcess


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A directory with a short path: the path of a socket has at most 107 characters."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


# A terminal signals the group, a program that started the command the command alone.
@pytest.mark.parametrize("to", [os.killpg, os.kill], ids=["group", "command alone"])
def test_ctrl_c_leaves_one_line_and_no_process(small_shards: Path, temporary: Path, to) -> None:
    """In a turn, and in the middle of what the turn's process prepares."""
    begun = "INFO dali_pipes.progress: time loaders"
    command = "bench run --loaders dali,webloader --crop 16 --batch-size 4 --repeats 20 --verbose --shards"
    running = subprocess.Popen(
        [sys.executable, "-m", "dali_pipes", *command.split(), small_shards],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    )
    assert running.stderr is not None
    lines = [""]
    while begun not in lines[-1]:
        lines.append(running.stderr.readline())
        assert lines[-1], "".join(lines)
    to(running.pid, signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    assert [line for line in errors.splitlines() if line and not line.startswith("INFO")] == ["error: interrupted"]
    deadline = time.monotonic() + 20  # the tracker of shared memory cleans up when it finds the command gone
    while left := [one for one in psutil.process_iter() if _session_of(one) == running.pid]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert [one for one in temporary.iterdir() if one.name.startswith("dali-pipes")] == []


def _wait(meet: object) -> None:
    time.sleep(600)


def test_ctrl_c_while_a_process_starts_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the command would wait for it at its end."""
    started: list[BaseProcess] = []
    start = BaseProcess.start

    def interrupted(process: BaseProcess) -> None:
        start(process)
        started.append(process)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(BaseProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        TurnProcess(_wait, name="in the test", fresh=True)
    (process,) = started
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def _session_of(process: psutil.Process) -> int | None:
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else os.getsid(process.pid)
    except (ProcessLookupError, psutil.NoSuchProcess):
        return None
