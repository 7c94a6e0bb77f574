"""Parquet files as Hugging Face's datasets writes them: photos in cells, labels with names, other columns."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

from dali_pipes.errors import DataError
from dali_pipes.store.local import LocalStore
from prep.sources.detect import detect
from prep.sources.hf import read_schema
from prep.tar.inside import parquet_file
from tests.shards import encode_mask, encode_photo, hf, pack, table

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

IMAGE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
NAMES = ["cat", "dog", "owl"]


def write_hf(
    path: Path, rows: list[dict[str, Any]], *, names: list[str] | None = NAMES, images: tuple[str, ...] = ("image",)
) -> Path:
    """A file with row groups of two, and with the metadata that `datasets` leaves."""
    types = {name: IMAGE if name in images else pyarrow.array([row[name] for row in rows]).type for name in rows[0]}
    table = pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(list(types.items())))
    features: dict[str, Any] = {name: {"_type": "Image"} for name in images}
    if names:
        features["label"] = {"names": names, "_type": "ClassLabel"}
    info = {"info": {"features": features}}
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(info)}), path, row_group_size=2)
    return path


def _rows(count: int, *, first: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "image": {
                "bytes": encode_photo("png" if number % 3 == 2 else "jpg", seed=first + number),
                "path": f"{number}.x",
            },
            "label": (first + number) % 3,
            "caption": f"photo {number}",
            "objects": {"bbox": [[1.5, 2.0, 3.0, 4.0]], "category": [7]},
            "vector": [0.5, float(number)],
        }
        for number in range(count)
    ]


def test_photos_keep_their_bytes_and_labels_get_the_names_of_the_metadata(tmp_path: Path) -> None:
    rows = _rows(7)
    source = hf([write_hf(tmp_path / "train-00000-of-00001.parquet", rows)])
    assert source.classes == detect(str(tmp_path)).open().classes == dict(enumerate(NAMES))
    assert source.unused == ["caption", "objects", "vector"]
    with pytest.raises(DataError, match="the names of classes are no list of texts"):
        hf([write_hf(tmp_path / "odd.parquet", rows, names=[0])])  # type: ignore[list-item]
    report = pack(source, store=LocalStore(tmp_path / "out"), max_count=3)
    samples = list(webdataset.WebDataset([str(tmp_path / "out" / one) for one in report.shards], shardshuffle=False))
    assert [sample["__key__"] for sample in samples] == [f"train-00000-of-00001/{row:06d}" for row in range(7)]
    for row, sample in zip(rows, samples, strict=True):
        assert [sample[name] for name in ("jpg", "png") if name in sample] == [row["image"]["bytes"]]
        assert sample["cls"] == b"%d" % row["label"]
    again = pack(source, store=LocalStore(tmp_path / "out"), max_count=3)
    assert again.num_written == 0


def test_photo_that_is_only_a_path_is_a_file_beside_the_parquet_file(tmp_path: Path) -> None:
    (tmp_path / "x.JPG").write_bytes(encode_photo())
    rows = [{"image": {"bytes": None, "path": name}, "label": 0} for name in ("x.JPG", "gone.jpg")]
    source = hf([write_hf(tmp_path / "a.parquet", rows)])
    with pytest.raises(DataError, match=rf"1 of 2 records .* a/000001: jpg: cannot read '{tmp_path}/gone\.jpg'"):
        pack(source, store=LocalStore(tmp_path / "out"))
    assert pack(source, store=LocalStore(tmp_path / "out"), on_bad="skip").num_samples == 1


def test_other_columns_become_the_components_that_are_asked_for(tmp_path: Path) -> None:
    """The photo need not be named again; a mask is checked as a mask."""
    rows = [{**row, "annotation": {"bytes": encode_mask(), "path": None}} for row in _rows(3)]
    path = write_hf(tmp_path / "a.parquet", rows, images=("image", "annotation"))
    source = hf(
        [path],
        components={"mask": "annotation", "caption.txt": "caption", "objects.json": "objects", "vector.npy": "vector"},
        has_labels=False,
    )
    assert source.masks == {"mask.png"}
    assert source.unused == ["label"]
    pack(source, store=LocalStore(tmp_path / "out"))
    sample = next(iter(webdataset.WebDataset(str(tmp_path / "out" / "samples-000000.tar"), shardshuffle=False)))
    assert sample["jpg"] == rows[0]["image"]["bytes"]
    assert sample["mask.png"] == encode_mask()
    assert sample["caption.txt"] == b"photo 0"
    assert json.loads(sample["objects.json"]) == rows[0]["objects"]
    array = np.load(io.BytesIO(sample["vector.npy"]))
    assert (array.dtype, array.tolist()) == (np.float32, [0.5, 0.0])
    assert "cls" not in sample


def test_row_without_a_photo_is_named_and_left_out_when_asked(tmp_path: Path) -> None:
    """A row without a text is different: it is a bad record."""
    texts = [{**row, "caption": None} for row in _rows(1)]
    empty = hf([write_hf(tmp_path / "b.parquet", texts)], components={"caption.txt": "caption"})
    with pytest.raises(DataError, match=r"1 of 1 records .* are bad: b/000000: caption\.txt is empty"):
        pack(empty, store=LocalStore(tmp_path / "out"))
    rows = [*_rows(3), {**_rows(1)[0], "image": {"bytes": None, "path": None}}, {**_rows(1)[0], "image": None}]
    source = hf([write_hf(tmp_path / "a.parquet", rows)])
    with pytest.raises(DataError, match=r"2 records of Parquet .*a\.parquet', row 3: no photo in column 'image'"):
        pack(source, store=LocalStore(tmp_path / "out"))
    report = pack(source, store=LocalStore(tmp_path / "out"), on_bad="skip")
    assert (report.num_samples, len(report.skipped)) == (3, 2)


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    rows = _rows(2)
    listed = write_hf(tmp_path / "list.parquet", [{"path": "a.jpg", "label": 1}], images=())
    with pytest.raises(
        DataError, match=r"one column of photos, found none \(columns: path, label\); .* prep pack table"
    ):
        hf([listed])
    two_photos = [{"x": row["image"], "y": row["image"]} for row in rows]
    two = write_hf(tmp_path / "two.parquet", two_photos, images=("x", "y"))
    with pytest.raises(DataError, match=r"one column of photos, found x, y .*name the photo: --component image=COLUMN"):
        hf([two])
    with pytest.raises(DataError, match=r"two\.parquet' has the columns x, y, expected those of .*list\.parquet'"):
        hf([listed, two])


def test_metadata_of_lists_and_structs_are_passed_over(tmp_path: Path) -> None:
    """`datasets` before version 4 writes the feature of a list as a list."""
    features = {
        "objects": [{"bbox": [{"dtype": "float32", "_type": "Value"}]}],
        "about": {"_type": {"dtype": "string", "_type": "Value"}},
        "label": {"names": NAMES, "_type": "ClassLabel"},
    }
    text = json.dumps({"info": {"features": features}})
    parquet.write_table(
        pyarrow.table({"label": [1]}).replace_schema_metadata({"huggingface": text}), tmp_path / "a.parquet"
    )
    assert read_schema(tmp_path / "a.parquet").classes == {"label": NAMES}


@pytest.mark.parametrize(("reads", "value"), [(table, None), (table, "a.jpg" * 20), (hf, bytes(70_000))])
def test_file_whose_few_bytes_stand_for_many_is_refused(tmp_path: Path, reads: Any, value: Any) -> None:
    """Rows that are missing, or that repeat one value: a few kilobytes on the disk."""
    num = 1_500_000 if reads is table else 3_000
    repeated = pyarrow.DictionaryArray.from_arrays(np.zeros(num, np.int32), pyarrow.array([value]))
    column = pyarrow.nulls(num) if value is None else repeated
    path = tmp_path / "bomb.parquet"
    written = pyarrow.table({"path": column, "label": column} if reads is table else {"image": column})
    parquet.write_table(written, path, compression="zstd", store_schema=reads is table)
    assert path.stat().st_size < 200_000
    with pytest.raises(DataError, match=r"bomb\.parquet' unpacks to more than 64 MiB and 200 times its size"):
        reads(path if reads is table else [path])


@pytest.mark.parametrize("kind", ["long values", "a long list"])
def test_no_batch_of_a_file_takes_more_than_its_share(tmp_path: Path, kind: str) -> None:
    """A few rows that repeat a value of 4 MiB, or one row with millions of elements: refused before it is in memory."""
    path = tmp_path / "bomb.parquet"
    if kind == "long values":
        repeated = pyarrow.DictionaryArray.from_arrays(np.zeros(400, np.int32), pyarrow.array([bytes(4 << 20)]))
        parquet.write_table(pyarrow.table({"x": repeated}), path, compression="zstd", store_schema=False)
    else:
        values = pyarrow.array(np.zeros(20_000_000, np.bool_))
        parquet.write_table(pyarrow.table({"x": pyarrow.ListArray.from_arrays([0, len(values)], values)}), path)
        del values
    usual = pyarrow.default_memory_pool()
    pool = pyarrow.proxy_memory_pool(usual)
    pyarrow.set_memory_pool(pool)
    try:
        with pytest.raises(DataError, match="unpacks to more than 64 MiB"), parquet_file(path) as file:
            file.values("x")
    finally:
        pyarrow.set_memory_pool(usual)
    assert pool.max_memory() < 400 << 20
