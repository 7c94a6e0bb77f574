"""Ctrl-C ends commands and training loops soon, whatever they wait for."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dali_pipes.cli import INTERRUPTED


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    """Run a program in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


COMMAND = "import os, sys, signal, time, atexit, click, dali_pipes.cli as module\n@module.cli.command()\ndef it():\n"
END = "sys.argv = ['dali-pipes', 'it']\nsys.exit(module.main())\n"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_interruption_that_python_drops_is_raised_again(name: str) -> None:
    """It came while a finalizer ran: Python reports such an exception, and goes on."""
    body = (
        "    class Garbage:\n"
        f"        def __del__(self): signal.raise_signal(signal.{name})\n"
        "    Garbage()\n"
        "    time.sleep(60)\n"
    )
    ended = start(COMMAND + body + END)
    _, errors = ended.communicate(timeout=200)
    assert ended.returncode == 128 + getattr(signal, name)
    assert "Traceback" not in errors


def test_ctrl_c_waits_for_the_import_of_a_shared_library() -> None:
    """Some abort the process if an exception comes out of the Python code that they run meanwhile."""
    body = (
        "    class Interrupting:\n"
        "        def find_spec(self, name, path=None, target=None):\n"
        "            if name == 'numpy.random._common':\n"  # a shared library, numpy.random.mtrand, imports it
        "                sys.meta_path.remove(self)\n"
        "                signal.raise_signal(signal.SIGINT)\n"
        "    sys.meta_path.insert(0, Interrupting())\n"
        "    import numpy.random.mtrand\n"
        "    click.echo('imported')\n"
        "    time.sleep(60)\n"
    )
    ended = start(COMMAND + body + END)
    output, errors = ended.communicate(timeout=200)
    assert (ended.returncode, output, errors.strip()) == (INTERRUPTED, "imported\n", "error: interrupted")


def test_ctrl_c_after_the_command_changes_nothing() -> None:
    """While Python takes the process apart."""
    body = "    atexit.register(signal.raise_signal, signal.SIGINT)\n    click.echo('the result')\n"
    ended = start(COMMAND + body + END)
    assert ended.communicate(timeout=200) == ("the result\n", "")
    assert ended.returncode == 0


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
