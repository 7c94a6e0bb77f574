"""The files that describe a data set: what they hold, a million rows of it, and what is refused in them."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.errors import DataError
from dali_pipes.formats.manifest import Change, Manifest, ShardsPart
from dali_pipes.formats.names import manifest_name
from dali_pipes.formats.shard_index import PhotoColumns, ShardIndex
from dali_pipes.formats.texts import Texts, object_name_problem, pack_texts
from tests.simulated import manifest_of

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=9), max_size=12)


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
    ("data", "ends"),
    [
        (b"abc", [2, 1, 3]),
        (b"abc", [-1, 3]),
        (b"abc", [2]),  # a byte too many
        (b"abc", []),
        (b"", [2**63 - 1, -(2**63), -1, 0]),  # rises by 1, 2**63 - 1 and 1 where that wraps
        (b"a\xff", [1, 2]),
        ("é".encode(), [1, 2]),  # a text that starts within a character
        ("é".encode()[:1], [1]),
    ],
)
def test_texts_check_refuses_columns_that_hold_none(data: bytes, ends: list[int]) -> None:
    texts = Texts(np.frombuffer(data, np.uint8), np.array(ends, np.int64))
    with pytest.raises(ValueError, match=r"ends must rise|UTF-8|utf-8"):
        texts.check()


def test_pack_texts_of_a_name_in_no_utf8_says_which() -> None:
    """What `os.listdir` gives for a file named in another encoding."""
    with pytest.raises(DataError, match=r"name 'caf\\xe9\.tar' is not UTF-8; rename it"):
        pack_texts(["a.tar", "caf\udce9.tar"])


@pytest.mark.parametrize(
    ("name", "is_fine"),
    [
        *[(name, True) for name in ("a.tar", "a/b.tar", "..a/b..tar", ".a", "...", "é")],
        *[(name, False) for name in ("", ".", "..", "../a.tar", "a/../b.tar", "a/..", "a/./b")],
        *[(name, False) for name in ("/a.tar", "a//b.tar", "a/", "a\0.tar")],
    ],
)
def test_object_name_problem_finds_the_name(name: str, is_fine: bool) -> None:
    """Alone, and between others whose bytes stand directly before and after."""
    for others in ([], ["first.tar"]):
        problem = object_name_problem(Texts(*pack_texts([*others, name, *others])))
        assert (problem is None) is is_fine
        assert is_fine or ascii(name) in problem


@pytest.fixture
def manifest(small_shards: Path) -> Manifest:
    return Manifest.from_bytes((small_shards / manifest_name("s-")).read_bytes(), where="m")


def test_manifest_of_another_kind_or_version_is_refused(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard index in its place; a file of the first version."""
    from dali_pipes.formats import manifest as module

    with pytest.raises(DataError, match="found a dali-pipes shard index, version 4"):
        Manifest.from_bytes(an_index().to_bytes(), where="m")
    with monkeypatch.context() as patch:
        patch.setattr(module, "MANIFEST_VERSION", 1)
        data = manifest.to_bytes()
    with pytest.raises(DataError, match=r"expected a dali-pipes manifest, version 4, found .* version 1; rebuild it"):
        Manifest.from_bytes(data, where="m")


def test_manifest_select_takes_rows_in_the_order_given(manifest: Manifest) -> None:
    """Columns with their names; all of them in their order is the manifest itself."""
    chosen = manifest.select(("s-000003.tar", "s-000001.tar"), where="m")
    assert chosen.names == ("s-000003.tar", "s-000001.tar")
    for column in ("shard_bytes", "checksums", "samples", "index_bytes", "index_checksums"):
        assert getattr(chosen, column).tolist() == getattr(manifest, column)[[3, 1]].tolist()
    assert manifest.select(tuple(manifest.names), where="m") is manifest
    with pytest.raises(DataError, match=r"manifest 'm' lists 4 shards, not 's-9.tar' and 1 more; index them"):
        manifest.select(["s-000000.tar", "s-9.tar", "s-10.tar"], where="m")


def test_manifest_digest_is_of_the_data(manifest: Manifest) -> None:
    """The digest is of names, sizes, checksums, counts and their order. Saved states hold it, so it must not change."""
    reversed_ = manifest.select(manifest.names[::-1], where="m")
    assert reversed_.digest != manifest.digest
    assert dataclasses.replace(manifest, classes={1: "one"}, photos={}).digest == manifest.digest
    changed = dataclasses.replace(manifest, checksums=manifest.checksums ^ np.uint64(1))
    assert changed.digest != manifest.digest
    golden = manifest_of([1, 2], names=["a.tar", "b.tar"])
    assert golden.digest == "c1d25955e38520da5bbf151754fbdb15c76eade691d963d6482e6f5281b55eed"


def an_index(**changes: Any) -> ShardIndex:
    """Two samples in a shard of 4,096 bytes; the second lacks its label."""
    columns = {
        "shard": "a.tar",
        "shard_bytes": 4096,
        "shard_checksum": 7,
        "keys": ("a", "é"),
        "offsets": {"cls": np.array([512, -1]), "jpg": np.array([1536, 2560])},
        "sizes": {"cls": np.array([1, 0]), "jpg": np.array([100, 1536])},
        "checksums": {"cls": np.array([9, 0], np.uint64), "jpg": np.array([1, 2**64 - 1], np.uint64)},
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


def test_shard_index_round_trips() -> None:
    """Keys are decoded only when they are asked for; an index of upright photos has no column of orientations."""
    plain = an_index().to_bytes()
    again = ShardIndex.from_bytes(plain, where="i")
    assert again.to_bytes() == plain
    assert isinstance(again.keys, Texts)
    assert again.keys == ("a", "é")
    upright = an_index(**with_photo(orientation=np.array([1, 1], np.uint8)))
    assert upright.to_bytes() == plain
    assert ShardIndex.from_bytes(plain, where="i").photos["jpg"].orientation is None
    turned = ShardIndex.from_bytes(an_index(**with_photo(orientation=np.array([6, 1], np.uint8))).to_bytes(), where="i")
    photo = turned.photos["jpg"]
    assert photo.orientation is not None
    assert photo.orientation.tolist() == [6, 1]
    assert [side.tolist() for side in photo.upright_size] == [[20, 0], [10, 0]]


@pytest.mark.parametrize(
    "changes",
    [
        with_jpg([1536, 2561], [1, 1]),  # no multiple of 512
        with_jpg([-512, 512], [1, 1]),
        with_jpg([1536, 2560], [1, 1537]),  # a byte beyond the shard
        with_jpg([1536, 2**62], [1, 2**62]),  # a sum that wraps
        with_jpg([1536, 2560], [-1, 1]),
        with_jpg([-1, 2560], [1, 1]),  # a size of what is not there
        with_jpg([1536], [1]),  # a row too few
        {"sizes": {"cls": np.zeros(2, np.int32), "jpg": np.zeros(2, np.int32)}},
        with_photo(height=np.array([-1, 0], np.int32)),
        with_photo(width=np.array([0, -5], np.int32)),
        with_photo(format=np.array([0, 15], np.uint8)),
        with_photo(orientation=np.array([2, 9], np.uint8)),
        with_photo(orientation=np.array([2, 0], np.uint8)),
        with_photo(height=np.array([1, 2])),  # int64, not int32
        {"labels": None},
        {"shard_bytes": -1},
        {"shard_bytes": True},
        {"shard": 5},
        {"keys": Texts(np.frombuffer(b"a\xff", np.uint8), np.array([1, 2]))},
    ],
)
def test_shard_index_that_says_what_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    """Every place is within the shard before anything is read from it."""
    data = an_index(**changes).to_bytes()
    with pytest.raises(
        DataError, match=r"'i' is a damaged dali-pipes shard index: .*; rebuild it: dali-pipes prep index"
    ):
        ShardIndex.from_bytes(data, where="i")


def a_manifest(**changes: Any) -> Manifest:
    sums = {
        "components": {"cls": 3, "jpg": 4},
        "classes": {1: "one"},
        "photos": {"jpg": {"JPEG": 3, "unknown": 1}},
        "labels": {"min": 1, "max": 1},
    }
    return manifest_of([512, 1024], **(sums | changes))


CHANGES = tuple(
    Change(version=version, date="2026-03-01T12:00:00Z", what="add", token="0123456789", command="prep add x",
           num_samples=5 * version, num_shards=version, digest="ab")
    for version in (1, 2)
)  # fmt: skip
CHANGED = {
    "version": 2,
    "parts": (ShardsPart("", 1), ShardsPart("add-0123456789-", 1)),
    "history": CHANGES,
    "removed": np.array([0, 700]),
}


@pytest.mark.parametrize(
    "changes",
    [
        {"names": ("a.tar", "../b.tar")},
        {"names": ("a.tar",)},  # a row too few
        {"shard_bytes": np.array([1, -1])},
        {"samples": np.array([2**62, 2**62])},  # a sum that wraps
        {"checksums": np.zeros(2, np.int64)},
        {"components": {"cls": -1}},
        {"photos": {"jpg": {"XCF": 1}}},
        {"labels": {"min": 0.5, "max": 1}},
        {"labels": {"min": 0, "max": 2**63}},
        {"turned": {"jpg": -1}},
        {"classes": {2**70: "x"}},
        {"etl": "a.b"},
        {"version": 2**62},
        {"parts": (ShardsPart("", 1),)},  # a shard too few
        {"parts": (ShardsPart("../up-", 2),)},
        {"parts": (ShardsPart("", -2), ShardsPart("", 4))},
        {"history": ()},
        {"history": CHANGES[::-1]},
        {"removed": np.array([7, 0])},
        {"removed": np.array([3, 3])},
        {"removed": np.array([1536])},
    ],
)
def test_manifest_that_says_what_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    """Its names become parts of paths, its sizes extents: neither leaves where it belongs."""
    good = a_manifest(**CHANGED)
    assert Manifest.from_bytes(good.to_bytes(), where="m").history == CHANGES
    data = dataclasses.replace(good, **changes).to_bytes()
    with pytest.raises(DataError, match=r"'m' is a damaged dali-pipes manifest: .*; rebuild it: dali-pipes prep index"):
        Manifest.from_bytes(data, where="m")


@pytest.mark.parametrize("name", ["components", "photos", "labels", "classes", "turned", "data_version", "name/ends"])
def test_manifest_without_an_entry_is_refused(name: str) -> None:
    """Without a checksum over the file, the data set would seem to have no such component, photo or label."""
    data = a_manifest(**CHANGED).to_bytes()
    assert data.count(name.encode()) == 1
    with pytest.raises(DataError, match=r"'m' is a damaged dali-pipes manifest: .*; rebuild it: dali-pipes prep index"):
        Manifest.from_bytes(data.replace(name.encode(), name[::-1].encode()), where="m")


def test_a_version_is_read_as_it_was_written() -> None:
    """With its parts, history and removed samples; a data set that never changed has none of these in its file."""
    changed = a_manifest(**CHANGED)
    read = Manifest.from_bytes(changed.to_bytes(), where="m")
    assert (read.version, read.parts, read.history) == (2, CHANGED["parts"], CHANGES)
    assert read.removed.tolist() == [0, 700]
    assert (read.num_samples, read.num_kept) == (1536, 1534)
    assert [read.take(np.array(rows)).removed.tolist() for rows in ([0], [1], [1, 0])] == [[0], [188], [188, 1024]]
    assert (read.num_removed.tolist(), read.removed_in(1).tolist()) == ([1, 1], [188])
    assert read.digest == changed.digest
    data = a_manifest().to_bytes()
    assert b"data_version" not in data
    assert b"history" not in data
    first = Manifest.from_bytes(data, where="m")
    assert (first.version, first.parts, first.history, len(first.removed)) == (1, (), (), 0)
    assert first.digest == first.shards_digest == read.shards_digest
    others = [a_manifest(removed=np.array(removed, np.int64)) for removed in ([], [0], [0, 8], [0, 7])]
    assert len({manifest.digest for manifest in others}) == 4
