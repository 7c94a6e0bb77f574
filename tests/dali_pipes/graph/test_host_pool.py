"""DALI reuses the memory of batches, unless the environment says otherwise; each case has a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import make_samples, write_shards

THRESHOLD = "DALI_MALLOC_POOL_THRESHOLD"

EPOCHS = """
import os, resource, sys
import dali_pipes as dp
from nvidia.dali import fn

def graph(components, random):
    return {"shape": fn.peek_image_shape(components["image.jpg"], adjust_orientation=False)}

decode = dp.Decode(reader="webdataset")  # the other reader has memory of its own
with dp.loader(sys.argv[1], graph, batch_size=16, device="cpu", decode=decode) as loader:
    for epoch in range(35):
        if epoch == 5:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in loader:
            pass
        loader.reset()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / (30 * loader.num_samples))
    print(os.environ.get("DALI_MALLOC_POOL_THRESHOLD"))
"""

POOLED = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s")
from nvidia.dali import fn
from nvidia.dali.pipeline import Pipeline

if sys.argv[1] == "used":
    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None)
    with pipeline:
        pipeline.set_outputs(fn.constant(idata=[1]))
    pipeline.build()

from dali_pipes.graph.dali_internals import pool_host_memory
print(pool_host_memory(), pool_host_memory())
"""


def run(program: str, *arguments: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    base = {name: value for name, value in os.environ.items() if not name.startswith(("DALI_MALLOC", "MALLOC_"))}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=base | environment)


def test_batches_reuse_memory(tmp_path: Path) -> None:
    """120 batches of 100 kB photos: fewer than half the page faults of ``malloc``; the environment stays as it was."""
    shards = write_shards(tmp_path, make_samples([(700, 500)] * 64), per_shard=32)
    faults, threshold = run(EPOCHS, shards).stdout.split()
    chosen_faults, chosen = run(EPOCHS, shards, **{THRESHOLD: "32M"}).stdout.split()
    assert float(faults) < 0.5 * float(chosen_faults), f"{faults} page faults a sample, {chosen_faults} with malloc"
    assert (threshold, chosen) == ("None", "32M")


@pytest.mark.parametrize(
    ("environment", "is_pooled"),
    [
        ({}, True),
        ({THRESHOLD: "16k"}, True),
        ({THRESHOLD: "32M"}, False),  # the user's own value is respected
        ({THRESHOLD: "0"}, False),
        ({"MALLOC_MMAP_THRESHOLD_": "33554432"}, False),  # DALI takes this one of glibc's
        ({"MALLOC_MMAP_MAX_": "0"}, False),
    ],
)
def test_pool_is_used_unless_the_environment_has_a_threshold(environment: dict[str, str], is_pooled: bool) -> None:
    """DALI was imported before, which does not matter: it reads the threshold when it first allocates."""
    done = run(POOLED, "imported", **environment)
    assert done.stdout.split() == [str(is_pooled)] * 2
    assert done.stderr == ""


def test_pool_comes_too_late_when_dali_was_used() -> None:
    """A pipeline that was built before the first loader fixes the threshold; the log says so once."""
    done = run(POOLED, "used")
    assert done.stdout.split() == ["False", "False"]
    assert done.stderr.count("DALI was used before the first loader") == 1
    assert run(POOLED, "used", **{THRESHOLD: "64k"}).stdout.split() == ["True", "True"]
