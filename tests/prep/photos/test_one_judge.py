"""``prep pack``, ``prep verify`` and a loader say the same about each photo, by one function."""

from pathlib import Path

import pytest

from dali_pipes.data_set import indexing
from dali_pipes.formats.photo_header import PhotoHeader, PhotoRules, read_photo_header, read_whole_photo_header
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import resolve_shards
from prep.inspect.verify import verify
from prep.photos.decoders import Undecodable, decode, open_decoder
from prep.sources.record import Record, Source
from tests.conftest import SHARED_DATA
from tests.hostile_photos import (
    animated_png,
    broken_jpeg2000,
    gif,
    jpeg2000,
    large_jpeg,
    large_png,
    odd_webp,
    pixels_of,
    png_with_text,
    tiff,
    with_metadata,
    with_thumbnail,
    with_wrong_checksum,
    without_chunk,
)
from tests.shards import Sample, image_bytes, mask_bytes, pack, photo_bytes, write_shards, write_tar

REFUSED = {
    "jpeg2000": jpeg2000(),
    "broken jpeg2000": broken_jpeg2000(),
    "tiff": tiff(),
    "gif": gif(),
    "apng": animated_png(),
    "bomb": large_png(10_000, 9_000),
    "text": b"<html>" + bytes(100),
    "cut jpeg": image_bytes(pixels_of(), "JPEG")[:-2],
    "cut thumbnail": with_thumbnail()[:-2] + bytes(3),
    "cut png": image_bytes(pixels_of())[:-12],
    "png with a wrong checksum of its pixels": with_wrong_checksum(image_bytes(pixels_of()), b"IDAT"),
    "png without pixels": without_chunk(image_bytes(pixels_of()), b"IDAT"),
    "bomb with a thumbnail": with_metadata(large_jpeg(10_000, 9_000), 60_000),
}
ALLOWED = {
    "jpeg": image_bytes(pixels_of(), "JPEG"),
    "png": image_bytes(pixels_of()),
    "webp": image_bytes(pixels_of(), "WEBP"),
    "bmp": image_bytes(pixels_of(), "BMP"),
    "pgm": image_bytes(pixels_of(mode="L"), "PPM"),
    "ppm": image_bytes(pixels_of(), "PPM"),
    "webp with EXIF data that DALI's parser does not find": odd_webp(),
    "longer jpeg": image_bytes(pixels_of(), "JPEG") + bytes(3000),
    "longer png": image_bytes(pixels_of()) + bytes(3000),
    "png with a wrong checksum of its text": with_wrong_checksum(png_with_text(), b"tEXt"),
    "png with a wrong checksum of its end": with_wrong_checksum(image_bytes(pixels_of()), b"IEND"),
    "jpeg with much metadata": with_metadata(image_bytes(pixels_of(), "JPEG"), 60_000),
}


def test_the_decoder_of_loaders_agrees() -> None:
    """What is refused without being decoded, DALI refuses or must not get; what is allowed, it decodes."""
    decoder = open_decoder("dali")
    for name, photo in ALLOWED.items():
        assert decoder(photo, read_whole_photo_header(photo), "rgb").shape == (40, 50, 3), name
    for name in ("png with a wrong checksum of its pixels", "png without pixels"):
        with pytest.raises(Undecodable, match="cannot be decoded: DALI"):
            decoder(REFUSED[name], PhotoHeader("PNG", 40, 50), "nothing")


def packed(photo: bytes, directory: Path) -> list[str]:
    records = [Record(key=key, components={"jpg": data}, label=None) for key, data in (("a", photo), ("b", OTHER))]
    source = Source(name="here", records=records, classes={})
    return list(pack(source, store=LocalStore(directory / "out"), on_bad="skip", jobs=1).skipped)


def verified(photo: bytes, directory: Path) -> list[str]:
    write_shards(directory, [Sample("a", {"jpg": photo})], per_shard=1)
    report = verify(resolve_shards(directory, endpoint=None), workers=1)
    return [finding.text for finding in report.findings if finding.kind != "note"]


OTHER = ALLOWED["jpeg"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_photo_that_a_loader_refuses_is_bad_everywhere(tmp_path: Path, name: str) -> None:
    """With the loader's words, whatever the file is called; the loader's own tests have the rest."""
    text = PhotoRules().problem(read_whole_photo_header(REFUSED[name]))
    assert text is not None
    (skipped,) = packed(REFUSED[name], tmp_path)
    assert skipped.startswith(f"a: jpg {text}")
    (finding,) = verified(REFUSED[name], tmp_path / "shards")
    assert finding.startswith(text)


@pytest.mark.parametrize("name", ALLOWED)
def test_a_photo_that_a_loader_decodes_is_good_everywhere(tmp_path: Path, name: str) -> None:
    assert PhotoRules().problem(read_whole_photo_header(ALLOWED[name])) is None
    assert packed(ALLOWED[name], tmp_path) == []
    assert verified(ALLOWED[name], tmp_path / "shards") == []


def test_an_animated_png_is_found_behind_other_chunks(tmp_path: Path) -> None:
    """Pack reads on where the first bytes of a PNG do not show whether it is animated."""
    plain = animated_png()
    at = plain.index(b"acTL") - 4
    text = b"\0\0\x02\0tEXt" + b"IDAT" * 128 + bytes(4)  # its content does not count
    photo = plain[:at] + text + plain[at:]
    assert read_photo_header(photo) == PhotoHeader("APNG", 40, 50)
    (skipped,) = packed(photo, tmp_path)
    assert skipped.startswith("a: jpg holds an animated PNG")


def test_verify_compares_the_index_with_the_photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader refuses a photo of another size than its index says."""
    monkeypatch.setattr(indexing, "read_whole_photo_header", lambda data: PhotoHeader("JPEG", 10, 10))
    write_shards(tmp_path, [Sample("a", {"jpg": OTHER}), Sample("b", {"jpg": OTHER})], per_shard=2)
    monkeypatch.undo()
    report = verify(resolve_shards(tmp_path, endpoint=None), workers=1)
    (finding,) = (finding for finding in report.findings if finding.kind == "index")
    assert "says something else than the shard holds; index the shards anew" in finding.text


def test_decoders_agree_on_cut_and_odd_photos() -> None:
    """What Pillow and the rules for ends refuse is what DALI refuses."""
    pytest.importorskip("nvidia.dali")
    pillow, dali = open_decoder("pillow"), open_decoder("dali")
    jpeg, png = photo_bytes(1, 64, 48), mask_bytes(1, 64, 48)
    photos = {
        f"{name} {cut}": data[:cut] for name, data in (("jpeg", jpeg), ("png", png)) for cut in (-1, -2, -13, -40)
    }
    photos |= {"gray": photo_bytes(1, 64, 48, mode="L"), "cmyk": photo_bytes(1, 64, 48, mode="CMYK"), "jpeg": jpeg}
    photos["progressive"] = photo_bytes(1, 64, 48, progressive=True)
    photos["junk behind"] = jpeg + b"junk"
    photos["half"] = jpeg[: len(jpeg) // 2] + b"\xff\xd9"
    if (odd := SHARED_DATA / "odd-images").is_dir():
        photos |= {path.name: path.read_bytes() for path in odd.iterdir() if path.suffix in (".jpg", ".jpeg", ".png")}
        del photos["png_decompression_dos.png"]  # text that Pillow does not unpack; its one pixel DALI decodes
    differing = []
    for name, data in photos.items():
        answers = []
        for decoder in (pillow, dali):
            try:
                header, pixels = decode(decoder, data, rules=PhotoRules(max_pixels=10**8), output="rgb")
                assert pixels.shape == (header.height, header.width, 3)
                answers.append(True)
            except Undecodable:
                answers.append(False)
        if answers[0] != answers[1]:
            differing.append((name, answers))
    assert differing == []


def test_odd_images_that_loaders_refuse(tmp_path: Path) -> None:
    """Damaged, hostile and unusual files: each of the bad ones, and no other."""
    odd = SHARED_DATA / "odd-images"
    if not odd.is_dir():
        pytest.skip("no ../shared/data/odd-images beside the checkout")
    photos = [path for path in sorted(odd.iterdir()) if path.suffix in (".jpg", ".jpeg", ".png", ".gif", ".mpo")]
    write_tar(tmp_path / "odd.tar", [Sample(path.stem, {"photo.jpg": path.read_bytes()}) for path in photos])
    report = verify(resolve_shards(tmp_path, endpoint=None), workers=1)
    assert {finding.key for finding in report.findings if finding.kind != "note"} == {
        *("broken", "broken_data_stream", "chi", "decompression_bomb", "invalid-dimensions", "null_height"),
        *("testorig12", "truncated_jpeg", "xcrn0g04", "xd0n2c08", "xdtn0g01", "xhdn0g08"),
    }
