"""Summarise the record of a benchmark: medians, 95 % intervals, and ratios to the baseline.

Repeats are few and skewed, so nothing here assumes a normal distribution, and nothing resamples. Both methods need only
independent repeats:

* For one figure, and for the ratio of two loaders that took turns: the sign test's interval, interpolated between
  neighbouring order statistics (T. P. Hettmansperger and S. J. Sheather, "Confidence intervals based on interpolated
  order statistics", Statistics & Probability Letters 4, 1986, 75-79). Ratios are taken turn by turn first, so a drift
  of the machine, which affects all loaders of a turn alike, cancels out.
* For two runs, whose repeats are unrelated: the interval of Hodges and Lehmann for a shift, here of logarithms
  (M. Hollander and D. A. Wolfe, "Nonparametric Statistical Methods", chapter 4), exact for the Wilcoxon rank sum.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.reports.figures import FIGURES, SETTING_TITLES, BenchFigure
from bench.reports.record import kind_of

Record = Mapping[str, Any]
"""One loader under one setting."""
Report = Mapping[str, Any]

CONFIDENCE = 0.95

MIN_REPEATS = 6
"""With five values, not even the range from smallest to largest is a 95 % interval: it contains the median 15 times in
16."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The median of a figure over repeats, and its 95 % interval."""

    median: float
    low: float | None
    """``None``, as ``high``, if there are too few repeats."""
    high: float | None

    def holds(self, value: float) -> bool:
        """Return whether ``value`` is within. Without an interval no value is excluded."""
        return self.low is None or self.high is None or self.low <= value <= self.high

    def exp(self) -> "Interval":
        """Return the interval of ratios, from that of their logarithms."""
        low, high = (None if end is None else math.exp(end) for end in (self.low, self.high))
        return Interval(median=math.exp(self.median), low=low, high=high)


def median_interval(values: Sequence[float]) -> Interval:
    """Return the median of repeats and its interval; fewer than `MIN_REPEATS` values have no interval.

    With seven values, each end lies 0.73 of the way from the outermost value to the next one.
    """
    ordered, n = sorted(values), len(values)
    middle = statistics.median(ordered)
    if n < MIN_REPEATS:
        return Interval(median=middle, low=None, high=None)
    # The k-th values from either end enclose the median unless fewer than k values lie on one side of it.
    coverages = [1 - 2 * sum(math.comb(n, below) for below in range(k)) / 2**n for k in range(1, n // 2 + 1)]
    k = max(row for row, coverage in enumerate(coverages, start=1) if coverage >= CONFIDENCE)
    wider, narrower = coverages[k - 1], coverages[k] if k < len(coverages) else 0.0
    share = (wider - CONFIDENCE) / (wider - narrower)
    weight = (n - k) * share / (k + (n - 2 * k) * share)
    low = (1 - weight) * ordered[k - 1] + weight * ordered[k]
    high = (1 - weight) * ordered[-k] + weight * ordered[-k - 1]
    # With equal values the weighted sum has a rounding error.
    return Interval(median=middle, low=min(low, middle), high=max(high, middle))


def paired_ratio(values: Sequence[float], baseline: Sequence[float]) -> Interval | None:
    """Return the median of ``values / baseline``, turn by turn, and its interval; ``None`` if a value is not positive.

    They are computed on logarithms, so the inverse ratio has the inverse interval.
    """
    if not _all_positive(values) or not _all_positive(baseline):
        return None
    return median_interval([math.log(a) - math.log(b) for a, b in zip(values, baseline, strict=True)]).exp()


def unpaired_ratio(values: Sequence[float], baseline: Sequence[float]) -> Interval | None:
    """Return the median of ``values / baseline`` over all pairs of two runs at different times, and its interval.

    It is ``None`` if a value is not positive. There is no interval if there are too few values, such as three and
    three.
    """
    if not _all_positive(values) or not _all_positive(baseline):
        return None
    differences = sorted(math.log(a) - math.log(b) for a in values for b in baseline)
    k = _rank_sum_cut(len(values), len(baseline))
    low, high = (differences[k - 1], differences[-k]) if k else (None, None)
    return Interval(median=statistics.median(differences), low=low, high=high).exp()


def _rank_sum_cut(num_values: int, num_baseline: int) -> int:
    """The *k* for which the *k*-th smallest and largest of all pairs' differences enclose the shift in 95 %, or 0."""
    # counts[n, u]: the orders in which n values have u pairs with a smaller baseline value; all orders are equally
    # likely. Values are added in ascending order, by the number of baseline values below them.
    num_pairs = num_values * num_baseline
    counts = np.zeros((num_values + 1, num_pairs + 1))
    counts[0, 0] = 1
    for below in range(num_baseline + 1):
        for n in range(num_values):
            counts[n + 1, below:] += counts[n, : num_pairs + 1 - below]
    tails = np.cumsum(counts[num_values]) / math.comb(num_values + num_baseline, num_values)
    return int(np.searchsorted(tails, (1 - CONFIDENCE) / 2, side="right"))


def _all_positive(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0


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

RATIOS = ("samples_per_s", "mib_per_s", "cpu_ms_per_sample", "cpu_us_per_sample", "cpu_s_per_gib", "first_batch_s")
"""The figures that have a column for the ratio to the baseline."""

EQUAL_WITHIN = 0.05
"""Two loaders are called equal if the whole interval of their ratio is this close to 1; a wide one shows nothing."""


def ratio_cell(report: Report, record: Record, name: str) -> str:
    """Return a figure's ratio to the baseline under the same setting, taken turn by turn, as a cell of a table.

    It ends with "equal" if its whole interval is close to 1, and with "?" if its interval contains 1 and is wider. It
    is a dash if one of them was not measured, or a value is not positive.
    """
    values, baseline = values_of(record, name), baseline_of(report, record)
    theirs = values_of(baseline, name)
    ratio = paired_ratio(values, theirs) if len(theirs) == len(values) else None
    if ratio is None:
        return "-"
    if record is baseline or ratio.low is None or ratio.high is None:
        return f"{ratio.median:.2f}"
    within = ratio.low >= 1 / (1 + EQUAL_WITHIN) and ratio.high <= 1 + EQUAL_WITHIN
    return format_ratio(ratio) + ("" if not ratio.holds(1.0) else " equal" if within else " ?")


def values_of(record: Record, figure: str) -> list[float]:
    """Return one value for each repeat, in order; an empty list if a repeat lacks it."""
    values = [repeat["figures"].get(figure) for repeat in record["repeats"]]
    return [] if any(value is None for value in values) else [float(value) for value in values]


def differing(report: Report, *, share: float = 0.1) -> list[str]:
    """Name rows and figures of `RATIOS` whose 95 % interval, or range of few repeats, is wider than ``share``.

    Only of runs that have ratios.
    """
    found: list[str] = []
    records = report["records"] if report["baseline"] is not None else ()
    for record in records:
        for name in RATIOS:
            if values := values_of(record, name):
                interval = median_interval(values)
                low, high = interval.low or min(values), interval.high or max(values)
                if high - low > share * interval.median:
                    varied = setting_text({one: record["setting"].get(one) for one in setting_names(records)})
                    found.append(f"{label_of(record)}{varied and f' ({varied})'}, {name}: {low:.4g} to {high:.4g}")
    return found


def shown_figures(report: Report, figures: Sequence[str] | None = None) -> list[str]:
    """The figures of a report's table: those that are named, else `BRIEF` of a run, and all of other benchmarks."""
    chosen = figures or (BRIEF if kind_of(report) == "run" else FIGURES)
    return [name for name in chosen if is_telling(report, name)]


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
    """List the parts of a batch that a loader does not give; none where records do not say."""
    return sorted(set(record.get("parts", ())) - set(record.get("gives", ())))


def named(records: Sequence[Record], name: str | None) -> list[Record]:
    """Return the records of the loader ``name``, or of ``NAME:DECODE``."""
    return [record for record in records if name in (record["loader"], f"{record['loader']}:{record['decode']}")]


def baseline_of(report: Report, record: Record) -> Record:
    """Return the baseline's record under the same setting.

    A record is its own baseline if there is no other; of a report without its baseline's loader it is the first record
    of the setting.
    """
    alike = [other for other in report["records"] if other["setting"] == record["setting"]]
    baselines = named(report["records"], report["baseline"])
    return next(iter([*named(alike, report["baseline"]), *([record] if baselines else alike)]))


def restricted(report: Report, *, baseline: str | None = None, loaders: Sequence[str] | None = None) -> Report:
    """Return the same run with ratios to another baseline, or with some of its loaders.

    Each is ``NAME`` or ``NAME:DECODE``; among the loaders a name without a decoder takes all of its decoders.
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
    """Return the number of rounds of a run that was stopped, such as ``2 rounds``; ``None`` for a complete run."""
    if report.get("complete", True):
        return None
    return f"{report.get('num_rounds')} rounds"


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


def format_interval(figure: BenchFigure, values: Sequence[float], *, with_interval: bool = True) -> str:
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
    if ratio.low is None or ratio.high is None:
        return f"{ratio.median:.2f}"
    return f"{ratio.median:.2f} [{ratio.low:.2f}-{ratio.high:.2f}]"


def _number(value: float, figure: BenchFigure) -> str:
    """Format a value with three or four significant digits."""
    shown = value * figure.scale
    digits = min(figure.digits, 0 if abs(shown) >= 99.95 else 1 if abs(shown) >= 9.995 else figure.digits)
    return f"{shown:.{digits}f}"
