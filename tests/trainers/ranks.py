"""Run a function of a test as one process, or as several that train together on the CPU."""

import contextlib
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.tools.processes import end_with_main
from tests.docs.pages import REPOSITORY, run_python

PROGRAMS = REPOSITORY / "examples" / "trainers"


def need(*packages: str) -> None:
    """Skip the calling test or module if a package is missing; with REQUIRE_TRAINERS=1 fail instead."""
    for package in packages:
        if os.environ.get("REQUIRE_TRAINERS") == "1":
            importlib.import_module(package)
        else:
            pytest.importorskip(package, reason=f"{package} is not installed; make integrations")


def run_ranks(world_size: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``job(*arguments)`` returns in each of ``world_size`` new processes, by rank.

    Several processes have the environment that torchrun gives; the job, or its framework, joins the process group. If
    one rank fails, the others are killed: they may wait for it. The job is a function at the top of a module.
    """
    from torch.distributed import TCPStore

    # The ranks meet at this store. It holds its port, so no other process can take it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranks-") as name, contextlib.ExitStack() as resources:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps((job, arguments, os.getpid())))
        processes = []
        for rank in range(world_size):
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.trainers.ranks", folder, str(rank)],
                env=os.environ | launched_environment(rank, world_size, store.port),
                stdout=resources.enter_context((folder / f"{rank}.txt").open("wb")),
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
            )
            resources.callback(process.wait)
            resources.callback(process.kill)
            processes.append(process)
        codes: list[int | None] = [None]
        while not any(codes) and None in codes:
            time.sleep(0.02)
            codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            said = (folder / f"{rank}.txt").read_text(errors="replace")
            assert not code, f"rank {rank} of {len(codes)} ended with {code}: {said[-6000:]}"
        return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(world_size)]


def run_rank(folder: Path, rank: int) -> None:
    """Run the job in this process, which is one of its ranks."""
    import torch

    job, arguments, main_pid = pickle.loads((folder / "job").read_bytes())
    end_with_main(main_pid)
    # The same bits for any number of cores.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    result = job(*arguments)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    (folder / f"{rank}.result").write_bytes(pickle.dumps(result))


def launched_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun sets on one node; nothing for one process."""
    if world_size == 1:
        return {}
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    meeting = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent process listens on the port
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    return {name: str(value) for name, value in ranks.items()} | meeting


def launch(*command: str, folder: Path, num_processes: int = 1) -> str:
    """What a program prints that is started as users start it: by Python, or by torchrun if there are several.

    ``command`` is a file or ``-m`` and a module, then arguments.
    """
    if num_processes > 1:
        command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes), *command)
    printed = run_python(*command, folder=folder, OMP_NUM_THREADS="1")
    # Some versions of torch say on stdout that gloo is connected.
    return "".join(line for line in printed.splitlines(keepends=True) if "peer ranks" not in line)


def write_program(name: str, shards: Path, folder: Path) -> str:
    """The name of a file in ``folder``, beside ``shards``, with the program ``name`` of examples/trainers."""
    (folder / name).write_text((PROGRAMS / name).read_text())
    if not (folder / "shards").exists():
        (folder / "shards").symlink_to(shards)
    return name


def join_jax(port: int, *, num_devices: int) -> None:
    """Join JAX's processes at a kept port if torchrun's environment names several processes.

    JAX sees ``num_devices`` devices in each process. Call this before the first use of JAX.
    """
    import jax

    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={num_devices}"
    if "RANK" not in os.environ:
        return
    # Without these variables, only JAX knows this process's rank.
    rank, size, *_ = [int(os.environ.pop(name)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=size, process_id=rank)


if __name__ == "__main__":
    code = 0
    try:
        run_rank(Path(sys.argv[1]), int(sys.argv[2]))
    except BaseException:  # noqa: BLE001 (the test shows the error)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of a framework may wait for a rank that has failed
