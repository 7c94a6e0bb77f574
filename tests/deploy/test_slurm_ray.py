"""Ray in an allocation: two real nodes of Ray, started by the script, pack what one process packs."""

import os
import socket
import sys
import time
from pathlib import Path

import pytest

from dali_pipes.store.local import LocalStore
from prep.sources.folders import pets
from tests.builders import pack
from tests.deploy.conftest import Slurm, write_program
from tests.deploy.dockerfile import ROOT
from tests.sources import write_pets


@pytest.fixture
def job(slurm: Slurm) -> str:
    """A job whose port is free; the programs of the environment are on PATH."""
    pytest.importorskip("ray", reason="needs the extra ray")
    write_program(
        slurm.bin / "dali-pipes",
        f"#!/bin/sh\nexec {sys.executable} -c "
        """'import sys; from dali_pipes.cli import main; sys.exit(main(sys.argv[1:]))' "$@"\n""",
    )
    write_program(slurm.bin / "ray", f'#!/bin/sh\nexec {sys.executable} -m ray.scripts.scripts "$@"\n')
    write_program(slurm.bin / "python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    first = 20000 + os.getpid() % 10000
    for port in [*range(first, 30000), *range(20000, first)]:
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
        return str(port - 20000 + 10000)
    raise AssertionError("no free port")


def submit(slurm: Slurm, job: str, *words: str | Path, **variables: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of a job of two nodes with two CPUs each."""
    process = slurm.submit(
        *words,
        script="ray.sbatch",
        SLURM_JOB_ID=job,
        SLURM_JOB_NUM_NODES="2",
        PYTHONPATH=str(ROOT),
        **variables,
    )
    out, said = process.communicate(timeout=400)
    return process.returncode, out, said


def processes_of(job: str) -> list[str]:
    """Command lines that name the directory of the job's Ray."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # ended meanwhile
            continue
        if f"/tmp/ray-{job}/" in line:
            lines.append(line)
    return lines


def check_nothing_is_left(job: str) -> None:
    """Ray's workers notice within seconds that their node has ended."""
    deadline = time.monotonic() + 120
    while left := processes_of(job):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert not Path(f"/tmp/ray-{job}").exists()


def test_command_runs_on_a_ray_of_all_nodes_and_nothing_is_left(slurm: Slurm, job: str) -> None:
    """Two tasks are two nodes; the shards are those of one process, on which no Ray runs any more."""
    photos = write_pets(slurm.runs / "pets", {f"cat_{number}": 1 + number % 2 for number in range(7)})
    out = slurm.runs / "out"
    code, printed, said = submit(slurm, job, "pack", "pets", photos, out, "--max-count", "3")
    assert code == 0, said
    assert "node node0: Ray has 2 nodes" in said
    assert printed.startswith("wrote 3 shards"), printed
    expected = slurm.runs / "expected"
    names = pack(pets(photos), store=LocalStore(expected), max_count=3).shards
    assert [(out / name).read_bytes() for name in names] == [(expected / name).read_bytes() for name in names]
    check_nothing_is_left(job)


def test_exit_code_is_that_of_the_command(slurm: Slurm, job: str) -> None:
    """Shards that are not there: the error is shown, and Ray ends on all nodes."""
    code, _, said = submit(slurm, job, "verify", slurm.runs / "nowhere")
    assert code == 1, said
    assert "nowhere" in said
    check_nothing_is_left(job)


def test_nodes_that_do_not_join_are_an_error(slurm: Slurm, job: str) -> None:
    """Of two nodes one never comes: the command is not started."""
    write_program(
        slurm.bin / "ray",
        "#!/bin/sh\ncase $* in *--address*) exec sleep 600 ;; esac\n"
        f'exec {sys.executable} -m ray.scripts.scripts "$@"\n',
    )
    code, printed, said = submit(slurm, job, "verify", slurm.runs, JOIN_S="1")
    assert code == 1, said
    assert "1 of 2 nodes joined Ray within 1 s" in said
    assert printed == ""
    check_nothing_is_left(job)
