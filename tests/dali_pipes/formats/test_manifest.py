"""The files that describe a data set: what they hold, a million rows of it, and what is refused in them."""

import dataclasses
import json
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.data_set.indexing import find_manifest, index_in_memory, index_shard
from dali_pipes.errors import DataError
from dali_pipes.formats.manifest import Manifest, Texts, pack_texts
from dali_pipes.formats.names import index_name, manifest_name
from dali_pipes.formats.shard_index import PhotoColumns, ShardIndex
from dali_pipes.formats.texts import object_name_problem
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from tests.builders import Sample, make_samples, photo_bytes, write_shards, write_tar
from tests.simulated import manifest_of

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=9), max_size=12)


# --- texts ------------------------------------------------------------------------------------------------------------


@given(TEXTS, st.data())
def test_texts_are_the_sequence_that_they_were_made_of(texts: list[str], data: st.DataObject) -> None:
    """Every row, slice and selection, and equality in both directions, whatever the characters."""
    columns = Texts(*pack_texts(texts))
    columns.check()
    assert columns == texts
    assert tuple(texts) == columns
    assert columns == Texts(*pack_texts(tuple(texts)))
    assert list(columns) == texts
    assert [columns[row] for row in range(-len(texts), len(texts))] == texts * 2
    cut = data.draw(st.slices(len(texts)))
    assert columns[cut] == texts[cut]
    assert list(reversed(columns)) == texts[::-1]
    assert columns != [*texts, ""]
    assert columns != "".join(texts)
    if texts:
        rows = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=20))
        assert columns.take(np.array(rows, np.int64)) == [texts[row] for row in rows]
        assert columns[np.int64(0)] == texts[0]
    with pytest.raises(IndexError, match=rf"row must be in \[0, {len(texts)}\)"):
        columns[len(texts)]


@pytest.mark.parametrize(
    ("data", "ends", "text"),
    [
        (b"abc", [2, 1, 3], "ends must rise"),
        (b"abc", [-1, 3], "ends must rise"),
        (b"abc", [2], "ends must rise"),  # a byte too many
        (b"abc", [4], "ends must rise"),
        (b"abc", [], "ends must rise"),
        (b"", [2**63 - 1, -(2**63), -1, 0], "ends must rise"),  # rises by 1, 2**63 - 1 and 1 where that wraps
        (b"a\xff", [1, 2], "can't decode byte 0xff"),
        ("é".encode(), [1, 2], "can't decode|not UTF-8"),  # a text that starts within a character
        ("é".encode()[:1], [1], "unexpected end of data"),
    ],
)
def test_texts_check_refuses_columns_that_hold_none(data: bytes, ends: list[int], text: str) -> None:
    texts = Texts(np.frombuffer(data, np.uint8), np.array(ends, np.int64))
    with pytest.raises(ValueError, match=text):
        texts.check()


def test_pack_texts_of_a_name_in_no_utf8_says_which() -> None:
    """What `os.listdir` gives for a file named in another encoding."""
    with pytest.raises(DataError, match=r"name 'caf\\xe9\.tar' is not UTF-8; rename it"):
        pack_texts(["a.tar", "caf\udce9.tar"])


@pytest.mark.parametrize(
    ("name", "is_fine"),
    [
        ("a.tar", True),
        ("a/b.tar", True),
        ("..a/b..tar", True),
        (".a", True),
        ("...", True),
        ("é", True),
        ("", False),
        (".", False),
        ("..", False),
        ("../a.tar", False),
        ("a/../b.tar", False),
        ("a/..", False),
        ("a/./b", False),
        ("/a.tar", False),
        ("a//b.tar", False),
        ("a/", False),
        ("a\0.tar", False),
    ],
)
@pytest.mark.parametrize("others", [(), ("first.tar",)])
def test_object_name_problem_finds_the_name(name: str, is_fine: bool, others: tuple[str, ...]) -> None:
    """Alone, and between others whose bytes stand directly before and after."""
    problem = object_name_problem(Texts(*pack_texts([*others, name, *others])))
    assert (problem is None) is is_fine
    assert is_fine or ascii(name) in problem


# --- the manifest -----------------------------------------------------------------------------------------------------


@pytest.fixture
def manifest(small_shards: Path) -> Manifest:
    return Manifest.from_bytes((small_shards / manifest_name("s-")).read_bytes(), where="m")


def test_manifest_of_another_kind_or_version_is_refused(
    small_shards: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard index in its place; a file of the first version."""
    from dali_pipes.formats import manifest as module

    index = (small_shards / index_name("s-000000.tar")).read_bytes()
    with pytest.raises(DataError, match="found a dali-pipes shard index, version 3"):
        Manifest.from_bytes(index, where="m")
    monkeypatch.setattr(module, "MANIFEST_VERSION", 1)
    data = manifest.to_bytes()
    monkeypatch.undo()
    with pytest.raises(
        DataError,
        match="expected a dali-pipes manifest, version 4, found a dali-pipes manifest, version 1; rebuild it",
    ):
        Manifest.from_bytes(data, where="m")


def test_manifest_select_unknown_shard_is_named(manifest: Manifest) -> None:
    """A shard that was not indexed with the others."""
    with pytest.raises(DataError, match=r"manifest 'm' lists 4 shards, not 's-9.tar' and 1 more; index them"):
        manifest.select(["s-000000.tar", "s-9.tar", "s-10.tar"], where="m")


def test_manifest_select_takes_rows_in_the_order_given(manifest: Manifest) -> None:
    """Columns with their names; all of them in their order is the manifest itself."""
    chosen = manifest.select(("s-000003.tar", "s-000001.tar"), where="m")
    assert chosen.names == ("s-000003.tar", "s-000001.tar")
    for column in ("shard_bytes", "checksums", "samples", "index_bytes", "index_checksums"):
        assert getattr(chosen, column).tolist() == getattr(manifest, column)[[3, 1]].tolist()
    assert manifest.select(tuple(manifest.names), where="m") is manifest
    assert manifest.select(manifest.names[:], where="m") is manifest


def test_manifest_digest_is_of_the_data(manifest: Manifest) -> None:
    """Names, sizes, checksums, counts and their order count; nothing else does."""
    reversed_ = manifest.select(manifest.names[::-1], where="m")
    assert reversed_.digest != manifest.digest
    assert reversed_.select(manifest.names, where="m").digest == manifest.digest
    assert dataclasses.replace(manifest, classes={1: "one"}, photos={}).digest == manifest.digest
    changed = dataclasses.replace(manifest, checksums=manifest.checksums ^ np.uint64(1))
    assert changed.digest != manifest.digest


def test_manifest_digest_of_a_set_stays_what_it_was() -> None:
    """Saved states name it: another version of the file is still the same data set."""
    manifest = manifest_of([1, 2], names=["a.tar", "b.tar"])
    assert manifest.digest == "c1d25955e38520da5bbf151754fbdb15c76eade691d963d6482e6f5281b55eed"


def test_manifest_sums_up_photos_and_labels(tmp_path: Path) -> None:
    """Formats as the bytes say, not the names; what has no header, or no size in it; samples that lack a component."""
    jpeg = photo_bytes(0, 30, 20)
    members = {
        "a": {"cls": b"7", "image.jpg": jpeg, "mask.png": jpeg},
        "b": {"cls": b"-2", "image.jpg": b"GIF89a" + struct.pack("<HH", 12, 34)},
        "c": {"image.jpg": b"no photo"},
        "d": {"cls": b"3", "image.jpg": b"\xff\xd8\xff cut off"},  # a JPEG, of no size
        "e": {"json": b"{}"},
    }
    for row, (key, components) in enumerate(members.items()):
        write_tar(tmp_path / f"s-{row}.tar", [Sample(key, components)])
    manifest = index_shards(resolve_shards(tmp_path, endpoint=None))
    assert manifest.photos == {
        "image.jpg": {"GIF": 1, "JPEG": 2, "unknown": 1, "unsized": 2},
        "mask.png": {"JPEG": 1},
    }
    assert manifest.labels == {"min": -2, "max": 7}
    assert manifest.components == {"cls": 3, "image.jpg": 4, "json": 1, "mask.png": 1}
    again = Manifest.from_bytes(manifest.to_bytes(), where="m")
    assert (again.photos, again.labels, again.components) == (manifest.photos, manifest.labels, manifest.components)


def a_million_shards() -> Manifest:
    count = 1_000_000
    return Manifest(
        names=[f"train/shuffled-{i:07d}.tar" for i in range(count)],
        shard_bytes=np.full(count, 100 << 20),
        checksums=np.arange(count, dtype=np.uint64),
        samples=np.full(count, 1000),
        index_bytes=np.full(count, 70_000),
        index_checksums=np.arange(count, dtype=np.uint64),
    )


def test_manifest_of_a_million_shards_is_columns() -> None:
    """A million rows: under 100 MB, read and checked without a Python object a row, a row selected without many."""
    data = a_million_shards().to_bytes()
    assert len(data) < 100_000_000
    started = time.perf_counter()
    manifest = Manifest.from_bytes(data, where="m")
    assert manifest.num_samples == 1_000_000_000
    assert manifest.names[777_777] == "train/shuffled-0777777.tar"
    # Some 0.2 s: a loop over the names alone would take longer than the rest, and a machine may be busy.
    assert time.perf_counter() - started < 5
    assert manifest.select(["train/shuffled-0000042.tar"], where="m").checksums.tolist() == [42]


# --- broken files -----------------------------------------------------------------------------------------------------


def an_index(**changes: Any) -> ShardIndex:
    """Two samples in a shard of 4,096 bytes; the second lacks its label."""
    columns = {
        "shard": "a.tar",
        "shard_bytes": 4096,
        "shard_checksum": 7,
        "keys": ("a", "é"),
        "offsets": {"cls": np.array([512, -1]), "jpg": np.array([1536, 2560])},
        "sizes": {"cls": np.array([1, 0]), "jpg": np.array([100, 1536])},
        "labels": np.array([3, 0]),
        "photos": {
            "jpg": PhotoColumns(
                height=np.array([10, 0], np.int32), width=np.array([20, 0], np.int32), format=np.array([1, 0], np.uint8)
            )
        },
    }
    return ShardIndex(**(columns | changes))


def with_jpg(offsets: list[int], sizes: list[int]) -> dict[str, Any]:
    good = an_index()
    return {"offsets": good.offsets | {"jpg": np.array(offsets)}, "sizes": good.sizes | {"jpg": np.array(sizes)}}


def with_photo(**columns: Any) -> dict[str, Any]:
    return {"photos": {"jpg": dataclasses.replace(an_index().photos["jpg"], **columns)}}


def header_of(data: bytes) -> dict[str, Any]:
    stop = 8 + int.from_bytes(data[:8], "little")
    found: dict[str, Any] = json.loads(json.loads(data[8:stop])["__metadata__"]["header"])
    return found


def test_orientations_are_kept_only_where_a_photo_is_turned() -> None:
    """An index whose photos are upright has no column of orientations."""
    plain = an_index().to_bytes()
    upright = an_index(**with_photo(orientation=np.array([1, 1], np.uint8)))
    assert upright.to_bytes() == plain
    assert ShardIndex.from_bytes(plain, where="i").photos["jpg"].orientation is None
    turned = ShardIndex.from_bytes(an_index(**with_photo(orientation=np.array([6, 1], np.uint8))).to_bytes(), where="i")
    photo = turned.photos["jpg"]
    assert photo.orientation is not None
    assert photo.orientation.tolist() == [6, 1]
    assert [side.tolist() for side in photo.upright_size] == [[20, 0], [10, 0]]


def test_shard_index_round_trips() -> None:
    """Keys as lazily decoded texts; the last component ends where the shard does."""
    index = ShardIndex.from_bytes(an_index().to_bytes(), where="i")
    assert index.to_bytes() == an_index().to_bytes()
    assert isinstance(index.keys, Texts)
    assert index.keys == ("a", "é")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (with_jpg([1536, 2561], [1, 1]), "component 'jpg', row 1, within .* found 1 bytes at 2561"),
        (with_jpg([-512, 512], [1, 1]), "row 0, .* found 1 bytes at -512"),
        (with_jpg([1536, 2560], [1, 1537]), "row 1, within the shard's 4096 bytes .* found 1537 bytes at 2560"),
        (with_jpg([1536, 2**62], [1, 2**62]), "row 1"),  # a sum that wraps
        (with_jpg([1536, 2560], [1, 2**63 - 1]), "row 1"),
        (with_jpg([1536, 2560], [-1, 1]), "row 0"),
        (with_jpg([-1, 2560], [1, 1]), "row 0, .* found 1 bytes at -1"),
        (with_jpg([1536], [1]), "column 'offset/jpg' of 2 int64, found int64 of shape"),
        (
            with_jpg([1536, 2560], [1, 1]) | {"sizes": {"cls": np.zeros(2, np.int32), "jpg": np.zeros(2, np.int32)}},
            "found int32",
        ),
        (with_photo(height=np.array([-1, 0], np.int32)), "without negative heights and widths"),
        (with_photo(width=np.array([0, -5], np.int32)), "without negative heights and widths"),
        (with_photo(format=np.array([0, 15], np.uint8)), "formats of photos 'jpg' below 15, found 15"),
        (with_photo(orientation=np.array([2, 9], np.uint8)), "orientations of photos 'jpg' from 1 to 8"),
        (with_photo(orientation=np.array([2, 0], np.uint8)), "orientations of photos 'jpg' from 1 to 8"),
        (with_photo(orientation=np.array([2, 1])), "column 'orientation/jpg' of 2 uint8, found int64"),
        (with_photo(height=np.array([1, 2])), "column 'height/jpg' of 2 int32, found int64"),
        ({"labels": None}, "column 'label' of 2 int64, found none"),
        ({"shard_bytes": -1}, "'shard_bytes' to be a whole number, found -1"),
        ({"shard_bytes": 2**63}, "'shard_bytes' to be a whole number"),
        ({"shard_bytes": True}, "'shard_bytes' to be a whole number"),
        ({"shard": 5}, "'shard' to be a text, found 5"),
        ({"keys": Texts(np.frombuffer(b"a\xff", np.uint8), np.array([1, 2]))}, "columns 'key/bytes' and .* 0xff"),
        ({"keys": Texts(np.frombuffer(b"ab", np.uint8), np.array([2, 1]))}, "ends must rise from 0 to 2"),
    ],
)
def test_shard_index_that_says_what_cannot_be_is_refused(changes: dict[str, Any], text: str) -> None:
    """Every place is within the shard before anything is read from it."""
    data = an_index(**changes).to_bytes()
    with pytest.raises(DataError, match=f"'i' is a broken dali-pipes shard index: expected .*{text}.*; rebuild it"):
        ShardIndex.from_bytes(data, where="i")


def a_manifest(**changes: Any) -> Manifest:
    sums = {
        "components": {"cls": 3, "jpg": 4},
        "classes": {1: "one"},
        "photos": {"jpg": {"JPEG": 3, "unknown": 1}},
        "labels": {"min": 1, "max": 1},
    }
    return manifest_of([512, 1024], **(sums | changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"names": ("a.tar", "../b.tar")}, "names of shards, found a name must hold no NUL .* got '../b.tar'"),
        ({"names": ("/a.tar", "b.tar")}, "got '/a.tar'"),
        ({"names": ("a\0.tar", "b.tar")}, r"got 'a\\x00\.tar'"),
        ({"names": ("a.tar",)}, "column 'bytes' of 1 int64, found int64 of shape"),
        ({"shard_bytes": np.array([1, -1])}, "column 'bytes' of counts with a sum under 2"),
        ({"samples": np.array([2**62, 2**62])}, "column 'samples' of counts with a sum under"),
        ({"index_bytes": np.zeros(2, np.int32)}, "column 'index_bytes' of 2 int64, found int32"),
        ({"checksums": np.zeros(2, np.int64)}, "column 'checksum' of 2 uint64, found int64"),
        ({"components": {"cls": -1}}, "'components' to be whole numbers by name"),
        ({"photos": {"jpg": {"XCF": 1}}}, "photos to be in one of unknown, JPEG, .* found 'XCF'"),
        ({"photos": {"jpg": {"JPEG": 1.5}}}, "'photos' to be whole numbers by component and format, found .*1.5"),
        ({"labels": {"min": 1}}, "'labels' to be min and max"),
        ({"turned": {"jpg": -1}}, "'turned' to be whole numbers by component"),
        ({"classes": {2**70: "x"}}, "'classes' to be names by class id"),
    ],
)
def test_manifest_that_says_what_cannot_be_is_refused(changes: dict[str, Any], text: str) -> None:
    """Its names become parts of paths, its sizes extents: neither leaves where it belongs."""
    data = a_manifest(**changes).to_bytes()
    with pytest.raises(DataError, match=f"'m' is a broken dali-pipes manifest: expected .*{text}.*; rebuild it"):
        Manifest.from_bytes(data, where="m")


# --- without files ----------------------------------------------------------------------------------------------------


def test_index_in_memory_is_what_index_shards_writes(tmp_path: Path) -> None:
    """The same bytes, by the same names, and nothing beside the shards."""
    write_shards(tmp_path, make_samples([(20, 20)] * 20), per_shard=1, index=False)
    shards = resolve_shards(tmp_path, endpoint=None)
    assert find_manifest(shards) is None
    indexed = index_in_memory(shards)
    assert not list(tmp_path.glob("*.safetensors"))
    assert list(indexed.indexes) == [index_name(name) for name in shards.names]
    manifest = index_shards(shards)
    assert indexed.manifest.to_bytes() == manifest.to_bytes() == (tmp_path / manifest_name("s-")).read_bytes()
    assert indexed.indexes == {name: (tmp_path / name).read_bytes() for name in indexed.indexes}


def test_find_manifest_gives_all_shards_that_it_lists(small_shards: Path, manifest: Manifest) -> None:
    """Also where a part of the shards was named."""
    shards = resolve_shards(small_shards / "s-{000001..000002}.tar", endpoint=None)
    found = find_manifest(shards)
    assert found is not None
    assert (found.num_shards, found.digest) == (4, manifest.digest)


def test_find_manifest_broken_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, make_samples([(20, 20)]), per_shard=1)
    path = tmp_path / manifest_name("s-")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match=rf"'{path}' is a broken dali-pipes manifest: expected .* bytes"):
        find_manifest(resolve_shards(tmp_path, endpoint=None))


def test_index_of_a_photo_larger_than_int32_is_one_of_no_size(tmp_path: Path) -> None:
    """A PNG header may announce 2**32 - 1 pixels a side, which the index's columns do not hold."""
    header = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 2**32 - 1, 5) + b"\x08\0\0\0\0"
    path = write_tar(tmp_path / "s-0.tar", [Sample("a", {"png": header})])
    with path.open("rb") as stream:
        index = index_shard(stream, shard="s-0.tar")
    photo = ShardIndex.from_bytes(index.to_bytes(), where="i").photos["png"]
    assert (photo.height.tolist(), photo.width.tolist(), photo.format.tolist()) == ([0], [0], [2])
    assert index_shards(ShardSet(store=resolve_shards(path, endpoint=None).store, names=("s-0.tar",))).photos == {
        "png": {"PNG": 1, "unsized": 1}
    }
