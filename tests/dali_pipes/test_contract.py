"""The contract of ranks, order and resume, on real loaders: world sizes 1 to 8, and other ones after a resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp
from tests.shards import make_samples, samples_and_shards, write_shards

NUM_SAMPLES = 29
KEYS = [f"s{i:05d}" for i in range(NUM_SAMPLES)]


# 29 samples in shards of 5, the last of 4.
samples, shards = samples_and_shards([(20 + i % 3, 18 + i % 4) for i in range(NUM_SAMPLES)], per_shard=5)


def graph(components: dp.Components, random: dp.Random) -> dict[str, Any]:
    """A few pixels and what is the sample's own chance: enough to tell one sample from another."""
    from nvidia.dali import fn

    pixels = fn.decoders.image(components["image.jpg"], device=components.device)
    corner = fn.slice(pixels, [0, 0], [4, 4], axes=(0, 1))
    return {"image": corner, "label": components.label, "chance": random.uniform()}


def open_ranks(shards: Path, world_size: int, batch_size: int, **options: Any) -> list[dp.Loader]:
    defaults = {
        "device": "cpu",
        "outputs": dp.Outputs(keys=True),
        "decode": dp.Decode(threads=1),
        "seed": 7,
        "shuffle": dp.Shuffle(window_bytes=50_000),  # two or three of the six shards
    }
    return [
        dp.loader(shards, graph, batch_size=batch_size, rank=rank, world_size=world_size, **(defaults | options))
        for rank in range(world_size)
    ]


def step(loaders: list[dp.Loader]) -> tuple[list[str], list[float]]:
    """One step of all ranks: the keys that count, in the order of the ranks, and each sample's chance."""
    keys, chances = [], []
    for loader in loaders:
        ((batch,),) = [next(loader)]
        keys += batch["key"][: loader.num_valid]
        chances += batch["chance"][: loader.num_valid].tolist()
    return keys, chances


def epoch(loaders: list[dp.Loader]) -> Iterator[tuple[list[str], list[float]]]:
    assert len({len(loader) for loader in loaders}) == 1, "every rank has the same number of batches"
    for _ in range(len(loaders[0])):
        yield step(loaders)
    for loader in loaders:
        with pytest.raises(StopIteration):
            next(loader)


@pytest.fixture(scope="module")
def order(shards: Path) -> list[list[tuple[str, float]]]:
    """Three epochs as a single process reads them, sample by sample."""
    (loader,) = open_ranks(shards, 1, 1)
    with loader:
        epochs = []
        for _ in range(3):
            steps = list(epoch([iter(loader)]))
            epochs.append([(keys[0], chances[0]) for keys, chances in steps])
    assert all(sorted(key for key, _ in samples) == KEYS for samples in epochs)
    return epochs


def test_more_ranks_than_shards_and_samples(shards: Path, tmp_path: Path) -> None:
    """Three samples, eight ranks, batches of four: one step; five ranks have nothing that counts, and say so."""
    few = write_shards(tmp_path, make_samples([(20, 20)] * 3), per_shard=2)
    loaders = open_ranks(few, 8, 4)
    batches = [next(loader)[0] for loader in loaders]
    assert [loader.num_valid for loader in loaders] == [1, 1, 1, 0, 0, 0, 0, 0]
    assert [len(batch["key"]) for batch in batches] == [1] * 8
    assert sorted(batch["key"][0] for batch in batches[:3]) == [f"s{i:05d}" for i in range(3)]
    for loader in loaders:
        with pytest.raises(StopIteration):
            next(loader)
        loader.close()


@pytest.mark.parametrize(("policy", "window"), [("PARTIAL", 50_000), ("FILL", "all"), ("DROP", 50_000)])
def test_resume_at_every_batch(shards: Path, policy: str, window: Any) -> None:
    """Two ranks, resumed by other loaders after each step of two epochs: bit-equal to the end, never a replay."""
    import torch

    options = {"last_batch_policy": policy, "shuffle": dp.Shuffle(window_bytes=window)}
    loaders = open_ranks(shards, 2, 4, **options)
    whole: list[list[dict[str, Any]]] = [[], []]
    states = []
    for _ in range(2):
        for iterator in loaders:
            iter(iterator)
        for _ in range(len(loaders[0])):
            states.append(loaders[0].state_dict())
            assert loaders[1].state_dict() == states[-1], "the state is the same on every rank"
            for rank, loader in enumerate(loaders):
                whole[rank].append(next(loader)[0])
    length = len(loaders[0])
    resumed = open_ranks(shards, 2, 4, **options)
    for number, state in enumerate(states):
        for rank, loader in enumerate(resumed):
            loader.load_state_dict(state)
            rest = [batch for (batch,) in loader]
            assert len(rest) == length - number % length
            for batch, expected in zip(rest, whole[rank][number:], strict=False):
                assert batch["key"] == expected["key"]
                assert all(torch.equal(batch[name], expected[name]) for name in ("image", "label", "chance"))
    for loader in loaders + resumed:
        loader.close()
