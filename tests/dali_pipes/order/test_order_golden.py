"""The order of a seed, held for ever: a job that is resumed with a later version must go on where it was.

What fails here is no test to be mended but a break of the kind "iteration order": it needs another version of the
state, and a line in the change log. The literals hold on every machine: integers of stated width, stable sorts.
"""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest

from dali_pipes.order.inputs import OrderInputs
from dali_pipes.order.plan import Batching, Plan
from dali_pipes.order.randomness import Stream, philox4x32
from dali_pipes.order.selection import Selection

SAMPLES = [4, 3, 5, 2, 6]  # of each shard
FIRST_OF_SECOND = 3  # where there are two data sets, the second's first shard
LABELS = np.arange(20, dtype=np.int64) % 3


def small(
    *, sets: bool = False, excluded: tuple[int, ...] = (), oversample: dict[int, float] | None = None, **order: object
) -> Plan:
    counts = np.array(SAMPLES, np.int64)
    return Plan(
        shard_bytes=counts * 10 + 1,
        shard_samples=counts,
        order=OrderInputs(seed=7, **order),
        set_shards=[FIRST_OF_SECOND, len(SAMPLES) - FIRST_OF_SECOND] if sets else None,
        selection=Selection(20, excluded=excluded, labels=LABELS, oversample=oversample),
    )


def large(*, sets: bool = False, oversample: dict[int, float] | None = None, **order: object) -> Plan:
    """200,000 samples in 400 shards of 400 to 600."""
    counts = 400 + (np.arange(400, dtype=np.int64) * 67) % 201
    counts[-1] += 200_000 - int(counts.sum())
    labels = (np.arange(200_000, dtype=np.int64) * 31) % 10
    return Plan(
        shard_bytes=counts * 1000,
        shard_samples=counts,
        order=OrderInputs(seed=11, **order),
        set_shards=[300, 100] if sets else None,
        selection=Selection(200_000, labels=labels, oversample=oversample),
    )


def order_of(plan: Plan, *, batch_size: int | None = None, policy: str = "PARTIAL") -> tuple[list[int], list[int]]:
    steps = list(plan.steps(Batching(batch_size=batch_size or plan.order.num_slices, last_batch_policy=policy)))
    ordinals = np.concatenate([step.ordinals for step in steps])
    return ordinals.tolist(), np.concatenate([step.occurrences for step in steps]).tolist()


def test_words_are_golden() -> None:
    """Philox's words at a few counters; 64 bits and uniforms as a stream gives them."""
    counters = np.array([0, 1, 2**32 - 1, 2**32, 2**40 + 3], np.uint64)
    zeros = np.zeros(5, np.uint64)
    words = philox4x32((counters & np.uint64(0xFFFFFFFF), counters >> np.uint64(32), zeros, zeros), (17, 2**31))
    assert np.stack(words, axis=1).tolist() == [
        [1491004943, 3964604942, 3413222433, 1519062722],
        [3685181374, 423494, 1644583859, 2624831747],
        [3526475031, 4183295799, 1058088634, 1437824770],
        [1424567379, 2731779633, 2849318578, 2842122887],
        [1775783159, 1318921071, 124527500, 2508074008],
    ]
    ordinals = np.array([0, 1, 2**33], np.int64)
    assert Stream(7, 3, "order/samples").words(ordinals).tolist() == [
        1184879006892888158,
        12081204610893321968,
        11271748225581665908,
    ]
    assert Stream(7, 3, "order/samples").words(ordinals, occurrence=2).tolist() == [
        2060874285438303126,
        6120429900731345914,
        3120437187177132534,
    ]
    # Exact: multiples of 2**-32.
    uniforms = Stream(7, 3, "graph/crop").uniforms(ordinals, 5, occurrence=1)
    assert (uniforms * 2**32).astype(np.int64).tolist() == [
        [3779873231, 3371885657, 1093831591, 3675007211, 1884082676],
        [3860225635, 2870394621, 2475732838, 4076778654, 2450635129],
        [4283152255, 410286925, 1798823327, 3939916962, 90843180],
    ]


# What is tested, how it is read, ordinals, occurrences. A number a line, as the formatter has it, would be no table.
# fmt: off
SMALL: list[tuple[Callable[[], Plan], dict, list[int], list[int]]] = [
    # plain
    (
        lambda: small(), {},
        [2, 1, 0, 7, 12, 16, 17, 19, 5, 6, 4, 11, 9, 10, 18, 8, 3, 14, 15, 13],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ),
    # another epoch
    (
        lambda: small(epoch=1), {},
        [7, 16, 6, 8, 12, 17, 13, 1, 11, 4, 2, 18, 9, 14, 15, 10, 3, 5, 19, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ),
    # as packed
    (
        lambda: small(shuffle=False), {},
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ),
    # two slices, the shorter wraps
    (
        lambda: small(num_slices=2), {},
        [7, 2, 12, 1, 16, 0, 17, 5, 19, 6, 11, 4, 9, 3, 10, 2, 18, 1, 8, 0, 14, 5, 15, 6, 13, 4],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1],
    ),
    # a shard and a sample left out
    (
        lambda: small(excluded=(0, 1, 2, 3, 9)), {},
        [7, 12, 16, 17, 19, 5, 6, 4, 11, 10, 18, 8, 14, 15, 13],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ),
    # class factors
    (
        lambda: small(oversample={0: 1.5, 2: 0.5}, shuffle_window=75), {},
        [7, 9, 10, 8, 18, 16, 19, 15, 18, 14, 15, 2, 1, 0, 12, 3, 3, 13, 6, 4],
        [0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0],
    ),
    # another draw
    (
        lambda: small(oversample={0: 1.5, 2: 0.5}, epoch=1), {},
        [7, 16, 6, 8, 12, 17, 13, 1, 4, 18, 9, 15, 0, 10, 3, 5, 19, 15, 3, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 0],
    ),
    # from the end of lap 0 to the start of lap 1
    (
        lambda: small(epoch_samples=7, epoch=2), {},
        [18, 8, 3, 14, 15, 13, 7],
        [0, 0, 0, 0, 0, 0, 1],
    ),
    # the same, in slices
    (
        lambda: small(epoch_samples=12, epoch=1, num_slices=2), {},
        [9, 3, 10, 2, 18, 1, 8, 0, 14, 5, 15, 6],
        [0, 0, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1],
    ),
    # two data sets, each sample once
    (
        lambda: small(sets=True), {},
        [2, 12, 16, 1, 0, 7, 5, 6, 4, 11, 17, 19, 9, 10, 18, 8, 3, 14, 15, 13],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ),
    # weights: several laps of the second
    (
        lambda: small(sets=True, weights=(0.3, 0.7)), {},
        [2, 12, 16, 17, 19, 18, 14, 1, 0, 15, 13, 7, 5, 6, 4, 11, 19, 16, 12, 18, 15, 9, 17, 14, 13, 10, 18, 15, 16,
         12, 14, 8, 19, 3, 13, 17, 17, 14, 13, 15],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 2, 2, 2, 2, 2, 0, 2, 0, 2, 2,
         3, 3, 3, 3],
    ),
    # and a fixed length
    (
        lambda: small(sets=True, weights=(0.3, 0.7), epoch_samples=10, epoch=3), {},
        [18, 10, 8, 12, 3, 19, 15, 18, 13, 14],
        [0, 0, 0, 0, 0, 0, 1, 1, 1, 1],
    ),
    # evenly in turns
    (
        lambda: small(sets=True, weights=(0.3, 0.7), shuffle=False), {},
        [12, 0, 13, 14, 1, 15, 16, 17, 2, 18, 19, 3, 12, 13, 4, 14, 15, 16, 5, 17, 18, 6, 19, 12, 7, 13, 14, 15, 8,
         16, 17, 9, 18, 19, 10, 12, 13, 14, 11, 15],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0, 1, 2, 0, 2, 2, 2, 0, 2, 2, 0, 2, 2, 0, 3,
         3, 3, 0, 3],
    ),
    # filled
    (
        lambda: small(), {"batch_size": 8, "policy": "FILL"},
        [2, 1, 0, 7, 12, 16, 17, 19, 5, 6, 4, 11, 9, 10, 18, 8, 3, 14, 15, 13, 2, 1, 0, 7],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1],
    ),
    # everything; what fills the last step stands behind the samples that count
    (
        lambda: small(sets=True, num_slices=2, weights=(0.5, 0.5), oversample={1: 2}),
        {"batch_size": 30, "policy": "FILL"},
        [2, 19, 16, 17, 1, 0, 7, 7, 1, 11, 9, 19, 18, 14, 10, 4, 12, 13, 13, 5, 6, 4, 4, 5, 6, 4, 12, 13, 13, 4, 8,
         15, 16, 12, 3, 10, 13, 13, 12, 5, 12, 13, 16, 6, 4, 19, 16, 19, 2, 19, 16, 17, 1, 0, 4, 12, 13, 13, 5, 6],
        [0, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 3, 2, 2, 2, 2, 3, 2, 5, 0, 0, 1, 6, 0, 1,
         7, 6, 8, 4, 4, 5, 7, 4, 4, 6, 6, 7, 2, 11, 10, 10, 2, 2, 7, 10, 11, 10, 6, 6],
    ),
]
# fmt: on


@pytest.mark.parametrize(("plan", "options", "ordinals", "occurrences"), SMALL)
def test_small_orders_are_golden(
    plan: Callable[[], Plan], options: dict, ordinals: list[int], occurrences: list[int]
) -> None:
    """Twenty samples in five shards, in every way that an order can be made."""
    assert order_of(plan(), **options) == (ordinals, occurrences)


@pytest.mark.parametrize(
    ("plan", "digest"),
    [
        (lambda: large(), "4a747892b664999f2ccab5708fdfdeb52dc1671c15986aeff480cce26c2cfc6f"),
        (
            lambda: large(num_slices=4, shuffle_window=5_000_000),
            "f0c32c9daf80148738fb7e10a1e9447f305cab9ddfeb1512bb6df44119b37671",
        ),
        (
            lambda: large(oversample={3: 2.5, 7: 0.25, 9: 0}, shuffle_window=5_000_000),
            "cc55d6ab7b41f8084be55dfb4d23d382ac1d057d00dda7c3330af69f089ef705",
        ),
        (
            lambda: large(epoch_samples=30_000, epoch=9),
            "be2ad3c7968928cf3c410ace630250e67688e5ddfacbd52a07e039005d9276a1",
        ),
        (
            lambda: large(sets=True, weights=(0.2, 0.8), shuffle_window=5_000_000),
            "9eee23534b4c6bd734739b3f565106bd8ae9f857a7d5ceb8431e2231a5e4a69a",
        ),
        (lambda: large(sets=True, shuffle=False), "b2fc7e67646a3a7b8fd285f73e1eb75a0f59305c6d1549106cc41d3a7182f122"),
    ],
)
def test_large_orders_are_golden(plan: Callable[[], Plan], digest: str) -> None:
    """SHA-256 of ordinals and occurrences of 200,000 samples, as little-endian int64."""
    state = hashlib.sha256()
    for column in order_of(plan(), batch_size=1000):
        state.update(np.array(column, np.int64).astype("<i8").tobytes())
    assert state.hexdigest() == digest
