"""Lists of paths and labels: what is guessed, what is asked for, and what is wrong with a row."""

import csv
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import webdataset

from dali_pipes.errors import DataError, PipesError
from dali_pipes.store.local import LocalStore
from prep.sources.record import Source, as_entry
from tests.shards import encode_mask, encode_photo, pack, table

Rows = Sequence[dict[str, Any]]


def _write_csv(path: Path, rows: Rows) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0], delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)


def _write_parquet(path: Path, rows: Rows) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=2)


def _write_lines(path: Path, rows: Rows) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n\n" for row in rows))


def _write_json(path: Path, rows: Rows) -> None:
    path.write_text(json.dumps(list(rows)))


WRITERS: dict[str, Callable[[Path, Rows], None]] = {
    "list.csv": _write_csv,
    "list.TSV": _write_csv,
    "list.json": _write_json,
    "list.jsonl": _write_lines,
    "list.ndjson": _write_lines,
    "list.parquet": _write_parquet,
}

ROWS: list[dict[str, Any]] = [
    {"path": "b/2.jpg", "label": "dog", "caption": 'a dog, "lying"', "size": 3},
    {"path": "a/1.PNG", "label": "cat", "caption": "ein Kätzchen", "size": 4},
    {"path": "a/10.jpg", "label": "cat", "caption": "two\nlines", "size": 5},
]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """The files that rows name."""
    for number, row in enumerate(ROWS):
        path = tmp_path / row["path"]
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encode_photo("png" if path.suffix == ".PNG" else "jpg", seed=number))
    return tmp_path


def _write(folder: Path, name: str, rows: Rows) -> Path:
    WRITERS[name](folder / name, rows)
    return folder / name


@pytest.mark.parametrize("name", WRITERS)
def test_table_of_every_kind_needs_no_option(photos: Path, name: str) -> None:
    """Order and keys are the list's; names of classes are numbered in sorted order."""
    source = table(_write(photos, name, ROWS))
    assert [record.key for record in source.records] == ["b/2", "a/1", "a/10"]
    assert [record.label for record in source.records] == [1, 0, 0]
    assert source.classes == {0: "cat", 1: "dog"}
    assert source.unused == ["caption", "size"]
    assert [dict(record.components) for record in source.records] == [
        {"jpg": photos / "b/2.jpg"},
        {"png": photos / "a/1.PNG"},
        {"jpg": photos / "a/10.jpg"},
    ]
    report = pack(source, store=LocalStore(photos / "out"))
    samples = list(webdataset.WebDataset(str(photos / "out" / report.shards[0]), shardshuffle=False))
    assert [(sample["__key__"], sample["cls"]) for sample in samples] == [("b/2", b"1"), ("a/1", b"0"), ("a/10", b"0")]
    assert samples[1]["png"] == (photos / "a/1.PNG").read_bytes()


@pytest.mark.parametrize("name", WRITERS)
def test_table_components_values_key_and_root_are_as_asked(photos: Path, name: str) -> None:
    lists = photos / "lists"
    lists.mkdir()
    (photos / "m.png").write_bytes(encode_mask())
    rows = [{"Photo": row["path"], "mask": "m.png", "id": number, **row} for number, row in enumerate(ROWS)]
    source = table(
        _write(lists, name, rows),
        components={"image": "Photo", "mask.png": "mask"},
        values={"caption.txt": "caption"},
        label="size",
        key="id",
        root=photos,
    )
    entries = [as_entry(record, source) for record in source.records]
    assert entries[1] == (
        "1",
        [
            ("caption.txt", "ein Kätzchen".encode()),
            ("cls", b"4"),
            ("image.png", str(photos / "a/1.PNG")),
            ("mask.png", str(photos / "m.png")),
        ],
    )
    assert entries[2][1][0] == ("caption.txt", b"two\nlines")
    assert source.classes == {3: "3", 4: "4", 5: "5"}


def _content(source: Source, row: int, component: str) -> object:
    return dict(as_entry(source.records[row], source)[1])[component]


@pytest.mark.parametrize("name", ["list.csv", "list.json", "list.parquet"])
def test_table_component_takes_any_column(photos: Path, name: str) -> None:
    """A text, JSON, a list of numbers, files of any kind; the photo need not be named again."""
    (photos / "n.json").write_text("{}")
    boxes = [[1, 2], [3, 4]]
    rows: list[dict[str, Any]] = [
        {**row, "boxes": json.dumps(boxes) if name == "list.csv" else boxes, "notes": "n.json", "size": number}
        for number, row in enumerate(ROWS)
    ]
    components = {"caption.txt": "caption", "boxes.json": "boxes", "notes.json": "notes", "size.txt": "size"}
    source = table(_write(photos, name, rows), components=components)
    assert _content(source, 0, "jpg") == str(photos / "b/2.jpg")
    assert _content(source, 1, "png") == str(photos / "a/1.PNG")
    assert _content(source, 1, "caption.txt") == "ein Kätzchen".encode()
    assert json.loads(str(_content(source, 0, "boxes.json"), "utf-8")) == boxes  # type: ignore[arg-type]
    assert _content(source, 0, "notes.json") == str(photos / "n.json")  # all cells end in .json: they are paths
    assert _content(source, 2, "size.txt") == b"2"
    assert source.unused == []
    as_text = table(_write(photos, name, rows), values={"notes.txt": "notes"})
    assert _content(as_text, 0, "notes.txt") == b"n.json"


@pytest.mark.parametrize(
    ("components", "cell", "message"),
    [
        ({"v.npy": "v"}, [[1, 2], [3]], r"row 0: 'v\.npy' must be a path, or numbers in rows of one length"),
        ({"v.json": "v"}, "a cat", r"row 0: 'v\.json' must be JSON, got 'a cat'"),
        ({"v.npy": "v"}, "1 2", r"row 0: 'v\.npy' must be a path, or numbers in rows of one length, got '1 2'"),
        ({"v.png": "v"}, 3, r"row 0: column 'v' must hold the path of a file with an extension, got 3"),
        ({"v": "path", "v.jpg": "path"}, 3, r"row 0: two files would be component 'v\.jpg'; name them apart"),
    ],
)
def test_table_cell_that_its_component_does_not_take_is_named(
    photos: Path, components: dict[str, str], cell: object, message: str
) -> None:
    rows = [{**ROWS[0], "v": cell}]
    with pytest.raises(DataError, match=message):
        pack(table(_write(photos, "list.json", rows), components=components), store=LocalStore(photos / "out"))


def test_table_without_labels_packs_none_when_asked(photos: Path) -> None:
    path = _write(photos, "list.csv", [{"file": row["path"]} for row in ROWS])
    with pytest.raises(DataError, match=r"list\.csv' has no column of labels by any of the names .*--unlabelled"):
        table(path)
    for has_labels in (False, None):
        assert [record.label for record in table(path, has_labels=has_labels).records] == [None] * 3


@pytest.mark.parametrize(
    ("labels", "expected", "classes"),
    [
        (["3", "1", "3"], [3, 1, 3], {1: "1", 3: "3"}),  # text that is integers only: class ids
        (["3", "x", "3"], [0, 1, 0], {0: "3", 1: "x"}),  # one is none: names
        (["-1", "+2", "007"], [-1, 2, 7], {-1: "-1", 2: "2", 7: "7"}),
        (["1.0", "2.0", "1.0"], [0, 1, 0], {0: "1.0", 1: "2.0"}),  # no integers: names
    ],
)
def test_table_labels_are_ids_or_names(
    photos: Path, labels: list[str], expected: list[int], classes: dict[int, str]
) -> None:
    rows = [{"path": row["path"], "label": label} for row, label in zip(ROWS, labels, strict=True)]
    source = table(_write(photos, "list.csv", rows))
    assert ([record.label for record in source.records], dict(source.classes)) == (expected, classes)


def test_table_of_a_byte_order_mark_and_absolute_paths(photos: Path) -> None:
    (photos / "list.csv").write_text(f"path,label\n{photos / 'b/2.jpg'},7\n", encoding="utf-8-sig")
    [record] = table(photos / "list.csv").records
    assert record.key == f"{photos}/b/2"[1:]
    assert record.components["jpg"] == photos / "b/2.jpg"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("l.csv", "", r"l\.csv' has no rows; expected a row of column names"),
        ("l.csv", "path,label\na.jpg,1,2\n", r"l\.csv', line 2: expected 2 fields, as in the first line"),
        ("l.csv", "path,path\na.jpg,1\n", r"l\.csv', line 1: two columns have one name"),
        ("l.csv", "x,label\na.jpg,1\n", r"no column of paths by any of the names path, .* \(found: 'x', 'label'"),
        ("l.csv", "path,label\na.jpg,1\n\n,2\n", r"l\.csv', line 4: column 'path' must hold the path .*, got ''"),
        ("l.json", "[", r"l\.json' is not JSON: "),
        ("l.json", '[{"path": "a.jpg", "label": 1}, {"path": "a"}]', r"l\.json', row 1: no 'label' \(found: path\)"),
        ("l.json", '[{"path": "a.jpg", "label": true}]', r"row 0: column 'label' must hold class ids .*, got True"),
        ("l.json", '[{"path": "a.jpg", "label": 99999999999999999999}]', r"'label' of .* holds integers past 64 bits"),
        ("l.jsonl", '{"path": "a.jpg", "label": 1}\n\n{"path"\n', r"l\.jsonl', line 3 is not JSON"),
        ("l.parquet", "PAR1 nonsense", r"l\.parquet' cannot be read as Parquet: "),
    ],
)
def test_table_that_is_wrong_names_the_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        table(tmp_path / name)


def test_table_path_that_makes_no_key_asks_for_a_column(tmp_path: Path) -> None:
    for path in ("a.b.jpg", "../a.jpg"):
        (tmp_path / "l.csv").write_text(f"path,label,key_\n{path},1,k\n")
        with pytest.raises(DataError, match=rf"line 2: '{re.escape(path)}' makes no key: .*--key COLUMN"):
            pack(table(tmp_path / "l.csv"), store=LocalStore(tmp_path / "out"))
        assert table(tmp_path / "l.csv", key="key_").records[0].key == "k"
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("components", "masks", "expected"),
    [
        ({}, None, set()),  # one photo a row
        ({"image": "path", "seg": "mask"}, None, {"seg.png"}),  # called so
        ({"jpg": "path", "png": "mask"}, None, {"png"}),  # a PNG beside a photo that is none
        ({"image": "path", "other": "path"}, None, set()),
        ({"image": "path", "seg": "mask"}, [], set()),
        ({"image": "path", "x": "mask"}, ["x.png"], {"x.png"}),
    ],
)
def test_table_masks_are_known_by_names_or_named(
    photos: Path, components: dict[str, str], masks: list[str] | None, expected: set[str]
) -> None:
    """By the names that `prep verify` goes by."""
    rows = [{**row, "mask": "m.png", "path": row["path"].replace("PNG", "jpg")} for row in ROWS]
    source = table(_write(photos, "list.csv", rows), components=components, masks=masks)
    assert (source.masks or set()) == expected


def test_table_that_is_not_there_unknown_or_no_text_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"cannot read '{tmp_path}/nope\.csv': No such file"):
        table(tmp_path / "nope.csv")
    with pytest.raises(ValueError, match=r"suffix must be one of \.csv, \.tsv, .*, got '\.txt'"):
        table(tmp_path / "nope.txt")
    (tmp_path / "l.csv").write_bytes(b"path,label\n\xff.jpg,1\n")
    with pytest.raises(DataError, match=r"l\.csv' is not UTF-8 text: byte 0xff"):
        table(tmp_path / "l.csv")
    (tmp_path / "l.csv").write_text("path,label\na.jpg,1\n")
    with pytest.raises(DataError, match=r"l\.csv' has no column 'split' \(found: path, label\)"):
        table(tmp_path / "l.csv", label="split")


def test_table_of_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(PipesError, match=r"l\.parquet': Parquet needs pyarrow; .*'dali-pipes\[parquet\]'"):
        table(tmp_path / "l.parquet")
