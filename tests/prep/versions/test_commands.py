"""The commands that change a data set and tell of its versions, as a user types them."""

import logging
from pathlib import Path
from typing import Any

import pytest

from dali_pipes.errors import PipesError
from dali_pipes.formats.manifest import steps_of
from dali_pipes.formats.names import read_json
from tests.prep.commands.calls import call_prep, json_of_prep, run_prep
from tests.prep.versions.sets import Place, class_folders
from tests.prep.versions.test_add import NEW_KEYS, OLD_KEYS


def run(*arguments: Any) -> str:
    return run_prep(*arguments).stdout


def test_a_data_set_lives(place: Place, more: Path) -> None:
    """Each command with a line and with a document; the log has the commands."""
    cluster = ["--endpoint", place.endpoint] if place.endpoint else []
    added = run("add", more, place.url, "--known", "skip", *cluster)
    assert "added 1 shard, 2 samples" in added
    assert "1 new class: 'bee' (3)" in added
    assert f"'{place.newest().url}@2' has 4 shards, 8 samples" in added
    assert "nothing to add" in run("add", more, place.url, "--known", "skip", *cluster)
    assert "would remove 1 sample" in run("remove", place.url, "--key", "cat/000", "--dry-run", *cluster)
    assert "removed 1 sample" in run("remove", place.url, "--key", "cat/000", *cluster)
    assert "nothing to remove" in run("remove", place.url, "--key", "cat/000", *cluster)
    assert "would write 1 shard anew without 1 sample" in run("compact", place.url, "--dry-run", *cluster)
    assert json_of_prep("compact", place.url, *cluster)["num_rewritten"] == 1
    found = json_of_prep("diff", f"{place.url}@1", place.url, *cluster)
    assert found["added_keys"] == NEW_KEYS
    assert found["removed_keys"] == ["cat/000"]
    assert (found["num_moved"], found["added_classes"], found["is_equal"]) == (1, {"3": "bee"}, False)
    shown = run("diff", f"{place.url}@1", place.url, *cluster)
    assert "+ class 3 bee\n" in shown
    assert "- key cat/000\n" in shown
    assert "are equal" in run("diff", f"{place.url}@4", place.url, *cluster)
    assert "deleted older versions: 1, 2, 3, " in run("compact", place.url, "--drop-old", *cluster)
    log = run("log", place.url, *cluster).splitlines()
    assert [line.split()[0] for line in log[1:]] == ["@4", "@3", "@2", "@1"]
    assert ["(deleted)" in line for line in log[1:]] == [False, True, True, True]
    versions = json_of_prep("log", place.url, *cluster)["versions"]
    assert [version["num_samples"] for version in versions] == [6, 8, 7, 7]
    assert versions[1]["command"].startswith("dali-pipes prep add ")
    assert versions[1]["command"].endswith(" --known skip")


@pytest.mark.parametrize("inside", ["", "dog"])
def test_photos_of_one_class_are_added(local: Place, tmp_path: Path, inside: str) -> None:
    """By a folder with this class alone, and by the folder of the class itself: with the same keys."""
    folder = class_folders(tmp_path / "dogs", {"dog": 2}, first=50)
    assert "new class" not in run("add", folder / inside, local.url)
    assert local.keys() == [*OLD_KEYS, "dog/050", "dog/051"]
    labels = local.open().columns().labels
    assert labels.tolist() == [0, 0, 1, 1, 2, 2, 1, 1]
    assert "nothing to add" in run("add", folder, local.url, "--known", "skip")


def test_the_history_has_the_options_as_they_were_typed(
    local: Place, more: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``/`` is the home directory in some containers, and a name that begins alike is another directory."""
    assert json_of_prep("log", local.url)["versions"][0]["num_samples"] == 6
    monkeypatch.setenv("HOME", "/")
    run("add", more, local.url, "--on-bad", "skip", "--max-bad", "10%")
    assert local.newest().manifest.history[1].command == (
        f"dali-pipes prep add {more} {local.url} --on-bad skip --max-bad 10%"
    )
    monkeypatch.setenv("HOME", str(more.parent))  # it is not in the history
    run("remove", local.url, "--key", "cat/000")
    assert local.newest().manifest.history[2].command == "dali-pipes prep remove ~/set/s- --key cat/000"
    monkeypatch.setenv("HOME", str(more))
    assert "1 new class: 'fox' (4)" in run("add", class_folders(Path(f"{more}2"), {"fox": 1}), local.url)
    assert f" {more}2 " in local.newest().manifest.history[3].command


def test_photos_of_a_recoded_set_are_recoded_alike_or_said(
    tmp_path: Path, more: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(f"{tmp_path}/set/s-", None)
    run("pack", "imagefolder", class_folders(tmp_path / "old", {"dog": 2}), place.url, "--short-side", 24)
    run("index", place.url)
    with caplog.at_level(logging.WARNING):
        run("add", more, place.url, "--dry-run")
    assert "were recoded (quality=90, short_side=24), and those that are added keep their bytes" in caplog.text
    caplog.clear()
    run("add", more, place.url, "--short-side", 24)
    assert "recoded" not in caplog.text
    steps = place.newest().manifest.recoded
    assert [step.counts for step in steps] == [{"resized": 2}, {"resized": 2}]
    assert steps_of(read_json(place.store.read("s-recoded.json"))) == steps


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["remove", "{url}"], 2, "name samples with --key or --list, or shards with --shard"),
        (["add", "{url}nothing", "{url}"], 1, "no such file or directory"),
        (["diff", "{url}@1", "{url}@7"], 1, "no version 7"),
    ],
)
def test_what_cannot_be_is_said(local: Place, arguments: list[str], code: int, expected: str) -> None:
    done = call_prep(*(argument.format(url=local.url) for argument in arguments))
    assert done.exit_code == code
    if code == 1:
        assert isinstance(done.exception, PipesError)
    assert expected in (done.output if code == 2 else str(done.exception))
