"""Photos and masks of drawn shards, and short scenarios."""

from pathlib import Path
from typing import Any

import pytest

from bench.gpu.scenario import GpuScenario
from bench.gpu.workload import Workload
from bench.tools.repeat import draw_shards
from dali_pipes.store.shard_set import ShardSet


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    """Ten drawn samples."""
    return draw_shards(tmp_path_factory.mktemp("drawn"), num=10, num_shards=2)


@pytest.fixture
def workload(drawn: ShardSet, tmp_path: Path) -> Workload:
    """Photos and masks of the drawn shards."""
    return Workload(drawn, photo="image.jpg", mask="trimap.png", num_photos=10, directory=tmp_path, is_drawn=True)


def planned(name: str, workload: Workload, *, of: type[GpuScenario] = GpuScenario, **change: Any) -> GpuScenario:
    usual = {"device": "cpu", "num_threads": 1, "batch_size": 4, "seconds": 0.001, "warm_up_s": 0.0, "repeats": 2}
    return of(name=name, workload=workload, **(usual | change))
