"""Read a photo's format, height and width from its bytes, without decoding it, and judge the photo by them.

`PhotoRules` is the one judge of photos: ``prep pack``, ``prep verify``, the indexer and the loader all ask it. A loader
asks twice: by the shard index, before the first batch, and by the photo's own bytes, before they reach a decoder. So a
wrong or old index cannot bring a photo to a decoder.
"""

import importlib
import io
import re
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dali_pipes.arrays import Bools, Int64s

_SIGNATURE_BYTES = 8
WEBP_HEADER_BYTES = 30


def needed_chunks(data: bytes | memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yield kind and content of each chunk that decoders need, up to the end chunk or the end of the bytes.

    Chunks that a decoder may skip, such as text, have a small letter first. Of these only ``tRNS`` changes pixels; it
    is left out nevertheless, because decoders to RGB do not read it.

    Raises:
        ValueError: If the checksum of a needed chunk before the end chunk is wrong: DALI's decoder refuses such a PNG.
            Other checksums are not compared, as it does not, either.
    """
    view, at = memoryview(data), _SIGNATURE_BYTES
    while at + 12 <= len(view):
        stop = at + 8 + int.from_bytes(view[at : at + 4])
        if stop + 4 > len(view):
            return
        kind = bytes(view[at + 4 : at + 8])
        if kind == b"IEND":
            yield kind, view[at + 8 : stop]
            return
        if not kind[0] & 0x20:
            if zlib.crc32(view[at + 4 : stop]) != int.from_bytes(view[stop : stop + 4]):
                raise ValueError(f"the {kind.decode('latin-1')!r} at byte {at} has another checksum than it says")
            yield kind, view[at + 8 : stop]
        at = stop + 4


MAX_PIXELS = 89_478_485
"""Photos of more pixels are bad. It is Pillow's ``MAX_IMAGE_PIXELS``: a quarter of a GiB of 8-bit RGB."""

MAX_PHOTO_BYTES = 1 << 28
"""Files of more bytes are not read as photos. So many bytes are `MAX_PIXELS` of 8-bit RGB without compression."""

CUT_OFF = {"JPEG": "JPEG cut off", "PNG": "PNG cut off"}
"""Format -> the format of such a photo whose end is not there."""

DAMAGED_PNG = "PNG damaged"
"""The format of a PNG without pixels, or with a wrong checksum that decoders compare."""

PHOTO_FORMATS = (
    *("unknown", "JPEG", "PNG", "WEBP", "TIFF", "BMP", "PPM", "JPEG2000", "GIF", "APNG", *CUT_OFF.values()),
    *("HEIC", "AVIF", DAMAGED_PNG),
)
"""The formats that a photo's bytes can show; its name does not matter. PPM stands for all formats of PNM, APNG for an
animated PNG. Only append: shard indexes store the position."""

CONVERTIBLE_FORMATS = ("HEIC", "AVIF", "JPEG2000", "TIFF", "GIF", "APNG")
"""Formats that no loader decodes: ``prep pack --convert`` makes JPEGs of such photos, of animations the first
picture."""

DALI_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM")
"""The formats that reach DALI's decoders. None of 72,600 mutated files of these ended the process, one at a time, and
none of 370,000 in large batches, see Note [parallel parsers]. JPEG 2000 and TIFF are left out because files of theirs
did; GIF and APNG because DALI does not decode them, or gives other pixels."""

PHOTO_EXTENSIONS = frozenset(
    {"jpg", "jpeg", "jpe", "png", "webp", "tif", "tiff", "bmp", "ppm", "pgm", "pbm", "pnm", "jp2", "j2k", "gif"}
    | {"heic", "heif", "avif"}
)

Data = bytes | memoryview

# More chunks before the first pixels than any encoder writes: the search for an animation ends there.
_MAX_CHUNKS = 1000
# A JPEG has fewer segments before its frame, even with a colour profile or EXIF data in many pieces.
_MAX_SEGMENTS = 1000
_HEAD_BYTES = 64
_PNG = b"\x89PNG\r\n\x1a\n"


class PhotoHeader(NamedTuple):
    """Format and size from the header; ``("unknown", 0, 0)`` if there is no readable header."""

    format: str
    height: int
    """Rows as stored, before any EXIF rotation."""
    width: int


def is_photo(component: str) -> bool:
    """Whether a component is a photo or a mask, by the extension of its name.

    >>> is_photo("trimap.png"), is_photo("cls")
    (True, False)
    """
    return component.rpartition(".")[2].lower() in PHOTO_EXTENSIONS


def read_photo_header(data: Data) -> PhotoHeader:
    """Format and size of a photo from its bytes, or from its first bytes. Never raises.

    The size is 0 x 0 if the bytes end before it, or before the pixels of a PNG: until there it may become animated.
    """
    head = bytes(data[:_HEAD_BYTES])
    name = _sniff(head)
    if name == "unknown":
        return PhotoHeader(name, 0, 0)
    try:
        if name == "PNG":
            name, height, width = _png(data, head)
        elif name in _READERS:
            height, width = _READERS[name](data, head)
        else:
            height, width = _by_pillow(data, name)
    except Exception:  # noqa: BLE001 (Pillow's readers raise anything; ours struct.error and IndexError)
        height, width = 0, 0
    has_size = 0 < height < 2**31 and 0 < width < 2**31
    return PhotoHeader(name, height, width) if has_size else PhotoHeader(name, 0, 0)


def read_whole_photo_header(data: Data) -> PhotoHeader:
    """Like `read_photo_header`, from all bytes of a photo: the format also says whether it is cut off or damaged.

    A JPEG is cut off if no end-of-image marker follows its frame header, a PNG if it has no whole IEND chunk. Anything
    may come after them. DALI's CPU decoder refuses nearly all photos without them, but a decoder on a GPU may fill the
    rest of a JPEG with gray and say nothing. Of a PNG the checksums are compared that DALI compares.
    """
    header = read_photo_header(data)
    if header.format not in CUT_OFF or not header.height:
        return header
    if not has_end(data[-END_BYTES:], header.format):
        # A thumbnail before a JPEG's frame header has an end of its own. After IEND comes a checksum, right or wrong.
        mark, where = (_EOI, data[_jpeg_frame(data) :]) if header.format == "JPEG" else (_IEND, data[8:-4])
        # What follows the end is short in most files.
        if mark not in bytes(where[-1024:]) and mark not in bytes(where):
            return header._replace(format=CUT_OFF[header.format])
    if header.format == "PNG":
        try:
            has_pixels = b"IDAT" in [kind for kind, _ in needed_chunks(data)]
        except ValueError:
            has_pixels = False
        if not has_pixels:
            return header._replace(format=DAMAGED_PNG)
    return header


def has_end(last: Data, format: str) -> bool:
    """Whether a photo ends as most photos of its format do, by its last `END_BYTES`; if not, ask for all its bytes."""
    if format == "JPEG":
        return last[-2:] == _EOI
    return last[-8:-4] == _IEND if format == "PNG" else True


END_BYTES = 8
_EOI, _IEND = b"\xff\xd9", b"IEND"


def _sniff(head: bytes) -> str:
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[4:8] == b"ftyp":
        return _sniff_heif(head)
    if head[:1] == b"P" and head[1:2] in (b"1", b"2", b"3", b"4", b"5", b"6"):
        return "PPM"
    return "unknown"


def _sniff_heif(head: bytes) -> str:
    # ISO/IEC 23008-12: the first box lists brands, the main one first. "mif1" says only that it is a picture.
    size = int.from_bytes(head[:4])
    brands = {head[8:12], *(head[at : at + 4] for at in range(16, min(size, len(head)), 4))}
    if not _AVIF_BRANDS.isdisjoint(brands):
        return "AVIF"
    return "unknown" if _HEIC_BRANDS.isdisjoint(brands) else "HEIC"


_AVIF_BRANDS = frozenset({b"avif", b"avis"})
_HEIC_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"})
_MAGIC = (
    (b"\xff\xd8\xff", "JPEG"),
    (_PNG, "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"BM", "BMP"),
    (b"\xff\x4f\xff\x51", "JPEG2000"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG2000"),
)


def _png(data: Data, head: bytes) -> tuple[str, int, int]:
    # The format fixes the first chunk: after its length and type comes IHDR.
    if head[12:16] != b"IHDR":
        return "PNG", 0, 0
    width, height = struct.unpack_from(">II", head, 16)
    if head[37:41] == b"IDAT":  # most PNGs have no other chunk before their pixels
        return "PNG", height, width
    # A chunk acTL before the first pixels makes an animation. Its name may also stand inside another chunk.
    at = 8
    for _ in range(_MAX_CHUNKS):
        size, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"acTL":
            return "APNG", height, width
        if kind == b"IDAT":
            return "PNG", height, width
        at += 12 + size
    return "PNG", 0, 0


def _jpeg(data: Data, head: bytes) -> tuple[int, int]:
    bits, height, width = struct.unpack_from(">BHH", data, _jpeg_frame(data) + 4)
    return (height, width) if bits == 8 else (0, 0)  # decoders take 8 bits only


def _jpeg_frame(data: Data) -> int:
    """The place of the frame header's marker.

    Raises:
        IndexError: If there is none.
    """
    at = 2
    for _ in range(_MAX_SEGMENTS):
        if data[at] != 0xFF:
            break  # no segment where one must be
        marker = data[at + 1]
        if marker == 0xFF:  # fill
            at += 1
        elif marker in JPEG_FRAMES:
            return at
        elif marker == 0x01 or 0xD0 <= marker <= 0xD8:  # without a length
            at += 2
        elif marker in (0xD9, 0xDA):  # the end, or pixels without a frame
            break
        else:
            at += 2 + (data[at + 2] << 8 | data[at + 3])
    raise IndexError("no frame header")


JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Start-of-frame markers: all but Huffman tables, JPG extensions and arithmetic coding's conditions."""


def _webp(data: Data, head: bytes) -> tuple[int, int]:
    kind = head[12:16]
    if kind == b"VP8X" and len(head) >= WEBP_HEADER_BYTES:
        return int.from_bytes(head[27:30], "little") + 1, int.from_bytes(head[24:27], "little") + 1
    if kind == b"VP8L" and head[20] == 0x2F:
        bits = int.from_bytes(head[21:25], "little")
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    if kind == b"VP8 " and head[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", head, 26)
        return height & 0x3FFF, width & 0x3FFF
    return 0, 0


def _bmp(data: Data, head: bytes) -> tuple[int, int]:
    if struct.unpack_from("<I", head, 14) == (12,):  # OS/2's header
        width, height = struct.unpack_from("<HH", head, 18)
    else:
        width, height = struct.unpack_from("<ii", head, 18)
    return abs(height), width  # a negative height: the first row is at the top


def _gif(data: Data, head: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from("<HH", head, 6)
    return height, width


def _pnm(data: Data, head: bytes) -> tuple[int, int]:
    found = _PNM.match(head) or _PNM.match(bytes(data[:_PNM_BYTES]))
    return (int(found[2]), int(found[1])) if found else (0, 0)


# Width and height after the magic number; comments may stand between them, and take most of the first bytes.
_PNM = re.compile(rb"P[1-6](?:\s|#[^\n]*\n)+(\d{1,10})(?:\s|#[^\n]*\n)+(\d{1,10})[\s#]")
_PNM_BYTES = 4096
_READERS = {"JPEG": _jpeg, "WEBP": _webp, "BMP": _bmp, "GIF": _gif, "PPM": _pnm}
# Format -> the module and the class of Pillow's reader, imported at its first photo.
_PILLOW = {"TIFF": ("TiffImagePlugin", "TiffImageFile"), "JPEG2000": ("Jpeg2KImagePlugin", "Jpeg2KImageFile")}


def _by_pillow(data: Data, name: str) -> tuple[int, int]:
    # The reader is called directly, because `Image.open` refuses a header that announces a very large picture, and
    # exactly the size of such a picture is needed here. These readers parse a header in Python.
    module, reader = _PILLOW[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about odd metadata
        width, height = getattr(importlib.import_module(f"PIL.{module}"), reader)(io.BytesIO(data)).size
    if not isinstance(width, int) or not isinstance(height, int):
        return 0, 0  # a TIFF's tags may hold fractions
    return height, width


REFUSED_FORMATS = tuple(name for name in PHOTO_FORMATS if name not in DALI_FORMATS)
"""The formats of `PHOTO_FORMATS` that are not allowed."""

_ARE_REFUSED = np.isin(PHOTO_FORMATS, REFUSED_FORMATS)
_SHOWN = {"JPEG2000": "JPEG 2000", "APNG": "animated PNG"}
_EXPECTED = "expected JPEG, PNG, WEBP, BMP or PNM"


@dataclass(frozen=True, kw_only=True)
class PhotoRules:
    """The photos that are allowed: those of `DALI_FORMATS` with at most ``max_pixels``. Every other photo is bad."""

    max_pixels: int = MAX_PIXELS
    is_converted: bool = False
    """Whether photos of `CONVERTIBLE_FORMATS` were to be converted before: the others need no advice to do so."""

    def problem(self, photo: PhotoHeader) -> str | None:
        """Say why a photo is bad, as a text that follows its name; ``None`` if its header shows no reason."""
        format, height, width = photo
        if format in CUT_OFF.values():
            return f"is cut off: it has no {'end-of-image marker' if 'JPEG' in format else 'whole IEND chunk'}"
        if format in CONVERTIBLE_FORMATS:
            advice = "" if self.is_converted else " (to make it a JPEG: prep make or pack --convert)"
            return f"holds {_with_article(format)}, {_EXPECTED}{advice}"
        if format == "unknown":
            return f"holds no photo of a known format, {_EXPECTED}"
        if not height or not width:
            return f"holds {_with_article(format)} whose header cannot be read"
        if height * width > self.max_pixels:
            return f"holds a photo of {height} x {width} pixels, expected at most max_pixels={self.max_pixels}"
        if format == DAMAGED_PNG:
            return "is damaged: it has no pixels, or a part of it has another checksum than it says"
        return None

    def are_bad(self, formats: Int64s, heights: Int64s, widths: Int64s) -> Bools:
        """Tell which photos are bad, as `problem` says for one; all are [N], formats index `PHOTO_FORMATS`."""
        pixels = heights * widths
        bad: Bools = _ARE_REFUSED[formats] | (pixels == 0) | (pixels > self.max_pixels)
        return bad


def bytes_problem(num_bytes: int) -> str | None:
    """Say why a file cannot be a photo, by its size; ``None`` if it can."""
    if not num_bytes:
        return "is empty"
    if num_bytes > MAX_PHOTO_BYTES:
        return f"has {num_bytes} bytes, a photo has at most {MAX_PHOTO_BYTES}"
    return None


def have_bad_bytes(sizes: Int64s) -> Bools:
    """Tell which files cannot be photos, as `bytes_problem` says for one: bool [N]."""
    bad: Bools = (sizes == 0) | (sizes > MAX_PHOTO_BYTES)
    return bad


def size_problem(photo: str, expected: Sequence[int], found: Sequence[int], *, fit_as_stored: bool = False) -> str:
    """Say that a mask has another height and width than its photo, as a text that follows the mask's name.

    ``fit_as_stored`` says that both have the same size before they are turned by their EXIF orientations.
    """
    text = f"has {found[0]} x {found[1]} pixels, '{photo}' {expected[0]} x {expected[1]}"
    if not fit_as_stored or tuple(expected) == tuple(found):
        return text
    return (
        f"{text}, both turned upright by their EXIF orientations; as stored it fits, so it was drawn on the stored "
        "pixels: give the mask the photo's orientation, or read both as stored (orient=False)"
    )


def _with_article(format: str) -> str:
    shown = _SHOWN.get(format, format)
    return f"an {shown}" if shown[0] in "aA" else f"a {shown}"
