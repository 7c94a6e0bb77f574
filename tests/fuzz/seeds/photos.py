"""Small photos of every format that reaches a decoder, and of formats that must not."""

import io
from typing import Any

import numpy as np
from PIL import Image

from tests.builders import photo_bytes

HEIGHT, WIDTH = 21, 34


def photos() -> list[bytes]:
    """JPEG, PNG, WEBP, BMP and PNM, in the kinds that encoders write."""
    rgb = _image()
    return [
        photo_bytes(1, WIDTH, HEIGHT),
        photo_bytes(2, WIDTH, HEIGHT, progressive=True),
        photo_bytes(3, WIDTH, HEIGHT, mode="L"),
        _saved(rgb, "PNG"),
        _saved(rgb.convert("L"), "PNG"),
        _saved(rgb.convert("P"), "PNG"),
        _saved(rgb.convert("RGBA"), "PNG"),
        _saved(rgb, "WEBP", lossless=True),
        _saved(rgb, "WEBP", quality=80),
        _saved(rgb, "BMP"),
        _saved(rgb, "PPM"),
        _saved(rgb.convert("L"), "PPM"),
    ]


def other_photos() -> list[bytes]:
    """JPEG 2000, TIFF, GIF, animated PNG, AVIF, HEIC: DALI does not read them, or they end the process."""
    rgb = _image()
    more = [Image.eval(rgb, lambda value: 255 - value)]
    return [
        _saved(rgb, "JPEG2000"),
        _saved(rgb, "JPEG2000", no_jp2=True),
        _saved(rgb, "TIFF"),
        _saved(rgb, "TIFF", compression="tiff_lzw"),
        _saved(rgb, "GIF"),
        _saved(rgb, "PNG", save_all=True, append_images=more),
        _saved(rgb, "AVIF"),
        b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(80),  # the first box; only an extra writes whole ones
    ]


def _image() -> Image.Image:
    coarse = np.random.default_rng(0).integers(0, 256, (3, 5, 3), np.uint8)
    return Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()
