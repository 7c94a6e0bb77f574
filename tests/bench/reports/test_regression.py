"""`bench compare`: what became worse is found and named, what is not comparable refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.cli import bench as bench_command
from bench.reports.regression import compare_runs

from .records import SEVEN, record, report

BEFORE = report(record("dali", 900, 2.5, decode="dali"), record("webloader", 300, 7.5))


def changed(samples_per_s: float, cpu_ms: float) -> dict[str, Any]:
    """A later run in which only dali is another."""
    return report(record("dali", samples_per_s, cpu_ms, decode="dali"), record("webloader", 300, 7.5))


@pytest.mark.parametrize(
    ("samples_per_s", "cpu_ms", "worse"),
    [
        (900, 2.5, []),  # the same
        (600, 2.5, ["samples_per_s"]),  # more is better: fewer is worse
        (1500, 2.5, []),  # faster
        (900, 5.0, ["cpu_ms_per_sample"]),  # less is better
        (900, 1.0, []),
        (600, 5.0, ["samples_per_s", "cpu_ms_per_sample"]),
        (880, 2.55, []),  # 2 %: within the threshold, and within the interval
    ],
)
def test_regression_is_what_is_worse_beyond_the_interval(samples_per_s: float, cpu_ms: float, worse: list[str]) -> None:
    verdict = compare_runs(BEFORE, changed(samples_per_s, cpu_ms))
    assert [change.figure for change in verdict.regressions] == worse
    assert all(change.record["loader"] == "dali" for change in verdict.regressions)


def test_threshold_is_what_is_not_called_worse() -> None:
    """A steady loss of 3 % is certain, but within the threshold. Three repeats are too few for a verdict."""
    steady = (1.0, 1.001, 0.999, 1.0005, 0.9995, 1.002, 0.998)
    before = report(record("dali", 900, 2.5, turns=steady))
    after = report(record("dali", 873, 2.5, turns=steady))
    assert compare_runs(before, after).changes[0].outcome == "within the threshold"
    assert compare_runs(before, after, threshold=0.01).changes[0].outcome == "worse"
    assert compare_runs(after, before, threshold=0.01).changes[0].outcome == "better"
    few, slower = (report(record("dali", speed, 2.5, turns=SEVEN[:3])) for speed in (900, 300))
    assert {change.outcome for change in compare_runs(few, slower).changes} == {"too few repeats"}
    assert compare_runs(few, report(*few["records"], record("spdl", 1, 1))).notes[0].startswith("only after: spdl")


def _without(what: str, value: object) -> dict[str, Any]:
    other = copy.deepcopy(BEFORE)
    place, _, name = what.rpartition("/")
    node: Any = other
    for part in filter(None, place.split("/")):
        node = node[int(part) if part.isdecimal() else part]
    node[name] = value
    return other


@pytest.mark.parametrize(
    ("what", "value", "message"),
    [
        ("environment/cpu/model", "Grace", "CPU model was AMD EPYC, is Grace"),
        ("environment/cpu/cores_available", 64, "CPU cores available was 2, is 64"),
        ("environment/gpus", ["H200"], r"GPUs was \[\], is \['H200'\]"),
        ("data/0/digest", "e" * 64, r"data was \[\(22, 'd+'\)\], is \[\(22, 'e+'\)\]"),
        ("options/source", "AIStore", "source was local files, is AIStore"),
        ("options/recipe", "classification", "recipe was .*, is classification"),
        ("options/epochs", 2, "epochs was 1, is 2"),
    ],
)
def test_runs_that_are_not_comparable_are_refused(what: str, value: object, message: str) -> None:
    other = _without(what, value)
    with pytest.raises(ValueError, match=f"the runs are not comparable: {message}.*--anyway"):
        compare_runs(BEFORE, other)
    assert compare_runs(BEFORE, other, anyway=True).changes


def test_busier_machine_is_in_no_ratio_to_a_loader_of_the_same_rounds() -> None:
    """A day on which each round is up to three times as slow for all: dali is as it was, spdl is worse, memory is."""
    days = tuple(factor * turn for factor, turn in zip((1.4, 3.0, 1.5, 1.7, 1.6, 2.0, 1.45), SEVEN, strict=True))
    before = report(record("dali", 900, 2.5), record("spdl", 500, 4), record("memory", 950, 2.2))
    slow = [record("dali", 900, 2.5, turns=days), record("spdl", 400, 4, turns=days), record("memory", 950, 2.2)]
    slow[2] = record("memory", 950, 2.2, turns=days)
    for records, mib in ((before["records"], 100.0), (slow, 130.0)):
        for repeat in records[0]["repeats"]:
            repeat["figures"]["loader_memory_mib"] = mib
    after = report(*slow)
    as_they_are = {change.record["loader"] for change in compare_runs(before, after).regressions}
    assert as_they_are == {"dali", "spdl", "memory"}
    verdict = compare_runs(before, after, relative_to="memory")
    assert [(change.record["loader"], change.figure) for change in verdict.regressions] == [
        ("dali", "loader_memory_mib"),  # of no machine: taken as it is
        ("spdl", "samples_per_s"),
    ]
    assert not any(change.record["loader"] == "memory" for change in verdict.changes)


def test_command_tells_by_its_exit_code(tmp_path: Path) -> None:
    paths = {"before": BEFORE, "after": changed(600, 2.5)}
    for name, run in paths.items():
        (tmp_path / name).write_text(json.dumps(run))
    before, after = (str(tmp_path / name) for name in paths)

    def compare(*arguments: str) -> int:
        done = CliRunner().invoke(bench_command, ["compare", *arguments], catch_exceptions=False, standalone_mode=False)
        return int(done.return_value)

    assert compare(before, before) == 0
    assert compare(before, after) == 1
    assert compare(after, before) == 0
    assert compare(before, after, "--figures", "cpu_ms_per_sample") == 0
    assert compare(before, after, "--threshold", "0.6") == 0
