"""Indexing, for every kind of archive that other indexers get wrong, and what is refused."""

import io
from pathlib import Path

import pytest

from dali_pipes.data_set.indexing import index_shard
from dali_pipes.errors import DataError
from dali_pipes.formats.manifest import checksum
from dali_pipes.formats.names import classes_name, split_key
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from tests.shards import make_samples, photo_bytes, tar_bytes, write_classes, write_shards


def index_of(data: bytes, *, name: str = "t.tar", **options: object) -> ShardIndex:
    return index_shard(io.BytesIO(data), shard=name, **options)


def contents(index: ShardIndex, data: bytes) -> dict[str, dict[str, bytes]]:
    """What the index says is there, read at the places that it names, with the checksums that it has."""
    assert not [*index.changed(lambda start, size: checksum(data[start : start + size]))]
    return {
        key: {
            component: data[offsets[row] : offsets[row] + index.sizes[component][row]]
            for component, offsets in index.offsets.items()
            if offsets[row] >= 0
        }
        for row, key in enumerate(index.keys)
    }


def test_index_shard_of_a_webdataset_writers_tar(tmp_path: Path) -> None:
    """What `webdataset.TarWriter` writes: PAX records with times to the nanosecond."""
    import webdataset

    path = tmp_path / "w.tar"
    with webdataset.TarWriter(str(path)) as writer:
        for number in range(3):
            writer.write({"__key__": f"k{number}", "cls": number, "image.jpg": photo_bytes(number, 30, 20)})
    data = path.read_bytes()
    found = contents(index_of(data), data)
    expected = {
        sample["__key__"]: {"cls": sample["cls"], "image.jpg": sample["image.jpg"]}
        for sample in webdataset.WebDataset(str(path), shardshuffle=False)
    }
    assert found == expected


@pytest.mark.parametrize(
    "name", ["a/001.seg.png", "x.y/z.jpg", "./k.cls", "a.b.c", "dir.v1/README", "plain", "a/b/c.d"]
)
def test_split_key_is_webdatasets(name: str) -> None:
    """The same key and component as WebDataset's own splitting."""
    from webdataset.tariterators import base_plus_ext

    expected = base_plus_ext(name)
    assert split_key(name) == (None if expected == (None, None) else expected)


WHOLE = tar_bytes([("a.cls", b"1"), ("b.cls", b"2" * 700)])


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", r"shard 't.tar' is not a readable tar: empty file, 0 bytes read"),
        (WHOLE[: 512 * 2], r"shard 't.tar' is cut off: 1024 bytes, expected an end-of-archive block after byte 1024"),
        (WHOLE[: 512 * 4], r"shard 't.tar' (is cut off|is not a readable tar)"),  # in the middle of b's data
    ],
    ids=["empty", "at-a-member", "in-the-data"],
)
def test_index_shard_broken_archives_are_refused(data: bytes, text: str) -> None:
    """A tar that was cut off anywhere, also between two members, where other readers see nothing wrong."""
    with pytest.raises(DataError, match=text):
        index_of(data)


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ([("a.cls", b"tabby")], "shard 't.tar', key 'a': component 'cls' holds 'tabby', expected an integer"),
        ([("a.cls", b"1.5")], "component 'cls' holds '1.5', expected an integer"),
        ([("a.cls", b"99999999999999999999")], "holds '99999999999999999999', expected an integer"),
        ([("a.cls", b"9")], r"key 'a': class id 9 is not in the class table \(2 classes, 1 to 2\)"),
        ([("a.x", b""), ("a.X", b"")], r"key 'a': component 'x' occurs twice \(member 'a.X'\)"),
        ([("a.x", b""), ("b.x", b""), ("a.y", b"")], "key 'a': member 'a.y' comes after other samples"),
    ],
)
def test_index_shard_bad_samples_are_refused_by_name(members: list, text: str) -> None:
    """Shard, key and component, what was expected and what was found."""
    with pytest.raises(DataError, match=text):
        index_of(tar_bytes(members), classes={1: "cat", 2: "dog"})


def test_index_shards_takes_the_class_table_that_pack_left(tmp_path: Path) -> None:
    """Names go from the table beside the shards into the manifest; a broken table is named."""
    write_shards(tmp_path, make_samples([(20, 20)] * 2), per_shard=2, index=False)
    shards = resolve_shards(tmp_path, endpoint=None)
    write_classes(tmp_path, {"1": "Abyssinian", "2": "Bengal"})
    assert index_shards(shards).classes == {1: "Abyssinian", 2: "Bengal"}
    (tmp_path / classes_name(shards.prefix)).write_text("[1]")
    with pytest.raises(DataError, match=r"class table '.*classes.json': expected"):
        index_shards(shards)
