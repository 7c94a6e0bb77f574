"""Two runs to a verdict: what is worse than before, by how much, how surely; or why the two cannot be compared.

The runs have nothing in common but what they measured, so repeats are not paired
(`bench.reports.intervals.unpaired_ratio`). A figure has regressed if it is worse by more than a threshold and its
interval lies wholly on the worse side. The threshold is for what no interval knows: a machine that is another one
today. Each figure of each loader is judged alone, at 95 %; of many that did not change, one in forty looks worse, and
the threshold keeps most of these quiet.

What a busier machine does to all loaders alike can be taken out: then each figure that the machine has a part in is
its ratio to one loader's, round by round within each run, and it is these ratios that are compared.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from bench.reports.figures import FIGURES, Figure
from bench.reports.intervals import Interval, unpaired_ratio
from bench.reports.report import (
    SETTING_TITLES,
    format_interval,
    format_setting,
    label_of,
    named,
    rounds_of,
    setting_names,
    values_of,
)
from bench.reports.tables import format_rows
from bench.timing.settings import setting_text

__all__ = ["JUDGED", "Change", "Verdict", "compare_runs", "differences_of", "format_verdict"]

JUDGED = (
    "samples_per_s",
    "cpu_ms_per_sample",
    "time_to_first_batch_s",
    "loader_memory_mib",
    "shared_memory_mib",
    "fetched_ratio",
)
"""What is compared unless told otherwise; the others vary more, or say the same."""

THRESHOLD = 0.05

NOTHING = 1e-3
"""Of the smallest value there is: what a repeat that measured nothing counts as, beside others that did not."""

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
    relative_to: str | None = None
    """``before`` and ``after`` are ratios to this loader's figure."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """All changes, and what was in one run only."""

    changes: tuple[Change, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    stopped: tuple[str, ...] = ()
    """A line for a run that has fewer rounds than it was to have."""

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
    relative_to: str | None = None,
    anyway: bool = False,
) -> Verdict:
    """Judge a run by an earlier one.

    Args:
        before: A run's record, in the present form.
        after: Likewise.
        figures: Names of `FIGURES`.
        threshold: 0.05: worse by more than 5 %.
        relative_to: A loader, ``NAME`` or ``NAME:DECODE``: figures that depend on the machine are taken as ratios to
            its, round by round; it is then not judged itself by these.
        anyway: Compare what is not comparable, too. Of settings only that counts which both runs' forms have, so that
            records of before there were ranks and caches can be held against later ones; where several settings are
            alike then, none of them is compared.

    Raises:
        ValueError: If a figure is none, the threshold is negative, nothing is in both runs, ``relative_to`` is not, or
            they are not comparable: says all that differs.
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
    if relative_to is not None:
        for when, run in (("before", before), ("after", after)):
            if not named(run["records"], relative_to):
                there = ", ".join(dict.fromkeys(record["loader"] for record in run["records"]))
                raise ValueError(f"--relative-to must be in both runs, got '{relative_to}'; {when} are: {there}")
    fields = _fields(before) & _fields(after) if anyway else None
    earlier, later = _by_key(before, fields), _by_key(after, fields)
    common = [key for key in later if key in earlier]
    if not common:
        raise ValueError("no loader was timed under the same setting in both runs")
    changes = [
        change
        for key in common
        for figure in figures
        if (
            change := _change(
                _Side(before, earlier[key]), _Side(after, later[key]), figure, threshold, relative_to=relative_to
            )
        )
        is not None
    ]
    if not changes:
        beside = "" if relative_to is None else f", beside those of '{relative_to}'"
        raise ValueError(f"none of {', '.join(figures)} was measured in both runs{beside}; name others: --figures")
    return Verdict(
        changes=tuple(changes),
        only_before=_names_without(before, [earlier[key] for key in common]),
        only_after=_names_without(after, [later[key] for key in common]),
        stopped=tuple(
            f"{when}: stopped after {rounds}"
            for when, run in (("before", before), ("after", after))
            if (rounds := rounds_of(run))
        ),
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
    rows = [
        [
            *(format_setting(change.record["setting"].get(name)) for name in varied),
            label_of(change.record),
            _title(change),
            *(format_interval(_shown_as(change), values) for values in (change.before, change.after)),
            _ratio(change.ratio),
            change.outcome,
        ]
        for change in order
    ]
    lines = [format_rows([header, *rows], left=len(varied) + 2), ""]
    for change in verdict.regressions:
        figure = FIGURES[change.figure]
        lines.append(
            f"worse: {_name(change.record)}: {_title(change)} is {_ratio(change.ratio)} of what it was "
            f"({'more' if figure.better == 'high' else 'less'} is better)"
        )
    lines += verdict.stopped
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


@dataclass(frozen=True)
class _Side:
    """A record and the run that it is of."""

    run: Report
    record: Record

    def values(self, figure: str, *, relative_to: str | None) -> list[float]:
        """One a round; none where it was not measured."""
        values = values_of(self.record, figure)
        if relative_to is None:
            return values
        alike = [other for other in self.run["records"] if other["setting"] == self.record["setting"]]
        references = named(alike, relative_to)
        if not references or references[0] is self.record:
            return []
        theirs = values_of(references[0], figure)
        if len(theirs) != len(values) or not all(value > 0 for value in theirs):
            return []
        return [value / reference for value, reference in zip(values, theirs, strict=True)]


def _change(before: _Side, after: _Side, figure: str, threshold: float, *, relative_to: str | None) -> Change | None:
    relative_to = relative_to if FIGURES[figure].of_the_machine else None
    first, second = (side.values(figure, relative_to=relative_to) for side in (before, after))
    if not first or not second:
        return None
    middles = statistics.median(first), statistics.median(second)
    if min(middles) > 0:
        floor = NOTHING * min(value for value in (*first, *second) if value > 0)
        ratio = unpaired_ratio([max(floor, value) for value in second], [max(floor, value) for value in first])
        assert ratio is not None, "all are positive"
    elif middles[0] == middles[1]:
        # A figure may be nothing: what a warm cache fetches. Nothing before and something after has no ratio.
        ratio = Interval(median=1.0, low=1.0, high=1.0)
    else:
        at = math.inf if middles[1] > middles[0] else 0.0
        ratio = Interval(median=at, low=at, high=at)
    return Change(
        record=after.record,
        figure=figure,
        before=tuple(first),
        after=tuple(second),
        ratio=ratio,
        outcome="within the threshold"
        if relative_to is None and abs(middles[1] - middles[0]) < FIGURES[figure].least
        else _outcome(ratio, more_is_better=FIGURES[figure].better == "high", threshold=threshold),
        relative_to=relative_to,
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


def _title(change: Change) -> str:
    relative = "" if change.relative_to is None else f" / {change.relative_to}'s"
    return f"{FIGURES[change.figure].title}{relative}"


def _shown_as(change: Change) -> Figure:
    """How its values are written: a ratio has no unit and no scale."""
    figure = FIGURES[change.figure]
    return figure if change.relative_to is None else replace(figure, unit="", scale=1.0, digits=2)


def _fields(run: Report) -> frozenset[str]:
    """What the settings of a run hold."""
    return frozenset(name for record in run["records"] for name in record["setting"])


def _by_key(run: Report, fields: frozenset[str] | None) -> dict[tuple[object, ...], Record]:
    """Each record by loader and setting, as far as the setting counts; not those that are alike then."""
    found: dict[tuple[object, ...], list[Record]] = {}
    for record in run["records"]:
        setting = {name: value for name, value in record["setting"].items() if fields is None or name in fields}
        key = (record["loader"], record["decode"], record["device"], *sorted((k, str(v)) for k, v in setting.items()))
        found.setdefault(key, []).append(record)
    return {key: records[0] for key, records in found.items() if len(records) == 1}


def _names_without(run: Report, compared: Sequence[Record]) -> tuple[str, ...]:
    known = {id(record) for record in compared}
    return tuple(_name(record) for record in run["records"] if id(record) not in known)


def _name(record: Record) -> str:
    return f"{label_of(record)} ({setting_text(record['setting'])})"


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
