"""Photos that are read together have the headers and orientations that each of them has alone."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dali_pipes.formats.orientation import Orientation, is_surely_read, read_orientation
from dali_pipes.formats.photo_header import DAMAGED_PNG, PHOTO_FORMATS, PhotoHeader, read_whole_photo_header
from tests.fuzz.mutations import mutant
from tests.fuzz.photo_seeds import other_photos, photos
from tests.hostile_photos import animated_png, broken_jpeg2000, with_thumbnail
from tests.lazy import Lazy
from tests.shards import image_bytes, pixels_of
from tests.turned_photos import ORIENTATIONS, exif_block, slope, stored_photo, turned_photo, with_exif, xmp

if TYPE_CHECKING:
    from dali_pipes.reader.encoded_batch import EncodedBatch

photo_headers = Lazy("dali_pipes.graph.photos")

# Between two photos stands what would be taken for a part of the first by a reader that goes too far.
MISLEADING = (b"", b"\xff\xc0\0\x11\x08\0\x10\0\x10", b"\xff\xd9", b"\0\0\0\0IDAT", b"IEND\xae\x42\x60\x82")


def in_one_buffer(photos: Sequence[bytes], *, gaps: Sequence[bytes] = (b"",)) -> EncodedBatch:
    from dali_pipes.reader.encoded_batch import EncodedBatch

    between = [gaps[number % len(gaps)] for number in range(len(photos))]
    sizes = np.array([len(photo) for photo in photos], np.int64)
    space = sizes + [len(gap) for gap in between]
    parts = [part for pair in zip(photos, between, strict=True) for part in pair]
    return EncodedBatch(np.frombuffer(b"".join(parts), np.uint8), np.cumsum(space) - space, sizes)


def alone(photo: bytes, *, orient: bool) -> tuple[PhotoHeader, Orientation]:
    header = read_whole_photo_header(photo)
    read = read_orientation(photo, header.format) if orient else Orientation(1, is_surely_read(photo, header.format))
    # The reader of batches compares no checksums: DALI does.
    return header._replace(format=header.format.removesuffix(" damaged")), read


def assert_read_as_alone(batch: Sequence[bytes], *, orient: bool, gaps: Sequence[bytes] = (b"",)) -> set[object]:
    """Compare a batch with its photos alone; return the formats and orientations that were seen."""
    headers = photo_headers.read_photo_headers(in_one_buffer(batch, gaps=gaps), orient=orient)
    seen: set[object] = set()
    for row, photo in enumerate(batch):
        header, read = alone(photo, orient=orient)
        found = headers.header(row)
        assert found._replace(format=found.format.removesuffix(" damaged")) == header
        # A PNG with a wrong checksum is bad, whatever its orientation.
        is_damaged = read_whole_photo_header(photo).format == DAMAGED_PNG
        assert (headers.orientation[row], headers.is_plain[row]) == read or is_damaged
        seen |= {found.format, read[:2]}
    return seen


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


@pytest.mark.parametrize("orient", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_mutants_are_read_as_alone(seed: int, orient: bool) -> None:
    """Files are cut, joined and changed anywhere, or in the first 120 bytes, where EXIF data are."""
    draw = Random(seed)
    seeds = [*photos(), *other_photos(), animated_png(), broken_jpeg2000(), with_thumbnail(), b"", *photos_with_exif()]
    seeds.append(image_bytes(pixels_of(), "JPEG", exif=b"Exif\0\0" + bytes(300), icc_profile=bytes(70_000)))
    seen: set[object] = set()
    for _ in range(60):
        batch = [mutant(draw, seeds) for _ in range(32)]
        for _ in range(32):
            photo = bytearray(draw.choice(seeds))
            for _ in range(draw.choice((0, 0, 1, 1, 2, 5)) if photo else 0):
                photo[draw.randrange(min(len(photo), 120))] = draw.choice((0, 1, 2, 3, 6, 8, 255, draw.randrange(256)))
            batch.append(bytes(photo))
        seen |= assert_read_as_alone(batch, orient=orient, gaps=draw.sample(MISLEADING, 3))
    assert seen >= set(PHOTO_FORMATS) - {DAMAGED_PNG}
    assert not orient or len([kind for kind in seen if isinstance(kind, tuple)]) == 16, "eight, plain and not"


def test_every_cut_of_a_photo_is_read_as_alone() -> None:
    turned = [turned_photo(slope(), 6, format) for format in ("JPEG", "PNG", "WEBP")]
    for photo in (photos()[0], photos()[3], with_thumbnail(), animated_png(), *turned):
        assert_read_as_alone([photo[:num] for num in range(len(photo))], orient=True, gaps=MISLEADING)
