"""Only JPEG, PNG, WEBP, BMP and PNM reach DALI's decoders, by their bytes."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import dali_pipes as dp
from dali_pipes.data_set import indexing
from dali_pipes.formats.photo_header import PhotoHeader
from tests import loaders
from tests.conftest import SHARED_DATA
from tests.hostile_photos import animated_png, broken_jpeg2000, gif, jpeg2000, large_png, tiff
from tests.lazy import Lazy
from tests.loaders import substituting
from tests.shards import Sample, make_samples, photo_bytes, with_data, write_shards

fn, types = Lazy("nvidia.dali.fn"), Lazy("nvidia.dali.types")

ODD_IMAGES = SHARED_DATA / "odd-images"
SIZE = (50, 40)


def as_stored(components: dp.Components, random: dp.Random) -> dict[str, Any]:
    """The photo, decoded and nothing else."""
    return {"image": fn.decoders.image(components["image.jpg"], output_type=types.RGB, adjust_orientation=False)}


def open_loader(shards: Path, graph: Any = as_stored, *, on_error: str = "substitute", **options: Any) -> dp.Loader:
    policy = substituting(shards, on_error=on_error)
    return loaders.open_loader(shards, graph, shuffle=False, bad_samples=policy, **options)


def write_photos(
    directory: Path, photos: dict[int, bytes], *, num: int = 8, lying: pytest.MonkeyPatch | None = None
) -> None:
    """Write a shard of good samples, and replace ``image.jpg`` and ``data`` of some of them.

    With ``lying``, the index calls every photo a JPEG of `SIZE`.
    """
    samples = with_data(make_samples([SIZE] * num), photos)
    for sample in samples:
        sample.components["data"] = sample.components["image.jpg"]
    if lying is not None:
        lying.setattr(indexing, "read_whole_photo_header", lambda data: PhotoHeader("JPEG", SIZE[1], SIZE[0]))
    write_shards(directory, samples, per_shard=num)
    if lying is not None:
        lying.undo()


@pytest.mark.parametrize("lies", [False, True])
def test_other_formats_are_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lies: bool) -> None:
    """The names of file and index do not matter. The error names shard, key, component and cause."""
    others = {1: jpeg2000(), 2: tiff(), 5: gif(), 6: animated_png()}
    names = ("a JPEG 2000", "a TIFF", "a GIF", "an animated PNG")
    write_photos(tmp_path, others, lying=monkeypatch if lies else None)
    texts = [
        f"shard 's-000000.tar', key 's0000{number}': component 'image.jpg' holds {name}, expected JPEG, PNG, WEBP, BMP "
        "or PNM (to make it a JPEG: prep make or pack --convert)"
        for number, name in zip(others, names, strict=True)
    ]
    with open_loader(tmp_path) as loader:
        keys = [key for (batch,) in loader for key in batch["key"]]
        assert keys == [f"s0000{number}" for number in (0, 0, 0, 3, 4, 4, 4, 7)]
        assert [str(bad) for bad in loader.bad_samples] == texts
    if lies:
        with open_loader(tmp_path, on_error="raise") as loader:
            with pytest.raises(dp.DecodeError, match=re.escape(texts[0])):
                next(loader)
            with pytest.raises(dp.DecodeError, match=re.escape(texts[2])):
                next(loader)
    else:
        with pytest.raises(dp.DataError, match=re.escape(texts[0])):
            open_loader(tmp_path, on_error="raise")


PROGRAM = """
import sys, dali_pipes as dp
from nvidia.dali import fn

shards = sys.argv[1]
bad_samples = dp.BadSamples(on_error="substitute", quarantine=shards + "/q.tsv")
for component in ("image.jpg", "data"):
    for operator in (
        fn.decoders.image,
        lambda photo: fn.decoders.image_slice(photo, (0, 0), (8, 8), axes=(0, 1)),
        fn.peek_image_shape,
    ):
        graph = lambda components, random: {"image": operator(components[component])}
        outputs = dp.Outputs(keys=True)
        with dp.loader(
            shards, graph, batch_size=4, shuffle=False, device="cpu", bad_samples=bad_samples, outputs=outputs
        ) as loader:
            print(*next(loader)[0]["key"])
"""


def test_a_broken_jpeg_2000_does_not_end_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never given to a decoder, nor to the operator that reads sizes; also where the index does not know it."""
    write_photos(tmp_path, {2: broken_jpeg2000()}, num=4, lying=monkeypatch)
    program = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    run = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "s00000 s00001 s00001 s00003\n" * 6), run.stderr


def test_bytes_that_no_decoder_gets_are_not_judged(tmp_path: Path) -> None:
    """A graph that returns the bytes of a component gets them unchanged, whatever they are."""
    write_photos(tmp_path, dict.fromkeys(range(4), jpeg2000(7)), num=4)
    with open_loader(tmp_path, lambda components, random: {"bytes": components["data"]}, on_error="raise") as loader:
        assert bytes(next(loader)[0]["bytes"][3].numpy()) == jpeg2000(7)


def test_an_index_that_names_another_size_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PNG of 81 megapixels that the index calls small is not decoded: crops and memory are planned by the index."""
    write_photos(tmp_path, {1: large_png(9000, 9000)}, lying=monkeypatch)
    with open_loader(tmp_path) as loader:
        assert next(loader)[0]["key"] == ["s00000", "s00000", "s00002", "s00003"]
        assert loader.bad_samples[0].cause == (
            "has 9000 x 9000 pixels, its index says 40 x 50; index it anew: dali-pipes prep index URL --anew"
        )


@pytest.mark.skipif(not ODD_IMAGES.is_dir(), reason="no ../shared/data/odd-images beside the checkout")
def test_odd_images_are_decoded_or_quarantined(tmp_path: Path) -> None:
    """Each odd, damaged or hostile file: equal to Pillow where both decode 8 bits, else named; nothing hangs."""
    files = sorted(path for path in ODD_IMAGES.iterdir() if path.suffix in (".jpg", ".jpeg", ".png", ".gif", ".mpo"))
    assert len(files) == 52
    samples = [Sample("good", {"image.jpg": photo_bytes(1, *SIZE)})]
    samples += [Sample(f"odd/{path.name.replace('.', '_')}", {"image.jpg": path.read_bytes()}) for path in files]
    shards = write_shards(tmp_path, samples, per_shard=len(samples))
    delivered = {}
    with open_loader(shards, batch_size=1) as loader:
        for sample, (batch,) in zip(samples, loader, strict=True):
            if not loader.substituted:
                delivered[sample.key] = batch["image"][0].numpy().astype(int)
        bad = {sample.key for sample in loader.bad_samples}
    assert (len(bad), len(delivered.keys() | bad), delivered.keys() & bad) == (12, len(samples), set())
    by_pillow = {sample.key: pillow_rgb(sample.components["image.jpg"]) for sample in samples}
    compared = {key: pixels for key, pixels in by_pillow.items() if pixels is not None}
    assert len(compared) == 36
    for key, pixels in compared.items():
        tolerance = 1 if "cmyk" in key else 0  # Pillow and DALI round CMYK differently
        assert np.abs(delivered[key] - pixels).max() <= tolerance, key


def pillow_rgb(data: bytes) -> np.ndarray | None:
    """The pixels of an 8-bit JPEG or PNG as Pillow decodes them; ``None`` where it does not or it is another."""
    try:
        with Image.open(io.BytesIO(data)) as photo:
            if photo.format not in ("JPEG", "MPO", "PNG") or photo.mode.startswith("I"):
                return None
            if photo.format == "PNG" and data[24] == 16:
                return None
            return np.asarray(photo.convert("RGB")).astype(int)
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
