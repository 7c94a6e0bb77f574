"""The demo on few photos: what it leaves, and that a second run makes the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from bench.demo import demo
from dali_pipes.errors import PipesError
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import manifest_name
from prep.inspect.contact_sheet import Cell, contact_sheet, denormalised

pytest.importorskip("skimage")

QUICK_DEMO = """
import bench.demo
bench.demo.REPEATS = bench.demo.EPOCHS = 1
bench.demo.demo()
"""


def run_demo(out: Path, *arguments: str) -> Result:
    options = ["--out", str(out), "--samples", "32", *arguments]
    done = CliRunner(env={"AIS_ENDPOINT": ""}).invoke(demo, options, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return done


@pytest.fixture(autouse=True)
def _one_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.demo.REPEATS", 1)
    monkeypatch.setattr("bench.demo.EPOCHS", 1)


def test_demo_leaves_sheet_report_and_shards_and_runs_again(tmp_path: Path) -> None:
    """A second run makes the same shards again."""
    out = tmp_path / "demo-out"
    first = run_demo(out)
    assert "dali and webloader gave the same 32 samples" in first.stdout
    assert [line.split()[0] for line in first.stdout.splitlines() if line.startswith(("dali  ", "webloader "))] == [
        "dali",
        "webloader",
    ]

    report = json.loads((out / "report.json").read_text())
    assert [record["loader"] for record in report["records"]] == ["dali", "webloader"]
    assert all(record["outputs"]["num_samples"] == 32 for record in report["records"])
    assert report["options"]["source"] == "local files", "one timed over HTTP, the other not"
    with Image.open(out / "contact-sheet.png") as sheet:
        assert sheet.width > sheet.height / 2 > 300
    manifest = Manifest.from_bytes((out / "shards" / manifest_name("shuffled-")).read_bytes(), where="shards")
    sizes = {name: (out / "shards" / name).stat().st_size for name in manifest.names}
    assert list(sizes.values()) == manifest.shard_bytes.tolist()
    assert manifest.classes[1] == "astronaut"

    again = json.loads(run_demo(out, "--json").stdout)
    assert again["demo"]["manifest_digest"] == report["demo"]["manifest_digest"]


@pytest.mark.nightly
def test_demo_ends_with_commands_that_run_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shell without this environment, and in a folder with a space in its name."""
    folder = tmp_path / "first try"
    folder.mkdir()
    monkeypatch.chdir(folder)
    environment = os.environ | {"PATH": os.defpath, "PYTHONPATH": str(Path(__file__).parents[2]), "AIS_ENDPOINT": ""}
    command = [sys.executable, "-c", QUICK_DEMO, "--samples", "32", "--out", "out of it"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    commands = [line.strip() for line in shown.partition("Next:\n")[2].splitlines()]
    info, bench = commands
    assert "prep info 'out of it/shards'" in info
    done = subprocess.run(
        ["/bin/sh", "-ec", f"{info}\n{bench} --repeats 1 --epochs 1 --loaders dali"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "32 samples" in done.stdout
    assert "Median" in done.stdout


def test_demo_negative_seed_is_refused(tmp_path: Path) -> None:
    """Before anything is made."""
    done = CliRunner().invoke(demo, ["--out", str(tmp_path / "out"), "--seed", "-1"])
    assert (done.exit_code, (tmp_path / "out").exists()) == (2, False)
    assert "'--seed': -1 is not in the range" in done.stderr


def test_demo_out_that_takes_no_file_is_named(tmp_path: Path) -> None:
    """A directory that cannot be made, and one that is there and read-only, also for root."""
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "out", Path("/proc/self")):
        with pytest.raises(PipesError, match=f"cannot write into --out '{out}': .*; name another directory"):
            CliRunner().invoke(demo, ["--out", str(out)], catch_exceptions=False)


def test_denormalised_gives_the_pixels_back() -> None:
    """All 256 levels of each channel survive normalising and its undoing."""
    pixels = np.stack([np.arange(256, dtype=np.uint8).reshape(16, 16)] * 3, axis=-1)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    image = ((pixels / np.float32(255) - np.float32(mean)) / np.float32(std)).transpose(2, 0, 1)
    assert np.array_equal(denormalised(image, mean=mean, std=std), pixels)


@pytest.mark.parametrize(
    ("count", "columns", "rows"),
    [
        (1, 1, 1),
        (4, 4, 1),
        (5, 4, 2),  # a row that is not full
        (24, 4, 6),
    ],
)
def test_contact_sheet_grows_by_whole_rows(count: int, columns: int, rows: int) -> None:
    """Four cells a row; a label that is too long is cut, not drawn over its neighbour."""
    cell = Cell(
        photo=np.zeros((350, 350, 3), np.uint8), mask=np.ones((350, 350), np.uint8), label="a" * 200, note="class 1"
    )
    sheet = contact_sheet([cell] * count, title="Title", subtitle="subtitle")
    one = contact_sheet([cell], title="Title", subtitle="subtitle")
    assert (sheet.width - 80 + 24) == columns * (one.width - 80 + 24)
    assert (sheet.height - one.height) % max(rows - 1, 1) == 0
    assert (sheet.height > one.height) == (rows > 1)
