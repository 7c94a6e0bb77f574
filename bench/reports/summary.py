"""Summarise the record of a run: medians, 95 % intervals, and ratios to the baseline."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.loaders.registry import PARTS
from bench.reports.figures import FIGURES, Figure
from bench.reports.intervals import Interval, median_interval, paired_ratio

Record = Mapping[str, Any]
"""One loader under one setting."""
Report = Mapping[str, Any]
"""The record of a run, in its present form."""

SETTING_TITLES: Mapping[str, str] = {
    "photo_kb": "photo kB",
    "masks": "masks",
    "recipe": "recipe",
    "workers": "workers",
    "threads": "threads",
    "ranks": "ranks",
    "batch_size": "batch",
    "crop": "crop",
    "cache": "cache",
    "compute_ms": "compute ms",
    "latency_ms": "latency ms",
    "shards": "shards",
    "photo_side": "photo side",
}
"""A setting's fields, as tables and errors call them."""

BRIEF = (
    "samples_per_s",
    "cpu_ms_per_sample",
    "time_to_first_batch_s",
    "batch_p99_ms",
    "wait_share",
    "accelerator_utilisation",
    "loader_memory_mib",
    "shared_memory_mib",
    "fetched_ratio",
)
"""The figures of a table that fits a terminal, if they were measured."""

EQUAL_WITHIN = 0.05
"""Two loaders are called equal if the whole interval of their ratio is this close to 1; a wide one shows nothing."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One figure of one record, over the repeats."""

    figure: Figure
    values: Sequence[float]
    """One for each repeat, in their order."""
    interval: Interval
    ratio: Interval | None
    """The ratio to the baseline under the same setting, taken turn by turn; ``None`` if the baseline's was not
    measured, or a value is not positive."""
    is_baseline: bool

    def shown(self, *, with_interval: bool = True) -> str:
        """The figure as a cell of a table."""
        return format_interval(self.figure, self.values, with_interval=with_interval)

    def ratio_shown(self) -> str:
        """The ratio as a cell of a table.

        It ends with "equal" if its whole interval is close to 1, and with "?" if its interval contains 1 and is wider.
        """
        ratio = self.ratio
        if ratio is None:
            return "-"
        if self.is_baseline or ratio.low is None or ratio.high is None:
            return f"{ratio.median:.2f}"
        within = ratio.low >= 1 / (1 + EQUAL_WITHIN) and ratio.high <= 1 + EQUAL_WITHIN
        return format_ratio(ratio) + ("" if not ratio.holds(1.0) else " equal" if within else " ?")


def measured(report: Report, record: Record, name: str) -> Measured | None:
    """Return a figure of a record; ``None`` if it was not measured in each repeat."""
    if not (values := values_of(record, name)):
        return None
    baseline = baseline_of(report, record)
    theirs = values_of(baseline, name)
    return Measured(
        figure=FIGURES[name],
        values=values,
        interval=median_interval(values),
        ratio=paired_ratio(values, theirs) if len(theirs) == len(values) else None,
        is_baseline=record is baseline,
    )


def summarise(report: Report) -> list[dict[str, Any]]:
    """Return the medians and intervals of each record's figures, and of their ratios to the baseline, for JSON."""
    summaries = []
    for record in report["records"]:
        found = {name: one for name in FIGURES if (one := measured(report, record, name)) is not None}
        summaries.append(
            {
                "figures": {name: asdict(one.interval) for name, one in found.items()},
                "ratios": {name: asdict(one.ratio) for name, one in found.items() if one.ratio is not None},
            }
        )
    return summaries


def values_of(record: Record, figure: str) -> list[float]:
    """Return one value for each repeat, in order; an empty list if a repeat lacks it."""
    values = [repeat["figures"].get(figure) for repeat in record["repeats"]]
    return [] if any(value is None for value in values) else [float(value) for value in values]


def is_telling(report: Report, figure: str) -> bool:
    """Whether a figure was measured and is meaningful: without an emulated step, all time is waiting."""
    if figure == "wait_share" and not any(record["setting"].get("compute_ms") for record in report["records"]):
        return False
    return any(values_of(record, figure) for record in report["records"])


def label_of(record: Record) -> str:
    """Name a record's row: ``dali``, ``webloader (pil)``. A star marks a loader that does not give all parts."""
    name, decode = record["loader"], record["decode"]
    label = name if decode in ("dali", "none") else f"{name} ({decode})"
    return f"{label} *" if missing_parts(record) else str(label)


def missing_parts(record: Record) -> list[str]:
    """List the parts of a batch that a loader does not give; none for the oldest records, whose loaders gave all."""
    gives = record.get("gives")
    return [] if gives is None else sorted(set(record.get("parts", PARTS["segmentation"])) - set(gives))


def named(records: Sequence[Record], name: str | None) -> list[Record]:
    """Return the records of the loader ``name``, or of ``NAME:DECODE``."""
    return [record for record in records if name in (record["loader"], f"{record['loader']}:{record['decode']}")]


def baseline_of(report: Report, record: Record) -> Record:
    """Return the baseline's record under the same setting, or the first of that setting."""
    alike = [other for other in report["records"] if other["setting"] == record["setting"]]
    return next(iter([*named(alike, report.get("baseline")), *alike]))


def restricted(report: Report, *, baseline: str | None = None, loaders: Sequence[str] | None = None) -> Report:
    """Return the same run with ratios to another loader, or with some of its loaders.

    Args:
        report: The run.
        baseline: ``NAME`` or ``NAME:DECODE``; ``None``: the run's baseline, if it is among the loaders.
        loaders: Likewise; a name without a decoder takes all of its decoders. ``None``: all.

    Raises:
        ValueError: If the run has no such loader.
    """
    records = report["records"]
    if loaders is not None:
        chosen = [id(record) for name in loaders for record in _known(records, name, option="--loaders")]
        records = [record for record in records if id(record) in chosen]
    if baseline is not None:
        _known(records, baseline, option="--baseline")
    return {**report, "records": records, "baseline": baseline or report.get("baseline")}


def _known(records: Sequence[Record], name: str, *, option: str) -> list[Record]:
    found = named(records, name)
    if not found:
        there = dict.fromkeys(
            one["loader"] if one["decode"] in ("dali", "none") else f"{one['loader']}:{one['decode']}"
            for one in records
        )
        raise ValueError(f"{option} must be of {', '.join(there)}, got '{name}'")
    return found


def rounds_of(report: Report) -> str | None:
    """Return ``2 of 7 rounds`` for a run that was stopped early; ``None`` for a complete one."""
    if report.get("complete", True):
        return None
    return f"{report.get('num_rounds')} of {report['options'].get('repeats')} rounds"


def setting_names(records: Sequence[Record]) -> list[str]:
    """Return the fields in which the records' settings differ."""
    return [name for name in SETTING_TITLES if len({record["setting"].get(name) for record in records}) > 1]


def format_setting(value: object) -> str:
    """Return a setting's value for a table: ``20`` of 20.0, a dash for ``None``."""
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def setting_text(setting: Mapping[str, Any], *, without: Sequence[str] = ()) -> str:
    """Return the fields of a setting in words, except those that are ``None`` or in ``without``.

    >>> setting_text({"threads": 2, "batch_size": 64, "latency_ms": None})
    'threads 2, batch 64'
    """
    return ", ".join(
        f"{title} {format_setting(setting[name])}"
        for name, title in SETTING_TITLES.items()
        if setting.get(name) is not None and name not in without
    )


def format_interval(figure: Figure, values: Sequence[float], *, with_interval: bool = True) -> str:
    """Return ``1023 [962-1094]``, median and interval; with too few repeats ``1023 (962-1094)``, the whole range."""
    interval = median_interval(values)
    shown = _number(interval.median, figure)
    if not with_interval:
        return shown
    if interval.low is None or interval.high is None:
        low, high = _number(min(values), figure), _number(max(values), figure)
        return f"{shown} ({low}-{high})" if len(values) > 1 else shown
    return f"{shown} [{_number(interval.low, figure)}-{_number(interval.high, figure)}]"


def format_ratio(ratio: Interval) -> str:
    """Return ``0.97 [0.95-0.99]``."""
    if ratio.low is None or ratio.high is None:
        return f"{ratio.median:.2f}"
    return f"{ratio.median:.2f} [{ratio.low:.2f}-{ratio.high:.2f}]"


def _number(value: float, figure: Figure) -> str:
    """Format a value with three or four significant digits."""
    shown = value * figure.scale
    digits = min(figure.digits, 0 if abs(shown) >= 99.95 else 1 if abs(shown) >= 9.995 else figure.digits)
    return f"{shown:.{digits}f}"
