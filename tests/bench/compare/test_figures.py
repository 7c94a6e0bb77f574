"""Figures, and the number of accelerators that a loader can feed, are computed correctly from measured times."""

from dataclasses import replace
from typing import Any

import pytest

from bench.compare.au import Accelerator, AuScenario, num_fed, point_of, search
from bench.compare.settings import DataFacts, TurnSetting
from bench.compare.turn import Drawn, LoaderTurn, RankTurn, TimedEpoch, figures_of
from bench.engine.scenario import run_scenario
from bench.loaders.protocol import LoaderOptions
from bench.loaders.registry import LoaderSpec
from bench.reports.figures import FIGURES
from dali_pipes.errors import PipesError
from dali_pipes.store.shard_set import ShardSet
from tests.bench.conftest import CROP

FACTS = DataFacts(num_samples=30, num_shards=2, shard_bytes=3 << 20, needed_bytes=2000, digest="d")


def drawn(num_samples: int, *, waits: tuple[float, ...], elapsed_s: float, epochs: int = 2, **used: Any) -> Drawn:
    whole = TimedEpoch(num_samples, elapsed_s, waits, 0.5, first_samples=0, first_step_s=0, computed_s=0)
    empty = TimedEpoch(0, 0, (), 0, first_samples=0, first_step_s=0, computed_s=0)
    return Drawn(epochs=(whole, *[empty] * (epochs - 1)), **used)


def rank(first: Drawn, steady: Drawn) -> RankTurn:
    return RankTurn(first=first, steady=steady, num_workers=0, decode="dali", device="cpu", gives=())


def test_figures_of_two_ranks_over_two_epochs() -> None:
    """Figures cover both ranks: one loads 40 samples in 10 s, the other loads 20 samples in 8 s."""
    turn = LoaderTurn(
        ranks=(
            rank(  # this rank measures CPU time and bytes
                drawn(20, waits=(2.0, 1.0), elapsed_s=4, epochs=1, cpu_s=9.0, num_bytes=2200),
                drawn(40, waits=(1.0, 0.5, 0.5, 0.5), elapsed_s=10, cpu_s=3.0, num_bytes=1000),
            ),
            rank(drawn(10, waits=(3.0,), elapsed_s=5, epochs=1), drawn(20, waits=(2.0, 0.0), elapsed_s=8)),
        ),
        start_mib=100,
        peak_mib=340,
        shared_memory_mib=7,
    )
    setting = TurnSetting(batch_size=10, ranks=2, threads=1, compute_ms=1500.0)
    found = figures_of(turn, setting=setting, facts=FACTS)
    assert found == pytest.approx(
        {
            "samples_per_s": 60 / 10,  # the epoch ends with the slower rank
            "mib_per_s": 2 * 3 / 10,
            "cpu_ms_per_sample": 1000 * 3 / 60,
            "time_to_first_batch_s": 3.0,  # the first wait of the slower rank
            "batch_p50_ms": 500,  # the median of 0, 0.5, 0.5, 0.5, 1, 2 s
            "batch_p99_ms": 2000,
            "batch_max_ms": 2000,
            "wait_share": (2.5 + 0.5 + 2.0 + 0.5) / 18,
            # As in MLPerf Storage, without each rank's first wait: 4 steps of 1.5 s in 10 - 1 s, 2 steps in 8 - 2 s.
            "accelerator_utilisation": ((4 * 1.5) / (10 - 1) + (2 * 1.5) / (8 - 2)) / 2,
            "peak_memory_mib": 340,
            "loader_memory_mib": 240,
            "memory_mib_per_sample": 240 / 20,
            "shared_memory_mib": 7,
            "fetched_ratio": 1000 / 2 / 2000,
            "first_fetched_ratio": 2200 / 2000,
            "first_epoch_s": 5,
        }
    )
    assert list(found) == sorted(found, key=list(found).index)
    assert set(found) < set(FIGURES)


PATIENT = Accelerator(name="patient", batch_size=3, compute_s=0.02)


def scenario(shards: ShardSet, options: LoaderOptions, accelerator: Accelerator, **given: Any) -> AuScenario:
    own = replace(options, recipe="classification", mask=None)
    setting = TurnSetting(crop=CROP, threads=1)
    return AuScenario(
        shards=shards,
        loaders=[LoaderSpec(name="dali")],
        accelerator=accelerator,
        options=own,
        settings=(setting,),
        repeats=1,
        steps=3,
        **given,
    )


def test_number_of_accelerators_is_found_by_emulation(pets: ShardSet, options: LoaderOptions) -> None:
    """Every host reaches this low target, so the search ends at its limit, with and without decoding."""
    found = run_scenario(scenario(pets, options, PATIENT, target=0.001, most=2))
    assert [row["setting"]["recipe"] for row in found["records"]] == ["classification", "encoded"]
    for row in found["records"]:
        (turn,) = row["repeats"]
        points, figures = turn["trials"], turn["figures"]
        assert [point["accelerators"] for point in points] == [1, 2]
        assert all(0 < point["utilisation"] <= 1 for point in points)
        assert all(point["late_share"] >= 0 for point in points), "no sleep ends early"
        assert (figures["accelerators"], figures["share"]) == (2, 2.0)
        assert row["outputs"]["num_samples"] == 22


# Three steps of 10 samples, a second each: the first batch comes after 4 s, the next two after 0 and 1 s.
STARVED_ONCE = TimedEpoch(30, 8.0, (4.0, 0.0, 1.0), 0.0, first_samples=10, first_step_s=5.0, computed_s=3.0)
PERFECT = TimedEpoch(30, 3.0, (0.0,), 0.0, first_samples=10, first_step_s=1.0, computed_s=3.0)
TEN = Accelerator(name="ten", batch_size=10, compute_s=1.0)


def turn_of(*ranks: list[TimedEpoch]) -> LoaderTurn:
    """A turn of ranks with these epochs; its CPU time is 0.6 s."""
    made = [Drawn(epochs=tuple(epochs), cpu_s=0.6) for epochs in ranks]
    return LoaderTurn(ranks=tuple(rank(one, one) for one in made), start_mib=1, peak_mib=1, shared_memory_mib=0)


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
    ],
)
def test_utilisation_leaves_out_the_first_step_of_each_epoch(epochs: list[TimedEpoch], expected: float) -> None:
    """As DLIO computes it, with nominal times."""
    assert point_of(turn_of(epochs), TEN).utilisation == pytest.approx(expected)


def test_point_is_the_mean_of_its_ranks() -> None:
    """Two ranks of three steps: one never waits, the other half of the time after its first step; steps are late."""
    ranks = [[PERFECT._replace(elapsed_s=seconds, computed_s=3.3)] for seconds in (3.0, 5.0)]
    found = point_of(turn_of(*ranks), TEN)
    assert found.accelerators == 2
    assert found.utilisation == pytest.approx((1.0 + 0.5) / 2)
    assert found.samples_per_s == pytest.approx(60 / 5)
    assert found.cpu_ms_per_sample == pytest.approx(10.0)
    assert found.late_share == pytest.approx(0.1)
    with pytest.raises(PipesError, match=r"one of 1 accelerators had a single step .*: --samples, and --num-shards"):
        point_of(turn_of([PERFECT._replace(num_samples=10)]), TEN)


@pytest.mark.parametrize(
    ("able", "limit", "tried"),
    [
        (0, 64, [1]),
        (2, 64, [1, 2, 4, 3]),
        (5, 64, [1, 2, 4, 8, 6, 5]),
        (5, 5, [1, 2, 4, 5]),  # the limit itself is tried
        (100, 6, [1, 2, 4, 6]),
    ],
)
def test_search_finds_the_largest_number_in_few_trials(able: int, limit: int, tried: list[int]) -> None:
    """A host that feeds ``able`` accelerators."""
    found = search(lambda number: 1.0 if number <= able else 0.5, target=0.9, limit=limit)
    assert list(found) == tried
    assert num_fed(found, target=0.9)[0] == min(able, limit)
