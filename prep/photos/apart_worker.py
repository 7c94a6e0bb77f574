"""The program that decodes photos by Pillow, for `prep.photos.apart`: ``python -m`` this module.

It reads requests from its standard input and answers on its standard output until the input ends. A broken photo may
end it; its parent starts another one.
"""

import io
import resource
import struct
import sys
import warnings
from typing import Any, BinaryIO

REQUEST = struct.Struct("<16sBQ")
"""The name of Pillow's reader, the photo's EXIF orientation, and the number of bytes of the photo, which follow."""
ANSWER = struct.Struct("<?Q")
"""Whether the photo was decoded, and the number of bytes that follow: a PNM file, or the reason in UTF-8."""

_GRAY = ("1", "L", "LA", "La")
_COLOUR = ("RGB", "RGBA", "RGBa", "RGBX", "P", "PA", "CMYK", "YCbCr", "LAB", "HSV")
# Orientation -> Pillow's name of the operation that turns the photo upright.
_TRANSPOSES = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


def main() -> None:
    """Answer requests; the argument is the largest number of bytes of memory that this process may have."""
    limit = int(sys.argv[1])
    _, allowed = resource.getrlimit(resource.RLIMIT_AS)
    if allowed != resource.RLIM_INFINITY:
        limit = min(limit, allowed)  # more is refused
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")  # about odd metadata; only the pixels count
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while (head := requests.read(REQUEST.size)) and len(head) == REQUEST.size:
        name, orientation, num_bytes = REQUEST.unpack(head)
        _answer(answers, requests.read(num_bytes), name.rstrip(b"\0").decode(), orientation)


def _answer(answers: BinaryIO, data: bytes, name: str, orientation: int) -> None:
    try:
        is_decoded, content = True, _decode(data, name, orientation)
    except Exception as exc:  # noqa: BLE001 (Pillow's readers raise all kinds, MemoryError too)
        # Its text for an unknown format names an object in memory.
        text = str(exc).partition(" <")[0]
        is_decoded, content = False, (text or type(exc).__name__).encode("utf-8", "backslashreplace")
    answers.write(ANSWER.pack(is_decoded, len(content)))
    answers.write(content)
    answers.flush()


def _decode(data: bytes, name: str, orientation: int) -> bytes:
    """Decode a photo, or the first picture of an animation, and return it as a PNM file of 8 bits, gray or RGB."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # the parent has compared the header with its own limit
    with Image.open(io.BytesIO(data), formats=(name,)) as photo:
        photo.load()
        pixels = _eight_bits(photo)
        if orientation in _TRANSPOSES:
            pixels = pixels.transpose(Image.Transpose[_TRANSPOSES[orientation]])
    kind = b"P5" if pixels.mode == "L" else b"P6"
    content: bytes = pixels.tobytes()
    return b"%b\n%d %d\n255\n" % (kind, pixels.width, pixels.height) + content


def _eight_bits(photo: Any) -> Any:
    if photo.mode in _GRAY:
        return photo.convert("L")
    if photo.mode in _COLOUR:
        # Alpha is dropped and not blended, as DALI does.
        return photo.convert("RGB")
    if photo.mode.startswith("I;16"):  # Pillow does not convert it; DALI takes the high byte of 16
        import numpy as np
        from PIL import Image

        return Image.fromarray((np.asarray(photo) >> 8).astype(np.uint8))
    raise ValueError(f"its pixels are of Pillow's mode {photo.mode}, expected 8 or 16 bits")


if __name__ == "__main__":
    main()
