"""The column file: what it holds of every sample, a million of them, and what is refused in it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from dali_pipes.data_set.indexing import find_columns, find_manifest
from dali_pipes.errors import DataError
from dali_pipes.formats.column_spool import ColumnsBuilder
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import manifest_name
from dali_pipes.formats.sample_columns import MAX_COMPONENTS, Columns, SampleColumns, join_columns, lack
from dali_pipes.store.urls import resolve_shards
from tests.shards import Sample, make_samples, write_shards
from tests.simulated import index_of_rows, manifest_of, read_column_file

Row = tuple[str, frozenset[str], int]  # key, components, label


def built(shards: list[list[Row]]) -> SampleColumns:
    builder = ColumnsBuilder()
    for rows in shards:
        builder.add(index_of_rows(rows))
    return builder.finish()


def expect(columns: SampleColumns, rows: list[Row]) -> None:
    """These columns say of these samples what a loop over them says."""
    assert list(columns.keys) == [key for key, _, _ in rows]
    names = {name for _, components, _ in rows for name in components}
    assert columns.has.keys() >= names
    for name in columns.has:
        assert lack(columns, [name]).tolist() == [name not in components for _, components, _ in rows]
    if "cls" in names:
        view = Columns(columns, names=["s-0.tar"], counts=np.array([len(rows)]))
        assert view.labels.tolist() == [label if "cls" in components else -1 for _, components, label in rows]


ROWS = st.tuples(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    st.frozensets(st.sampled_from(["cls", "jpg", "seg.png", "txt"]), min_size=1),
    st.one_of(st.integers(-3, 200), st.sampled_from([2**15, -(2**31), 2**31, 2**63 - 1, -(2**63)])),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(ROWS, max_size=5), min_size=1, max_size=5), st.data())
def test_columns_are_those_of_a_loop(shards: list[list[Row]], data: st.DataObject) -> None:
    """Built, written, read, cut to some shards in any order, joined: always the samples' own."""
    everything = [row for rows in shards for row in rows]
    columns = built(shards)
    expect(columns, everything)
    manifest = manifest_of([len(rows) for rows in shards])
    written = columns.to_bytes(manifest=manifest.digest)
    again = read_column_file(written, manifest=manifest)
    expect(again, everything)
    assert again.to_bytes(manifest=manifest.digest) == written
    chosen = data.draw(st.lists(st.integers(0, len(shards) - 1), max_size=6))
    part = again.of_shards(manifest.samples, np.array(chosen, np.int64))
    expect(part, [row for number in chosen for row in shards[number]])
    cut = data.draw(st.integers(0, len(shards)))
    halves = [built(half) for half in (shards[:cut], shards[cut:])]
    expect(join_columns(halves), everything)


def test_too_many_components_are_refused() -> None:
    """A date in each name makes a component of each sample."""
    rows = [(f"k{row}", frozenset({f"{row:04d}.jpg"}), row) for row in range(MAX_COMPONENTS)]
    columns = built([rows])
    assert lack(columns, ["0000.jpg"]).tolist() == [row > 0 for row in range(MAX_COMPONENTS)]
    with pytest.raises(DataError, match=r"shard 's.tar': .* 1025 components, expected at most 1024, .* dates"):
        built([rows, [("x", frozenset({"cls"}), 0)]])


GOOD = [[("a", frozenset({"cls", "jpg"}), 3), ("é", frozenset({"jpg"}), 0), ("c", frozenset({"jpg", "cls"}), 5)]]


def changed_file(changes: Mapping[str, Any], header: Mapping[str, Any]) -> tuple[bytes, Manifest]:
    manifest = manifest_of([3])
    data = built(GOOD).to_bytes(manifest=manifest.digest)
    columns = {name: column for name, column in (load(data) | dict(changes)).items() if column is not None}
    stop = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(json.loads(data[8:stop])["__metadata__"]["header"]) | header
    return save(columns, metadata={"header": json.dumps(head)}), manifest


def photo_columns(height: int, width: int) -> dict[str, Any]:
    return {"height/jpg": np.array([height, 2, 3], np.int32), "width/jpg": np.array([width, 5, 6], np.int32)}


def test_sizes_of_photos_are_those_of_the_shard_indexes(tmp_path: Path) -> None:
    """Written and read, cut to some shards, joined; a photo that is not there or not readable has the size 0."""
    samples = [*make_samples([(30, 20), (7, 41)]), Sample("x", {"txt": b"x"}), Sample("y", {"image.jpg": b"no photo"})]
    write_shards(tmp_path, samples, per_shard=2)
    shards = resolve_shards(tmp_path, endpoint=None)
    manifest = find_manifest(shards)
    found = find_columns(shards, manifest)
    heights, widths = found.sizes["image.jpg"]
    assert (heights.dtype, heights.tolist(), widths.tolist()) == (np.uint16, [20, 41, 0, 0], [30, 7, 0, 0])
    part = found.of_shards(manifest.samples, np.array([1, 0]))
    assert part.sizes["image.jpg"][0].tolist() == [0, 0, 20, 41]
    assert Columns(part, names=manifest.names, counts=manifest.samples).size("image.jpg")[1].tolist() == [0, 0, 30, 7]
    assert join_columns([found, part]).sizes["image.jpg"][0].tolist() == [20, 41, 0, 0, 0, 0, 20, 41]
    with pytest.raises(DataError, match=r"no heights and widths of 'txt' .* \(found: image.jpg, trimap.png\)"):
        Columns(found, names=manifest.names, counts=manifest.samples).size("txt")


@pytest.mark.parametrize(
    ("changes", "header"),
    [
        (photo_columns(-1, 4), {}),
        (photo_columns(1, 4) | {"width/jpg": None}, {}),
        ({"label": np.array([1, 2], np.int8)}, {}),  # a row too few
        ({"label": None}, {}),
        ({"has/cls": np.array([0b1010_0000, 0], np.uint8)}, {}),  # a byte too many
        ({"has/png": np.array([0], np.uint8)}, {}),
        ({"key/ends": np.array([1, 3, 3])}, {}),  # a byte too many
        ({"key/bytes": np.zeros(0, np.uint8), "key/ends": np.zeros(0, np.int64)}, {}),
        ({}, {"components": ["jpg", "cls"]}),  # not sorted
        ({}, {"components": ["jpg"]}),  # columns of others
    ],
)
def test_column_file_that_says_what_cannot_be_is_refused(changes: dict[str, Any], header: dict[str, Any]) -> None:
    """Every column is as long as there are samples, every bit one of theirs."""
    data, manifest = changed_file(changes, header)
    with pytest.raises(
        DataError, match=r"'c' is a damaged dali-pipes column file: .*; rebuild it: dali-pipes prep index"
    ):
        read_column_file(data, manifest=manifest)


def test_column_file_whose_header_would_fill_the_memory_is_refused() -> None:
    """A terabyte, by its first eight bytes; nothing else is read."""
    with pytest.raises(DataError, match=r"found something else \(a header of 1099511627776 bytes\)"):
        read_column_file((1 << 40).to_bytes(8, "little") + bytes(1 << 20), manifest=manifest_of([3]))


def test_column_file_of_another_kind_or_version_is_refused(small_shards: Path) -> None:
    manifest = find_manifest(resolve_shards(small_shards, endpoint=None))
    with pytest.raises(DataError, match="expected a dali-pipes column file, version 3, found a dali-pipes man"):
        read_column_file((small_shards / manifest_name("s-")).read_bytes(), manifest=manifest)
    data, ours = changed_file({}, {"version": 2})
    with pytest.raises(DataError, match="version 3, found a dali-pipes column file, version 2; rebuild it"):
        read_column_file(data, manifest=ours)


def a_view(rows: list[Row]) -> Columns:
    return Columns(built([rows]), names=["a/s-0.tar", "b/s-0.tar"], counts=np.array([1, len(rows) - 1]))


def test_columns_are_arrays_that_numpy_chooses_by() -> None:
    """Keys and shards as numpy's own strings, labels as int64, of any characters."""
    view = a_view(
        [("cat/1", frozenset({"cls"}), 7), ("dog/é", frozenset({"jpg"}), 0), ("cat/2", frozenset({"cls"}), 300)]
    )
    assert np.strings.startswith(view.keys, "cat/").tolist() == [True, False, True]
    assert view.keys.tolist() == ["cat/1", "dog/é", "cat/2"]
    assert view.shards.tolist() == ["a/s-0.tar", "b/s-0.tar", "b/s-0.tar"]
    assert view.labels.dtype == np.int64
    assert view.labels.tolist() == [7, -1, 300]
    assert view.has("cls").tolist() == [True, False, True]
    assert view.components == ["cls", "jpg"]
    assert len(view) == 3


def test_columns_that_are_not_there_are_named() -> None:
    """Labels of a set without cls, and a component that no sample has."""
    view = a_view([("a", frozenset({"jpg", "txt"}), 0), ("b", frozenset({"jpg"}), 0)])
    with pytest.raises(
        DataError,
        match=r"no labels \(component 'cls'\) to choose by, in 2 samples from shard 'a/s-0.tar' on \(found: jpg, txt\)",
    ):
        _ = view.labels
    with pytest.raises(DataError, match=r"no component 'png' to choose by, in 2 samples .* \(found: jpg, txt\)"):
        view.has("png")
