"""Slurm's commands on PATH, as far as the scripts use them, and the scripts started as Slurm does: as processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.deploy.dockerfile import ROOT
from tests.programs import wait_until

SHIMS = Path(__file__).parent / "shims"
JOB = "4711"


def wait_while(process: subprocess.Popen[str], *, until: Callable[[], object]) -> None:
    """Wait until ``until()`` holds; fail if the process ends first."""
    wait_until(lambda: until() or process.poll() is not None)
    assert process.poll() is None, process.communicate()


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


class Slurm:
    """A cluster in a directory: ``bin`` with its commands, ``disks`` of its nodes, ``runs`` that all nodes see."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.disks, self.runs, self.bin = (directory / name for name in ("disks", "runs", "bin"))
        for made in (self.disks, self.runs, self.bin):
            made.mkdir()
        self.queue = directory / "queue"
        self.queue.write_text("")
        self.started: list[subprocess.Popen[str]] = []
        write_program(self.bin / "srun", f'#!/bin/sh\nexec {sys.executable} {SHIMS / "srun.py"} "$@"\n')
        show = 'if [ "$1 $2" = "show hostnames" ]; then printf "127.0.0.1\\nlocalhost\\n"; exit; fi'
        write_program(self.bin / "scontrol", f'#!/bin/sh\n{show}\necho "$@" >> {directory}/scontrol.log\n')
        write_program(self.bin / "squeue", f"#!/bin/sh\nexec cat {self.queue}\n")
        write_program(
            self.bin / "scancel",
            f'#!/bin/sh\n[ "$*" = "--signal=TERM {JOB}" ] || exit 1\n'
            f'for file in {directory}/task*.pid; do kill -TERM "-$(cat "$file")"; done\n',
        )
        # Without the options that are torchrun's own: the program is the first word that is no option.
        write_program(
            self.bin / "torchrun",
            f'#!/bin/sh\nwhile case $1 in --*) true ;; *) false ;; esac; do shift; done\nexec {sys.executable} "$@"\n',
        )

    def environment(self, **variables: str) -> dict[str, str]:
        own = {
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_ID": JOB,
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_CPUS_PER_TASK": "2",
            "CACHE_ROOT": str(self.disks),
            "NPROC_PER_NODE": "1",
            "SHIM_DIR": str(self.directory),
            "DALI_PIPES_CHECK": "off",
            "VENV": "/nowhere",
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "HOME": str(self.directory),
        }
        return own | variables

    def submit(self, *words: str | Path, script: str = "train.sbatch", **variables: str) -> subprocess.Popen[str]:
        """Start a batch script as slurmd does."""
        return self._start([str(ROOT / "deploy/slurm" / script), *map(str, words)], self.environment(**variables))

    def on_node(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        """Start node.sh alone, on a disk that is the whole of ``disks``."""
        return self._start([str(ROOT / "deploy/slurm/node.sh"), *words], self.environment(**variables))

    def _start(self, words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
        process = subprocess.Popen(["bash", *words], env=environment, text=True, **options)
        self.started.append(process)
        return process

    def end(self, process: subprocess.Popen[str]) -> str:
        """What the process said on stderr, after it has ended."""
        return process.communicate(timeout=120)[1]

    def steps(self, node: int = 0) -> list[int]:
        log = self.runs / "a" / str(node) / "steps.txt"
        return [int(line) for line in log.read_text().split()] if log.exists() else []

    def caches(self) -> list[str]:
        """Directories of jobs on the nodes' disks."""
        return sorted(str(path.relative_to(self.disks)) for path in self.disks.rglob("dali-pipes-*"))

    def requeued(self) -> list[str]:
        log = self.directory / "scontrol.log"
        return log.read_text().splitlines() if log.exists() else []

    def srun_words(self) -> list[str]:
        """srun's arguments at its last start."""
        return (self.directory / "srun.log").read_text().splitlines()[-1].split("\t")

    def signal_task(self, node: int, number: signal.Signals) -> None:
        """Signal every process of a node's task, as Slurm does."""
        os.killpg(int((self.directory / f"task{node}.pid").read_text()), number)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    cluster = Slurm(tmp_path)
    yield cluster
    for process in cluster.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
