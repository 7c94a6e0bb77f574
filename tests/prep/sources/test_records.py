"""Folders of photos: which records they give, what is named and left out, and links that must not loop."""

import itertools
import os
import socket
import tarfile
from pathlib import Path

import pytest

from dali_pipes.errors import DataError, StoreError
from dali_pipes.store.local import LocalStore
from prep.sources.folders import imagefolder, pets, photo_folder
from prep.sources.record import Source
from tests.prep.commands.calls import run_prep
from tests.shards import encode_photo, pack, write_pets

NAMES = {"Abyssinian_2": 1, "Abyssinian_10": 1, "great_pyrenees_7": 16}


def test_pets_records_come_in_the_order_of_the_list(tmp_path: Path) -> None:
    source = pets(write_pets(tmp_path, NAMES))
    assert [record.key for record in source.records] == list(NAMES)
    assert [record.label for record in source.records] == [1, 1, 16]  # Oxford's ids, not cut to 0..n
    assert [sorted(record.components) for record in source.records] == [["image.jpg", "trimap.png"]] * 3
    assert source.classes == {1: "Abyssinian", 16: "great_pyrenees"}
    assert source.masks == {"trimap.png"}
    assert list(source.skipped) == []


def test_pets_record_with_a_missing_part_is_skipped_and_named(tmp_path: Path) -> None:
    write_pets(tmp_path, {**NAMES, "boxer_1": 9, "boxer_2": 9})
    trimaps = tmp_path / "annotations" / "trimaps"
    for path in (tmp_path / "images" / "boxer_1.jpg", trimaps / "boxer_1.png", trimaps / "boxer_2.png"):
        path.unlink()
    (tmp_path / "images" / "unlisted_3.jpg").write_bytes(b"")
    (trimaps / "._boxer_2.png").write_bytes(b"")  # macOS wrote it into the original archive
    source = pets(tmp_path)
    assert [record.key for record in source.records] == list(NAMES)
    missing = ["boxer_1: no photo and no trimap", "boxer_2: no trimap", "unlisted_3: no row in list.txt"]
    assert list(source.skipped) == missing
    (tmp_path / "annotations" / "list.txt").write_text("")
    with pytest.raises(DataError, match=r"holds no complete record: Abyssinian_10: no row in list.txt"):
        pets(tmp_path)
    trimaps.rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"no such directory: '.*annotations/trimaps'"):
        pets(tmp_path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("beagle_1 five 2 1", r"list.txt', line 5: expected 'NAME CLASS-ID .*', found 'beagle_1 five 2 1'"),
        ("beagle_1 ٣ 2 1", "line 5: expected"),  # int() would take it
        ("Abyssinian_2 1 1 1", "line 5: 'Abyssinian_2' has a row already"),
        ("beagle_1 16 2 1", "gives class id 16 to 'great_pyrenees' and to 'beagle'"),
    ],
)
def test_pets_bad_row_is_named_by_file_and_line(tmp_path: Path, row: str, message: str) -> None:
    rows = write_pets(tmp_path, NAMES) / "annotations" / "list.txt"
    rows.write_text(f"{rows.read_text()}{row}\n")
    with pytest.raises(DataError, match=message):
        pets(tmp_path)


def write_photos(root: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(encode_photo(seed=number))
    return root


def _labelled(source: Source) -> list[tuple[object, ...]]:
    return [(record.key, *record.components, record.label) for record in source.records]


def test_imagefolder_class_is_the_folder_and_key_the_path(tmp_path: Path) -> None:
    """All extensions of JPEG become the component `jpg`."""
    source = imagefolder(write_photos(tmp_path, "dog/b.jpg", "dog/a.JPEG", "cat 1/deep/x.png", "cat 1/a.webp"))
    records = [("cat 1/a", "webp", 0), ("cat 1/deep/x", "png", 0), ("dog/a", "jpg", 1), ("dog/b", "jpg", 1)]
    assert _labelled(source) == records
    assert source.classes == {0: "cat 1", 1: "dog"}
    assert list(source.skipped) == []


def test_imagefolder_skips_and_names_what_is_no_photo(tmp_path: Path) -> None:
    write_photos(tmp_path, "a/1.jpg", "a/2.CR2", "a/notes.txt", "a/.DS_Store", "a/.cache/2.jpg", "a/LICENCE")
    write_photos(tmp_path, "top.jpg", "Thumbs.db", ".git/x.jpg", "a/.3.jpg", "a/._1.jpg")
    (tmp_path / "b").mkdir()
    source = imagefolder(tmp_path)
    assert [record.key for record in source.records] == ["a/1"]
    assert list(source.skipped) == [
        "top.jpg: it is in no class's folder",
        "a/2.CR2: .cr2: a picture that no loader reads",
    ]
    assert list(source.noted) == ["b: no photo in this class"]
    assert list(source.others) == [
        "Thumbs.db: .db: not a photo by its extension",
        "a/.3.jpg: hidden, begins with a dot",
        "a/LICENCE: no extension: not a photo by its extension",
        "a/notes.txt: .txt: not a photo by its extension",
    ]
    assert source.classes == {0: "a"}  # an empty class has no id


def test_names_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    """The error shows which bytes of a file's or a class's name are not UTF-8."""
    folder = write_photos(tmp_path / "in" / "cat", os.fsdecode(b"caf\xe9.jpg"))
    with pytest.raises(DataError, match=r"the name of file '.*/cat/caf\\xe9\.jpg' is not UTF-8"):
        pack(imagefolder(tmp_path / "in"), store=LocalStore(tmp_path / "out"))
    folder.rename(folder.with_name(os.fsdecode(b"c\xe0t")))
    with pytest.raises(DataError, match=r"the name of class 0 is not UTF-8: 'c\\xe0t'; rename it"):
        pack(imagefolder(tmp_path / "in"), store=LocalStore(tmp_path / "out"))


def test_imagefolder_dot_in_a_name_is_a_dash_in_the_key_and_noted(tmp_path: Path) -> None:
    """WebDataset would cut the key at the dot; names of screenshots are full of them."""
    source = imagefolder(write_photos(tmp_path, "v1.2/Screen at 10.11.jpg", "v1.2/b.jpg"))
    assert [record.key for record in source.records] == ["v1.2/Screen at 10-11", "v1.2/b"]
    report = pack(source, store=LocalStore(tmp_path / "out"))
    assert report.noted == ("a dot in a photo's name is a dash in its key: 'v1.2/Screen at 10.11.jpg'",)


def test_two_photos_of_one_key_follow_on_bad(tmp_path: Path) -> None:
    """fail: an error names both; skip: neither is packed; keep: both, as one sample, if their components differ."""
    source = imagefolder(write_photos(tmp_path / "in", "a/1.jpg", "a/1.png", "a/2.jpg"))
    with pytest.raises(DataError, match=r"1 of 2 records .* bad: a/1: 2 photos have this key, expected one: 'a/1.jpg'"):
        pack(source, store=LocalStore(tmp_path / "out"))
    skipped = pack(source, store=LocalStore(tmp_path / "skip"), on_bad="skip")
    assert (skipped.num_samples, len(skipped.skipped)) == (1, 1)
    kept = pack(source, store=LocalStore(tmp_path / "keep"), on_bad="keep")
    assert kept.num_samples == 2
    assert kept.kept == ("a/1: 2 photos have this key, expected one: 'a/1.jpg', 'a/1.png'; rename one",)
    with tarfile.open(tmp_path / "keep" / "samples-000000.tar") as archive:
        assert archive.getnames() == ["a/1.cls", "a/1.jpg", "a/1.png", "a/2.cls", "a/2.jpg"]
    source = imagefolder(write_photos(tmp_path / "in", "a/1.JPEG"))
    with pytest.raises(DataError, match=r"a/1: .* would be one component of one key"):
        pack(source, store=LocalStore(tmp_path / "out"), on_bad="keep")


def test_imagefolder_of_splits_numbers_classes_once(tmp_path: Path) -> None:
    """A class that one split lacks does not shift the ids of the others."""
    write_photos(tmp_path, "train/cat/1.jpg", "train/dog/2.jpg", "val/dog/1.jpg", "val/x.jpg")
    source = imagefolder(tmp_path, splits=("train", "val"))
    assert _labelled(source) == [("train/cat/1", "jpg", 0), ("train/dog/2", "jpg", 1), ("val/dog/1", "jpg", 1)]
    assert list(source.skipped) == ["val/x.jpg: it is in no class's folder"]
    assert list(source.noted) == ["val: no folder of the classes 'cat', which other splits have"]


def test_photos_without_classes_are_found_in_all_folders(tmp_path: Path) -> None:
    source = photo_folder(write_photos(tmp_path, "b.jpg", "2019/x.JPEG", "2019/deep/y.png", "2019/z.xcf"))
    assert _labelled(source) == [("2019/deep/y", "png", None), ("2019/x", "jpg", None), ("b", "jpg", None)]
    assert list(source.others) == ["2019/z.xcf: .xcf: not a photo by its extension"]
    assert source.classes == {}


# Links, pipes and devices: nothing is packed twice, and nothing waits for ever


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "root", "a/1.jpg", "a/deep/2.jpg", "b/3.jpg")


@pytest.mark.parametrize(
    ("links", "text"),
    [
        ({"a/up": ".."}, r"root/a/up/a' and '.*root/a' are the same folder"),
        ({"a/x": "../b", "b/x": "../a"}, r"are the same folder"),  # without an end
        ({"c": "a"}, r"root/c' and '.*root/a' are the same folder"),
        ({"a/again": "deep"}, r"root/a/(again|deep)' and '.*root/a/(again|deep)' are the same folder"),
    ],
)
def test_folder_under_two_paths_is_refused(root: Path, links: dict[str, str], text: str) -> None:
    """Its photos would be packed twice, up to the forty links that Linux follows, or for ever."""
    for name, target in links.items():
        (root / name).symlink_to(target)
    with pytest.raises(DataError, match=text):
        imagefolder(root)


def test_folders_that_double_at_each_level_are_refused(root: Path) -> None:
    """Thirty levels of two links each are a thousand million paths, without any loop."""
    levels = [root / "a" / "levels", *(root.parent / f"level{number}" for number in range(30))]
    for level in levels:
        level.mkdir()
    for here, below in itertools.pairwise(levels):
        (here / "x").symlink_to(below)
        (here / "y").symlink_to(below)
    with pytest.raises(DataError, match="are the same folder"):
        imagefolder(root)


def test_links_elsewhere_are_followed(root: Path, tmp_path: Path) -> None:
    """A class may be a link to a folder, and a photo a link to a file, on any disk."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "4.jpg").write_bytes(encode_photo(seed=4))
    (root / "c").symlink_to(tmp_path / "other")
    (root / "b" / "5.jpg").symlink_to(tmp_path / "other" / "4.jpg")
    keys = [record.key for record in imagefolder(root).records]
    assert keys == ["a/1", "a/deep/2", "b/3", "b/5", "c/4"]


def test_what_is_no_file_is_named_and_does_not_wait(root: Path, tmp_path: Path) -> None:
    """A pipe without a writer, a socket, a device, a folder, a link that leads nowhere or to itself."""
    os.mkfifo(root / "a" / "pipe.jpg")
    with socket.socket(socket.AF_UNIX) as listening:
        here = Path.cwd()
        os.chdir(root / "a")  # a socket's path is short
        try:
            listening.bind("socket.jpg")
        finally:
            os.chdir(here)
    (root / "a" / "zero.jpg").symlink_to("/dev/zero")
    (root / "a" / "nowhere.jpg").symlink_to("missing")
    (root / "a" / "self.jpg").symlink_to("self.jpg")
    command = ("pack", "imagefolder", root, tmp_path / "out", "--max-bytes", "1MiB", "--jobs", "1")
    run_prep(*command, expect=DataError, match="5 of 8 records of .* are bad")
    result = run_prep(*command, "--on-bad", "skip", "--max-bad", "100%")
    for name in ("pipe", "zero"):
        assert f"{name}.jpg': expected a file, found a pipe or a device" in result.stderr
    assert "3 samples" in result.stdout


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everywhere")
def test_folder_that_cannot_be_read_is_named(root: Path) -> None:
    """Its photos would be missing without a word."""
    (root / "a" / "deep").chmod(0)
    with pytest.raises(StoreError, match=r"cannot read the folder '.*root/a/deep': Permission denied"):
        imagefolder(root)


def test_files_that_may_hold_labels_are_named(tmp_path: Path) -> None:
    """A user who packs such files as photos is told that the labels are not packed."""
    for number in range(2):
        (tmp_path / "images").mkdir(exist_ok=True)
        (tmp_path / "images" / f"{number}.jpg").write_bytes(encode_photo(seed=number))
        (tmp_path / "images" / f"{number}.txt").write_text("0 0.5 0.5 0.1 0.1\n")
    (noted,) = photo_folder(tmp_path).noted
    assert noted.startswith("not used, although they may hold labels: 'images/0.txt', 'images/1.txt'; labels are read")
