"""Read from a photo's first bytes how it is encoded, for decoders, masks and decoding hardware."""

import struct
from typing import NamedTuple

from dali_pipes.formats.orientation import UPRIGHT, read_orientation
from dali_pipes.formats.photo_header import read_photo_header

HEAD_BYTES = 64 << 10
"""Enough of most files to reach the frame header; colour profiles and thumbnails come before it."""

_PROCESSES = {
    0xC0: "baseline",
    0xC1: "extended",
    0xC2: "progressive",
    0xC3: "lossless",
    **dict.fromkeys((0xC5, 0xC6, 0xC7), "hierarchical"),
    **dict.fromkeys((0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF), "arithmetic"),
}
"""A JPEG's frame marker -> its coding process."""
# Sampling factors of luma, if both chroma have 1 x 1 -> the usual name.
_SUBSAMPLINGS = {(1, 1): "4:4:4", (2, 1): "4:2:2", (2, 2): "4:2:0", (1, 2): "4:4:0", (4, 1): "4:1:1", (4, 2): "4:1:0"}
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
# No length follows these markers: restart, start of image, TEM.
_BARE = frozenset({0x01, *range(0xD0, 0xD9)})
SCAN, _EOI = 0xDA, 0xD9


class PhotoDetails(NamedTuple):
    """The encoding of a photo; a value is 0 or empty if the format does not have it, or if it is not read."""

    format: str
    """One of `dali_pipes.formats.photo_header.PHOTO_FORMATS`."""
    height: int
    width: int
    channels: int = 0
    """Channels as stored: 4 in a CMYK JPEG, 1 in a PNG with a palette."""
    bits: int = 0
    """Bits of one channel of one pixel; with a palette, of an index into it."""
    process: str = ""
    """The coding process: for a JPEG ``baseline``, ``progressive``, ...; for a PNG ``interlaced`` or empty."""
    subsampling: str = ""
    """The chroma subsampling: for a JPEG of three channels ``4:2:0``, or the factors, ``3x1,1x1,1x1``, if they have no
    name."""
    orientation: int = UPRIGHT
    """EXIF's value, 1 to 8, as loaders read it: see `dali_pipes.formats.orientation`. 1 is upright."""
    has_palette: bool = False
    num_scan_channels: int = 0
    """Channels in a JPEG's first scan; fewer than `channels` if it has several scans."""

    @property
    def is_for_hardware(self) -> bool:
        """Whether the JPEG engine of NVIDIA's data-centre GPUs (A100 and later) takes the photo.

        It takes baseline JPEGs of 8 bits in one scan, with one channel or with three that are sampled 4:4:4, 4:2:2,
        4:2:0 or 4:4:0. Sources: ``NVJPEG_BACKEND_HARDWARE`` in nvJPEG's documentation (https://docs.nvidia.com/cuda/nvjpeg/)
        and header, and the samplings that nvImageCodec, DALI's decoder, passes to it (``canDecode``,
        https://github.com/NVIDIA/nvImageCodec, ``extensions/nvjpeg/hw_decoder.cpp``). Other photos are decoded on the
        GPU's cores or on the CPU.
        """
        is_sampled = self.channels == 1 or self.subsampling in ("4:4:4", "4:2:2", "4:2:0", "4:4:0")
        is_plain = self.process == "baseline" and self.bits == 8 and self.channels in (1, 3)
        return is_plain and is_sampled and self.num_scan_channels == self.channels and self.height * self.width > 0


def photo_details(data: bytes) -> PhotoDetails | None:
    """How a photo is encoded, by all its bytes or the first `HEAD_BYTES`. Never raises.

    The orientation of a PNG or WEBP that is not given whole may be 1 because its EXIF data are at its end.

    Returns ``None`` if ``data`` ends before a JPEG's first scan begins: call it with more bytes.
    """
    if data.startswith(b"\xff\xd8\xff"):
        details = _jpeg(data)
        return details and details._replace(orientation=read_orientation(data, "JPEG").value)
    header = read_photo_header(data)
    details = PhotoDetails(header.format, header.height, header.width)
    # The size stands in the first chunk, also where `data` ends before the pixels.
    if header.format in ("PNG", "APNG") and data[12:16] == b"IHDR" and len(data) >= 29:
        details = _png(data)._replace(format=header.format)
    return details._replace(orientation=read_orientation(data, header.format).value)


class JpegSegment(NamedTuple):
    marker: int
    start: int
    """Place of the marker; the content starts 4 bytes after it."""
    stop: int


def jpeg_segments(data: bytes) -> tuple[list[JpegSegment], bool]:
    """List a JPEG's marker segments up to the first scan, and say whether ``data`` ends before that scan."""
    found: list[JpegSegment] = []
    at = 2
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            return found, False  # no segment where one must be
        marker = data[at + 1]
        if marker == 0xFF:  # fill
            at += 1
            continue
        if marker in _BARE:
            at += 2
            continue
        if marker == _EOI:
            return found, False
        stop = at + 2 + int.from_bytes(data[at + 2 : at + 4])
        found.append(JpegSegment(marker, at, stop))
        if marker == SCAN or stop < at + 4:
            return found, stop > len(data)
        at = stop
    return found, True


def _jpeg(data: bytes) -> PhotoDetails | None:
    scan_channels = 0
    process, fields = "", b""
    segments, is_cut = jpeg_segments(data)
    if is_cut:
        return None
    for marker, start, stop in segments:
        if marker in _PROCESSES and not process:
            process, fields = _PROCESSES[marker], data[start + 4 : stop]
        elif marker == SCAN:
            scan_channels = data[start + 4]
    if len(fields) < 6 or len(fields) < 6 + 3 * fields[5]:
        return PhotoDetails("JPEG", 0, 0, process=process)
    bits, height, width, channels = struct.unpack(">BHHB", fields[:6])
    factors = [(byte >> 4, byte & 15) for byte in fields[7 : 6 + 3 * channels : 3]]
    subsampling = _subsampling(factors) if channels == 3 else ""
    return PhotoDetails("JPEG", height, width, channels, bits, process, subsampling, num_scan_channels=scan_channels)


def _subsampling(factors: list[tuple[int, int]]) -> str:
    luma, *chroma = factors
    if all(pair == chroma[0] and pair[0] and pair[1] for pair in chroma):
        across, across_rest = divmod(luma[0], chroma[0][0])
        down, down_rest = divmod(luma[1], chroma[0][1])
        if not across_rest and not down_rest and (across, down) in _SUBSAMPLINGS:
            return _SUBSAMPLINGS[across, down]
    return ",".join(f"{across}x{down}" for across, down in factors)


def _png(data: bytes) -> PhotoDetails:
    # Length, type and the chunk: IHDR is always first.
    width, height, bits, colour, _, _, interlace = struct.unpack(">IIBBBBB", data[16:29])
    return PhotoDetails(
        "PNG",
        height,
        width,
        channels=_PNG_CHANNELS.get(colour, 0),
        bits=bits,
        process="interlaced" if interlace else "",
        has_palette=colour == 3,
    )
