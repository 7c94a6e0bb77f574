"""Indexing, for every kind of archive that other indexers get wrong, and what is refused."""

import io
import struct
import tarfile
from pathlib import Path

import pytest

from dali_pipes.data_set.indexing import index_shard
from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.manifest import Manifest, checksum
from dali_pipes.formats.names import classes_name, columns_name, index_name, manifest_name, split_key
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from tests.shards import Sample, make_samples, mask_bytes, photo_bytes, tar_bytes, write_shards
from tests.turned_photos import ORIENTATIONS, slope, turned_photo

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
LONG = "folder-" + "x" * 70 + "/" + "y" * 60  # past ustar's 100 bytes, within its prefix field


def index_of(data: bytes, *, name: str = "t.tar", **options: object) -> ShardIndex:
    return index_shard(io.BytesIO(data), shard=name, **options)


def contents(index: ShardIndex, data: bytes) -> dict[str, dict[str, bytes]]:
    """What the index says is there, read at the places that it names."""
    return {
        key: {
            component: data[offsets[row] : offsets[row] + index.sizes[component][row]]
            for component, offsets in index.offsets.items()
            if offsets[row] >= 0
        }
        for row, key in enumerate(index.keys)
    }


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "key",
    ["plain", "a/b.c/deep", LONG, "n" * 150, "ключ/фото", "with space", "./dotted"],
    ids=["plain", "dotted-folder", "prefix-field", "over-100", "non-ascii", "space", "dot-slash"],
)
def test_index_shard_locates_every_member_whatever_the_format(format: str, key: str) -> None:
    """ustar with its prefix field, GNU long names and PAX long names: the bytes at each place are the member's."""
    if format == "ustar" and key == "n" * 150:
        pytest.skip("ustar holds no base name over 100 bytes")
    members = [(f"{key}.cls", b"7"), (f"{key}.seg.png", b"\x89PNG mask"), ("z.cls", b"-3"), ("z.seg.png", b"")]
    data = tar_bytes(members, format=FORMATS[format])
    index = index_of(data)
    assert contents(index, data) == {
        key: {"cls": b"7", "seg.png": b"\x89PNG mask"},
        "z": {"cls": b"-3", "seg.png": b""},
    }
    assert index.labels.tolist() == [7, -3]
    assert all(int(offset) % 512 == 0 for offsets in index.offsets.values() for offset in offsets)
    assert (index.shard_bytes, index.shard_checksum) == (len(data), checksum(data))


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


def test_index_shard_passes_over_what_is_no_sample() -> None:
    """Directories, links, hidden files and names without a dot; components in lower case, as WebDataset has them."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, kind in (("d", tarfile.DIRTYPE), ("l.cls", tarfile.SYMTYPE), ("d/._a.cls", tarfile.REGTYPE)):
            member = tarfile.TarInfo(name)
            member.type = kind
            archive.addfile(member)
        for name in ("README", "d/A.cls", "d/.hidden.x", "d/A.Seg.TXT"):
            member = tarfile.TarInfo(name)
            member.size = 1
            archive.addfile(member, io.BytesIO(b"5"))
    data = stream.getvalue()
    assert contents(index_of(data), data) == {"d/A": {"cls": b"5", "seg.txt": b"5"}}


@pytest.mark.parametrize(
    "name", ["a/001.seg.png", "x.y/z.jpg", "./k.cls", "a.b.c", "dir.v1/README", "plain", "a/b/c.d"]
)
def test_split_key_is_webdatasets(name: str) -> None:
    """The same key and component as WebDataset's own splitting."""
    from webdataset.tariterators import base_plus_ext

    expected = base_plus_ext(name)
    assert split_key(name) == (None if expected == (None, None) else expected)


def test_index_shard_reads_photo_headers() -> None:
    """Of a PNG under a .jpg name, and of a damaged one of too many pixels; 0 where there is no header."""
    png = mask_bytes(0, 31, 17)
    bomb = png[:16] + struct.pack(">II", 50_000, 60_000) + png[24:]
    members = [
        ("a.image.jpg", photo_bytes(0, 40, 30)),
        ("b.image.jpg", png),
        ("c.image.jpg", b"no photo"),
        ("d.image.jpg", photo_bytes(1, 50, 60, progressive=True, mode="L")),
        ("e.image.jpg", b"GIF89a" + struct.pack("<HH", 12, 34)),
        ("f.image.jpg", bomb),
    ]
    photo = index_of(tar_bytes(members)).photos["image.jpg"]
    assert photo.height.tolist() == [30, 17, 0, 60, 34, 60_000]
    assert photo.width.tolist() == [40, 31, 0, 50, 12, 50_000]
    assert photo.format.tolist() == [1, 2, 0, 1, 8, 14]


WHOLE = tar_bytes([("a.cls", b"1"), ("b.cls", b"2" * 700)])


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", r"shard 't.tar' is not a readable tar: empty file, 0 bytes read"),
        (b"garbage " * 200, r"shard 't.tar' is not a readable tar"),
        (WHOLE[: 512 * 2], r"shard 't.tar' is cut off: 1024 bytes, expected an end-of-archive block after byte 1024"),
        (WHOLE[: 512 * 3 + 100], r"shard 't.tar' (is cut off|is not a readable tar)"),
        (WHOLE[: 512 * 4], r"shard 't.tar' (is cut off|is not a readable tar)"),  # in the middle of b's data
    ],
    ids=["empty", "garbage", "at-a-member", "in-the-data", "short-data"],
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


# --- the files --------------------------------------------------------------------------------------------------------


def test_index_files_round_trip(small_shards: Path) -> None:
    """Written, read, and written again: the same bytes; the manifest knows each file's size and checksum."""
    data = (small_shards / manifest_name("s-")).read_bytes()
    manifest = Manifest.from_bytes(data, where="m")
    assert manifest.to_bytes() == data
    assert manifest.names == tuple(f"s-{i:06d}.tar" for i in range(4))
    assert manifest.samples.tolist() == [6, 6, 6, 5]
    for row, name in enumerate(manifest.names):
        shard = (small_shards / name).read_bytes()
        file = (small_shards / index_name(name)).read_bytes()
        assert (manifest.shard_bytes[row], manifest.checksums[row]) == (len(shard), checksum(shard))
        assert (manifest.index_bytes[row], manifest.index_checksums[row]) == (len(file), checksum(file))
        assert ShardIndex.from_bytes(file, where=name).to_bytes() == file == index_of(shard, name=name).to_bytes()


def test_index_shards_takes_the_class_table_that_pack_left(tmp_path: Path) -> None:
    """Names go from the table beside the shards into the manifest; a broken table is named."""
    write_shards(tmp_path, make_samples([(20, 20)] * 2), per_shard=2, index=False)
    shards = resolve_shards(tmp_path, endpoint=None)
    table = tmp_path / classes_name(shards.prefix)
    table.write_text('{"1": "Abyssinian", "2": "Bengal"}')
    assert index_shards(shards).classes == {1: "Abyssinian", 2: "Bengal"}
    table.write_text("[1]")
    with pytest.raises(DataError, match=r"class table '.*classes.json': expected"):
        index_shards(shards)


def test_index_shards_error_leaves_no_manifest(tmp_path: Path) -> None:
    """A missing or broken shard among good ones: its name in the error, and no file that would lack it."""
    write_shards(tmp_path, make_samples([(20, 20)] * 6), per_shard=2, index=False)
    shards = resolve_shards(f"{tmp_path}/s-{{000000..000004}}.tar", endpoint=None)
    with pytest.raises(StoreError, match=r"no shard '.*s-000003.tar', '.*s-000004.tar'; 5 were named"):
        index_shards(shards)
    path = tmp_path / "s-000001.tar"
    path.write_bytes(path.read_bytes()[:1024])
    with pytest.raises(DataError, match=r"shard 's-000001.tar' is cut off"):
        index_shards(resolve_shards(tmp_path, endpoint=None))
    assert not (tmp_path / manifest_name("s-")).exists()
    assert not (tmp_path / columns_name("s-")).exists()


def test_orientations_of_photos_and_masks_are_indexed(tmp_path: Path) -> None:
    """Each file's own; a shard without turned photos has no column; the manifest counts the turned ones."""
    photo, mask = slope(20, 30), slope(20, 30)[..., 0]
    samples = [
        Sample(f"{value}", {"jpg": turned_photo(photo, value), "png": turned_photo(mask, 9 - value, "PNG")})
        for value in ORIENTATIONS
    ]
    samples.append(Sample("z", {"jpg": turned_photo(photo, 1)}))
    shards = resolve_shards(write_shards(tmp_path, samples, per_shard=8), endpoint=None)
    manifest = Manifest.from_bytes(shards.store.read(manifest_name(shards.prefix)), where="m")
    first, second = (
        ShardIndex.from_bytes(shards.store.read(index_name(name)), where="i").photos for name in manifest.names
    )
    assert first["jpg"].orientation is not None
    assert first["jpg"].orientation.tolist() == list(ORIENTATIONS)
    assert first["jpg"].height.tolist() == [20] * 8  # as stored
    assert [side.tolist() for side in first["jpg"].upright_size] == [[20] * 4 + [30] * 4, [30] * 4 + [20] * 4]
    assert first["png"].orientation is not None
    assert first["png"].orientation.tolist() == list(ORIENTATIONS)[::-1]
    assert second["jpg"].orientation is None
    assert manifest.turned == {"jpg": 7, "png": 7}
