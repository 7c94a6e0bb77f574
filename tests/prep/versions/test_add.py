"""`prep add`: a version beside the old ones, made without reading what is there."""

import contextlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dali_pipes.errors import DataError
from dali_pipes.formats.names import columns_name, manifest_name, version_name
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from prep.sources.folders import imagefolder
from prep.sources.record import Record, Source
from prep.versions import fit
from prep.versions.add import add
from prep.versions.fit import fit_classes
from tests.prep.commands.calls import run_prep
from tests.prep.versions.sets import Place, StoppedError, class_folders, make_set, stopped_at
from tests.shards import Sample, pack, photo_bytes, write_tar

OLD_KEYS = [f"{name}/{row:03d}" for name in ("cat", "dog", "owl") for row in range(2)]
NEW_KEYS = ["bee/050", "dog/050"]


class Reads:
    """Counts the bytes that a directory's store reads, by object."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bytes: Counter[str] = Counter()
        opened, found = LocalStore.open, LocalStore.find

        def counted(store: LocalStore, name: str) -> Any:
            self.bytes[name] += store.size(name) or 0
            return opened(store, name)

        def counted_whole(store: LocalStore, name: str) -> bytes | None:
            if (data := found(store, name)) is not None:
                self.bytes[name] += len(data)
            return data

        patch.setattr(LocalStore, "open", counted)
        patch.setattr(LocalStore, "find", counted_whole)
        patch.setattr(LocalStore, "file", lambda *_, **__: pytest.fail("a shard is read again"))


def test_adding_one_percent_reads_one_percent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add reads the new shard, the manifest and the keys, but none of the hundred old shards or their indexes.

    Of the data set beside it, add reads the manifest and the column file to compare keys, but no shard.
    """
    folder = tmp_path / "set"
    folder.mkdir()
    for row in range(100):
        write_tar(folder / f"s-{row:06d}.tar", [Sample(f"k{row}", {"txt": b"one"})])
    index_shards(resolve_shards(folder, endpoint=None))
    write_tar(folder / "val-000000.tar", [Sample("held out", {"txt": b"one"})])
    index_shards(resolve_shards(f"{folder}/val-", endpoint=None))
    place = Place(f"{folder}/s-", None)
    source = Source(name="one", records=[Record(key="new", components={"txt": b"two"}, label=None)], classes={})
    old = place.newest()
    reads = Reads(monkeypatch)
    report = add(source, old, max_count=1, jobs=1)
    assert report.packed is not None
    assert (report.num_shards, report.num_samples, report.version) == (101, 101, 2)
    small = {*map(manifest_name, ("s-", "val-")), *map(columns_name, ("s-", "val-")), version_name("s-", 2)}
    assert set(reads.bytes) == {*report.packed.shards, *small}
    read = sum(number for name, number in reads.bytes.items() if name.endswith(".tar"))
    assert read == report.packed.num_bytes
    assert read <= 0.01 * sum(place.newest().manifest.shard_bytes.tolist())


def test_known_keys_are_refused_or_left_out(local: Place, tmp_path: Path, more: Path) -> None:
    local.add(more)
    grown = class_folders(tmp_path / "grown", {"dog": 3, "owl": 1})
    before = local.objects()
    assert local.add(more).packed is None  # a second run adds nothing
    with pytest.raises(DataError, match=r"has 3 of the 4 keys .*'dog/000', 'dog/001'.*--known skip"):
        local.add(grown)
    assert local.objects() == before
    for num_known in (3, 4):
        report = local.add(grown, skip_known=True)
        assert (report.version, report.num_known, report.num_samples) == (3, num_known, 9)
    (grown / "owl" / "new.jpg").write_bytes(b"bad")
    assert local.add(grown, skip_known=True, on_bad="skip").packed is None  # the only new one is bad
    (grown / "owl" / "new.jpg").unlink()
    local.remove("dog/002")
    assert local.add(grown, skip_known=True).num_samples == 9  # removed samples count as new
    assert local.keys()[-1] == "dog/002"


def test_keys_of_a_data_set_beside_it_are_refused_or_left_out(local: Place, tmp_path: Path) -> None:
    """An example is a held-out split. Keys of samples that were removed there may be added."""
    val = make_set(class_folders(tmp_path / "val", {"eel": 3, "cat": 1}), Place(f"{tmp_path}/set/val-", None))
    val.remove("eel/002")
    grown = class_folders(tmp_path / "grown", {"eel": 3})
    with pytest.raises(DataError, match=r"in other data sets .*val-' has 2 \('eel/000'\).*--known skip.*--shared-keys"):
        local.add(grown)
    for _ in range(2):
        report = local.add(grown, skip_known=True)
        assert (report.num_samples, report.elsewhere) == (7, {val.url: 2})
    assert local.keys() == [*OLD_KEYS, "eel/002"]
    said = run_prep("add", class_folders(tmp_path / "e2", {"eel": 2}), local.url, "--known", "skip").stdout
    assert "nothing to add: all keys are known, 2 of them in '" in said
    local.add(class_folders(tmp_path / "e0", {"eel": 1}), shares_keys=True)
    local.add(class_folders(tmp_path / "e1", {"eel": 1}, first=1), compare_keys=False)
    assert local.keys()[-2:] == ["eel/000", "eel/001"]


def test_photos_that_the_data_set_has_under_other_keys(
    local: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their bytes, and not by their size; removed samples do not count, the set beside does."""
    folder = class_folders(tmp_path / "again", {"bee": 1, "owl": 1}, first=90)
    (folder / "bee" / "old.jpg").write_bytes(photo_bytes(0, 40, 30))
    (folder / "bee" / "removed.jpg").write_bytes(photo_bytes(1, 40, 30))
    same_size = bytearray(photo_bytes(0, 40, 30))
    same_size[-9] ^= 1
    (folder / "owl" / "like.jpg").write_bytes(same_size)
    local.remove("cat/001", "dog/001", "owl/001")
    before = local.objects()
    with pytest.raises(DataError, match=r"1 of 5 photos are known.*leave them out with --same-photos"):
        local.add(folder, same_photos="fail")
    assert local.objects() == before
    assert local.add(class_folders(tmp_path / "all", {"bee": 1}), same_photos="skip").packed is None
    assert local.objects() == before
    said = run_prep("add", folder, local.url, "--same-photos", "skip").stdout
    assert "added 1 shard, 4 samples, " in said
    assert "(1 photo there under other keys; 1 new class: 'bee' (3)) -> " in said
    assert set(local.keys()) >= {"bee/removed", "owl/like"}
    assert "bee/old" not in set(local.keys())
    assert "1 of 1 photos are known, under other keys: 'bee/000' is 'cat/000' of " in caplog.text
    assert caplog.text.count("they are left out") == 2
    monkeypatch.setattr("prep.versions.add.MAX_READ_BYTES", 0)
    first = class_folders(tmp_path / "first", {"bee": 1})
    (first / "bee" / "000.jpg").rename(first / "bee" / "old.jpg")
    assert local.add(first).num_same_photos == 0
    assert "not all photos are compared" in caplog.text
    monkeypatch.undo()
    beside = make_set(class_folders(tmp_path / "beside", {"cat": 1}, first=70), Place(f"{local.url}val-", None))
    assert beside.keys() == ["cat/070"]
    leaked = class_folders(tmp_path / "leaked", {"dog": 1}, first=70)
    assert local.add(leaked, same_photos="add").num_same_photos == 1
    assert f"'dog/070' is 'cat/070' of '{beside.url}'; prep remove --key takes them out" in caplog.text


def pictures(name: str, **pairs: tuple[int, int]) -> Source:
    """Samples of two photos, each by its number."""
    records = [
        Record(
            key=key, components={"before.jpg": photo_bytes(a, 40, 30), "after.jpg": photo_bytes(b, 40, 30)}, label=None
        )
        for key, (a, b) in pairs.items()
    ]
    return Source(name=name, records=records, classes={})


def test_sample_of_two_photos_is_there_if_both_are(tmp_path: Path) -> None:
    """Also in other components, or of two samples; one photo that it shares with another sample is no reason."""
    place = Place(f"{tmp_path}/s-", None)
    pack(pictures("old", k1=(1, 2), k2=(3, 4)), store=place.store, prefix="s-", max_count=2)
    index_shards(resolve_shards(place.url, endpoint=None))
    new = pictures("new", shares=(1, 9), turned=(2, 1), mixed=(3, 2), new=(7, 8))
    report = add(new, place.newest(), same_photos="skip")
    assert report.num_same_photos == 2
    assert set(place.keys()) == {"k1", "k2", "shares", "new"}


@pytest.mark.parametrize("rule", ["fail", "add"])
def test_shards_that_another_writer_published_stay(
    local: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: Any
) -> None:
    """The other command adds the same photos while this one, which refuses them, compares them."""
    folder, old, found = class_folders(tmp_path / "again", {"bee": 1}), local.newest(), fit.find_same_photos

    def meanwhile(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr("prep.versions.add.find_same_photos", lambda *_, **__: {})
        local.add(folder, same_photos=rule)
        return found(*args, **options)

    monkeypatch.setattr("prep.versions.add.find_same_photos", meanwhile)
    with pytest.raises(DataError, match="photos are known"):
        add(imagefolder(folder), old, same_photos="fail")
    newest = local.newest().manifest
    assert newest.version == 2
    assert set(newest.names) <= local.objects().keys()


def test_shards_of_an_interrupted_run_are_deleted_by_the_next_one(local: Place, tmp_path: Path) -> None:
    folder, before = class_folders(tmp_path / "again", {"bee": 1}), local.objects()
    for number in range(20):
        with contextlib.suppress(StoppedError, DataError), stopped_at(number):
            local.add(folder, same_photos="fail")
    with pytest.raises(DataError, match="photos are known"):
        local.add(folder, same_photos="fail")
    assert local.objects() == before


def test_lacking_components_are_refused(local: Place, tmp_path: Path) -> None:
    records = [Record(key="plain", components={"jpg": next((tmp_path / "old").rglob("*.jpg"))}, label=None)]
    source = Source(name="photos", records=records, classes={})
    with pytest.raises(DataError, match=r"photos: records lack components .*'cls' \(1 records\); found: 'jpg'"):
        add(source, local.newest())
    assert not list((tmp_path / "set").glob("*add*"))
    assert add(source, local.newest(), any_components=True).num_samples == 7


def source_of(classes: dict[int, str], *, numbers_classes: bool = False) -> Source:
    records = [Record(key=name, components={}, label=label) for label, name in classes.items()]
    return Source(name="'new'", records=records, classes=classes, numbers_classes=numbers_classes)


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ([], {4: "cat", 7: "dog", 8: "ant", 9: "eel"}),
        ([{4: "cat", 7: "dog", 8: "bee"}], {4: "cat", 7: "dog", 9: "ant", 10: "eel"}),  # there, 8 means bee
        ([{4: "cat", 8: "eel"}], {4: "cat", 7: "dog", 9: "ant", 8: "eel"}),  # there, eel has 8
        ([{4: "cat", 8: "eel"}, {4: "cat", 8: "ant"}], {4: "cat", 7: "dog", 8: "ant", 9: "eel"}),  # they disagree on 8
        ([{4: "cow", 7: "dog", 8: "bee"}, {8: "bee"}], {4: "cat", 7: "dog", 8: "ant", 9: "eel"}),  # unrelated classes
    ],
)
def test_new_classes_mean_the_same_in_data_sets_beside(
    local: Place, beside: list[dict[int, str]], expected: dict[int, str]
) -> None:
    """A new class in ``val-`` never gets an id that means another class in ``train-``."""
    manifest = replace(local.newest().manifest, classes={4: "cat", 7: "dog"})
    source = source_of({0: "ant", 1: "dog", 2: "eel"}, numbers_classes=True)
    others = [replace(manifest, classes=classes) for classes in beside]
    assert fit_classes(source, manifest, url="x", beside=others).classes == expected


@pytest.mark.parametrize(
    ("classes", "known", "expected"),
    [
        ({4: "dog"}, {4: "cat"}, "class id 4 is 'dog' in 'new', and in 'x' class id 4 is 'cat'; give"),
        ({1: "cat"}, {}, "'x' has class ids from 0 to 2 and no class table, and 'new' has names of classes"),
    ],
)
def test_classes_that_contradict_are_refused(
    local: Place, classes: dict[int, str], known: dict[int, str], expected: str
) -> None:
    manifest = replace(local.newest().manifest, classes=known)
    with pytest.raises(DataError, match=expected):
        fit_classes(source_of(classes), manifest, url="x")
