"""The engine on a scenario that measures nothing: order, processes, interrupts, failures, records."""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar, Literal

import psutil
import pytest

from bench.engine.options import run_and_tell
from bench.engine.scenario import Scenario, run_scenario
from bench.engine.turn_process import TurnProcess, call_apart, fork_server
from bench.tools.folders import RunFolder
from dali_pipes.errors import PipesError
from tests.programs import wait_until


@dataclass(frozen=True, kw_only=True)
class Probe(Scenario[Path, str, dict[str, Any]]):
    """Three subjects; notes who was measured where."""

    kind = "probe"
    title = "probe"

    repeats: int = 3
    fails: str = ""
    how: str = ""

    def prepare(self, folder: RunFolder, stack: ExitStack) -> Path:
        (made := folder.new() / "log").touch()
        return made

    def subjects(self, made: Path) -> Sequence[str]:
        return ["a", "b", "c"]

    def measure(self, made: Path, subject: str, number: int) -> dict[str, Any]:
        with made.open("a") as log:
            log.write(f"{number}{subject} ")
        if self.fails == f"{number}{subject}":
            self.fail()
        return {"figures": {}, "number": number, "pid": os.getpid(), "log": made.read_text()}

    def fail(self) -> None:
        if self.how == "interrupt":
            raise KeyboardInterrupt
        if self.how == "kill":
            os.kill(os.getpid(), 9)
        if self.how == "hang":
            time.sleep(600)
        raise PipesError("out of order") if self.how == "error" else RuntimeError("unheard of")


@dataclass(frozen=True, kw_only=True)
class HereProbe(Probe):
    runs_in: ClassVar[Literal["fork", "interpreter", "caller"]] = "caller"


@dataclass(frozen=True, kw_only=True)
class FreshProbe(Probe):
    runs_in: ClassVar[Literal["fork", "interpreter", "caller"]] = "interpreter"


def rows_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for one in record["records"] for row in one["repeats"]]


def test_every_subject_has_its_turn_in_each_round(tmp_path: Path) -> None:
    """The order within a round is another each time, and the same for the same seed; what was written is gone."""
    logs = []
    for _ in range(2):
        record = run_scenario(HereProbe(work=tmp_path, repeats=3))
        assert {row["pid"] for row in rows_of(record)} == {os.getpid()}
        log = max((row["log"] for row in rows_of(record)), key=len).split()
        assert [sorted(log[start : start + 3]) for start in (0, 3, 6)] == [
            [f"{number}{subject}" for subject in "abc"] for number in range(3)
        ]
        logs.append([turn[1] for turn in log])
        assert (record["format"], record["version"]) == ("dali-pipes-bench-probe", 2)
        assert (record["complete"], record["num_rounds"], record["stopped"]) == (True, 3, None)
        assert record["environment"]["load_at_start"] >= 0
    assert logs[0] == logs[-1]
    assert len({tuple(logs[0][start : start + 3]) for start in (0, 3, 6)}) > 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [Probe, FreshProbe], ids=["forks", "interpreters"])
def test_every_turn_has_a_process_of_its_own(kind: type[Probe]) -> None:
    pids = {row["pid"] for row in rows_of(run_scenario(kind(repeats=1)))}
    assert len(pids) == 3
    assert os.getpid() not in pids


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("error", r"^out of order$"),
        ("", r"^'b' failed: RuntimeError: unheard of$"),
        (
            "kill",
            r"^'b' ended with exit status -9 before it finished; -9 means that it was killed, for example because",
        ),
        ("hang", r"^'b' did not finish within 0.5 s; it hangs or needs more time$"),
    ],
)
def test_turn_that_fails_in_its_process_is_named(how: str, message: str) -> None:
    probe = Probe(fails="0b", how=how, timeout_s=0.5 if how == "hang" else None, repeats=1)
    with pytest.raises(PipesError, match=message):
        run_scenario(probe)


@dataclass(frozen=True, kw_only=True)
class TimedProbe(HereProbe):
    """Subject ``b`` becomes slower from round to round. Subject ``c`` is slow in the rounds ``bad``."""

    ratio_to: ClassVar[str | None] = "a"
    slower: float = 1.0
    bad: tuple[int, ...] = ()

    def measure(self, made: Path, subject: str, number: int) -> dict[str, Any]:
        speed = self.slower**-number if subject == "b" else 0.5 if subject == "c" and number in self.bad else 1.0
        return {"figures": {"samples_per_s": 100 * speed}}


def test_record_is_published_only_of_a_commit_and_of_steady_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "record.json"
    found: dict[str, Any] = {"commit": "0123", "is_dirty": True}
    monkeypatch.setattr("bench.tools.environment.describe_commit", lambda: found)
    with pytest.raises(ValueError, match="--json FILE"):
        run_and_tell(TimedProbe(), json_path=None, publish=True)
    with pytest.raises(ValueError, match="whose code is a commit's"):
        run_and_tell(TimedProbe(), json_path=record, publish=True)
    found["is_dirty"] = False
    with pytest.raises(PipesError, match=r"not written: the repeats differ by more than 10 % in 'b, samples_per_s: \d"):
        run_and_tell(TimedProbe(slower=1.1), json_path=record, publish=True)
    assert not record.exists()
    run_and_tell(TimedProbe(slower=1.01), json_path=record, publish=True)
    loops = json.loads(record.read_text())["quiet_ms"]
    assert len(loops) == 10, "before, between and after nine turns"
    assert min(loops) > 0
    run_and_tell(TimedProbe(bad=(0,)), json_path=record, publish=True)
    assert json.loads(record.read_text())["num_rounds"] == 9, "rounds are added, and none is left out"


def test_settings_are_checked_first(tmp_path: Path) -> None:
    for changed, message in (
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"timeout_s": 0.0}, "timeout_s must be more than 0, got 0"),
        ({"work": tmp_path / "none"}, "--cache '.*none': no such directory"),
        ({"work": Path("/proc/self")}, "--cache '/proc/self': cannot be written: .*; name another directory"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(HereProbe(), **changed)  # type: ignore[arg-type]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A directory with a short path, because the path of a socket has at most 107 characters."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


# A terminal signals the whole process group. A parent program signals only the command.
VANISHED = """
import multiprocessing
import os
from multiprocessing import forkserver

multiprocessing.get_context("forkserver").set_forkserver_preload(["bench.engine.surviving_server"])
for task in (b"", bytes.fromhex("800495ff00")):
    started, pipe = forkserver.connect_to_new_process([])
    forkserver.read_signed(started)  # its process number
    os.write(pipe, task)
    os.close(pipe)
    print(forkserver.read_signed(started))
"""


def test_a_worker_whose_client_has_vanished_says_nothing() -> None:
    """The client ends before it has said what the worker shall do, or in the middle of it."""
    done = subprocess.run([sys.executable, "-c", VANISHED], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1\n1\n", "")


@pytest.mark.parametrize(
    "to", [os.killpg, pytest.param(os.kill, marks=pytest.mark.nightly)], ids=["group", "command alone"]
)
def test_ctrl_c_leaves_one_line_and_no_process(small_shards: Path, temporary: Path, to) -> None:
    """Ctrl-C ends the command during a turn, also while the process of the turn still prepares."""
    begun = "INFO dali_pipes.progress: time loaders"
    command = "bench run --loaders dali,webloader --crop 16 --batch-size 4 --repeats 20 --verbose --shards"
    running = subprocess.Popen(
        [sys.executable, "-m", "dali_pipes", *command.split(), small_shards],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    )
    assert running.stderr is not None
    lines = [""]
    while begun not in lines[-1]:
        lines.append(running.stderr.readline())
        assert lines[-1], "".join(lines)
    to(running.pid, signal.SIGINT)
    _, errors = running.communicate(timeout=240)
    assert running.returncode == 130, errors
    assert [line for line in errors.splitlines() if line and not line.startswith("INFO")] == ["error: interrupted"]
    # The tracker of shared memory cleans up after the command has ended.
    wait_until(
        lambda: not any(_session_of(one) == running.pid for one in psutil.process_iter()), "a process of it is left"
    )
    assert [one for one in temporary.iterdir() if one.name.startswith("dali-pipes")] == []


def _wait(meet: object) -> None:
    signal.pause()


def test_ctrl_c_while_a_process_starts_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[BaseProcess] = []
    start = BaseProcess.start

    def interrupted(process: BaseProcess) -> None:
        start(process)
        started.append(process)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(BaseProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        TurnProcess(_wait, name="in the test")
    (process,) = started
    process.join(240)
    assert process.exitcode == -signal.SIGKILL


def test_server_goes_on_after_a_process_that_ended_while_it_asked_for_another(capfd) -> None:
    fork_server()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(forkserver._forkserver._forkserver_address)
    server = forkserver._forkserver._forkserver_pid
    assert call_apart(os.getppid, name="a probe") == server
    assert capfd.readouterr().err == ""


def test_garbage_collector_of_a_process_leaves_out_what_the_server_imported() -> None:
    # torch and DALI alone make more than 100,000 objects.
    assert call_apart(gc.get_freeze_count, name="a probe") > 100_000


def _session_of(process: psutil.Process) -> int | None:
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else os.getsid(process.pid)
    except (ProcessLookupError, psutil.NoSuchProcess):
        return None
