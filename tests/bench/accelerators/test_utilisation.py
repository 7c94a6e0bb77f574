"""The utilisation of emulated accelerators against cases worked out by hand, and the search for their number."""

import math
import threading
from collections.abc import Callable, Sequence

import pytest

from bench.accelerators.known import ACCELERATORS, Accelerator
from bench.accelerators.utilisation import EpochTimes, late_share, num_fed, search, share_fed, utilisation
from bench.compare.pace import Pace
from bench.engine.turn_process import fork_server

# Three steps of 10 samples, a second each: the first batch comes after 4 s, the next two after 0 and 1 s.
STARVED_ONCE = EpochTimes(num_samples=30, elapsed_s=8.0, first_samples=10, first_step_s=5.0, computed_s=3.0)
PERFECT = EpochTimes(num_samples=30, elapsed_s=3.0, first_samples=10, first_step_s=1.0, computed_s=3.0)


@pytest.mark.parametrize(
    ("epochs", "expected"),
    [
        ([PERFECT], 1.0),
        ([STARVED_ONCE], 2 / 3),  # the first wait, 4 s, does not count
        ([PERFECT, STARVED_ONCE], (1 + 2 / 3) / 2),  # each epoch has its own first step
        ([PERFECT._replace(elapsed_s=4.0)], 2 / 3),  # 1 s until the loader says that there are no more batches
        ([PERFECT._replace(num_samples=25)], 0.75),  # a last batch of half the size has half a step: 1.5 of 2 s
        ([PERFECT._replace(computed_s=4.5)], 1.0),  # nominal times count, not those of the sleeps
        ([PERFECT, PERFECT._replace(num_samples=10, elapsed_s=9.0)], 1.0),  # an epoch of one step says nothing
        ([PERFECT._replace(num_samples=10, elapsed_s=1.0)], None),
    ],
)
def test_utilisation_leaves_out_the_first_step_of_each_epoch(epochs: list[EpochTimes], expected: float | None) -> None:
    """As DLIO computes it, with nominal times."""
    assert utilisation(epochs, batch_size=10, compute_s=1.0) == (None if expected is None else pytest.approx(expected))


def test_steps_that_take_longer_than_they_should_are_late() -> None:
    """Six steps of a second that took 6.3 s."""
    epochs = [PERFECT, PERFECT._replace(computed_s=3.3)]
    assert late_share(epochs, batch_size=10, compute_s=1.0) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("able", "limit", "tried"),
    [
        (0, 64, [1]),
        (1, 64, [1, 2]),
        (2, 64, [1, 2, 4, 3]),
        (5, 64, [1, 2, 4, 8, 6, 5]),
        (5, 5, [1, 2, 4, 5]),  # the limit itself is tried
        (9, 1, [1]),
        (100, 6, [1, 2, 4, 6]),
    ],
)
def test_search_finds_the_largest_number_in_few_trials(able: int, limit: int, tried: list[int]) -> None:
    """A host that feeds ``able`` accelerators."""
    found = search(lambda number: 1.0 if number <= able else 0.5, target=0.9, limit=limit)
    assert list(found) == tried
    assert num_fed(found, target=0.9) == min(able, limit)


@pytest.mark.parametrize(
    ("found", "whole", "share"),
    [
        ({1: 0.45}, 0, 0.5),
        ({1: 0.9}, 1, 1.0),  # the limit was 1
        ({1: 0.99, 2: 0.6}, 1, 2 * 0.6 / 0.9),
        ({1: 0.99, 2: 0.98, 4: 0.5, 3: 0.75}, 2, 2.5),
        ({1: 0.99, 2: 0.3}, 1, 1.0),  # two disturb each other: the share is never below the number
        ({1: 0.99, 2: 0.5, 4: 0.95}, 1, 2 * 0.5 / 0.9),  # beyond one that is starved nothing counts
    ],
)
def test_share_goes_on_from_the_first_number_that_is_too_many(
    found: dict[int, float], whole: int, share: float
) -> None:
    """By hand."""
    assert num_fed(found, target=0.9) == whole
    assert share_fed(found, target=0.9) == pytest.approx(share)


def test_accelerators_of_mlperf_storage() -> None:
    """Their batch sizes and times, and the rates that follow."""
    assert {name: (one.batch_size, one.compute_s) for name, one in ACCELERATORS.items()} == {
        "resnet50_h100": (400, 0.224),
        "resnet50_a100": (400, 0.435),
        "retinanet_b200": (24, 0.04755),
        "retinanet_mi355": (32, 0.0634),
    }
    assert round(ACCELERATORS["resnet50_h100"].samples_per_s) == 1786
    assert round(ACCELERATORS["retinanet_b200"].samples_per_s) == 505


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100", "--au expects one of resnet50_h100, .*, or NAME:BATCH:SECONDS .*, got 'h100'"),
        ("mine:8", "got 'mine:8'"),
        (":8:0.1", "got ':8:0.1'"),
        ("mine:8:0.1:3", "got 'mine:8:0.1:3'"),
        ("mine:eight:0.1", "got 'mine:eight:0.1'"),
        ("mine:0:0.1", "'mine': the batch must have at least 1 sample, got 0"),
        ("mine:8:0", "'mine': a step must take more than 0 and less than 60 s, got 0"),
        ("mine:8:nan", "'mine': a step must take more than 0 and less than 60 s, got nan"),
    ],
)
def test_accelerator_that_is_none_is_refused(text: str, message: str) -> None:
    """With the forms that are known."""
    with pytest.raises(ValueError, match=message):
        Accelerator.parse(text)
    assert Accelerator.parse("mine:8:0.5") == Accelerator(name="mine", batch_size=8, compute_s=0.5)


def test_ranks_take_their_steps_together_until_one_has_no_more() -> None:
    """Two epochs of three ranks with 2, 4 and 5 steps: the first two steps are common, and nobody waits for ever."""
    pace = Pace.of(3, fork_server())
    assert pace is not None
    done = [0, 0, 0]
    seen: list[Sequence[int]] = []

    def take(rank: int, num_steps: int) -> None:
        for epoch in range(2):
            pace.begin_epoch()
            for step in range(num_steps):
                done[rank] += 1
                pace.end_step()
                if step < 1:
                    seen.append([count - (2, 4, 5)[other] * epoch for other, count in enumerate(done)])
            pace.end_epoch()

    _in_threads([lambda rank=rank, num=num: take(rank, num) for rank, num in enumerate((2, 4, 5))])
    assert done == [4, 8, 10]
    assert len(seen) == 6
    # After a rank's first step every rank has taken its first; the others may be on their way.
    assert all(min(counts) >= 1 for counts in seen)


def test_single_rank_waits_for_nobody() -> None:
    """So it has no pace."""
    assert Pace.of(1, fork_server()) is None


def _in_threads(calls: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)


def test_target_of_all_is_met_only_by_steps_without_a_wait() -> None:
    """Whatever rounding does to sums of seconds."""
    epochs = [EpochTimes(40, 4 * 0.1 + 1e-9, 10, 0.1, 0.4)]
    found = utilisation(epochs, batch_size=10, compute_s=0.1)
    assert found is not None
    assert math.isclose(found, 1.0, abs_tol=1e-6)
