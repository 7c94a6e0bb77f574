"""Photos that are resized or converted."""

import io
import struct
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from dali_pipes.formats.photo_header import PhotoHeader, PhotoRules, read_whole_photo_header
from prep.photos.decoders import Undecodable
from prep.photos.details import photo_details
from prep.recode.photos import Recoding, converted, resized
from tests.hostile_photos import animated_png, gif, jpeg2000, tiff
from tests.prep.recode.photos import dali_pixels, exif, orientation, pixels
from tests.prep.recode.test_jpegs import LAB
from tests.shards import image_bytes, photo_bytes, pixels_of
from tests.turned_photos import exif_block, with_exif

RULES = PhotoRules()


def small(data: bytes, **settings: Any) -> bytes:
    copy = resized(data, read_whole_photo_header(data), Recoding(**settings))
    assert RULES.problem(read_whole_photo_header(copy)) is None
    return copy


def averaged(data: bytes, height: int, width: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """The means of a photo's pixels over the areas of new ones, computed at once and without rounding."""
    found = np.asarray(Image.fromarray(dali_pixels(data))).astype(np.float64)

    def weights(old: int, new: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
        edges = np.arange(new + 1) * old / new
        at = np.arange(old)
        covered = np.minimum(at + 1, edges[1:, None]) - np.maximum(at, edges[:-1, None])
        return np.clip(covered, 0, None) * new / old

    rows = np.einsum("ij,jkc->ikc", weights(found.shape[0], height), found, optimize=True)
    return np.einsum("lk,ikc->ilc", weights(found.shape[1], width), rows, optimize=True)


@pytest.mark.parametrize("size", [(640, 480), (1999, 1501), (300, 280)])
def test_a_resized_photo_is_the_average_of_its_areas(size: tuple[int, int]) -> None:
    """Also where libjpeg decodes 1/2, 1/4 or 1/8: 1999 x 1501 is decoded at 1/4."""
    photo = Image.open(io.BytesIO(photo_bytes(1, 320, 240))).resize(size, Image.Resampling.BICUBIC)
    data = image_bytes(photo, "JPEG", quality=95)
    copy = small(data, short_side=256, quality=95)
    header = read_whole_photo_header(copy)
    assert min(header.height, header.width) == 256
    assert header.height == round(size[1] * 256 / min(size))
    found = dali_pixels(copy).astype(np.float64)
    expected = averaged(data, header.height, header.width)
    assert np.abs(found - expected).mean() < 2.5
    assert np.abs(found.mean(axis=(0, 1)) - expected.mean(axis=(0, 1))).max() < 0.7


def test_the_same_photo_gives_the_same_bytes_of_a_baseline_jpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # recoding ignores this limit and does not change it
    data = photo_bytes(2, 400, 300, progressive=True)
    copy = small(data, max_side=100)
    assert copy == small(data, max_side=100) != small(data, max_side=100, quality=80)
    assert Image.MAX_IMAGE_PIXELS == 100
    details = photo_details(copy)
    assert details is not None
    assert (details.is_for_hardware, details.subsampling) == (True, "4:2:0")


@pytest.mark.parametrize(("format", "value"), [("JPEG", 1), ("JPEG", 6), ("PNG", 3), ("PNG", 8), ("WEBP", 5)])
def test_the_orientation_stays_and_nothing_else_of_the_exif_data(format: str, value: int) -> None:
    copy = small(image_bytes(pixels_of(size=(90, 60)), format, exif=exif(value)), short_side=30)
    assert orientation(copy) == value
    assert b"a camera" not in copy
    with Image.open(io.BytesIO(copy)) as photo:
        assert ImageOps.exif_transpose(photo).size == ((30, 45) if value >= 5 else (45, 30))


@pytest.mark.parametrize(
    ("photo", "mode"),
    [
        (pixels_of(mode="L"), "L"),
        (pixels_of(mode="RGBA"), "RGB"),  # alpha goes, as in loaders
        (pixels_of(mode="P"), "RGB"),
        (Image.fromarray(np.arange(2000, dtype=np.uint16).reshape(40, 50) * 32), "RGB"),  # the high byte
    ],
)
def test_pngs_become_jpegs_with_the_pixels_that_loaders_deliver(photo: Image.Image, mode: str) -> None:
    data = image_bytes(photo)
    copy = small(data, short_side=39, quality=100)
    with Image.open(io.BytesIO(copy)) as found:
        assert (found.format, found.mode) == ("JPEG", mode)
    expected = averaged(data, 39, 49)
    assert np.abs(dali_pixels(copy).mean(axis=(0, 1)) - expected.mean(axis=(0, 1))).max() < 2


def test_cmyk_becomes_rgb_as_dali_decodes_it() -> None:
    data = photo_bytes(3, 200, 160, mode="CMYK", icc_profile=LAB)
    copy = small(data, short_side=80, quality=95)
    assert np.abs(dali_pixels(copy).astype(float) - averaged(data, 80, 100)).mean() < 3
    assert b"ICC_PROFILE" not in copy  # it describes four channels


def heic(photo: Image.Image, **options: Any) -> bytes:
    pillow_heif = pytest.importorskip("pillow_heif")
    pillow_heif.register_heif_opener()
    return image_bytes(photo, "HEIF", **options)


def smooth(width: int = 96, height: int = 64) -> Image.Image:
    return Image.open(io.BytesIO(photo_bytes(6, width, height))).convert("RGB")


@pytest.mark.parametrize("value", [1, 3, 6, 8])
@pytest.mark.parametrize("format", ["HEIC", "AVIF"])
def test_heic_and_avif_become_upright_jpegs(format: str, value: int) -> None:
    photo = smooth()
    data = (
        heic(photo, exif=exif(value), quality=95)
        if format == "HEIC"
        else image_bytes(photo, "AVIF", exif=exif(value), quality=95)
    )
    header = read_whole_photo_header(data)
    assert header == PhotoHeader(format, 0, 0)
    copy, before = converted(data, header, Recoding(convert=True, quality=95), rules=RULES)
    turned = Image.open(io.BytesIO(photo_bytes(6, 96, 64, exif=exif(value))))
    expected = np.asarray(ImageOps.exif_transpose(turned).convert("RGB")).astype(float)
    assert orientation(copy) == 1
    assert before == expected.shape[:2]
    assert np.abs(pixels(copy) - expected).mean() < 8
    resized_copy, _ = converted(data, header, Recoding(convert=True, short_side=32), rules=RULES)
    assert pixels(resized_copy).shape[:2] == ((48, 32) if value >= 5 else (32, 48))


@pytest.mark.parametrize(
    ("data", "shape"),
    [
        (jpeg2000(1), (40, 50, 3)),
        (tiff(1), (40, 50, 3)),
        (gif(1), (40, 50, 3)),
        (with_exif(animated_png(1), exif_block(6)), (50, 40, 3)),
    ],
)
def test_formats_that_loaders_refuse_become_upright_jpegs(data: bytes, shape: tuple[int, ...]) -> None:
    """They are decoded in a process that may die; loaders take the result."""
    header = read_whole_photo_header(data)
    assert RULES.problem(header) is not None
    copy, before = converted(data, header, Recoding(convert=True), rules=RULES)
    assert RULES.problem(read_whole_photo_header(copy)) is None
    assert pixels(copy).shape == shape
    assert before == shape[:2]
    resized_copy, _ = converted(data, header, Recoding(convert=True, short_side=20), rules=RULES)
    assert min(pixels(resized_copy).shape[:2]) == 20
    with pytest.raises(Undecodable, match="holds a photo of 40 x 50 pixels, expected at most 1000"):
        converted(data, header, Recoding(convert=True), rules=PhotoRules(max_pixels=1000))


@pytest.mark.parametrize("format", ["HEIC", "AVIF"])
def test_converted_photos_of_too_many_pixels_are_refused(format: str) -> None:
    data = heic(smooth()) if format == "HEIC" else image_bytes(smooth(), "AVIF")
    with pytest.raises(Undecodable, match="holds a photo of 64 x 96 pixels, expected at most 6000"):
        converted(data, PhotoHeader(format, 0, 0), Recoding(convert=True), rules=PhotoRules(max_pixels=6000))
    with pytest.raises(Undecodable, match="cannot be decoded"):
        converted(data[:200], PhotoHeader(format, 0, 0), Recoding(convert=True), rules=RULES)


@pytest.mark.parametrize(
    ("settings", "size", "expected"),
    [
        ({"short_side": 256}, (375, 500), (256, 341)),
        ({"short_side": 256}, (100, 9000), None),  # the shorter side counts
        ({"max_side": 256}, (375, 500), (192, 256)),
        ({"short_side": 256, "max_side": 1000}, (300, 9000), (33, 1000)),  # both hold: the smaller ratio
        ({"short_side": 256, "max_side": 1000}, (257, 258), (256, 257)),
        ({"max_side": 10}, (1, 5000), (1, 10)),  # no side becomes 0
    ],
)
def test_new_size(settings: dict[str, int], size: tuple[int, int], expected: tuple[int, int] | None) -> None:
    assert Recoding(**settings).new_size(*size) == expected  # type: ignore[arg-type]


def test_a_gif_whose_frame_is_larger_than_its_header_says_is_judged_by_its_frame() -> None:
    data = bytearray(gif())
    data[6:10] = struct.pack("<HH", 10, 10)
    header = PhotoHeader("GIF", 10, 10)
    with pytest.raises(Undecodable, match="holds a photo of 40 x 50 pixels, expected at most 1000"):
        converted(bytes(data), header, Recoding(convert=True), rules=PhotoRules(max_pixels=1000))
