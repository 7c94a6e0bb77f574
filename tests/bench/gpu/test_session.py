"""A scenario goes on with its record, no matter what ended its process."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.gpu.scenario import GpuScenario, is_done, run_kept, take_scenario
from bench.gpu.workload import Workload
from bench.reports.record import read_record, write_record
from dali_pipes.errors import DataError, PipesError
from tests.bench.gpu.conftest import planned
from tests.programs import wait_until


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dying(GpuScenario):
    """A scenario whose process is killed in the turns of one point."""

    def measure(self, made: Any, subject: Any, number: int) -> dict[str, Any]:
        if subject.case.variant == "window only":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().measure(made, subject, number)


def test_a_point_that_ends_its_process_has_failed(workload: Workload, tmp_path: Path) -> None:
    """Another process goes on with the record, and takes the turns of the other points; nobody watches."""
    report = take_scenario(planned("roi", workload, of=Dying), tmp_path / "record.json")
    assert is_done(report)
    assert report["errors"]["window only, base"].startswith("the process ended in this turn: scenario 'roi' ended with")
    assert [(record["loader"], len(record["repeats"])) for record in report["records"]] == [("whole, then window", 2)]
    assert report == read_record(tmp_path / "record.json")


def test_what_is_late_or_was_lost_is_taken_later_and_nothing_else(workload: Workload, tmp_path: Path) -> None:
    """A later run adds only the missing turns and checks. A scenario without a turn has no record."""
    with pytest.raises(PipesError, match="'path': the time was over before its first turn; pass more --minutes"):
        take_scenario(planned("path", workload, deadline=time.monotonic() - 1), tmp_path / "path.json")
    for name in ("parity", "roi"):
        path = tmp_path / f"{name}.json"
        run_kept(planned(name, workload, deadline=time.monotonic() - 1), path)
        late = read_record(path)
        assert late["left_out"]
        assert not is_done(late)
        run_kept(planned(name, workload), path)
        report = read_record(path)
        assert is_done(report)
        assert report["left_out"] == []
        del report["records"][1]["repeats"][1 if name == "roi" else 0 :]
        write_record(report, path)
        run_kept(planned(name, workload), path)
        again = read_record(path)
        assert is_done(again)
        assert again["records"][0] == report["records"][0]
        assert len(again["records"][1]["repeats"]) == (2 if name == "roi" else 1)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_turn_that_hangs_is_ended_after_the_deadline(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is killed, and the record names the turn."""
    monkeypatch.setattr("bench.gpu.scenario.GRACE_S", 1.0)
    # One minute is enough for the turn to begin, even on a busy machine.
    started = planned("decode", workload, seconds=6000, deadline=time.monotonic() + 60)
    report = take_scenario(started, tmp_path / "record.json")
    assert report["at"] == "decode, base"
    assert not is_done(report)


def test_a_record_of_other_options_or_of_another_machine_is_refused(workload: Workload, tmp_path: Path) -> None:
    """Its figures must not stand beside new ones, nor for them: this record is whole."""
    path = tmp_path / "record.json"
    run_kept(planned("decode", workload, repeats=1), path)
    whole = read_record(path)
    assert is_done(whole)
    assert take_scenario(planned("decode", workload, repeats=1), path) == whole
    for name, fields, text in (
        ("options", {"batch_size": 8}, "made with other options or on another machine .other batch_size"),
        ("environment", {"commit": "another"}, "other commit"),
        ("environment", {"gpus": ["NVIDIA H100"]}, "other gpus"),
    ):
        write_record({**whole, name: whole[name] | fields}, path)
        with pytest.raises(DataError, match=text):
            take_scenario(planned("decode", workload, repeats=1), path)


COMMAND = (
    "bench", "gpu", "--scenarios", "roi", "--device", "cpu", "--no-sweep", "--num-photos", "8", "--batch-size", "4",
    "--num-threads", "1", "--seconds", "0.2", "--warm-up", "0", "--repeats", "4",
)  # fmt: skip


def turns_in(path: Path) -> int:
    return sum(len(record["repeats"]) for record in read_record(path)["records"]) if path.exists() else 0


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_command_that_is_killed_in_mid_scenario_goes_on(tmp_path: Path) -> None:
    """``kill -9`` loses the turn that was being taken. The record is whole at any time."""
    path = tmp_path / "gpu-roi.json"
    words = [sys.executable, "-m", "dali_pipes", *COMMAND, "-o", str(tmp_path)]
    with subprocess.Popen(words) as process:
        wait_until(lambda: turns_in(path) >= 5 or process.poll() is not None)  # each read finds a whole record
        assert process.poll() is None
        below = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    psutil.wait_procs(below, timeout=240)  # the scenario's process ends after the command
    killed = read_record(path)
    first = [record["repeats"] for record in killed["records"]]
    assert killed["at"] is not None
    resumed = subprocess.run(words, text=True, capture_output=True)
    assert resumed.returncode == 0, resumed.stderr
    report = read_record(path)
    assert is_done(report)
    assert [record["repeats"][: len(turns)] for record, turns in zip(report["records"], first, strict=True)] == first
    assert [len(record["repeats"]) for record in report["records"]] == [4, 4]
    assert "all done: 1 records and report.md" in resumed.stdout + resumed.stderr
