"""Photos that are read together have the headers that each of them has alone."""

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from dali_pipes.formats.photo_header import PHOTO_FORMATS, Data, PhotoHeader, read_whole_photo_header
from dali_pipes.graph import photo_headers
from dali_pipes.graph.photo_headers import read_photo_headers
from dali_pipes.reader.buffers import EncodedBatch
from tests.fuzz.mutations import mutant
from tests.fuzz.seeds.photos import other_photos, photos
from tests.hostile_photos import animated_png, broken_jpeg2000, encoded, pixels_of, with_thumbnail

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
    seeds.append(encoded(pixels_of(), "JPEG", exif=b"Exif\0\0" + bytes(300), icc_profile=bytes(70_000)))
    formats = set()
    for _ in range(60):
        batch = [mutant(draw, seeds) for _ in range(64)]
        expected = list(map(read_whole_photo_header, batch))
        assert found(in_one_buffer(batch, gaps=draw.sample(MISLEADING, 3))) == expected
        formats |= {header.format for header in expected}
    assert formats == set(PHOTO_FORMATS)


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
        encoded(pixels_of(), "JPEG"),
        encoded(pixels_of(), "JPEG", progressive=True),
        encoded(pixels_of(), "JPEG", icc_profile=bytes(200)),
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
