"""What pipelines are on a GPU, as far as they can be defined without one: devices and arguments of their operators."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import dali_pipes as dp
from dali_pipes.formats.photo_header import PHOTO_FORMATS
from dali_pipes.reader.batch import Places
from dali_pipes.store.urls import resolve_shards
from tests.lazy import Lazy

if TYPE_CHECKING:
    from dali_pipes.graph.decode import DecodePipeline

fn, types = Lazy("nvidia.dali.fn"), Lazy("nvidia.dali.types")
internals, definition = Lazy("dali_pipes.graph.dali_internals"), Lazy("dali_pipes.graph.definition")


def on_a_gpu(shards: Path, graph: Any, **options: Any) -> DecodePipeline:
    """The pipeline for device 0, defined but not built."""
    from dali_pipes.data_set.data_set import DataSet
    from dali_pipes.graph.decode import DecodePipeline
    from dali_pipes.reader.samples import StoredSamples

    data_set = DataSet(resolve_shards(shards, endpoint=None))
    samples = StoredSamples(data_set.manifest, data_set.read_index)
    usual = {"batch_size": 4, "device_id": 0, "num_threads": 1, "prefetch_queue_depth": 2}
    return DecodePipeline(graph, samples=samples, **usual | options)


def arguments(pipeline: DecodePipeline, name: str, *, of: str = "ecoder") -> list[str]:
    """This argument of each operator whose name contains ``of``, in graph order; ``"-"`` stands for the default."""
    found = [one for one in internals.operators_of(pipeline.pipeline) if of in internals.operator_name(one)]
    lines = [dict(line.split(": ", 1) for line in internals.argument_lines(one) if ": " in line) for one in found]
    return [given.get(name, "-") for given in lines]


@pytest.mark.parametrize(("mask_device", "expected"), [("cpu", ["mixed", "cpu"]), ("mixed", ["mixed", "mixed"])])
def test_masks_are_decoded_on_the_cpu_and_photos_on_the_gpu(
    small_shards: Path, mask_device: Any, expected: list[str]
) -> None:
    """Two mixed operators would take turns, and a GPU does not decode PNG. The GPU crops photos and masks."""
    pipeline = on_a_gpu(small_shards, dp.segmentation(crop=8, mask_device=mask_device))
    assert arguments(pipeline, "device") == expected
    assert arguments(pipeline, "device", of="").count("gpu") == 2


def photo_and_mask(components: dp.Components, random: dp.Random) -> dict[str, Any]:
    """Two decoders on the GPU: the first sets the engines' share itself, the second decodes no JPEG."""
    photo = fn.decoders.image(components["image.jpg"], device=components.device, hw_decoder_load=0.75)
    mask = fn.decoders.image(components["trimap.png"], device=components.device, output_type=types.GRAY)
    return {name: fn.resize(node, size=(8, 8)) for name, node in {"photo": photo, "mask": mask}.items()}


def test_engines_preallocate_for_the_largest_photo(small_shards: Path) -> None:
    """The hint is the largest photo of the first shard. Decoders without engines, or on a CPU, get no hint."""
    pipeline = on_a_gpu(small_shards, photo_and_mask, hw_decoder_load=0.25)
    assert arguments(pipeline, "hw_decoder_load") == ["0.750000", "0.250000"], "the graph's own share stays"
    assert arguments(pipeline, "preallocate_height_hint") == ["53", "53"]
    assert arguments(pipeline, "preallocate_width_hint") == ["68", "68"]
    for without in ({"hw_decoder_load": 0.0}, {"device_id": None}):
        pipeline = on_a_gpu(small_shards, photo_and_mask, **without)
        assert arguments(pipeline, "preallocate_width_hint") == ["-", "-"]


def photos(*sizes: tuple[int, int], kind: str = "JPEG") -> Places:
    height, width = np.array(sizes, np.int64).reshape(-1, 2).T
    return Places(height * 0, height, height, width, np.full(len(sizes), PHOTO_FORMATS.index(kind)), height * 0 + 1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([photos((30, 20), (10, 70))], (10, 70)),  # the most pixels
        ([photos((30, 20)), photos((5, 130))], (5, 130)),  # of any component
        ([photos((30, 20), (200, 300))], (30, 20)),  # 60,000 pixels a sample are not preallocated
        ([photos((200, 300))], None),  # none fits
        ([photos((30, 20), kind="PNG")], None),  # engines decode JPEGs only
        ([photos(), photos((0, 0))], None),  # no photo, or a header that cannot be read
        ([], None),
    ],
)
def test_size_hint_is_of_the_largest_jpeg_that_memory_allows(
    given: list[Places], expected: tuple[int, int] | None
) -> None:
    """Here for photos of 10,000 pixels."""
    assert definition.size_hint(given, most=10_000) == expected


def with_colors(components: dp.Components, random: dp.Random) -> dict[str, Any]:
    photo = fn.decoders.image(components["image.jpg"], device=components.device)
    start, shape = random.erasing(8, 8)
    jitter = random.color_jitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)
    return {"photo": fn.erase(fn.resize(jitter(photo), size=(8, 8)), anchor=start, shape=shape, axis_names="HW")}


@pytest.mark.parametrize("name", ["colors", "multi_crop", "mixing"])
def test_pixels_stay_on_the_gpu(small_shards: Path, name: str) -> None:
    """The graph has one decoder, and resizes on the GPU."""
    graphs: dict[str, Any] = {
        "colors": lambda: with_colors,
        "multi_crop": lambda: dp.multi_crop(sizes=(16, 8)),
        "mixing": lambda: dp.mixing(dp.classification_train(crop=8)),
    }
    pipeline = on_a_gpu(small_shards, graphs[name]())
    assert arguments(pipeline, "device") == ["mixed"]
    assert set(arguments(pipeline, "device", of="esize")) == {"gpu"}
