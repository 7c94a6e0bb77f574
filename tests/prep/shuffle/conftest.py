"""Five shards of at most ten samples, in a directory and in a bucket."""

from pathlib import Path

import pytest

from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_set import ShardSet
from prep.shuffle import shuffle as shuffle_module
from tests.shards import make_source, pack

NUM_SAMPLES = 43


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll jobs often, because jobs of the embedded node end soon."""
    monkeypatch.setattr(shuffle_module, "_POLL_S", (0.02, 0.1))


@pytest.fixture
def directory(tmp_path: Path) -> ShardSet:
    store = LocalStore(tmp_path / "shards")
    return ShardSet(store=store, names=pack(make_source(NUM_SAMPLES), store=store, max_count=10).shards)


@pytest.fixture
def packed(bucket: AisStore) -> ShardSet:
    return ShardSet(store=bucket, names=pack(make_source(NUM_SAMPLES), store=bucket, max_count=10).shards)
