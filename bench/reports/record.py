"""Write records of benchmarks, whole or not at all, and read them.

All benchmarks have one form; every repeat is kept as it was measured, and tables compute medians from them::

    {"format", "version", "command", "environment", "options", "baseline", "data": [{"num_samples", ...}],
     "records": [{"loader", "decode", "device", "setting": {...}, "data": 0, "repeats": [{"figures": {...}}]}]}
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dali_pipes.errors import DataError
from dali_pipes.store.local import LocalStore

PROGRAM = "dali-pipes"
FORMAT = f"{PROGRAM}-bench"
VERSION = 2
_MALFORMED = (LookupError, TypeError, AttributeError, ValueError)
_URL_HOST = re.compile(r"(https?://)[^/\s,]+")


def check_target(path: Path, *, option: str = "--json") -> None:
    """Refuse a path that `write_record` could not write, before a run takes minutes."""
    if path.is_dir():
        raise ValueError(f"{option} '{path}': expected a file, found a directory")
    if not path.parent.is_dir():
        raise ValueError(f"{option} '{path}': no such directory '{path.parent}'")
    try:
        if _is_special(path):
            path.open("a").close()
        else:
            tempfile.TemporaryFile(dir=path.resolve().parent).close()
    except OSError as exc:
        raise ValueError(f"{option} '{path}': cannot be written: {exc.strerror}; name another file") from exc


def write_record(report: Mapping[str, Any], path: Path) -> None:
    """Write JSON with `write_text`."""
    write_text(json.dumps(report, indent=2) + "\n", path)


def write_text(text: str, path: Path) -> None:
    """Write a file; an earlier one is replaced when all is written."""
    if _is_special(path):
        path.write_text(text)
        return
    # Replace a link's target and not the link.
    target = path.resolve()
    LocalStore(target.parent).write(target.name, text.encode())


def _is_special(path: Path) -> bool:
    """Whether the path is ``/dev/stdout`` or a pipe, which a rename would replace."""
    return path.exists() and not path.is_file()


def stamped(report: Mapping[str, Any], *, kind: str) -> dict[str, Any]:
    """Return the report with the fields that every record begins with: format, version and command."""
    return {"format": f"{FORMAT}-{kind}", "version": VERSION, "command": shown_command(sys.argv), **report}


def shown_command(arguments: Sequence[str]) -> str:
    """Return a command without hosts and the places of folders.

    >>> shown_command(["/opt/bin/dali-pipes", "bench", "run", "--shards", "/data/pets", "--endpoint", "http://n7:51080"])
    'dali-pipes bench run --shards .../pets --endpoint http://ENDPOINT'
    """
    program, *words = arguments
    # `python -m dali_pipes` is the same program.
    shown = [PROGRAM if Path(program).name == "__main__.py" else Path(program).name]
    for word in words:
        option, mark, value = word.partition("=") if word.startswith("--") and "=" in word else ("", "", word)
        value = _URL_HOST.sub(r"\1ENDPOINT", value)
        if "://" not in value and value.startswith((os.sep, "~")):
            value = f".../{Path(value).name}"
        shown.append(f"{option}{mark}{value}")
    return " ".join(shown)


def read_record(path: Path) -> dict[str, Any]:
    """Read a record of any benchmark; of some runs only the beginning is there yet."""
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise DataError(f"'{path}': expected a benchmark's record, a JSON file: {exc}") from exc
    kind = report.get("format") if isinstance(report, dict) else type(report).__name__
    if not str(kind).startswith(f"{FORMAT}-"):
        raise DataError(f"'{path}': expected a benchmark's record, format '{FORMAT}-...', found '{kind}'")
    if report.get("version") != VERSION:
        anew = report.get("command") or f"{PROGRAM} bench {kind_of(report)} --json FILE"
        raise DataError(
            f"'{path}': version {report.get('version')} of '{kind}'; this program reads version {VERSION}; make it "
            f"anew: {anew}"
        )
    return dict(report)


def kind_of(report: Mapping[str, Any]) -> str:
    """The benchmark that wrote a record: ``run``, ``fetch``, ..."""
    return str(report["format"]).removeprefix(f"{FORMAT}-")


def read_run(path: Path) -> dict[str, Any]:
    """Read a record that has what tables, plots and comparisons need.

    Raises:
        DataError: As `read_record`; if a part is missing, or there is no repeat.
    """
    report = read_record(path)
    try:
        _check_run(report)
    except _MALFORMED as exc:
        raise DataError(
            f"'{path}': expected a file that `bench {kind_of(report)} --json` wrote ({type(exc).__name__}: {exc})"
        ) from exc
    return report


def _check_run(report: Mapping[str, Any]) -> None:
    found = [
        [float(value) for value in repeat["figures"].values() if value is not None]
        for record in report["records"]
        for repeat in record["repeats"]
        if record["loader"] and record["decode"] and isinstance(record["setting"], dict)
    ]
    if not found or not all(found):
        raise ValueError("no repeats")
    if not (isinstance(report["environment"], dict) and isinstance(report["options"], dict)):
        raise TypeError("environment and options are not objects")
    if not all(isinstance(data["num_samples"], int) for data in report["data"]):
        raise TypeError("num_samples is not a number")
