"""A loader's states: what they hold, which states a loader refuses, and what the error advises."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dali_pipes.order.inputs import OrderInputs, buckets
from dali_pipes.order.plan import Batching
from dali_pipes.order.selection import Selection
from dali_pipes.order.shaped import BucketGrouping
from dali_pipes.order.state import NUM_PLANS_KEPT, DataVersions, LoaderState, PlanInputs, StateError
from dali_pipes.processes.ranks import Rank
from tests.simulated import manifest_of

SHAPES = buckets(area=256 * 256, step=32, max_aspect=2)


def inputs(*, shapes: bool = False, group_size: int = 4, **changes: Any) -> PlanInputs:
    """Two data sets of 8 and 4 samples; with buckets, one data set of 12 samples."""
    manifest = manifest_of([4, 4, 4])
    grouping = BucketGrouping(np.arange(12, dtype=np.uint16) % 5, shapes=SHAPES.shapes, group_size=group_size)
    usual: dict[str, Any] = {
        "manifest": manifest,
        "set_shards": [3] if shapes else [2, 1],
        "set_names": [""] if shapes else ["a", "b"],
        "versions": DataVersions([1] if shapes else [1, 1], ["ais://p/s-"] if shapes else ["ais://p/a-", "ais://p/b-"]),
        "selection": Selection(12),
        "order": OrderInputs(seed=7, shapes=SHAPES if shapes else None),
        "grouping": grouping if shapes else None,
    }
    return PlanInputs(**(usual | changes))


def state_of(job: PlanInputs, *, epoch: int = 0, delivered: int = 0) -> LoaderState:
    return job.state(job.plan(epoch), delivered)


@pytest.mark.parametrize(
    "job",
    [
        inputs(),
        inputs(order=OrderInputs(weights=(0.3, 0.7), shuffle_window=50, epoch_samples=10)),
        inputs(shapes=True, group_size=6),
        inputs(versions=DataVersions([1, 3], ["a", "b"])),
    ],
)
def test_state_reads_back_from_json(job: PlanInputs) -> None:
    state = state_of(job, epoch=2, delivered=6)
    again = LoaderState.from_dict(json.loads(json.dumps(state.to_dict())))
    assert again == state
    assert (again.order.epoch, again.delivered) == (2, 6)
    assert again.data_versions == (tuple(job.versions.numbers) if max(job.versions.numbers) > 1 else ())
    job.check(replace(again, delivered=0))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": "state"}, r"expected what state_dict\(\) gave, got a dict with the keys \['kind', 'version'"),
        ({"version": 5}, "the state is of version 5, this dali-pipes reads version 6; continue with"),
        ({"delivered": -1}, "impossible values: delivered must not be negative, got -1"),
        ({"delivered": 1.5}, "impossible values: delivered must be an integer"),
        ({"epoch": -1}, "impossible values: epoch must not be negative, got -1"),
        ({"weights": ["x"]}, "impossible values: could not convert"),
        ({"weights": [1, 0]}, "impossible values: weights must be a tuple of positive numbers"),
        ({"data_versions": ["1"]}, "impossible values: data_versions must be an integer"),
        ({"shapes": {"area": 4}, "group_size": 4}, "impossible values: area must be at least"),
        ({"shapes": {"area": 65536}}, "the state has no 'group_size': it is not whole"),
    ],
)
def test_values_that_are_no_state_are_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(StateError, match=text):
        LoaderState.from_dict(state_of(inputs()).to_dict() | change)


def test_state_without_an_entry_is_refused() -> None:
    whole = state_of(inputs()).to_dict()
    for name in whole.keys() - {"kind", "version"}:
        with pytest.raises(StateError, match=f"the state has no '{name}': it is not whole"):
            LoaderState.from_dict({other: value for other, value in whole.items() if other != name})
    with pytest.raises(StateError, match=r"expected what state_dict\(\) gave, got \[1, 2\]"):
        LoaderState.from_dict([1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("job", "theirs", "text"),
    [
        (
            inputs(manifest=manifest_of([4, 4, 5]), selection=Selection(13), versions=DataVersions([1, 2], "ab")),
            {},
            "the state is of version 1 of 'b', this loader reads version 2; open 'b@1' to go on at the exact next",
        ),
        (inputs(), {"manifest": "0" * 64}, "the state is of other shards: its manifest is 000000000000..., this"),
        (inputs(selection=Selection(12, excluded=[3])), {}, "another selection of samples: .*; pass the same select="),
        (inputs(order=OrderInputs(seed=8)), {}, "the state has seed=7, this loader seed=8; pass the state's$"),
        (
            inputs(order=OrderInputs(seed=7, shuffle_window=50)),
            {},
            r"shuffle_window='all', this loader shuffle_window=50; .*window_bytes=\.\.\.",
        ),
        (
            inputs(order=OrderInputs(seed=7, weights=(1, 2))),
            {},
            r"weights=None, this loader weights=\(1, 2\); pass .*Mixture",
        ),
        (inputs(), {"delivered": 13}, "the state has 13 samples delivered, an epoch has 12$"),
    ],
)
def test_state_of_another_order_is_refused(job: PlanInputs, theirs: dict[str, Any], text: str) -> None:
    """The error names the difference and the option."""
    with pytest.raises(StateError, match=text):
        job.check(replace(state_of(inputs()), **theirs))


def test_every_position_of_a_plain_order_is_one_but_not_with_slices_or_buckets() -> None:
    """An epoch resumes where a step ends. At an epoch's start or end, groups may have another size."""
    for delivered in range(13):
        inputs().check(state_of(inputs(), delivered=delivered))
    sliced = inputs(set_shards=[3], set_names=[""], order=OrderInputs(seed=7, num_slices=2))
    sliced.check(state_of(sliced, delivered=4))
    with pytest.raises(StateError, match="the state has 5 samples delivered, and no step of epoch 0 ends there"):
        sliced.check(state_of(sliced, delivered=5))
    grouped = inputs(shapes=True, group_size=2)
    plan, batching = grouped.plan(0), Batching(batch_size=2)
    edges = [plan.position(num, batching) for num in range(plan.num_steps(batching) + 1)]
    for delivered in range(13):
        if delivered in edges:
            grouped.check(state_of(grouped, delivered=delivered))
            continue
        with pytest.raises(StateError, match=f"the state has {delivered} samples delivered, and no step of epoch 0"):
            grouped.check(state_of(grouped, delivered=delivered))
    other = inputs(shapes=True, group_size=3)
    for delivered in (0, 12):
        other.check(state_of(grouped, delivered=delivered))
    with pytest.raises(StateError, match=r"batch_size \* world_size 2, this loader has 3"):
        other.check(state_of(grouped, delivered=edges[1]))


def test_plans_of_buckets_are_kept_for_the_epochs_in_use() -> None:
    """A plan of buckets is expensive: it groups all samples."""
    job = inputs(shapes=True)
    plans = [job.plan(epoch) for epoch in range(NUM_PLANS_KEPT)]
    assert [job.plan(epoch) for epoch in range(NUM_PLANS_KEPT)] == plans
    job.plan(NUM_PLANS_KEPT)
    assert job.plan(1) is plans[1]
    assert job.plan(0) is not plans[0]


def test_ranks_of_a_job_are_told_by_the_same_values() -> None:
    """Ranks compare all values that must be the same on every rank. The rank is not one of the values."""
    first, second = (Batching(batch_size=2, process=Rank(rank=rank, world_size=2)) for rank in range(2))
    job = inputs()
    compared = job.compared(first, epoch=1, start=4)
    assert compared == job.compared(second, epoch=1, start=4)
    others = [job.compared(first, epoch=2, start=4), job.compared(first, epoch=1, start=8)]
    others += [job.compared(Batching(batch_size=3), epoch=1, start=4)]
    others += [inputs(selection=Selection(12, excluded=[3])).compared(first, epoch=1, start=4)]
    assert all(other.keys() == compared.keys() and other != compared for other in others)
    assert job.group == inputs().group
    changed = [inputs(order=OrderInputs(seed=8)), inputs(set_shards=[1, 2]), inputs(manifest=manifest_of([4, 3, 5]))]
    assert len({job.group, *(other.group for other in changed)}) == 4
