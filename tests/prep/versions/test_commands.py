"""The commands that change a data set and tell of its versions, as a user types them."""

from pathlib import Path
from typing import Any

from tests.prep.commands.calls import json_of_prep, run_prep
from tests.prep.versions.sets import Place
from tests.prep.versions.test_add import NEW_KEYS


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
