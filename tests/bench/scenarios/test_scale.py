"""`bench scale` on small manifests: the record, and which windows count."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from bench.cli import bench as bench_command
from bench.scenarios.scale import ScaleScenario, measure, simulated_manifest
from dali_pipes.formats.manifest import Manifest


def test_scale_writes_a_record_for_each_pair(tmp_path: Path) -> None:
    """The command measures each size with each window."""
    out = tmp_path / "scale.json"
    arguments = ["scale", "--num-shards", "20,200", "--window-shards", "2,20", "--repeats", "2", "--json", str(out)]
    done = CliRunner().invoke(bench_command, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    report = json.loads(out.read_text())
    pairs = [(record["setting"]["num_shards"], record["setting"]["window_shards"]) for record in report["records"]]
    assert pairs == [(20, 2), (20, 20), (200, 2), (200, 20)]
    for record in report["records"]:
        assert len(record["repeats"]) == 2
        turn = record["repeats"][0]
        assert turn["figures"]["open_s"] == pytest.approx(sum(turn["stages"].values()))
        assert turn["peak_rss_mib"] >= turn["start_rss_mib"] > 0
        assert 0 < turn["window_samples"] <= 1100 * record["setting"]["window_shards"]
        assert (turn["figures"]["next_window_s"] is None) == (turn["window_s"] == [])
    assert "20 shards with windows of 2: manifest 0." in done.stdout


@pytest.mark.parametrize(
    ("num_shards", "window_shards", "num_windows"),
    [
        (100, 4, 9),  # some 25 windows: the second to the tenth
        (13, 10, 0),  # the second is what was left of the first
        (5, 100, 0),  # there is one only
    ],
)
def test_measure_counts_whole_windows(tmp_path: Path, num_shards: int, window_shards: int, num_windows: int) -> None:
    """At most nine after the first, and none that the set's end cut short."""
    path = tmp_path / "manifest.safetensors"
    path.write_bytes(simulated_manifest(num_shards).to_bytes())
    measured = measure(path, window_shards=window_shards)
    assert len(measured["window_s"]) == num_windows
    assert next(iter(measured["stages"])) == "manifest"
    assert list(measured["stages"])[-1] == "first_window"


def test_simulated_manifest_is_one_of_whole_tars() -> None:
    """The same number gives the same manifest; sizes are a tar's; it reads back."""
    manifest = simulated_manifest(50)
    assert manifest.digest == simulated_manifest(50).digest
    assert manifest.num_samples == 50_000
    assert not np.any(manifest.shard_bytes % 10_240)
    again = Manifest.from_bytes(manifest.to_bytes(), where="here")
    assert (again.digest, again.names[49]) == (manifest.digest, "simulated-00000049.tar")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_shards": [0]}, "num_shards must be positive numbers, got 0"),
        ({"window_shards": []}, "window_shards must be positive numbers, got none"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
    ],
)
def test_scale_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    """Before any manifest is made."""
    with pytest.raises(ValueError, match=message):
        ScaleScenario(**options)  # type: ignore[arg-type]


def test_scale_sizes_that_are_no_numbers_are_refused() -> None:
    """By the option's name."""
    with pytest.raises(ValueError, match="--num-shards must be whole numbers with commas between them, got '1e6'"):
        CliRunner().invoke(bench_command, ["scale", "--num-shards", "1e6"], catch_exceptions=False)
