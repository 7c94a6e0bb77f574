"""Users stop, save and resume at any point; orders have thousands of samples; statistics of the order."""

import json
from pathlib import Path
from typing import Any

import numpy as np

import dali_pipes as dp
from dali_pipes.order.inputs import OrderInputs
from dali_pipes.order.plan import Batching, Plan
from dali_pipes.processes.ranks import Rank
from tests.models.world import build, draw_samples, open_probe, rows_of


def faces(random: np.random.Generator, folder: Path) -> str:
    """`as_dataloader` follows its `each_iter` after whole loops, after broken loops and after a resume."""
    world = build(folder / "world", draw_samples(random, int(random.integers(6, 40))), random)
    batch_size, seed = int(random.integers(2, 8)), int(random.integers(100))
    kind = ("next", "rest", "same")[random.integers(3)]
    orders: dict[int, list[str]] = {}
    with open_probe(world.url, batch_size=batch_size, seed=seed) as loader:
        for epoch in range(12):
            loader.set_epoch(epoch)
            orders[epoch] = [row.key for batch in loader for row in rows_of(batch[0], world)]

    def opened(state: Any) -> tuple[dp.Loader, Any]:
        loader = open_probe(world.url, batch_size=batch_size, seed=seed, state=state)
        return loader, loader.as_dataloader(each_iter=kind)

    loader, face = opened(None)
    epoch, given, is_resumed, said = 0, 0, False, []
    try:
        for _ in range(int(random.integers(2, 8))):
            act = ("whole", "break", "set", "resume")[random.integers(4)]
            said.append(act)
            if act == "set":
                chosen = int(random.integers(4))
                # After a resume, `set_epoch` with the state's epoch keeps the position in it.
                epoch, given = chosen, given if is_resumed and chosen == epoch else 0
                face.set_epoch(epoch)
                continue
            if act == "resume":
                if kind == "same":
                    continue
                state = json.loads(json.dumps(face.state_dict()))
                loader.close()
                loader, face = opened(state)
                assert loader.epoch == epoch
                is_resumed = True
                continue
            if given and given == len(orders[epoch]) and not is_resumed:
                epoch, given = epoch + 1, 0  # the previous loop broke at the last batch
            is_resumed = False
            expected = orders[epoch][given:]
            most = len(face) + 1 if act == "whole" else int(random.integers(1, len(face) + 1))
            found: list[str] = []
            is_whole = True
            for number, batch in enumerate(face):
                found += [row.key for row in rows_of(batch, world)]
                if number + 1 == most:
                    is_whole = False
                    break
            assert found == expected[: len(found)], (kind, said, batch_size, epoch, given, found, expected)
            if is_whole:
                assert found == expected, (kind, said, batch_size, epoch, given, found, expected)
                epoch, given = epoch + (kind != "same"), 0
            elif kind == "rest":
                given += len(found)
            elif kind == "same":
                given = 0
            else:
                # After a `break`, a state has the position in the epoch; a new iteration starts the next epoch.
                if random.integers(2):
                    said.append("resume")
                    state = json.loads(json.dumps(face.state_dict()))
                    loader.close()
                    loader, face = opened(state)
                    given, is_resumed = given + len(found), True
                else:
                    said.append("next")
                    epoch, given = epoch + 1, 0
                    face.set_epoch(epoch)
    finally:
        loader.close()
    return f"{kind}: {said}"


def plan(random: np.random.Generator, folder: Path) -> str:
    """Each of thousands of samples comes once, ranks get equal shares, windows fit, and a resume is exact."""
    num_shards = int(random.integers(1, 60))
    samples, sizes = random.integers(1, 80, num_shards), random.integers(1, 1_000_000, num_shards)
    world_size, batch_size = int(random.integers(1, 9)), int(random.integers(1, 65))
    total = world_size * batch_size
    window: Any = int(random.integers(1, 8_000_000)) if random.integers(2) else "all"
    order = OrderInputs(
        seed=int(random.integers(1 << 31)),
        epoch=int(random.integers(100)),
        shuffle=bool(random.integers(4)),
        shuffle_window=window,
    )
    made = Plan(shard_bytes=sizes, shard_samples=samples, order=order)
    policy = ("PARTIAL", "FILL", "DROP")[random.integers(3)]

    def steps(rank: int, ranks: int, each: int, start: int = 0, last: Any = policy) -> list[Any]:
        dealt = Batching(batch_size=each, process=Rank(rank=rank, world_size=ranks), last_batch_policy=last)
        return list(made.steps(dealt, start=start))

    ranks = [steps(rank, world_size, batch_size) for rank in range(world_size)]
    whole = np.concatenate([step.ordinals for step in steps(0, 1, 97, last="PARTIAL")])
    num = int(samples.sum())
    assert sorted(whole.tolist()) == list(range(num))
    if not order.shuffle:
        assert whole.tolist() == list(range(num))
    dealt = Batching(batch_size=batch_size, process=Rank(rank=0, world_size=world_size), last_batch_policy=policy)
    assert {len(batches) for batches in ranks} == {made.num_steps(dealt)}
    rows = [int(number) for batches in zip(*ranks, strict=True) for step in batches for number in step.ordinals]
    valid = [
        int(number)
        for batches in zip(*ranks, strict=True)
        for step in batches
        for number in step.ordinals[: step.num_valid]
    ]
    stop = num // total * total if policy == "DROP" else num
    assert valid == whole[:stop].tolist()
    if policy == "FILL":
        assert len(rows) == -(-num // total) * total
        assert rows[num:] == np.resize(whole, len(rows) - num).tolist()
    start = int(random.integers(num + 1))
    rest = [step.ordinals for step in steps(0, 1, 13, start, "PARTIAL")]
    assert (np.concatenate(rest or [whole[:0]]) == whole[start:]).all()
    if window != "all" and order.shuffle:
        shards = np.searchsorted(np.cumsum(samples), whole, side="right")
        first = np.array([np.flatnonzero(shards == shard)[0] for shard in range(num_shards)])
        last = np.array([np.flatnonzero(shards == shard)[-1] for shard in range(num_shards)])
        for position in random.integers(0, num, 20):
            is_open = (first <= position) & (position <= last)
            assert is_open.sum() <= 1 or sizes[is_open].sum() <= window
    return f"{num} samples in {num_shards} shards, {world_size} x {batch_size}, {policy}, window {window}"


def statistics(random: np.random.Generator, folder: Path) -> str:
    """Every sample has every position equally often; coins and uniform numbers are fair and independent of the order.

    By chance, a draw exceeds a limit less than once in a hundred million draws.
    """
    num, times = int(random.integers(10, 60)), 600
    positions = np.empty((times, 2), np.int64)
    seed = int(random.integers(1 << 30))
    shards = np.array([num // 2, num - num // 2])
    for number in range(times):
        inputs = OrderInputs(seed=seed + number % 20, epoch=number // 20)
        order = Plan(shard_bytes=shards, shard_samples=shards, order=inputs)
        (step,) = order.steps(Batching(batch_size=num))
        placed = np.argsort(step.ordinals)
        positions[number] = placed[0], placed[num - 1]
    for column in positions.T:
        assert abs(column.mean() - (num - 1) / 2) < 6 * np.sqrt((num**2 - 1) / 12 / times)
    assert abs(np.corrcoef(positions.T)[0, 1] + 1 / (num - 1)) < 6 / np.sqrt(times)
    world = build(folder / "world", draw_samples(random, 60), random)
    rows = []
    with open_probe(world.url, batch_size=30, seed=seed) as loader:
        for _ in range(10):
            rows += [row.random for batch in loader for row in rows_of(batch[0], world)]
            loader.reset()
    uniform, flip, _ = np.array(rows).T
    assert len(set(uniform.tolist())) > 0.99 * len(rows)
    assert abs(uniform.mean() - 0.5) < 6 / np.sqrt(12 * len(rows))
    assert abs(flip.mean() - 0.5) < 3 / np.sqrt(len(rows))
    distance = np.abs(np.sort(uniform) - np.arange(len(rows)) / len(rows)).max()
    assert distance < 3.2 / np.sqrt(len(rows)), distance
    assert abs(np.corrcoef(uniform, flip)[0, 1]) < 6 / np.sqrt(len(rows))
    assert abs(np.corrcoef(uniform[1:], uniform[:-1])[0, 1]) < 6 / np.sqrt(len(rows))
    return f"{num} samples, {len(rows)} draws"
