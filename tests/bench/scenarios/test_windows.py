"""`bench windows` on few samples: the record, and the arithmetic of windows that fit."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from bench.scenarios.windows import WindowsScenario, fitting_window
from dali_pipes.cache.extents import extent_starts
from dali_pipes.order.passes import cut_windows
from tests.bench.conftest import invoke
from tests.simulated import simulated_manifest


def test_windows_writes_a_record_for_each_pair(small_shards: Path, tmp_path: Path, memory_dir: Path) -> None:
    """The command loads 48 samples in 12 shards near and far, whole and half cached; all is gone."""
    out, cache = tmp_path / "windows.json", memory_dir
    arguments = ["windows", "--shards", str(small_shards), "--samples", "48", "--num-shards", "12", "--repeats", "2"]
    arguments += ["--batch-size", "5", "--crop", "32", "--device", "cpu", "--num-threads", "1", "--epochs", "2"]
    arguments += ["--fractions", "1.0,0.5", "--latencies-ms", "0,1", "--cache", str(cache), "--json", str(out)]
    done = invoke(*arguments)
    assert "48 samples in 12 shards" in done.stdout
    report = json.loads(out.read_text())
    pairs = [(record["setting"]["cache"], record["setting"]["latency_ms"]) for record in report["records"]]
    assert pairs == [(1.0, 0), (1.0, 1), (0.5, 0), (0.5, 1)]
    (data,) = report["data"]
    for record in report["records"]:
        assert len(record["repeats"]) == 2
        for turn in record["repeats"]:
            figures = turn["figures"]
            assert min(figures["samples_per_s"], figures["cold_samples_per_s"]) > 0
            assert 0 <= figures["data_wait"] <= 1
    assert data["shuffle_window"] < data["extent_bytes"] // 2
    assert data["shuffle_window"] < data["shard_bytes"] / 2
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(("num_shards", "fraction"), [(12, 0.5), (40, 0.2), (1000, 0.1)])
def test_fitting_window_two_of_any_windows_fit(num_shards: int, fraction: float) -> None:
    """Whatever order the shards come in, two windows that follow each other take no more than the cache."""
    manifest = simulated_manifest(num_shards)
    # Small shards, of which index and pages are much.
    shard_bytes = manifest.shard_bytes // 5000
    manifest = dataclasses.replace(manifest, shard_bytes=shard_bytes, index_bytes=manifest.index_bytes // 20)
    extents = np.diff(extent_starts(manifest.shard_bytes, manifest.index_bytes))
    cache_bytes = int(extents.sum() * fraction)
    window_bytes = fitting_window(manifest, cache_bytes, batch_size=64)
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(num_shards)
        cuts = list(cut_windows(shard_bytes[order], shuffle_window=window_bytes, ramp_up=False))
        sizes = [int(extents[order[start:stop]].sum()) for start, stop in cuts]
        assert max(first + second for first, second in itertools.pairwise(sizes)) <= cache_bytes
        assert len(cuts) < num_shards / 1.2, "a window is more than a shard"


def test_fitting_window_without_room_is_refused() -> None:
    """Two windows of one shard each are the least."""
    manifest = simulated_manifest(10)
    with pytest.raises(
        ValueError,
        match=r"a cache of 200000000 bytes does not hold two windows of one shard, .* take more --num-shards",
    ):
        fitting_window(manifest, 200_000_000, batch_size=64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fractions": (1.0, 0.0)}, r"fractions must be in \(0, 1\], each once, got \(1.0, 0.0\)"),
        ({"fractions": (1.5,)}, r"fractions must be in \(0, 1\]"),
        ({"fractions": ()}, r"fractions must be in \(0, 1\]"),
        ({"fractions": (0.5, 0.5)}, r"fractions must be in .*, each once, got \(0.5, 0.5\)"),
        ({"latencies_ms": (-1,)}, r"latencies_ms must be in \[0, 60000\)"),
    ],
)
def test_windows_bad_options_are_refused(tmp_path: Path, options: dict[str, object], message: str) -> None:
    """Before anything is made."""
    with pytest.raises(ValueError, match=message):
        WindowsScenario(**{"work": tmp_path, **options})  # type: ignore[arg-type]


def test_windows_fractions_that_are_no_numbers_are_refused() -> None:
    """By the option's name."""
    with pytest.raises(ValueError, match="--fractions must be numbers with commas between them, got 'half'"):
        invoke("windows", "--fractions", "half")
