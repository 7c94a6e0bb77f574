"""Ctrl-C ends commands and training loops soon, whatever they wait for."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    """Run a program in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_loader_that_waits_for_a_silent_store_is_interrupted(tmp_path: Path) -> None:
    """The store takes connections and never answers; the loader's patience is ten minutes."""
    program = (
        "import sys, dali_pipes as dp\n"
        "cache = dp.Cache(directory=sys.argv[2], patience_s=600, start_patience_s=600)\n"
        "dp.loader('ais://b/s-', dp.segmentation(), batch_size=2, endpoint=sys.argv[1], cache=cache)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as store:
        waiting = start(program, f"http://127.0.0.1:{store.getsockname()[1]}", tmp_path)
        store.settimeout(60)
        # By the second connection no thread imports the SDK any more: an `eval` there has Python forget that Ctrl-C
        # ends it, and the exit code is 1.
        with store.accept()[0], store.accept()[0]:
            os.killpg(waiting.pid, signal.SIGINT)
            errors = waiting.communicate(timeout=200)[1]
    assert waiting.returncode == -signal.SIGINT
    assert errors.splitlines()[-1] == "KeyboardInterrupt"


@pytest.mark.parametrize("to", [os.killpg, os.kill], ids=["group", "process alone"])
def test_training_loop_is_interrupted(to, small_shards: Path, tmp_path: Path) -> None:
    """The exception is Python's own, the threads end, and the cache file goes with the process."""
    program = (
        "import sys, dali_pipes as dp\n"
        "with dp.loader(sys.argv[1], dp.segmentation(crop=16), batch_size=4, device='cpu') as loader:\n"
        "    while True:\n"
        "        for batch in loader: print(loader.epoch, flush=True)\n"
    )
    training = start(program, small_shards)
    assert training.stdout is not None
    assert training.stdout.readline() == "0\n"
    to(training.pid, signal.SIGINT)
    _, errors = training.communicate(timeout=200)
    assert training.returncode == -signal.SIGINT
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert "Exception ignored" not in errors
