"""Two runs to a verdict: what is worse than before, by how much, how surely; or why the two cannot be compared.

The runs have nothing in common but what they measured, so repeats are not paired
(`bench.reports.intervals.unpaired_ratio`). A figure has regressed if it is worse by more than a threshold and its
interval lies wholly on the worse side. The threshold is for what no interval knows: a machine that is another one
today. Each figure of each loader is judged alone, at 95 %; of many that did not change, one in forty looks worse, and
the threshold keeps most of these quiet.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bench.reports.figures import FIGURES
from bench.reports.intervals import Interval, unpaired_ratio
from bench.reports.report import SETTING_TITLES, format_interval, format_setting, label_of, setting_names, values_of
from bench.reports.tables import format_rows

__all__ = ["JUDGED", "Change", "Verdict", "compare_runs", "differences_of", "format_verdict"]

JUDGED = ("samples_per_s", "cpu_ms_per_sample", "time_to_first_batch_s", "loader_memory_mib", "fetched_ratio")
"""What is compared unless told otherwise; the others vary more, or say the same."""

THRESHOLD = 0.05

Outcome = Literal["worse", "better", "equal", "within the threshold", "not told apart", "too few repeats"]
Report = Mapping[str, Any]
Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One figure of one loader, before and after."""

    record: Record
    """After."""
    figure: str
    before: tuple[float, ...]
    after: tuple[float, ...]
    ratio: Interval
    """After over before."""
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """All changes, and what was in one run only."""

    changes: tuple[Change, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]

    @property
    def regressions(self) -> tuple[Change, ...]:
        """What became worse."""
        return tuple(change for change in self.changes if change.outcome == "worse")

    @property
    def undecided(self) -> tuple[Change, ...]:
        """What may be worse by more than the threshold, as far as the repeats tell."""
        return tuple(change for change in self.changes if change.outcome in ("not told apart", "too few repeats"))


def compare_runs(
    before: Report,
    after: Report,
    *,
    figures: Sequence[str] = JUDGED,
    threshold: float = THRESHOLD,
    anyway: bool = False,
) -> Verdict:
    """Judge a run by an earlier one.

    Args:
        before: A run's record, in the present form.
        after: Likewise.
        figures: Names of `FIGURES`.
        threshold: 0.05: worse by more than 5 %.
        anyway: Compare what is not comparable, too.

    Raises:
        ValueError: If a figure is none, the threshold is negative, nothing is in both runs, or they are not comparable:
            says all that differs.
    """
    if unknown := [figure for figure in figures if figure not in FIGURES]:
        raise ValueError(f"--figures must be of {', '.join(FIGURES)}, got '{unknown[0]}'")
    if not threshold >= 0:
        raise ValueError(f"--threshold must be at least 0, got {threshold:g}")
    if not anyway and (differences := differences_of(before, after)):
        raise ValueError(
            f"the runs are not comparable: {'; '.join(differences)}. Take both alike, or pass --anyway, and know that "
            "the verdict is of these, too"
        )
    earlier = {_key(record): record for record in before["records"]}
    later = {_key(record): record for record in after["records"]}
    common = [key for key in later if key in earlier]
    if not common:
        raise ValueError("no loader was timed under the same setting in both runs")
    changes = [
        change
        for key in common
        for figure in figures
        if (change := _change(earlier[key], later[key], figure, threshold=threshold)) is not None
    ]
    return Verdict(
        changes=tuple(changes),
        only_before=tuple(_name(earlier[key]) for key in earlier if key not in later),
        only_after=tuple(_name(later[key]) for key in later if key not in earlier),
    )


def differences_of(before: Report, after: Report) -> list[str]:
    """What keeps two runs from being compared, in words; versions and commits are what one compares."""
    found: list[str] = []

    def differ(what: str, first: object, second: object) -> None:
        if first != second:
            found.append(f"{what} was {_shown(first)}, is {_shown(second)}")

    machines = [report["environment"] for report in (before, after)]
    for what in ("model", "cores_available"):
        differ(f"CPU {what.replace('_', ' ')}", *(machine.get("cpu", {}).get(what) for machine in machines))
    differ("memory in GiB", *(_rounded(machine.get("memory_gib")) for machine in machines))
    differ("GPUs", *(machine.get("gpus") for machine in machines))
    differ("data", *([_data(data) for data in report["data"]] for report in (before, after)))
    for name in ("photo", "mask", "seed", "device", "epochs", "source", "direct"):
        differ(name, *(report["options"].get(name) for report in (before, after)))
    if (before["version"] == 0) != (after["version"] == 0):
        found.append("one of them was taken before turns had processes of their own")
    return found


def format_verdict(verdict: Verdict) -> str:
    """A row a figure, what is worse first, and a line for each regression."""
    records = [change.record for change in verdict.changes]
    varied = setting_names(records)
    header = [*(SETTING_TITLES[name] for name in varied), "loader", "figure", "before", "after", "after/before", ""]
    order = sorted(verdict.changes, key=lambda change: change.outcome != "worse")
    rows = [header]
    for change in order:
        figure = FIGURES[change.figure]
        rows.append(
            [
                *(format_setting(change.record["setting"].get(name)) for name in varied),
                label_of(change.record),
                figure.title,
                format_interval(figure, change.before),
                format_interval(figure, change.after),
                _ratio(change.ratio),
                change.outcome,
            ]
        )
    lines = [format_rows(rows, left=len(varied) + 2), ""]
    for change in verdict.regressions:
        figure = FIGURES[change.figure]
        lines.append(
            f"worse: {_name(change.record)}: {figure.title} is {_ratio(change.ratio)} of what it was "
            f"({'more' if figure.better == 'high' else 'less'} is better)"
        )
    for what, names in (("before", verdict.only_before), ("after", verdict.only_after)):
        if names:
            lines.append(f"only {what}: {'; '.join(names)}")
    if not verdict.regressions:
        lines.append("nothing is known to be worse" if verdict.undecided else "nothing is worse")
    if verdict.undecided:
        lines.append(
            f"undecided: {len(verdict.undecided)} of {len(verdict.changes)} figures; take more repeats, on a machine "
            "that does nothing else"
        )
    return "\n".join(lines)


def _change(before: Record, after: Record, figure: str, *, threshold: float) -> Change | None:
    first, second = values_of(before, figure), values_of(after, figure)
    if not first or not second:
        return None
    ratio = unpaired_ratio(second, first)
    if ratio is None:
        # A figure may be nothing: what a warm cache fetches. Nothing before and something after has no ratio.
        middles = statistics.median(first), statistics.median(second)
        if middles[0] == middles[1]:
            ratio = Interval(median=1.0, low=1.0, high=1.0)
        else:
            at = math.inf if middles[1] > middles[0] else 0.0
            ratio = Interval(median=at, low=at, high=at)
    return Change(
        record=after,
        figure=figure,
        before=tuple(first),
        after=tuple(second),
        ratio=ratio,
        outcome=_outcome(ratio, more_is_better=FIGURES[figure].better == "high", threshold=threshold),
    )


def _outcome(ratio: Interval, *, more_is_better: bool, threshold: float) -> Outcome:
    if ratio.low is None or ratio.high is None:
        return "too few repeats"
    if ratio.holds(1.0):
        worst = 1 / ratio.low if more_is_better and ratio.low > 0 else ratio.high
        return "equal" if worst <= 1 + threshold else "not told apart"
    is_worse = (ratio.median < 1) == more_is_better
    if 1 / (1 + threshold) <= ratio.median <= 1 + threshold:
        return "within the threshold"
    return "worse" if is_worse else "better"


def _key(record: Record) -> tuple[object, ...]:
    setting = record["setting"]
    return (record["loader"], record["decode"], record["device"], *sorted((k, str(v)) for k, v in setting.items()))


def _name(record: Record) -> str:
    setting = record["setting"]
    said = ", ".join(
        f"{SETTING_TITLES[name]} {format_setting(setting[name])}"
        for name in SETTING_TITLES
        if setting.get(name) is not None
    )
    return f"{label_of(record)} ({said})"


def _data(data: Mapping[str, Any]) -> str:
    if digest := data.get("digest"):
        return f"{data['num_samples']} samples {digest[:12]}"
    return f"{data['num_samples']} samples, {data.get('shard_bytes')} bytes"


def _rounded(gib: float | None) -> int | None:
    """What a kernel takes for itself is not the same at each start."""
    return None if gib is None else round(gib)


def _ratio(ratio: Interval) -> str:
    if ratio.low is None or ratio.high is None:
        return f"{ratio.median:.2f}"
    return f"{ratio.median:.2f} [{ratio.low:.2f}-{ratio.high:.2f}]"


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else f"'{value}'"
