"""The array job of `dali-pipes prep` as real processes: its tasks make what one process makes."""

import subprocess
import sys
from pathlib import Path

import pytest

from dali_pipes.store.local import LocalStore
from tests.builders import pack
from tests.deploy.conftest import Slurm, write_program
from tests.deploy.dockerfile import ROOT
from tests.prep.commands.calls import run_prep
from tests.sources import make_source


@pytest.fixture
def shards(slurm: Slurm) -> Path:
    """Five shards, on the file system that all nodes see."""
    write_program(
        slurm.bin / "dali-pipes",
        f"#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -c "
        """'import sys; from dali_pipes.cli import main; sys.exit(main(sys.argv[1:]))' "$@"\n""",
    )
    pack(make_source(43), store=LocalStore(slurm.runs / "shards"), max_count=10)
    return slurm.runs / "shards"


def submit(slurm: Slurm, *words: str | Path, array: str = "", **variables: str) -> subprocess.Popen[str]:
    """A task of ``--array=FIRST-LAST``, whose number is before a colon: ``2:1-3``; empty: no array."""
    if array:
        number, _, numbers = array.partition(":")
        first, _, last = numbers.partition("-")
        variables |= {
            "SLURM_ARRAY_TASK_ID": number,
            "SLURM_ARRAY_TASK_MIN": first,
            "SLURM_ARRAY_TASK_MAX": last,
            "SLURM_ARRAY_TASK_COUNT": str(int(last) - int(first) + 1),
        }
    return slurm.submit(*words, script="parts.sbatch", **variables)


def test_tasks_of_an_array_index_what_one_process_does(slurm: Slurm, shards: Path) -> None:
    """Three tasks, and the job that follows them."""
    run_prep("index", shards)
    whole = {path.name: path.read_bytes() for path in shards.iterdir()}
    for path in shards.glob("*.safetensors"):
        path.unlink()
    jobs = [submit(slurm, "index", shards, array=f"{number}:1-3") for number in (1, 2, 3)]
    for number, job in enumerate(jobs, 1):
        out, said = job.communicate(timeout=240)
        assert job.returncode == 0, said
        assert f"part {number}/3 of '{shards}/samples-'" in out
    job = submit(slurm, "index", shards, "--merge")
    out, said = job.communicate(timeout=240)
    assert job.returncode == 0, said
    assert {path.name: path.read_bytes() for path in shards.iterdir()} == whole


def test_part_that_failed_is_done_again_by_its_number(slurm: Slurm, shards: Path) -> None:
    """PARTS keeps the cut."""
    job = submit(slurm, "index", shards, array="2:2-2", PARTS="3")
    out, said = job.communicate(timeout=240)
    assert job.returncode == 0, said
    assert f"part 2/3 of '{shards}/samples-'" in out


@pytest.mark.parametrize("array", ["0:0-2", "2:2-2"])
def test_array_that_is_not_the_whole_is_refused(slurm: Slurm, shards: Path, array: str) -> None:
    """It would be another cut of the shards."""
    job = submit(slurm, "index", shards, array=array)
    assert "take --array=1-N, or set PARTS to the N of the whole job" in slurm.end(job)
    assert job.returncode == 2
