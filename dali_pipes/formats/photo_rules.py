"""The rules by which a photo is good or bad, for one photo and for many.

`PhotoRules` is the one judge of photos: ``prep pack``, ``prep verify``, the indexer and the loader all ask it. A loader
asks twice: by the shard index, before the first batch, and by the photo's own bytes, before they reach a decoder. So a
wrong or old index cannot bring a photo to a decoder.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dali_pipes.arrays import Bools, Int64s
from dali_pipes.formats.photo_header import (
    CONVERTIBLE_FORMATS,
    CUT_OFF,
    DALI_FORMATS,
    DAMAGED_PNG,
    MAX_PHOTO_BYTES,
    MAX_PIXELS,
    PHOTO_FORMATS,
    PhotoHeader,
)

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
