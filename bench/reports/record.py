"""Write records of benchmarks, whole or not at all, and read them, including those of earlier versions.

Every record says which benchmark wrote it (``format``), in which version of the format, by which command, at which
commit and on what machine. The record of a run, of `bench run` and `bench sweep`, holds every repeat as it was
measured. The medians and intervals beside them are for readers; reports compute them again.
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
RUN_FORMAT = f"{FORMAT}-run"
RUN_FORMATS = (RUN_FORMAT, f"{FORMAT}-feed")
"""The formats whose records have loaders, settings and repeats, and can be compared."""
VERSION = 1
_MALFORMED = (LookupError, TypeError, AttributeError, ValueError, ZeroDivisionError)
"""Exceptions that a malformed record may raise while its fields are read."""
_URL_HOST = re.compile(r"(https?://)[^/\s,]+")


def check_target(path: Path, *, option: str = "--json") -> None:
    """Refuse a path that `write_record` could not write, before a run takes minutes.

    Raises:
        ValueError: If it is a directory, or its directory is missing or cannot be written.
    """
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
    """Write a file; an earlier one is replaced when all is written.

    Raises:
        StoreError: If the disk is full, or the directory is gone.
    """
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
    """Return the report with the fields that every record begins with: format, version and command.

    >>> stamped({"records": []}, kind="fetch")["format"]
    'dali-pipes-bench-fetch'
    """
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
        option, mark, value = word.partition("=")
        if word.startswith("--") and mark:
            shown.append(f"{option}={_without_place(value)}")
        else:
            shown.append(_without_place(word))
    return " ".join(shown)


def _without_place(word: str) -> str:
    word = _URL_HOST.sub(r"\1ENDPOINT", word)
    if "://" in word or not word.startswith((os.sep, "~")):
        return word
    return f".../{Path(word).name}"


def read_record(path: Path) -> dict[str, Any]:
    """Read a record of any benchmark; the oldest have no format.

    Raises:
        DataError: If the file cannot be read or is not a JSON object.
    """
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise DataError(f"'{path}': expected a benchmark's record, a JSON file: {exc}") from exc
    if not isinstance(report, dict):
        raise DataError(f"'{path}': expected a benchmark's record, a JSON object, found {type(report).__name__}")
    return report


def read_run(path: Path) -> dict[str, Any]:
    """Read a record of `bench run`, `bench sweep` or `bench feed`, and convert it to the present form.

    Raises:
        DataError: If it is not such a record, or has an unknown version.
    """
    return as_run(read_record(path), path)


def as_run(report: dict[str, Any], path: Path) -> dict[str, Any]:
    """Convert the record of a run, read from ``path``, to the present form.

    Raises:
        DataError: As `read_run`.
    """
    kind = report.get("format", RUN_FORMAT)  # the oldest have none
    if kind not in RUN_FORMATS:
        expected = "' or '".join(RUN_FORMATS)
        raise DataError(f"'{path}': expected the record of a run, format '{expected}', found '{kind}'")
    if "format" in report and report.get("version") != VERSION:
        raise DataError(
            f"'{path}': version {report.get('version')} of '{kind}'; this program reads versions 0 to {VERSION}"
        )
    try:
        if "format" not in report:
            report = _from_version_0(report)
        _rename_masks(report)
        _check_run(report)
    except _MALFORMED as exc:
        raise DataError(
            f"'{path}': expected a file that `bench run --json` wrote ({type(exc).__name__}: {exc})"
        ) from exc
    return report


def _rename_masks(report: dict[str, Any]) -> None:
    """Call the masks of a record as they are called now: this part of a batch was called ``trimap`` before."""
    for record in report["records"]:
        for holder, name in ((record, "gives"), (record.get("outputs") or {}, "not_compared")):
            if holder.get(name):
                holder[name] = ["mask" if part == "trimap" else part for part in holder[name]]


def _from_version_0(report: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a record from before there was a format: no setting, no ranks, figures from each repeat's seconds."""
    environment = dict(report["environment"])
    options = environment.pop("options")
    commit = environment.get("commit")
    environment["commit"] = None if commit is None else commit.removesuffix("+changes")
    environment["is_dirty"] = None if commit is None else commit.endswith("+changes")
    first = report["records"][0]
    return {
        "format": RUN_FORMAT,
        "version": 0,
        "command": "dali-pipes bench run",
        "environment": environment,
        "options": options,
        "baseline": next((row["loader"] for row in report["records"] if row["loader"] == "webloader"), None),
        "records": [_record_from_version_0(row, options) for row in report["records"]],
        "data": [
            {
                "num_samples": first["num_samples"],
                "num_shards": options.get("num_shards"),
                "shard_bytes": first["shard_bytes"],
                "source": options.get("source"),
            }
        ],
    }


def _record_from_version_0(row: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    samples, mib = row["num_samples"], row["shard_bytes"] / (1 << 20)
    return {
        **{name: row[name] for name in ("loader", "decode", "device", "num_workers", "outputs")},
        "gives": None,
        "setting": {"threads": row["num_threads"], "batch_size": row["batch_size"], "crop": options.get("crop")},
        "data": 0,
        "repeats": [
            {
                "figures": {
                    "samples_per_s": samples / repeat["epoch_s"],
                    "mib_per_s": mib / repeat["epoch_s"],
                    "cpu_ms_per_sample": 1000 * repeat["epoch_cpu_s"] / samples,
                    "time_to_first_batch_s": repeat["time_to_first_batch_s"],
                    "first_epoch_s": repeat["first_epoch_s"],
                    # Of the command's own process, in which the whole loader was.
                    "peak_memory_mib": repeat.get("peak_rss_mib"),
                }
            }
            for repeat in row["repeats"]
        ],
    }


def _check_run(report: Mapping[str, Any]) -> None:
    """Check that a run has what tables and comparisons need.

    Raises:
        LookupError, TypeError, AttributeError, ValueError: If something is missing or has a wrong type.
    """
    found = [
        [float(value) for value in repeat["figures"].values() if value is not None]
        for record in report["records"]
        for repeat in record["repeats"]
        if record["loader"] and record["decode"] and record["setting"]
    ]
    if not found or not all(found):
        raise ValueError("no repeats")
    if not (isinstance(report["environment"], dict) and isinstance(report["options"], dict)):
        raise TypeError("environment and options are not objects")
    if not all(isinstance(data["num_samples"], int) for data in report["data"]):
        raise TypeError("num_samples is not a number")
