"""`bench open` on a small bucket: the record, its table, and what is refused."""

import json
from pathlib import Path

import pytest

from bench.scenarios.open import OpenScenario
from tests.bench.conftest import invoke


def test_open_measures_ranks_and_listings(tmp_path: Path) -> None:
    """No opening lists the bucket; each rank asks for the manifest once."""
    out = tmp_path / "open.json"
    arguments = ["open", "--num-shards", "300", "--shard-samples", "3", "--ranks", "1,2", "--repeats", "1"]
    done = invoke(*arguments, "--json", str(out))
    records = json.loads(out.read_text())["records"]
    assert [(one["setting"]["server"], one["setting"]["ranks"]) for one in records] == [
        ("AIStore", 1), ("AIStore", 2), ("AIStore", "listing"), ("S3", 1), ("S3", 2), ("S3", "listing"),
    ]  # fmt: skip
    for one in records:
        (turn,) = one["repeats"]
        if one["setting"]["ranks"] == "listing":
            assert turn["requests"] == {"list": 1}
            assert turn["num_names"] == 601
        else:
            assert turn["requests"]["manifest"] == one["setting"]["ranks"]
            assert "list" not in turn["requests"]
            assert turn["figures"]["open_s"] > 0
            assert turn["figures"]["peak_mib"] > 0
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
