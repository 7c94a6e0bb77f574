"""The plan: who gets what, when; tables for the small cases, properties for all others."""

import itertools
import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from dali_pipes.order.inputs import OrderInputs
from dali_pipes.order.passes import cut_windows, reserved_bytes
from dali_pipes.order.plan import Batching, Plan
from dali_pipes.order.randomness import Stream
from dali_pipes.order.selection import Selection
from dali_pipes.processes.ranks import Rank

POLICIES = ("FILL", "DROP", "PARTIAL")


def plan_of(samples: list[int], *, excluded: tuple[int, ...] = (), **order: object) -> Plan:
    counts = np.array(samples)
    selection = Selection(int(counts.sum()), excluded=excluded)
    return Plan(shard_bytes=counts * 10 + 1, shard_samples=counts, order=OrderInputs(**order), selection=selection)


def dealt(batch_size: int, *, rank: int = 0, world_size: int = 1, policy: str = "PARTIAL") -> Batching:
    return Batching(batch_size=batch_size, process=Rank(rank=rank, world_size=world_size), last_batch_policy=policy)


def of_one_class(num: int, *, factor: float) -> Selection:
    return Selection(num, labels=np.zeros(num, np.int64), oversample={0: factor})


def order_of(plan: Plan) -> list[int]:
    return [ordinal for step in plan.steps(dealt(plan.order.num_slices)) for ordinal in step.ordinals.tolist()]


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
    steps = plan.steps(dealt(2, rank=rank, world_size=2, policy=policy))
    assert [step.ordinals.tolist() for step in steps] == expected


def test_steps_partial_rank_with_nothing_gets_an_invalid_sample() -> None:
    """Five samples, three ranks, batches of one: in the last step rank 2 has nothing, and says so."""
    plan = plan_of([5], shuffle=False)
    last = [list(plan.steps(dealt(1, rank=rank, world_size=3)))[-1] for rank in range(3)]
    assert [(step.ordinals.tolist(), step.num_valid) for step in last] == [([3], 1), ([4], 1), ([3], 0)]


def test_steps_fill_longer_than_the_epoch_repeats_it() -> None:
    """Two samples, a batch of five: repeated in order, each repeat a new occurrence with random numbers of its own."""
    (step,) = plan_of([2], shuffle=False).steps(dealt(5, policy="FILL"))
    assert step.ordinals.tolist() == [0, 1, 0, 1, 0]
    assert step.occurrences.tolist() == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("shard_bytes", "window", "expected"),
    [
        ([4, 4, 4, 4], "all", [(0, 4)]),
        ([4, 4, 4, 4], 8, [(0, 2), (2, 4)]),
        ([4, 4, 4, 4], 7, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ([9, 1], 4, [(0, 1), (1, 2)]),  # a shard larger than the window is a window
        ([], "all", []),
    ],
)
def test_cut_windows(shard_bytes: list[int], window: int | str, expected: list) -> None:
    """Where a list of shards is cut."""
    assert list(cut_windows(np.array(shard_bytes, np.int64), shuffle_window=window)) == expected


def test_excluded_samples_leave_the_order_of_the_others() -> None:
    samples, left_out = [5, 3, 0, 6], (0, 4, 5, 13)
    rest = order_of(plan_of(samples, excluded=left_out, seed=3))
    assert rest == [ordinal for ordinal in order_of(plan_of(samples, seed=3)) if ordinal not in left_out]


@dataclass(kw_only=True)
class Mixed:
    """A plan that may have everything: several data sets, slices, windows, factors, a length, weights."""

    set_samples: list[list[int]]
    shard_bytes: list[int]
    excluded: list[int]
    oversample: dict[int, float]
    order: OrderInputs
    num_classes: int = 3
    extents: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        sizes = np.array(self.shard_bytes)
        self.extents = -(-sizes // 16) * 16 + 16

    @property
    def samples(self) -> np.ndarray:
        return np.array(list(itertools.chain(*self.set_samples)))

    @property
    def set_shards(self) -> list[int]:
        return [len(shards) for shards in self.set_samples]

    @property
    def set_stops(self) -> list[int]:
        return list(itertools.accumulate(sum(shards) for shards in self.set_samples))

    def selection(self) -> Selection:
        total = int(self.samples.sum())
        labels = np.arange(total, dtype=np.int64) * 7 % self.num_classes
        return Selection(total, excluded=self.excluded, labels=labels, oversample=self.oversample)

    def plan(self, **order: object) -> Plan:
        return Plan(
            shard_bytes=np.array(self.shard_bytes),
            shard_samples=self.samples,
            order=replace(self.order, **order),
            set_shards=self.set_shards,
            selection=self.selection(),
        )


# What a drawn plan may be refused for.
REFUSED = ("nothing to read", "slices must not exceed", "which no sample has", "leave no sample for data set")


@st.composite
def mixed(draw: st.DrawFn) -> Mixed:
    num_slices = draw(st.integers(1, 3))
    num_sets = draw(st.integers(1, 3))
    least = 0 if draw(st.booleans()) else 1
    set_samples = [
        draw(st.lists(st.integers(least, 7), min_size=num_slices, max_size=num_slices + 4)) for _ in range(num_sets)
    ]
    total = sum(map(sum, set_samples))
    num_shards = sum(map(len, set_samples))
    weights = None
    if num_sets > 1 and draw(st.booleans()):
        weights = tuple(draw(st.lists(st.sampled_from([0.1, 0.3, 0.5, 1.0, 2]), min_size=num_sets, max_size=num_sets)))
    epoch_samples = draw(st.integers(1, 40)) * num_slices if draw(st.booleans()) else None
    case = Mixed(
        set_samples=set_samples,
        shard_bytes=draw(st.lists(st.integers(1, 60), min_size=num_shards, max_size=num_shards)),
        excluded=sorted(draw(st.sets(st.integers(0, max(0, total - 1)), max_size=total // 2))) if total else [],
        oversample=draw(st.dictionaries(st.integers(0, 2), st.sampled_from([0, 0.5, 1, 1.5, 2.7]), max_size=3)),
        order=OrderInputs(
            seed=draw(st.integers(0, 3)),
            epoch=draw(st.integers(0, 4)),
            shuffle=draw(st.booleans()),
            shuffle_window=draw(st.one_of(st.just("all"), st.integers(1, 200))),
            num_slices=num_slices,
            epoch_samples=epoch_samples,
            weights=weights,
        ),
    )
    try:
        case.plan()
    except ValueError as exc:
        if not any(text in str(exc) for text in REFUSED):
            raise
        reject()
    return case


def rows_of(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """The order and its occurrences: int64 [position, slice] each."""
    steps = list(plan.steps(dealt(plan.order.num_slices)))
    return np.array([step.ordinals for step in steps]), np.array([step.occurrences for step in steps])


@settings(max_examples=40, deadline=None)
@given(mixed(), st.integers(1, 8), st.integers(1, 4), st.sampled_from(POLICIES), st.data())
def test_steps_cut_one_order_whatever_the_batch_and_wherever_they_start(
    case: Mixed, world_size: int, batch_size: int, policy: str, data: st.DataObject
) -> None:
    """Ranks are disjoint and complete, batches as many on each; all is one order, which no option changes."""
    plan, num_slices = case.plan(), case.order.num_slices
    ordinals, occurrences = rows_of(plan)
    assert ordinals.size == plan.num_samples == sum(plan.set_samples)
    batch_size *= num_slices
    global_rows = batch_size * world_size // num_slices
    start = data.draw(st.integers(0, len(ordinals)), label="start")
    ranks = [
        list(plan.steps(dealt(batch_size, rank=rank, world_size=world_size, policy=policy), start=start * num_slices))
        for rank in range(world_size)
    ]
    left = (len(ordinals) - start) * num_slices
    expected = (math.floor if policy == "DROP" else math.ceil)(left / (batch_size * world_size))
    assert [len(steps) for steps in ranks] == [expected] * world_size
    batching = dealt(batch_size, world_size=world_size, policy=policy)
    assert plan.num_steps(batching, start=start * num_slices) == expected
    for number, step in enumerate(zip(*ranks, strict=True)):
        first = start + number * global_rows
        places = np.arange(first, first + global_rows)
        repeats = places >= len(ordinals)
        assert all(part.num_valid in (0, len(part.ordinals)) for part in step) or policy == "FILL"
        valid = [part.ordinals[: part.num_valid] for part in step]
        assert np.array_equal(np.concatenate(valid), ordinals[places[~repeats]].T.reshape(-1))
        if policy == "FILL":  # each rank's block, repeated samples behind those that count
            whole = ordinals[places % len(ordinals)].T.reshape(world_size, batch_size)
            counts = np.tile(~repeats, (num_slices, 1)).reshape(world_size, batch_size)
            for part, block, is_valid in zip(step, whole, counts, strict=True):
                assert part.ordinals.tolist() == [*block[is_valid], *block[~is_valid]]
        if not repeats.any():
            assert np.array_equal(
                np.concatenate([part.occurrences for part in step]), occurrences[places].T.reshape(-1)
            )
        # What is read to its end does not depend on where reading began.
        assert len({part.finished for part in step}) == 1
        stop = min(first + global_rows, len(ordinals)) * num_slices
        assert step[0].finished == plan.finished_at(stop)


@settings(max_examples=40, deadline=None)
@given(mixed(), st.integers(1, 8), st.integers(1, 4), st.data())
def test_what_is_staged_covers_every_step_and_fits_the_promise(
    case: Mixed, world_size: int, batch_size: int, data: st.DataObject
) -> None:
    """A step names shards of windows that are not finished; those that it spans fit what the rank asked room for."""
    plan, num_slices = case.plan(), case.order.num_slices
    batch_size *= num_slices
    start = data.draw(st.integers(0, plan.num_samples // num_slices - 1), label="start") * num_slices
    rank = data.draw(st.integers(0, world_size - 1), label="rank")
    batching = dealt(batch_size, rank=rank, world_size=world_size)
    read, needed = plan.lanes_of(batching), plan.bytes_at_a_time(case.extents, batching)
    num_sets = len(case.set_samples)
    sets = np.searchsorted(case.set_stops, rows_of(plan)[0][:, 0], side="right")
    windows = {lane: dict(plan.windows_ahead(lane, start=start)) for lane in read}
    done = plan.finished_at(start)
    for lane, numbers in windows.items():
        first = min(numbers, default=done[lane])
        assert first == done[lane]
        assert list(numbers) == list(range(first, first + len(numbers)))
    whole = batch_size * world_size
    for number, step in enumerate(plan.steps(batching, start=start)):
        assert all(now >= before for now, before in zip(step.finished, done, strict=True))
        if start + (number + 1) * whole <= plan.num_samples:  # a short step is dealt to ranks of other slices, too
            held = []
            first_row = (start + number * whole) // num_slices
            for lane in read:
                rows = first_row + np.flatnonzero(sets[first_row : first_row + whole // num_slices] == lane % num_sets)
                # From the first window that is not given up to the one that is read last: two, if fewer are read.
                last = done[lane] + 1
                if len(rows):
                    last = max(last, plan.finished_at(int(rows[-1]) * num_slices)[lane])
                held += [windows[lane][n] for n in range(done[lane], last + 1) if n in windows[lane]]
            resident = np.unique(np.concatenate(held)) if held else np.empty(0, np.int64)
            assert set(plan.shard_of(step.ordinals).tolist()) <= set(resident.tolist())
            assert case.extents[resident].sum() <= needed
        done = step.finished


@settings(max_examples=80, deadline=None)
@given(mixed(), st.integers(1, 3), st.integers(1, 30), st.data())
def test_what_is_reserved_is_enough_for_every_epoch(
    case: Mixed, world_size: int, batch_size: int, data: st.DataObject
) -> None:
    """A loader reserves bytes before it plans an epoch. They cover the bytes that each plan needs at a time."""
    order = case.order
    batching = dealt(
        batch_size * order.num_slices, rank=data.draw(st.integers(0, world_size - 1)), world_size=world_size
    )
    reserved = reserved_bytes(
        case.extents,
        np.array(case.shard_bytes),
        case.samples,
        order=order,
        global_batch_size=batching.global_batch_size,
        num_slices_read=len(batching.slices_read(order.num_slices)),
        set_shards=case.set_shards,
        selection=case.selection(),
    )
    assert reserved <= case.extents.sum()
    for epoch in range(5):
        assert case.plan(epoch=epoch).bytes_at_a_time(case.extents, batching) <= reserved


def test_two_windows_are_reserved_or_all_shards_that_a_step_spans() -> None:
    """Windows of two shards. Of shards with one sample, a step of 20 begins in one window and ends in the 11th."""
    shard_bytes, extents, order = np.full(100, 50), np.full(100, 60), OrderInputs(shuffle_window=100)
    for num_samples, step, expected in ((100, 20, 4), (1, 20, 22), (1, 4, 6)):
        samples = np.full(100, num_samples)
        plan = Plan(shard_bytes=shard_bytes, shard_samples=samples, order=order)
        assert plan.bytes_at_a_time(extents, dealt(step)) == 60 * expected
        reserved = reserved_bytes(extents, shard_bytes, samples, order=order, global_batch_size=step)
        assert reserved == 60 * expected
    # Of 100 samples in a shard a pass draws one, or none, or several: the bound is that of shards with one.
    options = {"global_batch_size": 20, "selection": of_one_class(10_000, factor=0.01)}
    assert reserved_bytes(extents, shard_bytes, np.full(100, 100), order=order, **options) == 60 * 22
    # All samples are left out but the first one of each shard, or of each second shard.
    for every, step, expected in ((100, 20, 22), (200, 10_000, 50)):
        left_out = Selection(10_000, excluded=np.flatnonzero(np.arange(10_000) % every))
        options = {"global_batch_size": step, "selection": left_out}
        assert reserved_bytes(extents, shard_bytes, np.full(100, 100), order=order, **options) == 60 * expected


def test_equal_random_words_keep_the_order_of_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardly ever two are equal. Here half of all are: shards, samples, and those of a class that come once more."""
    monkeypatch.setattr(Stream, "words", lambda self, values, **options: np.asarray(values).astype(np.uint64) % 2)
    samples = np.full(100, 10)
    plan = Plan(shard_bytes=samples, shard_samples=samples, order=OrderInputs())
    listed = [10 * shard + place for shard in [*range(0, 100, 2), *range(1, 100, 2)] for place in range(10)]
    assert order_of(plan) == sorted(listed, key=lambda ordinal: ordinal % 2)
    copies = of_one_class(8, factor=1.25).part(0, 8).copies(0, 0)
    assert copies is not None
    assert copies.tolist() == [2, 1, 2, 1, 1, 1, 1, 1]


def test_a_shard_of_which_nothing_is_left_is_in_no_window() -> None:
    """Excluded whole, of a class with factor 0, or empty: it is never staged, and slices share out the others."""
    samples = np.array([3, 3, 0, 3, 3, 3])
    selection = Selection(15, excluded=[0, 1, 2, 14], labels=np.repeat(np.arange(5), 3), oversample={2: 0})
    order = OrderInputs(seed=1, num_slices=3, shuffle_window=31)
    plan = Plan(shard_bytes=samples * 10 + 1, shard_samples=samples, order=order, selection=selection)
    staged = [np.concatenate([shards for _, shards in plan.windows_ahead(slice_)]).tolist() for slice_ in range(3)]
    assert sorted({shard for shards in staged for shard in shards}) == [1, 4, 5]
    assert [len(set(shards)) for shards in staged] == [1, 1, 1]


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ({"epoch": -1}, "epoch must not be negative, got -1"),
        ({"shuffle_window": 0}, "window_bytes must be 'all' or a positive number of bytes, got 0"),
        ({"num_slices": 0}, "slices must be positive, got 0"),
        ({"num_slices": 3}, "slices must not exceed the number of shards, 2, got 3"),
        ({"num_slices": 2, "epoch_samples": 3}, "epoch_samples must be a positive multiple of slices, got 3 and 2"),
        ({"weights": (1, 0)}, r"weights must be a tuple of positive numbers, got \(1, 0\)"),
        ({"weights": (float("nan"), 1)}, "weights must be a tuple of positive numbers"),
    ],
)
def test_bad_arguments_are_refused(order: dict, text: str) -> None:
    """Refused with the value in the text, before anything is read."""
    with pytest.raises(ValueError, match=text):
        plan_of([3, 4], **order)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"set_shards": [1, 1], "order": OrderInputs(num_slices=2)}, "number of shards, 1, got 2"),
        (
            {"set_shards": [1, 1], "selection": Selection(7, excluded=[0, 1, 2])},
            "nothing to read in data set '0': 3 samples, 3 excluded; select other samples",
        ),
        (
            {"order": OrderInputs(num_slices=2), "selection": Selection(7, excluded=[0, 1, 2])},
            "slices must not exceed the number of shards with anything left to read, 1, got 2",
        ),
        (
            {"order": OrderInputs(num_slices=2), "selection": of_one_class(7, factor=0.3)},
            "slices must not exceed the number of shards that every pass reads, 1, got 2",
        ),
        (
            {"set_shards": [1, 1], "order": OrderInputs(weights=(0.99, 0.01), epoch_samples=7)},
            "epoch_samples=7 in 1 slices leave no sample for data set '1', whose share of them is too small; pass more",
        ),
    ],
)
def test_plans_that_cannot_be_are_refused(options: dict, text: str) -> None:
    """Two shards of three and four samples; refused with what was found."""
    samples = np.array([3, 4])
    with pytest.raises(ValueError, match=text):
        Plan(**({"shard_bytes": samples, "shard_samples": samples, "order": OrderInputs()} | options))
