"""How well an order is shuffled: the measure, and that each contestant gives each sample once."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.engine.run import run_scenario
from bench.scenarios.shuffle import ShuffleScenario, total_variation
from dali_pipes.cli import main


def test_measure_is_zero_for_equal_batches_and_highest_in_order() -> None:
    """Four classes, batches of eight: the closest and the farthest there are."""
    labels = np.repeat(np.arange(4), 8)
    assert total_variation(np.arange(32).reshape(4, 8).T.ravel(), labels, batch_size=8) == 0
    assert total_variation(np.arange(32), labels, batch_size=8) == 0.75


def test_windows_on_dsorted_shards_are_as_good_as_uniform() -> None:
    """And buffers on sorted shards are not; each order was checked to give each sample once."""
    report = run_scenario(ShuffleScenario(num_samples=4000, num_shards=8, num_classes=16, batch_size=100, repeats=1))
    excess = {(record["order"].split("(")[0], record["shards"]): record["excess"] for record in report["records"]}
    assert excess["dali-pipes, shuffle_window='all'", "sorted"] == pytest.approx(0, abs=0.03)
    assert excess["dali-pipes, window of a quarter", "dSorted"] == pytest.approx(0, abs=0.03)
    assert excess["webdataset.shuffle", "sorted"] > 0.3
    assert excess["DALI, initial_fill=1024", "sorted"] > 0.3


def test_command_writes_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A small run, end to end."""
    arguments = ["--samples", "600", "--num-shards", "3", "--classes", "6", "--batch-size", "50", "--seeds", "1"]
    assert main(["bench", "shuffle", *arguments, "--json", str(tmp_path / "out.json")]) == 0
    assert "excess: 0 is a uniform shuffle" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "out.json").read_text())["records"]) == 9


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_classes must be in \[2, num_samples\], got 1"):
        ShuffleScenario(num_classes=1)
