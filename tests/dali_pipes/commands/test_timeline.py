"""Ranges on a time axis, and stalls with the stage that caused them."""

import itertools
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dali_pipes as dp
from dali_pipes.cli import main
from dali_pipes.commands.epoch_profile import profile_loader
from dali_pipes.commands.step_clock import SAMPLE_S, EpochSteps, StepClock
from dali_pipes.commands.timeline import (
    LOOP_STAGES,
    NUM_BINS,
    STALL_LEAST_S,
    Float64s,
    Timeline,
    cause_of,
    covered,
    find_stalls,
    on_core_share,
    timeline_of,
)
from dali_pipes.iterator import Loader
from dali_pipes.profiling import Ranges, recording
from tests.dali_pipes.raw import raw

SLOW_CALL, SLOW_S = 6, 0.4


@pytest.mark.parametrize(
    ("ranges", "edges", "shares"),
    [
        ([(0, 1)], [0, 1, 2], [1, 0]),
        ([(0.5, 1.5)], [0, 1, 2], [0.5, 0.5]),  # over an edge
        ([(-5, 0.25), (1.75, 9)], [0, 1, 2], [0.25, 0.25]),  # beyond either end
        ([(0, 1), (0, 1), (0.5, 1)], [0, 1], [2.5]),  # of several threads
        ([], [0, 1], [0]),
        ([(3, 4)], [0, 1, 1, 2], [0, 0, 0]),  # an interval of no length
        ([(0, 1)], [], []),
    ],
)
def test_covered_is_the_share_of_each_interval(
    ranges: list[tuple[float, float]], edges: list[float], shares: list[float]
) -> None:
    begins, ends = np.array(ranges, np.float64).reshape(-1, 2).T
    assert covered((begins, ends), np.array(edges, np.float64)).tolist() == pytest.approx(shares)


def test_threads_on_a_core_are_shares_of_all_threads() -> None:
    """Two threads; one works for the first second, both for the next."""
    clock = StepClock()
    clock.at, clock.on_core_s = array("d", [0, 1, 2]), array("d", [0, 1, 3])
    assert on_core_share(clock, np.array([0.0, 1.0, 2.0]), threads=2).tolist() == [0.5, 1.0]
    assert on_core_share(StepClock(), np.array([0.0, 1.0]), threads=2).tolist() == [0.0]


@pytest.mark.parametrize(
    ("loop", "others", "stage", "text"),
    [
        (("read", "waiting"), {"fetch": 6.0, "stage": 0.5}, "fetch", "6.0 threads fetched and 0.5 staged meanwhile"),
        (("read", "waiting"), {"fetch": 0.1, "stage": 3.0}, "stage", "shards on their way"),
        (("read", "waiting"), {}, "read", "no thread fetched or staged a shard meanwhile"),
        (("hand-over", "waiting"), {"decode": 0.9}, "decode", "90% of DALI's 4 threads were on a core"),
        (("inputs", "busy"), {"decode": 0.9}, "inputs", "160 of 200 ms: work of 'inputs' in the thread that iterates"),
        (("read", "busy"), {}, "read", "work of 'read'"),
        (None, {}, "step", "nothing that the loader's stages say"),
    ],
)
def test_cause_is_what_the_loop_spent_most_of_the_wait_on(
    loop: tuple[str, str] | None, others: dict[str, float], stage: str, text: str
) -> None:
    shares: dict[tuple[str, str], float] = dict.fromkeys(itertools.product(LOOP_STAGES, ("busy", "waiting")), 0.0)
    if loop is not None:
        shares |= {loop: 0.8}
    all_others = {"fetch": 0.0, "stage": 0.0, "decode": 0.0} | others
    found = cause_of(shares, all_others, waited_s=0.2, decode_threads=4)
    assert found[0] == stage
    assert text in found[1]


def after(lengths: Float64s) -> tuple[Float64s, Float64s]:
    """Waits of these lengths, one every ten seconds."""
    begins: Float64s = np.array([0.0, 10, 20, 30, 40], np.float64)[: len(lengths)]
    ends: Float64s = np.add(begins, lengths, dtype=np.float64)
    return begins, ends


def test_stalls_are_waits_much_longer_than_the_median() -> None:
    """Of waits of 10 ms, one of 25 is none, one of 40 is; where waits are tiny, 4 ms are noise."""
    ranges = Ranges()
    ranges.add(("read", "waiting"), 30.0, 30.04, is_loop=True)
    ranges.add(("fetch", "busy"), 29.0, 31.0, is_loop=False)
    lengths: Float64s = np.array([0.01, 0.01, 0.025, 0.04, 0.01], np.float64)
    (stall,) = find_stalls(after(lengths), ranges, StepClock(), started=0.0, decode_threads=2)
    assert (stall.step, stall.at_s, stall.stage) == (3, 30.0, "fetch")
    assert stall.waited_s == pytest.approx(0.04)
    assert max(lengths / 10) < STALL_LEAST_S
    assert find_stalls(after(lengths / 10), ranges, StepClock(), started=0.0, decode_threads=2) == []
    assert find_stalls(after(lengths[:0]), ranges, StepClock(), started=0.0, decode_threads=2) == []


def profiled(loader: Loader, *, num_fetchers: int = 8) -> Timeline:
    with recording(with_ranges=True) as recorder, StepClock() as clock:
        (found,) = profile_loader(loader, epochs=1, recorder=recorder, compute_s=0.005, clock=clock)
        assert recorder.ranges is not None
        (steps,) = clock.epochs
        timeline = timeline_of(steps, recorder.ranges, clock, decode_threads=2, num_fetchers=num_fetchers)
        row = {row.stage: row for row in timeline.rows}
        # The rows and the sums are two views of one epoch.
        for stage in LOOP_STAGES:
            seconds = found.of(stage).busy_s
            assert row[stage].busy.mean() * timeline.wall_s == pytest.approx(seconds, abs=0.02 * timeline.wall_s)
    return timeline


def slow_graph(components: dp.Components, random: dp.Random) -> dict[str, Any]:
    """One of its arrays takes long, in the middle of the epoch."""
    calls = []

    def number(batch: Any) -> Any:
        calls.append(0)
        if len(calls) == SLOW_CALL:
            time.sleep(SLOW_S)
        return batch.ordinals

    return {**raw(components, random), "number": components.array(number)}


def test_a_stall_of_a_real_loader_is_found_with_its_stage(small_shards: Path) -> None:
    """A function of the graph sleeps once: the stall is there, as long, and the timeline shows it where it is."""
    with dp.loader(
        small_shards, slow_graph, batch_size=2, device="cpu", seed=1, cache=dp.Cache(show_progress=False)
    ) as loader:
        timeline = profiled(loader)
    assert timeline.num_samples == 23
    stall = max(timeline.stalls, key=lambda one: one.waited_s)
    assert stall.stage == "inputs"
    assert SLOW_S <= stall.waited_s < SLOW_S + 0.3
    rows = {row.stage: row for row in timeline.rows}
    middle = int((stall.at_s + stall.waited_s / 2) / timeline.wall_s * NUM_BINS)
    assert rows["step"].waits[middle] == pytest.approx(1)
    assert rows["inputs"].busy[middle] == pytest.approx(1)
    assert rows["read"].busy[middle] == 0
    assert not timeline.is_cut


def test_clock_looks_at_the_threads_while_they_work(small_shards: Path) -> None:
    """Time on a core never falls, and grows while photos are decoded."""
    graph = dp.segmentation(crop=24)
    with (
        StepClock() as clock,
        dp.loader(small_shards, graph, batch_size=6, device="cpu", cache=dp.Cache(show_progress=False)) as loader,
    ):
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            for _ in loader:
                pass
    assert len(clock.at) > 0.1 / SAMPLE_S
    assert (np.diff(clock.on_core_s) >= 0).all()
    assert clock.on_core_s[-1] > 0


def test_spans_end_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """And say so."""
    monkeypatch.setattr("dali_pipes.profiling.MAX_RANGES", 2)
    ranges = Ranges()
    for number in range(3):
        assert not ranges.is_full or number == 2
        ranges.add(("read", "busy"), number, number + 1, is_loop=number > 0)
    assert ranges.is_full
    assert ranges.of("read", "busy")[0].tolist() == [0, 1]
    assert ranges.of("read", "busy", in_loop=True)[0].tolist() == [1]
    assert ranges.of("read", "waiting")[0].tolist() == []
    steps = EpochSteps(epoch=0, started=0.0, ended=4.0)
    assert timeline_of(steps, ranges, StepClock(), decode_threads=1, num_fetchers=1).is_cut


@pytest.mark.parametrize(
    ("name", "text"),
    [("page.txt", "expected a page's name, .html, got"), ("nowhere/page.html", "no directory '")],
)
def test_a_page_that_cannot_be_written_is_refused_before_the_run(
    small_shards: Path, tmp_path: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(small_shards), "-o", str(tmp_path / name)]) == 2
    said = capsys.readouterr()
    assert text in said.err
    assert said.out == ""


def test_command_writes_a_page_and_the_same_report(
    small_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A drawing for each epoch up to ten, with every stage; the table goes to stdout as always."""
    page = tmp_path / "page.html"
    arguments = ["profile", str(small_shards), "--graph", "tests.dali_pipes.raw:raw", "--batch-size", "6"]
    assert main([*arguments, "--device", "cpu", "--epochs", "12", "-o", str(page)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("epoch 0: 23 samples in ")
    assert f"wrote {page}" in said.err
    html = page.read_text()
    assert html.count('<div class="timeline"') == 10
    assert "The first 10 of 12 epochs are drawn." in html
    assert html.count(" over time") == 10 * 7
    assert len(html) < 1 << 20
