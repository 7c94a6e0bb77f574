"""The command line answers fast, is quiet or verbose if asked, and ends soon after a signal."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from dali_pipes.cli import _interruptions_kept, cli, main
from dali_pipes.formats.names import manifest_name
from dali_pipes.progress import current_verbosity

HEAVY = ("nvidia.dali", "torch", "numpy", "aistore", "webdataset", "PIL", "requests", "tqdm")


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd)


@pytest.mark.fresh_interpreter
@pytest.mark.parametrize("arguments", [["prep", "pack", "--help"], ["bench", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """Help answers at once because it loads none of what the commands need."""
    program = (
        "import sys; from dali_pipes.cli import main; code = main(sys.argv[1:])\n"
        f"print('loaded:', *[name for name in {HEAVY} if name in sys.modules]); sys.exit(code)"
    )
    done = run("-c", program, *arguments)
    assert done.returncode == 0, done.stderr
    assert "Usage: dali-pipes" in done.stdout
    assert done.stdout.splitlines()[-1].strip() == "loaded:"


@pytest.mark.parametrize("program", ["prep", "bench"])
def test_packages_are_the_same_commands(program: str) -> None:
    done = run("-m", program, "--help")
    assert done.returncode == 0, done.stderr
    assert f"Usage: dali-pipes {program} " in done.stdout


def test_a_module_of_the_users_is_not_taken_for_ours(tmp_path: Path) -> None:
    """With `python -m`, the current folder comes first: the file in the way is named, and not run."""
    (tmp_path / "prep.py").write_text("raise SystemExit('not ours')")
    done = run("-m", "dali_pipes", "bench", "--help", cwd=tmp_path)  # `bench` imports `prep`
    assert done.returncode == 1
    assert f"Error: '{tmp_path}/prep.py' hides dali-pipes' own package 'prep'; rename" in done.stderr
    # With -P, the current folder is not on the path.
    assert run("-P", "-m", "dali_pipes", "prep", "--help", cwd=tmp_path).returncode == 0


def test_sigterm_ends_a_command_as_ctrl_c_does(tmp_path: Path) -> None:
    """Under `timeout`, Slurm or a container's stop: the embedded node and temporary files go with the command."""
    program = (
        "import sys, os, signal, click, dali_pipes.cli as module\n"
        "from dali_pipes.store.cluster import embedded_node\nfrom pathlib import Path\n"
        "@module.cli.command()\n"
        "def hang():\n"
        "    with embedded_node.start(Path(sys.argv[1])) as node:\n"
        "        print(node._process.pid, flush=True)\n"
        "        signal.pause()\n"
        "sys.exit(module.main(['hang']))"
    )
    done = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert done.stdout is not None
    node = int(done.stdout.readline())
    done.terminate()
    assert done.wait(120) == 128 + 15
    assert not Path(f"/proc/{node}").exists()
    done.stdout.close()


def commands(context: click.Context) -> Iterator[click.Context]:
    yield context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            found = context.command.get_command(context, name)
            assert found is not None
            yield from commands(click.Context(found, info_name=name, parent=context))


def test_ctrl_c_that_a_finalizer_swallows_is_raised_again() -> None:
    class Interrupted:
        def __del__(self) -> None:
            raise KeyboardInterrupt

    def command() -> None:
        with _interruptions_kept():
            Interrupted()
            signal.pause()

    with pytest.raises(KeyboardInterrupt):
        command()


def test_every_command_has_both_options_in_its_help() -> None:
    for context in commands(click.Context(cli, info_name="dali-pipes")):
        text = context.get_help()
        for line in ("-q, --quiet", "-v, --verbose"):
            assert text.count(line) == 1, context.command_path


def test_quiet_leaves_the_result_and_verbose_adds_the_steps(tmp_path: Path, small_shards: Path) -> None:
    """The options work before and after each command name. Each run is a process: a test sets up its own logging."""
    shards = Path(shutil.copytree(small_shards, tmp_path / "shards"))
    for words in (["-q", "prep", "index"], ["prep", "-v", "index"], ["prep", "index", "-q"]):
        (shards / manifest_name("s-")).write_bytes(b"broken")  # causes a warning
        done = run("-m", "dali_pipes", *words, str(shards / "s-"))
        assert re.match(r"indexed 4 shards( \(4 indexed before\))?, 23 samples", done.stdout), done.stderr
        if "-q" in words:
            assert done.stderr == ""
        else:
            assert "WARNING prep.index: " in done.stderr
            assert "INFO dali_pipes.progress: index" in done.stderr


@pytest.mark.parametrize("words", [["-q", "-v", "cache", "ls"], ["-q", "cache", "-v", "ls"], ["cache", "ls", "-qv"]])
def test_both_at_once_are_misuse(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """The command fails, and a program that calls `main` keeps its verbosity."""
    assert main(words) == 2
    assert "--quiet and --verbose exclude each other" in capfd.readouterr().err
    assert current_verbosity() == "normal"


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
        # At the second connection no thread imports the SDK any more. That import calls `eval`, which makes Python
        # forget that Ctrl-C ended it: the exit code would be 1.
        with store.accept()[0], store.accept()[0]:
            os.killpg(waiting.pid, signal.SIGINT)
            errors = waiting.communicate(timeout=200)[1]
    assert waiting.returncode == -signal.SIGINT
    assert errors.splitlines()[-1] == "KeyboardInterrupt"


def test_training_loop_is_interrupted(small_shards: Path) -> None:
    """Ctrl-C raises Python's own exception, the threads end, and the cache file goes with the process."""
    program = (
        "import sys, dali_pipes as dp\n"
        "with dp.loader(sys.argv[1], dp.segmentation(crop=16), batch_size=4, device='cpu') as loader:\n"
        "    while True:\n"
        "        for batch in loader: print(loader.epoch, flush=True)\n"
    )
    training = start(program, small_shards)
    assert training.stdout is not None
    assert training.stdout.readline() == "0\n"
    os.killpg(training.pid, signal.SIGINT)
    _, errors = training.communicate(timeout=200)
    assert training.returncode == -signal.SIGINT
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert "Exception ignored" not in errors
