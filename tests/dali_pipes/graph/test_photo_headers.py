"""Photos that are read together have the headers that each of them has alone."""

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from dali_pipes.formats.orientation import Orientation, read_orientation
from dali_pipes.formats.photo_header import DAMAGED_PNG, PHOTO_FORMATS, Data, PhotoHeader, read_whole_photo_header
from dali_pipes.graph import photos as photo_headers
from dali_pipes.graph.photos import read_photo_headers
from dali_pipes.reader.buffers import EncodedBatch
from tests.builders import image_bytes
from tests.fuzz.mutations import mutant
from tests.fuzz.seeds.photos import other_photos, photos
from tests.hostile_photos import animated_png, broken_jpeg2000, pixels_of, with_thumbnail
from tests.turned_photos import ORIENTATIONS, exif_block, slope, stored_photo, turned_photo, with_exif, xmp

# Between two photos stands what would be taken for a part of the first by a reader that goes too far.
MISLEADING = (b"", b"\xff\xc0\0\x11\x08\0\x10\0\x10", b"\xff\xd9", b"\0\0\0\0IDAT", b"IEND\xae\x42\x60\x82")


def in_one_buffer(photos: Sequence[bytes], *, gaps: Sequence[bytes] = (b"",)) -> EncodedBatch:
    between = [gaps[number % len(gaps)] for number in range(len(photos))]
    sizes = np.array([len(photo) for photo in photos], np.int64)
    space = sizes + [len(gap) for gap in between]
    parts = [part for pair in zip(photos, between, strict=True) for part in pair]
    return EncodedBatch(np.frombuffer(b"".join(parts), np.uint8), np.cumsum(space) - space, sizes)


def found(photos: EncodedBatch) -> list[PhotoHeader]:
    headers = read_photo_headers(photos)
    return [headers.header(row) for row in range(len(photos))]


@pytest.mark.parametrize("seed", range(4))
def test_mutants_have_the_headers_that_they_have_alone(seed: int) -> None:
    draw = Random(seed)
    seeds = [*photos(), *other_photos(), animated_png(), broken_jpeg2000(), with_thumbnail(), b""]
    seeds.append(image_bytes(pixels_of(), "JPEG", exif=b"Exif\0\0" + bytes(300), icc_profile=bytes(70_000)))
    formats = set()
    for _ in range(60):
        batch = [mutant(draw, seeds) for _ in range(64)]
        expected = list(map(read_whole_photo_header, batch))
        read = found(in_one_buffer(batch, gaps=draw.sample(MISLEADING, 3)))
        assert list(map(unchecked, read)) == list(map(unchecked, expected))
        formats |= {header.format for header in expected}
    assert formats == set(PHOTO_FORMATS)


def unchecked(header: PhotoHeader) -> PhotoHeader:
    """The reader of batches compares no checksums: DALI does."""
    return header._replace(format=header.format.removesuffix(" damaged"))


def test_every_cut_of_a_photo_has_the_header_that_it_has_alone() -> None:
    for photo in (photos()[0], photos()[3], with_thumbnail(), animated_png()):
        batch = [photo[:num] for num in range(len(photo))]
        for gap in MISLEADING:
            assert found(in_one_buffer(batch, gaps=(gap,))) == list(map(read_whole_photo_header, batch))


def test_usual_photos_are_not_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """JPEGs of several kinds and PNGs with chunks before their pixels, in a batch of 64."""
    png = photos()[3]
    at = png.index(b"IDAT") - 4
    usual = [
        image_bytes(pixels_of(), "JPEG"),
        image_bytes(pixels_of(), "JPEG", progressive=True),
        image_bytes(pixels_of(), "JPEG", icc_profile=bytes(200)),
        with_thumbnail(),
        png,
        png[:at] + b"\0\0\0\x09pHYs" + bytes(13) + png[at:],
    ]
    batch = [usual[number % 6] for number in range(64)]
    expected = list(map(read_whole_photo_header, batch))
    alone: list[Data] = []

    def read(data: Data) -> PhotoHeader:
        alone.append(data)
        return read_whole_photo_header(data)

    monkeypatch.setattr(photo_headers, "read_whole_photo_header", read)
    assert found(in_one_buffer(batch)) == expected
    assert not alone
    assert found(in_one_buffer([*batch[1:], b"GIF89a"])) == [*expected[1:], PhotoHeader("GIF", 0, 0)]
    assert [bytes(data) for data in alone] == [b"GIF89a"]


def alone(photo: bytes) -> tuple[PhotoHeader, Orientation]:
    header = read_whole_photo_header(photo)
    return header, read_orientation(photo, header.format)


def together(photos: EncodedBatch) -> list[tuple[PhotoHeader, Orientation]]:
    headers = read_photo_headers(photos, orient=True)
    return [
        (headers.header(row), Orientation(int(headers.orientation[row]), bool(headers.is_plain[row])))
        for row in range(len(photos))
    ]


def photos_with_exif() -> list[bytes]:
    """Of all formats, orientations and byte orders, with texts and fractions, several blocks, and XMP."""
    made = [turned_photo(slope(), value, format) for value in ORIENTATIONS for format in ("JPEG", "PNG", "WEBP")]
    text, fraction, far = (0x010F, 2, 9, 30), (0x011A, 5, 1, 40), (0x0131, 2, 50, 5000)
    for order, before in (("<", [text]), (">", [text, fraction]), (">", [far]), ("<", [text, far, fraction] * 11)):
        block = exif_block(5, order=order, before=before) + bytes(60)
        made += [with_exif(stored_photo(slope(), format), block) for format in ("JPEG", "PNG", "WEBP")]
    jpeg, png = stored_photo(slope()), stored_photo(slope(), "PNG")
    for at in (jpeg.index(b"\xff\xc0"), jpeg.index(b"\xff\xda"), len(jpeg)):
        made.append(with_exif(jpeg, exif_block(7), at=at))
    made += [with_exif(photo, exif_block(6), exif_block(3)) for photo in (jpeg, png)]
    made += [with_exif(png, exif_block(6), at=len(png) - 12), jpeg[:2] + xmp(6) + jpeg[2:], jpeg, png]
    made.append(with_exif(with_exif(png, exif_block(3), at=len(png) - 12), exif_block(3)))
    return made


@pytest.mark.parametrize("seed", range(4))
def test_mutants_have_the_orientations_that_they_have_alone(seed: int) -> None:
    """Bytes are changed in the first 120, where the EXIF data are."""
    draw = Random(seed)
    seeds = [*photos_with_exif(), *photos(), animated_png(), with_thumbnail()]
    seen = set()
    for _ in range(40):
        batch = []
        for _ in range(64):
            photo = bytearray(draw.choice(seeds))
            for _ in range(draw.choice((0, 0, 1, 1, 2, 5))):
                photo[draw.randrange(min(len(photo), 120))] = draw.choice((0, 1, 2, 3, 6, 8, 255, draw.randrange(256)))
            batch.append(bytes(photo))
        expected = list(map(alone, batch))
        for found, wanted in zip(
            together(in_one_buffer(batch, gaps=draw.sample(MISLEADING, 3))), expected, strict=True
        ):
            assert unchecked(found[0]) == unchecked(wanted[0])
            # A PNG with a wrong checksum is bad, whatever its orientation.
            assert found[1] == wanted[1] or wanted[0].format == DAMAGED_PNG
        seen |= {orientation for _, orientation in expected}
    assert len({orientation[:2] for orientation in seen}) == 16, "eight orientations, plain and not"


def test_every_cut_of_a_turned_photo_has_the_orientation_that_it_has_alone() -> None:
    for format in ("JPEG", "PNG", "WEBP"):
        photo = turned_photo(slope(), 6, format)
        batch = [photo[:num] for num in range(len(photo))]
        for gap in MISLEADING:
            assert together(in_one_buffer(batch, gaps=(gap,))) == list(map(alone, batch))


def test_usual_photos_with_exif_data_are_not_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """JPEGs and PNGs with one plain block, of either byte order, and without."""
    text = (0x010F, 2, 9, 50)
    block = exif_block(8, order=">", before=[text]) + bytes(30)
    usual = [
        turned_photo(slope(), 6),
        with_exif(stored_photo(slope(), progressive=True), block),
        with_exif(stored_photo(slope(), "PNG"), block),
        stored_photo(slope(), "PNG"),
        stored_photo(slope(), quality=60, optimize=True),
    ]
    batch = [usual[number % 5] for number in range(64)]
    expected = list(map(alone, batch))
    monkeypatch.setattr(photo_headers, "read_orientation", None)
    assert together(in_one_buffer(batch)) == expected
    assert {orientation.value for _, orientation in expected} == {1, 6, 8}
