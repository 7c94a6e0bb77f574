"""What ``make`` installs for each choice of CUDA, and that pip does what it asks for."""

import functools
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.deploy.dockerfile import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Commands, printed and not run."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CUDA", "CPU", "MAKEFLAGS")}
    command = ["make", "--dry-run", "-C", str(ROOT), f"PYTHON={sys.executable}", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def pip_commands(venv: Path, *arguments: str) -> list[list[str]]:
    """Arguments of each ``pip install`` of ``make demo``."""
    done = make("demo", f"VENV={venv}", *arguments)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if " -m pip install " in line]
    return [words[words.index("install") + 1 :] for words in lines]


@pytest.mark.parametrize(
    ("made", "wanted", "message"),
    [
        ("", "CUDA=11", "CUDA must be 12, 13 or 12+13, got '11'; CPU=1 is for a torch without CUDA"),
        ("12", "CUDA=13", "was made for CUDA=12, not CUDA=13: 'make clean' first, or name another environment"),
        ("12+13", "CPU=1", "was made for CUDA=12+13, not CUDA=none"),
    ],
)
def test_choice_that_cannot_be(tmp_path: Path, made: str, wanted: str, message: str) -> None:
    """DALI's builds share a directory: one environment is for one choice."""
    if made:
        (tmp_path / ".cuda").write_text(f"{made}\n")
    done = make("demo", f"VENV={tmp_path}", wanted)
    assert done.returncode == 2
    assert message in done.stderr


def test_later_commands_follow_the_choice_of_the_environment(tmp_path: Path) -> None:
    (tmp_path / ".cuda").write_text("12\n")
    asked = [line for line in make("test", f"VENV={tmp_path}").stdout.splitlines() if "deploy/requirements.py" in line]
    assert len(asked) == 2
    assert all("--cuda 12 " in line for line in asked)


@pytest.fixture
def cpu_index(tmp_path: Path) -> Iterator[str]:
    """An index on loopback with packages that are named as PyTorch's CPU-only builds of the pinned versions."""
    pins = dict(
        line.split(" ")[0].split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith(("torch==", "torchvision=="))
    )
    for name, version in pins.items():
        folder = tmp_path / "index" / name
        folder.mkdir(parents=True)
        info = f"{name}-{version}+cpu.dist-info"
        file = folder / f"{name}-{version}+cpu-py3-none-any.whl"
        with zipfile.ZipFile(file, "w") as wheel:
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}+cpu\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
        (folder / "index.html").write_text(f'<a href="{file.name.replace("+", "%2B")}">{file.name}</a>')
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "index"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.nightly
def test_cpu_only_torch_stays_when_the_rest_is_installed(tmp_path: Path, cpu_index: str) -> None:
    """By pip itself: the pins take the build ``+cpu``, and the second step sees torch there already."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    for kind, file in (["--pins", "pins.txt"], ["--extras=bench", "requirements.txt"]):
        command = [sys.executable, ROOT / "deploy/requirements.py", "--cuda", "none", kind]
        (venv / file).write_text(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    wanted = (venv / "requirements.txt").read_text().splitlines()
    (venv / "requirements.txt").write_text("".join(f"{line}\n" for line in wanted if line.startswith("torch")))

    from_cpu_index, rest, _ = pip_commands(venv, "CPU=1", f"TORCH_CPU_INDEX={cpu_index}")
    pip = [venv / "bin/python", "-m", "pip"]
    # Not in the checkout and without its path: pip would find what an editable installation left there.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHONPATH"))}
    run = functools.partial(subprocess.run, check=True, cwd=tmp_path, text=True)
    run([*pip, "install", *from_cpu_index], env=environment)
    run([*pip, "install", *rest], env=environment | {"PIP_NO_INDEX": "1"})
    run([*pip, "check"], env=environment)
    listed = run([*pip, "freeze"], env=environment, stdout=subprocess.PIPE).stdout.splitlines()
    assert [line.partition("==")[0] for line in listed] == ["torch", "torchvision"]
    assert all(line.endswith("+cpu") for line in listed)


PROGRAMS = ("chromium", "chromedriver", "jpegtran")


@pytest.mark.parametrize(
    ("there", "user", "apt", "text", "calls"),
    [
        (PROGRAMS, 0, "exit 0", "there already: chromium chromedriver jpegtran", 0),
        (PROGRAMS[:1], 0, None, "no apt-get: install chromedriver jpegtran by yourself; until then tests that want", 0),
        ((), 1000, "exit 0", "not root: sudo make system-tools; until then tests that want chromium", 0),
        ((), 0, "exit 0", "installed: chromium chromium-driver libjpeg-turbo-progs", 2),
        (PROGRAMS[1:], 0, "exit 100", "apt-get failed, see above: tests that want chromium are skipped", 1),
    ],
)
def test_system_tools_are_installed_where_that_is_possible(
    tmp_path: Path, there: tuple[str, ...], user: int, apt: str | None, text: str, calls: int
) -> None:
    """And nothing fails where it is not: it is said what is skipped."""
    scripts = {**dict.fromkeys(there, "exit 0"), "id": f"echo {user}"}
    if apt is not None:
        scripts["apt-get"] = f"echo \"$*\" >> '{tmp_path}/calls'; {apt}"
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    program = shutil.which("make")
    assert program is not None
    command = [program, "-C", str(ROOT), f"VENV={tmp_path / 'venv'}", "system-tools"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert text in done.stdout
    made = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
    assert len(made) == calls
    if calls == 2:
        assert made[1].endswith("chromium chromium-driver libjpeg-turbo-progs")
