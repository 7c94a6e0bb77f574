"""How long is waited, what is said meanwhile, and who may end it."""

import logging
import threading
import time

import click
import pytest
from click.testing import CliRunner

from dali_pipes.commands.options import cluster_options
from dali_pipes.store import patience as module
from dali_pipes.store.patience import Patience, PatientThreads, Waiting, current_patience, pause, use_patience


def test_failures_are_repeated_until_the_patience_is_over() -> None:
    """Then the error says for how long, why, and what to do."""
    waiting = Waiting(Patience(patience_s=0.3, longest_pause_s=0.02, advice="try later"), "http://ais")
    started, pauses = time.monotonic(), 0
    while (seconds := waiting.next_pause_s("503 busy")) is not None:
        pause(seconds)
        pauses += 1
    assert time.monotonic() - started >= 0.3
    assert pauses > 5
    text = rf"{pauses + 1} attempts in 0\.[3-9] s without progress \(patience: 0.3 s\), .*: 503 busy; .* try later"
    with pytest.raises(module.PatienceOverError, match=text):
        raise waiting.over("503 busy")


def test_progress_begins_the_time_anew() -> None:
    """Only time without progress counts."""
    waiting = Waiting(Patience(patience_s=0.2, longest_pause_s=0.0), "http://ais")
    for _ in range(4):
        assert waiting.next_pause_s("x") is not None
        time.sleep(0.1)
        waiting.progress()
    assert waiting.waited_s == 0


def test_no_patience_ends_with_the_first_failure() -> None:
    """So does a cluster that has not answered yet: its address may be wrong."""
    assert Waiting(Patience(patience_s=0), "http://ais").next_pause_s("x") is None
    assert Waiting(Patience(), "http://ais").next_pause_s("x", has_answered=False) is None
    assert Waiting(Patience(start_s=9), "http://ais").next_pause_s("x", has_answered=False) is not None


def test_the_pause_that_a_server_asks_for_is_kept_up_to_the_end_of_the_patience() -> None:
    """Not longer: then there is one more attempt."""
    waiting = Waiting(Patience(patience_s=100), "http://ais")
    assert waiting.next_pause_s("429", retry_after_s=30) == pytest.approx(30)
    assert waiting.next_pause_s("429", retry_after_s=1000) == pytest.approx(100, abs=5)


def test_one_line_a_minute_for_all_who_wait_and_one_at_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the endpoint, the time until now, the limit and the cause, without the server's escapes."""
    monkeypatch.setattr(module, "_QUIET_S", 0.0)
    caplog.set_level(logging.WARNING, "dali_pipes")
    requests = [Waiting(Patience(patience_s=60), "http://one-line") for _ in range(5)]
    for _ in range(3):
        for waiting in requests:
            waiting.next_pause_s("503 \x1b[2J")
    [line] = caplog.messages
    assert line.startswith("waiting for AIStore at http://one-line for 0 s so far, up to 60 s")
    assert "\x1b" not in line
    monkeypatch.setattr(module, "_TOLD_EACH_S", 0.0)
    requests[0].next_pause_s("x")
    assert len(caplog.messages) == 2
    for waiting in requests:
        waiting.progress()
    assert "http://one-line answers again: going on after" in caplog.messages[2]
    assert len(caplog.messages) == 3


def test_outage_whose_request_was_given_up_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no batch that waits would ever be told of again, for example after a loader was closed in an outage."""
    monkeypatch.setattr(module, "_told_at", {})
    monkeypatch.setattr(module, "_away", set())
    monkeypatch.setattr(module, "_QUIET_S", 0.0)
    Waiting(Patience(), "http://gone").next_pause_s("503 busy")
    assert module.is_outage_told()
    monkeypatch.setattr(module, "_TOLD_EACH_S", 0.0)
    assert not module.is_outage_told()


def test_short_waits_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """One refused connection is no news."""
    waiting = Waiting(Patience(patience_s=60), "http://short")
    waiting.next_pause_s("x")
    waiting.progress()
    assert not caplog.messages


def test_an_exception_ends_the_waits_of_the_threads() -> None:
    """As Ctrl-C does: nobody waits for threads that wait for a cluster."""
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        pause(60)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), PatientThreads(2) as threads:  # noqa: PT012 (the block is what ends)
        threads.submit(wait)
        assert begun.wait(60)
        raise KeyboardInterrupt
    assert time.monotonic() - started < 20


def test_threads_have_the_patience_of_their_maker() -> None:
    """Stores that they open are as patient."""
    with use_patience(Patience(patience_s=7)), PatientThreads(1) as threads:
        assert threads.submit(current_patience).result().patience_s == 7


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "600.0 0.0"),
        (["--patience", "5"], "5.0 0.0"),
        (["--patience-at-start", "60", "--patience", "0"], "0.0 60.0"),
    ],
)
def test_options_of_commands_set_the_patience(arguments: list[str], expected: str) -> None:
    """Of every store that the command opens, and of nothing after it."""

    @click.command
    @cluster_options
    def command(**_: object) -> None:
        click.echo(f"{current_patience().patience_s} {current_patience().start_s}")

    before = current_patience()
    assert CliRunner().invoke(command, arguments).output.strip() == expected
    assert current_patience() == before


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "soon"])
def test_patience_that_is_no_time_is_misuse(seconds: str) -> None:
    """Told with the option's name."""
    result = CliRunner().invoke(click.command(cluster_options(lambda **_: None)), ["--patience", seconds])
    assert result.exit_code == 2
    assert "--patience" in result.output
