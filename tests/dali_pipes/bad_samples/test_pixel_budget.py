"""The pixels of a batch in flight are bounded: a batch with more is decoded in parts, with the same values."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvidia.dali import fn, types

import dali_pipes as dp
from dali_pipes.graph.batch_inputs import BatchInputs
from dali_pipes.graph.decode import DecodePipeline
from tests.conftest import Sample, make_samples, write_shards
from tests.hostile_photos import encoded, jpeg2000, large_png, pixels_of, undecodable

PIXELS = 50 * 40


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"), make_samples([(50, 40)] * 12), per_shard=6)


def open_loader(shards: Path, graph: Any, *, budget: int | None = None, **options: Any) -> dp.Loader:
    defaults = {
        "batch_size": 5,
        "device": "cpu",
        "seed": 3,
        "outputs": dp.Outputs(keys=True),
        "decode": dp.Decode(max_batch_pixels=budget),
    }
    return dp.loader(shards, graph, **(defaults | options))


def text_and_crop(components: dp.Components, random: dp.Random) -> dict[str, Any]:
    """Random crops, flips, a parsed array, a label, and an output that is not a tensor."""
    start, shape = random.resized_crop("image.jpg")
    pixels = fn.decoders.image_slice(components["image.jpg"], start, shape, axes=(0, 1), output_type=types.RGB)
    return {
        "image": fn.crop_mirror_normalize(fn.resize(pixels, size=(20, 20)), mirror=random.coin_flip()),
        "label": components.label,
        "twice": components.parsed("cls", lambda data: [2 * int(bytes(data))]),
        "text": components.text("cls"),
    }


def batches(loader: dp.Loader) -> list[dict[str, Any]]:
    return [batch for _ in range(2) for (batch,) in loader]


@pytest.mark.parametrize("budget", [1, PIXELS, 2 * PIXELS, 5 * PIXELS - 1])
def test_parts_give_the_same_batch(shards: Path, budget: int) -> None:
    """Every value of two epochs, whatever the number of parts; the last batch is short."""
    with open_loader(shards, text_and_crop) as loader:
        expected = batches(loader)
    with open_loader(shards, text_and_crop, budget=budget) as loader:
        found = batches(loader)
    assert len(found) == len(expected) == 6
    for batch, other in zip(found, expected, strict=True):
        assert batch["key"] == other["key"]
        assert batch["text"] == other["text"]
        assert all(torch.equal(batch[name], other[name]) for name in ("image", "label", "twice"))


def test_parts_are_within_the_budget(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks count; no call of DALI's has more than the budget; a larger photo comes alone."""
    fed: list[int] = []
    real = DecodePipeline._next_input

    def spied(self: DecodePipeline, name: str) -> Any:
        value = real(self, name)
        if name == "component/image.jpg":
            fed.append(len(value))
        return value

    monkeypatch.setattr(DecodePipeline, "_next_input", spied)
    with open_loader(shards, dp.segmentation(crop=16), budget=4 * PIXELS) as loader:
        list(loader)
    assert sorted(fed) == sorted([2, 2, 1, 2, 2, 1, 2])
    batch: Any = None
    inputs = BatchInputs(batch, [], (), pixels=np.array([3, 9, 1, 1, 2, 1]))
    assert [part.pixels.tolist() for part in inputs.split(4)] == [[3], [9], [1, 1, 2], [1]]
    assert inputs.split(17) == inputs.split(None) == [inputs]


def test_a_batch_in_parts_is_said_once(shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It takes longer: the log names the option to raise."""
    with caplog.at_level(logging.WARNING), open_loader(shards, text_and_crop, budget=2 * PIXELS) as loader:
        batches(loader)
    (record,) = [record for record in caplog.records if "max_batch_pixels" in record.message]
    assert "have 10000 pixels, max_batch_pixels=4000" in record.message
    assert "raise Decode(max_batch_pixels=...)" in record.message


def test_keys_in_the_log_are_printable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A key of a stranger's tar must not change the direction of writing."""
    samples = [Sample(f"{sample.key}\u202e", sample.components) for sample in make_samples([(50, 40)] * 2)]
    write_shards(tmp_path, samples, per_shard=2)
    with caplog.at_level(logging.WARNING), open_loader(tmp_path, text_and_crop, budget=PIXELS, batch_size=2) as loader:
        batches(loader)
    assert "s00000\\u202e" in caplog.text
    assert "\u202e" not in caplog.text


def test_bad_samples_in_any_part_are_substituted(tmp_path: Path) -> None:
    """In the first part, in a later one, and of a format that Pillow decodes; the others are those of a whole batch."""
    samples = make_samples([(50, 40)] * 10)
    for number in (0, 3, 7):
        photo = samples[number].components["image.jpg"]
        changed = {"image.jpg": undecodable(photo)}
        samples[number] = Sample(samples[number].key, samples[number].components | changed)
    samples[6] = Sample("s00006", samples[6].components | {"image.jpg": jpeg2000(6)})
    write_shards(tmp_path, samples, per_shard=10)
    found = []
    for budget in (None, 2 * PIXELS):
        bad_samples = dp.BadSamples(on_error="substitute", quarantine=tmp_path / "q.tsv")
        decode = dp.Decode(max_batch_pixels=budget, formats=("jpeg2000",))
        graph = dp.classification_eval(resize=24, crop=16)
        with open_loader(tmp_path, graph, shuffle=False, bad_samples=bad_samples, decode=decode) as loader:
            found.append(batches(loader))
            assert {bad.key for bad in loader.bad_samples} == {"s00000", "s00003", "s00007"}
    for batch, other in zip(*found, strict=True):
        assert batch["key"] == other["key"]
        assert torch.equal(batch["image"], other["image"])
    assert [key for batch in found[0][:2] for key in batch["key"]] == [
        *("s00001", "s00001", "s00002", "s00002", "s00004"),
        *("s00005", "s00006", "s00006", "s00008", "s00009"),
    ]


def test_photos_for_pillow_are_within_the_budget_or_an_error(tmp_path: Path) -> None:
    """All of a batch's are decoded before its parts: too many pixels are named before any is decoded."""
    photos = {number: jpeg2000(number) for number in (0, 1, 2, 7)}
    samples = make_samples([(50, 40)] * 8)
    for number, photo in photos.items():
        samples[number] = Sample(samples[number].key, samples[number].components | {"image.jpg": photo})
    write_shards(tmp_path, samples, per_shard=8)
    decode = dp.Decode(max_batch_pixels=2 * PIXELS, formats=("jpeg2000",))
    graph = dp.classification_eval(resize=24, crop=16)
    with open_loader(tmp_path, graph, batch_size=4, shuffle=False, decode=decode) as loader:
        text = (
            r"Pillow decodes for the batch of s00000, .* have 6000 pixels together, expected at most max_batch_pixels=4"
        )
        with pytest.raises(dp.DecodeError, match=text):
            next(loader)
        assert next(loader)[0]["key"] == ["s00004", "s00005", "s00006", "s00007"]


def test_outputs_of_different_shapes_are_refused_across_parts(tmp_path: Path) -> None:
    """As they are within one batch."""
    photos = [encoded(pixels_of(number, size=(50, 40 + number % 2)), "PNG") for number in range(4)]
    samples = [Sample(f"s{number}", {"png": photo}) for number, photo in enumerate(photos)]
    write_shards(tmp_path, samples, per_shard=4)

    def graph(components: dp.Components, random: dp.Random) -> dict[str, Any]:
        return {"image": fn.decoders.image(components["png"])}

    for budget in (None, 1):
        text = "output 'image' of the graph has samples of different shapes"
        loader = open_loader(tmp_path, graph, budget=budget, batch_size=4)
        with loader, pytest.raises(ValueError, match=text):
            next(loader)


def test_memory_of_a_batch_of_large_photos_is_bounded(tmp_path: Path) -> None:
    """Eight PNGs of 36 megapixels each, 36 kB: a budget of one of them holds some 0.1 GB at a time, not 0.9 GB."""
    photo = large_png(6000, 6000)
    assert len(photo) < 50_000
    write_shards(tmp_path, [Sample(f"s{number}", {"png": photo}) for number in range(8)], per_shard=8)
    program = (
        "import re, sys, dali_pipes as dp\n"
        # Not getrusage's maximum: a child begins with that of the process that forked it.
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) // 1024\n"
        "from nvidia.dali import fn\n"
        "def graph(components, random):\n"
        "    return {'image': fn.resize(fn.decoders.image(components['png']), size=(32, 32))}\n"
        "decode = dp.Decode(max_batch_pixels=int(sys.argv[2]), threads=2)\n"
        "with dp.loader(sys.argv[1], graph, batch_size=8, device='cpu', decode=decode) as loader:\n"
        "    before = peak(); batch = next(loader)[0]['image']; print(peak() - before, float(batch.sum()))\n"
    )
    found = []
    for budget in (40_000_000, 400_000_000):
        arguments = [sys.executable, "-c", program, str(tmp_path), str(budget)]
        run = subprocess.run(arguments, capture_output=True, text=True, check=True)
        found.append([float(number) for number in run.stdout.split()])
    (parts_mib, parts_sum), (whole_mib, whole_sum) = found
    assert parts_sum == whole_sum
    assert whole_mib > 800, "the test needs photos that take memory"
    assert parts_mib < 450
