"""Images built by buildah, and containers and pods run by podman, as Docker and Kubernetes would."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.deploy.dockerfile import ROOT
from tests.real.engines import version

# Limits cannot be raised in every sandbox; cgroups v1 wants runc.
_CONTAINERS_CONF = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
_CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"


class Podman:
    """An engine whose images, containers and volumes lie in one directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory, self.num_started = directory, 0
        (directory / "tmp").mkdir()
        self.runroot = tempfile.mkdtemp(prefix="real-")  # podman wants a short path
        (directory / "containers.conf").write_text(_CONTAINERS_CONF)
        self.environment = os.environ | {
            "CONTAINERS_CONF": str(directory / "containers.conf"),
            "STORAGE_DRIVER": "overlay",
            "TMPDIR": str(directory / "tmp"),
        }
        self.version = f"{version('podman', '--version')}, {version('runc', '--version')}"

    def call(self, *words: str | Path, program: str = "podman") -> "subprocess.CompletedProcess[str]":
        """Run podman or buildah and wait for its end; what it prints is in ``stdout``."""
        return subprocess.run(
            [program, "--root", self.directory / "root", "--runroot", self.runroot, *words],
            env=self.environment,
            cwd=self.directory,  # a container that is killed for memory leaves a file `oom`
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )

    def do(self, *words: str | Path, program: str = "podman") -> str:
        """As `call`; fails if the program does."""
        done = self.call(*words, program=program)
        assert done.returncode == 0, f"{' '.join(map(str, words))}\n{done.stdout[-20_000:]}"
        return done.stdout

    def start(self, *words: str | Path) -> str:
        """Start a container in the background; its name."""
        self.num_started += 1
        name = f"real-{self.num_started}"
        self.do(
            "run", "--detach", "--name", name, "--network=host", *(word for word in words if word != "--network=host")
        )
        return name

    def end(self, name: str) -> tuple[int, str]:
        """Wait for a container's end; its exit code and what it said."""
        code = int(self.do("wait", name))
        return code, self.do("logs", name)

    def run(self, *words: str | Path) -> tuple[int, str]:
        """Run a container to its end; its exit code and what it said."""
        return self.end(self.start(*words))

    def inspect(self, name: str, kind: str = "container") -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.do("inspect", "--type", kind, name))[0]
        return found

    def close(self) -> None:
        """Stop and remove everything."""
        for words in (("pod", "rm", "--all", "--force"), ("rm", "--all", "--force", "--time", "0")):
            self.call(*words)
        self.call("rmi", "--all", "--force")
        for path in (self.directory, self.runroot):
            shutil.rmtree(path, ignore_errors=True)


TREES = {
    "ubuntu": ("noble", "http://archive.ubuntu.com/ubuntu", "gutsy", "--no-check-gpg", "--components=main,universe"),
    "debian": ("trixie", "http://deb.debian.org/debian", "sid"),
}
"""Base system -> suite, mirror, and script of debootstrap. Debian has no keyring of Ubuntu's."""


def make_tree(podman: Podman, system: str) -> str:
    """The image of a base system with this machine's certificates. Ubuntu 24.04 is what CUDA's image is made of."""
    name = f"localhost/{system}"
    if podman.call("image", "exists", name).returncode == 0:
        return name
    suite, mirror, script, *options = TREES[system]
    directory = podman.directory / system
    words = ["debootstrap", "--variant=minbase", "--include=ca-certificates", *options]
    subprocess.run([*words, suite, directory, mirror, script], check=True, stdout=subprocess.DEVNULL)
    shutil.copy(f"/{_CERTIFICATES}", directory / _CERTIFICATES)
    container = podman.do("from", "scratch", program="buildah").strip()
    podman.do("add", "--quiet", container, directory, "/", program="buildah")
    podman.do("config", "--env", f"PIP_CERT=/{_CERTIFICATES}", container, program="buildah")
    podman.do("commit", "--quiet", "--rm", container, name, program="buildah")
    shutil.rmtree(directory)
    return name


def build_image(podman: Podman, system: str, *, target: str, name: str) -> str:
    """Build a target of the Dockerfile, layer by layer, on a base system."""
    words = ["bud", "--isolation", "chroot", "--network", "host", "--layers", "--target", target, "--tag", name]
    words += ["--build-arg", f"CUDA_IMAGE={make_tree(podman, system)}"]
    words += ["--build-arg", "EXTRAS=bench,demo,metrics", str(ROOT)]
    podman.do(*words, program="buildah")
    return name


def words_of_service(service: Mapping[str, Any]) -> list[str]:
    """The options of ``podman run`` for a service of a compose file, line by line the same, and image and command.

    Limits that this machine may not raise are left out.
    """
    known = {"image", "build", "profiles", "depends_on", "restart", "environment", "command", "volumes", "network_mode"}
    known |= {"cap_drop", "security_opt", "shm_size", "ulimits"}
    assert service.keys() <= known, service.keys() - known
    words = [f"--cap-drop={name}" for name in service["cap_drop"]]
    words += [f"--security-opt={text.replace(':true', '')}" for text in service["security_opt"]]
    words += [f"--shm-size={service['shm_size']}", f"--network={service['network_mode']}"]
    words += [f"--restart={service['restart']}"] if "restart" in service else []
    words += [f"--volume={volume}" for volume in service["volumes"]]
    words += [f"--env={name}={value}" for name, value in service["environment"].items()]
    return [*words, f"localhost/{service['image']}", *service["command"]]
