"""Data sets larger than the cache: windows, ranks and slices give each sample once, from no more bytes than allowed."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dali_pipes as dp
from dali_pipes.data_set.indexing import find_manifest
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.order.inputs import OrderInputs
from dali_pipes.order.passes import reserved_bytes
from dali_pipes.order.plan import Batching, Plan
from dali_pipes.store.local import LocalFetcher
from dali_pipes.store.urls import resolve_shards
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


@pytest.mark.parametrize(
    ("policy", "window", "world_size", "batch_size", "num_slices"),
    [  # each pair of policy, window and number of slices
        ("PARTIAL", 60_000, 3, 4, 1),
        ("FILL", 300_000, 1, 7, 1),
        ("DROP", "all", 3, 4, 1),
        ("DROP", 60_000, 1, 7, 1),
        ("FILL", 60_000, 2, 4, 2),
        ("PARTIAL", 300_000, 3, 4, 2),
        ("DROP", 300_000, 3, 4, 2),
        ("PARTIAL", "all", 2, 4, 2),
        ("FILL", "all", 3, 4, 2),
    ],
)
def test_each_sample_comes_once_whatever_the_window(
    shards: Path,
    samples: list[Sample],
    cache_dir: Path,
    policy: str,
    window: int | str,
    world_size: int,
    batch_size: int,
    num_slices: int,
) -> None:
    """Three epochs of all ranks in step: counts of valid rows by policy, and every row is its sample's."""
    loaders = [
        open_loader(
            shards,
            raw,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            shuffle=dp.Shuffle(slices=num_slices, window_bytes=window, ramp_up=True),
            seed=3,
            last_batch_policy=policy,
            cache=dp.Cache(directory=cache_dir),
        )
        for rank in range(world_size)
    ]
    step = batch_size * world_size
    for _ in range(3):
        count = read_epoch(loaders, samples)
        if num_slices == 1:
            expected = {
                "PARTIAL": NUM_SAMPLES,
                "FILL": NUM_SAMPLES,
                "DROP": NUM_SAMPLES // step * step,
            }
            assert sum(count.values()) == expected[policy]
            assert max(count.values()) == 1
        # With slices a shorter one wraps; nothing is missing all the same.
        assert len(count) == NUM_SAMPLES or policy == "DROP"
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
    # ext4 lists the pieces of a file in blocks of its own, which are no shards' bytes.
    assert 0 < peak.num_bytes <= allowed + 2 * 4096


def test_break_and_going_on_keeps_the_windows(shards: Path, samples: list[Sample], cache_dir: Path) -> None:
    """Leaving an epoch in its middle and going on, starting another: nothing is lost, and nothing stays held."""
    with open_windowed(shards, raw, directory=cache_dir, window_bytes=60_000, max_bytes=260_000) as loader:
        seen = []
        for number, (batch,) in enumerate(loader):
            seen += batch["ordinal"].tolist()
            if number == 5:
                break
        for (batch,) in loader:
            seen += batch["ordinal"].tolist()
        assert sorted(seen) == list(range(NUM_SAMPLES))
        next(iter(loader))
        loader.set_epoch(7)
        assert len(read_epoch([loader], samples)) == NUM_SAMPLES
        loader.delivery.current.feed.close()
        if loader.parts.epochs.ahead is not None:
            loader.parts.epochs.ahead.close()
        assert not loader.parts.stager._demand.held


def test_ramp_up_waits_for_one_shard_only(shards: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch comes while all shards but the first window's are still to be fetched."""
    held_back: list[str] = []
    may_go_on = threading.Event()
    fetch = LocalFetcher.fetch

    def slow(self: LocalFetcher, wanted: Sequence[Wanted], **options: Any) -> bool:
        if wanted[0].name != first:
            held_back.append(wanted[0].name)
            assert may_go_on.wait(120)
        return fetch(self, wanted, **options)

    manifest = find_manifest(resolve_shards(str(shards), endpoint=None))
    assert manifest is not None
    order = OrderInputs(seed=0, ramp_up=True)
    plan = Plan(shard_bytes=manifest.shard_bytes, shard_samples=manifest.samples, order=order)
    first = manifest.names[int(next(plan.windows_ahead())[1][0])]
    monkeypatch.setattr(LocalFetcher, "fetch", slow)
    # No shard has fewer than two samples.
    with open_loader(
        shards, raw, batch_size=2, cache=dp.Cache(directory=cache_dir), shuffle=dp.Shuffle(ramp_up=True)
    ) as loader:
        batches = iter(loader)
        assert len(next(batches)[0]["label"]) == 2
        assert held_back
        may_go_on.set()
        assert len(list(batches)) == len(loader) - 1


@pytest.mark.parametrize(
    ("sizes", "window", "batch_size", "promised"),
    [
        ([175] * 9, 263, 64, 2 * 175),  # a window is one shard
        ([175] * 9, 350, 64, 4 * 175),  # exactly two
        ([175] * 9, 525, 64, 6 * 175),
        ([300, *[50] * 20], 100, 64, 300 + 100),  # one shard is larger than a window
        ([300, 200, *[50] * 20], 100, 64, 300 + 200),
        ([50] * 20, 50, 402, 2 * 50 + 4 * 50),  # a step spans four whole windows and parts of two
    ],
)
def test_promise_is_what_a_plan_needs(sizes: list[int], window: int, batch_size: int, promised: int) -> None:
    """No loader is refused for bytes, in MiB here, that no epoch of it needs; 100 samples a shard."""
    shard_bytes = np.array(sizes, np.int64) << 20
    samples = np.full(len(sizes), 100)
    order = OrderInputs(seed=1, shuffle_window=window << 20)
    found = reserved_bytes(shard_bytes, shard_bytes, samples, order=order, global_batch_size=batch_size)
    assert found >> 20 == promised
    needed = []
    for epoch in range(8):
        plan = Plan(shard_bytes=shard_bytes, shard_samples=samples, order=replace(order, epoch=epoch))
        needed.append(plan.bytes_at_a_time(shard_bytes, Batching(batch_size=batch_size)))
    assert promised * 0.99 <= max(needed) >> 20 <= promised
