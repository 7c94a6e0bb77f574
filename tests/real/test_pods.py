"""Podman runs the manifests of deploy/kubernetes; their users, volumes and limits take effect."""

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.deploy.test_kubernetes import documents, pods
from tests.programs import wait_until
from tests.real.containers import Podman
from tests.shards import write_pets

TOKEN = {"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "ais-token"}}
TOKEN["data"] = {"token": base64.b64encode(b'{"token": "eyJhbGciOi.a.b"}').decode()}  # type: ignore[assignment]
SMALL = ["--device=cpu", "--crop=64", "--width=8", "--batch-size=4", "--checkpoint-every=1"]

Play = Callable[..., str]


@pytest.fixture
def play(podman: Podman, image: str, endpoint: str, tmp_path: Path) -> Play:
    """Start the pods of a manifest; the name of the container.

    Changed are: where AIStore is, GPUs (none), memory (what a small machine has), the root of hostPaths, and the pod's
    name, which this engine gives to nobody who looks it up.
    """

    def start(name: str, *more: str, is_ephemeral: bool = False) -> str:
        pod = pods()[name]
        if is_ephemeral:  # as cache-ephemeral.yaml patches it; this engine makes a claim of the template
            pod["initContainers"].clear()
            pod["volumes"][0] = {"name": "cache", "persistentVolumeClaim": {"claimName": "of-the-pod"}}
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            container |= {"image": image, "imagePullPolicy": "Never"}
            kept = [each for each in container.get("env", ()) if each["name"] not in ("AIS_ENDPOINT", "REQUIRE_GPU")]
            container["env"] = [*kept, {"name": "AIS_ENDPOINT", "value": endpoint}]
            for limits in container["resources"].values():
                limits.pop("nvidia.com/gpu", None)
                limits.pop("cpu", None)
                limits["memory"] = "4Gi"
        words = pod["containers"][0]["args"]
        pod["containers"][0]["args"] = [word.replace("per-node=8", "per-node=2") for word in words] + list(more)
        for volume in pod["volumes"]:
            if "hostPath" in volume:
                volume["hostPath"]["path"] = f"{tmp_path}/raid"
        pod["hostname"] = "localhost"
        title = documents(name)[0]["metadata"]["name"]
        document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": title}, "spec": pod}
        (tmp_path / name).write_text(yaml.safe_dump_all([TOKEN, document]))
        podman.do("play", "kube", "--replace", "--network", "host", tmp_path / name)
        return f"{title}-{pod['containers'][0]['name']}"

    return start


@pytest.fixture(scope="module")
def shards(podman: Podman, image: str, endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The claim with the photos, in the layout of the pets."""
    podman.do("volume", "create", "photos")
    place = Path(podman.inspect("photos", "volume")["Mountpoint"])
    write_pets(place / "pets", {f"cat_{number}": 1 + number % 2 for number in range(24)})
    for path in (place, *place.rglob("*")):
        path.chmod(0o755)
    return place


@pytest.mark.usefixtures("shards")
def test_prep(podman: Podman, play: Play) -> None:
    """`prep.yaml`: as user 10001 it packs, shuffles, indexes and verifies photos"""
    code, said = podman.end(play("prep.yaml"))
    assert code == 0, said
    assert "nothing is wrong with 1 shard, 24 samples" in said


def steps(podman: Podman) -> list[dict[str, float]]:
    log = Path(podman.inspect("runs", "volume")["Mountpoint"]) / "pets" / "steps.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def test_train(podman: Podman, play: Play) -> None:
    """`train.yaml`: two ranks; user, init container, read-only root, memory limit; a stopped training continues"""
    name = play("train.yaml", *SMALL, "--epochs=60")
    wait_until(lambda: len(steps(podman)) > 5)
    seen = podman.do("exec", name, "sh", "-c", "id -u; stat -c '%u %a' /cache")
    assert seen.splitlines() == ["10001", "10001 700"]
    assert "Read-only file system" in podman.call("exec", name, "touch", "/opt/x").stdout
    assert podman.inspect(name)["HostConfig"]["Memory"] == 4 << 30
    podman.do("stop", "--time", "60", name)
    code, said = podman.end(name)
    assert code != 0, said
    done = len(steps(podman))
    code, said = podman.end(play("train.yaml", *SMALL, "--epochs=60"))
    assert code == 0, said
    assert done < len(steps(podman))
    assert [step["step"] for step in steps(podman)] == list(range(len(steps(podman))))


def test_cache_of_the_pod(podman: Podman, play: Play) -> None:
    """`cache-ephemeral.yaml`: the cache on a volume of the pod"""
    code, said = podman.end(play("train.yaml", *SMALL, "--epochs=61", is_ephemeral=True))
    assert code == 0, said
    assert "cache /cache" in said
