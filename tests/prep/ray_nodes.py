"""Helpers that kill Ray's workers and nodes in the middle of an object."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.programs import wait_until


def killing(gate: Path, kill: Callable[[int], object]) -> threading.Thread:
    """A thread that calls ``kill`` with the worker that waits at the gate, and then opens it."""

    def wait_and_kill() -> None:
        try:
            wait_until((gate / "pid").exists)
            kill(int((gate / "pid").read_text()))
        finally:
            (gate / "open").touch()

    return threading.Thread(target=wait_and_kill)


def expect_only_its_tasks_were_repeated(gate: Path) -> None:
    """Objects were written twice only where the killed worker, which waited at the gate, was the first writer."""
    killed = (gate / "pid").read_text()
    writers: dict[str, list[str]] = {}
    for line in (gate / "writes").read_text().splitlines():
        name, _, process = line.rpartition(" ")
        writers.setdefault(name, []).append(process)
    repeated = {name: each for name, each in writers.items() if len(each) > 1}
    assert repeated, "the task of the killed worker was done again"
    assert all(set(each[:-1]) == {killed} != {each[-1]} for each in repeated.values()), writers


def occupy(folder: str) -> None:
    """Keep a node's CPUs busy until the file `free` exists."""
    (Path(folder) / "busy").touch()
    while not (Path(folder) / "free").exists():
        time.sleep(0.05)


@contextlib.contextmanager
def without_head(cluster: Any, folder: Path) -> Iterator[Callable[[int], None]]:
    """Let only two new nodes run tasks, not the head; yield a function that kills a worker and its node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    cluster.wait_for_nodes()
    folder.mkdir()
    on_head = NodeAffinitySchedulingStrategy(cluster.head_node.node_id, soft=False)
    busy = ray.remote(num_cpus=2, scheduling_strategy=on_head)(occupy).remote(str(folder))
    wait_until((folder / "busy").exists)

    def kill(worker: int) -> None:
        raylet = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
        nodes = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}
        for process in (raylet, worker):
            os.kill(process, signal.SIGKILL)
        cluster.remove_node(nodes[raylet], allow_graceful=False)
        (folder / "killed").touch()

    try:
        yield kill
        assert (folder / "killed").exists()
    finally:
        (folder / "free").touch()
        ray.get(busy)
