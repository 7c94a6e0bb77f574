import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dali_pipes.errors import DataError, PipesError
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from prep.left_out import MaxBad
from prep.sources.imagefolder import imagefolder, photo_folder
from prep.sources.pets import download_pets, pets
from tests.builders import pack
from tests.sources import encode_photo, write_pets

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
    (tmp_path / "images" / "boxer_1.jpg").unlink()
    (tmp_path / "annotations" / "trimaps" / "boxer_1.png").unlink()
    (tmp_path / "annotations" / "trimaps" / "boxer_2.png").unlink()
    (tmp_path / "images" / "unlisted_3.jpg").write_bytes(b"")
    (tmp_path / "annotations" / "trimaps" / "._boxer_2.png").write_bytes(b"")  # macOS's, in the original archive
    source = pets(tmp_path)
    assert [record.key for record in source.records] == list(NAMES)
    assert list(source.skipped) == [
        "boxer_1: no photo and no trimap",
        "boxer_2: no trimap",
        "unlisted_3: no row in list.txt",
    ]


def test_pets_below_torchvision_folder_is_found(tmp_path: Path) -> None:
    write_pets(tmp_path / "oxford-iiit-pet", NAMES)
    assert len(pets(tmp_path).records) == 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("beagle_1 five 2 1", r"list.txt', line 5: class id must be an integer, got 'five' for 'beagle_1'"),
        ("beagle_1 -1 2 1", "class id must be an integer, got '-1'"),
        ("beagle_1 1.5 2 1", r"class id must be an integer, got '1\.5'"),
        ("beagle_1 ٣ 2 1", "class id must be an integer, got '٣'"),  # int() would take it
        ("beagle_1", r"line 5: expected 'NAME CLASS-ID SPECIES BREED-ID', found 'beagle_1'"),
        ("Abyssinian_2 1 1 1", "line 5: 'Abyssinian_2' has a row already"),
        ("beagle_1 16 2 1", "gives class id 16 to 'great_pyrenees' and to 'beagle'"),
    ],
)
def test_pets_bad_row_is_named_by_file_and_line(tmp_path: Path, row: str, message: str) -> None:
    rows = write_pets(tmp_path, NAMES) / "annotations" / "list.txt"
    rows.write_text(f"{rows.read_text()}{row}\n")
    with pytest.raises(DataError, match=message):
        pets(tmp_path)


def _remove_photos(root: Path) -> None:
    for path in (root / "images").iterdir():
        path.rename(path.with_suffix(".jpeg"))


def _remove_list(root: Path) -> None:
    (root / "annotations" / "list.txt").unlink()


def _empty_list(root: Path) -> None:
    (root / "annotations" / "list.txt").write_text("#\n\n")


def _other_names(root: Path) -> None:
    (root / "annotations" / "list.txt").write_text("nope_1 1 1 1\n")


def _no_trimaps(root: Path) -> None:
    (root / "annotations" / "trimaps").rename(root / "moved")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_remove_photos, r"images' holds no \.jpg"),
        (_remove_list, "cannot read '.*list.txt', which names the records"),
        (_empty_list, "list.txt' holds no rows"),
        (_other_names, "holds no complete record: nope_1: no photo and no trimap; Abyssinian_10: no row"),
        (_no_trimaps, "no such directory: '.*annotations/trimaps'"),
    ],
)
def test_pets_incomplete_layout_says_what_is_missing(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(write_pets(tmp_path, NAMES))
    with pytest.raises(DataError, match=message):
        pets(tmp_path)


@pytest.mark.parametrize("read", [pets, imagefolder])
def test_source_directory_absent_empty_or_a_file_is_named(read: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such directory: '.*/nope'"):
        read(tmp_path / "nope")
    with pytest.raises(DataError, match=f"'{tmp_path}' is empty"):
        read(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file' is a file, expected a directory"):
        read(tmp_path / "file")


def test_pets_sample_has_292_records_and_names_two_photos(pets_dir: Path) -> None:
    source = pets(pets_dir)
    assert len(source.records) == 292
    assert list(source.skipped) == ["Abyssinian_34: no row in list.txt", "Abyssinian_82: no row in list.txt"]
    assert (source.classes[1], source.classes[16]) == ("Abyssinian", "great_pyrenees")


def test_download_pets_that_fails_says_where_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("torchvision.datasets")

    def fail(root: Path, *, download: bool) -> None:
        raise RuntimeError("offline")

    monkeypatch.setattr(datasets, "OxfordIIITPet", fail)
    with pytest.raises(
        PipesError, match=f"cannot download the Oxford-IIIT Pet data set into '{tmp_path}/new': offline"
    ):
        download_pets(tmp_path / "new")


def _write_photos(root: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(encode_photo(seed=number))
    return root


def test_imagefolder_class_is_the_folder_and_key_the_path(tmp_path: Path) -> None:
    _write_photos(tmp_path, "dog/b.jpg", "dog/a.JPG", "cat 1/deep/x.png", "cat 1/a.webp")
    source = imagefolder(tmp_path)
    assert [(record.key, *record.components, record.label) for record in source.records] == [
        ("cat 1/a", "webp", 0),
        ("cat 1/deep/x", "png", 0),
        ("dog/a", "jpg", 1),  # lower-cased
        ("dog/b", "jpg", 1),
    ]
    assert source.classes == {0: "cat 1", 1: "dog"}
    assert list(source.skipped) == []


def test_imagefolder_skips_and_names_what_is_no_photo(tmp_path: Path) -> None:
    _write_photos(tmp_path, "a/1.jpg", "a/2.CR2", "a/notes.txt", "a/.DS_Store", "a/.cache/2.jpg", "a/LICENCE")
    _write_photos(tmp_path, "top.jpg", "Thumbs.db", ".git/x.jpg")
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
        "a/LICENCE: no extension: not a photo by its extension",
        "a/notes.txt: .txt: not a photo by its extension",
    ]
    assert source.classes == {0: "a"}  # an empty class has no id


def test_class_ids_count_the_classes_that_have_samples(tmp_path: Path) -> None:
    """An empty folder, and a class whose photos are all bad, are named, and leave no gap; only bad photos are bad."""
    _write_photos(tmp_path / "in", "a/1.jpg", "c/1.jpg", "d/1.jpg", "e/1.jpg")
    (tmp_path / "in" / "b").mkdir()
    (tmp_path / "in" / "d" / "1.jpg").write_bytes(b"none")
    source = imagefolder(tmp_path / "in")
    assert source.classes == {0: "a", 1: "c", 2: "d", 3: "e"}
    assert [record.label for record in source.records] == [0, 1, 2, 3]
    report = pack(source, store=LocalStore(tmp_path / "out"), on_bad="skip", max_bad=MaxBad.parse("1"))
    assert report.classes == {0: "a", 1: "c", 2: "e"}
    assert report.noted == (
        "b: no photo in this class",
        "d: no record of this class is left, so it has no class id",
    )
    manifest = index_shards(resolve_shards(tmp_path / "out", endpoint=None))
    assert (manifest.classes, manifest.labels) == ({0: "a", 1: "c", 2: "e"}, {"min": 0, "max": 2})


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["1.jpg"], "holds no folder; expected one for each class"),
        (
            ["a/notes.txt"],
            r"holds no photo: a: no photo in this class; a/notes\.txt: \.txt: not a photo by its extension",
        ),
        (["a/1.jpg", "a/1.JPG"], "holds no photo: a/1: .*a/1.JPG' and '.*a/1.jpg' would be one component"),
    ],
)
def test_imagefolder_without_a_photo_is_an_error(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        imagefolder(_write_photos(tmp_path, *names))


def test_imagefolder_jpeg_files_are_one_component_whatever_their_extension(tmp_path: Path) -> None:
    source = imagefolder(_write_photos(tmp_path, "a/1.JPEG", "a/2.jpg", "b/3.jpe", "b/4.png"))
    assert [list(record.components) for record in source.records] == [["jpg"], ["jpg"], ["jpg"], ["png"]]


def test_imagefolder_dot_in_a_name_is_a_dash_in_the_key_and_noted(tmp_path: Path) -> None:
    """WebDataset would cut the key at the dot; names of screenshots are full of them."""
    source = imagefolder(_write_photos(tmp_path, "v1.2/Screen at 10.11.jpg", "v1.2/b.jpg"))
    assert [record.key for record in source.records] == ["v1.2/Screen at 10-11", "v1.2/b"]
    report = pack(source, store=LocalStore(tmp_path / "out"))
    assert report.noted == (
        "v1.2/Screen at 10-11: 'v1.2/Screen at 10.11.jpg' has a dot in its name, where a key would end",
    )


def test_two_photos_of_one_key_follow_on_bad(tmp_path: Path) -> None:
    """fail: an error that names both; skip: neither is packed; keep: both, as one sample."""
    source = imagefolder(_write_photos(tmp_path / "in", "a/1.jpg", "a/1.png", "a/2.jpg"))
    with pytest.raises(DataError, match=r"1 of 2 records .* bad: a/1: 2 photos have this key, expected one: 'a/1.jpg'"):
        pack(source, store=LocalStore(tmp_path / "out"))
    skipped = pack(source, store=LocalStore(tmp_path / "skip"), on_bad="skip")
    assert (skipped.num_samples, len(skipped.skipped)) == (1, 1)
    kept = pack(source, store=LocalStore(tmp_path / "keep"), on_bad="keep")
    assert kept.num_samples == 2
    assert kept.kept == ("a/1: 2 photos have this key, expected one: 'a/1.jpg', 'a/1.png'; rename one",)
    with tarfile.open(tmp_path / "keep" / "samples-000000.tar") as archive:
        assert archive.getnames() == ["a/1.cls", "a/1.jpg", "a/1.png", "a/2.cls", "a/2.jpg"]


def test_two_photos_of_one_key_and_component_can_only_be_skipped(tmp_path: Path) -> None:
    source = imagefolder(_write_photos(tmp_path / "in", "a/1.jpg", "a/1.JPEG", "a/2.jpg"))
    for on_bad in ("fail", "keep"):
        with pytest.raises(DataError, match=r"a/1: .* would be one component of one key"):
            pack(source, store=LocalStore(tmp_path / "out"), on_bad=on_bad)  # type: ignore[arg-type]
    assert pack(source, store=LocalStore(tmp_path / "out"), on_bad="skip").num_samples == 1


def test_imagefolder_of_splits_numbers_classes_once(tmp_path: Path) -> None:
    """A class that one split lacks does not shift the ids of the others."""
    _write_photos(tmp_path, "train/cat/1.jpg", "train/dog/2.jpg", "val/dog/1.jpg", "val/x.jpg")
    source = imagefolder(tmp_path, splits=("train", "val"))
    assert [(record.key, record.label) for record in source.records] == [
        ("train/cat/1", 0),
        ("train/dog/2", 1),
        ("val/dog/1", 1),
    ]
    assert list(source.skipped) == ["val/x.jpg: it is in no class's folder"]
    assert list(source.others) == ["val/cat: no photo in this class"]


def test_photos_without_classes_are_found_in_all_folders(tmp_path: Path) -> None:
    source = photo_folder(_write_photos(tmp_path, "b.jpg", "2019/x.JPEG", "2019/deep/y.png", "2019/z.xcf"))
    assert [(record.key, list(record.components), record.label) for record in source.records] == [
        ("2019/deep/y", ["png"], None),
        ("2019/x", ["jpg"], None),
        ("b", ["jpg"], None),
    ]
    assert list(source.others) == ["2019/z.xcf: .xcf: not a photo by its extension"]
    assert source.classes == {}


def test_imagefolder_same_stem_in_two_classes_is_fine(tmp_path: Path) -> None:
    source = imagefolder(_write_photos(tmp_path, "a/1.jpg", "b/1.png", "a/b/1.jpg"))
    assert [record.key for record in source.records] == ["a/1", "a/b/1", "b/1"]
