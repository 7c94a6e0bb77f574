"""What pack writes, where shards end, which records are bad, and what is there already."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import webdataset

from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.names import columns_name, manifest_name
from dali_pipes.store.base import Store
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from prep.left_out import MaxBad
from prep.pack.pack import OnBad, open_target
from prep.pack.target import ShardPlan, plan_shards
from prep.sources.record import Record, Source
from tests.shards import contents_of, encode_mask, encode_photo, make_source, pack
from tests.turned_photos import exif_block, with_exif


def _read_back(store: Store, names: tuple[str, ...], folder: Path) -> list[dict[str, Any]]:
    """What WebDataset makes of the shards."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(store.read(name))
    dataset = webdataset.WebDataset([str(folder / name) for name in names], shardshuffle=False, empty_check=False)
    return [
        {key: value for key, value in sample.items() if key not in ("__url__", "__local_path__")} for sample in dataset
    ]


def _resolve(store: Store) -> ShardSet:
    return resolve_shards(f"{store.url}/samples-", endpoint=getattr(store, "endpoint", None))


def _source(*records: Record) -> Source:
    return Source(name="made up", records=records, classes={0: "zero"}, masks=frozenset({"trimap.png"}))


def _record(key: str = "a", **components: bytes) -> Record:
    return Record(key=key, components={name.replace("_", "."): data for name, data in components.items()}, label=0)


# What is written


def test_pack_is_read_back_by_webdataset_byte_for_byte(store: Store, tmp_path: Path) -> None:
    source = make_source(23)
    report = pack(source, store=store, max_count=10)
    assert report.shards == ("samples-000000.tar", "samples-000001.tar", "samples-000002.tar")
    assert (report.num_samples, report.num_written, report.url) == (23, 3, store.locate("samples-"))
    assert _read_back(store, report.shards, tmp_path / "read") == [
        {"__key__": record.key, "cls": str(record.label).encode(), **record.components} for record in source.records
    ]
    assert report.num_bytes == sum(entry.size for entry in store.list("samples-0"))
    assert json.loads(store.read(".dali-pipes/samples-classes.json")) == {"0": "zero", "1": "one", "2": "two"}


def test_pack_dry_run_writes_nothing_and_tells_the_same(store: Store) -> None:
    planned = pack(make_source(23), store=store, max_count=10, dry_run=True)
    assert not store.exists() or contents_of(store) == {}
    done = pack(make_source(23), store=store, max_count=10)
    assert (planned.shards, planned.num_bytes, planned.num_samples) == (done.shards, done.num_bytes, done.num_samples)
    assert (planned.dry_run, planned.num_written) == (True, 0)


# Where shards end


@pytest.mark.parametrize(
    ("sizes", "max_count", "max_bytes", "expected"),
    [
        ([], 10, 10240, []),
        ([9216, 1024], 10, 10240, [(0, 1, 10240), (1, 2, 10240)]),  # 9216 and two end blocks are exactly 10240
        ([1024] * 5, 2, 1 << 20, [(0, 2, 10240), (2, 4, 10240), (4, 5, 10240)]),
        ([1024, 50_000, 1024], 10, 10240, [(0, 1, 10240), (1, 2, 51200), (2, 3, 10240)]),  # too large: a shard alone
        ([1024] * 3, 1, 1, [(0, 1, 10240), (1, 2, 10240), (2, 3, 10240)]),
    ],
)
def test_plan_shards_fills_each_up_to_both_limits(
    sizes: list[int], max_count: int, max_bytes: int, expected: list[tuple[int, int, int]]
) -> None:
    assert plan_shards(sizes, max_count=max_count, max_bytes=max_bytes) == [ShardPlan(*row) for row in expected]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("ais://pets/train-", ("ais://pets", "train-")),
        ("ais://pets/train", ("ais://pets", "train/samples-")),
        ("/a/b_", ("/a", "b_")),
        ("ais://pets/a-{0..1}.tar", "names shards; expected a folder or what the shards"),
        ("http://pets/a-", "nothing can be written by http://; expected ais://, s3://, gs://, az:// or a directory"),
        ("ais://pets/../photos/a-", r"'ais://pets/\.\./photos/a-': the parts of an object's name must not be"),
    ],
)
def test_open_target_tells_folder_from_prefix_or_says_what_is_wrong(url: str, expected: tuple[str, str] | str) -> None:
    if isinstance(expected, tuple):
        store, prefix = open_target(url, endpoint="http://127.0.0.1:1")
        assert (store.url, prefix) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            open_target(url, endpoint="http://127.0.0.1:1")


# Bad records


PHOTO, PNG, MASK = encode_photo(), encode_photo("png"), encode_mask()
TURNED = with_exif(PHOTO, exif_block(6))
BAD: list[tuple[dict[str, bytes], str]] = [
    ({"image_jpg": encode_photo("gif", mode="L")}, "image.jpg holds a GIF, expected JPEG, PNG, WEBP, BMP or PNM"),
    ({"jpg": b""}, "jpg is empty"),
    ({"jpg": PHOTO, "json": b""}, "json is empty"),
    ({"jpg": b"<html>"}, "jpg holds no photo of a known format, expected JPEG, PNG, WEBP, BMP or PNM (starts with 3c"),
    ({"jpg": PHOTO, "trimap_png": PNG}, "trimap.png is not an 8-bit grey PNG, as masks must be"),
    ({"jpg": PHOTO, "trimap_png": MASK[:-12]}, "trimap.png is cut off: it has no whole IEND chunk"),
    ({"jpg": PHOTO, "trimap_png": encode_mask(size=(24, 32))}, "trimap.png has 32 x 24 pixels, 'jpg' 24 x 32"),
    (
        {"jpg": TURNED, "trimap_png": MASK},
        "trimap.png has 24 x 32 pixels, 'jpg' 32 x 24, both turned upright by their EXIF orientations; as stored it",
    ),
]


@pytest.mark.parametrize("on_bad", ["skip", "keep"])
def test_pack_bad_records_are_skipped_or_kept_and_named(on_bad: OnBad, tmp_path: Path) -> None:
    bad = [_record(f"bad{number}", **components) for number, (components, _) in enumerate(BAD)]
    source = _source(_record("good", jpg=PHOTO), *bad, _record("good2", json=b"1"))
    store = LocalStore(tmp_path / "out")
    with pytest.raises(DataError, match=r"8 of 10 records of made up are bad: bad0: image\.jpg holds .*--on-bad skip"):
        pack(source, store=store)
    assert list(tmp_path.iterdir()) == []
    report = pack(source, store=store, on_bad=on_bad, max_bad=MaxBad.parse("8"))
    named, others = (report.skipped, report.kept) if on_bad == "skip" else (report.kept, report.skipped)
    for number, (line, (_, reason)) in enumerate(zip(named, BAD, strict=True)):
        assert line.startswith(f"bad{number}: {reason}")
    assert others == ()
    samples = {sample.pop("__key__"): sample for sample in _read_back(store, report.shards, tmp_path / "read")}
    packed = source.records if on_bad == "keep" else [source.records[0], source.records[-1]]
    assert samples == {record.key: {"cls": b"0", **record.components} for record in packed}


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([_record("a", json=b"1"), _record("a", json=b"2")], "key 'a' occurs twice, records 0 and 1"),
        ([_record("a.b", json=b"1")], "'a.b.json' would not be read back as key 'a.b', component 'json'"),
        ([_record("", json=b"1")], "WebDataset cuts the key at the first dot, and it must not be empty"),
        ([], "no record is left to pack"),
    ],
)
def test_pack_records_that_could_not_be_read_back_are_an_error(
    records: list[Record], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        pack(_source(*records), store=LocalStore(tmp_path))


def _with_lost_files(folder: Path) -> Source:
    """Four records: a good one, one without its photo, one whose mask is a directory, one of which nothing is there."""
    for name, data in (("a.jpg", PHOTO), ("a.png", MASK), ("b.png", MASK), ("c.jpg", PHOTO)):
        (folder / name).write_bytes(data)
    (folder / "c.png").mkdir()
    files = {key: {"jpg": folder / f"{key}.jpg", "trimap.png": folder / f"{key}.png", "json": b"{}"} for key in "abcd"}
    return _source(*(Record(key=key, components=parts, label=0) for key, parts in files.items()))


def test_pack_files_that_cannot_be_read_are_skipped_or_kept_without_them(tmp_path: Path) -> None:
    """``keep`` packs the files that exist, as planned to the byte; a record without any file is left out."""
    source = _with_lost_files(tmp_path)
    with pytest.raises(DataError, match=rf"3 of 4 records .* bad: b: jpg: cannot read '{tmp_path}/b\.jpg': No such"):
        pack(source, store=LocalStore(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    assert pack(source, store=LocalStore(tmp_path / "skip"), on_bad="skip").num_samples == 1
    store = LocalStore(tmp_path / "keep")
    for num_written in (2, 0):
        keeping = pack(source, store=store, on_bad="keep", max_count=2)
        assert (keeping.num_samples, keeping.num_written) == (3, num_written)
    assert [text[:10] for text in keeping.kept] == ["b: jpg: ca", "c: trimap."]
    assert [text[:10] for text in keeping.skipped] == ["d: jpg: ca"]
    samples = _read_back(store, keeping.shards, tmp_path / "read")
    lacking = [{"jpg", "trimap.png"} - set(sample) for sample in samples]
    assert lacking == [set(), {"jpg"}, {"trimap.png"}]
    assert keeping.num_bytes == sum(entry.size for entry in store.list("samples-0"))


# What is there already


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (make_source(40), r"holds shards of another pack: 'samples-000003\.tar'"),  # one shard too many
        (make_source(23, seed=1), r"holds shards with other content: 'samples-000000\.tar'"),  # same sizes
    ],
)
def test_pack_over_other_shards_is_refused_and_done_with_overwrite(store: Store, other: Source, message: str) -> None:
    pack(other, store=store, max_count=10)
    index_shards(_resolve(store))
    before = contents_of(store)
    with pytest.raises(StoreError, match=message):
        pack(make_source(23), store=store, max_count=10)
    assert contents_of(store) == before  # nothing was lost
    report = pack(make_source(23), store=store, max_count=10, overwrite=True)
    names = set(contents_of(store))
    # No shard of the other pack is left, nor a manifest that describes one.
    assert {name for name in names if name.endswith(".tar")} == set(report.shards)
    assert not names & {manifest_name("samples-"), columns_name("samples-")}
    assert pack(make_source(23), store=store, max_count=10).num_written == 0


def test_pack_leaves_other_prefixes_alone(store: Store) -> None:
    pack(make_source(23), store=store, prefix="train-", max_count=2)
    pack(make_source(3), store=store, prefix="train-val-")
    pack(make_source(3), store=store, prefix="samples-")
    assert len(store.list("train-0")) == 12
    assert pack(make_source(23), store=store, prefix="train-", max_count=2).num_written == 0


def test_pack_broken_records_of_a_source_are_an_error_unless_skipped(tmp_path: Path) -> None:
    source = replace(make_source(4), broken=["'x.parquet', row 7: damaged"])
    with pytest.raises(DataError, match=r"1 records of made up cannot be read: 'x\.parquet', row 7: .*--on-bad skip"):
        pack(source, store=LocalStore(tmp_path / "out"), on_bad="keep")
    assert not (tmp_path / "out").exists()
    report = pack(source, store=LocalStore(tmp_path / "out"), on_bad="skip")
    assert (report.num_samples, report.skipped) == (4, tuple(source.broken))
