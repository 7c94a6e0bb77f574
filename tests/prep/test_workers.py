"""Processes that do tasks: order, errors, progress, and ends of every kind."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from dali_pipes.errors import DataError, PipesError
from prep.workers import Workers, default_jobs, on_ray, open_workers, processes
from tests.prep.workers_tasks import (
    FreedSlowly,
    count_setup,
    double,
    fail_at_three,
    ignore,
    kill_itself,
    square,
    touch_and_wait,
)
from tests.programs import REPOSITORY, start_python, wait_until


@pytest.fixture(autouse=True)
def _found_by_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


@pytest.mark.parametrize("jobs", [1, 2])
def test_map_gives_results_in_order_and_counts_progress(jobs: int) -> None:
    told: list[int] = []
    with Workers(jobs) as workers:
        for _ in range(2):  # they stay for the next round
            results = list(workers.map(square, range(20), on_progress=told.append))
            assert [value for value, _ in results] == [number * number for number in range(20)]
    assert sum(told) == 2 * sum(range(20))
    pids = {pid for _, pid in results}
    assert pids == {os.getpid()} if jobs == 1 else os.getpid() not in pids


@pytest.mark.parametrize("jobs", [1, 2])
def test_map_raises_what_a_task_raised_and_ends_the_others(jobs: int, tmp_path: Path) -> None:
    with Workers(jobs) as workers, pytest.raises(DataError, match="task 3 is bad"):
        list(workers.map(fail_at_three, range(8)))
    assert workers._processes == []
    assert str(processes._picklable(type("Odd", (Exception,), {})("bad"))) == "Odd: bad"


def test_map_says_which_task_a_worker_was_killed_at() -> None:
    said = r"a worker process ended while it worked on shard '7', exit status -9 .*; run it again with fewer --jobs"
    with Workers(2) as workers, pytest.raises(PipesError, match=said):
        list(workers.map(kill_itself, [7], name=lambda task: f"shard '{task}'"))
    with (
        Workers(1, isolated=True, advice="buy memory") as workers,
        pytest.raises(PipesError, match=r"status -9 .*; buy memory"),
    ):
        list(workers.map(kill_itself, range(2)))


@pytest.mark.parametrize("jobs", [1, 3])
def test_stream_takes_only_so_many_tasks_ahead_and_ends_the_workers(jobs: int) -> None:
    """Untaken results wait in memory, so their number is bounded. Closing the stream early ends the workers."""
    taken: list[int] = []

    def tasks() -> Iterator[int]:
        for number in range(12):
            taken.append(number)
            yield number

    with Workers(jobs) as workers:
        for number, (value, _) in enumerate(workers.map(square, tasks(), max_ahead=4)):
            assert value == number * number
            assert len(taken) <= number + 4
        results = workers.map(square, range(100), max_ahead=4)
        assert next(results)[0] == 0
        results.close()
        assert workers._processes == []


@pytest.mark.parametrize(("jobs", "isolated"), [(1, False), (1, True), (2, False)])
def test_setup_is_called_once_in_each_process(jobs: int, isolated: bool, tmp_path: Path) -> None:
    with Workers(jobs, setup=partial(count_setup, tmp_path), isolated=isolated) as workers:
        pids = {pid for _ in range(2) for _, pid in list(workers.map(square, range(10)))}
    assert (os.getpid() in pids) is (jobs == 1 and not isolated)
    assert pids <= {int(path.name) for path in tmp_path.iterdir()}
    assert {path.read_text() for path in tmp_path.iterdir()} == {"x"}


def test_jobs_are_checked_and_no_more_than_there_is_to_do() -> None:
    with pytest.raises(ValueError, match="jobs must be positive, got 0"):
        Workers(0)
    assert [Workers(8, at_most=num).jobs for num in (0, 1, 3, 20)] == [1, 1, 3, 8]
    assert Workers().jobs == default_jobs()


def test_close_unwinds_what_workers_are_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running tasks clean up, as after a half-written shard, even on a slow machine."""
    monkeypatch.setattr("prep.workers.processes._STOP_TIMEOUT_S", 300.0)
    workers = Workers(2)
    files = [str(tmp_path / name) for name in "ab"]
    failed: list[BaseException] = []

    def run() -> None:
        try:
            list(workers.map(touch_and_wait, files))
        except BaseException as exc:  # noqa: BLE001 (looked at below)
            failed.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "both are at it")
    workers.close()
    workers.close()
    thread.join(300)
    assert not thread.is_alive()  # without close, the tasks would wait for 600 s
    assert list(tmp_path.iterdir()) == []
    assert failed


def test_close_ends_a_worker_that_frees_its_task_and_says_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An exception raised there would be printed and lost."""
    with Workers(1, isolated=True) as workers:
        list(workers.map(ignore, [FreedSlowly(tmp_path / "freed")]))
        wait_until((tmp_path / "freed").exists, "it is at it")
    assert capfd.readouterr().err == ""


OWNER = """
import sys
from prep.workers import Workers
from tests.prep.workers_tasks import touch_and_wait

with Workers(2) as workers:
    list(workers.map(touch_and_wait, sys.argv[1:]))
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_owner(tmp_path: Path, end: signal.Signals) -> None:
    """Also when it had no time to say so; and a script without a guard can use them."""
    process = start_python(OWNER, tmp_path / "a", tmp_path / "b")
    wait_until(lambda: len([path for path in tmp_path.iterdir() if path.read_text()]) == 2, "both are at it")
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    process.send_signal(end)
    process.communicate(timeout=300)
    wait_until(lambda: list(tmp_path.iterdir()) == [], "they unwound")
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "they ended")


def test_ray_is_imported_by_nobody_who_does_not_ask_for_it() -> None:
    """Neither by the commands nor by the workers of this machine."""
    script = "import sys, prep.workers, prep.shuffle.shuffle, prep.commands.shuffle; sys.exit('ray' in sys.modules)"
    assert start_python(script).wait(300) == 0


def test_ray_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with open_workers("ray") as workers, pytest.raises(PipesError, match=r"pip install 'dali-pipes\[ray\]'"):
        list(workers.map(double, [1, 2]))


def test_address_without_a_ray_is_refused_at_once(closed_port: int) -> None:
    """Ray itself would try for minutes."""
    ray = mock.MagicMock()
    with pytest.raises(PipesError, match=f"no Ray answers at '127.0.0.1:{closed_port}'"):
        on_ray._connect(ray, f"127.0.0.1:{closed_port}", num_cpus=1, directory="")
    assert not ray.init.called
    ray.init.side_effect = ConnectionError("no token")
    with pytest.raises(PipesError, match="no Ray at 'auto': no token; is RAY_ADDRESS right"):
        on_ray._connect(ray, "auto", num_cpus=1, directory="")
