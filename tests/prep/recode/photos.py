"""Photos for tests of recoding, and what decoders make of them."""

import functools
import io
import shutil
import struct
import zlib

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from dali_pipes.formats.photo_header import read_whole_photo_header
from prep.photos.decoders import Decoder, open_decoder

needs_jpegtran = pytest.mark.skipif(shutil.which("jpegtran") is None, reason="no program jpegtran")


@functools.cache
def _decoder() -> Decoder:
    return open_decoder("dali")


def pixels(data: bytes) -> npt.NDArray[np.uint8]:
    """All pixels of a photo, by Pillow, in the channels that it has."""
    with Image.open(io.BytesIO(data)) as photo:
        return np.asarray(photo)


def dali_pixels(data: bytes) -> npt.NDArray[np.uint8]:
    """All pixels of a photo, by DALI."""
    return _decoder()(data, read_whole_photo_header(data), "rgb")


def orientation(data: bytes) -> int:
    """The EXIF orientation as Pillow reads it; 1 without one."""
    with Image.open(io.BytesIO(data)) as photo:
        return int(photo.getexif().get(0x0112, 1))


def exif(value: int, *, comment: bytes = b"") -> bytes:
    """EXIF data of an orientation, and of other things."""
    data = Image.Exif()
    data[0x0112] = value
    data[0x010F] = "a camera of some maker " * 20 + comment.decode()
    return data.tobytes()


def with_odd_notes(png: bytes) -> bytes:
    """A PNG with a text of a wrong checksum, and one that inflates to more than Pillow takes: loaders skip both."""
    bomb = b"zTXta\0\0" + zlib.compress(bytes(3_000_000))
    text = struct.pack(">I", 3) + b"tEXta\0b" + bytes(4)
    return png[:33] + text + struct.pack(">I", len(bomb) - 4) + bomb + struct.pack(">I", zlib.crc32(bomb)) + png[33:]
