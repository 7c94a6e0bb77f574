"""The jobs of deploy/compose.yaml, each run by podman with the options that its lines stand for."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.deploy.test_compose import compose
from tests.programs import wait_until
from tests.real.containers import Podman, words_of_service


@pytest.fixture
def words(image: str, endpoint: str) -> dict[str, list[str]]:
    """Service -> words for ``podman run``. AIStore's own image needs a registry: jobs use another cluster or node."""
    services = {name: compose()["services"][name] for name in ("prep", "train", "bench")}
    for service in services.values():
        service["environment"] = service["environment"] | {"AIS_ENDPOINT": endpoint}
    assert all(f"localhost/{service['image']}" == image for service in services.values())
    return {name: words_of_service(service) for name, service in services.items()}


def runs(podman: Podman) -> Path:
    return Path(podman.inspect("runs", "volume")["Mountpoint"])


def steps(podman: Podman) -> list[int]:
    log = runs(podman) / "demo" / "steps.jsonl"
    return [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else []


def test_prep(podman: Podman, words: dict[str, list[str]]) -> None:
    """`prep` runs twice: it packs, shuffles and indexes 600 photos"""
    for _ in range(2):
        code, said = podman.run(*words["prep"])
        assert code == 0, said
        assert re.search(r"indexed \d+ shards, 600 samples", said)  # dSort of a real cluster cuts them by size


def test_train(podman: Podman, words: dict[str, list[str]]) -> None:
    """`train`: a killed training is restarted by the engine, and continues from the checkpoint"""
    name = podman.start(*words["train"], "--checkpoint-every=1")
    wait_until(lambda: len(steps(podman)) > 3)
    pid = podman.inspect(name)["State"]["Pid"]
    assert pid > 1, podman.do("logs", name)  # 0 would be this process's own group
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: podman.inspect(name)["RestartCount"])
    code, said = podman.end(name)
    assert (code, podman.inspect(name)["RestartCount"]) == (0, 1), said
    # A step whose checkpoint was not written is done again.
    assert list(dict.fromkeys(steps(podman))) == list(range(max(steps(podman)) + 1))
    assert len(steps(podman)) <= max(steps(podman)) + 2


def test_bench(podman: Podman, words: dict[str, list[str]]) -> None:
    """`bench`: it compares DALI, memory and WebLoader, and writes a record"""
    code, said = podman.run(*words["bench"])
    assert code == 0, said
    assert json.loads((runs(podman) / "bench.json").read_text())
