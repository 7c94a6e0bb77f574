"""Records are written whole and read again. Tables, documents and plots are made from records."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from bench.cli import bench as bench_command
from bench.reports.figures import FIGURES
from bench.reports.plots import Mark, draw_lines, plots_of
from bench.reports.record import check_target, read_run, shown_command, write_record
from bench.reports.summary import median_interval, values_of
from bench.reports.tables import STOP, update_document
from dali_pipes.errors import DataError
from tests.bench.conftest import invoke

from .records import record, report


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "expected a benchmark's record, a JSON file"),
        ('{"format": "dali-pipes-bench-run", "version": 9}', "version 9 .* anew: dali-pipes bench run --json"),
        ('{"format": "dali-pipes-bench-fetch", "version": 2}', "expected a file that `bench fetch --json` wrote"),
        ('{"format": "dali-pipes-bench-run", "version": 2, "records": [{"repeats": []}]}', "expected a file that"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(DataError, match=rf"run\.json': {message}"):
        read_run(tmp_path / "run.json")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["/opt/bin/dali-pipes", "bench", "run"], "dali-pipes bench run"),
        (["/src/dali_pipes/__main__.py", "bench", "run"], "dali-pipes bench run"),
        (["x", "--shards", "/data/secret/pets"], "x --shards .../pets"),
        (["x", "--shards=/data/secret/pets"], "x --shards=.../pets"),
        (["x", "--shards", "ais://pets/shuffled-"], "x --shards ais://pets/shuffled-"),  # names no machine
        (["x", "--endpoint", "http://node7:51080"], "x --endpoint http://ENDPOINT"),
        (["x", "--endpoint=https://u:p@node7"], "x --endpoint=https://ENDPOINT"),
        (["x", "--json", "~/out.json"], "x --json .../out.json"),
        (["x", "--repeats", "7"], "x --repeats 7"),
    ],
)
def test_command_is_shown_without_places_and_hosts(words: list[str], shown: str) -> None:
    """The command in a record is safe to publish: it has no folders and no hosts."""
    assert shown_command(words) == shown


def test_record_replaces_a_links_target_and_writes_to_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "run.json")
    for path in (tmp_path / "link.json", Path("/dev/null")):
        check_target(path)
        write_record({"records": []}, path)
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "run.json").read_text()) == {"records": []}
    assert Path("/dev/null").is_char_device()


RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"
DOCUMENT = f"""# Title

<!-- bench report results/run.json -->

| old |

{STOP}

Between.

  <!-- bench report results/run.json --baseline=dali --loaders dali cpu_ms_per_sample -->
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


def test_check_writes_nothing_and_fails_where_a_table_is_old(document: Path, tmp_path: Path) -> None:
    """CI checks several documents in one call. An update replaces only the text between the marks."""
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
    text = document.read_text()
    assert other.read_text() == text
    assert "| old |" not in text
    assert text.startswith("# Title\n\n<!-- bench report results/run.json -->\n\n| loader ")
    assert text.endswith(f"{STOP}\nAfter.\n")
    first, second = text.split("Between.")
    assert "samples/s" in first
    assert "samples/s" not in second
    assert " x dali |" in second
    assert "| webloader " not in second


def test_two_records_stand_side_by_side(document: Path) -> None:
    """The table has the loaders that are in both records. Each note begins with its recipe."""
    other = report(record("webloader", 150, 9.0), record("dali", 450, 5.0, decode="dali"), record("spdl", 1, 1))
    other["options"] = other["options"] | {"recipe": "evaluation"}
    (document.parent / "results" / "other.json").write_text(json.dumps(other | {"quiet_ms": [20.0, 21.0, 24.0]}))
    document.write_text(f"<!-- bench report results/run.json,results/other.json samples_per_s -->\n{STOP}\n")
    update_document(document)
    lines = document.read_text().splitlines()
    titles, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    assert titles[0] == "loader"
    assert [title.partition(":")[2].strip() for title in titles[1:]] == ["samples/s", "x webloader (pil)"] * 2
    assert titles[3].startswith("evaluation: ")
    assert [(row[0], row[1].split()[0], row[3].split()[0]) for row in rows] == [
        ("dali", "900", "450"),
        ("webloader (pil)", "300", "150"),
    ]
    notes = [line for line in lines if line.startswith("* ")]
    assert [note.partition(" Medians of 7 ")[0] for note in notes if "Medians" in note] == ["* run:", "* evaluation:"]
    assert [note.partition(" Measured on 2026-11-21")[0] for note in notes if "Measured" in note] == [
        "* run:",
        "* evaluation:",
    ]
    assert any("a fixed loop on all cores, between the turns: 21 ms (20-24)." in note for note in notes)


def test_records_that_vary_a_setting_cannot_stand_side_by_side(document: Path) -> None:
    sweep = report(record("dali", 900, 1.0), record("dali", 800, 1.1, setting={"batch_size": 16}))
    (document.parent / "results" / "sweep.json").write_text(json.dumps(sweep))
    document.write_text(f"<!-- bench report results/run.json,results/sweep.json -->\n{STOP}\n")
    with pytest.raises(DataError, match="give a mark for each"):
        update_document(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n<!-- bench report results/run.json -->\n", "line 2: the table that begins here has no end"),
        (f"<!-- bench report a -->\n<!-- bench report b -->\n{STOP}", "line 1: the table that begins here has no end"),
        (f"<!-- bench report results/none.json -->\n{STOP}", "expected a benchmark's record"),
        ("<!-- bench -->", "no line like '<!-- bench report .* says where a table goes"),
        (f"<!-- bench report results/run.json --x -->\n{STOP}", "line 1: No such option.* In 'results/run.json --x'"),
        (f"<!-- bench report results/run.json speed -->\n{STOP}", "line 1: a figure must be one of .*, got 'speed'"),
        (f"<!-- bench report results/run.json --baseline x -->\n{STOP}", "--baseline must be of dali, .*, got 'x'"),
    ],
)
def test_bad_document_is_left_as_it_is(document: Path, text: str, message: str) -> None:
    document.write_text(text)
    with pytest.raises(DataError, match=message):
        update_document(document)
    assert document.read_text() == text


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


def marks_of(run: dict[str, Any], axis: str) -> list[Mark]:
    """Return one mark for the samples/s of each record."""
    name = "samples_per_s"
    return [Mark(row, FIGURES[name], values_of(row, name), row["setting"][axis]) for row in run["records"]]


def test_lines_lie_in_their_places() -> None:
    """Each point lies at its value of the setting and has a whisker. The axis of the figure begins at zero."""
    places = [0.0, 20.0, 100.0]
    marks = marks_of(report(*(record("dali", 500, 1, setting={"latency_ms": place}) for place in places)), "latency_ms")
    (axes,) = draw_lines(marks, x_title="latency ms").axes
    (bars,) = axes.containers
    line, _, (whiskers,) = bars
    assert np.asarray(line.get_xdata()).tolist() == places
    assert np.asarray(line.get_ydata()).tolist() == pytest.approx([500] * 3)
    interval = median_interval(marks[0].values)
    ends = pytest.approx([interval.low, interval.high])
    assert [segment[:, 1].tolist() for segment in whiskers.get_segments()] == [ends] * 3
    assert axes.get_ylim()[0] == 0
    run = report(*(record("dali", 500, 1, setting={"latency_ms": place}) for place in (1.0, 99.0)))
    assert draw_lines(marks_of(run, "latency_ms"), x_title="latency ms").axes[0].get_xscale() == "log"
    rows = [{"crop": crop, "photo_side": side} for side in (None, 64, 128) for crop in (16, 32)]
    plot = plots_of(report(*(record("dali", 500, 1, setting=row) for row in rows)))["samples_per_s-2"]
    assert all(text in plot for text in (">as it is<", ", crop 32<")), "a plot for each combination of the others"
