"""Rewrite JPEGs without loss: without markers that no decoder of pixels reads, and as baseline JPEGs.

``jpegtran`` of libjpeg-turbo (https://libjpeg-turbo.org) makes a baseline JPEG of a progressive one: it encodes the
same coefficients anew. A process for each photo costs some milliseconds; most photos are baseline and need none.
"""

import io
import re
import shutil
import subprocess
from functools import lru_cache
from typing import NamedTuple

from PIL import ImageCms

from dali_pipes.errors import PipesError
from dali_pipes.formats.orientation import UPRIGHT, plain_copy, read_orientation
from dali_pipes.formats.photo_header import JPEG_FRAMES

BASELINE = 0xC0
_SOS, _APP0, _APP2, _APP14, _APP15, _COM = 0xDA, 0xE0, 0xE2, 0xEE, 0xEF, 0xFE
_ICC = b"ICC_PROFILE\0"
# After the header of a scan: the next marker that is neither a stuffed byte, nor a restart, nor fill.
_NEXT_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_MAX_SEGMENTS = 1000
# More scans than an encoder writes: they would cost time and change nothing.
_MAX_SCANS = 200
# KiB; the coefficients of a photo take 2 bytes for each value.
_MAX_MEMORY_KIB = 1 << 20
_TIMEOUT_S = 120.0


class NotJpegError(ValueError):
    """The bytes are not those of a whole JPEG, or it cannot be rewritten without loss."""


class _Segment(NamedTuple):
    marker: int
    start: int
    """Place of the marker."""
    stop: int


def optimized(data: bytes) -> bytes:
    """The same photo as a baseline JPEG of one scan, without needless markers; the same bytes if it is one already.

    The coefficients and the tables of quantisation stay, so all decoders give the same pixels. These segments stay:
    JFIF's and Adobe's (they say which colours the channels are), a colour profile other than sRGB, and the EXIF
    orientation, alone. All others go, and what follows the end of the photo.

    Raises:
        NotJpegError: If it is damaged.
        PipesError: If jpegtran is not installed.
    """
    frame, scan = _frame_and_scan(data)
    is_single = frame == BASELINE and scan is not None and data[scan.stop : scan.stop + 2] == b"\xff\xd9"
    return without_markers(data if is_single else _transcoded(data))


def without_markers(data: bytes) -> bytes:
    """A JPEG of one scan without the segments that `optimized` leaves out.

    Raises:
        NotJpegError: If it is damaged, or has several scans.
    """
    segments = _segments(data)
    scan = _scan(data, segments[-1])
    if data[scan.stop : scan.stop + 2] != b"\xff\xd9":
        raise NotJpegError("it has several scans, or no end")
    orientation = read_orientation(data, "JPEG").value
    profile = [segment for segment in segments if _holds(data, segment, _APP2, _ICC)]
    is_srgb = profile and is_srgb_profile(data[profile[0].start + 4 + len(_ICC) + 2 : profile[0].stop])
    kept = [segment for segment in segments[:-1] if _is_needed(data, segment) or (segment in profile and not is_srgb)]
    pieces = [data[segment.start : segment.stop] for segment in kept]
    copy = b"".join((data[:2], *pieces, data[scan.start : scan.stop + 2]))
    return copy if orientation == UPRIGHT else plain_copy(copy, "JPEG", orientation)


def check_jpegtran() -> None:
    """Raise `PipesError` if jpegtran is not installed."""
    if shutil.which("jpegtran") is None:
        raise PipesError(
            "no program 'jpegtran' in PATH, which --optimize runs for progressive JPEGs; it comes with libjpeg-turbo: "
            "apt-get install libjpeg-turbo-progs, or conda install libjpeg-turbo"
        )


@lru_cache(maxsize=16)
def is_srgb_profile(profile: bytes) -> bool:
    """Whether a colour profile says that it is sRGB: then viewers show the photo alike without it."""
    try:
        name = ImageCms.getProfileDescription(ImageCms.ImageCmsProfile(io.BytesIO(profile)))
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return False
    return name.startswith("sRGB")


def _is_needed(data: bytes, segment: _Segment) -> bool:
    marker = segment.marker
    if marker == _APP0:
        return data[segment.start + 4 : segment.start + 9] == b"JFIF\0"
    if marker == _APP14:
        return data[segment.start + 4 : segment.start + 9] == b"Adobe"
    return not (_APP0 <= marker <= _APP15 or marker == _COM)


def _holds(data: bytes, segment: _Segment, marker: int, mark: bytes) -> bool:
    return segment.marker == marker and data[segment.start + 4 : segment.start + 4 + len(mark)] == mark


def _frame_and_scan(data: bytes) -> tuple[int, _Segment | None]:
    """The marker of the frame, and the first scan."""
    segments = _segments(data)
    frames = [segment.marker for segment in segments if segment.marker in JPEG_FRAMES]
    if len(frames) != 1:
        raise NotJpegError(f"it has {len(frames)} frame headers before its pixels")
    return frames[0], _scan(data, segments[-1])


def _segments(data: bytes) -> list[_Segment]:
    """The segments before the first scan, and the scan's header."""
    found: list[_Segment] = []
    at = 2
    while len(found) < _MAX_SEGMENTS and at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # fill
            at += 1
            continue
        if marker == 0x01 or 0xD0 <= marker <= 0xD9:
            break
        stop = at + 2 + int.from_bytes(data[at + 2 : at + 4])
        if stop < at + 4 or stop > len(data):
            break
        found.append(_Segment(marker, at, stop))
        if marker == _SOS:
            return found
        at = stop
    raise NotJpegError("its segments are damaged")


def _scan(data: bytes, header: _Segment) -> _Segment:
    """A scan with its header, up to the marker that follows it."""
    end = _NEXT_MARKER.search(data, header.stop)
    if end is None:
        raise NotJpegError("it has no end")
    return _Segment(_SOS, header.start, end.start())


def _transcoded(data: bytes) -> bytes:
    command = ["jpegtran", "-strict", "-copy", "all", "-optimize", "-maxmemory", str(_MAX_MEMORY_KIB)]
    command += ["-maxscans", str(_MAX_SCANS)]
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise NotJpegError(f"jpegtran took more than {_TIMEOUT_S:.0f} s") from None
    except OSError as exc:
        check_jpegtran()
        raise PipesError(f"cannot run jpegtran: {exc.strerror or exc}") from exc
    if done.returncode:
        raise NotJpegError(f"jpegtran: {done.stderr.decode(errors='replace').strip()[:100] or done.returncode}")
    return done.stdout
