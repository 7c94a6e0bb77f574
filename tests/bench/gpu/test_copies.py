"""Test the pass that counts copies: after everything is timed, once a point."""

from pathlib import Path
from typing import Any

import pytest

from bench.gpu import copies
from bench.gpu.copies import WHY_NOT, copied_bytes, count_copies, is_counted
from bench.gpu.scenarios import gpu_scenario
from bench.gpu.session import run_kept
from bench.gpu.sweep import GpuScenario
from bench.gpu.workload import Workload
from bench.reports.record import read_record, write_record


def test_copied_bytes_tells_pinned_from_pageable() -> None:
    """The trace is as torch.profiler exports it; copies within the device and to the host are not counted."""
    events = [
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "args": {"bytes": 1000}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 64}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 36}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "args": {"bytes": 5}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "args": {"bytes": 7}},
        {"ph": "M", "name": "process_name"},
    ]
    assert copied_bytes({"traceEvents": events}) == {"pageable": 1000, "pinned": 100}
    assert copied_bytes({}) == {}


@pytest.fixture
def timed(workload: Workload, tmp_path: Path) -> tuple[GpuScenario, Path]:
    """A scenario and its record, of points on the CPU."""
    scenario = gpu_scenario(
        "halves", workload, device="cpu", num_threads=1, batch_size=4, seconds=0.001, warm_up_s=0.0, repeats=1
    )
    run_kept(scenario, path := tmp_path / "gpu-halves.json")
    return scenario, path


def test_points_without_a_gpu_say_so(timed: tuple[GpuScenario, Path]) -> None:
    """Every point has a reason, and is not asked again."""
    scenario, path = timed
    assert not is_counted(read_record(path))
    count_copies(scenario, path)
    report = read_record(path)
    assert {record[WHY_NOT] for record in report["records"]} == {"no GPU is used"}
    assert is_counted(report)


def test_a_point_in_which_the_process_ended_is_not_counted_again(
    timed: tuple[GpuScenario, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record names it before it begins; the process that goes on leaves it out, and counts the others."""
    scenario, path = timed

    def ended(*_: object) -> Any:
        raise SystemExit(9)

    with monkeypatch.context() as patched:
        patched.setattr(copies, "_copied", ended)
        with pytest.raises(SystemExit):
            count_copies(scenario, path)
    count_copies(scenario, path)
    reasons = [record[WHY_NOT] for record in read_record(path)["records"]]
    assert reasons == ["the process ended while CUPTI counted", *["no GPU is used"] * 3]


def test_a_point_that_failed_is_left_out(timed: tuple[GpuScenario, Path]) -> None:
    """It has no figures that its copies could stand beside."""
    scenario, path = timed
    report = read_record(path)
    report["records"][1] = {name: report["records"][1][name] for name in ("variant", "label")} | {"error": "no memory"}
    write_record(report, path)
    count_copies(scenario, path)
    assert WHY_NOT not in read_record(path)["records"][1]
    assert is_counted(read_record(path))
