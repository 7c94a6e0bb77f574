"""Rewrite JPEGs without loss: without markers that no decoder of pixels reads, and as baseline JPEGs.

``jpegtran`` of libjpeg-turbo (https://libjpeg-turbo.org) makes a baseline JPEG of a progressive one: it encodes the
same coefficients anew. A process for each photo costs some milliseconds; most photos are baseline and need none.
"""

import io
import re
import shutil
import subprocess
from functools import lru_cache

from PIL import ImageCms

from dali_pipes.errors import PipesError
from dali_pipes.formats.orientation import UPRIGHT, plain_copy, read_orientation
from dali_pipes.formats.photo_header import JPEG_FRAMES
from prep.photos.details import SCAN, JpegSegment, jpeg_segments

BASELINE = 0xC0
_APP0, _APP2, _APP14, _APP15, _COM = 0xE0, 0xE2, 0xEE, 0xEF, 0xFE
_ICC = b"ICC_PROFILE\0"
# After the header of a scan: the next marker that is neither a stuffed byte, nor a restart, nor fill.
_NEXT_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
# More scans than an encoder writes: they would cost time and change nothing.
_MAX_SCANS = 200
# KiB; the coefficients of a photo take 2 bytes for each value.
_MAX_MEMORY_KIB = 1 << 20
_TIMEOUT_S = 120.0


class NotJpegError(ValueError):
    """The bytes are not those of a whole JPEG, or it cannot be rewritten without loss."""


def optimized(data: bytes) -> bytes:
    """The same photo as a baseline JPEG of one scan, without needless markers; the same bytes if it is one already.

    The coefficients and the tables of quantisation stay, so all decoders give the same pixels. These segments stay:
    JFIF's and Adobe's (they say which colours the channels are), a colour profile other than sRGB, and the EXIF
    orientation, alone. All others go, and what follows the end of the photo.

    Raises:
        NotJpegError: If it is damaged.
        PipesError: If jpegtran is not installed.
    """
    segments, scan = _segments_and_scan(data)
    frames = [segment.marker for segment in segments if segment.marker in JPEG_FRAMES]
    if frames != [BASELINE] or not _is_last(data, scan):
        data = _transcoded(data)
        segments, scan = _segments_and_scan(data)
        if not _is_last(data, scan):
            raise NotJpegError("it has several scans, or no end")
    orientation = read_orientation(data, "JPEG").value
    profile = [segment for segment in segments if segment.marker == _APP2 and _content(data, segment).startswith(_ICC)]
    is_srgb = profile and is_srgb_profile(_content(data, profile[0])[len(_ICC) + 2 :])
    kept = [segment for segment in segments if _is_needed(data, segment) or (segment in profile and not is_srgb)]
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


def _content(data: bytes, segment: JpegSegment) -> bytes:
    return data[segment.start + 4 : segment.stop]


def _is_needed(data: bytes, segment: JpegSegment) -> bool:
    if segment.marker in (_APP0, _APP14):
        return _content(data, segment).startswith((b"JFIF\0", b"Adobe"))
    return not (_APP0 <= segment.marker <= _APP15 or segment.marker == _COM)


def _segments_and_scan(data: bytes) -> tuple[list[JpegSegment], JpegSegment]:
    """The segments before the first scan, and the scan with its header, up to the marker that follows it."""
    segments, is_cut = jpeg_segments(data)
    if is_cut or not segments or segments[-1].marker != SCAN:
        raise NotJpegError("its segments are damaged")
    *others, header = segments
    end = _NEXT_MARKER.search(data, header.stop)
    if end is None:
        raise NotJpegError("it has no end")
    return others, header._replace(stop=end.start())


def _is_last(data: bytes, scan: JpegSegment) -> bool:
    return data[scan.stop : scan.stop + 2] == b"\xff\xd9"


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
