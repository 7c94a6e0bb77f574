"""Records are written whole, say what they are, and are read again; other versions are refused."""

import json
from pathlib import Path

import pytest

from bench.reports.record import check_target, read_run, shown_command, stamped, write_record
from dali_pipes.errors import DataError

from .records import record, report


def test_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    """All of it."""
    written = report(record("dali", 900, 2.5))
    write_record(written, tmp_path / "run.json")
    assert read_run(tmp_path / "run.json") == written


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "expected a benchmark's record, a JSON file"),
        ("[]", "expected a benchmark's record, format 'dali-pipes-bench-...', found 'list'"),
        ('{"records": []}', "expected a benchmark's record, format .*, found 'None'"),
        (
            '{"format": "dali-pipes-bench-fetch", "version": 1, "command": "dali-pipes bench fetch --repeats 9"}',
            "version 1 of .*-fetch'; this program reads version 2; make it anew: dali-pipes bench fetch --repeats 9",
        ),
        (
            '{"format": "dali-pipes-bench-run", "version": 9}',
            "version 9 .* anew: dali-pipes bench run --json",
        ),
        ('{"format": "dali-pipes-bench-fetch", "version": 2}', "expected a file that `bench fetch --json` wrote"),
        ('{"format": "dali-pipes-bench-run", "version": 2, "records": []}', "expected a file that `bench run --json`"),
        ('{"format": "dali-pipes-bench-run", "version": 2, "records": [{"repeats": []}]}', "expected a file that"),
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


def test_record_replaces_a_links_target_and_writes_to_a_pipe(tmp_path: Path) -> None:
    """A link stays a link; /dev/null stays a device."""
    (tmp_path / "link.json").symlink_to(tmp_path / "run.json")
    for path in (tmp_path / "link.json", Path("/dev/null")):
        check_target(path)
        write_record({"records": []}, path)
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "run.json").read_text()) == {"records": []}
    assert Path("/dev/null").is_char_device()
