"""A batch whose photos could exhaust the memory is an error before it is decoded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dali_pipes as dp
from dali_pipes import opening
from tests.hostile_photos import large_png
from tests.loaders import open_loader
from tests.shards import Sample, image_bytes, make_samples, pixels_of, write_shards

PIXELS = 50 * 40


def test_a_batch_of_too_many_pixels_is_named_and_the_next_one_comes(tmp_path: Path) -> None:
    """The error has the batch, its largest sample and the ways out; keys of strangers are printed safely."""
    samples = make_samples([(50, 40)] * 8)
    large = image_bytes(pixels_of(size=(100, 40)), "JPEG")
    samples[2] = Sample("s00002\u202e", samples[2].components | {"image.jpg": large})
    write_shards(tmp_path, samples, per_shard=8)
    graph = dp.classification_eval(resize=24, crop=16)
    with open_loader(tmp_path, graph, shuffle=False, decode=dp.Decode(max_batch_pixels=4 * PIXELS)) as loader:
        with pytest.raises(dp.DecodeError) as caught:
            next(loader)
        text = (
            "the photos of the batch of s00000, s00001, s00002\\u202e, s00003 have 10000 pixels together, expected at "
            "most max_batch_pixels=8000; the largest sample, with 4000, is shard 's-000000.tar', key 's00002\\u202e'; "
            "pass a smaller batch_size, Decode(max_batch_pixels=...)"
        )
        assert text in str(caught.value)
        assert next(loader)[0]["key"] == ["s00004", "s00005", "s00006", "s00007"]
    with open_loader(tmp_path, graph, shuffle=False, decode=dp.Decode(max_batch_pixels=5 * PIXELS)) as loader:
        assert len(list(loader)) == 2


@pytest.mark.parametrize(
    ("free_bytes", "num_ranks", "depth", "expected"),
    [
        (18 * 10**9, 1, 2, 2 * 10**9),  # two batches ahead and the one that is delivered, 3 bytes a pixel
        (18 * 10**9, 4, 2, 5 * 10**8),
        (18 * 10**9, 1, 5, 10**9),
        (18 * 10**9, 100, 2, 89_478_485),  # one photo of max_pixels always fits
        (10**15, 1, 2, 1 << 32),
    ],
)
def test_default_follows_free_memory_ranks_and_depth(
    small_shards: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, num_ranks: int, depth: int, expected: int
) -> None:
    monkeypatch.setattr(opening, "available_memory", lambda: free_bytes)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(num_ranks))
    monkeypatch.setenv("RANK", "0")
    decode = dp.Decode(queue_depth=depth, threads=1)
    with open_loader(small_shards, rank=0, world_size=1, decode=decode) as loader:
        assert loader.parts.decode._max_batch_pixels == expected


PROGRAM = r"""
import re, sys, dali_pipes as dp
from nvidia.dali import fn

# Do not use getrusage's maximum: a child process starts with the maximum of its parent.
peak = lambda: int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) // 1024
graph = lambda components, random: {"image": fn.resize(fn.decoders.image(components["png"]), size=(32, 32))}
decode = dp.Decode(max_batch_pixels=40_000_000, threads=2)
with dp.loader(sys.argv[1], graph, batch_size=8, device="cpu", decode=decode) as loader:
    before = peak()
    try:
        next(loader)
    except dp.DecodeError:
        print(peak() - before)
"""


def test_memory_of_a_batch_of_large_photos_is_not_taken(tmp_path: Path) -> None:
    """Eight PNGs of 36 megapixels each, 36 kB: decoded they take 0.9 GB."""
    photo = large_png(6000, 6000)
    assert len(photo) < 50_000
    write_shards(tmp_path, [Sample(f"s{number}", {"png": photo}) for number in range(8)], per_shard=8)
    run = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 100
