"""The command line: quick to answer, one line an error, exit codes that scripts can use."""

import subprocess
import sys
from pathlib import Path

import pytest

from dali_pipes.cli import main

HEAVY = ("nvidia.dali", "torch", "numpy", "aistore", "webdataset", "PIL", "requests", "tqdm")


def run(
    *arguments: str, program: str | None = "dali_pipes", cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program with ``-m``, or the interpreter with these arguments."""
    command = [sys.executable, *(["-m", program] if program else []), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


@pytest.mark.fresh_interpreter
@pytest.mark.parametrize("arguments", [["prep", "pack", "--help"], ["bench", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """Help answers at once because it loads none of what the commands need."""
    program = (
        "import sys; from dali_pipes.cli import main; code = main(sys.argv[1:])\n"
        f"print('loaded:', *[name for name in {HEAVY} if name in sys.modules]); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage: dali-pipes" in done.stdout
    assert done.stdout.splitlines()[-1].strip() == "loaded:"


@pytest.mark.parametrize(("file", "commands"), [("prep.py", ["prep", "bench"]), ("bench/__init__.py", ["bench"])])
def test_a_module_of_the_users_is_not_taken_for_ours(tmp_path: Path, file: str, commands: list[str]) -> None:
    """With `python -m`, the current folder comes first: the file in the way is named, and not run.

    `bench` imports `prep`. A folder without modules is not in the way.
    """
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("raise SystemExit('not ours')")
    (tmp_path / "prep").mkdir()
    package = "prep" if file == "prep.py" else "bench"
    for command in ("prep", "bench"):
        done = run(command, "--help", cwd=tmp_path)
        assert done.returncode == (command in commands)
        text = f"Error: '{tmp_path}/{file}' hides dali-pipes' own package '{package}'; rename"
        assert (text in done.stderr) == (command in commands), done.stderr
        assert "not ours" not in done.stderr
    # Here the current folder is not on the path.
    assert run("-P", "-m", "dali_pipes", package, "--help", program=None, cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["nonsense"], 2, "No such command 'nonsense'"),
        (["bench", "run", "--repeats", "0"], 2, "0 is not in the range x>=1"),
        (["prep", "index", "gopher://x"], 2, "error: 'gopher://x': gopher:// is not supported; expected ais://"),
        (["prep", "index", "nowhere/x-"], 1, "/nowhere', of 'nowhere/x-'"),
    ],
)
def test_misuse_and_failure_have_their_own_exit_codes(
    arguments: list[str], code: int, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """2 for what was typed wrongly, 1 for what failed; one line on stderr, no traceback."""
    assert main(arguments) == code
    captured = capfd.readouterr()
    assert text in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


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
