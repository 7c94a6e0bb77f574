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
@pytest.mark.parametrize("arguments", [["--help"], ["prep", "--help"], ["prep", "pack", "--help"], ["bench", "--help"]])
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


def test_prep_indexes_without_dali_or_torch(tmp_path: Path, small_shards: Path) -> None:
    """`prep` works on a machine that has neither."""
    program = (
        "import sys\n"
        "for name in ('torch', 'nvidia.dali'): sys.modules[name] = None\n"  # importing them fails
        "from dali_pipes.cli import main; sys.exit(main(['prep', 'index', '--anew', sys.argv[1]]))"
    )
    done = subprocess.run([sys.executable, "-c", program, small_shards], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("indexed 4 shards, 23 samples")


@pytest.mark.parametrize("program", ["prep", "bench"])
def test_packages_are_the_same_commands(program: str) -> None:
    """`python -m prep` and `python -m bench` are `dali-pipes prep` and `dali-pipes bench`."""
    alone, together = run("--help", program=program), run(program, "--help")
    assert alone.returncode == together.returncode == 0
    assert alone.stdout == together.stdout


@pytest.mark.parametrize("file", ["prep.py", "prep/__init__.py", "bench.py", "bench/__init__.py"])
def test_a_module_of_the_users_is_not_taken_for_ours(tmp_path: Path, file: str) -> None:
    """With `python -m`, the current folder comes first: the file in the way is named, and not run."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("raise SystemExit('not ours')")
    own = file.startswith("prep")
    for command, is_refused in (("prep", own), ("bench", True), ("cache", False)):
        done = run(command, "--help", cwd=tmp_path)
        assert done.returncode == is_refused
        package = "prep" if own else "bench"
        text = f"Error: '{tmp_path}/{file}' hides dali-pipes' own package '{package}'; rename"
        assert (text in done.stderr) == is_refused, done.stderr
        assert "not ours" not in done.stderr
        # Here the current folder is not on the path.
        assert run("-P", "-m", "dali_pipes", command, "--help", program=None, cwd=tmp_path).returncode == 0


def test_an_embedded_node_starts_beside_a_module_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "prep.py").write_text("raise SystemExit('not ours')")
    program = (
        "from pathlib import Path; from dali_pipes.store.cluster.endpoint import cluster\n"
        "with cluster(None, embedded_dir=Path('node')) as endpoint: print(endpoint)"
    )
    done = run("-c", program, program=None, cwd=tmp_path)
    assert done.stdout.startswith("http://127.0.0.1:"), done.stderr


@pytest.mark.parametrize("folder", ["prep", "bench"])
def test_a_folder_that_is_no_package_is_not_in_the_way(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    assert run(folder, "--help", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["nonsense"], 2, "No such command 'nonsense'"),
        (["prep", "index"], 2, "Missing argument"),
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


def test_verbose_shows_where_it_failed(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """-v adds the traceback, for a report of a bug."""
    done = run("-v", "prep", "index", str(tmp_path))
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")


def test_version_is_the_distributions() -> None:
    """What `pip` installed is what answers."""
    from importlib.metadata import version

    assert version("dali-pipes") in run("--version").stdout


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
