"""Which samples, and how often: exact counts a class, another draw each pass, a digest of what was chosen."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dali_pipes.order.selection import BLOCK_POSITIONS, Copies, Mix, Selection, mixed_length, split_by_weight

LABELS = np.array([3, 3, 3, 3, 8, 8, 8, 5, 5, 5])
NO_SELECTION_DIGEST = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def copies_of(selection: Selection, *, seed: int, pass_: int) -> Copies | None:
    """How often each sample comes, if all shards are one data set; ``None``: each once."""
    copies = selection.part(0, selection.num_samples).copies(seed, pass_)
    if copies is None and len(selection.excluded):
        copies = np.ones(selection.num_samples, np.uint16)
        copies[selection.excluded] = 0
    return copies


def counts_of(selection: Selection, labels: np.ndarray, *, seed: int = 0, pass_: int = 0) -> dict[int, int]:
    copies = copies_of(selection, seed=seed, pass_=pass_)
    assert copies is not None
    return {int(label): int(copies[labels == label].sum()) for label in np.unique(labels)}


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (0, 0),
        (0.1, 0),  # 0.4 of a sample
        (0.5, 2),
        (0.625, 2),  # 2.5: half to even
        (0.875, 4),  # 3.5: half to even
        (1.0, 4),
        (1.5, 6),
        (2, 8),
        (2.25, 9),
        (65_536, 262_144),  # one more than 16 bits count
        (100_000, 400_000),
    ],
)
def test_a_class_has_exactly_its_share(factor: float, expected: int) -> None:
    """Four samples of class 3: round(4 * factor) a pass, shared out evenly; the other classes as they were."""
    selection = Selection(10, labels=LABELS, oversample={3: factor})
    for pass_ in range(3):
        copies = copies_of(selection, seed=1, pass_=pass_)
        if factor == 1:
            assert copies is None
            continue
        assert counts_of(selection, LABELS, seed=1, pass_=pass_) == {3: expected, 5: 3, 8: 3}
        assert copies is not None
        assert copies[:4].max() - copies[:4].min() <= 1
    assert selection.num_per_pass == expected + 6


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=60),
    st.dictionaries(st.integers(-3, 3), st.sampled_from([0, 0.3, 0.5, 1, 1.25, 3]), max_size=4),
    st.sets(st.integers(0, 59), max_size=30),
    st.integers(0, 3),
    st.integers(0, 60),
)
def test_counts_follow_factors_in_the_whole_and_in_parts(
    values: list[int], factors: dict[int, float], excluded: set[int], pass_: int, cut: int
) -> None:
    """What is excluded never comes; each class of the rest gives round(n * f), counted in each part apart."""
    labels = np.array(values)
    total, cut = len(labels), min(cut, len(labels))
    excluded = {ordinal for ordinal in excluded if ordinal < total}
    factors = {label: factor for label, factor in factors.items() if label in values}
    is_kept = np.ones(total, bool)
    is_kept[sorted(excluded)] = False

    def wanted(start: int, stop: int) -> int:
        found, counts = np.unique(labels[start:stop][is_kept[start:stop]], return_counts=True)
        return sum(
            round(num * factors.get(label, 1)) for label, num in zip(found.tolist(), counts.tolist(), strict=True)
        )

    if not wanted(0, total):
        with pytest.raises(ValueError, match="nothing to read"):
            Selection(total, excluded=sorted(excluded), labels=labels, oversample=factors)
        return
    selection = Selection(total, excluded=sorted(excluded), labels=labels, oversample=factors)
    copies = copies_of(selection, seed=3, pass_=pass_)
    copies = np.ones(total, np.int64) if copies is None else copies
    assert not copies[~is_kept].any()
    for label in set(values):
        num = int((is_kept & (labels == label)).sum())
        assert copies[labels == label].sum() == round(num * factors.get(label, 1))
    assert selection.num_per_pass == copies.sum() == wanted(0, total)
    assert copies.max() <= selection.part(0, total).max_copies
    for start, stop in ((0, cut), (cut, total)):
        part = selection.part(start, stop)
        assert part.num_per_pass == wanted(start, stop)
        drawn = part.copies(3, pass_)
        if drawn is not None:
            assert drawn.sum() == part.num_per_pass
            assert not drawn[~is_kept[start:stop]].any()
            assert part.min_copies is not None
            assert (drawn >= part.min_copies).all()


def test_digest_is_of_what_was_chosen() -> None:
    """However it is written, the same choice has the same digest; another has another."""
    nothing = [
        Selection(10),
        Selection(10, excluded=[]),
        Selection(10, labels=LABELS, oversample={}),
        Selection(10, labels=LABELS, oversample={3: 1, 8: 1.0}),
    ]
    assert {selection.digest for selection in nothing} == {NO_SELECTION_DIGEST}
    same = [
        Selection(10, excluded=[7, 1, 1, 8, 9], labels=LABELS, oversample={3: 2}),
        Selection(10, excluded=np.array([1, 7, 8, 9], np.int32), labels=LABELS, oversample={8: 1, 3: 2.0}),
        Selection(10, excluded=[1], labels=LABELS, oversample={3: 2, 5: 0}),
        Selection(10, excluded=[1, 7, 8, 9], labels=LABELS, oversample={5: 7, 3: 2}),
    ]
    assert len({selection.digest for selection in same}) == 1
    others = [
        same[0],
        nothing[0],
        Selection(10, excluded=[1]),
        Selection(10, excluded=[2]),
        Selection(10, excluded=[1, 2]),
        Selection(10, labels=LABELS, oversample={3: 2}),
        Selection(10, labels=LABELS, oversample={8: 2}),
        Selection(10, labels=LABELS, oversample={3: 2.5}),
    ]
    assert len({selection.digest for selection in others}) == len(others)


def test_digest_is_golden() -> None:
    """Kept in states: changing it refuses users' resumes."""
    assert Selection(10).digest == NO_SELECTION_DIGEST
    selection = Selection(10, excluded=[9, 2], labels=LABELS, oversample={3: 1.5, 8: 0.25})
    assert selection.digest == "9b39335d7ba5b1ba3361a422b01d6416ea71bbfcf7f8565cde7972cfd64b7eee"


@pytest.mark.parametrize(
    ("factors", "text"),
    [
        ({4: 2}, r"oversample names class 4, which no sample has \(found: 3, 5, 8\)"),
        ({3: -1}, r"oversample\[3\] must be a finite number, not negative, got -1"),
        ({3: float("nan")}, "not negative, got nan"),
        ({3: float("inf")}, "not negative, got inf"),
        ({3: "2"}, "not negative, got '2'"),
        ({3: True}, "not negative, got True"),
        ({3: 1e15}, "copies of a sample"),
        ({3: 0, 5: 0, 8: 0.1}, "nothing to read"),
    ],
)
def test_factors_that_cannot_be_are_refused(factors: dict, text: str) -> None:
    """Refused with the value in the text."""
    with pytest.raises(ValueError, match=text):
        Selection(10, labels=LABELS, oversample=factors)


def test_a_class_that_is_not_there_is_refused_with_eight_that_are() -> None:
    for num_classes, shown in ((8, r"\(found: 0, 1, 2, 3, 4, 5, 6, 7\)"), (9, r"\(found: 0, .* 7, \.\.\.\)")):
        with pytest.raises(ValueError, match=shown):
            Selection(9, labels=np.arange(9) % num_classes, oversample={99: 2})


def test_selections_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to read: 10 samples, 10 excluded"):
        Selection(10, excluded=range(10))
    for label in (True, "3", 2**63):
        with pytest.raises(TypeError, match="oversample must name classes by integers"):
            Selection(10, labels=LABELS, oversample={label: 2})


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


@settings(max_examples=80, deadline=None)
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


@settings(max_examples=50, deadline=None)
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
