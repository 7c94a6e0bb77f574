"""Photos in formats that must not reach DALI's decoders, whole and broken; made here, from noise."""

import io
from typing import Any

import numpy as np
from PIL import Image


def pixels_of(seed: int = 0, *, size: tuple[int, int] = (50, 40), mode: str = "RGB") -> Image.Image:
    """A photo of noise; ``size`` is (width, height)."""
    noise = np.random.default_rng(seed).integers(1, 256, (size[1], size[0], 3)).astype(np.uint8)
    return Image.fromarray(noise).convert(mode)


def encoded(photo: Image.Image, format: str, **options: Any) -> bytes:
    """The photo in a format of Pillow's."""
    stream = io.BytesIO()
    photo.save(stream, format, **options)
    return stream.getvalue()


def jpeg2000(seed: int = 0, *, size: tuple[int, int] = (50, 40), mode: str = "RGB") -> bytes:
    """A lossless JPEG 2000."""
    return encoded(pixels_of(seed, size=size, mode=mode), "JPEG2000")


def broken_jpeg2000(data: bytes = b"") -> bytes:
    """A JPEG 2000 whose tiles have no height: nvImageCodec's parser divides by it, which ends the process (SIGFPE)."""
    broken = bytearray(jpeg2000())
    # SIZ: marker, length, capabilities, width, height, two offsets, tile width, tile height.
    at = broken.index(b"\xff\x51") + 2 + 2 + 2 + 5 * 4
    broken[at : at + 4] = bytes(4)
    return bytes(broken)


def tiff(seed: int = 0, *, size: tuple[int, int] = (50, 40), mode: str = "RGB") -> bytes:
    """A TIFF without compression."""
    return encoded(pixels_of(seed, size=size, mode=mode), "TIFF")


def gif(seed: int = 0, *, size: tuple[int, int] = (50, 40)) -> bytes:
    """A GIF of gray levels."""
    return encoded(pixels_of(seed, size=size, mode="L"), "GIF")


def animated_png(seed: int = 0, *, size: tuple[int, int] = (50, 40), mode: str = "RGB") -> bytes:
    """An animated PNG whose default picture is not in the animation: DALI gives the animation's first picture."""
    others = [Image.new(mode, size) for _ in range(3)]
    picture = pixels_of(seed, size=size, mode=mode)
    return encoded(picture, "PNG", save_all=True, append_images=others, default_image=True)


def undecodable(data: bytes) -> bytes:
    """A JPEG or PNG with a right header and a right end; but a JPEG without its quantization tables, a PNG with a wrong
    checksum of its pixels. DALI refuses both, whatever the crop.
    """
    if data.startswith(b"\xff\xd8"):
        return data.replace(b"\xff\xdb", b"\xff\xfe")
    return data[:-13] + bytes([data[-13] ^ 1]) + data[-12:]


def with_thumbnail() -> bytes:
    """A JPEG with another in its EXIF data, which has an end of its own."""
    return encoded(pixels_of(), "JPEG", exif=b"Exif\0\0" + encoded(pixels_of(1, size=(16, 16)), "JPEG"))


def large_png(height: int, width: int) -> bytes:
    """A gray PNG of one colour: a megabyte for each 1,000 megapixels."""
    return encoded(Image.new("L", (width, height)), "PNG")
