"""Commands of prep on a real Ray of two nodes on this machine: the result of one process, also after a kill -9."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dali_pipes.errors import DataError, PipesError, StoreError
from dali_pipes.formats.names import index_name
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
from prep.versions.add import add
from prep.versions.publish import open_newest
from prep.workers import WORKERS_KINDS, on_ray, open_workers
from tests.prep.ray_nodes import WAIT_S, expect_only_its_tasks_were_repeated, killing, without_head
from tests.prep.shuffle.gated_store import GatedStore
from tests.prep.workers_tasks import double
from tests.programs import REPOSITORY
from tests.shards import make_source, pack, write_pets

look = on_ray._marks


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    """Two nodes of one CPU each, to which this process is connected."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = pytest.importorskip("ray", reason="needs the extra ray")
    from ray.cluster_utils import Cluster

    made = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPOSITORY))  # of the workers
        try:
            try:
                node = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
                made = Cluster(initialize_head=True, head_node_args=node)
                made.add_node(num_cpus=1, object_store_memory=80 << 20)
                made.wait_for_nodes()
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


def contents(store: LocalStore, names: tuple[str, ...]) -> list[bytes]:
    return [store.read(name) for name in names]


def test_ctrl_c_cancels_and_leaves_no_half_written_shard(cluster: Any, tmp_path: Path) -> None:
    """As a terminal sends it, to the command and all of its group. The next run writes what is missing.

    The command is a process of its own: a signal that pytest's process sends to itself once ended Ray's threads in it.
    """
    out, gate = tmp_path / "out", tmp_path / "gate"
    gate.mkdir()
    command = [sys.executable, "-m", "tests.prep.held_pack", str(out), str(gate)]
    with (tmp_path / "said").open("wb") as said:
        running = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=os.environ | {"RAY_ADDRESS": cluster.address},
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        with running:
            try:
                deadline = time.monotonic() + WAIT_S
                while not (gate / "pid").exists() and running.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.02)
                os.killpg(running.pid, signal.SIGINT)
                running.wait(WAIT_S)
            finally:
                running.kill()
    told = (tmp_path / "said").read_text()
    assert running.returncode == -signal.SIGINT, told
    assert "KeyboardInterrupt" in told
    names = {path.name for path in out.iterdir()}
    assert "samples-000001.tar" not in names
    assert not [name for name in names if name.startswith(".partial-")]
    (gate / "open").touch()
    report = pack(make_source(43), store=LocalStore(out), max_count=10, on="ray")
    expected = LocalStore(tmp_path / "expected")
    pack(make_source(43), store=expected, max_count=10, jobs=1)
    assert contents(LocalStore(out), report.shards) == contents(expected, report.shards)


def test_a_killed_worker_leaves_no_line_on_stdout(cluster: Any, tmp_path: Path) -> None:
    """What Ray says of it is on stderr, or nowhere: a program that reads a command's result is not disturbed."""
    out, gate = tmp_path / "out", tmp_path / "gate"
    gate.mkdir()
    thread = killing(gate, lambda worker: os.kill(worker, signal.SIGKILL))
    thread.start()
    done = subprocess.run(
        [sys.executable, "-m", "tests.prep.held_pack", str(out), str(gate)],
        cwd=REPOSITORY,
        env=os.environ | {"RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
    )
    thread.join()
    assert (done.returncode, done.stdout) == (0, "5\n"), done.stderr


def test_a_ray_of_our_own_leaves_nothing_behind(tmp_path: Path) -> None:
    """No token in the home directory, which every later Ray would ask for; and it starts twice."""
    program = """
from prep.workers import open_workers
from tests.prep.workers_tasks import double
for _ in range(2):
    with open_workers("ray", 1) as workers:
        found = list(workers.map(double, [1, 2]))
    print(found)
"""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env=own | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
    )
    assert (done.returncode, done.stdout) == (0, "[2, 4]\n[2, 4]\n"), done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_pack_whose_node_is_killed_gives_the_shards_of_one_process(cluster: Any, tmp_path: Path) -> None:
    """A node's raylet and its worker die by kill -9 with half of a shard written: another node repeats the task."""
    gate = tmp_path / "gate"
    gate.mkdir()
    target, expected = (
        GatedStore(tmp_path / "killed", held="samples-000001.tar", gate=gate),
        LocalStore(tmp_path / "expected"),
    )
    with without_head(cluster, tmp_path / "head") as kill:
        thread = killing(gate, kill)
        thread.start()
        report = pack(make_source(43), store=target, max_count=10, on="ray")
        thread.join()
    expect_only_its_tasks_were_repeated(gate)
    names = pack(make_source(43), store=expected, max_count=10, jobs=1).shards
    assert report.shards == names
    assert report.num_written == len(names) == 5
    assert contents(target, names) == contents(expected, names)
    left = [sorted(path.name for path in store.directory.iterdir()) for store in (target, expected)]
    assert left[0] == left[1]


def test_index_whose_worker_is_killed_gives_the_files_of_one_process(tmp_path: Path) -> None:
    """The worker dies by kill -9 before it writes the seventh index. The next run takes over all indexes."""
    stores = {on: LocalStore(tmp_path / on) for on in WORKERS_KINDS}
    for store in stores.values():
        names = pack(make_source(43), store=store, max_count=3, jobs=1).shards
    index_shards(ShardSet(store=stores["processes"], names=names))
    gate = tmp_path / "gate"
    gate.mkdir()
    held = GatedStore(tmp_path / "ray", held=index_name(names[6]), gate=gate)
    thread = killing(gate, lambda worker: os.kill(worker, signal.SIGKILL))
    thread.start()
    before: list[int] = []
    index_shards(ShardSet(store=held, names=names), on="ray", anew=True, on_before=before.append)
    thread.join()
    expect_only_its_tasks_were_repeated(gate)
    index_shards(ShardSet(store=stores["ray"], names=names), on="ray", on_before=before.append)
    assert before == [0, len(names)]
    every = sorted(path.name for path in stores["processes"].directory.iterdir())
    assert sorted(path.name for path in stores["ray"].directory.iterdir()) == every
    assert contents(stores["ray"], tuple(every)) == contents(stores["processes"], tuple(every))


def test_index_on_ray_names_the_shard_that_is_cut_off(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "out")
    names = pack(make_source(43), store=store, max_count=10, jobs=1).shards
    store.write(names[3], store.read(names[3])[:700])
    with pytest.raises(DataError, match=names[3]):
        index_shards(ShardSet(store=store, names=names), on="ray")
    assert store.find("samples-manifest.safetensors") is None


def test_pack_of_files_transform_and_verify_give_the_results_of_one_process(tmp_path: Path) -> None:
    """Files of a folder are packed, transformed and verified on Ray."""
    from prep.sources.folders import pets

    source = pets(write_pets(tmp_path / "pets", {f"cat_{number}": 1 + number % 2 for number in range(7)}))
    stores = {on: LocalStore(tmp_path / on) for on in WORKERS_KINDS}
    for on, store in stores.items():
        names = pack(source, store=store, max_count=3, on=on, jobs=2).shards
        shards = ShardSet(store=store, names=names)
        made = transform_shards(shards, Output(store=store, prefix="small/"), transform="pets", on=on)
        assert made.shards == tuple(f"small/{name}" for name in names)
        report = verify(shards, decoder="pillow", on=on)
        assert (report.num_shards, report.num_samples, report.num_problems) == (3, 7, 0)
    every = (*names, *made.shards)
    assert contents(stores["ray"], every) == contents(stores["processes"], every)


def test_add_and_info_give_the_results_of_one_process(tmp_path: Path) -> None:
    """All files of a version are equal; what info says, too, before the shards are indexed and afterwards."""
    from prep.sources.folders import pets

    first = pets(write_pets(tmp_path / "first", {f"cat_{number}": 1 for number in range(7)}))
    more = pets(write_pets(tmp_path / "more", {f"cat_{number}": 1 for number in range(10, 15)}))
    stores = {on: LocalStore(tmp_path / on) for on in WORKERS_KINDS}
    told: dict[str, list[Any]] = {}
    for on, store in stores.items():
        names = pack(first, store=store, max_count=3, jobs=1).shards
        told[on] = [describe_set(ShardSet(store=store, names=names), num_pixels=4, on=on)]
        index_shards(ShardSet(store=store, names=names))
        report = add(more, open_newest(store.url, endpoint=None), max_count=2, on=on)
        assert (report.version, report.num_shards, report.num_samples) == (2, 6, 12)
        grown = open_newest(store.url, endpoint=None).shards
        told[on] += [describe_set(grown, num_headers=number, on=on) for number in (3, 0)]
    ours, theirs = ([asdict(info) | {"url": ""} for info in told[on]] for on in WORKERS_KINDS)
    assert ours == theirs
    assert [info["num_samples"] for info in ours] == [7, 12, 12]
    assert [info["photos"]["image.jpg"]["num_headers"] for info in ours] == [7, 3, 12]
    assert ours[0]["photos"]["image.jpg"]["pixels"]["num_photos"] == 4
    every = sorted(path.name for path in stores["processes"].directory.iterdir())
    assert sorted(path.name for path in stores["ray"].directory.iterdir()) == every
    history = ["samples-manifest.safetensors", "samples-manifest@2.safetensors"]  # they say when
    for name in set(every) - set(history):
        assert stores["ray"].read(name) == stores["processes"].read(name)
    assert set(history) < set(every)


def run_shuffle(shards: ShardSet, name: str, **options: Any) -> ShuffleReport:
    return shuffle(Request(shards, output_prefix=f"{name}-", algorithm=Algorithm(seed=7), shard_bytes=9000, **options))


@pytest.mark.parametrize("killed", ["nobody", "worker"])
def test_exchange_gives_the_bytes_of_one_process(tmp_path: Path, killed: str) -> None:
    """Also if a worker is killed in the middle of an output: another one does its task."""
    store = LocalStore(tmp_path / "shards")
    shards = ShardSet(store=store, names=pack(make_source(43), store=store, max_count=10, jobs=1).shards)
    expected = run_shuffle(shards, "ray")
    if killed == "nobody":
        target: LocalStore = LocalStore(tmp_path / "out")
        report = run_shuffle(shards, "ray", on="ray", target=target)
    else:
        gate = tmp_path / "gate"
        gate.mkdir()
        target = GatedStore(tmp_path / "out", held="ray-000001.tar", gate=gate)
        thread = killing(gate, lambda worker: os.kill(worker, signal.SIGKILL))
        thread.start()
        report = run_shuffle(shards, "ray", on="ray", target=target)
        thread.join()
        expect_only_its_tasks_were_repeated(gate)
    assert report.engine == "exchange"
    assert contents(target, report.shards) == contents(store, expected.shards)


def test_tasks_come_back_in_order_and_errors_as_they_are() -> None:
    reported: list[int] = []
    with open_workers("ray") as workers:
        assert list(workers.map(double, range(7), on_progress=reported.append)) == [0, 2, 4, 6, 8, 10, 12]
        assert sum(reported) == 7
        with pytest.raises(ValueError, match="expected a number of 0 or more, got -1"):
            list(workers.map(double, [1, -1, 2]))


def test_file_that_is_gone_is_an_error_that_names_it(tmp_path: Path) -> None:
    """A file is deleted after the check of all records; its shard is not written."""
    from prep.sources.folders import pets

    directory = write_pets(tmp_path / "pets", {f"cat_{number}": 1 for number in range(4)})
    store = LocalStore(tmp_path / "out")

    def delete(_: object) -> None:
        (directory / "images" / "cat_2.jpg").unlink()

    with pytest.raises(StoreError, match=r"cannot read .*cat_2\.jpg"):
        pack(pets(directory), store=store, max_count=2, on="ray", check_components=delete)
    assert not (tmp_path / "out" / "samples-000001.tar").exists()


def look_elsewhere(paths: list[str]) -> list[Any]:
    """Marks that differ between this process and all others."""
    return [(*mark, os.getpid()) for mark in look(paths)]


def test_directory_that_a_node_does_not_share_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files on a disk of this machine alone are refused before anything is written."""
    from prep.sources.folders import pets

    source = pets(write_pets(tmp_path / "pets", {"cat_0": 1}))
    monkeypatch.setattr(on_ray, "_marks", look_elsewhere)
    with pytest.raises(PipesError, match="is not the directory that it is here; --on ray needs a bucket, or a file"):
        pack(source, store=LocalStore(tmp_path / "out"), on="ray")
    assert not (tmp_path / "out").exists()
