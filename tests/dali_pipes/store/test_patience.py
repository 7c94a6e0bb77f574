"""How long a job waits, what it logs meanwhile, and who may end the wait. The tests use their own clock."""

import logging
import threading
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from dali_pipes.commands.options import cluster_options
from dali_pipes.store import patience as module
from dali_pipes.store.patience import (
    Patience,
    PatientThreads,
    Waiting,
    current_patience,
    in_threads,
    pause,
    waits_ended_by,
)
from tests.programs import threads_that_start


class Clock:
    """A clock that advances only in pauses."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now_s, sleep=clock.sleep))
    monkeypatch.setattr(module, "_told_at", {})
    monkeypatch.setattr(module, "_away", set())
    return clock


def test_one_line_a_minute_for_all_who_wait_and_one_at_the_end(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """It names the endpoint, the time until now, the limit and the cause, without the server's escapes."""
    caplog.set_level(logging.WARNING, "dali_pipes")
    requests = [Waiting(Patience(), "http://one-line") for _ in range(5)]

    def fail() -> None:
        for waiting in requests:
            waiting.next_pause_s("503 \x1b[2J")

    fail()
    clock.sleep(2)
    fail()
    assert not caplog.messages, "one refused connection is no news"
    assert not module.is_outage_told()
    clock.sleep(1)
    fail()
    fail()
    [line] = caplog.messages
    assert line.startswith("waiting for AIStore at http://one-line for 3 s so far, up to 600 s")
    assert "\x1b" not in line
    assert module.is_outage_told()
    clock.sleep(60)
    fail()
    assert len(caplog.messages) == 2
    for waiting in requests:
        waiting.progress()
    assert caplog.messages[2:] == ["AIStore at http://one-line answers again: going on after 63 s"]
    assert not module.is_outage_told()


def test_outage_whose_request_was_given_up_is_forgotten(clock: Clock) -> None:
    """Else no batch that waits would ever be told of again, for example after a loader was closed in an outage."""
    waiting = Waiting(Patience(), "http://gone")
    waiting.next_pause_s("503 busy")
    clock.sleep(5)
    waiting.next_pause_s("503 busy")
    assert module.is_outage_told()
    clock.sleep(120)
    assert not module.is_outage_told()


def test_an_exception_ends_the_waits_of_the_threads() -> None:
    """As Ctrl-C does: nobody waits for threads that wait for a cluster."""
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        pause(3600)

    with pytest.raises(KeyboardInterrupt), PatientThreads(2) as threads:  # noqa: PT012 (the block is what ends)
        waits = threads.submit(wait)
        assert begun.wait(60)
        raise KeyboardInterrupt
    assert isinstance(waits.exception(), module.InterruptedWaitError)


def test_threads_return_results_in_order_and_the_first_error_ends_the_others() -> None:
    assert in_threads(lambda number: number * number, range(100), num_threads=7) == [n * n for n in range(100)]
    assert in_threads(str, [], num_threads=7) == []
    begun = threading.Barrier(3)

    def fail_or_wait(number: int) -> None:
        begun.wait(60)
        if number == 1:
            raise ValueError("the second one")
        pause(3600)

    with pytest.raises(ValueError, match="the second one"):
        in_threads(fail_or_wait, range(3), num_threads=3)


@pytest.mark.parametrize("most", [0, 2])
def test_the_threads_that_may_start_do_the_work(most: int) -> None:
    """A limit may forbid more threads. If no thread can start, the caller itself does the work."""
    with threads_that_start(most) as tried:
        assert in_threads(lambda number: number * number, range(20), num_threads=7) == [n * n for n in range(20)]
    assert len(tried) == most + 1


def test_waits_end_with_the_thread_that_waits_for_them() -> None:
    """A closed loader ends the waits of threads that its own threads have started; those of other loaders go on."""
    closed, begun = threading.Event(), threading.Barrier(3)

    def wait(_: int) -> None:
        begun.wait(60)
        pause(3600)

    def work() -> None:
        with pytest.raises(module.InterruptedWaitError), waits_ended_by(closed):
            in_threads(wait, range(2), num_threads=2)
        pause(0)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(60)
    closed.set()
    thread.join()
    pause(0)


def test_options_of_commands_set_the_patience() -> None:
    """The patience holds for every store of the command, and ends with it. Only a time is accepted."""

    @click.command
    @cluster_options
    def command(**_: object) -> None:
        click.echo(f"{current_patience().patience_s} {current_patience().start_s}")

    before = current_patience()
    assert CliRunner().invoke(command).output.strip() == "600.0 0.0"
    arguments = ["--patience-at-start", "60", "--patience", "0"]
    assert CliRunner().invoke(command, arguments).output.strip() == "0.0 60.0"
    assert current_patience() == before
    for seconds in ("-1", "nan", "inf", "soon"):
        result = CliRunner().invoke(command, ["--patience", seconds])
        assert result.exit_code == 2
        assert "--patience" in result.output
