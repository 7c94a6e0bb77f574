"""Commands of prep on a real Ray of two nodes on this machine: the result of one process, also after a kill -9."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dali_pipes.errors import DataError, PipesError, StoreError
from dali_pipes.formats.names import index_name
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_set import ShardSet
from prep.etl.local import Output, transform_shards
from prep.index import index_shards
from prep.inspect.verify import verify
from prep.pack import pack as packing
from prep.pack.pack import PackReport, pack
from prep.workers import WORKERS_KINDS, on_ray
from tests.prep.shuffle.gated_store import GatedStore
from tests.sources import REPOSITORY, make_source, write_pets

WAIT_S = 240.0
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
    monkeypatch.setattr(packing, "MIN_SHARED_BYTES", 0)


def contents(store: LocalStore, names: tuple[str, ...]) -> list[bytes]:
    return [store.read(name) for name in names]


def pack_with_kill(tmp_path: Path, kill: Callable[[int], object]) -> tuple[GatedStore, PackReport]:
    """Pack on Ray; ``kill`` gets the process id of the worker that is in the middle of shard 1."""
    gate = tmp_path / "gate"
    gate.mkdir()
    target = GatedStore(tmp_path / "killed", held="samples-000001.tar", gate=gate)

    thread = killing(gate, kill)
    thread.start()
    report = pack(make_source(43), store=target, max_count=10, on="ray")
    thread.join()
    return target, report


def test_an_address_without_a_ray_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(PipesError, match=f"no Ray answers at '127.0.0.1:{port}': Connection refused; is RAY_ADDRESS"):
        on_ray._check_answers(f"127.0.0.1:{port}")
    on_ray._check_answers("auto")  # Ray itself looks where that is


def check_packed(target: LocalStore, report: PackReport, directory: Path) -> None:
    """The shards are those of one process; of the killed writer a hidden file may be left, as of any killed process."""
    expected = LocalStore(directory)
    names = pack(make_source(43), store=expected, max_count=10, jobs=1).shards
    assert report.shards == names
    assert report.num_written == len(names) == 5
    assert contents(target, names) == contents(expected, names)
    assert target.directory is not None
    found = sorted(path.name for path in target.directory.iterdir() if not path.name.startswith(".partial-"))
    assert found == sorted(path.name for path in directory.iterdir())


def test_pack_whose_worker_is_killed_repeats_its_task(tmp_path: Path) -> None:
    """The worker dies by kill -9 with half of a shard written."""
    killed: list[int] = []

    def kill(process: int) -> None:
        assert process != os.getpid(), "the shard is written by a worker of Ray"
        os.kill(process, signal.SIGKILL)
        killed.append(process)

    target, report = pack_with_kill(tmp_path, kill)
    assert killed
    check_packed(target, report, tmp_path / "expected")


def killing(gate: Path, kill: Callable[[int], object]) -> threading.Thread:
    """A thread that calls ``kill`` with the worker that waits at the gate, and then opens it."""

    def wait_and_kill() -> None:
        deadline = time.monotonic() + WAIT_S
        while not (gate / "pid").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        try:
            kill(int((gate / "pid").read_text()))
        finally:
            (gate / "open").touch()

    return threading.Thread(target=wait_and_kill)


def test_index_whose_worker_is_killed_gives_the_files_of_one_process(tmp_path: Path) -> None:
    """The worker dies by kill -9 before it writes an index; the files are equal. Then all indexes are taken over."""
    stores = {on: LocalStore(tmp_path / on) for on in WORKERS_KINDS}
    for store in stores.values():
        names = pack(make_source(43), store=store, max_count=3, jobs=1).shards
    index_shards(ShardSet(store=stores["processes"], names=names))
    gate = tmp_path / "gate"
    gate.mkdir()
    held = GatedStore(tmp_path / "ray", held=index_name(names[6]), gate=gate)
    killed: list[int] = []

    def kill(process: int) -> None:
        assert process != os.getpid(), "the index is written by a worker of Ray"
        os.kill(process, signal.SIGKILL)
        killed.append(process)

    thread = killing(gate, kill)
    thread.start()
    before: list[int] = []
    index_shards(ShardSet(store=held, names=names), on="ray", on_before=before.append)
    thread.join()
    assert killed
    every = sorted(path.name for path in stores["processes"].directory.iterdir())
    found = sorted(path.name for path in stores["ray"].directory.iterdir() if not path.name.startswith(".partial-"))
    assert found == every
    assert contents(stores["ray"], tuple(every)) == contents(stores["processes"], tuple(every))
    index_shards(ShardSet(store=stores["ray"], names=names), on="ray", on_before=before.append)
    assert before[1] == len(names)
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
    from prep.sources.pets import pets

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


def test_file_that_is_gone_is_an_error_that_names_it(tmp_path: Path) -> None:
    """A file is deleted after the check of all records; its shard is not written."""
    from prep.sources.pets import pets

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
    from prep.sources.pets import pets

    source = pets(write_pets(tmp_path / "pets", {"cat_0": 1}))
    monkeypatch.setattr(on_ray, "_marks", look_elsewhere)
    with pytest.raises(PipesError, match="is not the directory that it is here; --on ray needs a bucket, or a file"):
        pack(source, store=LocalStore(tmp_path / "out"), on="ray")
    assert not (tmp_path / "out").exists()
