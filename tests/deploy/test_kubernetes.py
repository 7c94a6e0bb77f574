"""Kubernetes' manifests by its own schemas, and by what holds between them, the image and the programs."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.commands import parse_dali_pipes, parse_training, shell_commands
from tests.deploy.dockerfile import ROOT

DIRECTORY = ROOT / "deploy" / "kubernetes"
# Old enough for clusters at work, new enough for podFailurePolicy, which is stable since 1.31.
VERSIONS = ("1.31", "1.34")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DIRECTORY / name).read_text()))


def pods() -> dict[str, dict[str, Any]]:
    """File name -> the specification of its pods."""
    found = {name: documents(name)[0]["spec"]["template"]["spec"] for name in ("prep.yaml", "train.yaml")}
    worker = documents("train-nodes.yaml")[0]["spec"]["pytorchReplicaSpecs"]["Worker"]
    head = documents("prep-ray.yaml")[0]["spec"]["rayClusterSpec"]["headGroupSpec"]
    return found | {"train-nodes.yaml": worker["template"]["spec"], "prep-ray.yaml": head["template"]["spec"]}


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid(version: str) -> None:
    """Strictly: a field that there is not is an error, as for `kubectl apply --validate=strict`."""
    for name in ("ais-service.yaml", "storage.yaml", "prep.yaml", "train.yaml"):
        for document in documents(name):
            kubernetes_validate.validate(document, version, strict=True)
    policy = documents("prep-ray.yaml")[1]
    kubernetes_validate.validate(policy, version, strict=True)
    spec = documents("prep-ray.yaml")[0]["spec"]
    (selected,) = policy["spec"]["podSelector"]["matchLabels"].items()
    pods_of = [spec["submitterPodTemplate"], spec["rayClusterSpec"]["headGroupSpec"]["template"]]
    assert all(selected in pod["metadata"]["labels"].items() for pod in pods_of)
    # No package has schemas of PyTorchJob and RayJob, but their pods follow the schema of Kubernetes.
    for pod in pods().values():
        document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": pod}
        kubernetes_validate.validate(document, version, strict=True)
        assert pod["securityContext"]["runAsNonRoot"]


def test_commands_of_the_rayjob_come_whole_through_its_shells(tmp_path: Path) -> None:
    """KubeRay puts the entrypoint into a line of the submitting pod's bash; Ray joins the words for another."""
    entrypoint = documents("prep-ray.yaml")[0]["spec"]["entrypoint"].strip()
    show = f"{shlex.quote(sys.executable)} -c 'import subprocess, sys; print(subprocess.list2cmdline(sys.argv[1:]))'"
    joined = subprocess.run(["bash", "-c", f"{show} {entrypoint} ;"], capture_output=True, text=True, check=True)
    (tmp_path / "dali-pipes").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\n')
    (tmp_path / "dali-pipes").chmod(0o755)
    subprocess.run(["sh", "-c", joined.stdout], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True)
    (tmp_path / "photos").mkdir()
    lines = (tmp_path / "said").read_text().replace("/data/", f"{tmp_path}/").splitlines()
    contexts = [parse_dali_pipes(line.split()) for line in lines]
    assert [context.command.name for context in contexts] == ["imagefolder", "shuffle", "index", "verify"]
    assert [context.params.get("on") for context in contexts if context.command.name != "index"] == ["ray"] * 3


@pytest.mark.parametrize("name", ["train.yaml", "train-nodes.yaml"])
def test_trainings_resume_and_their_directories_are_mounted(name: str) -> None:
    """A rank for each GPU; the cache that is checked is the one that is used; the run is where it outlives the pod."""
    pod, spec = pods()[name], documents(name)[0]["spec"]
    (container,) = pod["containers"]
    launcher, options = parse_training(container["args"])
    num_gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(launcher.get("nproc-per-node") or spec["nprocPerNode"]) == num_gpus
    if name == "train-nodes.yaml":
        # The counts of replicas, rendezvous and slices must agree; otherwise pods wait for ever or read twice.
        replicas = spec["pytorchReplicaSpecs"]["Worker"]["replicas"]
        assert launcher == {}, "PET_ variables of the operator say it"
        assert replicas == spec["elasticPolicy"]["minReplicas"] == spec["elasticPolicy"]["maxReplicas"]
        assert replicas == options["num_slices"]
    assert container["resources"]["requests"]["nvidia.com/gpu"] == num_gpus
    assert options["resume"]
    environment = {each["name"]: each.get("value") for each in container["env"]}
    assert environment["REQUIRE_GPU"] == "1"
    assert environment["DALI_PIPES_CACHE"] == str(options["cache_dir"])
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert "hostPath" in volumes[mounts[str(options["cache_dir"])]]
    claim = volumes[mounts["/" + str(options["out"]).split("/")[1]]]["persistentVolumeClaim"]["claimName"]
    (storage,) = [each for each in documents("storage.yaml") if each["metadata"]["name"] == claim]
    assert storage["spec"]["accessModes"] == ["ReadWriteMany"]
    # A hostPath is root's until it is given away, to the very user that the container is.
    owner = next(each for each in pod["initContainers"] if each["name"] == "own-cache")["command"]
    user, group = (str(pod["securityContext"][which]) for which in ("runAsUser", "runAsGroup"))
    assert owner == ["install", "-d", "-o", user, "-g", group, "-m", "0700", str(options["cache_dir"])]


def test_pods_prepare_and_read_at_the_service(tmp_path: Path) -> None:
    (service,) = documents("ais-service.yaml")
    endpoint = f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    for pod in pods().values():
        assert {"name": "AIS_ENDPOINT", "value": endpoint} in pod["containers"][0]["env"]
    commands = shell_commands(pods()["prep.yaml"]["containers"][0]["args"], tmp_path=tmp_path)
    contexts = [parse_dali_pipes(words[1:]) for words in commands if words[0] == "dali-pipes"]
    assert [context.command.name for context in contexts] == ["pets", "shuffle", "index", "verify"]
