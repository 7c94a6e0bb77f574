"""`bench resume` on few samples: the record, the shards that are held back, and what a loader that waits is told."""

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.cli import bench as bench_command
from bench.engine.run import run_scenario
from bench.engine.scenario import Measured
from bench.reports.tables import report_text
from bench.scenarios import resume
from bench.scenarios.resume import (
    BUCKET,
    SITUATIONS,
    HeldBack,
    ResumeInputs,
    ResumeScenario,
    Start,
    named_shards,
)
from dali_pipes.errors import DataError
from dali_pipes.formats.names import index_name
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from tests.builders import make_samples, write_shards


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "SETTLE_S", 0.05)


def test_resume_writes_a_record_for_each_scenario(small_shards: Path, tmp_path: Path, memory_dir: Path) -> None:
    """The command resumes in the midst of 23 samples, warm and cold; no batch waits for a shard that it does not name,
    though others were asked for; all is gone afterwards.
    """
    out = tmp_path / "resume.json"
    arguments = ["resume", "--shards", str(small_shards), "--repeats", "2", "--batch-size", "3", "--crop", "32"]
    arguments += ["--device", "cpu", "--num-threads", "1", "--cold-shards", "23", "--cold-windows", "2"]
    arguments += ["--cache", str(memory_dir), "--json", str(out)]
    done = CliRunner().invoke(bench_command, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert "it waits for no other" in done.stdout
    report = json.loads(out.read_text())
    assert [(record["setting"]["situation"], record["loader"]) for record in report["records"]] == [
        (situation, where) for situation in SITUATIONS for where in ("epoch start", "resume")
    ]
    for record in report["records"]:
        assert [turn["figures"]["first_batch_s"] > 0 for turn in record["repeats"]] == [True, True]
    last = report["records"][-1]["repeats"]
    assert not any(turn["was_released"] for turn in last)
    assert max(turn["figures"]["num_held"] for turn in last) > 0
    assert report["data"] == [{"num_samples": 23, "num_shards": 4}]
    assert "Cold: in 23 shards, of which the resumed batch names 3" in done.stdout
    assert list(memory_dir.iterdir()) == []


class Impatient(ResumeScenario):
    """Holds back one of the shards that the batch names, too."""

    def measure(self, made: ResumeInputs, subject: Start, number: int) -> Measured:
        named = {where: frozenset(sorted(names)[1:]) for where, names in made.named.items()}
        return super().measure(dataclasses.replace(made, named=named), subject, number)


def test_loader_that_waits_for_others_is_found_out(small_shards: Path, memory_dir: Path) -> None:
    """One of the shards that the batch names is held back with the others: the server gives way, and the report says
    so.
    """
    report = run_scenario(
        Impatient(
            shards=resolve_shards(small_shards, endpoint=None),
            repeats=1,
            batch_size=3,
            crop=32,
            device="cpu",
            num_threads=1,
            cold_shards=23,
            cold_windows=2,
            work=memory_dir,
            patience_s=0.3,
        )
    )
    (last,) = report["records"][-1]["repeats"]
    assert last["was_released"]
    assert last["figures"]["first_batch_s"] > 0.3
    assert "it did not come within 0.3 s: IT WAITS FOR OTHERS" in report_text(report)


def test_held_back_shards_are_not_answered_for(small_shards: Path, tmp_path: Path) -> None:
    """A GET of one hangs until it is let go; indexes, and the shards that are named, come at once."""
    held = HeldBack()
    with resume.serve(tmp_path, held) as endpoint:
        store = AisStore(endpoint, BUCKET)
        store.create()
        for name in ("s-000000.tar", "s-000001.tar"):
            store.upload(name, small_shards / name)
        index_shards(resolve_shards(f"ais://{BUCKET}/s-", endpoint=endpoint))
        came: list[Any] = []

        def read() -> None:
            with store.open("s-000001.tar") as stream:
                came.append(stream.read(512))

        with held.all_but(frozenset(["s-000000.tar"])):
            reader = threading.Thread(target=read)
            reader.start()
            with store.open("s-000000.tar") as stream:
                assert len(stream.read(512)) == 512
            with store.open(index_name("s-000001.tar")) as stream:
                assert stream.read(8)
            reader.join(0.3)
            assert reader.is_alive()
            assert not came
            assert held.asked == {"s-000001.tar"}
        reader.join(10)
        assert len(came[0]) == 512


def test_named_shards_are_those_of_the_rows(tmp_path: Path) -> None:
    """Ten samples in shards of 4, 4, 2."""
    manifest = index_shards(
        resolve_shards(write_shards(tmp_path, make_samples([(16, 16)] * 10), per_shard=4, index=False), endpoint=None)
    )
    assert named_shards(manifest, [0, 3]) == {"s-000000.tar"}
    assert named_shards(manifest, [9, 4, 7, 8]) == {"s-000001.tar", "s-000002.tar"}


def test_too_few_samples_to_resume_in_are_refused(small_shards: Path, memory_dir: Path) -> None:
    """Two batches have no middle."""
    scenario = ResumeScenario(shards=resolve_shards(small_shards, endpoint=None), batch_size=8, work=memory_dir)
    with pytest.raises(DataError, match="holds 23 samples, which are less than three batches of 8; lower --batch-size"):
        run_scenario(scenario)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"cold_shards": 3, "cold_windows": 4}, "cold_windows must not be more than cold_shards=3, got 4"),
        ({"work": Path("/nowhere")}, "--cache '/nowhere': no such directory"),
    ],
)
def test_resume_bad_options_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    """Before anything is made."""
    with pytest.raises(ValueError, match=message):
        ResumeScenario(**({"work": tmp_path} | options))
