"""Make the scenarios of `bench gpu` by name: the checks, whose steps take a turn each, and those that time points."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.engine.scenario import Rounds
from bench.gpu.checks import check_report, check_step, check_steps
from bench.gpu.points import CHECKS, SCENARIOS
from bench.gpu.sweep import GpuScenario, Session
from bench.gpu.workload import Workload


@dataclass(frozen=True, kw_only=True)
class GpuCheck(GpuScenario):
    """A check before anything is timed."""

    title = "check"
    repeats: int = 1

    def subjects(self, made: Session) -> Sequence[Any]:
        """Return the steps of the check."""
        return check_steps(self.name, self.workload, device=self.device)

    def measure(self, made: Session, subject: Any, number: int) -> dict[str, Any]:
        """Take a step."""
        return check_step(
            self.name,
            subject,
            self.workload,
            device=self.device,
            num_threads=self.num_threads,
            batch_size=self.batch_size,
        )

    def found(self, rounds: Rounds[Any, dict[str, Any]]) -> dict[str, Any]:
        """Return the results of the steps, and ``error`` if one failed."""
        steps = {step: turns[0] for step, turns in rounds.rows.items() if turns}
        check = {"device": self.device, **check_report(self.name, self.workload, steps, device=self.device)}
        if rounds.errors:
            check["error"] = "; ".join(f"{step}: {error}" for step, error in rounds.errors.items())
        return {"check": check, "steps": steps}

    @staticmethod
    def turns_of(report: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
        """Return the results in a record, by step."""
        return {step: [found] for step, found in report["steps"].items()}


def gpu_scenario(name: str, workload: Workload, **settings: Any) -> GpuScenario:
    """Make one of `SCENARIOS`; ``settings`` are fields of `GpuScenario`. A check has one round.

    Raises:
        ValueError: If the name is unknown, or a setting is out of range.
    """
    if name not in SCENARIOS:
        raise ValueError(f"scenarios must be of {', '.join(SCENARIOS)}, got '{name}'")
    if name in CHECKS:
        return GpuCheck(name=name, workload=workload, **{**settings, "repeats": 1})
    return GpuScenario(name=name, workload=workload, **settings)
