"""`prep relabel`: samples get other classes, or classes other names, in one version; nothing else changes."""

from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

import dali_pipes as dp
from dali_pipes.errors import DataError
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from prep.versions.relabel import relabel, rename
from tests.prep.commands.calls import json_of_prep, run_prep
from tests.prep.versions.sets import Place, StoppedError, copy_set, stopped_at
from tests.prep.versions.test_add import OLD_KEYS
from tests.shards import Sample, read_tar, write_tar

GRAPH = dp.classification_train(crop=8)
OPTIONS = {"batch_size": 1, "device": "cpu", "decode": dp.Decode(threads=1), "outputs": dp.Outputs(keys=True)}


def table(folder: Path, *rows: str) -> Path:
    (folder / "labels.csv").write_text("\n".join(["key,class", *rows, ""]))
    return folder / "labels.csv"


def classes_of(place: Place, version: str = "") -> dict[str, int]:
    """Key -> class id, as a loader delivers them."""
    with dp.loader(f"{place.url}{version}", GRAPH, endpoint=place.endpoint, **OPTIONS) as loader:
        return {batch["key"][0]: int(batch["label"]) for (batch,) in loader}


def shards_of(place: Place) -> dict[str, bytes]:
    return {name: data for name, data in place.objects().items() if name.endswith(".tar")}


def test_listed_samples_get_their_classes_and_keep_their_bytes(place: Place, tmp_path: Path) -> None:
    """The loader, the log and the differences say so; a second run changes nothing; other objects stay as they are."""
    cluster = ["--endpoint", place.endpoint] if place.endpoint else []
    before, old = place.objects(), classes_of(place)
    words = ["relabel", place.url, table(tmp_path, "cat/001,bee", "owl/000,dog", "dog/000,dog"), *cluster]
    planned = json_of_prep(*words, "--new-classes", "--dry-run")
    assert (planned["version"], planned["packed"]["num_samples"], place.objects()) == (1, 2, before)
    assert "relabelled 2 samples, 1 shard, 10.0 KiB" in (said := run_prep(*words, "--new-classes").stdout)
    assert "(1 new class: 'bee' (3))" in said
    assert "nothing to relabel" in run_prep(*words).stdout
    assert classes_of(place) == old | {"cat/001": 3, "owl/000": 1}
    assert classes_of(place, "@1") == old
    both = f"{place.url}@1", place.url
    found = json_of_prep("diff", *both, *cluster)
    assert found["relabelled_keys"] == {"cat/001": [0, 3], "owl/000": [2, 1]}
    assert (found["added_keys"], found["removed_keys"], found["num_moved"]) == ([], [], 0)
    assert "class 2 -> 1\n0 samples added, 0 removed, 2 relabelled" in run_prep("diff", *both, *cluster).stdout
    assert [change.what for change in place.newest().manifest.history] == ["index", "relabel"]
    shards = shards_of(place)
    assert {name: shards.pop(name) for name in before if name.endswith(".tar")}.items() <= before.items()
    members = dict(pair for name in before if name.endswith(".tar") for pair in read_tar(before[name]))
    expected = {name: data for name, data in members.items() if name.startswith(("cat/001", "owl/000"))}
    (added,) = shards.values()
    assert dict(read_tar(added)) == expected | {"cat/001.cls": b"3", "owl/000.cls": b"1"}


def test_classes_get_other_names_and_states_stay_valid(local: Place, tmp_path: Path) -> None:
    with dp.loader(local.url, GRAPH, **OPTIONS) as loader:
        whole = [batch["key"] for (batch,) in loader]
        loader.set_epoch(0)
        next(iter(loader))
        state = loader.state_dict()
    shards = shards_of(local)
    assert "'dog' to 'cat'" in run_prep("relabel", local.url, "--rename", "cat=dog", "--rename", "dog=cat").stdout
    assert "renamed nothing" in run_prep("relabel", local.url, "--rename", "owl=owl").stdout
    assert (local.newest().manifest.classes, shards_of(local)) == ({0: "dog", 1: "cat", 2: "owl"}, shards)
    with dp.loader(local.url, GRAPH, state=state, **OPTIONS) as loader:
        assert [batch["key"] for (batch,) in loader] == whole[1:]
    relabel(local.newest(), table(tmp_path, "cat/000,1"))  # integers are ids
    with pytest.raises(dp.StateError, match=r"the state is of version 1 of .*, this loader reads version 3"):
        dp.loader(local.url, GRAPH, state=state, **OPTIONS)


def test_impossible_changes_write_nothing(local: Place, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    write_tar(tmp_path / "bare" / "b-000000.tar", [Sample("a", {"txt": b"one"})])
    index_shards(resolve_shards(f"{tmp_path}/bare/b-", endpoint=None))
    local.remove("owl/001")
    before = local.objects()
    with pytest.raises(DataError, match="have no component 'cls': 'a'"):
        relabel(Place(f"{tmp_path}/bare/b-", None).newest(), table(tmp_path, "a,1"))
    for rows, expected in (
        (["cat/9,dog", "owl/001,dog"], "has no sample of 2 of 2 listed keys: 'cat/9', 'owl/001'"),
        (["cat/000,dog", "cat/000,owl"], r"labels.csv', line 3: key 'cat/000' has another class in a line before"),
        (["cat/000,dgo"], r"has 0 classes called 'dgo'; did you mean 'dog'\? --new-classes"),
        (["cat/000,9"], "has 0 classes called '9'; it has 'cat', 'dog', 'owl'"),
        (["cat/000,"], "line 2: column 'class' must hold class ids or names of classes, got ''"),
    ):
        with pytest.raises(DataError, match=expected):
            relabel(local.newest(), table(tmp_path, *rows))
    for names, expected in (({"cat": "owl"}, "two classes of .* would be 'owl'"), ({"cta": "x"}, "did you mean 'cat'")):
        with pytest.raises(DataError, match=expected):
            rename(local.newest(), names)
    assert local.objects() == before
    local.store.write("s-000000.tar", before["s-000000.tar"].replace(b"\xff\xd8", b"\xff\xd9", 1))
    with pytest.raises(DataError, match="cat/000"):  # a damaged photo gets no new checksum
        relabel(local.newest(), table(tmp_path, "cat/000,dog"))
    assert local.newest().manifest.version == 2


def test_a_relabelling_that_is_stopped_is_finished_by_running_it_again(local: Place, tmp_path: Path) -> None:
    """Before each change of the store, every sample is in the newest version once."""
    labels = table(tmp_path, "cat/000,dog")
    for number in count():
        tried = copy_set(local, Place(f"{tmp_path}/tried{number}/s-", None))
        with stopped_at(number), suppress(StoppedError):
            relabel(tried.newest(), labels, jobs=1)
            break
        assert sorted(tried.keys()) == OLD_KEYS
        relabel(tried.newest(), labels, jobs=1)
        assert (sorted(tried.keys()), tried.newest().manifest.version) == (OLD_KEYS, 2)
    assert number > 5
