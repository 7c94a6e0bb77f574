"""`bench fetch` on tiny objects: the record, what is left behind, and what it finds wrong."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import xxhash

from bench.engine.scenario import run_scenario
from bench.scenarios.fetch import CLIENTS, PREFIX, FetchScenario, Objects, find_curl
from bench.tools.processes import touch_memory
from dali_pipes.errors import DataError
from dali_pipes.processes.programs import ServerProcess
from dali_pipes.store.cluster import embedded_node
from dali_pipes.store.cluster.ais import AisStore
from tests.bench.conftest import invoke

OBJECT_BYTES = 300_000  # no whole number of pages
needs_curl = pytest.mark.skipif(find_curl() is None, reason="no curl in PATH")
CLIENT_PARAMS = ["ours", "sdk", pytest.param("curl", marks=needs_curl)]
FIGURES = ("mib_per_s", "cpu_s_per_gib")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with embedded_node.start(tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture(scope="module")
def stored(server: ServerProcess) -> list[bytes]:
    """Five objects in the bucket ``b``."""
    store = AisStore(server.endpoint, "b")
    store.create()
    objects = [bytes([number]) * OBJECT_BYTES for number in range(5)]
    for number, data in enumerate(objects):
        store.write(f"o {number}", data)  # a name that must be quoted in a URL
    return objects


@pytest.fixture
def task(server: ServerProcess, stored: list[bytes], tmp_path: Path) -> Objects:
    return Objects(
        endpoint=server.endpoint,
        bucket="b",
        server_pid=None,
        names=[f"o {number}" for number in range(len(stored))],
        object_bytes=OBJECT_BYTES,
        checksums=[xxhash.xxh64_intdigest(data) for data in stored],
        connections=3,
        directory=tmp_path,
        checked=3,
    )


@needs_curl
def test_fetch_writes_a_record_for_each_client(tmp_path: Path) -> None:
    """The command times all three in turns, shows the server beside, and leaves nothing in the cache."""
    out, cache = tmp_path / "fetch.json", tmp_path / "cache"
    cache.mkdir()
    arguments = ["fetch", "--object-bytes", "300kB", "--num-objects", "5", "--connections", "3", "--repeats", "2"]
    arguments += ["--cache", str(cache), "--json", str(out)]
    done = invoke(*arguments)
    assert [line.split("  ")[0] for line in done.stdout.splitlines()[2:5]] == ["ours", "sdk", "curl"]
    assert "x sdk" in done.stdout
    report = json.loads(out.read_text())
    assert [record["loader"] for record in report["records"]] == ["ours", "sdk", "curl"]
    for record in report["records"]:
        assert len(record["repeats"]) == 2
        assert min(record["repeats"][0]["figures"][figure] for figure in FIGURES) > 0
        assert record["repeats"][0]["figures"]["server_cpu_s_per_gib"] >= 0
    options = {"connections": 3, "object_bytes": 300_000, "num_objects": 5, "repeats": 2, "source": "own server"}
    assert report["options"].items() >= options.items()
    assert report["environment"]["versions"]["aistore"]
    assert list(cache.iterdir()) == []


def test_fetch_from_a_cluster_makes_and_destroys_its_bucket(server: ServerProcess, tmp_path: Path) -> None:
    """With an endpoint there is no server of ours to measure, and no bucket left."""
    report = run_scenario(
        FetchScenario(
            object_bytes=1000, num_objects=2, repeats=1, clients=["sdk"], work=tmp_path, endpoint=server.endpoint
        )
    )
    assert [record["loader"] for record in report["records"]] == ["sdk"]
    assert report["options"]["source"] == "AIStore"
    assert "server_cores" not in report["records"][0]["repeats"][0]["figures"]
    assert not AisStore(server.endpoint, PREFIX).exists()


def test_fetch_does_not_touch_a_bucket_that_is_there(server: ServerProcess, tmp_path: Path) -> None:
    """Somebody else's bucket of that name is neither written nor destroyed."""
    store = AisStore(server.endpoint, PREFIX)
    store.create()
    try:
        scenario = FetchScenario(object_bytes=1000, clients=["sdk"], work=tmp_path, endpoint=server.endpoint)
        with pytest.raises(ValueError, match=f"bucket 'ais://{PREFIX}' is there already at {server.endpoint}"):
            run_scenario(scenario)
        assert store.exists()
        assert store.list("") == []
    finally:
        store.client.bucket(PREFIX).delete()


@pytest.mark.parametrize("client", CLIENT_PARAMS)
def test_client_reads_all_and_leaves_nothing(task: Objects, client: str) -> None:
    """What it stored is gone. The size of every object, and the checksum of one a turn, are those that were stored."""
    assert CLIENTS[client](task).cpu_s > 0
    with pytest.raises(DataError, match="xxhash2"):
        CLIENTS[client](task._replace(checksums=[checksum ^ 1 for checksum in task.checksums]))
    if client != "ours":  # which asks for so many bytes
        with pytest.raises(DataError, match=rf"object 'o 0' has {OBJECT_BYTES} bytes, expected 1234"):
            CLIENTS[client](task._replace(object_bytes=1234))
    assert list(task.directory.iterdir()) == []


def test_fetch_without_curl_leaves_it_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default it is left out; asked for, it is an error."""
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments = ["fetch", "--object-bytes", "1000", "--num-objects", "1", "--repeats", "1", "--cache", str(tmp_path)]
    done = invoke(*arguments)
    assert [line.split()[0] for line in done.stdout.splitlines()[2:4]] == ["ours", "sdk"]
    with pytest.raises(ValueError, match="'curl': no such program in PATH; install it"):
        invoke(*arguments, "--clients", "ours,curl")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": ["ours", "wget"]}, "clients must be of ours, sdk, curl, each once, got 'ours,wget'"),
        ({"clients": []}, "clients must be of ours, sdk, curl, each once, got ''"),
        ({"clients": ["sdk", "sdk"]}, "clients must be of ours, sdk, curl, each once, got 'sdk,sdk'"),
        (
            {"object_bytes": 1 << 60},
            "fetching needs .* --cache DIRECTORY, or take fewer or smaller objects",
        ),
    ],
)
def test_fetch_bad_options_are_refused(tmp_path: Path, options: dict[str, object], message: str) -> None:
    """Before anything is started."""
    with pytest.raises(ValueError, match=message):
        FetchScenario(**{"clients": ["sdk"], "work": tmp_path, **options})  # type: ignore[arg-type]


def test_touch_memory_leaves_half_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for, but never more than half: a benchmark must not be what the machine runs out of memory by."""
    assert touch_memory(3 << 20) == 3 << 20
    assert touch_memory(0) == 0
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2 << 20))
    assert touch_memory(1 << 40) == 1 << 20
