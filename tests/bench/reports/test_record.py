"""Records are written whole, say what they are, and are read again, those of earlier versions too."""

import json
from pathlib import Path

import pytest

from bench.reports.record import read_run, shown_command, stamped, write_record
from bench.reports.summary import missing_parts, values_of
from bench.reports.tables import format_table
from dali_pipes.errors import DataError

from .records import record, report

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"


def test_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    """All of it."""
    written = report(record("dali", 900, 2.5))
    write_record(written, tmp_path / "run.json")
    assert read_run(tmp_path / "run.json") == written


def test_runs_of_before_there_was_a_format_are_read() -> None:
    """The committed record of version 0: medians are those that it holds, and the table can be made."""
    path = RESULTS / "pets-segmentation_amd-epyc-2-cores_2026-11-21.json"
    old, found = json.loads(path.read_text()), read_run(path)
    assert found["version"] == 0
    for before, after in zip(old["records"], found["records"], strict=True):
        assert sorted(values_of(after, "samples_per_s"))[2] == pytest.approx(before["samples_per_s"])
        assert sorted(values_of(after, "cpu_ms_per_sample"))[2] == pytest.approx(before["cpu_ms_per_sample"])
        assert sorted(values_of(after, "mib_per_s"))[2] == pytest.approx(before["mib_per_s"])
        assert max(values_of(after, "peak_memory_mib")) == before["peak_rss_mib"]
    assert format_table(found).splitlines()[2].startswith("dali  ")


def test_masks_of_older_records_have_their_present_name(tmp_path: Path) -> None:
    """They were called trimaps: a loader that gave them gives masks."""
    run = report(record("dali", 700, 2.5), record("x", 500, 3.5))
    first, second = run["records"]
    first["gives"] = ["image", "key", "label", "normalised", "trimap"]
    second["gives"] = ["image", "key", "label", "normalised"]
    second["outputs"]["not_compared"] = ["trimap"]
    write_record(run, tmp_path / "run.json")
    found = read_run(tmp_path / "run.json")["records"]
    assert [missing_parts(row) for row in found] == [[], ["mask"]]
    assert found[1]["outputs"]["not_compared"] == ["mask"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "expected a benchmark's record, a JSON file"),
        ("[]", "expected a benchmark's record, a JSON object, found list"),
        ('{"records": []}', "expected a file that `bench run --json` wrote"),  # no loader, no environment
        ('{"records": [{"loader": "dali"}]}', "expected a file that `bench run --json` wrote"),
        ('{"records": null, "environment": {"options": {}}}', "expected a file that `bench run --json` wrote"),
        ('{"format": "dali-pipes-bench-fetch"}', "expected .*-feed', found 'dali-pipes-bench-fetch'"),
        ('{"format": "dali-pipes-bench-run", "version": 9}', "version 9 of .*; this program reads versions 0 to 1"),
        ('{"format": "dali-pipes-bench-run", "version": 1, "records": []}', "expected a file that `bench run --json`"),
        ('{"format": "dali-pipes-bench-run", "version": 1, "records": [{"repeats": []}]}', "expected a file that"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """Issue 3: what is no record is said to be none, in one line that names the file."""
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(DataError, match=rf"run\.json': {message}"):
        read_run(tmp_path / "run.json")


def test_missing_file_is_named(tmp_path: Path) -> None:
    """And why."""
    with pytest.raises(DataError, match=r"none\.json': expected a benchmark's record.*No such file"):
        read_run(tmp_path / "none.json")


def test_every_record_begins_with_what_it_is() -> None:
    """The other benchmarks' too."""
    assert list(stamped({"records": []}, kind="windows")) == ["format", "version", "command", "records"]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["/opt/bin/dali-pipes", "bench", "run"], "dali-pipes bench run"),
        (["/src/dali_pipes/__main__.py", "bench", "run"], "dali-pipes bench run"),
        (["x", "--shards", "/data/secret/pets"], "x --shards .../pets"),
        (["x", "--shards=/data/secret/pets"], "x --shards=.../pets"),
        (["x", "--shards", "ais://pets/shuffled-"], "x --shards ais://pets/shuffled-"),  # of no machine
        (["x", "--endpoint", "http://node7:51080"], "x --endpoint http://ENDPOINT"),
        (["x", "--endpoint=https://u:p@node7"], "x --endpoint=https://ENDPOINT"),
        (["x", "--json", "~/out.json"], "x --json .../out.json"),
        (["x", "--repeats", "7"], "x --repeats 7"),
    ],
)
def test_command_is_shown_without_places_and_hosts(words: list[str], shown: str) -> None:
    """A record may be shown to anybody."""
    assert shown_command(words) == shown
