"""``bench run --au`` on tiny data: real loaders feed real processes that sleep as accelerators compute."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.accelerators.known import Accelerator
from bench.accelerators.scenario import FIGURES, AuScenario, point_of
from bench.accelerators.utilisation import EpochTimes
from bench.compare.settings import TurnSetting
from bench.compare.turn import Drawn, RankTurn, Turn
from bench.engine.run import run_scenario
from bench.loaders.protocol import LoaderOptions
from bench.loaders.selection import LoaderSpec
from bench.reports.documents import page_parts
from bench.reports.record import write_record
from dali_pipes.cli import main
from dali_pipes.errors import PipesError
from dali_pipes.store.shard_set import ShardSet
from tests.bench.conftest import CROP

PATIENT = Accelerator(name="patient", batch_size=3, compute_s=0.02)
HUNGRY = Accelerator(name="hungry", batch_size=3, compute_s=1e-6)
"""Three million samples a second: no loader can."""
TINY = ["--crop", "64", "--num-threads", "1", "--loaders", "dali", "--repeats", "1"]


def scenario(shards: ShardSet, options: LoaderOptions, accelerator: Accelerator, **given: Any) -> AuScenario:
    own = replace(options, recipe="classification", mask=None)
    setting = TurnSetting(crop=CROP, threads=1)
    return AuScenario(
        shards=shards,
        loaders=given.pop("loaders", [LoaderSpec(name="dali")]),
        accelerator=accelerator,
        options=own,
        setting=setting,
        repeats=1,
        steps=3,
        **given,
    )


def test_number_of_accelerators_is_found_by_emulation(shards: ShardSet, options: LoaderOptions, tmp_path: Path) -> None:
    """A target that any host reaches is met up to the limit, by each loader, with decoding and without."""
    loaders = [LoaderSpec(name="dali"), LoaderSpec(name="webloader")]
    found = run_scenario(scenario(shards, options, PATIENT, loaders=loaders, target=0.001, most=2))
    rows = {(row["loader"], row["recipe"]): row for row in found["records"]}
    assert set(rows) == {(name, recipe) for name in ("dali", "webloader") for recipe in ("classification", "encoded")}
    assert found["limit"] == 2
    for row in rows.values():
        (points,) = row["repeats"]
        assert [point["accelerators"] for point in points] == [1, 2]
        assert all(0 < point["utilisation"] <= 1 for point in points)
        assert all(point["late_share"] >= 0 for point in points), "no sleep ends early"
        assert (row["accelerators"], row["share"]) == (2, 2.0)
        assert set(FIGURES) <= set(row)
        assert row["outputs"]["num_samples"] == 22
    write_record(found, path := tmp_path / "au.json")
    _, ((_, text),) = page_parts([path])
    assert text == AuScenario.table(found)
    assert "+: no more than 2 could be tried" in text
    assert "an accelerator" in text.splitlines()[0]


def test_loader_that_is_too_slow_feeds_none(shards: ShardSet, options: LoaderOptions) -> None:
    """Its single accelerator waits nearly all the time; more are not tried."""
    found = run_scenario(scenario(shards, options, HUNGRY, recipes=("encoded",)))
    (row,) = found["records"]
    (points,) = row["repeats"]
    assert [point["accelerators"] for point in points] == [1]
    assert row["utilisation_of_one"] < 0.9
    assert row["accelerators"] == 0
    assert row["share"] == pytest.approx(row["utilisation_of_one"] / 0.9)


def test_point_is_the_mean_of_its_ranks() -> None:
    """Two ranks of three steps: one never waits, the other half of the time after its first step."""

    def rank(elapsed_s: float, cpu_s: float | None) -> RankTurn:
        epoch = EpochTimes(30, elapsed_s, 10, 1.0, 3.3)
        drawn = Drawn(
            num_samples=30, num_epochs=1, elapsed_s=elapsed_s, waits_s=(0.0,), ends_s=0, cpu_s=cpu_s, epochs=(epoch,)
        )
        return RankTurn(first=drawn, steady=drawn, num_workers=0, decode="dali", device="cpu", gives=())

    accelerator = Accelerator(name="ten", batch_size=10, compute_s=1.0)
    turn = Turn(ranks=(rank(3.0, 0.6), rank(5.0, None)), start_mib=1, peak_mib=1, shared_memory_mib=0)
    found = point_of(turn, accelerator)
    assert found.accelerators == 2
    assert found.utilisation == pytest.approx((1.0 + 0.5) / 2)
    assert found.samples_per_s == pytest.approx(60 / 5)
    assert found.cpu_ms_per_sample == pytest.approx(10.0)
    assert found.late_share == pytest.approx(0.1)


def test_accelerator_with_one_step_an_epoch_is_an_error() -> None:
    """There is nothing to be measured; it says what to do."""
    epoch = EpochTimes(10, 1.0, 10, 1.0, 1.0)
    drawn = Drawn(num_samples=10, num_epochs=1, elapsed_s=1.0, waits_s=(0.0,), ends_s=0, cpu_s=0.1, epochs=(epoch,))
    one = RankTurn(first=drawn, steady=drawn, num_workers=0, decode="dali", device="cpu", gives=())
    turn = Turn(ranks=(one,), start_mib=1, peak_mib=1, shared_memory_mib=0)
    with pytest.raises(PipesError, match=r"one of 1 accelerators had a single step .*: --samples, and --num-shards"):
        point_of(turn, Accelerator(name="ten", batch_size=10, compute_s=1.0))


def test_command_searches_and_writes_a_record(
    shards: ShardSet, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Samples are repeated so that there are enough; ``--repeats`` is the number of searches."""
    path = tmp_path / "au.json"
    arguments = ["bench", "run", "--shards", shards.store.url, "--au", "mine:8:0.001", "--au-photos", "files", *TINY]
    assert main([*arguments, "--samples", "32", "--au-steps", "2", "--au-most", "1", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["format"] == "dali-pipes-bench-au"
    assert found["accelerator"] == {
        "name": "mine",
        "batch_size": 8,
        "compute_s": 0.001,
        "mlperf_target": None,
        "samples_per_s": 8000.0,
    }
    assert found["data"]["num_samples"] == 32
    assert [row["recipe"] for row in found["records"]] == ["encoded"]
    assert "Accelerator 'mine': a batch of 8 every 1 ms, 8,000 samples/s." in capfd.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--au", "h200"], "--au expects one of resnet50_h100"),
        (["--au-steps", "3"], "--au-steps needs --au ACCELERATOR"),
        (["--au", "mine:8:0.1", "--batch-size", "4"], "--au excludes --batch-size: the accelerator has a batch size"),
        (["--au", "mine:8:0.1", "--ranks", "2"], "--au excludes --ranks: each accelerator is a rank"),
        (["--au", "mine:8:0.1", "--compute-ms", "5"], "--au excludes --compute-ms"),
        (["--au", "mine:8:0.1", "--au-most", "65"], "--au-most must be at most 64, got 65"),
        (["--au", "mine:12:0.1"], "needs 2 in an epoch, 24 samples; the shards hold 22; .*: --samples 24"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    given: list[str], message: str, shards: ShardSet, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before anything is timed."""
    assert main(["bench", "run", "--shards", shards.store.url, *TINY, *given]) == 2
    told = capfd.readouterr().err
    assert re.search(message, told), told
