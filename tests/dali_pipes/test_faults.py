"""Epochs through a proxy that breaks requests at random: every sample comes once, its bytes equal."""

import os
import uuid
from collections import Counter
from pathlib import Path
from unittest import mock

import dali_pipes as dp
from dali_pipes.store.cluster import embedded_node
from dali_pipes.store.cluster.ais import AisStore
from tests.dali_pipes.raw import raw, read_epoch
from tests.servers.faulty import faulty
from tests.shards import Sample, fill_bucket, make_samples, write_shards

NUM_SAMPLES = 160


def make_bucket(endpoint: str, directory: Path, *, per_shard: int) -> tuple[AisStore, list[Sample]]:
    """A bucket of 32 indexed shards of so many samples each, and the samples."""
    samples = make_samples([(40 + 7 * (i % 5), 33 + 5 * (i % 7)) for i in range(32 * per_shard)])
    write_shards(directory, samples, per_shard=per_shard, index=False)
    store = AisStore(endpoint, f"faults-{uuid.uuid4().hex[:8]}")
    fill_bucket(store, directory, folder="train/")
    return store, samples


def run_epochs(
    endpoint: str, directory: Path, *, epochs: int, rate: float, seed: int, of_shard: tuple[int, int] = (5, 5)
) -> tuple[Counter[str], int]:
    """Read so many epochs from a cache of a fifth of the bytes: what broke, by kind, and of how many requests.

    ``of_shard``: how many samples of each shard are read, and how many it has.

    Raises:
        AssertionError: If a sample is missing, doubled, or not the one that was packed.
    """
    num_read, per_shard = of_shard
    store, samples = make_bucket(endpoint, directory / "shards", per_shard=per_shard)
    read = {number: 1 for number in range(len(samples)) if number % per_shard < num_read}
    (directory / "excluded").write_text("".join(f"{one.key}\n" for n, one in enumerate(samples) if n not in read))
    (directory / "cache").mkdir()
    try:
        # With a token only the named endpoint is asked; without, a loader goes round it by the proxies of the map.
        with (
            mock.patch.dict(os.environ, AIS_AUTHN_TOKEN="token-of-this-test"),
            faulty(endpoint, seed=seed, stall_s=0.2) as proxy,
        ):
            with dp.loader(
                f"{store.url}/train/s-",
                raw,
                batch_size=7,
                device="cpu",
                endpoint=proxy.endpoint,
                cache=dp.Cache(directory=directory / "cache", max_bytes=250_000),
                shuffle=dp.Shuffle(window_bytes=60_000),
                select=dp.Select(exclude=directory / "excluded"),
            ) as loader:
                proxy.rate = rate
                for _ in range(epochs):
                    assert read_epoch([loader], samples) == Counter(read)
            return proxy.faults, proxy.requests.total()
    finally:
        store.client.bucket(store.bucket).delete(missing_ok=True)


def test_every_sample_comes_once_though_requests_break(tmp_path: Path) -> None:
    """Two epochs with one request in ten broken, in every way that the proxy knows."""
    with embedded_node.start(tmp_path / "node") as node:
        faults, num_requests = run_epochs(node.endpoint, tmp_path, epochs=2, rate=0.1, seed=0)
    assert num_requests > 200
    assert len(faults) >= 5
    assert faults.total() > 10


def test_few_samples_come_once_though_ranges_break(tmp_path: Path) -> None:
    """The same for a loader that stages two samples of 100 of each shard."""
    with embedded_node.start(tmp_path / "node") as node:
        faults, num_requests = run_epochs(node.endpoint, tmp_path, epochs=2, rate=0.1, seed=1, of_shard=(2, 100))
    assert num_requests > 200
    assert len(faults) >= 5
    assert faults.total() > 10
