"""Read records for `bench compare`: those of runs, and those of `bench run --au` in their form.

Such a record has other figures. Here each loader with a recipe becomes a record with a setting, whose repeats have the
figures that the comparison judges.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.reports.record import FORMAT, VERSION, as_run, read_record
from dali_pipes.errors import DataError

Report = Mapping[str, Any]
_MALFORMED = (LookupError, TypeError, AttributeError, ValueError, ZeroDivisionError)


def read_comparable(path: Path) -> dict[str, Any]:
    """Read a record of `bench run`, also with ``--au``, of `bench sweep` or `bench feed`.

    Raises:
        DataError: If it is not such a record, or has an unknown version.
    """
    report = read_record(path)
    kind = report.get("format")
    records = _RECORDS.get(str(kind))
    if records is None:
        return as_run(report, path)
    if report.get("version") != VERSION:
        raise DataError(f"'{path}': version {report.get('version')} of '{kind}'; this program reads version {VERSION}")
    try:
        options = dict(report["options"])
        if accelerator := report.get("accelerator"):
            options["recipe"] = f"accelerator {accelerator['name']}"
        return dict(report) | {"options": options, "data": [dict(report["data"])], "records": list(records(report))}
    except _MALFORMED as exc:
        raise DataError(f"'{path}': expected a record of '{kind}' ({type(exc).__name__}: {exc})") from exc


def _of_accelerators(report: Report) -> Iterator[dict[str, Any]]:
    """The trial of a search with the most samples a second: with fewer accelerators, it is they who limit."""
    for record in report["records"]:
        best = [max(trials, key=lambda trial: trial["samples_per_s"]) for trials in record["repeats"]]
        setting = dict(report["options"]["setting"]) | {"recipe": record["recipe"]}
        figures = [{name: trial[name] for name in ("samples_per_s", "cpu_ms_per_sample")} for trial in best]
        yield _record(record["loader"], setting, figures)


def _record(loader: str, setting: Mapping[str, Any], figures: list[dict[str, float]]) -> dict[str, Any]:
    if not figures:
        raise ValueError("no repeats")
    repeats = [{"figures": each} for each in figures]
    return {
        "loader": loader, "decode": "none", "device": "cpu", "gives": None, "setting": setting, "repeats": repeats,
    }  # fmt: skip


_RECORDS: Mapping[str, Callable[[Report], Iterator[dict[str, Any]]]] = {
    f"{FORMAT}-au": _of_accelerators,
}
