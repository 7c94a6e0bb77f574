"""deploy/slurm on a real Slurm of two nodes: ends, signals, a node that is lost, arrays, Ray."""

import json
import os
import shutil
from pathlib import Path

import pytest

from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.local import LocalStore
from prep.sources.folders import pets
from tests.prep.commands.calls import run_prep
from tests.programs import wait_until
from tests.real.slurm import Slurm
from tests.shards import contents_of, fill_bucket, make_samples, make_source, pack, write_pets, write_shards

EPOCHS, NUM_STEPS = 300, {1: 12, 2: 6}
"""Epochs of a training, and their steps by the number of nodes."""


@pytest.fixture(scope="module")
def training(slurm: Slurm, endpoint: str) -> list[str | Path]:
    """The words of a training: it reads tiny photos from AIStore, and saves a checkpoint after each step."""
    shards = write_shards(slurm.runs / "shards", make_samples([(40, 44)] * 24, num_classes=37), per_shard=6)
    fill_bucket(AisStore(endpoint, "real"), shards)
    words: list[str | Path] = ["examples/classification.py", "--shards", "ais://real/s-", "--device=cpu", "--crop=16"]
    return [*words, "--width=8", "--batch-size=2", "--checkpoint-every=1", "--epochs", str(EPOCHS)]


@pytest.fixture(scope="module")
def unbroken(slurm: Slurm, training: list[str | Path]) -> dict[int, list[dict[str, float]]]:
    """Number of nodes -> steps of a training that nothing ended."""
    found = {}
    for num_nodes in (1, 2):
        out = slurm.runs / f"unbroken-{num_nodes}"
        said = slurm.end(slurm.submit("train.sbatch", *training, "--out", out, options=(f"--nodes={num_nodes}",)))
        assert f"{slurm.folder}/disk/dali-pipes-job-" in said  # `doctor` looked at the cache
        assert slurm.caches() == []
        found[num_nodes] = steps(out)
    return found


def steps(out: Path) -> list[dict[str, float]]:
    log = out / "steps.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def test_training_ends(unbroken: dict[int, list[dict[str, float]]]) -> None:
    """`train.sbatch`: trainings on one node and on two nodes complete, and their caches are removed"""
    for num_nodes, done in unbroken.items():
        assert [step["step"] for step in done] == list(range(EPOCHS * NUM_STEPS[num_nodes]))


def test_time_limit(slurm: Slurm, training: list[str | Path], unbroken: dict[int, list[dict[str, float]]]) -> None:
    """`train.sbatch`: the job requeues itself before its time limit, and continues at the exact next sample"""
    out = slurm.runs / "limited"
    job = slurm.submit("train.sbatch", *training, "--out", out, options=("--time=60", "--signal=B:USR1@115"))
    wait_until(lambda: len(steps(out)) > 5)
    minutes = int(slurm.info(job)["RunTime"].split(":")[1]) + 2
    slurm.do("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
    wait_until(lambda: f"job {job}: the time is up: back into the queue" in slurm.said(job))
    assert len(steps(out)) < len(unbroken[1])
    slurm.do("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    slurm.end(job)
    assert slurm.info(job)["Restarts"] == "1"
    assert (steps(out), slurm.caches()) == (unbroken[1], [])


def test_cancelled(slurm: Slurm, training: list[str | Path], unbroken: dict[int, list[dict[str, float]]]) -> None:
    """`train.sbatch`: `scancel` ends the job and removes its caches; the next job continues at the next sample"""
    out = slurm.runs / "cancelled"
    words = [*training, "--out", out]
    job = slurm.submit("train.sbatch", *words)
    wait_until(lambda: len(steps(out)) > 5)
    slurm.do("scancel", job)
    slurm.end(job, "CANCELLED")
    wait_until(lambda: not slurm.caches())
    assert len(steps(out)) < len(unbroken[1])
    slurm.end(slurm.submit("train.sbatch", *words))
    assert (steps(out), slurm.caches()) == (unbroken[1], [])


def test_lost_node(slurm: Slurm, training: list[str | Path], unbroken: dict[int, list[dict[str, float]]]) -> None:
    """`train.sbatch`: one of two nodes is lost in mid-epoch; the requeued job continues at the next sample"""
    out = slurm.runs / "lost"
    job = slurm.submit("train.sbatch", *training, "--out", out, options=("--nodes=2",))
    wait_until(lambda: len(steps(out)) > 5)
    slurm.kill_node("n2")
    wait_until(lambda: slurm.info(job)["JobState"] != "RUNNING")
    slurm.start_node("n2")
    slurm.end(job)
    assert int(slurm.info(job)["Restarts"]) == 1
    # A step whose checkpoint was not written is done again.
    by_step = {step["step"]: step for step in steps(out)}
    assert len(steps(out)) <= len(by_step) + 1
    assert list(by_step.values()) == unbroken[2]
    assert slurm.caches() == []


def test_failed(slurm: Slurm) -> None:
    """`train.sbatch`: a program that fails is not requeued; the job has its exit code"""
    job = slurm.submit(
        "train.sbatch", "examples/classification.py", "--shards", slurm.runs / "none", "--out", slurm.runs
    )
    assert "the step ended with exit code 1" in slurm.end(job, "FAILED")
    assert (slurm.info(job)["Restarts"], slurm.info(job)["ExitCode"], slurm.caches()) == ("0", "1:0", [])


def node(slurm: Slurm, *command: str, state: str = "COMPLETED", **variables: str) -> str:
    """Run node.sh as a job; what it said."""
    own = {"CACHE_ROOT": str(slurm.folder / "disk")} | variables
    words = ["sbatch", "--parsable", "--nodelist=n1", f"--output={slurm.folder}/%A_%a.out", "deploy/slurm/node.sh"]
    return slurm.end(slurm.do(*words, *command, **own).strip(), state)


def test_disk_of_a_node(slurm: Slurm) -> None:
    """`node.sh`: it removes caches that SIGKILL left, keeps others' files, and refuses another user's cache"""
    disk = slurm.folder / "disk-n1"
    for name in ("dali-pipes-job-4000000", "dali-pipes-job-4000001", "dali-pipes-1000"):
        (disk / name).mkdir()
    os.chown(disk / "dali-pipes-job-4000001", 4711, 4711)
    assert "dali-pipes-job-4000000, whose job is gone" in node(slurm, "true")
    assert slurm.caches() == ["disk-n1/dali-pipes-1000", "disk-n1/dali-pipes-job-4000001"]
    for _ in range(2):
        node(slurm, "sh", "-c", 'date >> "$1/image"', "sh", "{cache}", KEEP_CACHE="1")
    kept = disk / f"dali-pipes-keep-{os.getuid()}"
    assert (len((kept / "image").read_text().splitlines()), oct(kept.stat().st_mode & 0o777)) == (2, "0o700")
    os.chown(kept, 4711, 4711)
    said = node(slurm, "touch", str(slurm.runs / "started"), state="FAILED", KEEP_CACHE="1")
    assert f"dali-pipes-keep-{os.getuid()}' is not a directory of " in said
    assert not (slurm.runs / "started").exists()
    for path in disk.iterdir():
        shutil.rmtree(path)


def test_deaf_command(slurm: Slurm) -> None:
    """`node.sh`: a command that ignores SIGTERM is killed after GRACE_S, and its cache is removed"""
    job = slurm.do(
        *["sbatch", "--parsable", f"--output={slurm.folder}/%A_%a.out", "--wrap"],
        f"srun deploy/slurm/node.sh sh -c 'trap \"\" TERM; touch {slurm.runs}/deaf; while :; do sleep 1; done'",
        CACHE_ROOT=str(slurm.folder / "disk"),
        GRACE_S="1",
    ).strip()
    wait_until((slurm.runs / "deaf").exists)
    slurm.do("scancel", "--signal=TERM", job)
    assert "did not end within 1 s of SIGTERM: killed" in slurm.end(job, "FAILED")
    assert slurm.caches() == []


def test_array(slurm: Slurm, endpoint: str) -> None:
    """`parts.sbatch`: three tasks and a merge job write the same bytes as one process; a part can run again"""
    store = AisStore(endpoint, "parts")
    store.create()
    pack(make_source(43), store=store, max_count=10)
    run_prep("index", "ais://parts/samples-", "--endpoint", endpoint)
    whole = contents_of(store)
    for name in whole:
        if name.endswith(".safetensors"):
            store.delete(name)
    words = ("parts.sbatch", "index", "ais://parts/samples-")
    array = slurm.submit(*words, options=("--array=1-3",))
    again = slurm.submit(*words, options=("--array=2", f"--dependency=afterok:{array}"), PARTS="3")
    slurm.end(slurm.submit(*words, "--merge", options=(f"--dependency=afterok:{again}",)))
    assert all(f"part {number}/3 of '" in slurm.said(array) for number in (1, 2, 3))
    assert contents_of(store) == whole
    assert "take --array=1-N" in slurm.end(slurm.submit(*words, options=("--array=2-3",)), "FAILED")


@pytest.mark.parametrize("is_lost", [False, True], ids=["both stay", "one is lost"])
def test_ray(slurm: Slurm, is_lost: bool) -> None:
    """`ray.sbatch`: a Ray of two nodes packs the same bytes as one process, also if the second node is lost"""
    photos = write_pets(slurm.runs / f"pets-{is_lost}", {f"cat_{number}": 1 + number % 2 for number in range(7)})
    out, expected = slurm.runs / f"out-{is_lost}", slurm.runs / f"expected-{is_lost}"
    job = slurm.submit("ray.sbatch", "pack", "pets", photos, out, "--max-count", "3", options=("--nodes=2",))
    if is_lost:
        wait_until(lambda: "Ray has 2 nodes" in slurm.said(job))
        slurm.kill_node("n2")
    said = slurm.end(job)
    assert "Ray has 2 nodes" in said
    assert "wrote 3 shards" in said
    names = pack(pets(photos), store=LocalStore(expected), max_count=3).shards
    assert [(out / name).read_bytes() for name in names] == [(expected / name).read_bytes() for name in names]
    if is_lost:
        slurm.start_node("n2")
