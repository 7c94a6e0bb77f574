"""Programs that compare: both loaders under the segmentation example; whole and resized photos under classification."""

from __future__ import annotations

import json
from pathlib import Path

import compare_loaders
import pytest
from segmentation import iou

from dali_pipes.errors import PipesError
from tests.lazy import Lazy

torch = Lazy("torch")

pytestmark = pytest.mark.usefixtures("torch_settings")

OPTIONS = ["--crop", "64", "--shrink", "2", "--batch-size", "4", "--lr", "3e-3"]


def test_losses_of_both_loaders_are_equal_step_by_step(
    photo_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 steps, two epochs: on equal pixels the same bits; on normalised photos one rounding of float32 apart."""
    path = tmp_path / "losses.json"
    assert compare_loaders.main(["losses", "--shards", str(photo_shards), *OPTIONS, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    steps = report["uint8"]["steps"]
    assert len(steps) == 24
    assert all(step["loss_hex"][0] == step["loss_hex"][1] for step in steps)
    assert all(step["photos"] == 0 for step in steps)
    assert len({step["loss_hex"][0] for step in steps}) > 12
    largest = report["float32"]["largest differences"]
    assert 0 < largest["photos"] <= 1e-6
    assert largest["losses of one model"] <= 1e-6
    # Measured: 7e-4 on pets; a wrong sample or crop is 1e-2 and more.
    assert largest["losses of two trainings"] <= 5e-3
    # Normalised photos are not equal bit for bit, so a tolerance of 0 fails.
    monkeypatch.setitem(compare_loaders.TOLERANCES, "float32", 0.0)
    with pytest.raises(PipesError, match=r"float32: photos differ by up to \d\.\d+e-07, expected at most 0"):
        compare_loaders.main(["losses", "--shards", str(photo_shards), *OPTIONS, "--steps", "2"])


def test_iou_counts_each_class() -> None:
    """Both over either; a class that is nowhere has none."""
    found = iou(torch.tensor([[6, 2, 0], [0, 4, 0], [0, 0, 0]]))
    assert found.tolist()[:2] == [6 / 8, 4 / 6]
    assert found[2].isnan()


# Classification on whole and on resized photos: a run for each, and a table
