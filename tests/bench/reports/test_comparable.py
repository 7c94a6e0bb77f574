"""Records of `bench run --au` and of `bench decode` are compared as those of runs are."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.cli import bench
from bench.reports.comparable import read_comparable
from dali_pipes.errors import DataError

ENVIRONMENT = {"cpu": {"model": "a", "cores_available": 2}, "memory_gib": 8.0, "gpus": []}
SETTING = {"threads": 2, "batch_size": 400, "crop": 224}


def an_au(*, speed: float = 1.0) -> dict[str, Any]:
    """One loader by two recipes, six searches of two trials each."""
    searches = [
        [
            {"accelerators": 1, "samples_per_s": 100.0, "cpu_ms_per_sample": 9.0},
            {"accelerators": 3, "samples_per_s": (300 + row) * speed, "cpu_ms_per_sample": (2 + row / 99) / speed},
        ]
        for row in range(6)
    ]  # fmt: skip
    return {
        "format": "dali-pipes-bench-au",
        "version": 1,
        "environment": ENVIRONMENT,
        "accelerator": {"name": "resnet50_h100"},
        "options": {"setting": SETTING, "repeats": 6},
        "data": {"num_samples": 10, "digest": "d" * 64},
        "records": [
            {"loader": "dali", "recipe": "classification", "repeats": searches},
            {"loader": "dali", "recipe": "encoded", "repeats": searches},
        ],
    }


def a_decode(*, speed: float = 1.0) -> dict[str, Any]:
    turns = [{"num_photos": 90, "wall_s": (1 + number / 99) / speed, "cpu_s": 0.9 / speed} for number in range(6)]
    return {
        "format": "dali-pipes-bench-decode",
        "version": 1,
        "environment": ENVIRONMENT,
        "num_photos": 30,
        "mean_bytes": 1000.5,
        "options": {"passes": 3, "repeats": 6, "seed": 7, "workers": [1]},
        "records": [{"decoder": name, "repeats": {"0": turns, "1": turns}} for name in ("pillow", "dali")],
    }


def compared(tmp_path: Path, before: dict[str, Any], after: dict[str, Any]) -> tuple[int, str]:
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, report in zip(paths, (before, after), strict=True):
        path.write_text(json.dumps(report))
    result = CliRunner().invoke(bench, ["compare", *map(str, paths)], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return int(result.return_value), result.output


@pytest.mark.parametrize(("made", "num_worse"), [(an_au, 4), (a_decode, 8)])
def test_what_became_slower_is_told(made: Any, num_worse: int, tmp_path: Path) -> None:
    """Each loader, or decoder, by recipe, or number of workers: speed and CPU time."""
    code, said = compared(tmp_path, made(), made(speed=0.5))
    assert code == 1
    assert said.count("worse: ") == num_worse
    assert compared(tmp_path, made(), made())[0] == 0
    assert compared(tmp_path, made(), made(speed=2.0))[0] == 0


def test_figures_are_those_of_the_best_trial_and_of_each_turn(tmp_path: Path) -> None:
    (tmp_path / "au.json").write_text(json.dumps(an_au()))
    (tmp_path / "decode.json").write_text(json.dumps(a_decode()))
    first = read_comparable(tmp_path / "au.json")["records"][0]
    assert first["repeats"][1]["figures"] == {"samples_per_s": 301.0, "cpu_ms_per_sample": 2.0 + 1 / 99}
    assert first["setting"] == SETTING | {"recipe": "classification"}
    second = read_comparable(tmp_path / "decode.json")["records"][1]
    assert (second["loader"], second["setting"]) == ("pillow", {"workers": 1})
    assert second["repeats"][0]["figures"] == pytest.approx({"samples_per_s": 90.0, "cpu_ms_per_sample": 10.0})


def test_other_accelerators_and_other_photos_are_not_compared(tmp_path: Path) -> None:
    other = copy.deepcopy(an_au())
    other["accelerator"]["name"] = "retinanet_b200"
    with pytest.raises(ValueError, match="recipe was 'accelerator resnet50_h100', is 'accelerator retinanet_b200'"):
        compared(tmp_path, an_au(), other)
    with pytest.raises(ValueError, match="not comparable: data was"):
        compared(tmp_path, a_decode(), a_decode() | {"num_photos": 40})
    with pytest.raises(ValueError, match="benchmark was 'dali-pipes-bench-au', is 'dali-pipes-bench-decode'"):
        compared(tmp_path, an_au(), a_decode())


@pytest.mark.parametrize("change", [{"records": [{}]}, {"version": 2}, {"options": 5}, {"records": None}])
@pytest.mark.parametrize("made", [an_au, a_decode])
def test_record_that_is_not_one_is_refused(change: dict[str, Any], made: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(json.dumps(made() | change))
    with pytest.raises(DataError, match=r"bad\.json"):
        read_comparable(tmp_path / "bad.json")


def test_records_of_this_repository_are_comparable_with_themselves(tmp_path: Path) -> None:
    results = Path(__file__).resolve().parents[3] / "bench" / "results"
    found = sorted([*results.glob("au-*.json"), *results.glob("decode_*.json")])
    assert found
    for path in found:
        report = json.loads(path.read_text())
        assert compared(tmp_path, report, report)[0] == 0
