"""Compare two runs: which figures became worse, by how much and how surely; or why the two cannot be compared.

A figure has regressed if it is worse by more than a threshold, and its whole 95 % interval is on the worse side. The
threshold covers what no interval knows: the machine may have changed between the runs. Of many figures that did not
change, one in forty looks worse; the threshold hides most of these. A busier machine slows all loaders alike, and this
can be taken out: then each figure that depends on the machine is replaced by its ratio to one loader's, round by round
within each run.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from bench.reports.figures import FIGURES, SETTING_TITLES, BenchFigure
from bench.reports.summary import (
    Interval,
    Record,
    Report,
    format_interval,
    format_ratio,
    format_setting,
    label_of,
    named,
    rounds_of,
    setting_names,
    setting_text,
    unpaired_ratio,
    values_of,
)
from bench.reports.tables import format_rows

JUDGED = (
    "samples_per_s",
    "cpu_ms_per_sample",
    "cpu_us_per_sample",
    "faults_per_sample",
    "read_ratio",
    "time_to_first_batch_s",
    "loader_memory_mib",
    "shared_memory_mib",
    "fetched_ratio",
    "cpu_s_per_gib",
    "accelerators",
    "first_batch_s",
    "open_s",
)
"""The figures that are compared by default; the others vary more, or say the same."""

THRESHOLD = 0.05

NOTHING = 1e-3
"""A repeat that measured 0 counts as this share of the smallest other value."""

Outcome = Literal["worse", "better", "equal", "within the threshold", "not told apart", "too few repeats"]


class FigureChange(NamedTuple):
    record: Record
    """The record of the later run."""
    figure: str
    shown: BenchFigure
    """The figure as it is shown; a ratio to another loader's figure has no scale."""
    before: Sequence[float]
    after: Sequence[float]
    ratio: Interval
    """The later value divided by the earlier one."""
    outcome: Outcome


class Verdict(NamedTuple):
    """The changes of all figures between two runs, and notes for the reader."""

    changes: tuple[FigureChange, ...]
    notes: tuple[str, ...]
    """One line for each run that stopped early, or has records that the other run lacks."""

    @property
    def regressions(self) -> tuple[FigureChange, ...]:
        return tuple(change for change in self.changes if change.outcome == "worse")


def compare_runs(
    before: Report,
    after: Report,
    *,
    figures: Sequence[str] = JUDGED,
    threshold: float = THRESHOLD,
    relative_to: str | None = None,
    anyway: bool = False,
) -> Verdict:
    """Judge a run by an earlier one.

    A figure of ``figures`` counts as worse if it changed for the worse by more than the share ``threshold``. With
    ``relative_to``, ``NAME`` or ``NAME:DECODE``, figures that depend on the machine are replaced by ratios to this
    loader's figures, round by round, and are not judged for this loader itself. ``anyway`` compares runs that are not
    comparable, too: settings are then matched by the fields that both runs have, and records that become equal in this
    way are left out.
    """
    runs = {"before": before, "after": after}
    if unknown := [figure for figure in figures if figure not in FIGURES]:
        raise ValueError(f"--figures must be of {', '.join(FIGURES)}, got '{unknown[0]}'")
    if not threshold >= 0:
        raise ValueError(f"--threshold must be at least 0, got {threshold:g}")
    if not anyway and (differences := differences_of(before, after)):
        raise ValueError(
            f"the runs are not comparable: {'; '.join(differences)}. Take both in the same way, or pass --anyway; the "
            "verdict then includes these differences"
        )
    for when, run in runs.items():
        if relative_to is not None and not named(run["records"], relative_to):
            there = ", ".join(dict.fromkeys(record["loader"] for record in run["records"]))
            raise ValueError(f"--relative-to must be in both runs, got '{relative_to}'; {when} are: {there}")
    names = ({name for one in run["records"] for name in one["setting"]} for run in runs.values())
    fields = set.intersection(*names) if anyway else None
    records = {when: _by_key(run, fields) for when, run in runs.items()}
    earlier, later = records.values()
    common = [key for key in later if key in earlier]
    if not common:
        raise ValueError("no loader was timed under the same setting in both runs")
    found = (
        _change((before, earlier[key]), (after, later[key]), figure, threshold=threshold, relative_to=relative_to)
        for key in common
        for figure in figures
    )
    changes = tuple(change for change in found if change is not None)
    if not changes:
        raise ValueError(f"none of {', '.join(figures)} was measured in both runs; name others: --figures")
    notes = []
    for when, run in runs.items():
        if (rounds := rounds_of(run)) is not None:
            notes.append(f"{when}: stopped after {rounds}")
        compared = {id(records[when][key]) for key in common}
        if alone := [_name(record) for record in run["records"] if id(record) not in compared]:
            notes.append(f"only {when}: {'; '.join(alone)}")
    return Verdict(changes, tuple(notes))


def differences_of(before: Report, after: Report) -> list[str]:
    """List the differences that forbid a comparison of two runs; versions and commits may differ."""
    first, second = _conditions(before), _conditions(after)
    return [f"{what} was {first[what]}, is {second[what]}" for what in first if first[what] != second[what]]


def _conditions(report: Report) -> dict[str, object]:
    environment, options = report["environment"], report["options"]
    cpu, gib = environment.get("cpu", {}), environment.get("memory_gib")
    same = ("recipe", "photo", "mask", "seed", "device", "epochs", "passes", "source", "direct")
    return {
        "benchmark": report["format"],
        "CPU model": cpu.get("model"),
        "CPU cores available": cpu.get("cores_available"),
        # Rounded: the memory that a kernel keeps for itself differs from start to start.
        "memory in GiB": None if gib is None else round(gib),
        "GPUs": environment.get("gpus"),
        "data": [(one["num_samples"], one.get("digest") or one.get("shard_bytes")) for one in report["data"]],
        **{name: options.get(name) for name in same},
    }


def format_verdict(verdict: Verdict) -> str:
    """Return a row for each figure, the worse ones first, and a line for each regression."""
    varied = setting_names([change.record for change in verdict.changes])
    rows = [[*(SETTING_TITLES[name] for name in varied), "loader", "figure", "before", "after", "after/before", ""]]
    rows += [
        [
            *(format_setting(change.record["setting"].get(name)) for name in varied),
            label_of(change.record),
            change.shown.title,
            format_interval(change.shown, change.before),
            format_interval(change.shown, change.after),
            format_ratio(change.ratio),
            change.outcome,
        ]
        for change in sorted(verdict.changes, key=lambda change: change.outcome != "worse")
    ]
    lines = [format_rows(rows, left=len(varied) + 2), ""]
    for change in verdict.regressions:
        ratio, better = format_ratio(change.ratio), "more" if change.shown.better == "high" else "less"
        title = change.shown.title
        lines.append(f"worse: {_name(change.record)}: {title} is {ratio} of what it was ({better} is better)")
    undecided = sum(change.outcome in ("not told apart", "too few repeats") for change in verdict.changes)
    if not verdict.regressions:
        lines.append("nothing is known to be worse" if undecided else "nothing is worse")
    if undecided:
        lines.append(f"undecided: {undecided} of {len(verdict.changes)} figures; take more repeats, on an idle machine")
    return "\n".join([*lines, *verdict.notes])


def _change(
    before: tuple[Report, Record],
    after: tuple[Report, Record],
    figure: str,
    *,
    threshold: float,
    relative_to: str | None,
) -> FigureChange | None:
    shown = FIGURES[figure]
    relative_to = relative_to if shown.of_the_machine else None
    first, second = (_values(*side, figure, relative_to=relative_to) for side in (before, after))
    if not first or not second:
        return None
    ratio, middles = _ratio(first, second), (statistics.median(first), statistics.median(second))
    outcome = _outcome(ratio, more_is_better=shown.better == "high", threshold=threshold)
    if relative_to is not None:
        shown = replace(shown, title=f"{shown.title} / {relative_to}'s", scale=1.0, digits=2)
    elif abs(middles[1] - middles[0]) < shown.least:
        outcome = "within the threshold"
    return FigureChange(after[1], figure, shown, first, second, ratio, outcome)


def _values(run: Report, record: Record, figure: str, *, relative_to: str | None) -> list[float]:
    """Return one value for each round; none if it was not measured, or if ``relative_to`` is this record's loader."""
    values = values_of(record, figure)
    if relative_to is None:
        return values
    references = named([other for other in run["records"] if other["setting"] == record["setting"]], relative_to)
    if not references or references[0] is record:
        return []
    theirs = values_of(references[0], figure)
    if len(theirs) != len(values) or not all(value > 0 for value in theirs):
        return []
    return [value / reference for value, reference in zip(values, theirs, strict=True)]


def _ratio(before: Sequence[float], after: Sequence[float]) -> Interval:
    """Return ``after / before``. If a median is 0, such as the bytes that a warm cache fetches: 1, infinity or 0."""
    middles = statistics.median(before), statistics.median(after)
    if min(middles) > 0:
        floor = NOTHING * min(value for value in (*before, *after) if value > 0)
        ratio = unpaired_ratio([max(floor, value) for value in after], [max(floor, value) for value in before])
        assert ratio is not None, "all are positive"
        return ratio
    at = 1.0 if middles[0] == middles[1] else math.inf if middles[1] > middles[0] else 0.0
    return Interval(median=at, low=at, high=at)


def _outcome(ratio: Interval, *, more_is_better: bool, threshold: float) -> Outcome:
    if ratio.low is None or ratio.high is None:
        return "too few repeats"
    if ratio.holds(1.0):
        worst = 1 / ratio.low if more_is_better and ratio.low > 0 else ratio.high
        return "equal" if worst <= 1 + threshold else "not told apart"
    if 1 / (1 + threshold) <= ratio.median <= 1 + threshold:
        return "within the threshold"
    return "worse" if (ratio.median < 1) == more_is_better else "better"


def _by_key(run: Report, fields: set[str] | None) -> dict[tuple[object, ...], Record]:
    """Map loader and setting to each record, without records that have the same values in ``fields``."""
    found: dict[tuple[object, ...], list[Record]] = {}
    for record in run["records"]:
        setting = {name: value for name, value in record["setting"].items() if fields is None or name in fields}
        key = (record["loader"], record["decode"], record["device"], *sorted((k, str(v)) for k, v in setting.items()))
        found.setdefault(key, []).append(record)
    return {key: records[0] for key, records in found.items() if len(records) == 1}


def _name(record: Record) -> str:
    return f"{label_of(record)} ({setting_text(record['setting'])})"
