"""First batches and few samples of many come by range: the same batches, from fewer bytes; what fails falls back."""

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dali_pipes as dp
from dali_pipes.data_set.data_set import DataSet
from dali_pipes.errors import DataError, StoreError
from dali_pipes.reader import feed
from dali_pipes.store.patience import pause
from tests.dali_pipes.raw import check_rows, raw, read_epoch
from tests.loaders import open_loader
from tests.programs import wait_until
from tests.shards import Sample, make_samples, samples_and_shards, write_shards

NUM_SAMPLES, PER_SHARD = 600, 60
# One in each of ten shards, and all of the rest.
FEW = [f"s{number:05d}" for number in range(7, NUM_SAMPLES, PER_SHARD)]

samples, shards = samples_and_shards([(40 + 7 * (i % 5), 33 + 5 * (i % 7)) for i in range(NUM_SAMPLES)], per_shard=60)

ReadRanges = Callable[..., list[bytes]]


@pytest.fixture
def cache(tmp_path: Path) -> dp.Cache:
    (tmp_path / "cache").mkdir()
    return dp.Cache(directory=tmp_path / "cache")


class Gate:
    """Fetchers of whole shards wait here until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        open_fetcher = DataSet.open_fetcher

        def gated(data_set: DataSet) -> Any:
            fetcher = open_fetcher(data_set)
            fetch = fetcher.fetch

            def wait(wanted: Any, *, stopped: Callable[[], bool], num_connections: int = 1) -> bool:
                wait_until(lambda: self.open.is_set() or stopped())
                return not stopped() and fetch(wanted, stopped=stopped, num_connections=num_connections)

            fetcher.fetch = wait
            return fetcher

        monkeypatch.setattr(DataSet, "open_fetcher", gated)


@contextlib.contextmanager
def ranges_read_by(read: Callable[[ReadRanges, DataSet, Sequence[Any]], list[bytes]]) -> Iterator[list[int]]:
    """Ranges are read by this function, which gets the true one; the number of ranges of each call."""
    true, calls = DataSet.read_ranges, list[int]()

    def counted(data_set: DataSet, ranges: Sequence[Any]) -> list[bytes]:
        calls.append(len(ranges))
        return read(true, data_set, ranges)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DataSet, "read_ranges", counted)
        yield calls


def test_first_batch_comes_before_any_shard(
    shards: Path, samples: list[Sample], cache: dp.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shard comes until the first batch is taken; then the others come, each once, and the epoch is whole."""
    gate = Gate(monkeypatch)
    monkeypatch.setattr(feed, "GRACE_S", 1e9)
    with (
        ranges_read_by(lambda read, *arguments: read(*arguments)) as calls,
        open_loader(shards, raw, cache=cache) as loader,
    ):
        iterator = iter(loader)
        (batch,) = next(iterator)
        count = Counter(check_rows(batch, samples))
        assert loader.stats()["fetched_shards"] == 0
        gate.open.set()
        for (batch,) in iterator:
            count.update(check_rows(batch, samples)[: loader.num_valid])
        assert count == Counter(range(NUM_SAMPLES))
        assert loader.stats()["fetched_shards"] == 10
        assert read_epoch([loader], samples) == Counter(range(NUM_SAMPLES))
        assert calls == [4], "the other segments wait for the shards, which come"


def test_further_batches_come_before_slow_shards(
    shards: Path, samples: list[Sample], cache: dp.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shard comes for a while: the segments after the first come by range, too, while they are small."""
    gate = Gate(monkeypatch)
    with (
        ranges_read_by(lambda read, *arguments: read(*arguments)) as calls,
        open_loader(shards, raw, cache=cache) as loader,
    ):
        iterator = iter(loader)
        count = Counter(ordinal for _ in range(5) for ordinal in check_rows(next(iterator)[0], samples))
        assert loader.stats()["fetched_shards"] == 0
        assert calls == [4, 16], "64 of 600 samples are not less than an eighth of the shards' bytes, indexes included"
        gate.open.set()
        for (batch,) in iterator:
            count.update(check_rows(batch, samples)[: loader.num_valid])
    assert count == Counter(range(NUM_SAMPLES))


def test_batches_are_those_from_the_cache(shards: Path, cache: dp.Cache, tmp_path: Path) -> None:
    """Pixels, masks, labels, keys, crops and random numbers are the same to the bit, also if an epoch is resumed."""
    options = {"graph": dp.segmentation(crop=16), "seed": 3}

    def read(**further: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        (directory := tmp_path / str(len(further))).mkdir()
        with (
            ranges_read_by(lambda read, *given: read(*given)) as calls,
            open_loader(shards, **options, **further, cache=dp.Cache(directory=directory)) as loader,
        ):
            batches = [next(loader)[0] for _ in range(3)]
            assert calls
            return batches, loader.state_dict()

    first, state = read()
    second, _ = read(state=state)
    with open_loader(shards, **options, cache=cache) as loader:
        list(loader)
        loader.load_state_dict(state | {"delivered": 0})
        whole = [next(loader)[0] for _ in range(6)]
    for one, other in zip([*first, *second], whole, strict=True):
        assert one["key"] == other["key"]
        assert all((one[name] == other[name]).all() for name in one if name != "key")


@pytest.mark.parametrize("error", [StoreError("503"), DataError("other bytes"), OSError(5, "broken")])
def test_what_fails_by_range_comes_in_shards(
    shards: Path, samples: list[Sample], cache: dp.Cache, error: Exception
) -> None:
    def fail(*_: Any) -> list[bytes]:
        raise error

    with ranges_read_by(fail) as calls, open_loader(shards, raw, cache=cache) as loader:
        assert read_epoch([loader], samples) == Counter(range(NUM_SAMPLES))
    assert calls


def test_ranges_that_do_not_come_hold_nothing_up(shards: Path, samples: list[Sample], cache: dp.Cache) -> None:
    """The server is silent to ranges: the shards come. Every thread that waits for ranges ends with the loader."""
    ended = list[int]()

    def wait(*_: Any) -> list[bytes]:
        try:
            pause(3600)
        finally:
            ended.append(1)
        return []

    with ranges_read_by(wait) as calls, open_loader(shards, raw, cache=cache) as loader:
        assert read_epoch([loader], samples) == Counter(range(NUM_SAMPLES))
    assert calls
    wait_until(lambda: len(ended) == len(calls))


def test_a_rotten_sample_is_an_error_as_in_a_shard(
    tmp_path: Path, shards: Path, samples: list[Sample], cache: dp.Cache
) -> None:
    """The first batch has it: its bytes are not delivered, and the error names it."""
    rotten = tmp_path / "rotten"
    rotten.mkdir()
    for path in shards.rglob("*"):
        if path.is_file():
            (rotten / path.relative_to(shards)).parent.mkdir(exist_ok=True)
            (rotten / path.relative_to(shards)).write_bytes(path.read_bytes())
    with open_loader(shards, raw) as loader:
        first = check_rows(next(iter(loader))[0], samples)[0]
    shard = rotten / f"s-{first // PER_SHARD:06d}.tar"
    data, photo = bytearray(shard.read_bytes()), samples[first].components["image.jpg"]
    data[data.index(photo) + len(photo) // 2] ^= 1
    shard.write_bytes(data)
    with open_loader(rotten, raw, cache=cache) as loader, pytest.raises(DataError, match=f"s{first:05d}"):
        next(iter(loader))


# Few samples of many


def few(directory: Path, cache: dp.Cache, **options: Any) -> dp.Loader:
    excluded = directory.parent / "excluded.txt"
    kept = set(FEW)
    excluded.write_text("".join(f"s{n:05d}\n" for n in range(NUM_SAMPLES) if f"s{n:05d}" not in kept))
    return open_loader(directory, raw, select=dp.Select(exclude=str(excluded)), cache=cache, **options)


def read_few(loader: dp.Loader, samples: list[Sample]) -> None:
    for _ in range(2):
        assert read_epoch([loader], samples) == Counter(range(7, NUM_SAMPLES, PER_SHARD))


def test_few_samples_are_staged_without_their_shards(shards: Path, samples: list[Sample], cache: dp.Cache) -> None:
    """Each sample's photo comes once, in two epochs and two loaders, and the cache takes no more than their blocks."""
    photos = sum(len(samples[number].components["image.jpg"]) for number in range(7, NUM_SAMPLES, PER_SHARD))
    with few(shards, cache) as loader, few(shards, cache) as second:
        read_few(loader, samples)
        share, stats = loader.parts.share, loader.stats()
        assert stats["fetched_bytes"] == photos + int(loader.parts.inputs.manifest.index_bytes.sum())
        assert stats["fetched_shards"] == 10
        table = share._opened.table
        # ext4 uses extra blocks to list the extents of a file.
        assert table.resident_bytes == int(table.sizes.sum()) <= share.taken_bytes <= table.resident_bytes + 2 * 4096
        read_few(second, samples)
        assert second.stats()["fetched_bytes"] == 0


def test_few_samples_do_not_need_space_for_their_shards(
    shards: Path, samples: list[Sample], tmp_path: Path, cache: dp.Cache
) -> None:
    """A cache of less than two shards, and windows of one: samples are evicted, and fetched again."""
    small = dp.Cache(directory=cache.directory, max_bytes=120_000)
    with few(shards, small, shuffle=dp.Shuffle(window_bytes=1)) as loader:
        read_few(loader, samples)
        assert loader.parts.share.taken_bytes <= 120_000 + 2 * 4096
        assert loader.stats()["fetched_shards"] > 10


def test_few_samples_in_the_cache_are_checked(
    shards: Path, samples: list[Sample], tmp_path: Path, cache: dp.Cache, caplog: pytest.LogCaptureFixture
) -> None:
    """A byte of a kept cache file changes while nobody uses it: that shard's samples are fetched again."""
    kept = dp.Cache(directory=cache.directory, max_bytes=10_000_000)
    with few(shards, kept) as loader:
        read_few(loader, samples)
        is_kept = loader.parts.share._opened.table.keep
    assert is_kept
    (image,) = Path(str(cache.directory)).rglob("*.image")
    photo = samples[67].components["image.jpg"]
    with image.open("r+b") as file:
        file.seek(file.read().index(photo) + 100)
        file.write(bytes([photo[100] ^ 1]))
    caplog.clear()
    with caplog.at_level(logging.WARNING), few(shards, kept) as loader:
        read_few(loader, samples)
        assert loader.stats()["fetched_shards"] == 1
    assert "held other bytes than those of shard" in caplog.text


@pytest.mark.parametrize("error", [StoreError("403 Forbidden"), DataError("s00007 has other bytes")])
def test_few_samples_that_cannot_be_read_are_an_error(shards: Path, cache: dp.Cache, error: Exception) -> None:
    """Nothing is left out, and the next try succeeds."""
    errors = [error] * 2

    def fail(read: ReadRanges, data_set: DataSet, ranges: Sequence[Any]) -> list[bytes]:
        if errors and any(one.key == "s00007" for one in ranges):
            raise errors.pop()
        return read(data_set, ranges)

    with ranges_read_by(fail), few(shards, cache) as loader:
        with pytest.raises(type(error), match=str(error)):
            list(loader)
        errors.clear()
        ordinals = np.concatenate([batch["ordinal"].flatten() for (batch,) in loader])
        assert set(ordinals.tolist()) == set(range(7, NUM_SAMPLES, PER_SHARD))


def test_few_samples_that_are_larger_than_the_mean_have_their_space(tmp_path: Path, cache: dp.Cache) -> None:
    """Their sizes are known when they came: then they are reserved, or the error says what would be enough."""
    sizes = [(500, 400) if number % PER_SHARD == 7 else (40, 33) for number in range(NUM_SAMPLES)]
    large = make_samples(sizes)
    (tmp_path / "large").mkdir()
    shards = write_shards(tmp_path / "large", large, per_shard=PER_SHARD)
    with pytest.raises(dp.CacheError) as refused, few(shards, dp.Cache(directory=tmp_path, max_bytes=1)):
        pass
    estimated = int(str(refused.value).partition("the shards take ")[2].split()[0])
    with few(shards, cache) as loader:
        read_few(loader, large)
        held = loader.parts.share._opened.table.resident_bytes
        assert estimated < held <= loader.parts.share.reserved
    tight = dp.Cache(directory=tmp_path, max_bytes=estimated)
    with few(shards, tight) as loader, pytest.raises(dp.CacheError, match="this loader must be able to hold"):
        list(loader)
