"""The live line: rewritten in place on a terminal, seldom elsewhere, never while a clock runs, silent when quiet."""

import contextlib
import os
import re
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.compare.run import Contender, LoaderScenario
from bench.compare.settings import TurnSetting
from bench.engine import run
from bench.engine.run import live_line, run_scenario, say
from bench.loaders.protocol import LoaderOptions
from bench.loaders.selection import LoaderSpec
from dali_pipes.progress import use_verbosity
from dali_pipes.store.shard_set import ShardSet
from tests.bench.engine.test_engine import HereProbe


@dataclass(frozen=True, kw_only=True)
class FastProbe(HereProbe):
    """Says where it is, and how fast it was."""

    def measure(self, made: Path, subject: str, number: int) -> dict[str, Any]:
        say("its only part")
        return super().measure(made, subject, number)

    def speed(self, made: Path, subject: str, row: dict[str, Any]) -> str:
        return f"{1000 + row['number']} samples/s"


class Terminal:
    """A terminal for stderr."""

    def __init__(self) -> None:
        self.ours, theirs = os.openpty()
        termios.tcsetwinsize(theirs, (24, 250))
        self.stream = os.fdopen(theirs, "w", buffering=1)

    def text(self) -> str:
        self.stream.flush()
        os.set_blocking(self.ours, False)
        found = b""
        while True:
            try:
                found += os.read(self.ours, 1 << 16)
            except BlockingIOError:
                return found.decode()

    def shown(self) -> list[str]:
        """What the line showed, one after the other."""
        return [part.strip() for part in self.text().split("\r") if part.strip()]


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.stream.close()
    os.close(made.ours)


@pytest.fixture
def quiet() -> Iterator[None]:
    use_verbosity("quiet")
    yield
    use_verbosity("normal")


def test_a_terminal_has_one_line_that_is_rewritten(terminal: Terminal) -> None:
    """Which turn it is, its part, the speed of the last one; only the end of the run ends the line."""
    with contextlib.redirect_stderr(terminal.stream):
        run_scenario(FastProbe(repeats=2))
    shown = terminal.shown()
    assert any(re.search(r"'[bc]': 100[01] samples/s; now 'a': its only part", part) for part in shown), shown
    assert "6/6" in shown[-1]
    assert "1001 samples/s" in shown[-1]


def test_the_line_ends_once(terminal: Terminal) -> None:
    """After the last turn; before it the cursor only goes back."""
    with contextlib.redirect_stderr(terminal.stream):
        run_scenario(FastProbe(repeats=2))
    assert terminal.text().count("\n") == 1


def test_without_a_terminal_a_line_comes_only_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A short run prints none."""
    run_scenario(FastProbe(repeats=2))
    assert capsys.readouterr() == ("", "")
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 4.0
        return now

    monkeypatch.setattr("bench.engine.run.time.monotonic", clock)
    with live_line("time loaders", num_turns=9) as line:
        for number in range(9):
            line.begin("dali")
            line.end(f"{number} samples/s")
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [
        "time loaders: 3 of 9 turns; dali: 2 samples/s",
        "time loaders: 6 of 9 turns; dali: 5 samples/s",
        "time loaders: 9 of 9 turns; dali: 8 samples/s",
    ]


def test_quiet_says_nothing(terminal: Terminal, quiet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "EVERY_S", 0.0)
    with contextlib.redirect_stderr(terminal.stream):
        run_scenario(FastProbe(repeats=2))
    assert terminal.text() == ""


def test_a_part_without_a_run_is_not_said(terminal: Terminal) -> None:
    """So a turn may be taken by itself, as tests do."""
    with contextlib.redirect_stderr(terminal.stream):
        say("a part")
    assert terminal.text() == ""


def test_a_failed_turn_keeps_the_last_speed(terminal: Terminal) -> None:
    with contextlib.redirect_stderr(terminal.stream), live_line("probe", num_turns=2) as line:
        line.begin("a")
        line.end("5 samples/s")
        line.begin("b")
        line.end("")
    assert "a: 5 samples/s" in terminal.shown()[-1]


def test_nothing_is_written_while_a_loader_is_timed(
    shards: ShardSet, options: LoaderOptions, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The parts are said where all ranks wait: between the places, while epochs are drawn, the command is silent, and
    so are the processes that are measured.
    """
    monkeypatch.setattr(run, "EVERY_S", 1e9)
    said: list[tuple[float, str]] = []
    monkeypatch.setattr("bench.compare.turn.say", lambda part: said.append((time.monotonic(), part)))
    scenario = LoaderScenario(shards=shards, loaders=[LoaderSpec.parse("memory")], options=options, repeats=1, epochs=3)
    (record,) = run_scenario(scenario)["records"]
    assert [part for _, part in said] == ["opened, and its first epoch", "timed epochs", "closed"]
    (rank,) = record["repeats"][0]["ranks"]
    timed_s = said[2][0] - said[1][0]
    assert timed_s >= rank["steady"]["elapsed_s"], "no word falls into the timed epochs"
    assert capfd.readouterr() == ("", "")


def test_speed_is_that_of_the_record(shards: ShardSet, options: LoaderOptions, terminal: Terminal) -> None:
    """Samples/s of the table, rounded."""
    scenario = LoaderScenario(shards=shards, loaders=[LoaderSpec.parse("memory")], options=options, repeats=1)
    with contextlib.redirect_stderr(terminal.stream):
        (record,) = run_scenario(scenario)["records"]
    figure = record["repeats"][0]["figures"]["samples_per_s"]
    assert f"memory: {figure:,.0f} samples/s" in terminal.shown()[-1]


def test_names_on_the_line_are_short(shards: ShardSet, options: LoaderOptions) -> None:
    """Only the part of a setting that varies; the whole of it stands in errors and tables."""
    spec = LoaderSpec.parse("memory")
    settings = [TurnSetting(batch_size=5, crop=64, threads=threads) for threads in (1, 2)]
    scenario = LoaderScenario(shards=shards, loaders=[spec], options=options, settings=settings)
    assert scenario.short_name(Contender(spec, settings[1], "segmentation")) == "memory (threads 2)"
    alone = LoaderScenario(shards=shards, loaders=[spec], options=options, settings=settings[:1])
    assert alone.short_name(Contender(spec, settings[0], "segmentation")) == "memory"
