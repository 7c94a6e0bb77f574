"""The exchange on a real Ray of two nodes on this machine: the bytes of one process, also when a worker is killed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_set import ShardSet
from prep.pack.pack import pack
from prep.shuffle.order import Algorithm
from prep.shuffle.request import Request
from prep.shuffle.shuffle import ShuffleReport, shuffle
from prep.workers import open_workers
from tests.prep.ray_nodes import expect_only_its_tasks_were_repeated, killing, without_head
from tests.prep.shuffle.gated_store import GatedStore
from tests.prep.workers_tasks import double
from tests.sources import REPOSITORY, make_source


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one CPU each, to which this process is connected."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = pytest.importorskip("ray", reason="needs the extra ray")
    from ray.cluster_utils import Cluster

    old = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(REPOSITORY)  # of the workers
    made = None
    try:
        try:
            node = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
            made = Cluster(initialize_head=True, head_node_args=node)
            made.add_node(num_cpus=1, object_store_memory=80 << 20)
            made.wait_for_nodes()
        except Exception as exc:  # noqa: BLE001 (Ray names no type)
            pytest.skip(f"no Ray can be started here: {exc}")
        ray.init(address=made.address, log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        if made is not None:
            made.shutdown()
        if old is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = old


@pytest.fixture
def directory(tmp_path: Path) -> ShardSet:
    store = LocalStore(tmp_path / "shards")
    return ShardSet(store=store, names=pack(make_source(43), store=store, max_count=10).shards)


def run(shards: ShardSet, name: str, **options: Any) -> ShuffleReport:
    return shuffle(Request(shards, output_prefix=f"{name}-", algorithm=Algorithm(seed=7), shard_bytes=9000, **options))


@pytest.mark.usefixtures("cluster")
def test_tasks_of_ray_come_back_in_order_and_errors_as_they_are() -> None:
    reported: list[int] = []
    with open_workers("ray") as workers:
        assert list(workers.map(double, range(7), on_progress=reported.append)) == [0, 2, 4, 6, 8, 10, 12]
        assert sum(reported) == 7
        with pytest.raises(ValueError, match="expected a number of 0 or more, got -1"):
            list(workers.map(double, [1, -1, 2]))


@pytest.mark.usefixtures("cluster")
def test_exchange_on_ray_gives_the_bytes_of_one_process(directory: ShardSet) -> None:
    by_processes, on_ray = run(directory, "here"), run(directory, "ray", on="ray")
    assert on_ray.engine == "exchange"
    store = directory.store
    assert [store.read(name) for name in by_processes.shards] == [store.read(name) for name in on_ray.shards]


@pytest.mark.usefixtures("cluster")
def test_worker_that_is_killed_repeats_its_task_only(directory: ShardSet, tmp_path: Path) -> None:
    """Killed in the middle of an output; the run goes on to its end."""
    gate = tmp_path / "gate"
    gate.mkdir()
    target = GatedStore(tmp_path / "out", held="ray-000001.tar", gate=gate)
    thread = killing(gate, lambda worker: os.kill(worker, signal.SIGKILL))
    thread.start()
    report = run(directory, "ray", on="ray", target=target)
    thread.join()
    expect_only_its_tasks_were_repeated(gate)
    expected = run(directory, "here")
    assert [target.read(name) for name in report.shards] == [directory.store.read(name) for name in expected.shards]


def test_node_that_is_killed_repeats_its_tasks_only(cluster: Any, directory: ShardSet, tmp_path: Path) -> None:
    """The node, with its raylet, whose worker is in the middle of an output is killed: another one does its task."""
    gate = tmp_path / "gate"
    gate.mkdir()
    target = GatedStore(tmp_path / "out", held="ray-000001.tar", gate=gate)
    with without_head(cluster, tmp_path / "head") as kill:
        thread = killing(gate, kill)
        thread.start()
        report = run(directory, "ray", on="ray", target=target)
        thread.join()
    expect_only_its_tasks_were_repeated(gate)
    expected = run(directory, "here")
    assert [target.read(name) for name in report.shards] == [directory.store.read(name) for name in expected.shards]
