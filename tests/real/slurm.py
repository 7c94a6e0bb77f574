"""A Slurm of two nodes on this host. Each node has processes, a name and a disk of its own, and can be lost as one."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tests.deploy.dockerfile import ROOT
from tests.programs import wait_until
from tests.real.engines import version

NODES = ("n1", "n2")
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
_CONF = """
ClusterName=real
SlurmctldHost=localhost
SlurmctldPort=17817
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port=17818 CPUs=8 Gres=gpu:8
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port=17819 CPUs=8 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# A node: its mounts, its name; the host names of both; a disk that only it sees at the place that all have.
_NODE = """
mount --bind "$1/hosts" /etc/hosts && mount --bind "$1/disk-$2" "$1/disk" && hostname "$2" && exec slurmd -D -N "$2"
"""


class Slurm:
    """Munge, slurmctld and two slurmd below one directory. ``runs`` there stands for a file system that all share."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder, self.runs = folder, folder / "runs"
        for name in ("state", "disk", "runs", *(f"disk-{node}" for node in NODES)):
            (folder / name).mkdir(parents=True)
        self.version = version("slurmctld", "-V")
        (folder / "slurm.conf").write_text(_CONF.format(folder=folder))
        for number in range(8):  # counted as GPUs, though they are no devices
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + f"127.0.0.1 {' '.join(NODES)}\n")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")} | variables
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all daemons; `close` ends those that have started."""
        folder = self.folder
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed", "key")]
        munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files]
        self._daemons["munged"] = self._start(*munged)
        wait_until((folder / "munge.socket").exists)
        self._daemons["slurmctld"] = self._start("slurmctld", "-D")
        for node in NODES:
            self.start_node(node)

    def _start(self, *command: str | Path) -> "subprocess.Popen[bytes]":
        log = (self.folder / "daemons.log").open("ab")
        return subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)

    def start_node(self, node: str) -> None:
        """Start a node, and wait until it takes jobs."""
        apart = ["unshare", "--mount", "--pid", "--uts", "--fork", "--mount-proc", "--kill-child"]
        self._daemons[node] = self._start(*apart, "sh", "-c", _NODE, "sh", self.folder, node)
        wait_until(lambda: self.do("sinfo", "--noheader", "--nodes", node, "--format=%T").strip() in ("idle", "mixed"))

    def kill_node(self, node: str) -> None:
        """End all processes of a node at once, as when its power goes."""
        self._daemons[node].kill()
        self._daemons[node].wait()

    def do(self, *words: str | Path, **variables: str) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(
            words,
            env=self.environment | variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )
        assert done.returncode == 0 or words[0] in ("sinfo", "squeue", "scontrol"), done.stdout
        return done.stdout

    def submit(self, script: str, *words: str | Path, options: tuple[str, ...] = (), **variables: str) -> str:
        """Submit a script of deploy/slurm from the checkout; the job's number."""
        own = {"CACHE_ROOT": str(self.folder / "disk"), "NPROC_PER_NODE": "1"}
        command = [
            "sbatch",
            "--parsable",
            f"--output={self.folder}/%A_%a.out",
            "--gpus-per-node=1",
            "--cpus-per-task=2",
        ]
        if script != "train.sbatch":
            command.remove("--gpus-per-node=1")
        return self.do(*command, *options, f"deploy/slurm/{script}", *words, **own | variables).strip()

    def info(self, job: str) -> dict[str, str]:
        """Slurm's fields of a job; of an array its first task."""
        text = self.do("scontrol", "show", "job", "--oneliner", job).splitlines()[0]
        return dict(word.partition("=")[::2] for word in text.split())

    def end(self, job: str, state: str = "COMPLETED") -> str:
        """Wait for a job's end; what it said."""
        deadline = time.monotonic() + 600
        while self.info(job).get("JobState") not in _ENDED:
            assert time.monotonic() < deadline, (self.info(job), self.said(job))
            time.sleep(0.2)
        assert self.info(job)["JobState"] == state, (self.info(job), self.said(job))
        return self.said(job)

    def said(self, job: str) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"{job}_*.out")))

    def caches(self) -> list[str]:
        """What is on the nodes' disks."""
        return sorted(
            str(path.relative_to(self.folder)) for node in NODES for path in (self.folder / f"disk-{node}").iterdir()
        )

    def close(self) -> None:
        """End all jobs and daemons, and remove what they wrote."""
        self.do("scancel", "--full", "--user", "root")
        for daemon in reversed(self._daemons.values()):
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
