"""A run's record to tables: medians, 95 % intervals, ratios to the baseline, as text, Markdown or cells."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.loaders import ALL_PARTS, LOADERS
from bench.reports.figures import FIGURES, Figure
from bench.reports.intervals import MIN_REPEATS, Interval, median_interval, paired_ratio
from bench.reports.tables import format_rows

__all__ = [
    "BRIEF",
    "SETTING_TITLES",
    "Spread",
    "baseline_of",
    "conditions_of",
    "conversions_of",
    "format_interval",
    "format_setting",
    "format_table",
    "is_telling",
    "label_of",
    "notes_of",
    "ratio_of",
    "setting_names",
    "summarise",
    "table_rows",
    "values_of",
]

Record = Mapping[str, Any]
Report = Mapping[str, Any]

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
"""The figures of a table that fits a terminal, where they were measured."""

RATIOS = ("samples_per_s", "cpu_ms_per_sample")
"""Those that are put beside the baseline's."""

EQUAL_WITHIN = 0.05
"""Two loaders are called equal if the whole interval of their ratio is so near to 1: one that is wide shows nothing."""

PART_TITLES = {
    "image": "photos",
    "trimap": "masks",
    "label": "labels",
    "key": "keys",
    "normalised": "normalised photos",
}

SETTING_TITLES = {
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


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A figure over repeats: what there is to say of few of them."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Median, smallest and largest.

        >>> Spread.of([3.0, 1.0, 2.0])
        Spread(median=2.0, min=1.0, max=3.0)
        """
        return cls(median=statistics.median(values), min=min(values), max=max(values))


def label_of(record: Record) -> str:
    """``dali``, ``webloader (pil)``: a record's row in a table; with a star if it does not give all, see `notes_of`."""
    name = record["loader"] if record["decode"] in ("dali", "none") else f"{record['loader']} ({record['decode']})"
    gives = record.get("gives")
    return f"{name} *" if gives is not None and ALL_PARTS - set(gives) else str(name)


def values_of(record: Record, figure: str) -> list[float]:
    """One value a repeat, in their order; none where it was not measured in each of them."""
    values = [repeat["figures"].get(figure) for repeat in record["repeats"]]
    return [] if any(value is None for value in values) else [float(value) for value in values]


def baseline_of(report: Report, record: Record) -> Record:
    """The record that this one's ratios are to: the baseline's under the same setting."""
    alike = [other for other in report["records"] if other["setting"] == record["setting"]]
    name = report.get("baseline")
    exact = [other for other in alike if name == f"{other['loader']}:{other['decode']}"]
    return next(iter([*exact, *(other for other in alike if name == other["loader"]), *alike]))


def ratio_of(report: Report, record: Record, figure: str) -> Interval | None:
    """A figure over the baseline's, turn by turn; ``None`` where either was not measured, or is nothing."""
    values, baseline = values_of(record, figure), values_of(baseline_of(report, record), figure)
    if not values or len(values) != len(baseline):
        return None
    return paired_ratio(values, baseline)


def is_telling(report: Report, figure: str) -> bool:
    """Whether a figure was measured and says something: without a step all of the time is waited, whoever loads."""
    if figure == "wait_share" and not any(record["setting"].get("compute_ms") for record in report["records"]):
        return False
    return any(values_of(record, figure) for record in report["records"])


def summarise(report: Report) -> list[dict[str, Any]]:
    """For each record its figures' medians and intervals, and their ratios to the baseline's."""
    summaries = []
    for record in report["records"]:
        measured = [figure for figure in FIGURES if values_of(record, figure)]
        ratios = {figure: ratio_of(report, record, figure) for figure in measured}
        summaries.append(
            {
                "figures": {figure: asdict(median_interval(values_of(record, figure))) for figure in measured},
                "ratios": {figure: asdict(ratio) for figure, ratio in ratios.items() if ratio is not None},
            }
        )
    return summaries


def setting_names(records: Sequence[Record]) -> list[str]:
    """What differs between the records' settings."""
    names = [name for name in SETTING_TITLES if any(name in record["setting"] for record in records)]
    return [name for name in names if len({record["setting"].get(name) for record in records}) > 1]


def table_rows(
    report: Report, *, figures: Sequence[str] | None = None, intervals: bool = True
) -> tuple[list[list[str]], int]:
    """The table's cells, the header first.

    Args:
        report: A run's.
        figures: Names of `FIGURES`; ``None``: `BRIEF`. What no record has is left out.
        intervals: Beside every figure; else beside those that have a ratio, and beside these.

    Returns:
        The rows, and how many columns are names.
    """
    records = report["records"]
    chosen = [name for name in figures or BRIEF if is_telling(report, name)]
    varied = setting_names(records)
    header = [SETTING_TITLES[name] for name in varied] + ["loader"]
    for name in chosen:
        header.append(_heading(FIGURES[name]))
        if name in RATIOS:
            header.append(f"x {label_of(baseline_of(report, records[0]))}")
    rows = [header]
    for record in records:
        row = [format_setting(record["setting"].get(name)) for name in varied] + [label_of(record)]
        for name in chosen:
            row.append(_cell(record, name, with_interval=intervals or name in RATIOS))
            if name in RATIOS:
                row.append(_ratio_cell(report, record, name))
        rows.append(row)
    return rows, len(varied) + 1


def format_table(
    report: Report, *, markdown: bool = False, figures: Sequence[str] | None = None, intervals: bool = False
) -> str:
    """One row a loader and setting: median and 95 % interval over the repeats, and the paired ratio to the baseline."""
    rows, num_names = table_rows(report, figures=figures, intervals=intervals)
    return format_rows(rows, markdown=markdown, left=num_names)


def notes_of(report: Report) -> list[str]:
    """What a reader of the table must know: how many repeats, what the brackets are, what was not compared."""
    records = report["records"]
    repeats = min(len(record["repeats"]) for record in records)
    if repeats >= MIN_REPEATS:
        notes = [
            f"Medians of {repeats} interleaved repeats, in brackets their 95 % intervals; ratios are taken turn by "
            f'turn: "equal" where all of the interval is within {EQUAL_WITHIN:.0%} of 1, "?" where it holds 1 and more.'
        ]
    else:
        notes = [
            f"Medians of {repeats} interleaved repeats (smallest to largest): too few for a 95 % interval, which takes "
            f"{MIN_REPEATS}."
        ]
    for record in records:
        missing = sorted(ALL_PARTS - set(record["gives"])) if record.get("gives") is not None else []
        if missing:
            parts = [PART_TITLES.get(part, part) for part in missing]
            what = "nothing of the shards" if not record["gives"] else f"no {', no '.join(parts)}"
            note = f"* {record['loader']} gives {what}: that is neither compared nor part of what is timed."
            if note not in notes:
                notes.append(note)
    is_counted = any(values_of(record, "fetched_ratio") for record in records)
    converted = sorted({record["loader"] for record in records if _is_converted(record)})
    if converted and is_counted:
        notes.append(
            f"{', '.join(converted)}: read what was made of the shards before, from a disk of this machine; no request "
            "of theirs is delayed, no byte counted."
        )
    is_warm = any(record["loader"] == "dali" and record["setting"].get("cache") == "warm" for record in records)
    if is_counted and is_warm:
        notes.append("In a warm turn dali has its shards on this machine already; others fetch them in each epoch.")
    for name, wall_s, mib in conversions_of(report)[1:]:
        notes.append(f"{name}: made of the shards in {wall_s} s, {mib} MiB.")
    return notes


def _is_converted(record: Record) -> bool:
    entry = LOADERS.get(record["loader"])
    return entry is not None and entry.source == ("converted",)


def conversions_of(report: Report) -> list[list[str]]:
    """What loaders had made of the shards before they could read them; a header first, or nothing at all."""
    rows: dict[str, list[str]] = {}
    for record in report["records"]:
        if made := record.get("prepared"):
            key = f"{record['loader']} {record['data']} {record['setting'].get('ranks')}"
            rows.setdefault(key, [record["loader"], f"{made['wall_s']:.1f}", f"{made['num_bytes'] / (1 << 20):.1f}"])
    return [["loader", "made in s", "MiB"], *rows.values()] if rows else []


def conditions_of(report: Report) -> list[tuple[str, str]]:
    """What the figures were measured under, each with its name."""
    environment, options = report["environment"], report["options"]
    cpu = environment.get("cpu", {})
    dirty = {True: ", with changes", False: "", None: ""}[environment.get("is_dirty")]
    settings = [record["setting"] for record in report["records"]]
    varied = setting_names(report["records"])
    fixed = {
        SETTING_TITLES[name]: settings[0][name]
        for name in SETTING_TITLES
        if name not in varied and settings[0].get(name) is not None
    }
    found = [
        ("command", report["command"]),
        ("date", environment.get("date")),
        ("commit", f"{environment['commit']}{dirty}" if environment.get("commit") else None),
        (
            "machine",
            f"{cpu.get('model')}, {cpu.get('cores_available')} cores, {environment.get('memory_gib')} GiB; "
            f"{_load(environment)}",
        ),
        ("GPUs", ", ".join(environment.get("gpus", [])) or "none"),
        ("data", "; ".join(_data_line(data) for data in report["data"])),
        ("read from", options.get("source")),
        ("setting", ", ".join(f"{name} {format_setting(value)}" for name, value in fixed.items())),
        (
            "repeats",
            f"{options.get('repeats')} interleaved, {options.get('epochs')} timed epoch"
            f"{'' if options.get('epochs') == 1 else 's'} each",
        ),
        ("versions", ", ".join(f"{name} {version}" for name, version in environment.get("versions", {}).items())),
    ]
    return [(name, text) for name, text in found if text]


def format_interval(figure: Figure, values: Sequence[float], *, with_interval: bool = True) -> str:
    """``1023 [962-1094]``: median and interval; ``1023 (962-1094)``: of too few repeats, smallest to largest."""
    interval = median_interval(values)
    shown = _number(interval.median, figure)
    if not with_interval:
        return shown
    if interval.low is None or interval.high is None:
        low, high = _number(min(values), figure), _number(max(values), figure)
        return f"{shown} ({low}-{high})" if len(values) > 1 else shown
    return f"{shown} [{_number(interval.low, figure)}-{_number(interval.high, figure)}]"


def _cell(record: Record, figure: str, *, with_interval: bool) -> str:
    values = values_of(record, figure)
    return format_interval(FIGURES[figure], values, with_interval=with_interval) if values else "-"


def _ratio_cell(report: Report, record: Record, figure: str) -> str:
    ratio = ratio_of(report, record, figure)
    if ratio is None:
        return "-"
    if record is baseline_of(report, record):
        return f"{ratio.median:.2f}"
    if ratio.low is None or ratio.high is None:
        return f"{ratio.median:.2f}"
    within = ratio.low >= 1 / (1 + EQUAL_WITHIN) and ratio.high <= 1 + EQUAL_WITHIN
    said = "" if not ratio.holds(1.0) else " equal" if within else " ?"
    return f"{ratio.median:.2f} [{ratio.low:.2f}-{ratio.high:.2f}]{said}"


def _heading(figure: Figure) -> str:
    """A column's title; the unit is added where the title is not one itself."""
    return f"{figure.title} {figure.unit}" if figure.unit in ("%", "ms", "s", "MiB") else figure.title


def _number(value: float, figure: Figure) -> str:
    """Three digits or four tell what there is to tell."""
    shown = value * figure.scale
    digits = min(figure.digits, 0 if abs(shown) >= 99.95 else 1 if abs(shown) >= 9.995 else figure.digits)
    return f"{shown:.{digits}f}"


def format_setting(value: object) -> str:
    """A setting's value in a table: ``20`` of 20.0, a dash where there is none."""
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _load(environment: Mapping[str, Any]) -> str:
    """How busy the machine was; what was timed is in the second figure."""
    started, ended = environment.get("load_at_start"), environment.get("cpu", {}).get("load_average_1min")
    return f"load at the end {ended}" if started is None else f"load before {started}, at the end {ended}"


def _data_line(data: Mapping[str, Any]) -> str:
    size = f", {data['shard_bytes'] / (1 << 20):.0f} MiB" if data.get("shard_bytes") else ""
    return f"{data['num_samples']} samples in {data.get('num_shards')} shards{size}"
