"""The plan: who gets what, when; tables for the small cases, properties for all others."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dali_pipes.plan import OrderInputs, Plan, Step, cut_windows, excluded_digest, num_steps

GOLDEN_ALL = [7, 6, 8, 1, 11, 4, 2, 9, 10, 3, 5, 0]
GOLDEN_WINDOWED = [7, 8, 11, 9, 10, 6, 4, 5, 1, 2, 3, 0]
POLICIES = ("FILL", "DROP", "PARTIAL")


def plan_of(samples: list[int], *, excluded: tuple[int, ...] = (), **order: object) -> Plan:
    counts = np.array(samples)
    return Plan(shard_bytes=counts * 10 + 1, shard_samples=counts, order=OrderInputs(**order), excluded=excluded)


def order_of(plan: Plan) -> list[int]:
    return [ordinal for step in plan.steps(batch_size=plan.order.num_slices) for ordinal in step.ordinals.tolist()]


@pytest.mark.parametrize(
    ("num_samples", "global_batch_size", "policy", "expected"),
    [
        (7, 2, "DROP", 3),  # the seventh sample is dropped
        (7, 2, "FILL", 4),
        (7, 2, "PARTIAL", 4),
        (6, 2, "DROP", 3),
        (6, 2, "PARTIAL", 3),
        (1, 8, "DROP", 0),  # an epoch smaller than a batch
        (1, 8, "FILL", 1),
        (0, 8, "PARTIAL", 0),
    ],
)
def test_num_steps(num_samples: int, global_batch_size: int, policy: str, expected: int) -> None:
    """Steps of an epoch, by policy."""
    assert num_steps(num_samples, global_batch_size=global_batch_size, last_batch_policy=policy) == expected


@pytest.mark.parametrize(
    ("policy", "rank", "expected"),
    [
        ("DROP", 0, [[0, 1]]),
        ("DROP", 1, [[2, 3]]),
        ("FILL", 0, [[0, 1], [4, 5]]),
        ("FILL", 1, [[2, 3], [6, 0]]),  # the epoch's first sample fills the last place
        ("PARTIAL", 0, [[0, 1], [4, 5]]),
        ("PARTIAL", 1, [[2, 3], [6]]),
    ],
)
def test_steps_seven_samples_two_ranks(policy: str, rank: int, expected: list[list[int]]) -> None:
    """The table in the docstring of `Plan.steps`."""
    plan = plan_of([3, 4], shuffle=False)
    steps = plan.steps(batch_size=2, rank=rank, world_size=2, last_batch_policy=policy)
    assert [step.ordinals.tolist() for step in steps] == expected


def test_steps_partial_rank_with_nothing_gets_an_invalid_sample() -> None:
    """Five samples, three ranks, batches of one: in the last step rank 2 has nothing, and says so."""
    plan = plan_of([5], shuffle=False)
    last = [list(plan.steps(batch_size=1, rank=rank, world_size=3))[-1] for rank in range(3)]
    assert [(step.ordinals.tolist(), step.num_valid) for step in last] == [([3], 1), ([4], 1), ([3], 0)]


def test_steps_fill_longer_than_the_epoch_repeats_it() -> None:
    """Two samples, a batch of five: repeated in order, each repeat a new occurrence with random numbers of its own."""
    (step,) = plan_of([2], shuffle=False).steps(batch_size=5, last_batch_policy="FILL")
    assert step.ordinals.tolist() == [0, 1, 0, 1, 0]
    assert step.occurrences.tolist() == [0, 0, 1, 1, 2]


def test_order_is_golden() -> None:
    """The order of a seed is the same on every machine and in every version: changing this breaks users' runs."""
    plan = plan_of([4, 3, 5], seed=7, epoch=1)
    assert order_of(plan) == GOLDEN_ALL
    windowed = plan_of([4, 3, 5], seed=7, epoch=1, shuffle_window=60)
    assert order_of(windowed) == GOLDEN_WINDOWED


def test_order_epochs_and_seeds_differ() -> None:
    """Another epoch, another seed: another order."""
    orders = [tuple(order_of(plan_of([50, 50], seed=seed, epoch=epoch))) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4


def test_order_all_is_a_global_shuffle() -> None:
    """With one window over a label-sorted set, any place of the order is as likely to hold any shard."""
    plan = plan_of([100] * 10, seed=5)
    first_half = plan.shard_of(np.array(order_of(plan)[:500]))
    counts = np.bincount(first_half, minlength=10)
    assert counts.sum() == 500
    assert counts.min() > 25  # 50 expected, standard deviation 3.6
    assert counts.max() < 75


def test_windows_hold_their_shards_only() -> None:
    """Each window's samples come from its shards, each once; its bytes stay under the bound."""
    plan = plan_of([5, 5, 5, 5, 5], seed=1, shuffle_window=110)
    windows = list(plan.windows())
    assert [len(window.shards) for window in windows] == [2, 2, 1]
    for window in windows:
        assert sorted(set(plan.shard_of(window.ordinals).tolist())) == sorted(window.shards.tolist())
        assert len(window.ordinals) == 5 * len(window.shards)


@pytest.mark.parametrize(
    ("shard_bytes", "window", "ramp_up", "expected"),
    [
        ([4, 4, 4, 4], "all", False, [(0, 4)]),
        ([4, 4, 4, 4], 8, False, [(0, 2), (2, 4)]),
        ([4, 4, 4, 4], 7, False, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ([9, 1], 4, False, [(0, 1), (1, 2)]),  # a shard larger than the window is a window
        ([1] * 9, "all", True, [(0, 1), (1, 3), (3, 7), (7, 9)]),
        ([1] * 9, 3, True, [(0, 1), (1, 3), (3, 6), (6, 9)]),  # the ramp ends where the window is full
        ([], "all", False, []),
    ],
)
def test_cut_windows(shard_bytes: list[int], window: int | str, ramp_up: bool, expected: list) -> None:
    """Where a list of shards is cut."""
    assert list(cut_windows(np.array(shard_bytes, np.int64), shuffle_window=window, ramp_up=ramp_up)) == expected


@st.composite
def cases(draw: st.DrawFn) -> dict:
    num_slices = draw(st.integers(1, 3))
    samples = draw(st.lists(st.integers(0 if num_slices == 1 else 1, 9), min_size=num_slices, max_size=8))
    total = sum(samples)
    return {
        "samples": samples if total else [1] * num_slices,
        "world_size": draw(st.integers(1, 5)),
        "batch_size": draw(st.integers(1, 4)) * num_slices,
        "policy": draw(st.sampled_from(POLICIES)),
        "order": {
            "seed": draw(st.integers(0, 3)),
            "epoch": draw(st.integers(0, 3)),
            "shuffle": draw(st.booleans()),
            "shuffle_window": draw(st.one_of(st.just("all"), st.integers(1, 300))),
            "ramp_up": draw(st.booleans()),
            "num_slices": num_slices,
        },
    }


def ranks_of(plan: Plan, case: dict, **options: int) -> list[list[Step]]:
    return [
        list(
            plan.steps(
                batch_size=case["batch_size"],
                rank=rank,
                world_size=case["world_size"],
                last_batch_policy=case["policy"],
                **options,
            )
        )
        for rank in range(case["world_size"])
    ]


@settings(max_examples=300, deadline=None)
@given(cases())
def test_steps_every_rank_as_many_and_every_sample_once(case: dict) -> None:
    """Ranks have the same number of steps, as `num_steps` says; together they hold the epoch, each sample once."""
    plan = plan_of(case["samples"], **case["order"])
    ranks = ranks_of(plan, case)
    global_batch_size = case["batch_size"] * case["world_size"]
    expected = num_steps(plan.num_samples, global_batch_size=global_batch_size, last_batch_policy=case["policy"])
    assert [len(steps) for steps in ranks] == [expected] * case["world_size"]
    valid = [
        (ordinal, occurrence)
        for steps in ranks
        for step in steps
        for ordinal, occurrence in zip(
            step.ordinals[: step.num_valid].tolist(), step.occurrences[: step.num_valid].tolist(), strict=True
        )
    ]
    assert all(len(step.ordinals) for steps in ranks for step in steps)
    assert len(set(valid)) == len(valid), "a repeat is another occurrence"
    if case["policy"] != "DROP":
        assert {ordinal for ordinal, _ in valid} == set(range(sum(case["samples"])))
    if case["policy"] == "PARTIAL" and case["order"]["num_slices"] == 1:
        assert len(valid) == sum(case["samples"])


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(1, 4))
def test_steps_union_does_not_depend_on_the_split(case: dict, other_world_size: int) -> None:
    """A step is the same set of samples for every split of the same global batch."""
    plan = plan_of(case["samples"], **case["order"])
    if case["policy"] == "PARTIAL":
        case["policy"] = "FILL"
    global_batch_size = case["batch_size"] * case["world_size"]
    whole = list(plan.steps(batch_size=global_batch_size, last_batch_policy=case["policy"]))
    for step, parts in zip(whole, zip(*ranks_of(plan, case), strict=True), strict=True):
        assert sorted(step.ordinals.tolist()) == sorted(itertools.chain(*(part.ordinals.tolist() for part in parts)))


@settings(max_examples=200, deadline=None)
@given(cases(), st.data())
def test_steps_from_a_position_are_the_rest(case: dict, data: st.DataObject) -> None:
    """Starting at step s gives what follows step s: nothing again, nothing left out, other window borders or not."""
    plan = plan_of(case["samples"], **case["order"])
    whole = ranks_of(plan, case)
    done = data.draw(st.integers(0, len(whole[0])))
    start = min(done * case["batch_size"] * case["world_size"], plan.num_samples)
    rest = ranks_of(plan, case, start=start)
    for all_steps, steps in zip(whole, rest, strict=True):
        assert [step.ordinals.tolist() for step in all_steps[done:]] == [step.ordinals.tolist() for step in steps]
        assert [step.occurrences.tolist() for step in all_steps[done:]] == [s.occurrences.tolist() for s in steps]


@settings(max_examples=100, deadline=None)
@given(cases(), st.sets(st.integers(0, 71), max_size=20))
def test_excluded_samples_never_come(case: dict, excluded: set[int]) -> None:
    """What is excluded is not read, everything else is; the order of the rest stays as it was with one window."""
    total = sum(case["samples"])
    left_out = tuple(ordinal for ordinal in excluded if ordinal < total)
    order = case["order"] | {"num_slices": 1, "shuffle_window": "all", "ramp_up": False}
    if len(left_out) == total:
        with pytest.raises(ValueError, match="nothing to read"):
            plan_of(case["samples"], excluded=left_out, **order)
        return
    rest = order_of(plan_of(case["samples"], excluded=left_out, **order))
    assert rest == [ordinal for ordinal in order_of(plan_of(case["samples"], **order)) if ordinal not in left_out]


def test_slices_each_step_takes_as_many_from_each() -> None:
    """Two slices, two ranks: a rank's batches come from one slice's shards, so that its node stages only those."""
    plan = plan_of([8, 8, 8, 8], seed=2, num_slices=2)
    shards = [
        {
            int(shard)
            for step in plan.steps(batch_size=4, rank=rank, world_size=2)
            for shard in plan.shard_of(step.ordinals)
        }
        for rank in (0, 1)
    ]
    assert [len(found) for found in shards] == [2, 2]
    assert not shards[0] & shards[1]


@pytest.mark.parametrize(
    ("order", "options", "text"),
    [
        ({"epoch": -1}, {}, "epoch must not be negative, got -1"),
        ({"shuffle_window": 0}, {}, "shuffle_window must be 'all' or a positive number of bytes, got 0"),
        ({"shuffle_window": "some"}, {}, "shuffle_window must be 'all' or a positive number of bytes, got 'some'"),
        ({"num_slices": 0}, {}, "num_slices must be positive, got 0"),
        ({"num_slices": 3}, {}, "num_slices must not exceed the number of shards, 2, got 3"),
        ({}, {"batch_size": 0}, "batch_size must be positive, got 0"),
        ({}, {"rank": 4, "world_size": 4}, r"rank must be in \[0, world_size\), got rank=4 with world_size=4"),
        ({}, {"last_batch_policy": "pad"}, "last_batch_policy must be one of FILL, DROP, PARTIAL, got 'pad'"),
        ({"num_slices": 2}, {"batch_size": 3}, r"num_slices must divide batch_size \* world_size, got 2 and 3 \* 1"),
    ],
)
def test_bad_arguments_are_refused(order: dict, options: dict, text: str) -> None:
    """Refused with the value in the text, before anything is read."""
    with pytest.raises(ValueError, match=text):
        plan_of([3, 4], **order).steps(**({"batch_size": 2} | options))


def test_excluded_digest_is_of_the_set() -> None:
    """Order and repeats of the keys do not matter; a key does."""
    assert excluded_digest(["b", "a"]) == excluded_digest(["a", "b", "a"])
    assert excluded_digest(["a"]) != excluded_digest(["ab"])
    assert excluded_digest(["a", "b"]) != excluded_digest(["ab"])


def test_plan_of_a_million_shards_stays_small() -> None:
    """The first batch of a million shards of a thousand samples each holds a window in memory, not the data set."""
    import tracemalloc

    count = 1_000_000
    tracemalloc.start()
    plan = Plan(
        shard_bytes=np.full(count, 100 << 20),
        shard_samples=np.full(count, 1000),
        order=OrderInputs(seed=1, shuffle_window=10 << 30),
    )
    step = next(plan.steps(batch_size=64, start=640_000_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert plan.num_samples == 1_000_000_000
    assert len(step.ordinals) == 64
    assert peak < 300 << 20, f"{peak >> 20} MiB; the ordinals alone would take 7,629"
