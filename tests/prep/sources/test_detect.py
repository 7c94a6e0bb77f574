"""What a source is: each kind by its files alone; what may be two kinds, or none, is an error that says why."""

from pathlib import Path

import pytest

from dali_pipes.errors import DataError
from prep.sources.detect import detect
from tests.shards import encode_photo, write_pets


def write(root: Path, *names: str) -> Path:
    """Files by their names: photos, a table of two of them, others empty."""
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.lower().endswith((".jpg", ".jpeg", ".png")):
            path.write_bytes(encode_photo(seed=number))
        else:
            path.write_text("path,label\n1.jpg,cat\n2.jpg,dog\n" if name.endswith(".csv") else "")
    return root


SPLITS = ("train", "val")


@pytest.mark.parametrize(
    ("names", "kind", "text", "splits"),
    [
        (["cat/deep/1.jpg", "dog/2.JPEG", "notes/x.txt"], "imagefolder", "class folders: 'cat', 'dog'", ()),
        (["train/a/1.jpg", "val/b/3.jpg"], "imagefolder", "class folders: 'a', 'b', splits 'train', 'val'", SPLITS),
        (["train/1.jpg", "val/2.jpg"], "photos", "photos without classes, splits 'train', 'val'", SPLITS),
        (["val2017/2.jpg", "a/a.json"], "photos", "photos without classes, splits 'val2017'", ("val2017",)),
        (["with_mask/1.jpg", "masks/1.jpg"], "imagefolder", "class folders: 'masks', 'with_mask'", ()),
        (["1.jpg", "2.png", "Thumbs.db"], "photos", "photos without classes", ()),
        (["2019/1.jpg"], "photos", "photos without classes, in the folder '2019'", ()),
        (["list.csv"], "table", "the table 'list.csv' with the columns path, label", ()),
        (["a-0.tar", "a-1.tar", ".dali-pipes/a-manifest.safetensors"], "tars", "tars", ()),
    ],
)
def test_directory_is_known_by_its_files(
    tmp_path: Path, names: list[str], kind: str, text: str, splits: tuple[str, ...]
) -> None:
    found = detect(str(write(tmp_path, *names)))
    assert (found.kind, found.text, found.splits) == (kind, text, splits)


def test_pets_layout_is_not_taken_for_class_folders(tmp_path: Path) -> None:
    assert detect(str(write_pets(tmp_path / "a", {"beagle_1": 1}))).kind == "pets"
    write_pets(tmp_path / "b" / "oxford-iiit-pet", {"beagle_1": 1})
    assert detect(str(tmp_path / "b")).kind == "pets"


def test_files_prefixes_and_urls_are_known_by_their_names(tmp_path: Path) -> None:
    write(tmp_path, "list.csv", "a-0.tar")
    kinds = [detect(str(tmp_path / name)).kind for name in ("list.csv", "a-0.tar", "a-", "a-*.tar")]
    assert kinds == ["table", "tars", "tars", "tars"]
    assert detect("ais://pets/samples-").kind == "tars"
    with pytest.raises(DataError, match=r"no such file or directory: '.*/nothing'"):
        detect(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["cat/1.jpg", "3.jpg"], r"may be several .*'cat' \(--kind imagefolder\); .* \(--kind photos\); say which"),
        (["images/1.jpg", "images/2.jpg", "train.csv"], r"the table 'train\.csv' .* \(--kind table\); photos without"),
        (["images/1.jpg", "masks/1.png"], r"class folders: 'images', 'masks' .*; photos without"),
        (["photos/cat/1.jpg"], r"photos without classes, in the folder 'photos' .*; one class 'photos'"),
        (["a-0.tar", "cat/1.jpg", "dog/1.jpg"], r"tars \(--kind tars\); class folders"),
        (["a.txt", "b.txt", "c/d.mov"], r"is no source that is known: looked for class folders .*, a table of paths"),
        (["train/cat/1.jpg", "test/2.jpg"], r"'train' has folders of classes, and 'test' has photos without them"),
    ],
)
def test_what_may_be_several_things_or_none_is_an_error(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        detect(str(write(tmp_path, *names)))


def test_kind_decides_and_must_fit(tmp_path: Path) -> None:
    write(tmp_path, "cat/1.jpg", "dog/2.jpg", "3.jpg")
    assert detect(str(tmp_path), kind="imagefolder").open().classes == {0: "cat", 1: "dog"}
    photos = detect(str(tmp_path), kind="photos").open()
    assert [record.key for record in photos.records] == ["3", "cat/1", "dog/2"]
    with pytest.raises(DataError, match=r"is no table: found class folders"):
        detect(str(tmp_path), kind="table")
    with pytest.raises(DataError, match=r"a-\{0\.\.3\}\.tar' is no photos: found tars \(--kind tars\)"):
        detect("ais://pets/a-{0..3}.tar", kind="photos")
    write(tmp_path / "years", "2019/1.jpg", "2020/2.jpg")
    assert detect(str(tmp_path / "years"), kind="photos").open().classes == {}


@pytest.mark.parametrize(
    ("names", "folder", "kind", "text"),
    [
        (["cat/1.jpg"], "", "imagefolder", "class folders: 'cat'"),
        (["cat/old/1.jpg"], "", "imagefolder", "class folders: 'cat'"),  # else photos, or one class
        (["cat/1.jpg", "cat/old/2.jpg"], "cat", "imagefolder", "photos of the class 'cat'"),
        (["fox/1.jpg"], "", "imagefolder", "class folders: 'fox'"),  # a new class, as one of several would be
        (["val/1.jpg"], "", "photos", "photos without classes, splits 'val'"),
    ],
)
def test_classes_of_a_data_set_decide(tmp_path: Path, names: list[str], folder: str, kind: str, text: str) -> None:
    """What is added to a data set that has class names; one class folder alone is no less than several."""
    found = detect(str(write(tmp_path, *names) / folder), classes=["cat", "train"])
    assert (found.kind, found.text) == (kind, text)
    assert len(found.open().records) == len(names)
