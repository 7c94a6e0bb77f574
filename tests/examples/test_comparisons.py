"""Programs that compare: both loaders under the segmentation example; whole and resized photos under classification."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compare_loaders
import compare_shards
import numpy as np
import pytest
from processes import Process
from segmentation import CLASSES, evaluate, iou

import dali_pipes as dp
from bench.loaders.protocol import LoaderOptions
from dali_pipes.errors import PipesError
from dali_pipes.store.urls import resolve_shards
from tests.lazy import Lazy
from tests.prep.commands.calls import run_prep
from tests.shards import make_samples, write_shards

torch = Lazy("torch")

pytestmark = pytest.mark.usefixtures("torch_settings")

OPTIONS = ["--crop", "64", "--shrink", "2", "--batch-size", "4", "--lr", "3e-3"]


def test_losses_of_both_loaders_are_equal_step_by_step(photo_shards: Path, tmp_path: Path) -> None:
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


def test_losses_above_the_tolerance_are_an_error(photo_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Normalised photos are not equal bit for bit, and a tolerance of 0 says so."""
    monkeypatch.setitem(compare_loaders.TOLERANCES, "float32", 0.0)
    with pytest.raises(PipesError, match=r"float32: photos differ by up to \d\.\d+e-07, expected at most 0"):
        compare_loaders.main(["losses", "--shards", str(photo_shards), *OPTIONS, "--steps", "2"])


def test_batches_that_are_not_the_same_are_an_error(photo_shards: Path) -> None:
    """Another order, or other masks, are named with step and keys."""
    options = LoaderOptions(batch_size=4, crop=32, seed=1, device="cpu")
    shards = resolve_shards(str(photo_shards), endpoint=None)
    with compare_loaders.dali_feed(shards, options, shuffle=False) as feed:
        ours = next(feed())
    with compare_loaders.dali_feed(shards, options, shuffle=True) as feed:
        theirs = next(feed())
    compare_loaders._check_same(ours, ours, step=0)
    with pytest.raises(PipesError, match=r"step 3: dali_pipes read \['s00000', 's00001'.*WebLoader \['s0"):
        compare_loaders._check_same(ours, theirs, step=3)
    for name in ("mask", "label"):
        with pytest.raises(PipesError, match=rf"step 3: '{name}' differs .*keys \['s00000'"):
            compare_loaders._check_same(ours, ours | {name: ours[name] + 1}, step=3)


def test_iou_compares_all_seeds_of_both_loaders(
    photo_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run for each loader and seed; orders, so models, are not the same; the table says what the record does."""
    path = tmp_path / "iou.json"
    names = [str(photo_shards / f"s-{shard:06d}.tar") for shard in range(6)]
    arguments = ["--shards", *names[2:], "--val-shards", *names[:2], "--seeds", "0", "1", "--epochs", "2", *OPTIONS]
    assert compare_loaders.main(["iou", *arguments, "--json", str(path)]) == 0
    runs = json.loads(path.read_text())["runs"]
    assert [(run["loader"], run["seed"]) for run in runs] == [
        (loader, seed) for seed in (0, 1) for loader in ("dali", "webloader")
    ]
    assert len({tuple(run["iou"].values()) for run in runs}) == 4
    assert all(run["iou"]["background"] >= 0 for run in runs)
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "| loader | IoU | seed 0 | seed 1 | mean, 95 % interval |"
    shown = [f"{run['iou']['foreground']:.3f}" for run in runs if run["loader"] == "dali"]
    assert table[2].startswith(f"| dali | foreground | {' | '.join(shown)} | ")


def test_interval_is_students() -> None:
    """0.60, 0.62, 0.64: standard error 0.02 / sqrt(3), times 4.303."""
    assert compare_loaders.interval([0.60, 0.62, 0.64]) == "0.620 ± 0.050"
    assert compare_loaders.interval([0.5, 0.5]) == "0.500 ± 0.000"
    assert compare_loaders.interval([0.5]) == "0.500"


def test_iou_counts_each_class() -> None:
    """Both over either; a class that is nowhere has none."""
    found = iou(torch.tensor([[6, 2, 0], [0, 4, 0], [0, 0, 0]]))
    assert found.tolist()[:2] == [6 / 8, 4 / 6]
    assert found[2].isnan()


class Threshold(torch.nn.Module):
    """Background where it is dark, else foreground; never a boundary."""

    def forward(self, photo: torch.Tensor) -> torch.Tensor:
        bright = photo.mean(dim=1)
        return torch.stack([bright, -bright, torch.full_like(bright, -9.0)], dim=1)


@pytest.mark.parametrize(("rank", "counted"), [(0, [0, 4]), (3, [3])])
def test_evaluate_counts_what_is_in_the_photo_and_each_sample_once(
    tmp_path: Path, rank: int, counted: list[int]
) -> None:
    """Five samples on four ranks: the last step has one for rank 0, and for the others a row that does not count."""
    shards = write_shards(tmp_path, make_samples([(48 + 7 * i, 50 + 9 * i) for i in range(5)]), per_shard=5)
    process = Process(rank=0, world_size=1, device=torch.device("cpu"), is_launched=False)
    options: dict[str, Any] = {"batch_size": 1, "shuffle": False, "device": "cpu"}
    graph = dp.segmentation(crop=64)
    with dp.loader(str(shards), graph, rank=rank, world_size=4, **options) as loader:
        found = evaluate(Threshold(), loader, process, shrink=2)
    with dp.loader(str(shards), graph, rank=0, world_size=1, **options) as loader:
        samples = [batch for (batch,) in loader]
    confusion = np.zeros((len(CLASSES), len(CLASSES)), int)
    for sample in counted:
        bright = samples[sample]["image"][0].numpy().reshape(3, 32, 2, 32, 2).mean(axis=(0, 2, 4))
        mask = samples[sample]["mask"][0, 0].numpy()[1::2, 1::2]
        for row, column in np.argwhere(mask > 0):
            confusion[mask[row, column] - 1, 0 if bright[row, column] > 0 else 1] += 1
    union = confusion.sum(axis=0) + confusion.sum(axis=1) - confusion.diagonal()
    assert found.tolist() == (confusion.diagonal() / union).tolist()


# Classification on whole and on resized photos: a run for each, and a table


def test_all_sets_are_trained_with_all_seeds(
    photo_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small" / "s-"
    run_prep("recode", photo_shards, small, "--short-side", "40", "--masks", "nearest")
    run_prep("index", small)
    sets = [f"whole={photo_shards}/s-", f"small={small}"]
    path = tmp_path / "accuracy.json"
    arguments = ["--train", *sets, "--val", *sets, "--seeds", "0", "1", "--epochs", "1", "--crop", "32", "--width", "8"]
    assert compare_shards.main([*arguments, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert [(run["set"], run["seed"]) for run in report["runs"]] == [
        (name, seed) for seed in (0, 1) for name in ("whole", "small")
    ]
    assert all(0 <= run["accuracy"] <= 1 for run in report["runs"])
    assert report["train_bytes"]["small"] < report["train_bytes"]["whole"]
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "| set | seed 0 | seed 1 | mean, 95 % interval |"
    assert [row.split(" | ")[0] for row in table[2:]] == ["| whole", "| small", "| small - whole"]


def test_sets_of_other_samples_are_refused(photo_shards: Path) -> None:
    sets = {
        name: resolve_shards(f"{photo_shards}/{pattern}", endpoint=None)
        for name, pattern in (("whole", "s-*.tar"), ("part", "s-00000[0-3].tar"))
    }
    with pytest.raises(PipesError, match="'whole' and 'part' must hold the same samples, 13 are in one only"):
        compare_shards.check_same(sets)


def test_sets_of_other_classes_are_refused(photo_shards: Path) -> None:
    sets = {"whole": resolve_shards(f"{photo_shards}/s-*.tar", endpoint=None)}
    compare_shards.check_labels(sets, num_targets=38)
    with pytest.raises(PipesError, match=r"'whole' must have the labels of the pets, 1 to 2, found \d to \d"):
        compare_shards.check_labels(sets, num_targets=3)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--train", "a=x", "--val", "b=x"], "--val must name the sets of --train, a, in their order"),
        (["--train", "=x", "--val", "=x"], "--train must be NAME=URL, got '=x'"),
    ],
)
def test_misuse_is_named(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare_shards.main(arguments)
    assert text in capsys.readouterr().err
