"""A photo whose header DALI's parser refuses does not end the process: DALI parses large batches in several threads."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvidia.dali import fn, types
from PIL import Image

import dali_pipes as dp
from dali_pipes.formats.orientation import is_surely_read
from dali_pipes.formats.photo_header import PhotoHeader, read_whole_photo_header
from dali_pipes.graph.photos import header_problems
from tests.docs.pages import REPOSITORY, blocks_of
from tests.hostile_photos import bmp_of_16_bits, misleading_jpeg, pixels_of, with_fill, with_long_marker
from tests.shards import Sample, image_bytes, photo_bytes, write_shards

# With two threads, more than twelve are parsed in parallel.
BATCH = 256
REFUSED: dict[str, Callable[[], bytes]] = {"jpeg": misleading_jpeg, "bmp": bmp_of_16_bits}

PROGRAM = """
import sys
import dali_pipes as dp

shards, reader = sys.argv[1:]
bad_samples = dp.BadSamples(on_error="substitute", quarantine=shards + "/q.tsv")
graph = dp.classification_eval(resize=32, crop=32)
decode = dp.Decode(threads=2, reader=reader)
for _ in range(8):  # a loader that knows its bad samples does not decode them again
    with dp.loader(shards, graph, batch_size=256, device="cpu", decode=decode, bad_samples=bad_samples) as loader:
        for epoch in range(2):
            assert sum(len(batch["label"]) for (batch,) in loader) == 256
        assert len(loader.bad_samples) == 32
"""


def shards_with(directory: Path, photo: bytes, *, at: Sequence[int], num: int = BATCH) -> Path:
    """Shards of photos of 40 x 50 pixels, with the given one at these places."""
    photos = [photo if number in at else photo_bytes(number % 8, 50, 40) for number in range(num)]
    return write_shards(
        directory, [Sample(f"s{number:05d}", {"jpg": data, "cls": b"1"}) for number, data in enumerate(photos)],
        per_shard=num,
    )  # fmt: skip


@pytest.mark.parametrize("reader", ["auto", "webdataset"])
@pytest.mark.parametrize("name", REFUSED)
def test_headers_that_the_parser_refuses_do_not_end_the_process(tmp_path: Path, name: str, reader: str) -> None:
    """Other samples replace them, in each epoch."""
    shards = shards_with(tmp_path / "shards", REFUSED[name](), at=range(0, BATCH, 8))
    arguments = [sys.executable, "-c", PROGRAM, str(shards), reader]
    run = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert (shards / "q.tsv").read_text().count("\tjpg\tcannot be decoded: ") == 32


@pytest.mark.parametrize(("batch_size", "is_killed"), [(12, False), (256, True)])
def test_the_report_is_true(batch_size: int, is_killed: bool) -> None:
    """If it is not any more, DALI is mended, and photos need not be read alone."""
    (script,) = blocks_of(REPOSITORY / "docs" / "parallel-parsers.md")[1].values()
    arguments = [sys.executable, "-c", script, str(batch_size), "2"]
    code = subprocess.run(arguments, capture_output=True, check=False).returncode
    assert code < 0 if is_killed else code == 0


def as_stored(components: dp.Components, random: dp.Random) -> dict[str, Any]:
    """A graph of a user's own."""
    return {"image": fn.decoders.image(components["jpg"], output_type=types.RGB, adjust_orientation=False)}


def upright(components: dp.Components, random: dp.Random) -> dict[str, Any]:
    return {"image": fn.decoders.image(components["jpg"], output_type=types.RGB)}


def _saved(directory: Path, photo: bytes) -> Path:
    (directory / "photo").write_bytes(photo)
    return directory / "photo"


@pytest.mark.parametrize("batch_size", [4, 64])
def test_a_valid_photo_that_must_be_read_alone_is_decoded_as_it_was(tmp_path: Path, batch_size: int) -> None:
    """Fill bytes before the scan, and a marker without a length."""
    photo = image_bytes(pixels_of(), "JPEG")
    for number, odd in enumerate((with_fill(photo), with_long_marker(photo))):
        shards = shards_with(tmp_path / str(number), odd, at=[3], num=64)
        with dp.loader(shards, as_stored, batch_size=batch_size, device="cpu", shuffle=False) as loader:
            pixels = next(loader)[0]["image"][3].numpy()
            assert loader.stats()["bad_samples"] == 0
        expected = np.asarray(Image.open(_saved(tmp_path, photo)).convert("RGB"))
        assert np.abs(pixels.astype(int) - expected).max() <= 2


def test_headers_are_read_alone() -> None:
    """Only the header counts, and it must be the one that was found here."""
    photo, refused = image_bytes(pixels_of(), "JPEG"), misleading_jpeg()
    cut = photo[:700]
    header = read_whole_photo_header(photo)
    photos = [(np.frombuffer(data, np.uint8), header) for data in (photo, refused, cut, photo)]
    photos.append((photos[0][0], PhotoHeader("JPEG", 41, 50)))
    first, second, third, fourth, fifth = header_problems(photos)
    assert first is third is fourth is None
    assert second is not None
    assert second.startswith("cannot be decoded: ")
    assert fifth == "has a header that DALI reads as 40 x 50 pixels"


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "BMP", "PPM"])
def test_usual_photos_are_surely_read(format: str, mode: str) -> None:
    """Reading a photo alone takes a hundred times as long."""
    if (format, mode) in (("JPEG", "P"), ("PPM", "P")):
        pytest.skip("there is none")
    photo = image_bytes(pixels_of(mode=mode), format)
    assert is_surely_read(photo, format)
    assert is_surely_read(memoryview(photo), format)
