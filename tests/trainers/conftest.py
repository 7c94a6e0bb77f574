"""The photos that all trainers of these tests train on."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shards import Sample, photo_bytes, write_shards
from tests.trainers.tiny import NUM_CLASSES, NUM_SAMPLES, key_of


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory ``shards``: 31 small photos of six classes, ``jpg`` and ``cls``, in five shards, indexed."""
    samples = []
    for number in range(NUM_SAMPLES):
        photo = photo_bytes(number, 24 + number % 5, 22 + number % 3)
        samples.append(Sample(key_of(number), {"jpg": photo, "cls": b"%d" % (number % NUM_CLASSES)}))
    return write_shards(tmp_path_factory.mktemp("trainers") / "shards", samples, per_shard=7)


@pytest.fixture(autouse=True)
def state_of_accelerate() -> Iterator[None]:
    """Reset Accelerate's state after each test: a loader of a later test in this process would find the old one."""
    yield
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
