"""Find faults of a mask: one that cannot be decoded, or has another size than its photo."""

from collections.abc import Callable
from typing import NamedTuple

from dali_pipes.formats.orientation import upright_size
from dali_pipes.formats.photo_header import MAX_PHOTO_BYTES
from dali_pipes.formats.photo_rules import PhotoRules, size_problem
from prep.photos.details import HEAD_BYTES, photo_details

Reader = Callable[[int, int], bytes]
"""Takes an offset and a number of bytes, and returns the bytes there; at the end of the photo there may be fewer."""


class PhotoSize(NamedTuple):
    """Height and width of a photo, as stored and upright."""

    stored: tuple[int, int]
    upright: tuple[int, int]

    @classmethod
    def of(cls, height: int, width: int, orientation: int) -> "PhotoSize":
        return cls((height, width), upright_size(height, width, orientation))


def photo_size(read: Reader, num_bytes: int) -> PhotoSize | None:
    """Size by the header of a photo of ``num_bytes``; ``None`` if it has no readable header."""
    details = photo_details(read(0, HEAD_BYTES))
    # A TIFF's header may be anywhere, and the EXIF data of a PNG or WEBP, too.
    if details is None or details.format != "JPEG":
        details = photo_details(read(0, min(num_bytes, MAX_PHOTO_BYTES)))
    if details is None or not details.height or not details.width:
        return None
    return PhotoSize.of(details.height, details.width, details.orientation)


def mask_size_problem(photo: str, expected: PhotoSize, found: PhotoSize) -> str | None:
    """The reason why a mask does not fit its photo, as a text that follows its name; ``None`` if it fits.

    Both are turned upright, as loaders do by default.
    """
    if found.upright == expected.upright:
        return None
    fit_as_stored = found.stored == expected.stored
    return size_problem(photo, expected.upright, found.upright, fit_as_stored=fit_as_stored)


def mask_problem(data: bytes) -> str | None:
    """The reason why a mask cannot be decoded, as a text that follows its name; ``None`` if it can be."""
    # Here, because numpy would cost each worker a tenth of a second.
    from prep.photos.decoders import Undecodable, decode, open_decoder

    try:
        decode(open_decoder("pillow"), data, rules=PhotoRules(), output="gray")
    except Undecodable as exc:
        return str(exc)
    return None
