"""What pipelines are on a GPU, as far as they can be defined without one: devices and arguments of their operators."""

from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp
from dali_pipes.data_set.data_set import DataSet
from dali_pipes.graph.dali_internals import argument_lines, operator_name, operators_of
from dali_pipes.graph.decode import DecodePipeline, Graph
from dali_pipes.reader.samples import StoredSamples
from dali_pipes.store.urls import resolve_shards


def on_a_gpu(shards: Path, graph: Graph, **options: Any) -> DecodePipeline:
    """The pipeline for device 0, defined and not built."""
    data_set = DataSet(resolve_shards(shards, endpoint=None))
    return DecodePipeline(
        graph,
        samples=StoredSamples(data_set.manifest, data_set.read_index),
        **{"batch_size": 4, "device_id": 0, "num_threads": 1, "prefetch_queue_depth": 2} | options,
    )


def decoders(pipeline: DecodePipeline) -> list[list[str]]:
    """The arguments of each decoder, in the order of the graph."""
    return [argument_lines(found) for found in operators_of(pipeline.pipeline) if "ecoder" in operator_name(found)]


def devices(pipeline: DecodePipeline) -> list[str]:
    return [line.removeprefix("device: ") for lines in decoders(pipeline) for line in lines if "device: " in line]


@pytest.mark.parametrize(("mask_device", "expected"), [("cpu", ["mixed", "cpu"]), ("mixed", ["mixed", "mixed"])])
def test_masks_are_decoded_on_the_cpu_and_photos_on_the_gpu(
    small_shards: Path, mask_device: Any, expected: list[str]
) -> None:
    """Two mixed operators would take turns, and a GPU does not decode PNG."""
    pipeline = on_a_gpu(small_shards, dp.segmentation(crop=8, mask_device=mask_device))
    assert devices(pipeline) == expected
    others = [argument_lines(found) for found in operators_of(pipeline.pipeline)]
    assert sum("device: gpu" in lines for lines in others) == 2, "both are cut and normalised on the GPU"
