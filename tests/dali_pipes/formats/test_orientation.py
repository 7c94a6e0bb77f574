"""The orientation of photos, usual and odd, and what Pillow and DALI make of it."""

import io
import struct

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from dali_pipes.formats.orientation import Orientation, is_surely_read, plain_copy, read_orientation, upright_size
from dali_pipes.formats.photo_header import read_whole_photo_header
from tests.turned_photos import ORIENTATIONS, exif_block, slope, stored_photo, turned, upright, with_exif, xmp

PIXELS = slope()
JPEG, PNG, WEBP = (stored_photo(PIXELS, format) for format in ("JPEG", "PNG", "WEBP"))
FRAME, SCAN = JPEG.index(b"\xff\xc0"), JPEG.index(b"\xff\xda")
SIX, EIGHT = exif_block(6), exif_block(8)
MAKE_OUTSIDE = (0x010F, 2, 100, 5000)  # a text of 100 bytes that is not there
FORMATS = ("JPEG", "PNG", "WEBP")


class Decoder:
    """DALI's decoder on the CPU, with ``adjust_orientation=True``."""

    def __init__(self) -> None:
        from nvidia.dali import fn, types
        from nvidia.dali.pipeline import Pipeline

        self._pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
        with self._pipeline:
            encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
            self._pipeline.set_outputs(
                fn.decoders.image(encoded, device="cpu", output_type=types.RGB, adjust_orientation=True)
            )

    def __call__(self, photo: bytes) -> npt.NDArray[np.uint8]:
        self._pipeline.feed_input("encoded", [np.frombuffer(photo, np.uint8)])
        (decoded,) = self._pipeline.run()
        return np.array(decoded.at(0))


@pytest.fixture(scope="module")
def decode() -> Decoder:
    return Decoder()


def stored(photo: bytes) -> npt.NDArray[np.uint8]:
    """The stored pixels of a photo, whatever its EXIF data say."""
    return np.asarray(Image.open(io.BytesIO(photo)).convert("RGB"))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("order", "<>")
def test_usual_photos_have_the_orientation_that_pillow_and_dali_see(decode: Decoder, format: str, order: str) -> None:
    """0, 9 and 10 are no orientations: the photo is as stored. DALI gets such photos as they are."""
    plain = stored_photo(PIXELS, format, **({"lossless": False} if format == "WEBP" else {}))
    for value in range(11):
        photo = with_exif(plain, exif_block(value, order=order))
        found = read_orientation(photo, format)
        assert found == Orientation(value if value in ORIENTATIONS else 1, is_plain=True)
        assert found == read_orientation(memoryview(photo), format)
        expected = np.asarray(upright(photo))
        assert np.array_equal(decode(photo), expected)
        assert upright_size(40, 64, found.value) == expected.shape[:2]


ODD = [
    # photo, format, orientation by the rule, what Pillow sees if it is another
    (with_exif(JPEG, SIX, EIGHT), "JPEG", 6, None),
    (with_exif(JPEG, exif_block(1), EIGHT), "JPEG", 1, None),  # DALI gives a photo of neither
    (with_exif(JPEG, b"XX", EIGHT), "JPEG", 1, None),
    (with_exif(JPEG, exif_block(6, type=4)), "JPEG", 6, None),
    (with_exif(JPEG, exif_block(6, type=4, order=">")), "JPEG", 6, None),
    (with_exif(JPEG, exif_block(6, type=9)), "JPEG", 6, None),
    (with_exif(JPEG, exif_block(6, type=7)), "JPEG", 1, None),
    (with_exif(JPEG, exif_block(6, count=0)), "JPEG", 1, None),
    (with_exif(JPEG, exif_block(6, count=2)), "JPEG", 1, 6),
    (with_exif(JPEG, exif_block(6, before=[MAKE_OUTSIDE])), "JPEG", 6, None),
    (with_exif(JPEG, SIX[:8] + b"\x05\0" + SIX[10:]), "JPEG", 6, None),  # five entries, one is there
    (with_exif(JPEG, SIX[:-6]), "JPEG", 1, None),  # cut in the entry
    (with_exif(JPEG, SIX[:4] + b"\xd0\x07\0\0" + SIX[8:]), "JPEG", 1, None),  # the directory is outside
    (with_exif(JPEG, b"II+\0" + SIX[4:]), "JPEG", 1, None),
    (with_exif(JPEG, b""), "JPEG", 1, None),
    (with_exif(JPEG, b"Exif\0\0" + SIX), "JPEG", 6, None),
    (with_exif(PNG, b"Exif\0\0" + SIX), "PNG", 6, None),
    (with_exif(PNG, SIX, EIGHT), "PNG", 6, 8),
    (with_exif(WEBP, SIX), "WEBP", 6, None),  # after an odd number of bytes, where DALI loses its way
    (with_exif(WEBP), "WEBP", 1, None),  # announced, and not there
]
PLAIN = [
    (JPEG, "JPEG", 1),
    (JPEG + b"trailing bytes", "JPEG", 1),
    (with_exif(JPEG, SIX, at=len(JPEG)), "JPEG", 1),  # after the end
    (with_exif(JPEG, SIX, at=FRAME), "JPEG", 6),
    (with_exif(JPEG, SIX, at=SCAN), "JPEG", 6),  # after the frame's header
    (with_exif(PNG, SIX, at=len(PNG) - 12), "PNG", 6),  # after the pixels
    (JPEG[:2] + b"\xff\xff" + with_exif(JPEG, SIX)[2:], "JPEG", 6),  # fill bytes
    (JPEG[:2] + xmp(6) + JPEG[2:], "JPEG", 1),  # Pillow turns it, DALI does not
    (JPEG[:2] + xmp(8) + with_exif(JPEG, SIX)[2:], "JPEG", 6),
    (with_exif(JPEG, SIX[:-4]), "JPEG", 6),  # without the place of a next directory
    (PNG, "PNG", 1),
    (WEBP, "WEBP", 1),
    (with_exif(WEBP, SIX)[:20] + b"\0" + with_exif(WEBP, SIX)[21:], "WEBP", 1),  # not announced
    (b"GIF89a" + SIX, "GIF", 1),
]


@pytest.mark.filterwarnings("ignore")  # Pillow's, about odd metadata
@pytest.mark.parametrize(("photo", "format", "value", "of_pillow"), ODD)
def test_odd_photos_are_turned_by_one_rule_and_decoded_from_a_plain_copy(
    decode: Decoder, photo: bytes, format: str, value: int, of_pillow: int | None
) -> None:
    """DALI gets a copy; Pillow agrees unless the row says otherwise."""
    assert read_orientation(photo, format) == Orientation(value, is_plain=False)
    copy = plain_copy(photo, format, value)
    assert read_orientation(copy, format) == Orientation(value, is_plain=True)
    assert read_whole_photo_header(copy) == read_whole_photo_header(photo)
    assert np.array_equal(decode(copy), turned(stored(photo), value))
    assert np.array_equal(np.asarray(upright(photo)), turned(stored(photo), of_pillow or value))


@pytest.mark.parametrize(("photo", "format", "value"), PLAIN)
def test_plain_photos_are_decoded_as_they_are(decode: Decoder, photo: bytes, format: str, value: int) -> None:
    assert read_orientation(photo, format) == Orientation(value, is_plain=True)
    if format != "GIF":
        assert np.array_equal(decode(photo), turned(stored(photo), value))


def bmp(*, size: int = 40, bits: int = 24, compression: int = 0, colours: int = 0, num_bytes: int = 100) -> bytes:
    """The beginning of a BMP file; a header of 12 bytes makes it an OS/2 BMP."""
    if size == 12:
        return (b"BM" + bytes(12) + struct.pack("<IHHHH", 12, 3, 4, 1, bits)).ljust(num_bytes, b"\0")
    fields = struct.pack("<IiiHHI12xI", size, 3, 4, 1, bits, compression, colours)
    return (b"BM" + bytes(12) + fields).ljust(num_bytes, b"\0")


FRAME_STOP = FRAME + 2 + int.from_bytes(JPEG[FRAME + 2 : FRAME + 4])


@pytest.mark.parametrize(
    ("photo", "format", "expected"),
    [
        (JPEG, "JPEG", True),
        (JPEG[:FRAME_STOP] + JPEG[FRAME:], "JPEG", False),  # two frames
        (JPEG[:FRAME] + JPEG[FRAME_STOP:], "JPEG", False),  # no frame
        (JPEG[:FRAME] + b"\xff\x01" + JPEG[FRAME:], "JPEG", False),  # DALI takes the next bytes for a length
        (JPEG[: FRAME + 9] + b"\2" + JPEG[FRAME + 10 :], "JPEG", False),  # two channels
        (PNG, "PNG", True),
        (PNG[:24] + b"\3" + PNG[25:], "PNG", False),  # three bits
        (bmp(), "BMP", True),
        (bmp(bits=8, colours=256), "BMP", True),
        (bmp(bits=8, colours=257), "BMP", False),
        (bmp(bits=16), "BMP", False),
        (bmp(bits=16, compression=3), "BMP", True),
        (bmp(bits=32, compression=3), "BMP", True),
        (bmp(bits=24, compression=3), "BMP", False),
        (bmp(compression=2), "BMP", False),
        (bmp(size=39), "BMP", False),
        (bmp(size=90), "BMP", False),  # longer than the file
        (bmp(size=12), "BMP", True),
        (bmp(size=12, bits=16), "BMP", False),
        (bmp()[:20], "BMP", False),
        (b"P5 3 4 255\n" + bytes(12), "PPM", True),
        (b"P5 3 x", "PPM", False),
    ],
)
def test_only_photos_of_usual_headers_are_surely_read(photo: bytes, format: str, expected: bool) -> None:
    """DALI's parser may read photos with unusual headers in another way."""
    assert is_surely_read(photo, format) is expected


def test_a_png_of_endless_chunks_is_given_up() -> None:
    """The search ends after 65,536 chunks; such a photo is not plain."""
    chunks = PNG[:33] + (struct.pack(">I", 0) + b"teXt" + bytes(4)) * 70_000 + with_exif(PNG, SIX)[33:]
    assert read_orientation(chunks, "PNG") == Orientation(1, is_plain=False)
