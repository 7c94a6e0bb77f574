"""Records of `bench run --au` are compared as those of runs are."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.cli import bench
from bench.reports.comparable import read_comparable
from dali_pipes.errors import DataError

from .records import record, report

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


def compared(tmp_path: Path, before: dict[str, Any], after: dict[str, Any]) -> tuple[int, str]:
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, found in zip(paths, (before, after), strict=True):
        path.write_text(json.dumps(found))
    result = CliRunner().invoke(bench, ["compare", *map(str, paths)], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return int(result.return_value), result.output


def test_what_became_slower_is_told(tmp_path: Path) -> None:
    """Each loader by recipe: speed and CPU time."""
    code, said = compared(tmp_path, an_au(), an_au(speed=0.5))
    assert code == 1
    assert said.count("worse: ") == 4
    assert compared(tmp_path, an_au(), an_au())[0] == 0
    assert compared(tmp_path, an_au(), an_au(speed=2.0))[0] == 0


def test_figures_are_those_of_the_best_trial(tmp_path: Path) -> None:
    (tmp_path / "au.json").write_text(json.dumps(an_au()))
    first = read_comparable(tmp_path / "au.json")["records"][0]
    assert first["repeats"][1]["figures"] == {"samples_per_s": 301.0, "cpu_ms_per_sample": 2.0 + 1 / 99}
    assert first["setting"] == SETTING | {"recipe": "classification"}


def test_other_accelerators_data_and_benchmarks_are_not_compared(tmp_path: Path) -> None:
    other = copy.deepcopy(an_au())
    other["accelerator"]["name"] = "retinanet_b200"
    with pytest.raises(ValueError, match="recipe was 'accelerator resnet50_h100', is 'accelerator retinanet_b200'"):
        compared(tmp_path, an_au(), other)
    with pytest.raises(ValueError, match="not comparable: data was"):
        compared(tmp_path, an_au(), an_au() | {"data": {"num_samples": 40, "digest": "d" * 64}})
    run = report(record("dali", 900, 2.5)) | {"environment": ENVIRONMENT}
    with pytest.raises(ValueError, match="benchmark was 'dali-pipes-bench-au', is 'dali-pipes-bench-run'"):
        compared(tmp_path, an_au(), run)


@pytest.mark.parametrize("change", [{"records": [{}]}, {"version": 2}, {"options": 5}, {"records": None}])
def test_record_that_is_not_one_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(json.dumps(an_au() | change))
    with pytest.raises(DataError, match=r"bad\.json"):
        read_comparable(tmp_path / "bad.json")


def test_records_of_this_repository_are_comparable_with_themselves(tmp_path: Path) -> None:
    results = Path(__file__).resolve().parents[3] / "bench" / "results"
    paths = sorted(results.glob("au-*.json"))
    assert paths
    for path in paths:
        found = json.loads(path.read_text())
        assert compared(tmp_path, found, found)[0] == 0
