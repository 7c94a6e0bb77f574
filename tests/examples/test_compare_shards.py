"""The classification example on whole and on resized photos: a run for each, and a table."""

import json
from pathlib import Path

import compare_shards
import pytest

from dali_pipes.errors import PipesError
from dali_pipes.store.urls import resolve_shards
from tests.prep.commands.calls import run_prep

pytestmark = pytest.mark.usefixtures("torch_settings")


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
