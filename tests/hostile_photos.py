"""Photos in formats that must not reach DALI's decoders, whole and broken; made here, from noise."""

import struct
import zlib

from PIL import Image

from tests.shards import image_bytes, pixels_of


def jpeg2000(seed: int = 0, *, size: tuple[int, int] = (50, 40), mode: str = "RGB") -> bytes:
    """A lossless JPEG 2000."""
    return image_bytes(pixels_of(seed, size=size, mode=mode), "JPEG2000")


def broken_jpeg2000(data: bytes = b"") -> bytes:
    """A JPEG 2000 whose tiles have no height: nvImageCodec's parser divides by it, which ends the process (SIGFPE)."""
    broken = bytearray(jpeg2000())
    # SIZ: marker, length, capabilities, width, height, two offsets, tile width, tile height.
    at = broken.index(b"\xff\x51") + 2 + 2 + 2 + 5 * 4
    broken[at : at + 4] = bytes(4)
    return bytes(broken)


def misleading_jpeg(seed: int = 0) -> bytes:
    """A JPEG with start and end whole, and no second table of Huffman codes: nvImageCodec's parser refuses it."""
    jpeg = image_bytes(pixels_of(seed), "JPEG")
    at = jpeg.index(b"\xff\xc4", jpeg.index(b"\xff\xc4") + 2)
    return jpeg[:at] + b"\xff" * 7 + jpeg[at + 7 :]


def odd_webp(*, size: tuple[int, int] = (50, 40)) -> bytes:
    """A valid lossless WEBP with EXIF data behind a chunk of odd length: nvImageCodec's parser refuses it."""
    exif = Image.Exif()
    exif[0x0112] = 1
    for seed in range(100):
        webp = image_bytes(pixels_of(seed, size=size), "WEBP", lossless=True, exif=exif)
        if webp[webp.index(b"VP8L") + 4] % 2:
            return webp
    raise AssertionError("all of them are even")


def bmp_of_16_bits(*, size: tuple[int, int] = (50, 40)) -> bytes:
    """A BMP of 16 bits a pixel: nvImageCodec's parser reads it, and DALI refuses its kind of pixels."""
    pixels = bytes(2 * size[0] * size[1])
    header = struct.pack("<IiiHHIIiiII", 40, *size, 1, 16, 0, len(pixels), 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + len(pixels), 0, 0, 54) + header + pixels


def with_fill(jpeg: bytes, num: int = 3) -> bytes:
    """A JPEG with fill bytes before its scan, which is valid."""
    at = jpeg.index(b"\xff\xda")
    return jpeg[:at] + b"\xff" * num + jpeg[at:]


def with_long_marker(jpeg: bytes) -> bytes:
    """A valid JPEG with a marker without a length: nvImageCodec's parser takes two bytes for its length.

    They lead it to fill bytes before the next marker but one, so that it reads the photo.
    """
    return jpeg[:2] + b"\xff\x01\xff\xfe" + (65_534).to_bytes(2) + bytes(65_530) + b"\xff\xff" + jpeg[2:]


def tiff(seed: int = 0, *, size: tuple[int, int] = (50, 40), mode: str = "RGB") -> bytes:
    """A TIFF without compression."""
    return image_bytes(pixels_of(seed, size=size, mode=mode), "TIFF")


def gif(seed: int = 0, *, size: tuple[int, int] = (50, 40)) -> bytes:
    """A GIF of gray levels."""
    return image_bytes(pixels_of(seed, size=size, mode="L"), "GIF")


def animated_png(seed: int = 0, *, size: tuple[int, int] = (50, 40), mode: str = "RGB") -> bytes:
    """An animated PNG whose default picture is not in the animation: DALI gives the animation's first picture."""
    others = [Image.new(mode, size) for _ in range(3)]
    picture = pixels_of(seed, size=size, mode=mode)
    return image_bytes(picture, "PNG", save_all=True, append_images=others, default_image=True)


def undecodable(data: bytes) -> bytes:
    """A JPEG or PNG with a right header and a right end; but a JPEG without its quantization tables, a PNG whose pixels
    have no zlib header, with right checksums. DALI refuses both, whatever the crop.
    """
    if data.startswith(b"\xff\xd8"):
        return data.replace(b"\xff\xdb", b"\xff\xfe")
    at, stop = chunk_of(data, b"IDAT")
    content = data[at + 4 : at + 8] + b"\xff\xff" + data[at + 10 : stop - 4]
    return data[: at + 4] + content + zlib.crc32(content).to_bytes(4) + data[stop:]


def chunk_of(png: bytes, kind: bytes) -> tuple[int, int]:
    """Start and stop of a PNG's first chunk of a kind."""
    at = png.index(kind) - 4
    return at, at + 12 + int.from_bytes(png[at : at + 4])


def with_thumbnail() -> bytes:
    """A JPEG with another in its EXIF data, which has an end of its own."""
    return image_bytes(pixels_of(), "JPEG", exif=b"Exif\0\0" + image_bytes(pixels_of(1, size=(16, 16)), "JPEG"))


def large_png(height: int, width: int) -> bytes:
    """A gray PNG of one colour: a megabyte for each 1,000 megapixels."""
    return image_bytes(Image.new("L", (width, height)), "PNG")
