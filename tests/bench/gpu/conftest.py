"""Photos and masks of drawn shards."""

from pathlib import Path

import pytest

from bench.gpu.workload import Workload
from bench.tools.repeat import draw_shards
from dali_pipes.store.shard_set import ShardSet


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    """Ten drawn samples."""
    return draw_shards(tmp_path_factory.mktemp("drawn"), num=10, num_shards=2)


@pytest.fixture
def workload(shards: ShardSet, tmp_path: Path) -> Workload:
    """Photos and masks of the drawn shards."""
    return Workload(shards, photo="image.jpg", mask="trimap.png", num_photos=10, directory=tmp_path, is_drawn=True)
