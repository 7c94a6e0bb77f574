"""``prep pack``, ``prep verify`` and a loader say the same about each photo, by one function."""

import pytest
from PIL.PngImagePlugin import PngInfo

from dali_pipes.formats.photo_header import PhotoHeader, PhotoRules, read_whole_photo_header
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import resolve_shards
from prep.inspect.verify import verify
from prep.left_out import MaxBad
from prep.photos.decoders import Undecodable, decode, open_decoder
from prep.sources.record import Record, Source
from tests.conftest import SHARED_DATA
from tests.hostile_photos import (
    animated_png,
    broken_jpeg2000,
    chunk_of,
    gif,
    jpeg2000,
    large_png,
    odd_webp,
    tiff,
    with_thumbnail,
)
from tests.shards import Sample, image_bytes, mask_bytes, pack, photo_bytes, pixels_of, write_shards


def with_wrong_checksum(png: bytes, kind: bytes) -> bytes:
    """A PNG whose first chunk of a kind has another checksum than it says."""
    _, stop = chunk_of(png, kind)
    return png[: stop - 1] + bytes([png[stop - 1] ^ 1]) + png[stop:]


def without_chunk(png: bytes, kind: bytes) -> bytes:
    """A PNG without its first chunk of a kind."""
    at, stop = chunk_of(png, kind)
    return png[:at] + png[stop:]


def png_with_text() -> bytes:
    """A PNG that says who made it."""
    notes = PngInfo()
    notes.add_text("Author", "somebody")
    return image_bytes(pixels_of(), "PNG", pnginfo=notes)


def with_metadata(jpeg: bytes, num_bytes: int) -> bytes:
    """A JPEG with so many bytes of metadata, twice, before its frame header."""
    segment = b"\xff\xe2" + (num_bytes + 2).to_bytes(2) + bytes(num_bytes)
    return jpeg[:2] + 2 * segment + jpeg[2:]


def large_jpeg(height: int, width: int) -> bytes:
    """A JPEG of many pixels by its header, which has fewer."""
    jpeg = image_bytes(pixels_of(), "JPEG")
    at = jpeg.index(b"\xff\xc0") + 5
    return jpeg[:at] + height.to_bytes(2) + width.to_bytes(2) + jpeg[at + 4 :]


PLAIN = animated_png()
AT = PLAIN.index(b"acTL") - 4
REFUSED = {
    "jpeg2000": jpeg2000(),
    "broken jpeg2000": broken_jpeg2000(),
    "tiff": tiff(),
    "gif": gif(),
    "apng": PLAIN,
    # Its first bytes do not show that it is animated, so pack reads on. "IDAT" inside a text chunk does not count.
    "apng behind a text": PLAIN[:AT] + b"\0\0\x02\0tEXt" + b"IDAT" * 128 + bytes(4) + PLAIN[AT:],
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


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, str]]:
    """What pack and verify say of each bad photo (name -> text). Each photo is in a sample of its own."""
    photos = {name.replace(" ", "_"): data for name, data in (REFUSED | ALLOWED).items()}
    folder = tmp_path_factory.mktemp("judged")
    records = [Record(key=key, components={"jpg": data}, label=None) for key, data in photos.items()]
    source, every = Source(name="here", records=records, classes={}), MaxBad.parse("100%")
    skipped = pack(source, store=LocalStore(folder), prefix="packed-", on_bad="skip", max_bad=every, jobs=1).skipped
    write_shards(folder / "all", [Sample(key, {"jpg": data}) for key, data in photos.items()], per_shard=100)
    findings = verify(resolve_shards(folder / "all", endpoint=None), workers=1).findings
    packed = {key.replace("_", " "): text for key, _, text in (line.partition(": jpg ") for line in skipped)}
    return packed, {(one.key or "").replace("_", " "): one.text for one in findings if one.kind != "note"}


@pytest.mark.parametrize("name", REFUSED | ALLOWED)
def test_pack_and_verify_judge_a_photo_as_loaders_do(judged: tuple[dict[str, str], ...], name: str) -> None:
    """With the loader's words, whatever the file is called; the loader's own tests have the rest."""
    expected = PhotoRules().problem(read_whole_photo_header((REFUSED | ALLOWED)[name]))
    assert (expected is None) == (name in ALLOWED)
    for texts in judged:
        assert texts[name].startswith(expected) if expected else name not in texts, texts.get(name)


def test_decoders_agree_on_cut_and_odd_photos() -> None:
    """What Pillow and the rules for ends refuse is what DALI refuses."""
    pytest.importorskip("nvidia.dali")
    pillow, dali = open_decoder("pillow"), open_decoder("dali")
    jpeg, png = photo_bytes(1, 64, 48), mask_bytes(1, 64, 48)
    photos = {
        f"{name} {cut}": data[:cut] for name, data in (("jpeg", jpeg), ("png", png)) for cut in (-1, -2, -13, -40)
    }
    photos |= {"gray": photo_bytes(1, 64, 48, mode="L"), "cmyk": photo_bytes(1, 64, 48, mode="CMYK")}
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
