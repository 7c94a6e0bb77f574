"""Data sets larger than the cache: windows, ranks and slices give each sample once, from no more bytes than allowed."""

from pathlib import Path

import pytest

import dali_pipes as dp
from tests.dali_pipes.cache.peak import Peak
from tests.dali_pipes.raw import raw, read_epoch
from tests.loaders import open_loader, open_windowed
from tests.shards import Sample, samples_and_shards

NUM_SAMPLES = 90


# 23 shards of four samples, the last of two: some 27 KB each in the cache.
samples, shards = samples_and_shards([(40 + 7 * (i % 5), 33 + 5 * (i % 7)) for i in range(NUM_SAMPLES)], per_shard=4)


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "cache"
    directory.mkdir()
    return directory


def test_each_node_fetches_only_its_slice(shards: Path, samples: list[Sample], tmp_path: Path) -> None:
    """Two nodes with a cache each, two epochs in the order of the shards: together they fetch each byte once."""
    caches = [tmp_path / "0", tmp_path / "1"]
    for directory in caches:
        directory.mkdir()
    loaders = [
        open_loader(
            shards,
            raw,
            rank=node,
            world_size=2,
            shuffle=dp.Shuffle(enabled=False, slices=2),
            last_batch_policy="DROP",
            cache=dp.Cache(directory=directory),
        )
        for node, directory in enumerate(caches)
    ]
    for _ in range(2):
        read_epoch(loaders, samples)
    fetched = [loader.stats()["fetched_bytes"] for loader in loaders]
    total = sum(path.stat().st_size for path in shards.rglob("*") if path.name.endswith((".tar", ".index.safetensors")))
    assert sum(fetched) == total
    assert 0.4 * total < fetched[0] < 0.6 * total
    for loader in loaders:
        loader.close()


def test_cache_never_takes_more_than_it_may(shards: Path, samples: list[Sample], cache_dir: Path) -> None:
    """A quarter of the data set: three epochs, the image's blocks watched."""
    total = 557_056
    allowed = total // 4
    with (
        Peak(cache_dir) as peak,
        open_windowed(shards, raw, directory=cache_dir, window_bytes=allowed // 4, max_bytes=allowed) as loader,
    ):
        assert sum(loader.parts.share.extent_bytes) == total
        for _ in range(3):
            assert len(read_epoch([loader], samples)) == NUM_SAMPLES
    # ext4 uses extra blocks to list the extents of a file; they hold no bytes of shards.
    assert 0 < peak.num_bytes <= allowed + 2 * 4096
