"""A photo whose header DALI's parser refuses does not end the process: DALI parses large batches in several threads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from dali_pipes.formats.photo_header import PhotoHeader, read_whole_photo_header
from tests.docs.pages import REPOSITORY, blocks_of
from tests.hostile_photos import bmp_of_16_bits, misleading_jpeg
from tests.lazy import Lazy
from tests.shards import Sample, image_bytes, photo_bytes, pixels_of, write_shards

fn, types = Lazy("nvidia.dali.fn"), Lazy("nvidia.dali.types")

PROGRAM = """
import sys
import dali_pipes as dp

shards, reader = sys.argv[1:]
bad_samples = dp.BadSamples(on_error="substitute", quarantine=shards + "/q.tsv")
graph = dp.classification_eval(resize=32, crop=32)
decode = dp.Decode(threads=2, reader=reader)
for _ in range(4):  # new loaders: a loader does not decode its known bad samples again
    with dp.loader(shards, graph, batch_size=256, device="cpu", decode=decode, bad_samples=bad_samples) as loader:
        for epoch in range(2):
            assert sum(len(batch["label"]) for (batch,) in loader) == 256
        assert len(loader.bad_samples) == 64
"""


def shards_with(directory: Path, odd: Mapping[int, bytes], *, num: int) -> Path:
    """Write a shard of photos of 40 x 50 pixels; ``odd`` replaces the photos with these numbers."""
    photos = [odd.get(number) or photo_bytes(number % 8, 50, 40) for number in range(num)]
    samples = [Sample(f"s{number:05d}", {"jpg": data, "cls": b"1"}) for number, data in enumerate(photos)]
    return write_shards(directory, samples, per_shard=num)


@pytest.mark.parametrize("reader", ["auto", "webdataset"])
def test_headers_that_the_parser_refuses_do_not_end_the_process(tmp_path: Path, reader: str) -> None:
    """The loader replaces bad samples in each epoch. Two threads parse batches of over twelve photos in parallel."""
    odd = dict.fromkeys(range(0, 256, 8), misleading_jpeg()) | dict.fromkeys(range(4, 256, 8), bmp_of_16_bits())
    shards = shards_with(tmp_path / "shards", odd, num=256)
    arguments = [sys.executable, "-c", PROGRAM, str(shards), reader]
    run = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert (shards / "q.tsv").read_text().count("\tjpg\tcannot be decoded: ") == 64


@pytest.mark.parametrize(("batch_size", "is_killed"), [(12, False), (256, True)])
def test_the_report_is_true(batch_size: int, is_killed: bool) -> None:
    """If it is not any more, DALI is mended, and photos need not be read alone."""
    (script,) = blocks_of(REPOSITORY / "docs" / "parallel-parsers.md")[1].values()
    arguments = [sys.executable, "-c", script, str(batch_size), "2"]
    code = subprocess.run(arguments, capture_output=True, check=False).returncode
    assert code < 0 if is_killed else code == 0


def test_headers_are_read_alone() -> None:
    """Only the header counts, and it must be the one that was found here."""
    from dali_pipes.graph.photos import header_problems

    photo, refused = image_bytes(pixels_of(), "JPEG"), misleading_jpeg()
    header = read_whole_photo_header(photo)
    photos = [(np.frombuffer(data, np.uint8), header) for data in (photo, refused, photo[:700], photo)]
    photos.append((photos[0][0], PhotoHeader("JPEG", 41, 50)))
    first, second, third, fourth, fifth = header_problems(photos)
    assert first is third is fourth is None
    assert second is not None
    assert second.startswith("cannot be decoded: ")
    assert fifth == "has a header that DALI reads as 40 x 50 pixels"
