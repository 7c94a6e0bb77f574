"""Run a function of a test as one process, or as several that train together on the CPU."""

import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

from bench.loaders.workers import worker_context
from bench.tools.processes import end_with_main
from tests.docs.pages import REPOSITORY, blocks_of

TIMEOUT_S = 200.0


def run_ranks(world_size: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``job(*arguments)`` returns in each of ``world_size`` new processes, by rank.

    Several processes have the environment that torchrun gives; the job, or its framework, joins the process group. If
    one rank fails, the others are killed: they may wait for it.

    Args:
        world_size: 1: no launcher's environment either.
        job: A function at the top of a module. A job that trains several times, as the unbroken and the broken run,
            needs one start of its framework.
        arguments: Plain values.
    """
    context, port = worker_context(), free_port()
    processes, receivers = [], {}
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run_rank, args=(sender, rank, world_size, port, os.getpid(), job, arguments))
        process.start()
        sender.close()  # so that the end of the process ends the pipe
        processes.append(process)
        receivers[receiver] = rank
    results: list[Any] = [None] * world_size
    try:
        while receivers:
            ready = connection.wait(list(receivers), timeout=TIMEOUT_S)
            assert ready, f"ranks {list(receivers.values())} gave no result in {TIMEOUT_S:.0f} s"
            for receiver in ready:
                rank = receivers.pop(receiver)
                try:
                    is_error, results[rank] = receiver.recv()
                except EOFError:
                    processes[rank].join()
                    is_error, results[rank] = True, f"exit code {processes[rank].exitcode}"
                assert not is_error, f"rank {rank} of {world_size}: {results[rank]}"
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        for process in processes:
            process.join()
    return results


def _run_rank(sender: Any, rank: int, world_size: int, port: int, main_pid: int, job: Any, arguments: Any) -> None:
    end_with_main(main_pid)
    os.environ |= launched_environment(rank, world_size, port)
    # The same bits for any number of cores.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        result = job(*arguments)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
        sender.send((False, result))
    except BaseException:
        sender.send((True, traceback.format_exc()))
        raise


def launched_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun sets on one node; nothing for one process."""
    if world_size == 1:
        return {}
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    return {name: str(value) for name, value in ranks.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def launch(*command: str, folder: Path, num_processes: int = 1) -> str:
    """What a program prints that is started as users start it: by Python, or by torchrun if there are several.

    Args:
        command: A file or ``-m`` and a module, then its arguments.
        folder: Where it runs.
        num_processes: Of torchrun.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    run = subprocess.run(
        [sys.executable, *(launcher if num_processes > 1 else []), *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    # Some versions of torch say on stdout that gloo is connected.
    return "".join(line for line in run.stdout.splitlines(keepends=True) if "peer ranks" not in line)


def write_program(name: str, shards: Path, folder: Path) -> str:
    """The name of a file in ``folder``, beside ``shards``, with the program ``name`` of docs/how-to/trainers.md.

    Its block begins with three backquotes and ``python NAME``.
    """
    _, programs = blocks_of(REPOSITORY / "docs" / "how-to" / "trainers.md")
    (folder / name).write_text(programs[name])
    if not (folder / "shards").exists():
        (folder / "shards").symlink_to(shards)
    return name


def launch_from_page(name: str, shards: Path, folder: Path, *arguments: str, num_processes: int = 1) -> str:
    """What a program of docs/how-to/trainers.md prints: see `write_program` and `launch`."""
    return launch(write_program(name, shards, folder), *arguments, folder=folder, num_processes=num_processes)


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
