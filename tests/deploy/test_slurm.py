"""The Slurm scripts as real processes: caches go, states stay, and a job that is put back goes on where it was."""

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from dali_pipes.store.local import LocalStore
from prep.sources.folders import pets
from tests.deploy.conftest import JOB, SHIMS, Slurm, wait_while, write_program
from tests.deploy.dockerfile import ROOT
from tests.prep.commands.calls import run_prep
from tests.shards import make_samples, make_source, pack, write_pets, write_shards

TRAIN = SHIMS / "train.py"


@pytest.fixture
def words(slurm: Slurm) -> list[str | Path]:
    return [TRAIN, "--out", slurm.runs / "a"]


def test_job_runs_a_task_a_node_and_leaves_nothing_on_their_disks(slurm: Slurm, words: list[str | Path]) -> None:
    """Two nodes: torchrun is told their number, meeting point and ranks, the program its share and the node's cache."""
    job = slurm.submit(*words, SLURM_JOB_NUM_NODES="2")
    assert (slurm.end(job), job.returncode) == ("", 0)
    assert (slurm.steps(0), slurm.steps(1)) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    assert slurm.caches() == []
    assert slurm.requeued() == []
    said = slurm.srun_words()
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=2", f"--chdir={ROOT}"} <= set(said)
    torchrun = said[said.index("torchrun") :]
    assert torchrun[1:5] == ["--nnodes=2", "--nproc-per-node=1", f"--rdzv-id={JOB}", "--rdzv-backend=c10d"]
    assert torchrun[5] == "--rdzv-endpoint=127.0.0.1:24711"
    assert torchrun[-5:] == ["--resume", "--num-slices", "2", "--cache-dir", "{cache}"]


def test_time_up_puts_the_job_back_and_it_goes_on(slurm: Slurm, words: list[str | Path]) -> None:
    """SIGUSR1 to the batch shell: caches removed, state kept, one requeue; then the steps that lack are done."""
    words += ["--steps", "60"]
    job = slurm.submit(*words, SLURM_JOB_NUM_NODES="2")
    wait_while(job, until=lambda: min(len(slurm.steps(0)), len(slurm.steps(1))) > 2)
    assert slurm.caches() == [f"node0/dali-pipes-job-{JOB}", f"node1/dali-pipes-job-{JOB}"]
    os.kill(job.pid, signal.SIGUSR1)
    said = slurm.end(job)
    assert job.returncode == 0
    assert f"job {JOB}: the time is up: back into the queue" in said
    assert slurm.requeued() == [f"requeue {JOB}"]
    assert slurm.caches() == []
    done = len(slurm.steps())
    assert 2 < done < 60

    job = slurm.submit(*words, SLURM_JOB_NUM_NODES="2", SLURM_RESTART_COUNT="1")
    assert (slurm.end(job), job.returncode) == ("", 0)
    for node in (0, 1):
        # A step whose checkpoint was not written when the signal came is done again, and no other.
        steps = slurm.steps(node)
        assert list(dict.fromkeys(steps)) == list(range(60))
        assert len(steps) <= 61
    assert slurm.requeued() == [f"requeue {JOB}"]


REQUEUED = {"MAX_REQUEUES": "3", "SLURM_RESTART_COUNT": "3"}
# Words after the program, variables, signal to the batch shell once the training runs, exit code, and what is said.
ENDS: dict[str, tuple[str, dict[str, str], signal.Signals | None, int, str]] = {
    "cancelled": ("--steps 500", {}, signal.SIGTERM, 143, ""),  # scancel --full: the batch shell alone has the signal
    "failed": ("--fail-at 2", {}, None, 3, "the step ended with exit code 3"),  # it would fail again
    "gets nowhere": ("--steps 500", REQUEUED, signal.SIGUSR1, 1, "put back 3 times already (MAX_REQUEUES=3)"),
    "deaf": ("--steps 5000 --deaf", {"GRACE_S": "0"}, signal.SIGTERM, 143, "did not end within 0 s of SIGTERM: killed"),
}


@pytest.mark.parametrize("how", ENDS)
def test_jobs_that_end_clean_up_and_are_not_put_back(slurm: Slurm, words: list[str | Path], how: str) -> None:
    more, variables, number, code, said = ENDS[how]
    job = slurm.submit(*words, *more.split(), **variables)
    if number is not None:
        wait_while(job, until=lambda: len(slurm.steps()) > 2)
        os.kill(job.pid, number)
    assert said in slurm.end(job)
    assert (job.returncode, slurm.requeued(), slurm.caches()) == (code, [], [])


def test_preempted_steps_clean_up_and_are_not_put_back_here(slurm: Slurm, words: list[str | Path]) -> None:
    """Slurm signals every process of the steps and puts the job back itself: a second requeue would be one too many."""
    job = slurm.submit(*words, "--steps", "500", SLURM_JOB_NUM_NODES="2")
    wait_while(job, until=lambda: min(len(slurm.steps(0)), len(slurm.steps(1))) > 2)
    for node in (0, 1):
        slurm.signal_task(node, signal.SIGTERM)
    assert "the step ended with exit code 143" in slurm.end(job)
    assert (job.returncode, slurm.requeued(), slurm.caches()) == (143, [], [])
    assert (slurm.runs / "a" / "0" / "state").read_text() == str(len(slurm.steps()))


def test_what_sigkill_left_is_removed_by_the_next_job_on_the_node(slurm: Slurm) -> None:
    """Caches of known jobs, of other users and of loaders stay. If squeue fails, every cache stays."""
    others = [slurm.disks / f"dali-pipes-{name}" for name in ("1000", "job-18", "job-19")]
    left = slurm.disks / "dali-pipes-job-17"
    for directory in (left, *others):
        directory.mkdir()
    if os.getuid() == 0:
        os.chown(others[-1], 4711, 4711)  # `squeue --me` does not list other users' jobs
    slurm.queue.write_text("18\n4711\n" if os.getuid() == 0 else "18\n19\n4711\n")
    slurm.queue.rename(slurm.directory / "gone")  # squeue fails
    assert slurm.end(slurm.on_node("true")) == ""
    assert left.exists()
    (slurm.directory / "gone").rename(slurm.queue)
    assert f"removing {left}, whose job is gone" in slurm.end(slurm.on_node("true"))
    assert slurm.caches() == [directory.name for directory in others]


@pytest.mark.parametrize("keep", ["0", "1"])
def test_cache_that_somebody_else_made_first_is_refused(slurm: Slurm, keep: str) -> None:
    """The command does not start, and what is there stays."""
    cache = slurm.disks / (f"dali-pipes-keep-{os.getuid()}" if keep == "1" else f"dali-pipes-job-{JOB}")
    cache.symlink_to(slurm.runs)
    if os.getuid() == 0 and keep == "1":
        cache.unlink()
        cache.mkdir(mode=0o777)
        os.chown(cache, 4711, 4711)
    node = slurm.on_node("touch", str(slurm.directory / "started"), KEEP_CACHE=keep)
    assert f"'{cache}' is not a directory of " in slurm.end(node)
    assert node.returncode == 1
    assert not (slurm.directory / "started").exists()
    assert cache.exists()


def test_cache_that_is_to_stay_stays(slurm: Slurm) -> None:
    """KEEP_CACHE=1: one directory for all jobs, its owner's alone."""
    for _ in range(2):
        node = slurm.on_node("sh", "-c", 'date >> "$1/image"; stat -c %a "$1"', "sh", "{cache}", KEEP_CACHE="1")
        assert node.communicate() == ("700\n", "")
    assert len((slurm.disks / f"dali-pipes-keep-{os.getuid()}" / "image").read_text().splitlines()) == 2


@pytest.mark.nightly
def test_real_training_goes_on_after_its_time_was_up(slurm: Slurm) -> None:
    """The classification example under torchrun on tiny photos: checks, cache, signal, requeue, resume."""
    shards = write_shards(slurm.directory / "shards", make_samples([(40, 44)] * 24, num_classes=37), per_shard=8)
    (slurm.bin / "torchrun").unlink()  # the real one
    words: list[str | Path] = ["examples/classification.py", "--shards", shards, "--out", slurm.runs / "b"]
    words += ["--device=cpu", "--crop=16", "--width=8", "--batch-size=2", "--checkpoint-every=1", "--epochs", "60"]
    log = slurm.runs / "b" / "steps.jsonl"
    job = slurm.submit(*words, DALI_PIPES_CHECK="fail", VENV=sys.prefix)
    wait_while(job, until=lambda: log.exists() and log.read_text().count("\n") > 5)
    assert f"node0/dali-pipes-job-{JOB}/dali-pipes-{os.getuid()}" in slurm.caches()
    os.kill(job.pid, signal.SIGUSR1)
    said = slurm.end(job)
    assert job.returncode == 0, said
    assert f"cache {slurm.disks}/node0/dali-pipes-job-{JOB}" in said  # doctor looked at it
    assert (slurm.caches(), slurm.requeued()) == ([], [f"requeue {JOB}"])
    num_epochs = log.read_text().count("\n") // 12 + 2
    job = slurm.submit(*words[:-1], str(num_epochs), SLURM_RESTART_COUNT="1", VENV=sys.prefix)
    said = slurm.end(job)
    assert job.returncode == 0, said
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert (steps, slurm.caches()) == (list(range(num_epochs * 12)), [])


# The array job of `dali-pipes prep`: its tasks make what one process makes


def write_dali_pipes(slurm: Slurm) -> None:
    program = f"#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m dali_pipes"
    write_program(slurm.bin / "dali-pipes", f'{program} "$@"\n')


@pytest.fixture
def shards(slurm: Slurm) -> Path:
    """Five shards, on the file system that all nodes see."""
    write_dali_pipes(slurm)
    pack(make_source(43), store=LocalStore(slurm.runs / "shards"), max_count=10)
    return slurm.runs / "shards"


def submit_part(slurm: Slurm, *words: str | Path, array: tuple[int, ...] = (), **variables: str) -> Any:
    """Submit a job; ``array`` is a task's number and the first and last number of the array, or empty."""
    if array:
        number, first, last = array
        values = {"ID": number, "MIN": first, "MAX": last, "COUNT": last - first + 1}
        variables |= {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}
    return slurm.submit(*words, script="parts.sbatch", **variables)


def test_tasks_of_an_array_index_what_one_process_does(slurm: Slurm, shards: Path) -> None:
    """Three tasks, and the job that follows them."""
    run_prep("index", shards)
    whole = {path.name: path.read_bytes() for path in shards.iterdir()}
    for path in shards.glob("*.safetensors"):
        path.unlink()
    jobs = [submit_part(slurm, "index", shards, array=(number, 1, 3)) for number in (1, 3)]
    jobs.insert(1, submit_part(slurm, "index", shards, array=(2, 2, 2), PARTS="3"))  # a task that is run again alone
    for number, job in enumerate(jobs, 1):
        out, said = job.communicate(timeout=240)
        assert job.returncode == 0, said
        assert f"part {number}/3 of '{shards}/samples-'" in out
    job = submit_part(slurm, "index", shards, "--merge")
    out, said = job.communicate(timeout=240)
    assert job.returncode == 0, said
    assert {path.name: path.read_bytes() for path in shards.iterdir()} == whole


# Ray in an allocation: two real nodes of Ray pack what one process packs


@pytest.fixture
def job(slurm: Slurm) -> str:
    """A job whose port is free; the programs of the environment are on PATH."""
    pytest.importorskip("ray", reason="needs the extra ray")
    write_dali_pipes(slurm)
    write_program(slurm.bin / "ray", f'#!/bin/sh\nexec {sys.executable} -m ray.scripts.scripts "$@"\n')
    write_program(slurm.bin / "python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    with socket.socket() as tried:
        for port in range(20000 + os.getpid() % 9000, 30000):
            with contextlib.suppress(OSError):
                tried.bind(("127.0.0.1", port))
                return str(port - 20000 + 10000)
    raise AssertionError("no free port")


def submit_ray(slurm: Slurm, job: str, *words: str | Path, **variables: str) -> tuple[int, str, str]:
    """Run a job on two nodes with two CPUs each; give exit code, stdout and stderr. It leaves no Ray files."""
    variables |= {"SLURM_JOB_ID": job, "SLURM_JOB_NUM_NODES": "2", "PYTHONPATH": str(ROOT)}
    process = slurm.submit(*words, script="ray.sbatch", **variables)
    out, said = process.communicate(timeout=400)
    assert not Path(f"/tmp/ray-{job}").exists()
    return process.returncode, out, said


def test_command_runs_on_a_ray_of_all_nodes_and_nothing_is_left(slurm: Slurm, job: str) -> None:
    """Two tasks are two nodes; the shards are those of one process, on which no Ray runs any more."""
    photos = write_pets(slurm.runs / "pets", {f"cat_{number}": 1 + number % 2 for number in range(7)})
    out = slurm.runs / "out"
    code, printed, said = submit_ray(slurm, job, "pack", "pets", photos, out, "--max-count", "3")
    assert code == 0, said
    assert "node node0: Ray has 2 nodes" in said
    assert printed.startswith("wrote 3 shards"), printed
    expected = slurm.runs / "expected"
    names = pack(pets(photos), store=LocalStore(expected), max_count=3).shards
    assert [(out / name).read_bytes() for name in names] == [(expected / name).read_bytes() for name in names]
