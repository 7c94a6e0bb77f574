"""The engine on a scenario that measures nothing: order, processes, interrupts, failures, records."""

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from bench.engine.scenario import Scenario, run_scenario
from bench.engine.turn_process import call_apart
from bench.tools.folders import RunFolder
from dali_pipes.errors import PipesError


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
            time.sleep(60)
        raise PipesError("out of order") if self.how == "error" else RuntimeError("unheard of")


@dataclass(frozen=True, kw_only=True)
class HereProbe(Probe):
    runs_in: ClassVar[Literal["fork", "interpreter", "caller"]] = "caller"


@dataclass(frozen=True, kw_only=True)
class FreshProbe(Probe):
    runs_in: ClassVar[Literal["fork", "interpreter", "caller"]] = "interpreter"


@dataclass(frozen=True, kw_only=True)
class LenientProbe(HereProbe):
    def goes_on_without(self, subject: str) -> bool:
        return True


def rows_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for one in record["records"] for row in one["repeats"]]


@pytest.mark.parametrize("kind", [Probe, HereProbe, FreshProbe])
def test_every_subject_has_its_turn_in_each_round_in_a_process_of_its_own(kind: type[Probe], tmp_path: Path) -> None:
    """The order within a round is another each time, and the same for the same seed; what was written is gone."""
    logs = []
    for _ in range(1 if kind is FreshProbe else 2):
        record = run_scenario(kind(work=tmp_path, repeats=3))
        pids = {row["pid"] for row in rows_of(record)}
        assert pids == {os.getpid()} if kind is HereProbe else len(pids) == 9 and os.getpid() not in pids
        log = max((row["log"] for row in rows_of(record)), key=len).split()
        assert [sorted(log[start : start + 3]) for start in (0, 3, 6)] == [
            [f"{number}{subject}" for subject in "abc"] for number in range(3)
        ]
        logs.append([turn[1] for turn in log])
    assert logs[0] == logs[-1]
    assert len({tuple(logs[0][start : start + 3]) for start in (0, 3, 6)}) > 1
    assert not list(tmp_path.iterdir())


def test_record_says_what_it_is_and_that_it_is_whole() -> None:
    record = run_scenario(HereProbe(repeats=1))
    assert (record["format"], record["version"]) == ("dali-pipes-bench-probe", 2)
    assert (record["complete"], record["num_rounds"], record["stopped"]) == (True, 1, None)
    assert record["environment"]["load_at_start"] >= 0


@pytest.mark.parametrize(("how", "error"), [("interrupt", KeyboardInterrupt), ("error", PipesError)])
def test_whole_rounds_are_kept_when_something_ends_the_run(how: str, error: type[BaseException]) -> None:
    """One and a part of the second are through: one is kept."""
    kept: list[dict[str, Any]] = []
    with pytest.raises(error):
        run_scenario(HereProbe(fails="1b", how=how), keep=kept.append)
    (record,) = kept
    assert (record["complete"], record["num_rounds"], record["stopped"]) == (False, 1, "round 2 of 3, 'b'")
    assert [len(one["repeats"]) for one in record["records"]] == [1, 1, 1]


def test_nothing_is_kept_of_the_first_round() -> None:
    with pytest.raises(PipesError):
        run_scenario(HereProbe(fails="0b", how="error"), keep=lambda _: pytest.fail("kept"))


def test_failures_end_one_subject_where_they_are_kept() -> None:
    """The others go on; the failed one is named with its error."""
    record = run_scenario(LenientProbe(fails="1b", how="error"))
    assert record["failed"] == [{"loader": "b", "setting": {}, "error": "out of order"}]
    assert [len(one["repeats"]) for one in record["records"]] == [3, 3]
    assert (record["complete"], record["num_rounds"]) == (True, 3)


def test_turns_after_the_deadline_are_left_out() -> None:
    record = run_scenario(HereProbe(deadline=time.monotonic() - 1))
    assert rows_of(record) == []
    assert (record["complete"], record["num_rounds"]) == (False, 0)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("error", r"^out of order$"),
        ("", r"^'b' failed: RuntimeError: unheard of$"),
        (
            "kill",
            r"^'b' ended with exit status -9 before it finished; -9 means that it was killed, for example because",
        ),
        ("hang", r"^'b' did not finish within 5 s; it hangs or needs more time$"),
    ],
)
def test_turn_that_fails_in_its_process_is_named(how: str, message: str) -> None:
    probe = Probe(fails="0b", how=how, timeout_s=5.0 if how == "hang" else None, repeats=1)
    with pytest.raises(PipesError, match=message):
        run_scenario(probe)


def test_settings_are_checked_first(tmp_path: Path) -> None:
    for changed, message in (
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"timeout_s": 0.0}, "timeout_s must be more than 0, got 0"),
        ({"work": tmp_path / "none"}, "--cache '.*none': no such directory"),
        ({"work": Path("/proc/self")}, "--cache '/proc/self': cannot be written: .*; name another directory"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(HereProbe(), **changed)  # type: ignore[arg-type]


def test_call_apart_returns_what_the_function_returns() -> None:
    assert call_apart(max, 3, 4, name="it") == 4
    with pytest.raises(ValueError, match="invalid literal"):
        call_apart(int, "x", name="it")
