"""Batches with a budget of tokens: every photo once, as many batches on every rank, resumable; against a model."""

import hashlib
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dali_pipes.order.grouping import TokenGrouping
from dali_pipes.order.inputs import OrderInputs
from dali_pipes.order.plan import Plan
from dali_pipes.order.selection import Selection
from dali_pipes.order.shaped import ShapedPlan
from dali_pipes.order.shapes import shapes_from_dict
from dali_pipes.order.tokens import NUM_OPEN, TokenBudget, pack_photos, token_budget
from tests.dali_pipes.order.test_shaped import Sample, in_step_order, read, valid, windows_of


def plans(counts: list[int], tokens: np.ndarray, *, max_tokens: int, max_photos: int, **changes: Any) -> Any:
    """The plain order and the packed one of the same inputs."""
    samples = np.array(counts, np.int64)
    selected = {name: changes.pop(name) for name in ("excluded", "oversample") if name in changes}
    inputs: dict[str, Any] = {
        "shard_bytes": samples * 10 + 1,
        "shard_samples": samples,
        "set_shards": changes.pop("sets", None),
        "selection": Selection(int(samples.sum()), labels=np.arange(samples.sum(), dtype=np.int64) % 3, **selected),
        "order": OrderInputs(**({"seed": 7} | changes)),
    }
    budget = TokenBudget(max_tokens=max_tokens, max_photo_tokens=max_tokens)
    grouping = TokenGrouping(tokens, budget=budget, group_size=max_photos)
    return Plan(**inputs), ShapedPlan(grouping=grouping, **inputs)


def model(window: list[Sample], tokens: np.ndarray, *, max_tokens: int, max_photos: int) -> list[list[Sample]]:
    """First fit in the order of the window, with a bounded number of open batches, written as a loop."""
    batches: list[list[Sample]] = []
    is_open: list[bool] = []
    for sample in window:
        needed = tokens[sample[0]]
        for number, batch in enumerate(batches):
            used = sum(tokens[ordinal] for ordinal, _ in batch)
            if is_open[number] and used + needed <= max_tokens and len(batch) < max_photos and used < max_tokens:
                batch.append(sample)
                break
        else:
            still = [
                number
                for number, batch in enumerate(batches)
                if is_open[number]
                and len(batch) < max_photos
                and sum(tokens[ordinal] for ordinal, _ in batch) < max_tokens
            ]
            if len(still) == NUM_OPEN:
                is_open[still[0]] = False
            batches.append([sample])
            is_open.append(True)
    return batches


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    counts = draw(st.lists(st.integers(1, 30), min_size=1, max_size=5))
    num, max_tokens = sum(counts), draw(st.integers(1, 12))
    case: dict[str, Any] = {
        "counts": counts,
        "tokens": np.array(draw(st.lists(st.integers(1, max_tokens), min_size=num, max_size=num))),
        "max_tokens": max_tokens,
        "max_photos": draw(st.integers(1, 6)),
        "seed": draw(st.integers(0, 3)),
        "epoch": draw(st.integers(0, 3)),
        "shuffle": draw(st.booleans()),
        "shuffle_window": draw(st.sampled_from(["all", 150, 400])),
    }
    if draw(st.booleans()):
        case["excluded"] = draw(st.lists(st.integers(0, num - 1), max_size=num // 2, unique=True))
    elif draw(st.booleans()) and num > 6:
        case["oversample"] = {0: draw(st.sampled_from([0.5, 2.0, 2.5]))}
    if draw(st.booleans()):
        case["epoch_samples"] = draw(st.integers(1, 2 * num))
    return case


@settings(max_examples=120, deadline=None)
@given(cases(), st.integers(1, 4))
def test_batches_are_those_of_the_model(case: dict[str, Any], world_size: int) -> None:
    """Any shards, photos, windows and ranks; the budget is never exceeded, and every sample comes once."""
    plain, packed = plans(**case)
    size = {"max_tokens": case["max_tokens"], "max_photos": case["max_photos"]}
    how: dict[str, Any] = {"world_size": world_size, "size": world_size * case["max_photos"]}
    expected = [model(window, case["tokens"], **size) for window in windows_of(plain)]
    steps = read(packed, **how)
    assert Counter(s for step in steps for s in valid(step)) == Counter(s for w in windows_of(plain) for s in w)
    found = iter(steps)
    for batches in expected:
        for first in range(0, len(batches), world_size):
            step = next(found)
            for rank, batch in enumerate(step):
                if first + rank < len(batches):
                    assert valid([batch]) == batches[first + rank]
                    assert case["tokens"][batch.ordinals].sum() <= case["max_tokens"]
                    assert len(batch.ordinals) <= case["max_photos"]
                else:
                    assert (batch.num_valid, batch.ordinals.tolist()) == (0, step[0].ordinals[:1].tolist())
                assert batch.shape is packed.grouping.budget
    dropped = read(packed, policy="DROP", **how)
    assert [list(map(valid, ([b] for b in step))) for step in dropped] == [
        list(map(valid, ([b] for b in step))) for step in steps if all(batch.num_valid for batch in step)
    ]
    filled = read(packed, policy="FILL", **how)
    assert [valid(step) for step in filled] == [valid(step) for step in steps]
    rows = [
        row
        for step in filled
        for batch in step
        for row in zip(batch.ordinals.tolist(), batch.occurrences.tolist(), strict=True)
    ]
    assert len(set(rows)) == len(rows), "a repeated sample has other random numbers"
    assert all(case["tokens"][batch.ordinals].sum() <= case["max_tokens"] for step in filled for batch in step)
    samples = packed.samples_of_ranks(batch_size=case["max_photos"], world_size=world_size)
    assert samples.tolist() == [sum(step[rank].num_valid for step in steps) for rank in range(world_size)]


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from(["PARTIAL", "FILL", "DROP"]), st.integers(1, 3), st.integers(1, 4))
def test_resume_at_every_step_gives_the_rest(case: dict[str, Any], policy: str, before: int, after: int) -> None:
    """With the same number of ranks the same steps; with another one the same batches, from the next one on."""
    _, packed = plans(**case)
    steps = read(packed, world_size=before, size=before * case["max_photos"], policy=policy)
    sized: dict[str, Any] = {"global_batch_size": before * case["max_photos"], "last_batch_policy": policy}
    for taken in range(len(steps) + 1):
        position = packed.position(taken, **sized)
        assert packed.last_edge(position) == position
        assert packed.num_steps(start=position, **sized) == len(steps) - taken
        rest = read(packed, world_size=before, size=before * case["max_photos"], start=position, policy=policy)
        assert in_step_order(rest) == in_step_order(steps[taken:])
        if policy == "PARTIAL":
            other = read(packed, world_size=after, size=after * case["max_photos"], start=position)
            batches = [
                [valid([batch]) for step in found for batch in step if batch.num_valid] for found in (rest, other)
            ]
            assert batches[0] == batches[1]


def test_mixture_is_packed_as_a_whole() -> None:
    tokens = np.arange(33) % 7 + 1
    plain, packed = plans([9, 8, 7, 9], tokens, max_tokens=20, max_photos=8, sets=[1, 3], weights=(0.5, 0.5))
    window = [sample for part in windows_of(plain) for sample in part]
    steps = read(packed, world_size=1, size=8)
    assert [valid(step) for step in steps] == model(window, tokens, max_tokens=20, max_photos=8)


def test_order_is_golden() -> None:
    """A job that is resumed with a later version goes on where it was; see `test_order_golden`."""
    tokens = np.arange(4000) * 31 % 97 + 1
    _, packed = plans([400] * 10, tokens, max_tokens=400, max_photos=12, shuffle_window=12_100, epoch=1)
    state = hashlib.sha256()
    for policy in ("PARTIAL", "FILL", "DROP"):
        for step in read(packed, world_size=3, size=36, policy=policy):
            for batch in step:
                for column in (batch.ordinals, batch.occurrences, batch.num_valid):
                    state.update(np.asarray(column).astype("<i8").tobytes())
    assert state.hexdigest()[:16] == "a86e024be2644931"


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 6000),
    st.integers(1, 6000),
    st.integers(1, 32),
    st.integers(1, 400),
    st.one_of(st.none(), st.integers(1, 400)),
)
def test_grid_is_as_large_as_the_limit_allows(
    height: int, width: int, patch: int, limit: int, other: int | None
) -> None:
    """At most the limit, not enlarged, of about the photo's aspect ratio."""
    budget = token_budget(max_tokens=400, patch=patch, max_photo_tokens=limit)
    at_most = None if other is None else np.array([other])
    ((rows, columns),) = budget.grids(np.array([height]), np.array([width]), at_most=at_most).tolist()
    limit = other or limit
    assert 1 <= rows * columns <= limit
    assert rows <= max(1, height // patch)
    assert columns <= max(1, width // patch)
    scale = min(1, math.sqrt(limit * patch * patch / (height * width)))
    exact = (height * scale / patch, width * scale / patch)
    if min(exact) >= 1:
        assert abs(rows - exact[0]) <= 1 + 1e-9
        assert abs(columns - exact[1]) <= 1 + 1e-9
    if other is None:
        assert budget.tokens(np.array([height]), np.array([width])).tolist() == [rows * columns]


def test_full_budgets_are_nearly_filled() -> None:
    """First fit with eight open batches: seven photos of any size to a batch fill it to 96 %."""
    tokens = np.random.default_rng(0).integers(300, 900, 20_000).tolist()
    packed = pack_photos(tokens, max_tokens=4096, max_photos=64)
    assert sum(tokens) / (4096 * len(packed)) > 0.96


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"max_tokens": 0}, ValueError, "max_tokens must be positive, got 0"),
        ({"max_tokens": 9, "patch": 0}, ValueError, "patch must be positive, got 0"),
        ({"max_tokens": 9, "max_photo_tokens": 10}, ValueError, "max_photo_tokens must not exceed max_tokens, got 10"),
        ({"max_tokens": 9.0}, TypeError, "max_tokens must be an integer, got 9.0"),
        ({"max_tokens": 9, "photo": 1}, TypeError, "photo must be the name of a component, or None, got 1"),
    ],
)
def test_description_of_a_budget_is_checked(values: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        token_budget(**values)


def test_description_goes_through_plain_values() -> None:
    budget = token_budget(max_tokens=4096, patch=14, photo="jpg")
    assert shapes_from_dict(budget.to_dict()) == budget
