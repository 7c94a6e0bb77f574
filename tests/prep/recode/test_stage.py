"""`prep pack` with photos that are resized, optimized or converted on their way into the shards."""

import gzip
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dali_pipes.errors import DataError
from dali_pipes.store.local import LocalStore
from prep.pack.pack import PackReport
from prep.recode.photos import Recoding
from prep.sources.record import Record, Source
from tests.hostile_photos import undecodable
from tests.prep.commands.calls import json_of_prep, run_prep
from tests.prep.recode.photos import needs_jpegtran
from tests.shards import image_bytes, mask_bytes, pack, photo_bytes, pixels_of, read_tar, write_pets

SMALL = Recoding(short_side=32, masks="nearest")


def members(path: Path) -> dict[str, bytes]:
    return dict(read_tar(path.read_bytes()))


def size(data: bytes) -> tuple[int, int]:
    return Image.open(io.BytesIO(data)).size


def source_of(*records: dict[str, bytes], **fields: Any) -> Source:
    made = [Record(key=f"r{number}", components=parts, label=None) for number, parts in enumerate(records)]
    return Source(name="a test", records=made, classes={}, **fields)


def packed(source: Source, folder: Path, recode: Recoding, **options: Any) -> tuple[PackReport, dict[str, bytes]]:
    report = pack(source, store=LocalStore(folder), prefix="a-", recode=recode, **options)
    assert [path.name for path in folder.glob(".*")] == [".dali-pipes"]  # the folder of new photos is gone
    return report, members(folder / "a-000000.tar")


def test_photos_and_masks_are_resized_together_and_small_ones_keep_their_bytes(tmp_path: Path) -> None:
    large = {"jpg": photo_bytes(1, 90, 60), "seg.png": mask_bytes(1, 90, 60), "json": b"[9]"}
    little = {"jpg": photo_bytes(2, 40, 30), "seg.png": mask_bytes(2, 40, 30), "txt": b"b"}
    source = source_of(large, little, masks=frozenset({"seg.png"}))
    report, found = packed(source, tmp_path, SMALL)
    assert size(found["r0.jpg"]) == size(found["r0.seg.png"]) == (48, 32)
    assert (found["r1.jpg"], found["r1.seg.png"]) == (little["jpg"], little["seg.png"])
    (step,) = report.recoded
    assert step.settings == {"short_side": 32, "quality": 90, "masks": "nearest"}
    assert step.counts == {"resized": 1, "masks resized": 1, "kept": 2}
    assert step.bytes_before == sum(len(one[name]) for one in (large, little) for name in ("jpg", "seg.png"))
    assert step.bytes_after == sum(len(data) for name, data in found.items() if not name.endswith(("txt", "json")))
    assert "'json': not changed; places in pixels are those of the photos before" in report.noted


def test_a_mask_without_a_rule_is_an_error_before_any_work(tmp_path: Path) -> None:
    record = {"jpg": photo_bytes(1, 40, 30), "seg.png": mask_bytes(1, 40, 30)}
    for source in (source_of(record, masks=frozenset({"seg.png"})), source_of(record)):
        with pytest.raises(DataError, match=r"'seg.png' is a mask, and the photos are to be resized: .*--masks near"):
            packed(source, tmp_path, Recoding(short_side=100))
    no_masks = source_of(record | {"depth.png": record["seg.png"]}, masks=frozenset())
    _, found = packed(no_masks, tmp_path, Recoding(short_side=20))
    assert set(found) == {"r0.jpg", "r0.seg.jpg", "r0.depth.jpg"}
    turned = source_of(record | {"jpg": photo_bytes(1, 30, 40)}, masks=frozenset({"seg.png"}))
    told = "r0: seg.png has 30 x 40 pixels, 'jpg' 40 x 30"  # after resizing, nobody would see it
    with pytest.raises(DataError, match=told):
        packed(turned, tmp_path / "turned", SMALL)


def test_a_damaged_photo_follows_on_bad(tmp_path: Path) -> None:
    good, bad = photo_bytes(1, 90, 60), undecodable(photo_bytes(2, 90, 60))
    source = source_of({"jpg": good}, {"jpg": bad})
    with pytest.raises(DataError, match=r"1 of 2 records of a test are bad: r1: jpg cannot be decoded: .*--on-bad"):
        packed(source, tmp_path / "fail", SMALL)
    report, found = packed(source, tmp_path / "skip", SMALL, on_bad="skip")
    assert list(found) == ["r0.jpg"]
    assert report.recoded[0].counts == {"resized": 1}
    report, found = packed(source, tmp_path / "keep", SMALL, on_bad="keep")
    assert found["r1.jpg"] == bad
    assert report.recoded[0].counts == {"resized": 1, "kept": 1}
    assert "r1: jpg cannot be decoded" in report.kept[0]


def test_a_resized_png_is_called_jpg_unless_there_is_one(tmp_path: Path) -> None:
    png = image_bytes(pixels_of())
    report, found = packed(source_of({"left.png": png, "cls": b"3"}), tmp_path / "a", SMALL)
    assert list(found) == ["r0.cls", "r0.left.jpg"]
    assert report.recoded[0].counts == {"resized and made JPEGs": 1}
    two = source_of({"png": png, "jpg": photo_bytes(1, 90, 60)}, masks=frozenset())
    with pytest.raises(DataError, match="r0: two photos would be component 'jpg' as JPEGs; name them apart"):
        packed(two, tmp_path / "b", SMALL)


def test_shards_are_the_same_whoever_recodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One or two processes give the same shards from photos in memory, in a tar, or in a compressed tar (read once)."""
    monkeypatch.setattr("prep.recode.stage.NUM_RECORDS", 2)
    monkeypatch.setattr("prep.recode.stage.MIN_SHARED_RECORDS", 0)
    source = source_of(*({"jpg": photo_bytes(number, 90, 60)} for number in range(7)))
    packed(source, tmp_path / "one", SMALL, jobs=1)
    pack(source, store=LocalStore(tmp_path / "whole"), prefix="a-", max_count=4)
    recode = ("--short-side", "32", "--jobs", "2")
    run_prep("recode", tmp_path / "whole" / "a-", tmp_path / "plain" / "a-", *recode)
    for tar in (tmp_path / "whole").glob("*.tar"):
        tar.with_suffix(".tgz").write_bytes(gzip.compress(tar.read_bytes()))
        tar.unlink()
    run_prep("recode", tmp_path / "whole" / "a-", tmp_path / "compressed" / "a-", *recode)
    tars = [tmp_path / folder / "a-000000.tar" for folder in ("one", "plain", "compressed")]
    assert len({tar.read_bytes() for tar in tars}) == 1


def test_an_interrupted_pack_is_finished_with_the_same_bytes(tmp_path: Path) -> None:
    source = source_of(*({"jpg": photo_bytes(number, 90, 60)} for number in range(3)))
    planned = pack(source, store=LocalStore(tmp_path), prefix="a-", recode=SMALL, max_count=1, dry_run=True)
    assert not list(tmp_path.iterdir())
    first, _ = packed(source, tmp_path, SMALL, max_count=1)
    assert (planned.num_bytes, planned.recoded, first.num_written) == (first.num_bytes, first.recoded, 3)
    shards = {path.name: path.read_bytes() for path in tmp_path.glob("*.tar")}
    (tmp_path / "a-000001.tar").unlink()
    assert packed(source, tmp_path, SMALL, max_count=1)[0].num_written == 1
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.tar")} == shards


@needs_jpegtran
def test_the_manifest_tells_what_was_done_also_after_a_shuffle(tmp_path: Path, caplog: Any) -> None:
    """And after a second pack: one step each."""
    pets = write_pets(tmp_path / "pets", {"Abyssinian_1": 1, "boxer_1": 2, "boxer_2": 2})
    small = tmp_path / "small" / "a-"
    run_prep("pack", "pets", pets, small, "--short-side", "20", "--masks", "nearest", "--quality", "80")
    twice = tmp_path / "twice" / "a-"
    document = json_of_prep("recode", small, twice, "--optimize")
    settings = [step["settings"] for step in document["recoded"]]
    assert settings == [{"short_side": 20, "quality": 80, "masks": "nearest"}, {"optimize": True}]
    run_prep("shuffle", twice, "--output", "shuffled-")
    shuffled = tmp_path / "twice" / "shuffled-"
    run_prep("index", shuffled)
    assert json_of_prep("info", shuffled)["recoded"] == document["recoded"]
    run_prep("add", write_pets(tmp_path / "more", {"boxer_3": 2}), shuffled)
    assert "' were recoded (optimize=True), and those that are added keep their bytes" in caplog.text
    text = run_prep("info", shuffled).output
    assert "masks=nearest, quality=80, short_side=20: 3 masks resized, 3 resized" in text


def test_photos_of_phones_are_named_and_converted(tmp_path: Path) -> None:
    """Under their own names, in upper case, and as HEIC that is called JPEG."""
    heif = pytest.importorskip("pillow_heif")
    heif.register_heif_opener()
    photo = Image.open(io.BytesIO(photo_bytes(1, 90, 60)))
    folder = tmp_path / "phone"
    folder.mkdir()
    (folder / "IMG_1.HEIC").write_bytes(image_bytes(photo, "HEIF"))
    (folder / "IMG_2.jpg").write_bytes(image_bytes(photo, "HEIF"))
    (folder / "IMG_3.avif").write_bytes(image_bytes(photo, "AVIF"))
    (folder / "IMG_4.JPG").write_bytes(photo_bytes(4, 90, 60))
    text = r"IMG_1: heic holds a HEIC, expected JPEG.*\(to make it a JPEG: prep make or pack --convert\)"
    run_prep("pack", "photos", folder, tmp_path / "a", expect=DataError, match=text)
    (folder / "IMG_5.avif").write_bytes(image_bytes(photo, "AVIF")[:200])
    text = r"1 of 5 .*: IMG_5: avif cannot be decoded by Pillow: \w[^<]*holds an AVIF, expected((?!--convert).)*$"
    run_prep("pack", "photos", folder, tmp_path / "a", "--convert", expect=DataError, match=text)
    (folder / "IMG_5.avif").unlink()
    document = json_of_prep("pack", "photos", folder, tmp_path / "a", "--convert", "--short-side", "30")
    assert document["recoded"][0]["counts"] == {"converted": 3, "resized": 1}
    found = members(tmp_path / "a" / "samples-000000.tar")
    assert {name: size(data) for name, data in found.items()} == dict.fromkeys(
        (f"IMG_{number}.jpg" for number in range(1, 5)), (45, 30)
    )
