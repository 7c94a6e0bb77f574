"""The image, built by a real builder and run as its pages say: as user 10001, with a root that is read-only."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs import wait_until
from tests.real.containers import TREES, Podman, build_image
from tests.shards import make_samples, write_shards

CONFINED = ("--read-only", "--tmpfs", "/tmp", "--shm-size=2g")
NUM_STEPS = 12
TRAINING = ["python3", "examples/classification.py", "--shards", "/data", "--resume", "--device=cpu", "--crop=16"]
TRAINING += ["--width=8", "--batch-size=2", "--checkpoint-every=1", "--cache-dir=/cache"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Shards of 24 photos, and a directory for runs that user 10001 may write."""
    write_shards(tmp_path / "shards", make_samples([(40, 44)] * 24, num_classes=37), per_shard=8)
    (tmp_path / "runs").mkdir(mode=0o777)
    (tmp_path / "runs").chmod(0o777)
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(0o755)
    return tmp_path


def steps(folder: Path) -> list[dict[str, float]]:
    log = folder / "steps.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def test_image_is_built(podman: Podman, image: str, record_property: Callable[[str, object], None]) -> None:
    """the Dockerfile builds on Ubuntu 24.04: stage `runtime`, CUDA 13"""
    found = podman.inspect(image, "image")
    record_property("found", f"{found['Size'] / 1e9:.1f} GB, {len(found['RootFS']['Layers'])} layers")
    code, said = podman.run(*CONFINED, image, "sh", "-c", "id; tr '\\0' ' ' < /proc/1/cmdline; touch /opt/x")
    assert "uid=10001" in said
    assert "/usr/bin/tini -- /opt/dali-pipes/deploy/entrypoint.sh" in said
    assert "Read-only file system" in said
    assert code


def test_doctor(podman: Podman, image: str) -> None:
    """`doctor` passes with a read-only root and 2 GB of shared memory"""
    code, said = podman.run(*CONFINED, image, "doctor")
    assert code == 0, said
    assert not re.search(r"^(warn|fail)", said, re.MULTILINE), said
    assert re.search(r"^ok +cache /dev/shm +tmpfs, 2\.0 GiB free", said, re.MULTILINE), said


def test_demo(podman: Podman, image: str, data: Path) -> None:
    """`demo` runs to its end"""
    code, said = podman.run(*CONFINED, "--volume", f"{data}/runs:/runs", "--workdir", "/runs", image, "demo")
    assert code == 0, said


def test_training_is_stopped_and_goes_on(podman: Podman, image: str, data: Path) -> None:
    """a training that SIGTERM stops continues in a new container, with the losses of an unbroken run"""
    mounts = ("--volume", f"{data}/shards:/data:ro", "--volume", f"{data}/runs:/runs", "--tmpfs", "/cache:mode=1777")
    words = (*CONFINED, *mounts, image, *TRAINING, "--epochs=40")
    name = podman.start(*words, "--out=/runs/a")
    wait_until(lambda: len(steps(data / "runs/a")) > 5)
    podman.do("stop", "--time", "60", name)
    code, said = podman.end(name)
    assert code == 143, said
    assert len(steps(data / "runs/a")) < 40 * NUM_STEPS
    for folder in ("a", "unbroken"):
        code, said = podman.run(*words, f"--out=/runs/{folder}")
        assert code == 0, said
    assert steps(data / "runs/a") == steps(data / "runs/unbroken")


def test_memory_limit(podman: Podman, image: str) -> None:
    """a process that reaches the memory limit is killed (137); with cgroups v2, `doctor` prints the limit"""
    limited = (*CONFINED, "--memory=3g", "--memory-swap=3g")
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        _, said = podman.run(*limited, image, "doctor")
        assert re.search(r"^ok +memory +(2\.\d|3\.0) GiB available to this process", said, re.MULTILINE), said
    code, said = podman.run(*limited, image, "python3", "-c", "len(b'x' * (4 << 30))")
    assert code == 137, (code, said)


@pytest.mark.parametrize("system", TREES)
def test_suite(podman: Podman, system: str, record_property: Callable[[str, object], None]) -> None:
    """the stage `test` passes what `make test` runs, with the Python of a base system"""
    image = build_image(podman, system, target="test", name=f"localhost/dali-pipes:test-{system}")
    pytest_words = ["python3", "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile"]
    code, said = podman.run("--shm-size=4g", image, *pytest_words, "-m", "not nightly", "--ignore", "tests/docs")
    version = podman.run("--entrypoint", "python3", image, "-V")[1].strip()
    record_property("found", f"{system}, {version}: {said.splitlines()[-1].strip('= ')}")
    assert code == 0, said[-20_000:]
