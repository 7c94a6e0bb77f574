"""Kubernetes' manifests by its own schemas, and by what holds between them, the image and the programs."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from dali_pipes.store.cluster.token import LOGIN_FILE
from tests.deploy.commands import parse_dali_pipes, parse_training, shell_commands
from tests.deploy.dockerfile import ROOT, read_stages

DIRECTORY = ROOT / "deploy" / "kubernetes"
# Old enough for clusters at work, new enough for podFailurePolicy, which is stable since 1.31.
VERSIONS = ("1.31", "1.34")
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DIRECTORY / name).read_text()))


def pods() -> dict[str, dict[str, Any]]:
    """File name -> the specification of its pods."""
    found = {name: documents(name)[0]["spec"]["template"]["spec"] for name in ("prep.yaml", "train.yaml")}
    worker = documents("train-nodes.yaml")[0]["spec"]["pytorchReplicaSpecs"]["Worker"]
    head = documents("prep-ray.yaml")[0]["spec"]["rayClusterSpec"]["headGroupSpec"]
    return found | {"train-nodes.yaml": worker["template"]["spec"], "prep-ray.yaml": head["template"]["spec"]}


def num_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMGT]i)", text)
    assert match, text
    return int(match[1]) * UNITS[match[2]]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["ais-service.yaml", "storage.yaml", "prep.yaml", "train.yaml"])
def test_manifests_are_valid(name: str, version: str) -> None:
    """Strictly: a field that there is not is an error, as for `kubectl apply --validate=strict`."""
    for document in documents(name):
        kubernetes_validate.validate(document, version, strict=True)


def test_token_lies_where_the_loader_looks_for_it() -> None:
    """In the home of the image's user, as `ais auth login` would write it; a cluster without tokens needs no secret."""
    home = re.search(r"\bHOME=(\S+)", (ROOT / "Dockerfile").read_text())
    assert home
    for name, pod in pods().items():
        (volume,) = [one for one in pod["volumes"] if "secret" in one]
        assert volume["secret"]["optional"], name
        (item,) = volume["secret"]["items"]
        (container,) = pod["containers"]
        (mount,) = [one for one in container["volumeMounts"] if one["name"] == volume["name"]]
        assert f"{mount['mountPath']}/{item['path']}" == f"{home[1]}/{LOGIN_FILE}", name
        assert not [variable for variable in container["env"] if "TOKEN" in variable["name"]], name


def test_validation_finds_a_field_that_there_is_not() -> None:
    (job,) = documents("train.yaml")
    job["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="volumeMount"):
        kubernetes_validate.validate(job, VERSIONS[0], strict=True)


def test_pytorchjob_has_the_fields_of_the_training_operator() -> None:
    """Its schema is in no package: what we rely on of it, by type, and its pods by Kubernetes' own."""
    (job,) = documents("train-nodes.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = job["spec"]
    assert set(spec) == {"nprocPerNode", "elasticPolicy", "runPolicy", "pytorchReplicaSpecs"}
    assert isinstance(spec["nprocPerNode"], str)
    types = {name: type(value) for name, value in spec["elasticPolicy"].items()}
    assert types == {"minReplicas": int, "maxReplicas": int, "rdzvBackend": str, "maxRestarts": int}
    types = {name: type(value) for name, value in spec["runPolicy"].items()}
    assert types == {"cleanPodPolicy": str, "ttlSecondsAfterFinished": int}
    # An elastic job meets at its first worker, and has no master.
    assert set(spec["pytorchReplicaSpecs"]) == {"Worker"}
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    assert {name: type(value) for name, value in worker.items()} == {
        "replicas": int,
        "restartPolicy": str,
        "template": dict,
    }
    assert worker["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
    assert [each["name"] for each in worker["template"]["spec"]["containers"]] == ["pytorch"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": worker["template"]["spec"]}
    for version in VERSIONS:
        kubernetes_validate.validate(pod, version, strict=True)


def test_rayjob_has_the_fields_of_kuberay() -> None:
    """Its schema is in no package: what rayjob_types.go and raycluster_types.go of KubeRay 1.7 have, by type."""
    (job,) = documents("prep-ray.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert {name: type(value) for name, value in spec.items()} == {
        "submissionMode": str,
        "backoffLimit": int,
        "shutdownAfterJobFinishes": bool,  # without it ttlSecondsAfterFinished is refused
        "ttlSecondsAfterFinished": int,
        "entrypoint": str,
        "rayClusterSpec": dict,
        "submitterPodTemplate": dict,
    }
    assert spec["submissionMode"] == "K8sJobMode"
    ray = spec["rayClusterSpec"]
    assert set(ray) == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    assert set(ray["headGroupSpec"]) == {"rayStartParams", "template"}
    (workers,) = ray["workerGroupSpecs"]
    types = {name: type(value) for name, value in workers.items()}
    numbers = {"replicas": int, "minReplicas": int, "maxReplicas": int}
    assert types == {"groupName": str, **numbers, "rayStartParams": dict, "template": dict}
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    for template in (ray["headGroupSpec"]["template"], workers["template"], spec["submitterPodTemplate"]):
        assert set(template) <= {"metadata", "spec"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": template["spec"]}
        for version in VERSIONS:
            kubernetes_validate.validate(pod, version, strict=True)


def test_ray_of_the_rayjob_is_that_of_the_image() -> None:
    """Its version chooses the probes: from 2.53 on they are Kubernetes' own requests, without wget in the image."""
    found = documents("prep-ray.yaml")[0]["spec"]["rayClusterSpec"]["rayVersion"]
    assert f"\nray=={found} ;" in (ROOT / "constraints.txt").read_text()
    assert tuple(map(int, found.split("."))) >= (2, 53)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["kuberay"][0].startswith("ray[default]>=2.53"), "probes and jobs are answered by the dashboard"
    assert "EXTRAS=bench,kuberay" in (DIRECTORY / "prep-ray.yaml").read_text()


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


def test_number_of_nodes_is_one_number() -> None:
    """Replicas, the rendezvous' bounds and the slices of the order: a difference waits for ever, or reads twice."""
    spec = documents("train-nodes.yaml")[0]["spec"]
    launcher, options = parse_training(pods()["train-nodes.yaml"]["containers"][0]["args"])
    assert launcher == {}, "PET_ variables of the operator say it"
    replicas = spec["pytorchReplicaSpecs"]["Worker"]["replicas"]
    assert replicas == spec["elasticPolicy"]["minReplicas"] == spec["elasticPolicy"]["maxReplicas"]
    assert replicas == options["num_slices"]


@pytest.mark.parametrize("name", ["train.yaml", "train-nodes.yaml"])
def test_trainings_resume_and_their_directories_are_mounted(name: str) -> None:
    """A rank for each GPU; the cache that is checked is the one that is used; the run is where it outlives the pod."""
    pod = pods()[name]
    (container,) = pod["containers"]
    launcher, options = parse_training(container["args"])
    num_gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    if name == "train.yaml":
        assert int(launcher["nproc-per-node"]) == num_gpus
    else:
        assert int(documents(name)[0]["spec"]["nprocPerNode"]) == num_gpus
    assert container["resources"]["requests"]["nvidia.com/gpu"] == num_gpus
    assert options["resume"]
    environment = {each["name"]: each.get("value") for each in container["env"]}
    assert environment["REQUIRE_GPU"] == "1"
    assert environment["DALI_PIPES_CACHE"] == str(options["cache_dir"])
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert "hostPath" in volumes[mounts[str(options["cache_dir"])]]
    claim = volumes[mounts["/" + str(options["out"]).split("/")[1]]]["persistentVolumeClaim"]["claimName"]
    assert [each["spec"]["accessModes"] for each in documents("storage.yaml") if each["metadata"]["name"] == claim] == [
        ["ReadWriteMany"]
    ]
    # A hostPath is root's until it is given away, to the very user that the container is.
    owner = next(each for each in pod["initContainers"] if each["name"] == "own-cache")["command"]
    user, group = (str(pod["securityContext"][which]) for which in ("runAsUser", "runAsGroup"))
    assert owner == ["install", "-d", "-o", user, "-g", group, "-m", "0700", str(options["cache_dir"])]


@pytest.mark.parametrize("name", ["prep.yaml", "prep-ray.yaml", "train.yaml", "train-nodes.yaml"])
def test_pods_fit_the_image_and_the_memory_that_they_ask_for(name: str) -> None:
    """Shared memory counts against the limit: it must leave most of it to the processes."""
    pod = pods()[name]
    _, stages = read_stages(ROOT / "Dockerfile")
    (user,) = stages["runtime"].texts("USER")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    security = pod["securityContext"]
    assert security["runAsNonRoot"]
    assert f"{security['runAsUser']}:{security['runAsGroup']}" == user
    for container in (*pod["containers"], *pod.get("initContainers", [])):
        assert container["image"] == f"dali-pipes:{version}"
        assert "command" not in container or container["name"] == "own-cache", (
            "the entrypoint's checks would be left out"
        )
        resources = container["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"], "evicted first, else"
        assert "cpu" in resources["requests"]
        assert "cpu" not in resources["limits"], "a decoder that is throttled stalls the GPU"
        mounted = {each["name"] for each in container["volumeMounts"]}
        assert mounted <= {each["name"] for each in pod["volumes"]}
    (container,) = pod["containers"]
    memory = [each["emptyDir"]["sizeLimit"] for each in pod["volumes"] if each.get("emptyDir", {}).get("medium")]
    assert len(memory) == 1
    assert 1 << 30 <= num_bytes(memory[0]) <= num_bytes(container["resources"]["limits"]["memory"]) // 4
    # The root file system is read-only: home, temporary files and shared memory are mounts.
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert {"/tmp", "/dev/shm"} <= {each["mountPath"] for each in container["volumeMounts"]}


def test_endpoint_is_the_service() -> None:
    (service,) = documents("ais-service.yaml")
    endpoint = f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    for pod in pods().values():
        assert {"name": "AIS_ENDPOINT", "value": endpoint} in pod["containers"][0]["env"]


def test_prep_commands_are_those_of_dali_pipes(tmp_path: Path) -> None:
    commands = shell_commands(pods()["prep.yaml"]["containers"][0]["args"], tmp_path=tmp_path)
    contexts = [parse_dali_pipes(words[1:]) for words in commands if words[0] == "dali-pipes"]
    assert [context.command.name for context in contexts] == ["pets", "shuffle", "index", "verify"]


def test_job_is_tried_again_except_where_that_is_of_no_use() -> None:
    """A drained node is not counted; exit code 2, which programs here give when misused, ends the job."""
    spec = documents("train.yaml")[0]["spec"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "podFailurePolicy takes no other"
    ignored, failed = spec["podFailurePolicy"]["rules"]
    assert (ignored["action"], ignored["onPodConditions"]) == (
        "Ignore",
        [{"type": "DisruptionTarget", "status": "True"}],
    )
    assert (failed["action"], failed["onExitCodes"]["values"]) == ("FailJob", [2])
    assert failed["onExitCodes"]["containerName"] == spec["template"]["spec"]["containers"][0]["name"]


def test_ephemeral_cache_needs_neither_root_nor_the_host() -> None:
    """The patch, applied as its comment says."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl")
    text = (DIRECTORY / "cache-ephemeral.yaml").read_text()
    (shown,) = re.findall(r"kubectl (patch .*-o yaml) \|", text)
    done = subprocess.run([kubectl, *shown.split()], cwd=DIRECTORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    job = yaml.safe_load(done.stdout)
    kubernetes_validate.validate(job, VERSIONS[0], strict=True)
    pod = job["spec"]["template"]["spec"]
    assert not pod.get("initContainers")
    assert [set(each) - {"name"} for each in pod["volumes"] if each["name"] == "cache"] == [{"ephemeral"}]
    assert "hostPath" not in done.stdout
