"""A document's tables are made anew from records, and nothing else in it changes; every record can be shown."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.cli import bench as bench_command
from bench.reports.tables import STOP, update_document
from dali_pipes.errors import DataError
from tests.bench.conftest import invoke

from .records import record, report

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"
DOCUMENT = f"""# Title

<!-- bench report results/run.json -->

| old |

{STOP}

Between.

  <!-- bench report results/run.json cpu_ms_per_sample -->
{STOP}
After.
"""


@pytest.fixture
def document(tmp_path: Path) -> Path:
    (tmp_path / "results").mkdir()
    run = report(record("dali", 900, 2.5, decode="dali"), record("webloader", 300, 7.5))
    (tmp_path / "results" / "run.json").write_text(json.dumps(run))
    path = tmp_path / "README.md"
    path.write_text(DOCUMENT)
    return path


def test_tables_between_marks_are_replaced(document: Path) -> None:
    """The marks stay, with what stands around them; a second time nothing changes."""
    assert update_document(document)[1]
    text = document.read_text()
    assert "| old |" not in text
    assert text.startswith("# Title\n\n<!-- bench report results/run.json -->\n\n| loader ")
    assert f"\n\n{STOP}\n\nBetween.\n\n  <!-- bench report" in text
    assert text.endswith(f"{STOP}\nAfter.\n")
    first, second = text.split("Between.")
    assert "samples/s" in first
    assert "samples/s" not in second
    assert "CPU-ms/sample" in second
    assert update_document(document) == (2, False)
    assert document.read_text() == text


def test_check_writes_nothing_and_fails_where_a_table_is_old(document: Path, tmp_path: Path) -> None:
    """For CI, over all documents that are named: exit 1 before the update, 0 after it."""
    other = tmp_path / "other.md"
    other.write_text(DOCUMENT)
    update_document(other)
    both = ["report", "--update", str(document), "--update", str(other)]

    def run(*arguments: str) -> int:
        done = CliRunner().invoke(bench_command, [*both, *arguments], catch_exceptions=False, standalone_mode=False)
        return int(done.return_value)

    assert run("--check") == 1
    assert document.read_text() == DOCUMENT
    assert run() == 0
    assert run("--check") == 0
    assert other.read_text() == document.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# nothing", "no line like '<!-- bench report RECORD"),
        ("\n<!-- bench report results/run.json -->\n", "line 2: the table that begins here has no end"),
        (f"<!-- bench report a -->\n<!-- bench report b -->\n{STOP}", "line 1: the table that begins here has no end"),
        (
            f"<!-- bench report results/run.json speed -->\n{STOP}",
            "a figure must be one of samples_per_s, .*, got 'speed'",
        ),
        (
            f"\n\n<!-- bench report results/run.json --baseline spdl -->\n{STOP}",
            r"line 3: --baseline must be of dali, webloader:pil, got 'spdl'",
        ),
        (f"<!-- bench report results/run.json --loaders -->\n{STOP}", "'--loaders' requires an argument"),
        (f"<!-- bench report results/none.json -->\n{STOP}", "expected a benchmark's record"),
    ],
)
def test_bad_document_is_left_as_it_is(document: Path, text: str, message: str) -> None:
    """And what is wrong is said with its line."""
    document.write_text(text)
    with pytest.raises(DataError, match=message):
        update_document(document)
    assert document.read_text() == text


def test_one_record_makes_several_tables(document: Path) -> None:
    """A mark names baseline and loaders, in either way that options are written; figures stand beside them."""
    marks = ("--baseline dali samples_per_s", "--loaders=webloader --baseline=webloader:pil")
    document.write_text("\n".join(f"<!-- bench report results/run.json {mark} -->\n{STOP}" for mark in marks))
    update_document(document)
    first, second, _ = document.read_text().split(STOP)
    assert " x dali |" in first
    assert "CPU-ms" not in first
    assert " x webloader (pil) |" in second
    assert "| dali " not in second


def test_report_of_some_loaders_against_another(document: Path) -> None:
    """The command takes the same; of a document's tables the marks say it, and a loader that is not there is named."""
    run = str(document.parent / "results" / "run.json")
    arguments = ["report", run, "--baseline", "dali", "--loaders", "webloader,dali"]
    shown = invoke(*arguments)
    assert shown.stdout.splitlines()[0].count("x dali") == 2
    with pytest.raises(ValueError, match=r"--baseline must be of dali, webloader:pil, got 'spdl'"):
        invoke("report", run, "--baseline", "spdl")
    arguments = ["report", "--update", str(document), "--baseline", "dali"]
    with pytest.raises(ValueError, match="for a document's tables they stand in its marks"):
        invoke(*arguments)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_committed_record_can_be_shown(path: Path, tmp_path: Path) -> None:
    """Those of every benchmark; one of an example is no benchmark's, and said to be none."""
    if path.stem.startswith("pets-iou"):
        with pytest.raises(DataError, match=r"expected a benchmark's record, format .*, found 'None'"):
            invoke("report", str(path))
        return
    page = tmp_path / "page.md"
    invoke("report", str(path), "--markdown", str(page))
    assert path.stem in page.read_text()
    shown = invoke("report", str(path))
    assert len(shown.stdout.splitlines()) > 2


def test_report_draws_the_plots_of_runs(document: Path, tmp_path: Path) -> None:
    """A file each, into a directory that is made."""
    run = document.parent / "results" / "run.json"
    arguments = ["report", str(run), "--plots", str(tmp_path / "plots")]
    done = invoke(*arguments)
    assert done.stdout == ""
    assert f"wrote 4 plots to {tmp_path / 'plots'}" in done.stderr
    names = ("cpu_ms_per_sample", "samples_per_s", "time_to_first_batch_s", "wait_share")
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [f"run-{name}.svg" for name in names]


def test_report_needs_something_to_show() -> None:
    """Neither a record nor a document."""
    with pytest.raises(ValueError, match=r"name at least one record, or a document"):
        invoke("report")
    with pytest.raises(ValueError, match="--check goes with --update DOCUMENT"):
        invoke("report", "a.json", "--check")
