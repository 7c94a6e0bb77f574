"""Figures come from what was measured as they are said to: waits, shares, utilisation, bytes, of all ranks together."""

from dataclasses import replace
from typing import Any

import pytest

from bench.compare.settings import DataFacts, TurnSetting, sweep
from bench.compare.turn import Drawn, LoaderTurn, RankTurn, TimedEpoch, figures_of
from bench.loaders.protocol import LoaderOptions
from bench.reports.figures import FIGURES
from bench.tools.step import open_step

FACTS = DataFacts(num_samples=30, num_shards=2, shard_bytes=3 << 20, needed_bytes=2000, digest="d")
FIRST: Any = {"cpu_s": 9.0, "num_bytes": 2200}
STEADY: Any = {"cpu_s": 3.0, "num_bytes": 1000}


def drawn(
    num_samples: int, *, waits: tuple[float, ...], elapsed_s: float, epochs: int = 2, ends_s: float = 0.5
) -> Drawn:
    whole = TimedEpoch(num_samples, elapsed_s, waits, ends_s, first_samples=0, first_step_s=0, computed_s=0)
    empty = TimedEpoch(0, 0, (), 0, first_samples=0, first_step_s=0, computed_s=0)
    return Drawn(epochs=(whole, *[empty] * (epochs - 1)))


def rank(first: Drawn, steady: Drawn | None, *, measures: bool) -> RankTurn:
    if measures:
        first, steady = replace(first, **FIRST), None if steady is None else replace(steady, **STEADY)
    return RankTurn(first=first, steady=steady, num_workers=0, decode="dali", device="cpu", gives=())


def test_figures_of_two_ranks_over_two_epochs() -> None:
    """Sixty samples: forty of one rank in ten seconds, twenty of the other in eight."""
    turn = LoaderTurn(
        ranks=(
            rank(
                drawn(20, waits=(2.0, 1.0), elapsed_s=4, epochs=1),
                drawn(40, waits=(1.0, 0.5, 0.5, 0.5), elapsed_s=10),
                measures=True,
            ),
            rank(
                drawn(10, waits=(3.0,), elapsed_s=5, epochs=1), drawn(20, waits=(2.0, 0.0), elapsed_s=8), measures=False
            ),
        ),
        start_mib=100,
        peak_mib=340,
        shared_memory_mib=7,
    )
    setting = TurnSetting(batch_size=10, ranks=2, threads=1, compute_ms=1500.0)
    found = figures_of(turn, setting=setting, facts=FACTS)
    assert found == pytest.approx(
        {
            "samples_per_s": 60 / 10,  # the slower rank ends the epoch
            "mib_per_s": 2 * 3 / 10,
            "cpu_ms_per_sample": 1000 * 3 / 60,
            "time_to_first_batch_s": 3.0,  # of the slower rank
            "batch_p50_ms": 500,  # of 0, 0.5, 0.5, 0.5, 1, 2
            "batch_p99_ms": 2000,
            "batch_max_ms": 2000,
            "wait_share": (2.5 + 0.5 + 2.0 + 0.5) / 18,
            # MLPerf Storage: 4 steps of 1.5 s in 10 s less the first wait; 2 steps in 8 s less theirs.
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


def test_cold_turn_is_its_first_epoch() -> None:
    """Opening included; without a step there is no accelerator to be used."""
    turn = LoaderTurn(
        ranks=(rank(drawn(30, waits=(2.0, 1.0, 1.0), elapsed_s=5, epochs=1), None, measures=True),),
        start_mib=1,
        peak_mib=1,
        shared_memory_mib=0,
    )
    found = figures_of(turn, setting=TurnSetting(batch_size=10, threads=1, cache="cold"), facts=FACTS)
    assert found["samples_per_s"] == 6
    assert found["cpu_ms_per_sample"] == 300
    assert found["fetched_ratio"] == found["first_fetched_ratio"] == 1.1
    assert found["wait_share"] == pytest.approx(4.5 / 5)
    assert found["accelerator_utilisation"] is None


def test_all_hidden_behind_the_step_is_full_utilisation() -> None:
    """The rules: if all input is hidden by compute time, the total running time is the compute time."""
    turn = LoaderTurn(
        ranks=(
            rank(
                drawn(30, waits=(1.0,), elapsed_s=2, epochs=1),
                drawn(30, waits=(0.2, 0.0, 0.0), elapsed_s=3.2, ends_s=0.0, epochs=1),
                measures=True,
            ),
        ),
        start_mib=1,
        peak_mib=1,
        shared_memory_mib=0,
    )
    found = figures_of(turn, setting=TurnSetting(batch_size=10, threads=1, compute_ms=1000.0), facts=FACTS)
    assert found["accelerator_utilisation"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("waits", "figure", "expected"),
    [
        ([5.0], "batch_p50_ms", 5.0),
        ([4.0, 2.0, 1.0, 3.0], "batch_p50_ms", 2.0),  # half of them do not exceed it
        ([float(value) for value in range(1, 101)], "batch_p99_ms", 99.0),
        ([float(value) for value in range(1, 51)], "batch_p99_ms", 50.0),  # of fewer than a hundred the longest
    ],
)
def test_percentile_is_one_of_the_values(waits: list[float], figure: str, expected: float) -> None:
    """The smallest that so many do not exceed."""
    epoch = drawn(30, waits=tuple(wait / 1000 for wait in waits), elapsed_s=5, epochs=1)
    turn = LoaderTurn(ranks=(rank(epoch, None, measures=True),), start_mib=1, peak_mib=1, shared_memory_mib=0)
    found = figures_of(turn, setting=TurnSetting(batch_size=10, threads=1, cache="cold"), facts=FACTS)
    assert found[figure] == pytest.approx(expected)


def test_sweep_makes_every_combination() -> None:
    """The last axis changes fastest; all else is the base's; threads are shared out among ranks."""
    base = TurnSetting(batch_size=16, crop=40, threads=3)
    found = sweep(base, ["ranks=1,2", "cache=cold,warm"])
    assert [(setting.ranks, setting.cache) for setting in found] == [(1, "cold"), (1, "warm"), (2, "cold"), (2, "warm")]
    assert {(setting.batch_size, setting.crop, setting.threads) for setting in found} == {(16, 40, 3)}
    options = found[0].apply(LoaderOptions(batch_size=1, crop=1, num_threads=1))
    assert (options.batch_size, options.crop, options.num_threads) == (16, 40, 3)
    assert TurnSetting(ranks=64).num_threads == 1
    assert len(sweep(base, [])) == 1


def test_step_on_a_cpu_sleeps_for_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves the cores to those who decode; half a batch is half a step; none is none."""
    slept: list[float] = []
    monkeypatch.setattr("bench.tools.step.time.sleep", slept.append)
    open_step(0.02, device="cpu")(0.5)
    open_step(0.0, device="cpu")(1.0)
    assert slept == [0.01]
