"""A run's record to tables: medians, 95 % intervals, ratios to the baseline, as text, Markdown or cells."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.loaders import ALL_PARTS, LOADERS
from bench.reports.figures import FIGURES, Figure
from bench.reports.intervals import MIN_REPEATS, Interval, median_interval, paired_ratio
from bench.reports.tables import format_rows
from bench.timing.settings import SETTING_TITLES, format_setting

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
    "named",
    "notes_of",
    "ratio_of",
    "restricted",
    "rounds_of",
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

FETCHES = 0.05
"""Of the bytes that are needed; less than that is asking whether a shard is still the same."""

PART_TITLES = {
    "image": "photos",
    "trimap": "masks",
    "label": "labels",
    "key": "keys",
    "normalised": "normalised photos",
}

MADE = {
    "dali": "an index, by one process",
    "memory": "an index, by one process",
    "dali-s3": "index files for DALI's reader, by one process",
    "imagefolder": "a file a component, by one process",
    "litdata": "chunks, by a process a core; starting these is in it",
    "mosaic": "shards of its own, by one process",
}
"""What a loader has made first, and which of what it takes is in the time: loaders have it made in their own ways."""


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
    return next(iter([*named(alike, report.get("baseline")), *alike]))


def named(records: Sequence[Record], name: str | None) -> list[Record]:
    """The records of the loader ``name``, or of ``NAME:DECODE``; one that has just this name first."""
    exact = [record for record in records if name == f"{record['loader']}:{record['decode']}"]
    return [*exact, *(record for record in records if name == record["loader"])]


def restricted(report: Report, *, baseline: str | None = None, loaders: Sequence[str] | None = None) -> Report:
    """The same run, with ratios to another loader, or with some of the loaders only; nothing is measured anew.

    Args:
        report: A run's.
        baseline: Whom ratios are to, ``NAME`` or ``NAME:DECODE``; ``None``: as it is, if it is among the loaders.
        loaders: Likewise; a name without a decoder takes all of it. ``None``: all.

    Raises:
        ValueError: If the run has no such loader.
    """
    records = report["records"]
    for name in loaders or ():
        _check_named(records, name, what="--loaders")
    if loaders is not None:
        kept = [id(record) for name in loaders for record in named(records, name)]
        records = [record for record in records if id(record) in kept]
    if baseline is not None:
        _check_named(records, baseline, what="--baseline")
    return {**report, "records": records, "baseline": baseline or report.get("baseline")}


def _check_named(records: Sequence[Record], name: str, *, what: str) -> None:
    if not named(records, name):
        there = dict.fromkeys(_spec_of(record) for record in records)
        raise ValueError(f"{what} must be of {', '.join(there)}, got '{name}'")


def _spec_of(record: Record) -> str:
    return record["loader"] if record["decode"] in ("dali", "none") else f"{record['loader']}:{record['decode']}"


def rounds_of(report: Report) -> str | None:
    """``2 of 7 rounds``, of a run that was stopped; ``None`` of one that was not."""
    if report.get("complete", True):
        return None
    return f"{report.get('num_rounds')} of {report['options'].get('repeats')} rounds"


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


def notes_of(report: Report, *, figures: Sequence[str] | None = None) -> list[str]:
    """What a reader of the table must know: how many repeats, what the brackets are, what was not compared.

    Args:
        report: A run's.
        figures: Of the table, as `table_rows` takes them.
    """
    records = report["records"]
    repeats = min(len(record["repeats"]) for record in records)
    notes = []
    if rounds := rounds_of(report):
        notes.append(f"Stopped after {rounds}, in {report.get('stopped')}.")
    if repeats >= MIN_REPEATS:
        notes.append(
            f"Medians of {repeats} interleaved repeats, in brackets their 95 % intervals; ratios are taken turn by "
            f'turn: "equal" where all of the interval is within {EQUAL_WITHIN:.0%} of 1, "?" where it holds 1 and more.'
        )
    else:
        notes.append(
            f"Medians of {repeats} interleaved repeats (smallest to largest): too few for a 95 % interval, which takes "
            f"{MIN_REPEATS}."
        )
    for record in records:
        missing = sorted(ALL_PARTS - set(record["gives"])) if record.get("gives") is not None else []
        if missing:
            parts = [PART_TITLES.get(part, part) for part in missing]
            what = "nothing of the shards" if not record["gives"] else f"no {', no '.join(parts)}"
            note = f"* {record['loader']} gives {what}: that is neither compared nor part of what is timed."
            if note not in notes:
                notes.append(note)
    notes += _notes_of_loaders(report)
    if "batch_p99_ms" in (figures or BRIEF) and (counts := _few_batches(records)):
        notes.append(
            f"batch p99: of {_span([str(count) for count in counts])} batches a turn, so it is the longest of them."
        )
    if made := conversions_of(report)[1:]:
        told = []
        for loader in dict.fromkeys(name for name, _, _ in made):  # once for all settings
            wall_s, mib = (_span([row[column] for row in made if row[0] == loader]) for column in (1, 2))
            told.append(f"{loader} ({MADE.get(loader, 'a copy')}): {wall_s} s, {mib} MiB")
        notes.append(f"made first: {'; '.join(told)}. It is in no figure.")
    return notes


def _span(texts: Sequence[str]) -> str:
    """Numbers as ``0.1`` or ``0.1 to 0.4``."""
    least, most = min(texts, key=float), max(texts, key=float)
    return least if least == most else f"{least} to {most}"


def _notes_of_loaders(report: Report) -> list[str]:
    """How loaders differ in what they read and decode."""
    records = report["records"]
    entries = {record["loader"]: LOADERS[record["loader"]] for record in records if record["loader"] in LOADERS}
    notes = []
    is_counted = any(values_of(record, "fetched_ratio") for record in records)
    if converted := sorted(name for name, entry in entries.items() if entry.source == ("converted",)):
        from_afar = "; no request of theirs is delayed, no byte counted" if is_counted else ""
        notes.append(
            f"{', '.join(converted)}: read local copies, which were made of the shards before, from a disk of this "
            f"machine{from_afar}."
        )
    warm = [record for record in records if record["setting"].get("cache") == "warm" and record.get("gives")]
    fetching = list(dict.fromkeys(record["loader"] for record in warm if _fetches(record) is True))
    others = dict.fromkeys(record["loader"] for record in warm if _fetches(record) is False)
    keeping = [name for name in others if name not in (*converted, *fetching)]
    if fetching and keeping:
        notes.append(
            f"In a warm turn {', '.join(keeping)} read what the first epoch left on this machine; "
            f"{', '.join(fetching)} fetch in each epoch."
        )
    windowed = [name for name, entry in entries.items() if entry.decodes_window]
    if windowed and any(entry.gives and name not in windowed for name, entry in entries.items()):
        notes.append(f"{', '.join(windowed)}: of a photo, only the window that the crop keeps is decoded.")
    return notes


def _fetches(record: Record) -> bool | None:
    """Whether its timed epochs fetched what they read; ``None`` where nothing was counted."""
    values = values_of(record, "fetched_ratio")
    return statistics.median(values) > FETCHES if values else None


def _few_batches(records: Sequence[Record]) -> set[int]:
    """How many batches the turns had whose 99th percentile is their longest."""
    counts = {
        sum(len((rank.get("steady") or rank["first"])["waits_us"].split()) for rank in repeat["ranks"])
        for record in records
        for repeat in record["repeats"]
        if repeat.get("ranks") and repeat["figures"].get("batch_p99_ms") is not None
    }
    return {count for count in counts if count < 100}


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
            f"{rounds_of(report) or options.get('repeats')} interleaved, {options.get('epochs')} timed epoch"
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


def _load(environment: Mapping[str, Any]) -> str:
    """How busy the machine was; what was timed is in the second figure."""
    started, ended = environment.get("load_at_start"), environment.get("cpu", {}).get("load_average_1min")
    return f"load at the end {ended}" if started is None else f"load before {started}, at the end {ended}"


def _data_line(data: Mapping[str, Any]) -> str:
    size = f", {data['shard_bytes'] / (1 << 20):.0f} MiB" if data.get("shard_bytes") else ""
    return f"{data['num_samples']} samples in {data.get('num_shards')} shards{size}"
