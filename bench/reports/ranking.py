"""Rank the loaders of a run by samples/s, without a difference that the repeats do not show."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.loaders.registry import is_ours
from bench.reports.intervals import paired_ratio
from bench.reports.summary import (
    SETTING_TITLES,
    Measured,
    Record,
    Report,
    format_ratio,
    format_setting,
    label_of,
    measured,
    setting_names,
)

FIGURE = "samples_per_s"
NOT_RANKED = {"memory": "fed from memory: the ceiling", "synthetic": "reads no shard"}
"""Loader -> why it has no place."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One loader under one setting."""

    record: Record
    found: Measured
    place: int | None
    """From 1; ``None`` for `NOT_RANKED`. Loaders share a place if the ratio of the later to the first of them is not
    clearly below 1; the next place counts all before it, as in sports: 1, 1, 3."""
    share: str
    """The ratio to the fastest ranked loader, with its interval; ``-`` for the fastest itself."""

    @property
    def why_not(self) -> str:
        """Why there is no place; empty if there is one."""
        return "" if self.place is not None else NOT_RANKED.get(self.record["loader"], "reads no shard")


def rank(report: Report) -> list[tuple[str, list[Ranked]]]:
    """Rank the loaders of each setting, fastest first; with the settings that vary in words, in the record's order."""
    groups: dict[str, list[Record]] = {}
    varied = setting_names(report["records"])
    for record in report["records"]:
        where = ", ".join(f"{SETTING_TITLES[name]} {format_setting(record['setting'].get(name))}" for name in varied)
        groups.setdefault(where, []).append(record)
    return [(where, ranked) for where, records in groups.items() if (ranked := _ranked(report, records))]


def ranking_rows(report: Report) -> tuple[list[list[str]], list[bool]]:
    """Return the cells of a ranking, the header first, and whether each row below it is a loader of ours.

    With one setting a row has place, samples/s and the share of the fastest. With several it has the loader's place and
    samples/s under each; loaders are ordered by their mean place.
    """
    groups = rank(report)
    if len(groups) == 1:
        ((_, ranked),) = groups
        rows = [["place", "loader", "samples/s", "of the fastest"]]
        for one in ranked:
            place = one.why_not if one.place is None else str(one.place)
            rows.append([place, label_of(one.record), one.found.shown(), one.share])
        return rows, [is_ours(one.record["loader"]) for one in ranked]
    by_label: dict[str, dict[str, Ranked]] = {}
    for where, ranked in groups:
        for one in ranked:
            by_label.setdefault(label_of(one.record), {})[where] = one

    def mean_place(found: dict[str, Ranked]) -> float:
        places = [one.place for one in found.values() if one.place is not None]
        return sum(places) / len(places) if places else float("inf")

    ordered = sorted(by_label.items(), key=lambda item: mean_place(item[1]))
    rows = [["loader", "mean place", *(where for where, _ in groups)]]
    for label, found in ordered:
        mean = mean_place(found)
        cells = [_cell(found[where]) if where in found else "-" for where, _ in groups]
        rows.append([label, next(iter(found.values())).why_not or f"{mean:.1f}", *cells])
    return rows, [is_ours(next(iter(found.values())).record["loader"]) for _, found in ordered]


def _cell(one: Ranked) -> str:
    shown = one.found.shown(with_interval=False)
    return shown if one.place is None else f"{one.place}. ({shown})"


def _ranked(report: Report, records: Sequence[Record]) -> list[Ranked]:
    found = [(record, one) for record in records if (one := measured(report, record, FIGURE)) is not None]
    found.sort(key=lambda item: -item[1].interval.median)
    ranked: list[Ranked] = []
    first_of_place: Measured | None = None
    fastest: Measured | None = None
    num_before = place = 0
    for record, one in found:
        if not _is_ranked(record):
            ranked.append(Ranked(record=record, found=one, place=None, share="-"))
            continue
        if first_of_place is None or _is_slower(one, first_of_place):
            first_of_place, place = one, num_before + 1
        num_before += 1
        ratio = None if fastest is None else paired_ratio(one.values, fastest.values)
        ranked.append(
            Ranked(record=record, found=one, place=place, share="-" if ratio is None else format_ratio(ratio))
        )
        fastest = fastest or one
    return ranked


def _is_ranked(record: Record) -> bool:
    gives = record.get("gives")  # the oldest records do not have it: their loaders give all
    return record["loader"] not in NOT_RANKED and (gives is None or bool(gives))


def _is_slower(one: Measured, other: Measured) -> bool:
    """Whether the repeats show it: too few of them show no difference."""
    ratio = paired_ratio(one.values, other.values) if len(one.values) == len(other.values) else None
    return ratio is not None and ratio.high is not None and ratio.high < 1
