"""Write the notes for a reader of a run's table: notes on loaders, conditions, and earlier conversions."""

import statistics
from collections.abc import Sequence

from bench.loaders.registry import LOADERS
from bench.reports.intervals import MIN_REPEATS
from bench.reports.summary import (
    BRIEF,
    EQUAL_WITHIN,
    Record,
    Report,
    missing_parts,
    rounds_of,
    setting_names,
    setting_text,
    values_of,
)

FETCHES = 0.05
"""Share of the needed bytes; a loader that fetches less only asks whether a shard is still the same."""
P99_BATCHES = 100
"""With fewer batches, the 99th percentile is the longest."""

PART_TITLES = {
    "image": "photos",
    "mask": "masks",
    "label": "labels",
    "key": "keys",
    "normalised": "normalised photos",
    "encoded": "photos' files",
}


_RECIPES = {
    "segmentation": None,  # which all older records are
    "classification": "classification: each photo's given crop, resized, flipped or not, normalised",
    "encoded": "encoded: the photos' files, not decoded",
}


def notes_of(report: Report, *, figures: Sequence[str] | None = None) -> list[str]:
    """Return the notes below a run's table: how many repeats, what brackets mean, how the loaders differ.

    ``figures`` are those of the table; ``None``: `BRIEF`.
    """
    records = report["records"]
    notes = [] if (rounds := rounds_of(report)) is None else [f"Stopped after {rounds}, in {report.get('stopped')}."]
    for row in report.get("failed", ()):
        setting = f" ({setting_text(row['setting'])})" if row["setting"] else ""
        notes.append(f"{row['loader']}{setting} failed, and is left out: {row['error']}")
    if (repeats := min(len(record["repeats"]) for record in records)) < MIN_REPEATS:
        notes.append(
            f"Medians of {repeats} interleaved repeats (smallest to largest); too few for a 95 % interval, which needs "
            f"{MIN_REPEATS}."
        )
    else:
        notes.append(
            f"Medians of {repeats} interleaved repeats, with 95 % intervals in brackets. Ratios are taken turn by "
            f'turn: "equal" if the whole interval is within {EQUAL_WITHIN:.0%} of 1, "?" if it contains 1 and is wider.'
        )
    notes += dict.fromkeys(note for record in records if (note := _parts_note(record)) is not None)
    notes += _loader_notes(report)
    if "batch_p99_ms" in (figures or BRIEF) and (counts := _few_batches(records)):
        notes.append(f"batch p99: a turn has {_span(counts)} batches, so it is the longest of them.")
    if made := conversions_of(report)[1:]:
        each = []
        for loader in dict.fromkeys(row[0] for row in made):  # once for all settings
            wall_s, mib = (_span([row[column] for row in made if row[0] == loader]) for column in (1, 2))
            what = LOADERS[loader].makes if loader in LOADERS else "a copy"
            each.append(f"{loader} ({what}): {wall_s} s, {mib} MiB")
        notes.append(f"Preparation (not included in the figures): {'; '.join(each)}.")
    return notes


def _parts_note(record: Record) -> str | None:
    """Name the parts of a batch that a loader does not give; ``None`` if it gives all, as in the oldest records."""
    if not (missing := missing_parts(record)):
        return None
    parts = ", no ".join(PART_TITLES.get(part, part) for part in missing)
    what = f"no {parts}" if record["gives"] else "nothing from the shards"
    return f"* {record['loader']} gives {what}: what it does not give is neither compared nor timed."


def _loader_notes(report: Report) -> list[str]:
    """Say how loaders differ in what they read and decode."""
    records = report["records"]
    entries = {record["loader"]: LOADERS[record["loader"]] for record in records if record["loader"] in LOADERS}
    notes = []
    converted = sorted(name for name, entry in entries.items() if entry.source == ("converted",))
    if converted:
        is_counted = any(values_of(record, "fetched_ratio") for record in records)
        uncounted = "; they make no request that is delayed or counted" if is_counted else ""
        notes.append(
            f"{', '.join(converted)}: read local copies, converted from the shards before, on a disk of this "
            f"machine{uncounted}."
        )
    fetches: dict[str, bool] = {}
    for record in records:
        ratios = values_of(record, "fetched_ratio")
        if ratios and record["setting"].get("cache") == "warm" and record.get("gives"):
            name = record["loader"]
            fetches[name] = fetches.get(name, False) or statistics.median(ratios) > FETCHES
    fetching = [name for name, does in fetches.items() if does]
    keeping = [name for name, does in fetches.items() if not does and name not in converted]
    if fetching and keeping:
        notes.append(
            f"In a warm turn {', '.join(keeping)} read what the first epoch left on this machine; "
            f"{', '.join(fetching)} fetch in each epoch."
        )
    windowed = [name for name, entry in entries.items() if entry.decodes_window]
    if windowed and any(entry.gives and name not in windowed for name, entry in entries.items()):
        notes.append(f"{', '.join(windowed)}: decode only the part of a photo that the crop keeps.")
    return notes


def _few_batches(records: Sequence[Record]) -> list[str]:
    """Note how many batches the turns had, if these are too few for a 99th percentile."""
    counts = {
        sum(len((rank.get("steady") or rank["first"])["waits_us"].split()) for rank in repeat["ranks"])
        for record in records
        for repeat in record["repeats"]
        if repeat.get("ranks") and repeat["figures"].get("batch_p99_ms") is not None
    }
    return [str(count) for count in counts if count < P99_BATCHES]


def _span(texts: Sequence[str]) -> str:
    """Return numbers as ``0.1`` or ``0.1 to 0.4``."""
    least, most = min(texts, key=float), max(texts, key=float)
    return least if least == most else f"{least} to {most}"


def conversions_of(report: Report) -> list[list[str]]:
    """Return the table of conversions that were made for loaders: a header and rows, or an empty list."""
    rows: dict[str, list[str]] = {}
    for record in report["records"]:
        if made := record.get("prepared"):
            key = f"{record['loader']} {record['data']} {record['setting'].get('ranks')}"
            rows.setdefault(key, [record["loader"], f"{made['wall_s']:.1f}", f"{made['num_bytes'] / (1 << 20):.1f}"])
    return [["loader", "made in s", "MiB"], *rows.values()] if rows else []


def conditions_of(report: Report) -> list[tuple[str, str]]:
    """Return name and text of each condition on which the figures depend."""
    environment, options, records = report["environment"], report["options"], report["records"]
    cpu, commit, epochs = environment.get("cpu", {}), environment.get("commit"), options.get("epochs")
    # The load at the end includes what was timed.
    load, before = f"at the end {cpu.get('load_average_1min')}", environment.get("load_at_start")
    found = {
        "command": report["command"],
        "date": environment.get("date"),
        "commit": f"{commit}{', with changes' if environment.get('is_dirty') else ''}" if commit else None,
        "machine": f"{cpu.get('model')}, {cpu.get('cores_available')} cores, {environment.get('memory_gib')} GiB; load "
        + (load if before is None else f"before {before}, {load}"),
        "GPUs": ", ".join(environment.get("gpus", [])) or "none",
        "data": "; ".join(
            f"{data['num_samples']} samples in {data.get('num_shards')} shards"
            + (f", {data['shard_bytes'] / (1 << 20):.0f} MiB" if data.get("shard_bytes") else "")
            for data in report["data"]
        ),
        "recipe": _RECIPES[options.get("recipe", "segmentation")],
        "read from": options.get("source"),
        "setting": setting_text(records[0]["setting"], without=setting_names(records)),
        "repeats": f"{rounds_of(report) or options.get('repeats')} interleaved, {epochs} timed epoch"
        f"{'' if epochs == 1 else 's'} each",
        "versions": ", ".join(f"{name} {version}" for name, version in environment.get("versions", {}).items()),
    }
    return [(name, text) for name, text in found.items() if text]
