"""`bench open` on a small bucket: the record, its table, and what is refused."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.cli import bench as bench_command
from bench.scenarios.open import OpenScenario


def test_open_measures_ranks_and_listings(tmp_path: Path) -> None:
    """No opening lists the bucket; each rank asks for the manifest once."""
    out = tmp_path / "open.json"
    arguments = ["open", "--num-shards", "300", "--shard-samples", "3", "--ranks", "1,2", "--repeats", "1"]
    done = CliRunner().invoke(bench_command, [*arguments, "--json", str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    records = json.loads(out.read_text())["records"]
    assert [(one["face"], one["ranks"]) for one in records] == [
        ("ais", 1), ("ais", 2), ("ais", 0), ("s3", 1), ("s3", 2), ("s3", 0),
    ]  # fmt: skip
    for one in records:
        if one["ranks"]:
            assert one["requests"]["manifest"] == one["ranks"]
            assert "list" not in one["requests"]
            assert one["open_s"] > 0
            assert one["peak_mib"] > 0
        else:
            assert one["requests"] == {"list": 1}
            assert one["repeats"][0]["num_names"] == 601
    assert "listing" in done.stdout


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"faces": ["gs"]}, r"faces must be of ais, s3, got 'gs'"),
        ({"ranks": [0]}, r"ranks must be positive numbers, got 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        OpenScenario(**options)
