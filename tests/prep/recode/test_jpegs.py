"""JPEGs that are rewritten have the same pixels in DALI and Pillow."""

import contextlib

import numpy as np
import pytest
from PIL import ImageCms

from dali_pipes.errors import PipesError
from dali_pipes.formats.photo_header import PhotoRules, read_whole_photo_header
from prep.photos.details import photo_details
from prep.recode.photos import NotJpegError, check_jpegtran, optimized
from tests.conftest import SHARED_DATA
from tests.prep.recode.photos import dali_pixels, exif, needs_jpegtran, orientation, pixels
from tests.shards import photo_bytes

SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
LAB = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()


def check(data: bytes) -> bytes:
    """The optimized photo, which has the same pixels."""
    copy = optimized(data)
    assert np.array_equal(pixels(copy), pixels(data))
    assert np.array_equal(dali_pixels(copy), dali_pixels(data))
    assert optimized(copy) == copy
    return copy


@needs_jpegtran
@pytest.mark.parametrize(
    ("mode", "subsampling"), [("RGB", "4:4:4"), ("RGB", "4:2:0"), ("L", "4:4:4"), ("CMYK", "4:2:2")]
)
def test_progressive_becomes_baseline_with_the_same_pixels(mode: str, subsampling: str) -> None:
    copy = check(photo_bytes(1, 133, 71, mode=mode, progressive=True, subsampling=subsampling))
    details = photo_details(copy)
    assert details is not None
    assert details.process == "baseline"
    assert details.is_for_hardware == (mode != "CMYK")


@needs_jpegtran
@pytest.mark.parametrize(("value", "progressive"), [(1, False), (3, True), (6, False), (8, True)])
def test_of_the_exif_data_only_the_orientation_stays(value: int, progressive: bool) -> None:
    copy = check(photo_bytes(2, 80, 50, exif=exif(value, comment=b"secret place"), progressive=progressive))
    assert orientation(copy) == value
    assert b"secret place" not in copy


def test_markers_that_say_which_colours_the_channels_are_stay() -> None:
    """Without Adobe's marker, a JPEG of RGB would be taken for one of YCbCr."""
    for keep_rgb in (True, False):
        assert b"a comment" not in check(photo_bytes(3, 64, 48, keep_rgb=keep_rgb, comment=b"a comment"))


def test_a_colour_profile_stays_unless_it_says_srgb() -> None:
    assert LAB in check(photo_bytes(4, 64, 48, icc_profile=LAB))
    assert b"ICC_PROFILE" not in check(photo_bytes(4, 64, 48, icc_profile=SRGB))
    large = LAB + bytes(70_000)  # in several segments
    assert optimized(photo_bytes(4, 64, 48, icc_profile=large)).count(b"ICC_PROFILE") == 2
    assert b"ICC_PROFILE" in check(photo_bytes(4, 64, 48, icc_profile=b"no profile"))


def test_a_preview_and_what_follows_the_end_are_left_out() -> None:
    data = photo_bytes(5, 64, 48)
    preview = b"\xff\xe1\x20\x02Exif\0\0" + data[:100] + bytes(0x2002 - 2 - 6 - 100)
    assert check(data[:2] + preview + data[2:] + b"a film of three seconds") == optimized(data)


@needs_jpegtran
@pytest.mark.parametrize("is_progressive", [False, True])
def test_damaged_photos_are_refused(is_progressive: bool) -> None:
    """A photo that is cut off or overwritten gives an error of ours, or the same pixels."""
    data = photo_bytes(7, 64, 48, progressive=is_progressive)
    for stop in (2, 3, 20, 200, len(data) // 2, len(data) - 2):
        with pytest.raises(NotJpegError):
            optimized(data[:stop])
    with pytest.raises(NotJpegError):
        optimized(data[:2] + b"\xff\xe1\0\0" + data[2:])


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PipesError, match=r"no program 'jpegtran' .* apt-get install libjpeg-turbo-progs"):
        check_jpegtran()
    with pytest.raises(PipesError, match="no program 'jpegtran'"):
        optimized(photo_bytes(8, 64, 48, progressive=True))


@needs_jpegtran
@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="no photos beside the checkout")
def test_real_photos_have_the_same_pixels() -> None:
    """Photos of pets, progressive ones among them, and odd JPEGs."""
    paths = sorted((SHARED_DATA / "oxford-pets-sample" / "images").glob("*.jpg"))[::12]
    paths += sorted((SHARED_DATA / "odd-images").glob("*.jp*g"))
    num = 0
    for path in paths:
        data = path.read_bytes()
        header = read_whole_photo_header(data)
        if header.format != "JPEG" or PhotoRules().problem(header):
            continue
        with contextlib.suppress(NotJpegError):
            check(data)
            num += 1
    assert num > 25
