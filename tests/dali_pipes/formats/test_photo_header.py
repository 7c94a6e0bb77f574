"""Formats and sizes are those that Pillow reads, for every format and mode; no bytes raise an error."""

import random
import struct

import pytest
from PIL import Image

from dali_pipes.formats.photo_header import PhotoHeader, read_photo_header, read_whole_photo_header
from tests.hostile_photos import animated_png, jpeg2000, tiff, with_thumbnail
from tests.shards import image_bytes, pixels_of

MODES = {
    "JPEG": ("L", "RGB", "CMYK"),
    "PNG": ("L", "RGB", "RGBA", "P", "1", "I;16"),
    "WEBP": ("RGB", "RGBA"),
    "BMP": ("L", "RGB", "P", "1", "RGBA"),
    "PPM": ("L", "RGB", "1", "I;16"),
    "TIFF": ("L", "RGB"),
    "JPEG2000": ("L", "RGB"),
    "GIF": ("P", "L"),
}


@pytest.mark.parametrize("name", MODES)
def test_size_is_the_photo_s(name: str) -> None:
    generator = random.Random(0)
    for mode in MODES[name] * 2:
        width, height = generator.randint(1, 400), generator.randint(1, 400)
        options = {"lossless": generator.random() < 0.5} if name == "WEBP" else {}
        data = image_bytes(Image.new(mode, (width, height)), name, **options)
        assert read_photo_header(data) == read_photo_header(memoryview(data)) == PhotoHeader(name, height, width)


def test_jpeg_with_other_segments_before_its_frame() -> None:
    """EXIF data, a colour profile of several segments, a comment, fill bytes."""
    data = image_bytes(Image.new("RGB", (30, 20)), "JPEG", exif=b"Exif\0\0" + bytes(5000), icc_profile=bytes(200_000))
    assert read_photo_header(data) == PhotoHeader("JPEG", 20, 30)
    assert read_photo_header(data[:2] + b"\xff\xfe\0\x04\xff\xc0\xff\xff" + data[2:]) == PhotoHeader("JPEG", 20, 30)


@pytest.mark.parametrize(
    ("header", "size"),
    [
        (b"P6 3 4 255\n", (4, 3)),
        (b"P5\n# a comment 9 9\n3\n# another\n4\n255\n", (4, 3)),
        (b"P5\n#" + b"x" * 300 + b"\n3 4\n255\n", (4, 3)),
        (b"P7\nWIDTH 3\n", None),  # PAM, which DALI does not decode
        (b"P5 3 x", (0, 0)),
        (b"P5 2147483647 4 255\n", (4, 2147483647)),
        (b"P5 2147483648 4 255\n", (0, 0)),
    ],
)
def test_pnm(header: bytes, size: tuple[int, int] | None) -> None:
    expected = PhotoHeader("unknown", 0, 0) if size is None else PhotoHeader("PPM", *size)
    assert read_photo_header(header + bytes(20)) == expected


def test_bmp_of_os_2_and_upside_down() -> None:
    core = b"BM" + bytes(12) + struct.pack("<IHHHH", 12, 3, 4, 1, 24)
    assert read_photo_header(core) == PhotoHeader("BMP", 4, 3)
    info = b"BM" + bytes(12) + struct.pack("<Iii", 40, 3, -4) + bytes(28)
    assert read_photo_header(info) == PhotoHeader("BMP", 4, 3)


def test_a_cut_header_has_no_size() -> None:
    """A PNG's header goes on to its pixels: until there it may become an animation."""
    for data in (image_bytes(Image.new("RGB", (30, 20)), "JPEG"), animated_png(), jpeg2000(), tiff()):
        formats = {read_photo_header(data[:num]).format for num in range(16, len(data))}
        assert len(formats - {"PNG"}) == 1
    png = image_bytes(Image.new("RGB", (30, 20)), "PNG")
    assert read_photo_header(png[: png.index(b"IDAT")]) == PhotoHeader("PNG", 0, 0)


def test_many_chunks_end_the_search() -> None:
    """A PNG of a million empty chunks before its pixels has no readable header; it takes no time."""
    png = image_bytes(Image.new("RGB", (30, 20)), "PNG")
    at = png.index(b"IDAT") - 4
    chunk = b"\0\0\0\0tEXt" + bytes(4)
    assert read_photo_header(png[:at] + 5 * chunk + png[at:]) == PhotoHeader("PNG", 20, 30)
    assert read_photo_header(png[:at] + 1_000_000 * chunk + png[at:]) == PhotoHeader("PNG", 0, 0)


JPEG, PNG = (image_bytes(pixels_of(), name) for name in ("JPEG", "PNG"))
PROGRESSIVE = image_bytes(pixels_of(), "JPEG", progressive=True)
THUMBNAIL = with_thumbnail()


@pytest.mark.parametrize(
    ("data", "format"),
    [
        (JPEG, "JPEG"),
        (JPEG + b"\0", "JPEG"),
        (JPEG + bytes(100_000), "JPEG"),
        (JPEG + JPEG[:-2], "JPEG"),  # as in a file of several pictures
        (JPEG + b"\xff\xd9", "JPEG"),
        (JPEG[:-2] + b"\xff\xff\xd9", "JPEG"),  # fill
        (PROGRESSIVE, "JPEG"),
        (THUMBNAIL, "JPEG"),
        (JPEG[:-1], "JPEG cut off"),
        (JPEG[:-2], "JPEG cut off"),
        (JPEG[: len(JPEG) // 2] + bytes(100_000), "JPEG cut off"),
        (PROGRESSIVE[:-2], "JPEG cut off"),
        (THUMBNAIL[:-2], "JPEG cut off"),
        (PNG, "PNG"),
        (PNG + bytes(100_000), "PNG"),
        (PNG[:-4] + bytes(4), "PNG"),  # the checksum of the last chunk is not compared
        (PNG[:-12], "PNG cut off"),
        (PNG[:-12] + bytes(100_000), "PNG cut off"),
        (image_bytes(pixels_of(), "WEBP")[:-2], "WEBP"),  # its end has no mark: only a decoder finds out
        (JPEG[:100], "JPEG"),  # its header cannot be read, which is what is said of it
    ],
)
def test_whole_header_tells_photos_that_are_cut_off(data: bytes, format: str) -> None:
    assert read_whole_photo_header(data).format == read_whole_photo_header(memoryview(data)).format == format
