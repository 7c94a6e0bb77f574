"""The demo on few photos: what it leaves, and that a second run makes the same."""

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bench.demo import demo
from dali_pipes.cli import main
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import manifest_name

pytest.importorskip("skimage")


def run_demo(out: Path, *arguments: str) -> Result:
    options = ["--out", str(out), "--samples", "32", *arguments]
    done = CliRunner(env={"AIS_ENDPOINT": ""}).invoke(demo, options, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return done


def test_demo_leaves_sheet_report_and_shards_and_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run makes the same shards again. The printed command runs, also with a space in the path."""
    for name in ("REPEATS", "EPOCHS"):
        monkeypatch.setattr(f"bench.demo.{name}", 1)
    out = tmp_path / "first try" / "demo-out"
    first = run_demo(out)
    assert "dali and webloader gave the same 32 samples" in first.stdout
    report = json.loads((out / "report.json").read_text())
    assert [record["loader"] for record in report["records"]] == ["dali", "webloader"]
    assert all(record["outputs"]["num_samples"] == 32 for record in report["records"])
    assert report["options"]["source"] == "local files", "one timed over HTTP, the other not"
    assert (out / "contact-sheet.png").stat().st_size
    manifest = Manifest.from_bytes((out / "shards" / manifest_name("shuffled-")).read_bytes(), where="shards")
    sizes = {name: (out / "shards" / name).stat().st_size for name in manifest.names}
    assert list(sizes.values()) == manifest.shard_bytes.tolist()
    assert manifest.classes[1] == "astronaut"

    info, _ = (shlex.split(line) for line in first.stdout.partition("Next:\n")[2].splitlines())
    assert main(info[3:]) == 0
    monkeypatch.setattr("bench.demo._compare_and_time", lambda *_, **__: dict(report))
    again = json.loads(run_demo(out, "--json").stdout)
    assert again["demo"]["manifest_digest"] == report["demo"]["manifest_digest"]
    assert (out / "shards" / manifest.names[0]).stat().st_size == sizes[manifest.names[0]]
