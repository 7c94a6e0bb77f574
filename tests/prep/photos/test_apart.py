"""Photos that are decoded in a process that may die."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dali_pipes.formats.photo_header import PhotoHeader, read_whole_photo_header
from prep.photos import decoders as apart
from prep.photos.decoders import Undecodable, decode_apart
from tests.hostile_photos import animated_png, gif, jpeg2000, tiff
from tests.shards import image_bytes, pixels_of

SIZE = (50, 40)
SIXTEEN = np.random.default_rng(0).integers(0, 1 << 16, (SIZE[1], SIZE[0])).astype(np.uint16)


def decoded(data: bytes, orientation: int = 1, *, header: PhotoHeader | None = None) -> Any:
    return decode_apart(data, header or read_whole_photo_header(data), orientation, max_pixels=10_000)[0]


def process() -> int:
    """The process that decodes."""
    return apart._process(10_000, os.getpid())._processes[0].pid


def test_formats_are_decoded_as_pillow_does() -> None:
    """Every pixel; of an animation the first picture. One process decodes all."""
    decoded(tiff(1))
    first = process()
    for make in (jpeg2000, tiff, animated_png):
        assert (decoded(make(1)) == np.asarray(pixels_of(1))).all()
    assert (decoded(gif(1)) == np.asarray(pixels_of(1, mode="L").convert("RGB"))).all()
    assert process() == first


@pytest.mark.parametrize("mode", ["LA", "RGBA", "P", "1", "CMYK", "I;16"])
def test_modes_of_a_tiff(mode: str) -> None:
    """8 bits of grey or RGB: alpha is dropped, a palette gives its colours, 16 bits their high byte."""
    photo = Image.fromarray(SIXTEEN) if mode == "I;16" else pixels_of(3).convert(mode)
    grey = mode in ("LA", "1", "I;16")
    expected = (SIXTEEN >> 8) if mode == "I;16" else np.asarray(photo.convert("L" if grey else "RGB"))
    assert (decoded(image_bytes(photo, "TIFF")) == expected).all()


@pytest.mark.parametrize("reader", ["AVIF", "HEIF", "PNG"])
def test_more_pixels_than_allowed_are_seen_in_the_header(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process does, called here."""
    pytest.importorskip("pillow_heif").register_heif_opener()
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)
    photo = image_bytes(pixels_of(1), reader)
    assert apart._decode((photo, reader, None, 1999, 0), None) == PhotoHeader(reader, SIZE[1], SIZE[0])
    assert apart._decode((photo, reader, 6, 2000, 0), None)[0].shape == (SIZE[0], SIZE[1], 3)


def test_a_process_that_dies_is_a_bad_photo_and_another_is_started() -> None:
    """The photo after it is decoded."""
    expected = decoded(tiff(1)).tobytes()
    first = process()
    os.kill(first, signal.SIGKILL)
    with pytest.raises(Undecodable, match="cannot be decoded: Pillow's process ended by SIGKILL"):
        decoded(tiff(1))
    assert decoded(tiff(1)).tobytes() == expected
    assert process() != first


def test_a_photo_that_takes_too_long_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is ended, and the next photo gets a new one."""
    large = jpeg2000(1, size=(600, 600))
    monkeypatch.setattr(apart, "TIMEOUT_S", 0.001)
    with pytest.raises(Undecodable, match=r"cannot be decoded: Pillow takes longer than 0.001 s"):
        decode_apart(large, read_whole_photo_header(large), 1, max_pixels=1_000_000)
    monkeypatch.undo()
    assert decoded(tiff(1)).size > 0


def test_the_process_sees_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """It works on strangers' data."""
    monkeypatch.setenv("AIS_AUTHN_TOKEN", "secret")
    apart._process.cache_clear()
    decoded(tiff(1))
    assert b"secret" not in Path(f"/proc/{process()}/environ").read_bytes()
