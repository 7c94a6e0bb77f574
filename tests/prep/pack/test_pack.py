import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.errors import DataError, StoreError
from dali_pipes.store.base import Store
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from prep.pack.pack import OnBad, open_target
from prep.pack.target import ShardPlan, plan_shards
from prep.sources.folders import imagefolder
from prep.sources.record import Record, Source
from tests.shards import encode_mask, encode_photo, make_source, pack
from tests.turned_photos import exif_block, with_exif


@pytest.fixture(params=["directory", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A place that is not there yet."""
    return LocalStore(tmp_path / "out") if request.param == "directory" else request.getfixturevalue("bucket")


def _read_back(store: Store, names: tuple[str, ...], folder: Path) -> list[dict[str, Any]]:
    """What WebDataset makes of the shards."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(store.read(name))
    dataset = webdataset.WebDataset([str(folder / name) for name in names], shardshuffle=False, empty_check=False)
    return [
        {key: value for key, value in sample.items() if key not in ("__url__", "__local_path__")} for sample in dataset
    ]


def _contents(store: Store) -> dict[str, bytes]:
    return {entry.name: store.read(entry.name) for entry in store.list("")}


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
    assert json.loads(store.read("samples-classes.json")) == {"0": "zero", "1": "one", "2": "two"}


def test_pack_long_and_unusual_keys_are_indexed_and_planned_to_the_byte(tmp_path: Path) -> None:
    keys = ["x" * 90, "a/" + "y" * 150, "ä/ö", "with space/1", "z" * 300]
    source = _source(*(_record(key, image_jpg=encode_photo()) for key in keys))
    store = LocalStore(tmp_path / "out")
    report = pack(source, store=store, max_count=2)
    assert report.num_bytes == sum(entry.size for entry in store.list("samples-0"))
    manifest = index_shards(resolve_shards(tmp_path / "out", endpoint=None))
    assert manifest.num_samples == len(keys)
    assert manifest.classes == {0: "zero"}


def test_pack_dry_run_writes_nothing_and_tells_the_same(store: Store) -> None:
    planned = pack(make_source(23), store=store, max_count=10, dry_run=True)
    assert not store.exists() or store.list("") == []
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


@given(
    sizes=st.lists(st.integers(512, 40_000), max_size=40),
    max_count=st.integers(1, 12),
    max_bytes=st.integers(1, 100_000),
)
def test_plan_shards_keeps_order_and_limits(sizes: list[int], max_count: int, max_bytes: int) -> None:
    plan = plan_shards(sizes, max_count=max_count, max_bytes=max_bytes)
    assert [number for shard in plan for number in range(shard.start, shard.stop)] == list(range(len(sizes)))
    for shard in plan:
        count = shard.stop - shard.start
        assert 1 <= count <= max_count
        assert shard.num_bytes <= max_bytes or count == 1
        assert shard.num_bytes >= sum(sizes[shard.start : shard.stop]) + 1024


def test_plan_shards_beyond_six_digits_says_what_to_change() -> None:
    with pytest.raises(ValueError, match="1000001 shards, names count to 1000000; use larger --max-bytes"):
        plan_shards([512] * 1_000_001, max_count=1, max_bytes=1)


@pytest.mark.parametrize(
    ("url", "store_url", "prefix"),
    [
        ("ais://pets", "ais://pets", "samples-"),
        ("ais://pets/train-", "ais://pets", "train-"),
        ("ais://pets/train", "ais://pets", "train/samples-"),
        ("/a/b_", "/a", "b_"),
    ],
)
def test_open_target_tells_folder_from_prefix(url: str, store_url: str, prefix: str) -> None:
    store, found = open_target(url, endpoint="http://127.0.0.1:1")
    assert (store.url, found) == (store_url, prefix)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ais://pets/a-{0..1}.tar", "names shards; expected a folder or what the shards"),
        ("ais://pets/a.tgz", "names shards"),  # pack writes plain ones
        ("ais://pets", "no endpoint is given; set AIS_ENDPOINT"),
        ("http://pets/a-", "nothing can be written by http://; expected ais://, s3://, gs://, az:// or a directory"),
    ],
)
def test_open_target_that_is_no_prefix_is_an_error(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_target(url, endpoint=None)


# Bad records


GIF = encode_photo("gif", mode="L")
UNKNOWN = "holds no photo of a known format, expected JPEG, PNG, WEBP, BMP or PNM"
PNG = encode_photo("png")
NO_MASK = "trimap.png is not an 8-bit grey PNG, as masks must be"
RGBA_PNG = encode_photo("png", mode="RGBA")
BAD = [
    ({"image_jpg": GIF}, "image.jpg holds a GIF, expected JPEG, PNG, WEBP, BMP or PNM"),
    ({"gif": GIF}, "gif holds a GIF, expected JPEG, PNG, WEBP, BMP or PNM"),
    ({"jpg": b""}, "jpg is empty"),
    ({"jpg": encode_photo(), "json": b""}, "json is empty"),
    ({"jpg": b"<html>"}, f"jpg {UNKNOWN} (starts with 3c 68 74 6d)"),
    ({"jpg": b"\xff"}, f"jpg {UNKNOWN} (starts with ff)"),
    ({"jpg": encode_photo(), "trimap_png": PNG}, NO_MASK),
    ({"jpg": encode_photo(), "trimap_png": encode_photo()}, NO_MASK),
    ({"jpg": encode_photo(), "trimap_png": encode_mask()[:-12]}, "trimap.png is cut off: it has no whole IEND chunk"),
    (
        {"jpg": encode_photo(), "trimap_png": encode_mask().replace(b"IDATx", b"IDATy")},
        "trimap.png is damaged: it has no pixels, or a part of it has another checksum than it says",
    ),
    (
        {"jpg": encode_photo(), "trimap_png": encode_mask(size=(24, 32))},
        "trimap.png has 32 x 24 pixels, 'jpg' 24 x 32",
    ),
    (
        {"jpg": with_exif(encode_photo(), exif_block(6)), "trimap_png": encode_mask()},
        "trimap.png has 24 x 32 pixels, 'jpg' 32 x 24, both turned upright by their EXIF orientations; as stored it",
    ),
]


@pytest.mark.parametrize(("components", "reason"), BAD)
@pytest.mark.parametrize("on_bad", ["skip", "keep"])
def test_pack_bad_record_is_skipped_or_kept_and_named(
    on_bad: OnBad, components: dict[str, bytes], reason: str, tmp_path: Path
) -> None:
    source = _source(_record("good", jpg=encode_photo()), _record("bad", **components), _record("good2", json=b"1"))
    store = LocalStore(tmp_path / "out")
    with pytest.raises(DataError, match=f"1 of 3 records of made up are bad: bad: {re.escape(reason)}.*--on-bad skip"):
        pack(source, store=store)
    assert list(tmp_path.iterdir()) == []
    report = pack(source, store=store, on_bad=on_bad)
    named = {"skip": report.skipped, "keep": report.kept}
    assert len(named[on_bad]) == 1
    assert named[on_bad][0].startswith(f"bad: {reason}")
    assert named["keep" if on_bad == "skip" else "skip"] == ()
    samples = {sample.pop("__key__"): sample for sample in _read_back(store, report.shards, tmp_path / "read")}
    assert set(samples) == {"good", "good2"} | ({"bad"} if on_bad == "keep" else set())
    if on_bad == "keep":
        assert samples["bad"] == {"cls": b"0", **{name.replace("_", "."): data for name, data in components.items()}}


@pytest.mark.parametrize(
    ("extension", "photo", "note"),
    [
        ("jpeg", encode_photo(), None),
        ("png", RGBA_PNG, None),
        ("webp", encode_photo("webp"), None),
        ("jpg", PNG, "a: jpg is a PNG"),
        ("png", encode_photo("jpg"), "a: png is a JPEG"),
        ("jpg", encode_photo("webp"), "a: jpg is a WEBP"),
        ("gif", encode_photo("jpg"), "a: gif is a JPEG"),
    ],
)
def test_pack_photo_in_another_format_that_dali_decodes_is_packed_and_noted(
    extension: str, photo: bytes, note: str | None, tmp_path: Path
) -> None:
    """Its bytes and its name stay as they are."""
    report = pack(_source(_record("a", **{extension: photo})), store=LocalStore(tmp_path / "out"))
    assert (report.noted, report.skipped, report.kept) == ((note,) if note else (), (), ())
    [sample] = _read_back(LocalStore(tmp_path / "out"), report.shards, tmp_path / "read")
    assert sample[extension] == photo


def test_pack_mask_that_fits_its_photo_upright_is_good(tmp_path: Path) -> None:
    """Each is turned by its own EXIF orientation, and keeps it."""
    photo = with_exif(encode_photo(), exif_block(6))
    masks = (with_exif(encode_mask(), exif_block(8)), encode_mask(size=(24, 32)))
    records = [_record(f"{number}", jpg=photo, trimap_png=mask) for number, mask in enumerate(masks)]
    pack(_source(*records), store=LocalStore(tmp_path))
    manifest = index_shards(resolve_shards(tmp_path, endpoint=None))
    assert manifest.turned == {"jpg": 2, "trimap.png": 1}


def test_pack_names_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    """A file's and a class's, with the bytes that are not."""
    folder = tmp_path / "in" / "cat"
    folder.mkdir(parents=True)
    (folder / os.fsdecode(b"caf\xe9.jpg")).write_bytes(encode_photo())
    store = LocalStore(tmp_path / "out")
    with pytest.raises(DataError, match=r"the name of file '.*/cat/caf\\xe9\.jpg' is not UTF-8"):
        pack(imagefolder(tmp_path / "in"), store=store)
    folder.rename(folder.with_name(os.fsdecode(b"c\xe0t")))
    with pytest.raises(DataError, match=r"the name of class 0 is not UTF-8: 'c\\xe0t'; rename it"):
        pack(imagefolder(tmp_path / "in"), store=store)
    assert not (tmp_path / "out").exists()


def test_pack_prefix_that_leads_into_another_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'ais://pets/\.\./photos/a-': the parts of an object's name must not be"):
        open_target("ais://pets/../photos/a-", endpoint="http://127.0.0.1:1")
    with pytest.raises(ValueError, match=r"'ais://pets/\.\./photos/a-': the parts"):
        pack(make_source(1), store=AisStore("http://127.0.0.1:1", "pets"), prefix="../photos/a-")


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jobs": 0}, "jobs must be positive, got 0"),
        ({"prefix": ""}, "prefix must end in a name's start that is not a digit"),
        ({"prefix": "v2"}, "prefix must end in"),  # v2000000.tar: where does the number start?
    ],
)
def test_pack_bad_argument_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        pack(make_source(1), store=LocalStore(tmp_path), **options)


def _with_lost_files(folder: Path) -> Source:
    """Four records: a good one, one without its photo, one whose mask is a directory, one of which nothing is there."""
    for name, data in (("a.jpg", encode_photo()), ("a.png", encode_mask()), ("b.png", encode_mask()), ("c.jpg", b"x")):
        (folder / name).write_bytes(encode_photo() if name == "c.jpg" else data)
    (folder / "c.png").mkdir()
    records = [
        Record(
            key=key,
            components={"jpg": folder / f"{key}.jpg", "trimap.png": folder / f"{key}.png", "json": b"{}"},
            label=0,
        )
        for key in "abcd"
    ]
    return replace(_source(*records), masks=frozenset({"trimap.png"}))


def test_pack_files_that_cannot_be_read_are_skipped_or_kept_without_them(tmp_path: Path) -> None:
    """``keep`` packs the files that exist, as planned to the byte; a record without any file is left out."""
    source = _with_lost_files(tmp_path)
    with pytest.raises(
        DataError,
        match=rf"3 of 4 records of made up are bad: b: jpg: cannot read '{tmp_path}/b\.jpg': No such file or "
        rf"directory; c: trimap\.png: cannot read '{tmp_path}/c\.png': Is a directory; d: jpg: cannot read .*; "
        r"trimap\.png: cannot read .*--on-bad skip",
    ):
        pack(source, store=LocalStore(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    skipping = pack(source, store=LocalStore(tmp_path / "skip"), on_bad="skip")
    assert [text[:10] for text in skipping.skipped] == ["b: jpg: ca", "c: trimap.", "d: jpg: ca"]
    assert (skipping.num_samples, skipping.kept) == (1, ())

    store = LocalStore(tmp_path / "keep")
    for num_written in (2, 0):
        keeping = pack(source, store=store, on_bad="keep", max_count=2)
        assert (keeping.num_samples, keeping.num_written) == (3, num_written)
    assert [text[:10] for text in keeping.kept] == ["b: jpg: ca", "c: trimap."]
    assert [text[:10] for text in keeping.skipped] == ["d: jpg: ca"]
    samples = _read_back(store, keeping.shards, tmp_path / "read")
    assert [sorted(sample) for sample in samples] == [
        ["__key__", "cls", "jpg", "json", "trimap.png"],
        ["__key__", "cls", "json", "trimap.png"],
        ["__key__", "cls", "jpg", "json"],
    ]
    assert keeping.num_bytes == sum(entry.size for entry in store.list("samples-0"))


# What is there already


def test_pack_again_writes_nothing_anew(store: Store) -> None:
    pack(make_source(23), store=store, max_count=10)
    index_shards(resolve_shards(f"{store.url}/samples-", endpoint=getattr(store, "endpoint", None)))
    before = _contents(store)
    report = pack(make_source(23), store=store, max_count=10)
    assert report.num_written == 0
    assert _contents(store) == before  # the manifest, too


def test_pack_finishes_what_was_interrupted(store: Store) -> None:
    pack(make_source(23), store=store, max_count=10)
    before = _contents(store)
    store.delete("samples-000001.tar")
    store.delete("samples-classes.json")
    assert pack(make_source(23), store=store, max_count=10).num_written == 1
    assert _contents(store) == before


@pytest.mark.parametrize(
    ("other", "max_count", "message"),
    [
        (make_source(40), 10, r"holds shards of another pack: 'samples-000003\.tar'"),  # one shard too many
        (make_source(23), 5, r"'samples-000003\.tar', 'samples-000004\.tar', 'samples-000000\.tar' and 1 more;"),
        (make_source(23, seed=1), 10, r"holds shards with other content: 'samples-000000\.tar'"),  # same sizes
    ],
)
def test_pack_over_other_shards_is_refused_and_done_with_overwrite(
    store: Store, other: Source, max_count: int, message: str
) -> None:
    pack(other, store=store, max_count=max_count)
    index_shards(resolve_shards(f"{store.url}/samples-", endpoint=getattr(store, "endpoint", None)))
    before = _contents(store)
    with pytest.raises(StoreError, match=message):
        pack(make_source(23), store=store, max_count=10)
    assert _contents(store) == before  # nothing was lost

    report = pack(make_source(23), store=store, max_count=10, overwrite=True)
    names = {entry.name for entry in store.list("")}
    # No shard of the other pack is left, nor an index or a manifest that describes one.
    assert names - {"samples-000000.index.safetensors"} >= {*report.shards, "samples-classes.json"}
    assert "samples-manifest.safetensors" not in names
    assert "samples-columns.safetensors" not in names
    assert {name for name in names if name.endswith(".tar")} == set(report.shards)
    again = pack(make_source(23), store=store, max_count=10)
    assert again.num_written == 0


def test_pack_leaves_other_prefixes_alone(store: Store) -> None:
    pack(make_source(23), store=store, prefix="train-", max_count=2)
    pack(make_source(3), store=store, prefix="train-val-")
    pack(make_source(3), store=store, prefix="samples-")
    assert len(store.list("train-0")) == 12
    assert pack(make_source(23), store=store, prefix="train-", max_count=2).num_written == 0


@pytest.mark.parametrize("on_bad", ["fail", "keep"])
def test_pack_broken_records_of_a_source_are_an_error_unless_skipped(tmp_path: Path, on_bad: str) -> None:
    source = replace(make_source(4), broken=["'x.parquet', row 7: damaged"])
    with pytest.raises(DataError, match=r"1 records of made up cannot be read: 'x\.parquet', row 7: .*--on-bad skip"):
        pack(source, store=LocalStore(tmp_path / "out"), on_bad=on_bad)
    assert not (tmp_path / "out").exists()
    report = pack(source, store=LocalStore(tmp_path / "out"), on_bad="skip")
    assert (report.num_samples, report.skipped) == (4, tuple(source.broken))
