"""The commands of `prep pack` that read tables and tars, without and with options."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from prep.commands.group import prep
from tests.sources import encode_photo


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """A list of three photos in two classes."""
    for number in range(3):
        (tmp_path / f"{number}.jpg").write_bytes(encode_photo(seed=number))
    rows = [(f"{number}.jpg", ("cat", "dog")[number % 2], f"photo {number}") for number in range(3)]
    lines = [f"{path},{label},{text}\n" for path, label, text in rows]
    (tmp_path / "list.csv").write_text(f"path,label,caption\n{''.join(lines)}")
    return tmp_path / "list.csv"


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(prep, ["pack", *map(str, arguments)], catch_exceptions=False)


def _json(*arguments: str | Path) -> dict[str, Any]:
    done = _run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_pack_table_then_tars_between_directory_and_bucket(listed: Path, node: str, tmp_path: Path) -> None:
    """To the bucket without an option, back into smaller shards, and from there into one again."""
    found = _json("table", listed, "ais://pack-cli", "--endpoint", node)
    assert (found["num_samples"], found["classes"], found["shards"]) == (
        3,
        {"0": "cat", "1": "dog"},
        ["samples-000000.tar"],
    )
    back = _json("tars", "ais://pack-cli/samples-", tmp_path / "out", "--max-count", "1", "--endpoint", node)
    assert (back["num_samples"], len(back["shards"]), back["classes"]) == (3, 3, found["classes"])
    shards = sorted((tmp_path / "out").glob("*.tar"))
    line = _run("tars", *shards, "ais://pack-cli/again-", "--endpoint", node).stdout
    assert line.startswith("wrote 1 shard, 3 samples, ")
    assert line.endswith(" -> ais://pack-cli/again-000000.tar\n")
    assert _json("tars", tmp_path / "out", "ais://pack-cli/again-", "--endpoint", node)["num_written"] == 0


def test_pack_tars_of_the_embedded_node_starts_it_once_for_both_sides(listed: Path, tmp_path: Path) -> None:
    options = ("--embedded-dir", tmp_path / "node")
    _json("table", listed, "ais://a", *options)
    assert _json("tars", "ais://a", "ais://b", *options)["num_samples"] == 3


def test_pack_table_with_every_option(listed: Path, tmp_path: Path) -> None:
    arguments = ("--component", "image=path", "--value", "caption.txt=caption", "--unlabelled", "--key", "caption")
    dry = _json("table", listed, tmp_path / "out", *arguments, "--root", listed.parent, "--dry-run", "--jobs", "2")
    assert (dry["num_samples"], dry["dry_run"], (tmp_path / "out").exists()) == (3, True, False)
    assert dry["classes"] == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table", "x.csv", "out", "--component", "path"], "expected NAME=COLUMN, got 'path'"),
        (["table", "x.csv", "out", "--value", "a=b", "--value", "a=c"], "'a' is given twice"),
        (["table", "x.csv", "out", "--component", "=b"], "expected NAME=COLUMN, got '=b'"),
    ],
)
def test_pack_misuse_exits_with_2(arguments: list[str], message: str) -> None:
    done = _run(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
