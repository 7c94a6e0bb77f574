"""Resize masks by the nearest neighbour, and write them as PNGs that are inflated quickly."""

import io
import struct
import zlib

from PIL import Image

from prep.photos.apart import Undecodable
from prep.photos.decoders import only_pixels, without_notes
from prep.photos.details import photo_details

# Rows without a filter, which a decoder need not undo: that halves the time to decode a trimap. zlib's level 9 makes
# it a fifth smaller than level 6, is no faster to inflate, and takes five times as long to write.
_LEVEL = 6
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GREY, _PALETTE = 0, 3
# Chunks that say what the pixels' values mean.
_KEPT = (b"PLTE", b"tRNS")
_MODES = {_GREY: "L", _PALETTE: "P"}


def resized_mask(data: bytes, height: int, width: int) -> bytes:
    """A mask with another height and width; each of its pixels has the value of the nearest pixel before.

    Raises:
        Undecodable: If it cannot be decoded, or is not a PNG of 8 bits with one channel.
    """
    if not is_plain_mask(data):
        raise Undecodable(
            "is no PNG of 8 bits with one channel, grey or with a palette; it cannot be resized as a mask"
        )
    return _encoded(_decoded(data).resize((width, height), Image.Resampling.NEAREST), data)


def optimized_mask(data: bytes) -> bytes:
    """The same mask as a PNG that is inflated quickly; PNGs of other kinds than `is_plain_mask` keep their bytes.

    Pixels and palette stay, and so does the meaning of the values; other chunks go.

    Raises:
        Undecodable: If it cannot be decoded.
    """
    return data if not is_plain_mask(data) else _encoded(_decoded(data), data)


def is_plain_mask(data: bytes) -> bool:
    """Whether a photo is a PNG of 8 bits with one channel: a value for each pixel, or an index into a palette."""
    details = photo_details(data)
    return details is not None and details.format == "PNG" and details.bits == 8 and data[25:26] in (b"\0", b"\3")


def _decoded(data: bytes) -> Image.Image:
    try:
        with only_pixels(), Image.open(io.BytesIO(without_notes(data, "PNG")), formats=("PNG",)) as mask:
            mask.load()
            if mask.mode != _MODES[data[25]]:
                raise Undecodable(f"is decoded to pixels of another kind, '{mask.mode}'")
            return mask
    except Undecodable:
        raise
    except Exception as exc:  # (Pillow's readers raise all kinds)
        raise Undecodable(f"cannot be decoded: {str(exc)[:100] or type(exc).__name__}") from exc


def _encoded(mask: Image.Image, source: bytes) -> bytes:
    """A PNG of the mask's bytes, with the palette of the PNG ``source``."""
    width, height = mask.size
    pixels = mask.tobytes()
    rows = b"".join(b"\0" + pixels[row * width : (row + 1) * width] for row in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, source[25], 0, 0, 0)
    chunks = [(b"IHDR", header), *_kept_chunks(source), (b"IDAT", zlib.compress(rows, _LEVEL)), (b"IEND", b"")]
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )


def _kept_chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], len(_SIGNATURE)
    while at + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        if kind in (b"IDAT", b"IEND"):
            break
        if kind in _KEPT:
            found.append((kind, data[at + 8 : at + 8 + size]))
        at += 12 + size
    return found
