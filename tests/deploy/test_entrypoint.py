"""The container's entrypoint as a process: what it says, what it refuses, and that the command takes its place."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.deploy.dockerfile import ROOT
from tests.programs import write_program

ENTRYPOINT = ROOT / "deploy" / "entrypoint.sh"


class Container:
    """An environment to start in: PATH with a ``dali-pipes`` that writes down how it was called, and the system's."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.bin = directory / "bin"
        self.bin.mkdir()
        self.program("dali-pipes", f'echo "dali-pipes $*" >> {directory}/called; echo ok doctor; exit ${{DOCTOR:-0}}')

    def program(self, name: str, text: str) -> None:
        write_program(self.bin / name, f"#!/bin/sh\n{text}\n")

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        own = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.directory), "MIN_SHM_BYTES": "0"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([ENTRYPOINT, *words], env=own | variables, text=True, **pipes)

    def run(self, *words: str, **variables: str) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        process = self.start(*words, **variables)
        out, said = process.communicate(timeout=60)
        return process.returncode, out, said

    def called(self) -> list[str]:
        log = self.directory / "called"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(tmp_path)


def test_command_takes_the_place_of_the_entrypoint(container: Container) -> None:
    """The same process, its words as they were, its exit code; what the checks say is on stderr."""
    process = container.start("sh", "-c", 'echo "$$ <$1>"; exit 7', "sh", "two  words *")
    out, said = process.communicate()
    assert out == f"{process.pid} <two  words *>\n"
    assert (process.returncode, said) == (7, "ok doctor\n")
    assert container.called() == ["dali-pipes doctor"]


@pytest.mark.parametrize(
    ("words", "called"),
    [
        ("", ["dali-pipes --help"]),  # a help text needs no `doctor`
        ("doctor --json", ["dali-pipes doctor --json"]),
        ("prep index DIR", ["dali-pipes doctor", "dali-pipes prep index DIR"]),
        ("dali-pipes bench run", ["dali-pipes doctor", "dali-pipes bench run"]),
    ],
)
def test_words_that_are_no_program_are_dali_pipes_own(container: Container, words: str, called: list[str]) -> None:
    assert container.run(*words.split())[0] == 0
    assert container.called() == called


def test_what_doctor_fails_on_is_not_started(container: Container) -> None:
    """Unless it is asked for; and nothing is looked at under off."""
    code, out, said = container.run("echo", "started", DOCTOR="1")
    assert (code, out) == (1, "")
    assert "entrypoint: dali-pipes doctor found what the command would fail on" in said
    code, out, said = container.run("echo", "started", DOCTOR="1", DALI_PIPES_CHECK="warn")
    assert (code, out) == (0, "started\n")
    assert container.run("echo", "started", DOCTOR="1", DALI_PIPES_CHECK="off") == (0, "started\n", "")
    assert len(container.called()) == 2


def test_cache_that_is_not_there_is_refused(container: Container) -> None:
    """What is written there would lie in the container."""
    cache = container.directory / "cache"
    code, _, said = container.run("true", DALI_PIPES_CACHE=str(cache))
    assert code == 1
    assert f"entrypoint: DALI_PIPES_CACHE names '{cache}', which is not there; mount a local disk" in said
    cache.mkdir()
    assert container.run("true", DALI_PIPES_CACHE=str(cache))[0] == 0
    assert container.called() == [f"dali-pipes doctor --cache {cache}"]


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, which only root can")
def test_user_that_the_image_does_not_know_can_start() -> None:
    """`--user 4711`: a home that can be written, a name; a cache of root's is refused with whose it is."""
    # Other users cannot read pytest's temporary directories.
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        shutil.copy2(ENTRYPOINT, directory / "entrypoint.sh")
        (directory / "cache").mkdir(mode=0o755)

        def start(*words: str, **variables: str) -> tuple[int, str, str]:
            command = ["setpriv", "--reuid=4711", "--regid=4711", "--clear-groups", directory / "entrypoint.sh", *words]
            environment = {"PATH": "/usr/bin:/bin", "HOME": "/", "MIN_SHM_BYTES": "0"} | variables
            done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)
            return done.returncode, done.stdout, done.stderr

        look = 'echo "$USER"; test -w "$HOME"; rmdir "$HOME"'
        assert start("sh", "-c", look, DALI_PIPES_CHECK="off") == (0, "uid-4711\n", "")
        code, _, said = start("true", DALI_PIPES_CACHE=str(directory / "cache"))
        assert code == 1
        assert f"names '{directory}/cache', which user 4711 cannot write; it belongs to 0:0, mode 755" in said


def test_gpu_that_is_required_must_be_seen(container: Container) -> None:
    """By nvidia-smi, which the container runtime brings in."""
    assert container.run("true", REQUIRE_GPU="1")[0] == 1
    container.program("nvidia-smi", 'echo "GPU 0: NVIDIA H200 (UUID: GPU-0)"')
    assert container.run("true", REQUIRE_GPU="1")[0] == 0


def test_real_doctor_is_asked(container: Container, tmp_path: Path) -> None:
    """An endpoint that nobody answers at is found before the command starts."""
    (container.bin / "dali-pipes").unlink()
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    code, out, said = container.run("echo", "started", PATH=path, AIS_ENDPOINT="http://127.0.0.1:9")
    assert (code, out) == (1, "")
    assert "fail  endpoint" in said
    code, out, said = container.run("echo", "started", PATH=path, DALI_PIPES_CACHE=str(tmp_path))
    assert (code, out) == (0, "started\n")
    assert f"ok    cache {tmp_path}" in said
