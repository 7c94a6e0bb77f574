"""`bench resume` on few samples: the record, and what is refused."""

import json
from pathlib import Path

import pytest

from bench.engine.scenario import run_scenario
from bench.scenarios import resume
from bench.scenarios.resume import SITUATIONS, ResumeScenario
from dali_pipes.errors import DataError
from dali_pipes.store.urls import resolve_shards
from tests.bench.conftest import invoke


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "SETTLE_S", 0.05)


def test_resume_writes_a_record_for_each_scenario(small_shards: Path, tmp_path: Path, memory_dir: Path) -> None:
    """The command resumes in the midst of 23 samples, warm and cold; all is gone afterwards."""
    out = tmp_path / "resume.json"
    arguments = ["resume", "--shards", str(small_shards), "--repeats", "2", "--batch-size", "3", "--crop", "32"]
    arguments += ["--device", "cpu", "--num-threads", "1", "--cold-shards", "23", "--cold-windows", "2"]
    arguments += ["--cache", str(memory_dir), "--json", str(out)]
    done = invoke(*arguments)
    report = json.loads(out.read_text())
    assert [(record["setting"]["situation"], record["loader"]) for record in report["records"]] == [
        (situation, where) for situation in SITUATIONS for where in ("epoch start", "resume")
    ]
    for record in report["records"]:
        assert [turn["figures"]["first_batch_s"] > 0 for turn in record["repeats"]] == [True, True]
    assert report["data"] == [{"num_samples": 23, "num_shards": 4}]
    assert "Cold: the samples in 23 shards, from a server on this machine." in done.stdout
    assert list(memory_dir.iterdir()) == []


def test_too_few_samples_to_resume_in_are_refused(small_shards: Path, memory_dir: Path) -> None:
    """Two batches have no middle."""
    scenario = ResumeScenario(shards=resolve_shards(small_shards, endpoint=None), batch_size=8, work=memory_dir)
    with pytest.raises(DataError, match="holds 23 samples, which are less than three batches of 8; lower --batch-size"):
        run_scenario(scenario)


def test_more_windows_than_shards_are_refused() -> None:
    with pytest.raises(ValueError, match="cold_windows must not be more than cold_shards=3, got 4"):
        ResumeScenario(cold_shards=3, cold_windows=4)
