"""Small photos of every format that reaches a decoder, and of formats that must not."""

import numpy as np
from PIL import Image

from tests.shards import image_bytes, photo_bytes

HEIGHT, WIDTH = 21, 34


def photos() -> list[bytes]:
    """JPEG, PNG, WEBP, BMP and PNM, in the kinds that encoders write."""
    rgb = _image()
    return [
        photo_bytes(1, WIDTH, HEIGHT),
        photo_bytes(2, WIDTH, HEIGHT, progressive=True),
        photo_bytes(3, WIDTH, HEIGHT, mode="L"),
        image_bytes(rgb, "PNG"),
        image_bytes(rgb.convert("L"), "PNG"),
        image_bytes(rgb.convert("P"), "PNG"),
        image_bytes(rgb.convert("RGBA"), "PNG"),
        image_bytes(rgb, "WEBP", lossless=True),
        image_bytes(rgb, "WEBP", quality=80),
        image_bytes(rgb, "BMP"),
        image_bytes(rgb, "PPM"),
        image_bytes(rgb.convert("L"), "PPM"),
    ]


def other_photos() -> list[bytes]:
    """JPEG 2000, TIFF, GIF, animated PNG, AVIF, HEIC: DALI does not read them, or they end the process."""
    rgb = _image()
    more = [Image.eval(rgb, lambda value: 255 - value)]
    return [
        image_bytes(rgb, "JPEG2000"),
        image_bytes(rgb, "JPEG2000", no_jp2=True),
        image_bytes(rgb, "TIFF"),
        image_bytes(rgb, "TIFF", compression="tiff_lzw"),
        image_bytes(rgb, "GIF"),
        image_bytes(rgb, "PNG", save_all=True, append_images=more),
        image_bytes(rgb, "AVIF"),
        b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(80),  # the first box; only an extra writes whole ones
    ]


def _image() -> Image.Image:
    coarse = np.random.default_rng(0).integers(0, 256, (3, 5, 3), np.uint8)
    return Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
