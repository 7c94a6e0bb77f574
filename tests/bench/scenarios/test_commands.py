"""Tests of `bench open`, `resume`, `windows` and `fetch` on few samples, and of the options that they refuse."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash

from bench.engine.scenario import run_scenario
from bench.scenarios.fetch import CLIENTS, PREFIX, FetchScenario, Objects, find_curl
from dali_pipes.errors import DataError
from dali_pipes.store.cluster.ais import AisStore
from tests.bench.conftest import invoke

if TYPE_CHECKING:
    from bench.engine.turn_process import TurnProcess


def records_of(command: str, out: Path, *arguments: object) -> tuple[dict[str, Any], str]:
    """Run a command, and return its record and its output."""
    done = invoke(command, *arguments, "--json", out)
    return json.loads(out.read_text()), done.stdout


def test_open_measures_ranks_and_listings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank lists the bucket. Each rank reads the manifest once, in a new interpreter (the test forks instead)."""
    from bench.engine import turn_process

    def forked(*arguments: Any, fresh: bool, **options: Any) -> TurnProcess:
        assert fresh
        return turn_process.TurnProcess(*arguments, **options)

    def called(*arguments: Any, fresh: bool, **options: Any) -> Any:
        assert fresh
        return turn_process.call_apart(*arguments, **options)

    monkeypatch.setattr("bench.scenarios.open.TurnProcess", forked)
    monkeypatch.setattr("bench.scenarios.open.call_apart", called)
    options = ["--num-shards", 30, "--shard-samples", 3, "--ranks", "2", "--repeats", 1]
    found, printed = records_of("open", tmp_path / "open.json", *options)
    records = found["records"]
    assert [(one["setting"]["server"], one["setting"]["ranks"]) for one in records] == [
        ("AIStore", 2), ("AIStore", "listing"), ("S3", 2), ("S3", "listing"),
    ]  # fmt: skip
    for one in records:
        (turn,) = one["repeats"]
        if one["setting"]["ranks"] == "listing":
            assert (turn["requests"], turn["num_names"]) == ({"list": 1}, 30)
        else:
            assert turn["requests"]["manifest"] == 2
            assert "list" not in turn["requests"]
            assert min(turn["figures"][name] for name in ("open_s", "read_s", "peak_mib")) > 0
    assert "listing" in printed


def test_resume_writes_a_record_for_each_situation(
    turns_here: None, small_shards: Path, tmp_path: Path, memory_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command resumes in the middle of 23 samples, warm and cold, and leaves no file behind."""
    from bench.scenarios import resume

    monkeypatch.setattr(resume, "SETTLE_S", 0.05)
    options = ["--shards", small_shards, "--repeats", 1, "--batch-size", 3, "--crop", 32, "--device", "cpu"]
    options += ["--num-threads", 1, "--cold-shards", 23, "--cold-windows", 2, "--cache", memory_dir]
    report, printed = records_of("resume", tmp_path / "resume.json", *options)
    assert [(record["setting"]["situation"], record["loader"]) for record in report["records"]] == [
        (situation, where) for situation in resume.SITUATIONS for where in ("epoch start", "resume")
    ]
    assert all(record["repeats"][0]["figures"]["first_batch_s"] > 0 for record in report["records"])
    assert report["data"] == [{"num_samples": 23, "num_shards": 4}]
    assert "Cold: the samples in 23 shards, from a server on this machine." in printed
    assert list(memory_dir.iterdir()) == []


def test_windows_writes_a_record_for_each_pair(
    turns_here: None, small_shards: Path, tmp_path: Path, memory_dir: Path
) -> None:
    """The command loads 48 samples with and without latency, wholly and half cached, and leaves no file behind."""
    options = ["--shards", small_shards, "--samples", 48, "--num-shards", 12, "--repeats", 1, "--batch-size", 5]
    options += ["--crop", 32, "--device", "cpu", "--num-threads", 1, "--fractions", "1.0,0.5", "--latencies-ms", "0,1"]
    report, printed = records_of("windows", tmp_path / "windows.json", *options, "--cache", memory_dir)
    assert "48 samples in 12 shards" in printed
    pairs = [(record["setting"]["cache"], record["setting"]["latency_ms"]) for record in report["records"]]
    assert pairs == [(1.0, 0), (1.0, 1), (0.5, 0), (0.5, 1)]
    for record in report["records"]:
        figures = record["repeats"][0]["figures"]
        assert min(figures["samples_per_s"], figures["cold_samples_per_s"]) > 0
        assert 0 <= figures["data_wait"] <= 1
    (data,) = report["data"]
    assert data["shuffle_window"] < min(data["extent_bytes"], data["shard_bytes"]) / 2
    assert list(memory_dir.iterdir()) == []


@pytest.mark.parametrize(("num_shards", "fraction"), [(12, 0.5), (1000, 0.1)])
def test_fitting_window_two_of_any_windows_fit(num_shards: int, fraction: float) -> None:
    """Two consecutive windows fit into the cache in any order of the shards."""
    from bench.scenarios.windows import fitting_window
    from dali_pipes.cache.extents import extent_starts
    from dali_pipes.order.passes import cut_windows
    from tests.simulated import manifest_of

    # Shards so small that indexes and rounding to pages take much of an extent.
    shard_bytes = np.random.default_rng(num_shards).integers(18_000, 27_000, num_shards)
    indexes = np.full(num_shards, 3000, np.int64)
    manifest = manifest_of([1000] * num_shards, shard_bytes=shard_bytes, index_bytes=indexes)
    extents = np.diff(extent_starts(manifest.shard_bytes, manifest.index_bytes))
    cache_bytes = int(extents.sum() * fraction)
    window_bytes = fitting_window(manifest, cache_bytes, batch_size=64)
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(num_shards)
        cuts = list(cut_windows(shard_bytes[order], shuffle_window=window_bytes))
        sizes = [int(extents[order[start:stop]].sum()) for start, stop in cuts]
        assert max(first + second for first, second in itertools.pairwise(sizes)) <= cache_bytes
        assert len(cuts) < num_shards / 1.2, "a window is more than a shard"
    with pytest.raises(ValueError, match=r"a cache of 5000 bytes does not hold two windows of one shard, .* take more"):
        fitting_window(manifest, 5000, batch_size=64)


OBJECT_BYTES = 300_000  # not a multiple of the page size
needs_curl = pytest.mark.skipif(find_curl() is None, reason="no curl in PATH")
CLIENT_PARAMS = ["ours", "sdk", pytest.param("curl", marks=needs_curl)]
FIGURES = ("mib_per_s", "cpu_s_per_gib")


@pytest.fixture(scope="module")
def stored(node: str) -> list[bytes]:
    """Store five objects in the bucket ``fetched``."""
    store = AisStore(node, "fetched")
    store.create()
    objects = [bytes([number]) * OBJECT_BYTES for number in range(5)]
    for number, data in enumerate(objects):
        store.write(f"o {number}", data)  # a name that must be quoted in a URL
    return objects


@pytest.fixture
def task(node: str, stored: list[bytes], tmp_path: Path) -> Objects:
    return Objects(
        endpoint=node,
        bucket="fetched",
        server_pid=None,
        names=[f"o {number}" for number in range(len(stored))],
        object_bytes=OBJECT_BYTES,
        checksums=[xxhash.xxh64_intdigest(data) for data in stored],
        connections=3,
        directory=tmp_path,
        checked=3,
    )


@needs_curl
def test_fetch_writes_a_record_for_each_client(turns_here: None, tmp_path: Path) -> None:
    """The command times all three clients, shows the CPU use of the server, and leaves nothing in the cache."""
    out, cache = tmp_path / "fetch.json", tmp_path / "cache"
    cache.mkdir()
    arguments = ["--object-bytes", "300kB", "--num-objects", 5, "--connections", 3, "--repeats", 1]
    done = invoke("fetch", *arguments, "--cache", cache, "--json", out)
    assert [line.split("  ")[0] for line in done.stdout.splitlines()[2:5]] == ["ours", "sdk", "curl"]
    assert "x sdk" in done.stdout
    report = json.loads(out.read_text())
    assert [record["loader"] for record in report["records"]] == ["ours", "sdk", "curl"]
    for record in report["records"]:
        figures = record["repeats"][0]["figures"]
        assert min(figures[figure] for figure in FIGURES) > 0
        assert figures["server_cpu_s_per_gib"] >= 0
    options = {"connections": 3, "object_bytes": 300_000, "num_objects": 5, "repeats": 1, "source": "own server"}
    assert report["options"].items() >= options.items()
    assert report["environment"]["versions"]["aistore"]
    assert list(cache.iterdir()) == []


def test_fetch_from_a_cluster_makes_and_destroys_its_own_bucket(turns_here: None, node: str, tmp_path: Path) -> None:
    """The record has no figures of the server. The command never writes or destroys a bucket that it did not make."""
    scenario = FetchScenario(object_bytes=1000, num_objects=2, repeats=1, clients=["sdk"], work=tmp_path, endpoint=node)
    report = run_scenario(scenario)
    assert [record["loader"] for record in report["records"]] == ["sdk"]
    assert report["options"]["source"] == "AIStore"
    assert "server_cores" not in report["records"][0]["repeats"][0]["figures"]
    store = AisStore(node, PREFIX)
    assert not store.exists()
    store.create()
    try:
        with pytest.raises(ValueError, match=f"bucket 'ais://{PREFIX}' is there already at {node}"):
            run_scenario(scenario)
        assert store.list("") == []
    finally:
        store.client.bucket(PREFIX).delete()


@pytest.mark.parametrize("client", CLIENT_PARAMS)
def test_client_reads_all_and_leaves_nothing(task: Objects, client: str) -> None:
    """A client checks the size of each object and one checksum a turn, and removes the files that it wrote."""
    assert CLIENTS[client](task).cpu_s > 0
    with pytest.raises(DataError, match="xxhash2"):
        CLIENTS[client](task._replace(checksums=[checksum ^ 1 for checksum in task.checksums]))
    if client != "ours":  # our client asks for exactly this number of bytes
        with pytest.raises(DataError, match=rf"object 'o 0' has {OBJECT_BYTES} bytes, expected 1234"):
            CLIENTS[client](task._replace(object_bytes=1234))
    assert list(task.directory.iterdir()) == []
