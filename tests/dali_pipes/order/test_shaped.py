"""Batches of one shape each: every sample once, the same steps on every rank, resumable at every step; against a model.

The model is a loop over the plain order: the samples of a window, dealt to lists by bucket and cut every so many.
"""

import hashlib
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dali_pipes.order.inputs import OrderInputs, buckets
from dali_pipes.order.plan import Batching, Plan, Step
from dali_pipes.order.selection import Selection
from dali_pipes.order.shaped import BucketGrouping, ShapedPlan
from dali_pipes.processes.ranks import Rank

SHAPES = buckets(area=256 * 256, step=32, max_aspect=2)  # five
Sample = tuple[int, int]  # ordinal, occurrence


def plans(
    counts: list[int], of: np.ndarray, *, size: int, sets: list[int] | None = None, **changes: Any
) -> tuple[Plan, ShapedPlan]:
    """The plain order and the shaped one of the same inputs."""
    samples = np.array(counts, np.int64)
    selected = {name: changes.pop(name) for name in ("excluded", "oversample") if name in changes}
    labels = np.arange(samples.sum(), dtype=np.int64) % 3
    inputs: dict[str, Any] = {
        "shard_bytes": samples * 10 + 1,
        "shard_samples": samples,
        "set_shards": sets,
        "selection": Selection(int(samples.sum()), labels=labels, **selected),
    }
    grouping = BucketGrouping(of, shapes=SHAPES.shapes, group_size=size)
    order = OrderInputs(**({"seed": 7} | changes))
    return Plan(order=order, **inputs), ShapedPlan(grouping=grouping, order=order, **inputs)


def dealt(size: int, *, rank: int = 0, world_size: int = 1, policy: str = "PARTIAL") -> Batching:
    process = Rank(rank=rank, world_size=world_size)
    return Batching(batch_size=size // world_size, process=process, last_batch_policy=policy)


def read(plan: Plan, *, world_size: int, size: int, policy: str = "PARTIAL", start: int = 0) -> list[list[Step]]:
    """For each step the batches of all ranks."""
    ranks = [
        plan.steps(dealt(size, rank=rank, world_size=world_size, policy=policy), start=start)
        for rank in range(world_size)
    ]
    return [list(steps) for steps in zip(*ranks, strict=True)]


def valid(step: list[Step]) -> list[Sample]:
    """The samples of a step that count, of all ranks."""
    return [
        sample
        for batch in step
        for sample in list(zip(batch.ordinals.tolist(), batch.occurrences.tolist(), strict=True))[: batch.num_valid]
    ]


def in_step_order(steps: list[list[Step]]) -> list[tuple[Any, ...]]:
    """What can be compared of steps."""
    return [
        tuple((b.ordinals.tolist(), b.occurrences.tolist(), b.num_valid, b.finished, b.shape) for b in step)
        for step in steps
    ]


def windows_of(plan: Plan) -> list[list[Sample]]:
    """The samples of each window in the plain order, one after the other: a window ends where `finished` says."""
    found: list[list[Sample]] = [[]]
    last = plan.finished_at(0)
    for (step,) in read(plan, world_size=1, size=1):
        found[-1] += valid([step])
        if step.finished != last:
            found.append([])
            last = step.finished
    return [window for window in found if window]


def model(windows: list[list[Sample]], of: np.ndarray, size: int) -> list[list[tuple[int, list[Sample]]]]:
    """For each window its groups: the bucket, and the samples."""
    found = []
    for window in windows:
        dealt: dict[int, list[Sample]] = defaultdict(list)
        for sample in window:
            dealt[int(of[sample[0]])].append(sample)
        groups = [(b, dealt[b][at : at + size]) for b in dealt for at in range(0, len(dealt[b]), size)]
        found.append(groups)
    return found


def expect(plain: Plan, shaped: ShapedPlan, *, world_size: int, size: int) -> None:
    """The promises of the shaped order, for all policies."""
    of, names = shaped.grouping.of, [tuple(shape) for shape in SHAPES.shapes.tolist()]
    windows = windows_of(plain) if shaped.num_sets == 1 else [[s for w in windows_of(plain) for s in w]]
    expected = model(windows, of, size)
    steps = read(shaped, world_size=world_size, size=size)
    # Every sample of the plain order comes once, however often it is repeated there.
    assert Counter(s for step in steps for s in valid(step)) == Counter(s for window in windows for s in window)
    assert shaped.num_samples == plain.num_samples == sum(map(len, windows))
    found = iter(steps)
    for number, groups in enumerate(expected):
        of_window = [next(found) for _ in groups]
        given = [(names.index(step[0].shape), valid(step)) for step in of_window]
        assert sorted(given) == sorted(groups), "the groups of a window are those of the model"
        if shaped.num_sets == 1 and number < len(expected) - 1:
            told = [step[0].finished for step in of_window]
            assert told == [(number,)] * (len(groups) - 1) + [(number + 1,)], "a window is given up with its last step"
        full = [len(group) == size for _, group in given]
        assert full == sorted(full, reverse=True), "short groups come last"
    for step in steps:
        assert len({batch.shape for batch in step}) == 1, "all ranks have one shape"
        sizes = [batch.num_valid for batch in step]
        assert max(sizes) - min(sizes) <= 1 or sum(sizes) == size
        assert all(len(batch.ordinals) == max(1, batch.num_valid) for batch in step)
        shape = {tuple(SHAPES.shapes[of[ordinal]]) for batch in step for ordinal in batch.ordinals}
        assert shape == {step[0].shape}
    dropped = read(shaped, world_size=world_size, size=size, policy="DROP")
    assert [valid(step) for step in dropped] == [valid(step) for step in steps if len(valid(step)) == size]
    filled = read(shaped, world_size=world_size, size=size, policy="FILL")
    assert [sorted(valid(step)) for step in filled] == [sorted(valid(step)) for step in steps]
    everything = []
    for step in filled:
        assert all(len(batch.ordinals) == size // world_size for batch in step)
        rows = [sample for b in step for sample in zip(b.ordinals.tolist(), b.occurrences.tolist(), strict=True)]
        assert {tuple(SHAPES.shapes[of[ordinal]]) for ordinal, _ in rows} == {step[0].shape}
        everything += rows
    assert len(set(everything)) == len(everything), "a repeated sample has other random numbers"


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    counts = draw(st.lists(st.integers(1, 12), min_size=1, max_size=7))
    num = sum(counts)
    world_size = draw(st.integers(1, 4))
    case: dict[str, Any] = {
        "counts": counts,
        "of": np.array(draw(st.lists(st.integers(0, 4), min_size=num, max_size=num)), np.uint16),
        "world_size": world_size,
        "size": world_size * draw(st.integers(1, 4)),
        "seed": draw(st.integers(0, 3)),
        "epoch": draw(st.integers(0, 3)),
        "shuffle": draw(st.booleans()),
        "shuffle_window": draw(st.sampled_from(["all", 50, 150])),
    }
    if draw(st.booleans()):
        case["excluded"] = draw(st.lists(st.integers(0, num - 1), max_size=num // 2, unique=True))
    if draw(st.booleans()) and num > 6 and len(case.get("excluded", ())) == 0:
        case["oversample"] = {0: draw(st.sampled_from([0.5, 2.0, 2.5]))}
    if draw(st.booleans()):
        case["epoch_samples"] = draw(st.integers(1, 2 * num))
    return case


@settings(max_examples=80, deadline=None)
@given(cases())
def test_steps_are_those_of_the_model(case: dict[str, Any]) -> None:
    """Any shards, buckets, windows, exclusions, factors, lengths and ranks."""
    world_size, size = case.pop("world_size"), case["size"]
    plain, shaped = plans(**case)
    expect(plain, shaped, world_size=world_size, size=size)


@settings(max_examples=30, deadline=None)
@given(cases(), st.sampled_from(["PARTIAL", "FILL", "DROP"]))
def test_resume_at_every_step_gives_the_rest(case: dict[str, Any], policy: str) -> None:
    """From the position after each step, on all ranks; and another split of the same product reads the same steps."""
    world_size, size = case.pop("world_size"), case["size"]
    _, shaped = plans(**case)
    how: dict[str, Any] = {"size": size, "policy": policy}
    steps = read(shaped, world_size=world_size, **how)
    batching = dealt(size, policy=policy)
    assert shaped.num_steps(batching) == len(steps)
    for taken in range(len(steps) + 1):
        position = shaped.position(taken, batching)
        assert shaped.last_edge(position) == position
        assert shaped.num_steps(batching, start=position) == len(steps) - taken
        rest = read(shaped, world_size=world_size, start=position, **how)
        assert in_step_order(rest) == in_step_order(steps[taken:])
        for num in range(len(rest) + 1):
            after = shaped.position(taken + num, batching) if num else position
            assert shaped.position(num, batching, start=position) == after
    alone = read(shaped, world_size=1, **how)
    assert [sorted(valid(step)) for step in alone] == [sorted(valid(step)) for step in steps]


@pytest.mark.parametrize("weights", [None, (0.5, 0.5)])
@pytest.mark.parametrize("epoch_samples", [None, 40])
def test_mixture_is_grouped_as_a_whole(weights: tuple[float, ...] | None, epoch_samples: int | None) -> None:
    """A group may have samples of several data sets, in the proportions of the mixture over the epoch."""
    of = (np.arange(33) * 7 % 5).astype(np.uint16)
    plain, shaped = plans([9, 8, 7, 9], of, size=4, sets=[1, 3], weights=weights, epoch_samples=epoch_samples)
    expect(plain, shaped, world_size=2, size=4)
    assert shaped.set_samples == plain.set_samples


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_slices": 2}, "buckets need slices=1, got 2"),
        ({"sets": [1, 2], "shuffle_window": 50}, "buckets of several data sets need an exact shuffle: .*'all'.*got"),
        ({"sets": [1, 2], "shuffle": False}, "need an exact shuffle: .* shuffle=False"),
    ],
)
def test_what_buckets_cannot_do_is_refused(changes: dict[str, Any], text: str) -> None:
    shapes = {"shapes": SHAPES} if "num_slices" in changes else {}
    with pytest.raises(ValueError, match=text):
        plans([4, 4, 4], np.zeros(12, np.uint16), size=4, **shapes, **changes)


@pytest.mark.parametrize(
    ("changes", "digest"),
    [
        ({}, "5d70b6fd1b3ff327"),
        ({"epoch": 2, "shuffle_window": 12_100}, "4293241fcae3890f"),
        ({"oversample": {1: 1.5}, "epoch_samples": 3000}, "00e209486c5ad867"),
    ],
)
def test_order_is_golden(changes: dict[str, Any], digest: str) -> None:
    """A job that is resumed with a later version goes on where it was; see `test_order_golden`."""
    of = (np.arange(4000, dtype=np.int64) * 31 % 7 % 5).astype(np.uint16)
    _, shaped = plans([400] * 10, of, size=12, **changes)
    state = hashlib.sha256()
    for policy in ("PARTIAL", "FILL", "DROP"):
        for (step,) in read(shaped, world_size=1, size=12, policy=policy):
            for column in (step.ordinals, step.occurrences, step.num_valid, *step.shape):
                state.update(np.asarray(column).astype("<i8").tobytes())
    assert state.hexdigest()[:16] == digest
