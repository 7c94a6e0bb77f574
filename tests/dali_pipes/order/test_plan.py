"""The plan: who gets what, when; tables for the small cases, properties for all others."""

import itertools
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from dali_pipes.order.inputs import OrderInputs
from dali_pipes.order.passes import NUM_PASSES_KEPT, cut_windows
from dali_pipes.order.plan import Plan, num_steps
from dali_pipes.order.reservation import reserved_bytes, slices_read
from dali_pipes.order.selection import BLOCK_POSITIONS, Mix, Selection, mixed_length, split_by_weight

POLICIES = ("FILL", "DROP", "PARTIAL")


def plan_of(samples: list[int], *, excluded: tuple[int, ...] = (), **order: object) -> Plan:
    counts = np.array(samples)
    selection = Selection(int(counts.sum()), excluded=excluded)
    return Plan(shard_bytes=counts * 10 + 1, shard_samples=counts, order=OrderInputs(**order), selection=selection)


def order_of(plan: Plan) -> list[int]:
    return [ordinal for step in plan.steps(batch_size=plan.order.num_slices) for ordinal in step.ordinals.tolist()]


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


def test_order_all_is_a_global_shuffle() -> None:
    """With one window over a label-sorted set, any place of the order is as likely to hold any shard."""
    plan = plan_of([100] * 10, seed=5)
    first_half = plan.shard_of(np.array(order_of(plan)[:500]))
    counts = np.bincount(first_half, minlength=10)
    assert counts.sum() == 500
    assert counts.min() > 25  # 50 expected, standard deviation 3.6
    assert counts.max() < 75


@pytest.mark.parametrize(
    ("shard_bytes", "window", "ramp_up", "expected"),
    [
        ([4, 4, 4, 4], "all", False, [(0, 4)]),
        ([4, 4, 4, 4], 8, False, [(0, 2), (2, 4)]),
        ([4, 4, 4, 4], 7, False, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ([9, 1], 4, False, [(0, 1), (1, 2)]),  # a shard larger than the window is a window
        ([1] * 9, "all", True, [(0, 1), (1, 3), (3, 7), (7, 9)]),
        ([1] * 9, 3, True, [(0, 1), (1, 3), (3, 6), (6, 9)]),  # the ramp ends where the window is full
        ([9, *[1] * 11], 8, True, [(0, 1), (1, 3), (3, 7), (7, 12)]),  # the ramp goes on after a large shard
        ([1, 9, *[1] * 10], 8, True, [(0, 1), (1, 2), (2, 6), (6, 12)]),
        ([], "all", False, []),
    ],
)
def test_cut_windows(shard_bytes: list[int], window: int | str, ramp_up: bool, expected: list) -> None:
    """Where a list of shards is cut."""
    assert list(cut_windows(np.array(shard_bytes, np.int64), shuffle_window=window, ramp_up=ramp_up)) == expected


def test_excluded_samples_leave_the_order_of_the_others() -> None:
    samples, left_out = [5, 3, 0, 6], (0, 4, 5, 13)
    rest = order_of(plan_of(samples, excluded=left_out, seed=3))
    assert rest == [ordinal for ordinal in order_of(plan_of(samples, seed=3)) if ordinal not in left_out]


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

    def copies(self, pass_: int) -> np.ndarray:
        """What each sample has in a pass, counted in its own data set."""
        selection, parts = self.selection(), []
        for start, stop in itertools.pairwise([0, *self.set_stops]):
            copies = selection.part(start, stop).copies(self.order.seed, pass_)
            if copies is None:
                copies = np.ones(stop - start, np.uint16)
                excluded = selection.excluded
                copies[excluded[(excluded >= start) & (excluded < stop)] - start] = 0
            parts.append(copies.astype(np.int64))
        return np.concatenate(parts)


# What a drawn plan may be refused for.
REFUSED = ("nothing to read", "slices must not exceed", "which no sample has", "leave no sample for data set")


def plan_or_reject(case: Mixed, **order: object) -> Plan:
    try:
        return case.plan(**order)
    except ValueError as exc:
        if not any(text in str(exc) for text in REFUSED):
            raise
        reject()


@st.composite
def mixed(draw: st.DrawFn, *, num_slices: int | None = None, lengths: bool = True) -> Mixed:
    num_slices = num_slices or draw(st.integers(1, 3))
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
    epoch_samples = draw(st.integers(1, 40)) * num_slices if lengths and draw(st.booleans()) else None
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
            ramp_up=draw(st.booleans()),
            num_slices=num_slices,
            epoch_samples=epoch_samples,
            weights=weights if lengths else None,
        ),
    )
    plan_or_reject(case)
    return case


def rows_of(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """The order and its occurrences: int64 [position, slice] each."""
    steps = list(plan.steps(batch_size=plan.order.num_slices))
    return np.array([step.ordinals for step in steps]), np.array([step.occurrences for step in steps])


@settings(max_examples=100, deadline=None)
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
        list(
            plan.steps(
                batch_size=batch_size,
                rank=rank,
                world_size=world_size,
                last_batch_policy=policy,
                start=start * num_slices,
            )
        )
        for rank in range(world_size)
    ]
    left = (len(ordinals) - start) * num_slices
    expected = num_steps(left, global_batch_size=batch_size * world_size, last_batch_policy=policy)
    assert [len(steps) for steps in ranks] == [expected] * world_size
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


@settings(max_examples=100, deadline=None)
@given(mixed(), st.integers(1, 60))
def test_occurrences_tell_repeats_apart(case: Mixed, batch_size: int) -> None:
    """However often an epoch has a sample, by factor, pass, wrap or `FILL`: another number each time."""
    plan = case.plan()
    steps = plan.steps(batch_size=batch_size * case.order.num_slices, last_batch_policy="FILL")
    seen = [pair for step in steps for pair in zip(step.ordinals.tolist(), step.occurrences.tolist(), strict=True)]
    assert len(set(seen)) == len(seen)


@settings(max_examples=100, deadline=None)
@given(mixed(lengths=False))
def test_an_epoch_without_a_length_has_every_sample(case: Mixed) -> None:
    """As often as its class's factor says; slices that wrap have some once more."""
    counts = np.bincount(rows_of(case.plan())[0].reshape(-1), minlength=int(case.samples.sum()))
    wanted = case.copies(case.order.epoch)
    if case.order.num_slices == 1:
        assert counts.tolist() == wanted.tolist()
    assert (counts >= wanted).all()
    assert not counts[wanted == 0].any()


@settings(max_examples=100, deadline=None)
@given(mixed())
def test_weights_give_exact_shares_and_every_sample(case: Mixed) -> None:
    """Each data set has its share of every epoch to the sample; without a length each sample comes at least once."""
    plan, order = case.plan(), case.order
    ordinals = rows_of(plan)[0]
    sets = np.searchsorted(case.set_stops, ordinals, side="right")
    counts = np.array([np.bincount(column, minlength=len(case.set_samples)) for column in sets.T])
    assert (counts == counts[0]).all(), "every slice has the same sets in the same order"
    assert counts.sum(axis=0).tolist() == list(plan.set_samples)
    assert (sets == sets[:, :1]).all()
    if order.epoch_samples is not None:
        assert plan.num_samples == order.epoch_samples
        assert plan.set_samples == case.plan(epoch=order.epoch + 1).set_samples
    if order.weights is not None:
        expected = split_by_weight(len(ordinals), order.weights)
        assert [num // order.num_slices for num in plan.set_samples] == expected
        if order.epoch_samples is None:
            assert set(np.flatnonzero(case.copies(order.epoch)).tolist()) <= set(ordinals.reshape(-1).tolist())


@settings(max_examples=100, deadline=None)
@given(mixed(num_slices=1), st.integers(1, 30))
def test_epochs_of_a_fixed_length_are_laps_one_after_the_other(case: Mixed, epoch_samples: int) -> None:
    """Every data set has all of a pass before any of the next, wherever epochs end: each sample as often as it must."""
    plans = [plan_or_reject(case, epoch=epoch, epoch_samples=epoch_samples) for epoch in range(6)]
    stream = np.concatenate([rows_of(plan)[0][:, 0] for plan in plans])
    sets = np.searchsorted(case.set_stops, stream, side="right")
    starts = [0, *case.set_stops]
    for number, (start, stop) in enumerate(itertools.pairwise(starts)):
        read = stream[sets == number]
        per_lap = case.selection().part(start, stop).num_per_pass
        for pass_ in range(len(read) // per_lap):
            counts = np.bincount(read[pass_ * per_lap : (pass_ + 1) * per_lap] - start, minlength=stop - start)
            assert counts.tolist() == case.copies(pass_)[start:stop].tolist()


def test_fixed_length_with_slices_goes_on_where_the_last_epoch_stopped() -> None:
    """Two slices of uneven shards: each epoch begins where the one before ended, in passes that wrap as epochs do."""
    samples = [5, 3, 6, 2, 9]
    options = {"seed": 3, "num_slices": 2, "shuffle_window": 60}
    rows = np.concatenate(
        [rows_of(plan_of(samples, epoch=epoch, epoch_samples=10, **options))[0] for epoch in range(9)]
    )
    passes = np.concatenate([rows_of(plan_of(samples, epoch=pass_, **options))[0] for pass_ in range(4)])
    assert len(rows) == 45
    assert np.array_equal(rows, passes[: len(rows)])


def test_a_job_goes_on_with_other_ranks() -> None:
    """Three ranks, then six, then two, each with a batch of its own: together one epoch, every sample as planned."""
    case = Mixed(
        set_samples=[[9, 4, 7, 8], [5, 6, 3]],
        shard_bytes=[90, 41, 72, 80, 51, 60, 33],
        excluded=[2, 30],
        oversample={1: 1.5},
        order=OrderInputs(seed=5, shuffle_window=150, weights=(0.6, 0.4)),
    )
    plan = case.plan()
    expected = rows_of(plan)[0][:, 0].tolist()
    read: list[int] = []
    for world_size, batch_size, num in ((3, 2, 3), (6, 3, 1), (2, 5, None)):
        start = len(read)
        steps = [
            list(plan.steps(batch_size=batch_size, rank=rank, world_size=world_size, start=start))[:num]
            for rank in range(world_size)
        ]
        for step in zip(*steps, strict=True):
            read += itertools.chain(*(part.ordinals[: part.num_valid].tolist() for part in step))
    assert read == expected


@settings(max_examples=100, deadline=None)
@given(mixed(), st.integers(1, 8), st.integers(1, 4), st.data())
def test_what_is_staged_covers_every_step_and_fits_the_promise(
    case: Mixed, world_size: int, batch_size: int, data: st.DataObject
) -> None:
    """A step names shards of windows that are not finished; those that it spans fit what the rank asked room for."""
    plan, num_slices = case.plan(), case.order.num_slices
    batch_size *= num_slices
    start = data.draw(st.integers(0, plan.num_samples // num_slices - 1), label="start") * num_slices
    rank = data.draw(st.integers(0, world_size - 1), label="rank")
    read = plan.lanes_of(batch_size=batch_size, rank=rank, world_size=world_size)
    needed = plan.bytes_at_a_time(case.extents, read, global_batch_size=batch_size * world_size)
    num_sets = len(case.set_samples)
    sets = np.searchsorted(case.set_stops, rows_of(plan)[0][:, 0], side="right")
    windows = {lane: dict(plan.windows_ahead(lane, start=start)) for lane in read}
    done = plan.finished_at(start)
    for lane, numbers in windows.items():
        first = min(numbers, default=done[lane])
        assert first == done[lane]
        assert list(numbers) == list(range(first, first + len(numbers)))
    whole = batch_size * world_size
    for number, step in enumerate(
        plan.steps(batch_size=batch_size, rank=rank, world_size=world_size, last_batch_policy="PARTIAL", start=start)
    ):
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


@settings(max_examples=100, deadline=None)
@given(mixed())
def test_what_is_reserved_holds_two_windows_of_every_strand(case: Mixed) -> None:
    """Whichever epoch: the promise of the start covers any two windows in a row, of all data sets and slices read."""
    order = case.order
    reserved = reserved_bytes(
        case.extents,
        np.array(case.shard_bytes),
        case.samples,
        order=order,
        global_batch_size=order.num_slices,
        num_slices_read=len(slices_read(order, batch_size=order.num_slices, rank=0, world_size=1)),
        set_shards=case.set_shards,
        selection=case.selection(),
    )
    assert reserved <= case.extents.sum()
    for epoch in range(3):
        plan = case.plan(epoch=epoch)
        lanes = plan.lanes_of(batch_size=order.num_slices)
        assert lanes == list(range(plan.num_sets * order.num_slices))
        pairs = []
        for lane in lanes:
            windows = [shards for _, shards in plan.windows_ahead(lane)]
            held = [np.unique(np.concatenate(pair)) for pair in itertools.pairwise(windows)] or windows
            pairs.append(max(held, key=lambda shards: case.extents[shards].sum()))
        assert case.extents[np.unique(np.concatenate(pairs))].sum() <= reserved


def test_a_shard_of_which_nothing_is_left_is_in_no_window() -> None:
    """Excluded whole, of a class with factor 0, or empty: it is never staged, and slices share out the others."""
    samples = np.array([3, 3, 0, 3, 3, 3])
    labels = np.repeat(np.array([0, 1, 2, 3, 4]), 3)
    selection = Selection(15, excluded=[0, 1, 2, 14], labels=labels, oversample={2: 0})
    plan = Plan(
        shard_bytes=samples * 10 + 1,
        shard_samples=samples,
        order=OrderInputs(seed=1, num_slices=3, shuffle_window=31),
        selection=selection,
    )
    staged = [
        sorted(np.concatenate([shards for _, shards in plan.windows_ahead(slice_)]).tolist()) for slice_ in range(3)
    ]
    assert sorted({shard for shards in staged for shard in shards}) == [1, 4, 5]
    assert [len(set(shards)) for shards in staged] == [1, 1, 1]


def test_copies_of_a_sample_lie_in_its_window() -> None:
    """A class that stands for three has its copies among the samples of its window, not one after the other."""
    samples = np.full(8, 50)
    labels = np.tile(np.array([0, 1]), 200)
    selection = Selection(400, labels=labels, oversample={1: 3})
    plan = Plan(
        shard_bytes=samples,
        shard_samples=samples,
        order=OrderInputs(seed=2, shuffle_window=100),
        selection=selection,
    )
    ordinals = rows_of(plan)[0][:, 0]
    for number, (_, shards) in enumerate(plan.windows_ahead()):
        window = ordinals[200 * number : 200 * number + 200]
        counts = Counter(window.tolist())
        assert sorted(set(plan.shard_of(window).tolist())) == sorted(shards.tolist())
        assert counts == {ordinal: 3 if ordinal % 2 else 1 for ordinal in counts}
        assert len(counts) == 100
        assert np.count_nonzero(np.diff(window) == 0) < 10


@pytest.mark.parametrize(
    ("num", "weights", "expected"),
    [
        (10, (0.7, 0.2, 0.1), [7, 2, 1]),
        (10, (1, 1, 1), [4, 3, 3]),  # equal remainders: the first data set's
        (100, (0.3, 0.7), [30, 70]),  # as written, not as binary fractions
        (7, (1e-9, 1), [0, 7]),
        (10**15, (1, 2), [333333333333333, 666666666666667]),
    ],
)
def test_split_by_weight(num: int, weights: tuple[float, ...], expected: list[int]) -> None:
    """Shares by largest remainder."""
    assert split_by_weight(num, weights) == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 10**12), st.floats(1e-3, 1e3)), min_size=1, max_size=5))
def test_mixed_length_is_the_shortest_that_has_all(sets: list[tuple[int, float]]) -> None:
    """Every data set has at least its length; in an epoch one sample shorter, one of them by weight has less."""
    lengths, weights = [length for length, _ in sets], [weight for _, weight in sets]
    total = mixed_length(lengths, weights)
    shares = split_by_weight(total, weights)
    assert sum(shares) == total
    assert all(share >= length for share, length in zip(shares, lengths, strict=True))
    assert any(
        (total - 1) * weight / sum(weights) < length * (1 + 1e-9)
        for length, weight in zip(lengths, weights, strict=True)
    )


@pytest.mark.parametrize("shuffle", [True, False])
def test_mix_keeps_its_proportions_all_along(shuffle: bool) -> None:
    """At every prefix each data set has its share to within a bound that does not grow; without a shuffle, evenly."""
    lengths = [30_000, 15_000, 4_500, 500]
    mix = Mix(lengths, seed=4, epoch=1, shuffle=shuffle)
    sets = mix.sets(0, mix.length)
    counts = np.stack([np.cumsum(sets == number) for number in range(4)], axis=1)
    assert counts[-1].tolist() == lengths
    share = np.arange(1, mix.length + 1)[:, None] * np.array(lengths) / mix.length
    worst = np.abs(counts - share).max()
    # In a random block of 4,096, half of it one data set's: standard deviation 32 / 2 half-way.
    assert BLOCK_POSITIONS == 4096
    assert 10 < worst < 150 if shuffle else worst < 4


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30_000), min_size=1, max_size=6), st.booleans(), st.data())
def test_mix_is_the_same_from_anywhere(lengths: list[int], shuffle: bool, data: st.DataObject) -> None:
    """Any range of positions is what it is in the whole; what comes before is counted without a replay."""
    whole = Mix(lengths, seed=1, epoch=2, shuffle=shuffle).sets(0, sum(lengths))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, len(whole)), st.integers(0, len(whole)))))
    mix = Mix(lengths, seed=1, epoch=2, shuffle=shuffle)
    assert mix.before(start) == np.bincount(whole[:start], minlength=len(lengths)).tolist()
    assert np.array_equal(mix.sets(start, stop), whole[start:stop])
    num = data.draw(st.integers(1, 10_000))
    wrapped = np.concatenate([whole, whole])
    for number in range(len(lengths)):
        held = np.concatenate([[0], np.cumsum(wrapped == number)])
        assert max(np.diff(held[:: min(num, len(held) - 1)]), default=0) <= mix.most_of(number, num)
        assert (held[num:] - held[:-num]).max(initial=0) <= mix.most_of(number, num)


def test_mix_of_a_trillion_samples_costs_a_block() -> None:
    """A position in the middle of ten to the twelfth is found at once: products beyond 64 bits are exact."""
    mix = Mix([7 * 10**11, 3 * 10**11], seed=0, epoch=0, shuffle=True)
    before = mix.before(5 * 10**11)
    assert sum(before) == 5 * 10**11
    assert abs(before[0] - 35 * 10**10) < BLOCK_POSITIONS


def test_many_laps_keep_few_in_memory() -> None:
    """A small data set of which an epoch has a thousand passes: only those that are read are kept."""
    samples = np.array([1000, 1, 2])
    plan = Plan(
        shard_bytes=samples,
        shard_samples=samples,
        order=OrderInputs(weights=(0.25, 0.75)),
        set_shards=[1, 2],
    )
    assert plan.set_samples == (1000, 3000)
    counts = np.bincount(rows_of(plan)[0][:, 0], minlength=1003)
    assert counts[:1000].tolist() == [1] * 1000
    assert counts[1000:].tolist() == [1000] * 3
    assert len(plan._spans[1].passes._passes) <= NUM_PASSES_KEPT


@pytest.mark.parametrize(
    ("order", "options", "text"),
    [
        ({"epoch": -1}, {}, "epoch must not be negative, got -1"),
        ({"shuffle_window": 0}, {}, "window_bytes must be 'all' or a positive number of bytes, got 0"),
        ({"shuffle_window": "some"}, {}, "window_bytes must be 'all' or a positive number of bytes, got 'some'"),
        ({"num_slices": 0}, {}, "slices must be positive, got 0"),
        ({"num_slices": 3}, {}, "slices must not exceed the number of shards, 2, got 3"),
        ({"epoch_samples": 0}, {}, "epoch_samples must be positive, got 0"),
        (
            {"num_slices": 2, "epoch_samples": 3},
            {},
            "epoch_samples must be a multiple of slices, got 3 and 2; pass 4",
        ),
        ({"weights": (1, 0)}, {}, r"weights must be a tuple of positive numbers, got \(1.0, 0.0\)"),
        ({"weights": (float("nan"), 1)}, {}, "weights must be a tuple of positive numbers"),
        ({"weights": (1,)}, {}, r"weights are for several data sets, one each, got \(1.0,\) for 1"),
        ({}, {"batch_size": 0}, "batch_size must be positive, got 0"),
        ({}, {"rank": 4, "world_size": 4}, r"rank must be in \[0, world_size\), got rank=4 with world_size=4"),
        ({}, {"last_batch_policy": "pad"}, "last_batch_policy must be one of FILL, DROP, PARTIAL, got 'pad'"),
        ({"num_slices": 2}, {"batch_size": 3}, r"slices must divide batch_size \* world_size, got 2 and 3 \* 1"),
    ],
)
def test_bad_arguments_are_refused(order: dict, options: dict, text: str) -> None:
    """Refused with the value in the text, before anything is read."""
    with pytest.raises(ValueError, match=text):
        plan_of([3, 4], **order).steps(**({"batch_size": 2} | options))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"set_shards": [1, 2]}, r"set_shards must be positive numbers that add up to 2 shards, got \[1, 2\]"),
        ({"set_shards": [2, 0]}, "set_shards must be positive numbers"),
        (
            {"set_shards": [1, 1], "order": OrderInputs(weights=(1, 1, 1))},
            r"weights are for several data sets, one each, got \(1.0, 1.0, 1.0\) for 2",
        ),
        ({"set_shards": [1, 1], "order": OrderInputs(num_slices=2)}, "number of shards, 1, got 2"),
        ({"selection": Selection(8)}, "the selection is of 8 samples, the shards have 7"),
        (
            {"set_shards": [1, 1], "selection": Selection(7, excluded=[0, 1, 2])},
            "nothing to read in data set '0': 3 samples, 3 excluded; select other samples",
        ),
        (
            {"order": OrderInputs(num_slices=2), "selection": Selection(7, excluded=[0, 1, 2])},
            "slices must not exceed the number of shards with anything left to read, 1, got 2",
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
