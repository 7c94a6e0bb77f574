"""`bench small` on a few photos: the record, and what is left behind."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.cli import bench as bench_command
from bench.scenarios.small import SmallScenario
from tests.conftest import photo_bytes


def test_small_writes_a_record_and_leaves_nothing(tmp_path: Path) -> None:
    """Photos of a directory, among them a small one and one that cannot be decoded, which are left out."""
    photos, cache, out = tmp_path / "photos", tmp_path / "cache", tmp_path / "small.json"
    for folder in (photos, cache):
        folder.mkdir()
    for number in range(3):
        (photos / f"{number}.jpg").write_bytes(photo_bytes(number, 640, 480))
    (photos / "small.jpg").write_bytes(photo_bytes(9, 64, 48))
    (photos / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    arguments = ["small", "--photos", str(photos), "--samples", "12", "--batch-size", "4", "--repeats", "1"]
    arguments += ["--short-sides", "256", "--photo-kb", "60", "--cache", str(cache), "--json", str(out)]
    done = CliRunner().invoke(bench_command, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert "times the samples/s of whole photos" in done.stdout
    report = json.loads(out.read_text())
    assert [record["photos"] for record in report["records"]] == ["whole", "256"]
    assert [record["ffcv_gb"] for record in report["records"]] == [74.98, 22.01]
    sizes = [record["mb"] for record in report["records"]]
    assert sizes[0] > sizes[1] > 0
    assert 0.5 < sizes[0] / (12 * 0.06) < 2
    for pack in report["packs"]:
        assert pack["samples_per_s"] > 0
        assert 0 < pack["of_libjpeg"] < pack["of_pillow"] < 1
    assert list(cache.iterdir()) == []


def test_sides_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"short_sides must name each side once, from 1 on, got \[256, 256\]"):
        SmallScenario(short_sides=(256, 256))
    with pytest.raises(ValueError, match="num_samples must be at least the batch size, 64, got 8"):
        SmallScenario(num_samples=8)
