"""Epochs, ranks, selections, mixtures, buckets: which samples come, how often, in which batches."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import dali_pipes as dp
from tests.models.world import Row, World, build, draw_samples, open_probe, rows_of

POLICIES = ("PARTIAL", "FILL", "DROP")


def draw_shuffle(random: np.random.Generator, num_shards: int) -> bool | dp.Shuffle:
    """Any way to shuffle, windows of a few shards among them."""
    kind = random.integers(4)
    if kind < 2:
        return bool(kind)
    window = int(random.integers(10_000, 200_000)) if kind == 2 else "all"
    slices = int(random.integers(1, min(3, num_shards) + 1))
    return dp.Shuffle(window_bytes=window, slices=slices)


def read_ranks(loaders: Sequence[dp.Loader], world: World) -> list[list[list[Row]]]:
    """Read one epoch of all ranks in step: rank -> batch -> row. Each rank has ``len(loader)`` batches."""
    iterators = [iter(loader) for loader in loaders]
    lengths = {len(loader) for loader in loaders}
    assert len(lengths) == 1
    ranks: list[list[list[Row]]] = [[] for _ in loaders]
    for _ in range(lengths.pop()):
        for iterator, batches in zip(iterators, ranks, strict=True):
            batches.append(rows_of(next(iterator)[0], world))
    assert all(next(iterator, None) is None for iterator in iterators)
    return ranks


def epochs(random: np.random.Generator, folder: Path) -> str:
    """Every sample comes once in each epoch, under every policy; any number of ranks has the same order."""
    world = build(folder / "world", draw_samples(random, int(random.integers(1, 60))), random)
    num_shards = world.shard_of[-1] + 1
    shuffle = draw_shuffle(random, num_shards)
    slices = shuffle.slices if isinstance(shuffle, dp.Shuffle) else 1
    world_size, each = int(random.integers(1, 4)), int(random.integers(1, 7))
    batch_size = each * slices if (each * world_size) % slices else each
    policy = POLICIES[random.integers(3)]
    total, num = world_size * batch_size, len(world.samples)
    if policy == "DROP" and num < total:
        policy = "FILL"
    options = {"seed": int(random.integers(1000)), "shuffle": shuffle}
    loaders = [
        open_probe(
            world.url, batch_size=batch_size, rank=rank, world_size=world_size, last_batch_policy=policy, **options
        )
        for rank in range(world_size)
    ]
    whole = open_probe(world.url, batch_size=total, last_batch_policy="FILL", **options)
    try:
        for _ in range(2):
            ranks = read_ranks(loaders, world)
            order = [row for batch in read_ranks([whole], world)[0] for row in batch]
            for step in range(len(loaders[0])):
                rows = [row for batches in ranks for row in batches[step]]
                expected = order[step * total : (step + 1) * total]
                if policy == "PARTIAL" and step == len(loaders[0]) - 1:
                    left = [row for row in expected if row.valid]
                    sizes = [sum(row.valid for row in batches[step]) for batches in ranks]
                    assert max(sizes) - min(sizes) <= 1
                    assert sizes == sorted(sizes, reverse=True)
                    assert [row for row in rows if row.valid] == left
                else:
                    # With slices, a rank's repeated samples come after its own samples, not after all ranks' samples.
                    if slices > 1 and step == len(loaders[0]) - 1:
                        rows, expected = sorted(rows, key=repr), sorted(expected, key=repr)
                    assert rows == expected
            counts = Counter(row.key for batches in ranks for batch in batches for row in batch if row.valid)
            if policy == "DROP":
                assert sum(counts.values()) == whole.num_samples // total * total
            elif slices == 1:
                assert counts == Counter(world.keys)
            else:  # short slices repeat samples until all slices have the same length
                assert set(counts) == set(world.keys)
            for loader in [*loaders, whole]:
                loader.reset()
    finally:
        for loader in [*loaders, whole]:
            loader.close()
    return f"{num} samples, {world_size} x {batch_size}, {policy}, {shuffle}"


def resume(random: np.random.Generator, folder: Path) -> str:
    """A job resumes at the next sample with the same random numbers, also with other ranks and another batch size."""
    world = build(folder / "world", draw_samples(random, int(random.integers(10, 60))), random)
    shuffle = draw_shuffle(random, world.shard_of[-1] + 1)
    if isinstance(shuffle, dp.Shuffle) and shuffle.slices > 1:
        shuffle = dp.Shuffle(window_bytes=shuffle.window_bytes)
    epoch_samples = int(random.integers(5, 150)) if random.integers(3) == 0 else None
    options = {
        "seed": int(random.integers(1000)),
        "shuffle": shuffle,
        "select": dp.Select(epoch_samples=epoch_samples),
        "last_batch_policy": "PARTIAL",
    }
    with open_probe(world.url, batch_size=7, **options) as loader:
        orders = []
        for _ in range(5):
            orders.append([row for batch in loader for row in rows_of(batch[0], world)])
            loader.reset()
    state: dict[str, Any] | None = None
    epoch, given = 0, 0
    for _ in range(4):
        world_size, batch_size = int(random.integers(1, 4)), int(random.integers(1, 9))
        loaders = [
            open_probe(world.url, batch_size=batch_size, rank=rank, world_size=world_size, state=state, **options)
            for rank in range(world_size)
        ]
        try:
            assert {loader.epoch for loader in loaders} == {epoch}
            iterators, is_over = [iter(loader) for loader in loaders], False
            for _ in range(int(random.integers(0, len(orders[epoch]) // (world_size * batch_size) + 2))):
                batches = [next(iterator, None) for iterator in iterators]
                if batches[0] is None:
                    assert all(batch is None for batch in batches)
                    assert given == len(orders[epoch])
                    is_over = True
                    break
                rows = [row for batch in batches for row in rows_of(batch[0], world) if row.valid]
                assert rows == orders[epoch][given : given + len(rows)]
                assert rows
                given += len(rows)
            if is_over and random.integers(2):
                for loader in loaders:
                    loader.reset()
            if is_over:  # after the loop the next epoch begins, with or without reset()
                epoch, given = epoch + 1, 0
            states = [json.dumps(loader.state_dict()) for loader in loaders]
            assert len(set(states)) == 1
            state = json.loads(states[0])
        finally:
            for loader in loaders:
                loader.close()
    return f"{len(world.samples)} samples, {shuffle}, epoch_samples={epoch_samples}"


def selection(random: np.random.Generator, folder: Path) -> str:
    """Lists, conditions, missing components and repeated classes leave exactly the samples that a user asked for."""
    world = build(folder / "world", draw_samples(random, int(random.integers(8, 60)), complete=False), random)
    excluded = {key for key in world.keys if random.random() < 0.2}
    (folder / "list.txt").write_text("".join(f"{key}\n" for key in sorted(excluded)))
    label = int(random.integers(4))
    needs_caption = bool(random.integers(2))
    kept = [
        sample
        for sample in world.samples
        if sample.key not in excluded and sample.label != label and (sample.caption is not None or not needs_caption)
    ]
    select = dp.Select(
        exclude=folder / "list.txt" if excluded else (),
        where=lambda columns: columns.labels != label,
        missing="skip" if needs_caption else "error",
    )
    factors = {number: float(random.integers(2, 8)) / 2 for number in range(4) if random.integers(2)}
    present = {sample.label for sample in kept}
    factors = {number: factor for number, factor in factors.items() if number in present}
    if factors and random.integers(2):
        select = dp.Select(
            **{name: getattr(select, name) for name in ("exclude", "where", "missing")}, oversample=factors
        )
    else:
        factors = {}

    def graph(components: dp.Components, random: dp.Random) -> dict[str, Any]:
        taken = "txt" if needs_caption else "png"
        return {"size": components[taken].shape(), "label": components.label}

    if not kept:
        return "nothing kept"
    with dp.loader(
        world.url, graph, batch_size=5, device="cpu", select=select, outputs=dp.Outputs(keys=True), seed=3
    ) as loader:
        counts = Counter(key for batch in loader for key in batch[0]["key"])
        assert loader.num_samples == sum(counts.values())
    assert set(counts) == {sample.key for sample in kept}
    for number in range(4):
        keys = [sample.key for sample in kept if sample.label == number]
        factor = factors.get(number, 1.0)
        assert all(factor - 1 < counts[key] < factor + 1 for key in keys), (factor, counts)
        assert abs(sum(counts[key] for key in keys) - factor * len(keys)) <= 0.5 + 1e-9 or not keys
    return f"{len(kept)} of {len(world.samples)} samples, oversample {factors}"


def mixture(random: np.random.Generator, folder: Path) -> str:
    """Weights are exact in every epoch; over the epochs, all samples of a data set come equally often."""
    first = build(folder / "first", draw_samples(random, int(random.integers(3, 40)), prefix="a"), random)
    second = build(folder / "second", draw_samples(random, int(random.integers(3, 40)), prefix="b"), random)
    weights = {"first": int(random.integers(1, 5)), "second": int(random.integers(1, 5))}
    epoch_samples = sum(weights.values()) * int(random.integers(2, 12))
    mixed = dp.Mixture({"first": first.url, "second": second.url}, weights=weights)
    together = World("", [*first.samples, *second.samples], ())
    total: Counter[str] = Counter()
    with open_probe(mixed, batch_size=5, select=dp.Select(epoch_samples=epoch_samples), seed=1) as loader:
        for _ in range(3):
            counts = Counter(row.key for batch in loader for row in rows_of(batch[0], together))
            for name, weight in weights.items():
                found = sum(num for key, num in counts.items() if key.startswith(f"{name}/"))
                assert found == epoch_samples * weight // sum(weights.values()), counts
            total += counts
            loader.reset()
    for name, world in (("first", first), ("second", second)):
        times = [total[f"{name}/{key}"] for key in world.keys]
        assert max(times) - min(times) <= 1, (name, times)
    return f"{len(first.samples)} and {len(second.samples)} samples, {weights}, {epoch_samples} an epoch"


def buckets(random: np.random.Generator, folder: Path) -> str:
    """A batch has photos of the bucket with the nearest aspect ratio; each photo comes once; resume is exact."""
    world = build(folder / "world", draw_samples(random, int(random.integers(10, 80))), random)
    described = dp.buckets(area=int(random.integers(16, 40)) ** 2, step=8, max_aspect=2.0)
    ratios = np.array([width / height for height, width in described.shapes])
    policy = POLICIES[random.integers(2)]
    world_size, batch_size = int(random.integers(1, 3)), int(random.integers(1, 5))

    def graph(components: dp.Components, random: dp.Random) -> dict[str, Any]:
        return {"size": components["png"].shape(), "shape": components.bucket_shape(), "draw": random.uniform(0.0, 1.0)}

    def opened(rank: int, state: Any = None) -> dp.Loader:
        return dp.loader(
            world.url,
            graph,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            device="cpu",
            seed=5,
            last_batch_policy=policy,
            select=dp.Select(buckets=described),
            outputs=dp.Outputs(keys=True, valid=True),
            state=state,
        )

    sizes = {sample.key: (sample.height, sample.width) for sample in world.samples}
    loaders = [opened(rank) for rank in range(world_size)]
    stop = int(random.integers(len(loaders[0]) + 1))
    state = None
    rest: list[list[Any]] = []
    try:
        counts: Counter[str] = Counter()
        iterators = [iter(loader) for loader in loaders]
        for number in range(len(loaders[0])):
            if number == stop:
                state = loaders[0].state_dict()
            batches = [next(iterator)[0] for iterator in iterators]
            shapes = {tuple(row) for batch in batches for row in batch["shape"].tolist()}
            assert len(shapes) == 1
            ratio = next(iter(shapes))[1] / next(iter(shapes))[0]
            for batch in batches:
                for key, valid in zip(batch["key"], batch["valid"].tolist(), strict=True):
                    counts[key] += valid
                    height, width = sizes[key]
                    distances = np.abs(np.log(ratios) - np.log(width / height))
                    assert abs(np.log(ratio) - np.log(width / height)) <= distances.min() + 1e-9, key
            if number >= stop:
                rest.append([[batch["key"], batch["draw"].tolist()] for batch in batches])
        assert counts == Counter(world.keys)
    finally:
        for loader in loaders:
            loader.close()
    if state is not None:
        resumed = [opened(rank, state) for rank in range(world_size)]
        try:
            found = [
                [[batch[0]["key"], batch[0]["draw"].tolist()] for batch in step] for step in zip(*resumed, strict=True)
            ]
            assert found == rest
        finally:
            for loader in resumed:
                loader.close()
    return f"{len(world.samples)} samples, {len(ratios)} shapes, {world_size} x {batch_size}, {policy}"
