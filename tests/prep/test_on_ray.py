"""Commands of prep on a real Ray on this machine give the result of one process, also after a kill -9.

Ray starts once for the module, with two CPUs in one node.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dali_pipes.errors import PipesError
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_set import ShardSet
from prep.etl.run import Output, transform_shards
from prep.index import index_shards
from prep.inspect.info import describe_set
from prep.inspect.verify import verify
from prep.pack import target
from prep.shuffle.order import Algorithm
from prep.shuffle.request import Request
from prep.shuffle.shuffle import ShuffleReport, shuffle
from prep.sources.folders import pets
from prep.versions.add import add
from prep.versions.publish import open_newest
from prep.workers import WORKERS_KINDS, on_ray, open_workers
from tests.prep.ray_nodes import expect_only_its_tasks_were_repeated, killing, without_head
from tests.prep.shuffle.gated_store import GatedStore
from tests.prep.workers_tasks import double
from tests.programs import REPOSITORY, wait_until
from tests.shards import contents_of, make_samples, make_source, pack, write_pets, write_shards

look = on_ray._marks


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    """A Ray cluster with one node of two CPUs. This process is connected to it; tests can add nodes."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = pytest.importorskip("ray", reason="needs the extra ray")
    from ray.cluster_utils import Cluster

    made = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPOSITORY))  # of the workers
        try:
            try:
                node = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
                made = Cluster(initialize_head=True, head_node_args=node)
                ray.init(address=made.address, log_to_driver=False)
            except Exception as exc:  # noqa: BLE001 (Ray names no type)
                pytest.skip(f"no Ray can be started here: {exc}")
            yield made
        finally:
            ray.shutdown()
            if made is not None:
                made.shutdown()


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sets go to the workers, too."""
    monkeypatch.setattr(target, "MIN_SHARED_BYTES", 0)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """The directory by which a `GatedStore` stops its writer."""
    (tmp_path / "gate").mkdir()
    return tmp_path / "gate"


def contents(store: LocalStore, names: tuple[str, ...]) -> list[bytes]:
    return [store.read(name) for name in names]


@contextmanager
def worker_killed_at(gate: Path) -> Iterator[None]:
    """Kill a worker while it waits at the gate; assert that only its tasks were repeated."""
    thread = killing(gate, lambda worker: os.kill(worker, signal.SIGKILL))
    thread.start()
    yield
    thread.join()
    expect_only_its_tasks_were_repeated(gate)


def run_shuffle(shards: ShardSet, **options: Any) -> ShuffleReport:
    return shuffle(Request(shards, output_prefix="mixed-", algorithm=Algorithm(seed=7), shard_bytes=9000, **options))


def test_tasks_come_back_in_order_and_errors_as_they_are() -> None:
    reported: list[int] = []
    with open_workers("ray") as workers:
        assert list(workers.map(double, range(7), on_progress=reported.append)) == [0, 2, 4, 6, 8, 10, 12]
        assert sum(reported) == 7
        with pytest.raises(ValueError, match="expected a number of 0 or more, got -1"):
            list(workers.map(double, [1, -1, 2]))


def test_every_command_gives_the_results_of_one_process(tmp_path: Path) -> None:
    """Pack, info, index, transform, verify and add give the same reports and files."""
    first, more = (
        pets(write_pets(tmp_path / folder, {f"cat_{number}": 1 for number in numbers}))
        for folder, numbers in (("first", range(7)), ("more", range(10, 15)))
    )
    stores = {on: LocalStore(tmp_path / on) for on in WORKERS_KINDS}
    told: dict[str, list[Any]] = {}
    for on, store in stores.items():
        shards = ShardSet(store=store, names=pack(first, store=store, max_count=3, on=on, jobs=2).shards)
        told[on] = [asdict(describe_set(shards, num_pixels=4, on=on))]
        index_shards(shards, on=on)
        made = transform_shards(shards, Output(store=store, prefix="small/"), transform="pets", on=on)
        assert made.shards == tuple(f"small/{name}" for name in shards.names)
        report = verify(shards, decoder="pillow", on=on)
        assert (report.num_shards, report.num_samples, report.num_problems) == (3, 7, 0)
        assert add(more, open_newest(store.url, endpoint=None), max_count=2, on=on).num_samples == 12
        told[on].append(asdict(describe_set(open_newest(store.url, endpoint=None).shards, num_headers=3, on=on)))
    ours, theirs = ([info | {"url": ""} for info in told[on]] for on in WORKERS_KINDS)
    assert ours == theirs
    assert [(info["num_samples"], info["photos"]["image.jpg"]["num_headers"]) for info in ours] == [(7, 7), (12, 3)]
    files, expected = map(contents_of, stores.values())
    assert files.keys() == expected.keys()
    dated = {".dali-pipes/samples-manifest.safetensors", ".dali-pipes/samples-manifest@2.safetensors"}
    assert {name for name in files if files[name] != expected[name]} <= dated < files.keys()


def test_exchange_whose_worker_is_killed_gives_the_bytes_of_one_process(tmp_path: Path, gate: Path) -> None:
    """The kill comes in the middle of an output shard."""
    store = LocalStore(tmp_path / "shards")
    shards = ShardSet(store=store, names=pack(make_source(43), store=store, max_count=10, jobs=1).shards)
    held = GatedStore(tmp_path / "out", held="mixed-000001.tar", gate=gate)
    with worker_killed_at(gate):
        report = run_shuffle(shards, on="ray", target=held)
    assert report.engine == "exchange"
    assert contents(held, report.shards) == contents(store, run_shuffle(shards).shards)


def test_ctrl_c_leaves_no_half_written_shard_and_the_next_run_finishes(
    cluster: Any, tmp_path: Path, gate: Path
) -> None:
    """The test signals the process group, as a terminal does. Ray itself may crash, so any exit code but 0 is right."""
    out, expected = LocalStore(tmp_path / "out"), LocalStore(tmp_path / "expected")
    command = [sys.executable, "-m", "tests.prep.held_pack", str(out.directory), str(gate)]
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    with (
        (tmp_path / "said").open("wb") as said,
        subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=said, stderr=said, start_new_session=True
        ) as running,
    ):
        wait_until((gate / "pid").exists, "it never wrote its second shard")
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(120) != 0
    assert not (tmp_path / "out" / "samples-000001.tar").exists()
    (gate / "open").touch()
    report = pack(make_source(43), store=out, max_count=10, on="ray")
    pack(make_source(43), store=expected, max_count=10, jobs=1)
    assert contents(out, report.shards) == contents(expected, report.shards)


def look_elsewhere(paths: list[str]) -> list[Any]:
    """Marks that differ between this process and all others."""
    return [(*mark, os.getpid()) for mark in look(paths)]


def test_directory_that_a_node_does_not_share_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files on a disk of this machine alone are refused before anything is written."""
    monkeypatch.setattr(on_ray, "_marks", look_elsewhere)
    with pytest.raises(PipesError, match="is not the directory that it is here; --on ray needs a bucket, or a file"):
        pack(make_source(3), store=LocalStore(tmp_path / "out"), on="ray")
    assert not (tmp_path / "out").exists()


@pytest.mark.nightly
def test_pack_whose_node_is_killed_gives_the_shards_of_one_process(cluster: Any, tmp_path: Path, gate: Path) -> None:
    """Kill -9 ends a node's raylet and its worker with half of a shard written; another node repeats the task."""
    held = GatedStore(tmp_path / "killed", held="samples-000001.tar", gate=gate)
    expected = LocalStore(tmp_path / "expected")
    with without_head(cluster, tmp_path / "head") as kill:
        thread = killing(gate, kill)
        thread.start()
        report = pack(make_source(43), store=held, max_count=10, on="ray")
        thread.join()
    expect_only_its_tasks_were_repeated(gate)
    names = pack(make_source(43), store=expected, max_count=10, jobs=1).shards
    assert report.shards == names
    assert report.num_written == len(names) == 5
    assert contents(held, names) == contents(expected, names)
    left = [sorted(path.name for path in store.directory.iterdir()) for store in (held, expected)]
    assert left[0] == left[1]


def test_nodes_that_lack_the_package_are_named_and_get_what_the_runtime_environment_says(tmp_path: Path) -> None:
    """Here it takes the package away, as on nodes that have Ray alone."""
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "sitecustomize.py").write_text("import sys; sys.modules['dali_pipes'] = None")
    (tmp_path / "env.yaml").write_text(f"env_vars: {{PYTHONPATH: {tmp_path}/node}}\n")
    write_shards(tmp_path / "shards", make_samples([(8, 8)] * 2), per_shard=1)
    command = ["prep", "verify", tmp_path / "shards", "--on", "ray", "--runtime-env", tmp_path / "env.yaml"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-m", "dali_pipes", *command], env=own, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert re.match(
        r"error: a node of Ray cannot read the task: ModuleNotFoundError: .*; install .* --runtime-env", line
    )


@pytest.mark.nightly
def test_a_ray_of_our_own_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ray starts twice, in a directory of this user alone, and leaves no token in the home directory: every later Ray
    would ask for that token.
    """
    program = """
import pathlib, sys
from prep.workers import open_workers
from tests.prep.workers_tasks import double
for _ in range(2):
    with open_workers("ray", 1) as workers:
        found = list(workers.map(double, [1, 2]))
        import ray
        node = ray.nodes()[0]
        directory = pathlib.Path(node["RayletSocketName"]).parents[3]
        print(found, node["NodeManagerAddress"], oct(directory.stat().st_mode & 0o777), file=sys.stderr)
    assert directory.name.startswith("dp-ray-") and not directory.exists(), directory
"""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, env=own, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("[2, 4] 127.0.0.1 0o700\n")) == (0, 2), done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
