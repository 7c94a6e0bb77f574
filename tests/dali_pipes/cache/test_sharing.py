"""Loaders that share a cache, in one process and in several: each shard once a node, no deadlock, no byte too many."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

import dali_pipes as dp
from dali_pipes.cache.cache import NodeCache
from tests.dali_pipes.cache.peak import Peak
from tests.dali_pipes.kill_ranks import expected, kill_rounds, summed
from tests.loaders import open_windowed
from tests.shards import Sample, make_samples, samples_and_shards, write_shards

NUM_SAMPLES = 60

# A loader in a process of its own: a line when it is open; epochs after an answer; then what it has read and fetched.
PROGRAM = """
import json, sys
import dali_pipes as dp
from tests.dali_pipes.kill_ranks import summed
options = json.loads(sys.argv[2])
epochs = options.pop("epochs")
options["cache"] = dp.Cache(**options["cache"], show_progress=False)
options["shuffle"] = dp.Shuffle(**options.get("shuffle", {}))
options["decode"] = dp.Decode(threads=1)
try:
    loader = dp.loader(sys.argv[1], summed, batch_size=3, device="cpu", **options)
except dp.CacheError as exc:
    print(json.dumps(str(exc)), flush=True)
    raise SystemExit
print("open", flush=True)
sys.stdin.readline()
rows = [
    [{name: values.reshape(len(values), -1)[row, 0].item() for name, values in batch.items()}
     for (batch,) in loader for row in range(len(batch["ordinal"]))]
    for _ in range(epochs)
]
print(json.dumps({"rows": rows, "fetched": loader.parts.stager.fetched_bytes}), flush=True)
sys.stdin.readline()
loader.close()
"""


# 20 shards.
samples, shards = samples_and_shards([(40 + 7 * (i % 5), 33 + 5 * (i % 7)) for i in range(NUM_SAMPLES)], per_shard=3)


@pytest.fixture
def cache_dir(shared_memory: Path) -> Path:
    return shared_memory


class Job:
    """A loader in a process of its own."""

    def __init__(self, shards: Path, cache_dir: Path, **options: object) -> None:
        text = json.dumps(
            {"epochs": 1} | options | {"cache": {"directory": str(cache_dir), **options.pop("cache", {})}}
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(shards), text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def objects_bytes(shards: Path) -> int:
    """Bytes of all shards and their indexes."""
    return sum(path.stat().st_size for path in shards.rglob("*") if path.name.endswith((".tar", ".index.safetensors")))


def check_rows(rows: list[dict[str, int]], samples: list[Sample]) -> None:
    """Each row is its sample's: label, and length and sum of both files' bytes."""
    for row in rows:
        assert {name: value for name, value in row.items() if name != "ordinal"} == expected(samples[row["ordinal"]])


def test_two_ranks_fetch_each_shard_once(shards: Path, samples: list[Sample], cache_dir: Path) -> None:
    """Two processes, two epochs: together they read each sample once an epoch, and fetch each byte once."""
    jobs = [Job(shards, cache_dir, rank=rank, world_size=2, seed=4, epochs=2) for rank in range(2)]
    try:
        assert [job.line() for job in jobs] == ["open", "open"]
        for job in jobs:
            job.go()
        found = [json.loads(job.line()) for job in jobs]
        for job in jobs:
            job.go()
        assert [job.process.wait(120) for job in jobs] == [0, 0]
    finally:
        for job in jobs:
            job.close()
    for epoch in range(2):
        rows = [row for one in found for row in one["rows"][epoch]]
        check_rows(rows, samples)
        assert sorted(row["ordinal"] for row in rows) == list(range(NUM_SAMPLES))
    assert sum(one["fetched"] for one in found) == objects_bytes(shards)


def test_two_jobs_with_space_for_both_reservations_and_no_more(
    shards: Path, samples: list[Sample], cache_dir: Path
) -> None:
    """Other seeds, other orders: both read to their end, blocks stay below the budget; a third is refused."""
    window = objects_bytes(shards) // 8
    with open_windowed(shards, summed, directory=cache_dir, window_bytes=window, batch_size=3) as loader:
        reserved = loader.parts.share.reserved
    options = {"shuffle": {"window_bytes": window}, "cache": {"max_bytes": 2 * reserved}, "epochs": 3}
    NodeCache(cache_dir).clear()
    jobs = [Job(shards, cache_dir, seed=seed, **options) for seed in (1, 2)]
    try:
        assert [job.line() for job in jobs] == ["open", "open"]
        third = Job(shards, cache_dir, seed=3, **options)
        pids = ", ".join(map(str, sorted(job.process.pid for job in jobs)))
        refused = json.loads(third.line())
        third.close()
        assert f"may take {2 * reserved} bytes; this loader must be able to hold {reserved} at a time" in refused
        assert f"{2 * reserved} are reserved for other loaders (process {pids}); pass " in refused
        assert f"Cache(max_bytes={3 * reserved})" in refused
        with Peak(cache_dir) as peak:
            for job in jobs:
                job.go()
            found = [json.loads(job.line()) for job in jobs]
    finally:
        for job in jobs:
            job.close()
    for one in found:
        for rows in one["rows"]:
            check_rows(rows, samples)
            assert sorted(row["ordinal"] for row in rows) == list(range(NUM_SAMPLES))
    assert 0 < peak.num_bytes <= 2 * reserved


def test_train_and_validation_share_a_budget(
    tmp_path: Path, shards: Path, samples: list[Sample], cache_dir: Path
) -> None:
    """Two data sets in one process, the one read in the middle of the other: neither waits for ever."""
    others = make_samples([(50, 40)] * 24, first=500)
    validation = write_shards(tmp_path / "validation", others, per_shard=3)
    window, options = objects_bytes(shards) // 8, {"batch_size": 4, "device": "cpu", "decode": dp.Decode(threads=1)}
    reserved = []
    for directory in (shards, validation):
        with open_windowed(directory, summed, directory=cache_dir, window_bytes=window, **options) as loader:
            reserved.append(loader.parts.share.reserved)
    NodeCache(cache_dir).clear()
    options |= {"cache": dp.Cache(directory=cache_dir, max_bytes=sum(reserved))}
    with (
        dp.loader(str(shards), summed, shuffle=dp.Shuffle(window_bytes=window), **options) as train,
        dp.loader(str(validation), summed, shuffle=dp.Shuffle(enabled=False, window_bytes=window), **options) as check,
        Peak(cache_dir) as peak,
    ):
        for _ in range(2):
            seen = []
            for step, (batch,) in enumerate(train):
                seen += batch["ordinal"].tolist()
                if step % 5 == 2:
                    assert [i for (b,) in check for i in b["ordinal"].tolist()] == list(range(24))
            assert sorted(seen) == list(range(NUM_SAMPLES))
    assert 0 < peak.num_bytes <= sum(reserved)


@pytest.mark.nightly
def test_ranks_that_are_killed_harm_nobody(tmp_path: Path, cache_dir: Path) -> None:
    """The short form of `tests.dali_pipes.kill_ranks`: five kills."""
    seed = random.SystemRandom().randrange(1000)
    print(f"kill_rounds with seed={seed}")  # pytest shows it if the test fails, wherever that is
    counts = kill_rounds(tmp_path, cache_dir, rounds=5, seed=seed)
    assert counts.errors == []
    assert counts.kills == 5
    assert counts.epochs > 4
    assert 0 < counts.peak_bytes <= counts.cache_bytes
