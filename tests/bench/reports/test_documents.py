"""Records are written whole and read again. Tables, documents and plots are made from records."""

import json
import re
import sys
import xml.etree.ElementTree as ET
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
from bench.reports.tables import STOP, markdown_page, update_document
from dali_pipes.errors import DataError, PipesError
from tests.bench.conftest import invoke

from .records import record, report


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
        ('{"format": "dali-pipes-bench-run", "version": 9}', "version 9 .* anew: dali-pipes bench run --json"),
        ('{"format": "dali-pipes-bench-fetch", "version": 2}', "expected a file that `bench fetch --json` wrote"),
        ('{"format": "dali-pipes-bench-run", "version": 2, "records": []}', "expected a file that `bench run --json`"),
        ('{"format": "dali-pipes-bench-run", "version": 2, "records": [{"repeats": []}]}', "expected a file that"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """Issue 3: a file that is not a record gives an error of one line that names the file."""
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


def test_report_draws_the_plots_of_runs(document: Path, tmp_path: Path) -> None:
    run = document.parent / "results" / "run.json"
    arguments = ["report", str(run), "--plots", str(tmp_path / "plots")]
    done = invoke(*arguments)
    assert done.stdout == ""
    assert f"wrote 4 plots to {tmp_path / 'plots'}" in done.stderr
    names = ("cpu_ms_per_sample", "samples_per_s", "time_to_first_batch_s", "wait_share")
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [f"run-{name}.svg" for name in names]


def test_report_of_options_that_do_not_fit_is_refused(document: Path) -> None:
    run = document.parent / "results" / "run.json"
    for arguments, message in (
        ([], "name at least one record, or a document"),
        (["a.json", "--check"], "--check goes with --update DOCUMENT"),
        ([run, "--baseline", "spdl"], "--baseline must be of dali, webloader:pil, got 'spdl'"),
        (["--update", document, "--baseline", "dali"], "for a document's tables they stand in its marks"),
    ):
        with pytest.raises(ValueError, match=message):
            invoke("report", *arguments)


RUN = report(
    record("dali", 900, 2.5, decode="dali"),
    record("webloader", 300, 7.5),
    record("synthetic", 1e6, 0.1, decode="none", gives=[]),
)
SWEEP = report(
    *(
        record(loader, speed, 5, setting={"latency_ms": latency, "cache": cache})
        for cache in ("warm", "cold")
        for latency in (0.0, 20.0, 100.0)
        for loader, speed in (("dali", 600), ("webloader", 300))
    )
)


def marks_of(run: dict[str, Any], axis: str) -> list[Mark]:
    """Return one mark for the samples/s of each record."""
    name = "samples_per_s"
    return [Mark(row, FIGURES[name], values_of(row, name), row["setting"][axis]) for row in run["records"]]


def texts_of(svg: str) -> set[str]:
    """Return the texts of a picture. Plots store text as text, not as paths."""
    return {"".join(node.itertext()).strip() for node in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}


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


def test_a_run_has_a_plot_of_each_figure_and_setting() -> None:
    """Plots need no other file and are the same each time. They leave out ``synthetic``, which reads no shard."""
    plots = plots_of(RUN)
    assert [*plots] == ["samples_per_s", "cpu_ms_per_sample", "time_to_first_batch_s", "wait_share"]
    for svg in plots.values():
        assert not re.search(r"(?:src|href)=\"(?!#)|@import|url\((?!#)", svg)
        assert "synthetic" not in svg
        assert "currentColor" in svg
    first = plots["samples_per_s"]
    assert first.startswith('<svg role="img" aria-label="samples/s, samples/s"')
    assert {"samples/s", "dali", "webloader (pil)", "samples/s (more is better)"} <= texts_of(first)
    assert plots_of(RUN) == plots
    sweep = plots_of(SWEEP)
    assert len(sweep) == 4 * 2
    assert [*sweep][:2] == ["samples_per_s-1", "samples_per_s-2"]
    assert "samples/s, cache warm over latency ms" in sweep["samples_per_s-1"]
    assert "samples/s, cache warm" in texts_of(sweep["samples_per_s-1"])
    identifiers = re.findall(r' id="([mp][0-9a-f]{10})"', "".join([*plots.values(), *sweep.values()]))
    assert len(set(identifiers)) == len(identifiers), "several may stand in one page"


def test_plots_without_matplotlib_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PipesError, match=r"plots need matplotlib; install: pip install 'dali-pipes\[bench\]'"):
        plots_of(RUN)
    page = markdown_page([("a run", RUN)])
    for text in ("| dali ", "900 [825-921]", "* commit: 0123456789abcdef, with changes", "**samples/s**"):
        assert text in page
