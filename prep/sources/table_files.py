"""Read columns of a CSV, TSV, JSON, JSON lines or Parquet file."""

import contextlib
import csv
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from dali_pipes.errors import DataError, PipesError
from dali_pipes.formats.names import read_json
from prep.sources.record import preview

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_LINES = (".jsonl", ".ndjson")
TABLE_SUFFIXES = (*_DELIMITERS, ".json", *_LINES, ".parquet")


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns of equal length."""

    columns: Mapping[str, Sequence[Any]]
    where: Callable[[int], str]
    """A row's place in the file, for errors."""

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.columns.values())))


def column_names(path: Path) -> list[str]:
    """The names of a table's columns; `ValueError` if the suffix is not one of `TABLE_SUFFIXES`."""
    suffix = path.suffix.lower()
    if suffix not in TABLE_SUFFIXES:
        raise ValueError(f"'{path}': a table's suffix must be one of {', '.join(TABLE_SUFFIXES)}, got '{suffix}'")
    if suffix == ".parquet":
        with parquet_file(path) as file:
            return list(file.schema_arrow.names)
    with _reading(path) as stream:
        is_csv = suffix in _DELIMITERS
        names = list((_csv_reader(path, stream).fieldnames if is_csv else next(_rows(path, stream), (0, {}))[1]) or ())
    if not names:
        raise DataError(f"'{path}' is empty; expected a row of column names, or objects, such as path and label")
    return names


def read_columns(path: Path, wanted: list[str]) -> Table:
    """The wanted columns of a table."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        with parquet_file(path) as file:
            read = file.read(columns=wanted)
            columns = {name: read.column(name).to_pylist() for name in wanted}
        return Table(columns=columns, where=lambda row: f"'{path}', row {row}")
    columns = {name: [] for name in wanted}
    numbers = array("q")
    unit = "row" if suffix == ".json" else "line"
    with _reading(path) as stream:
        for number, found in _rows(path, stream):
            for name, column in columns.items():
                if name not in found:
                    raise DataError(f"'{path}', {unit} {number}: no '{name}' (found: {', '.join(found)})")
                column.append(found[name])
            numbers.append(number)
    return Table(columns=columns, where=lambda row: f"'{path}', {unit} {numbers[row]}")


def _csv_reader(path: Path, stream: TextIO) -> "csv.DictReader[str]":
    reader = csv.DictReader(stream, delimiter=_DELIMITERS[path.suffix.lower()], strict=True)
    names = reader.fieldnames or ()
    if len(set(names)) != len(names):
        raise DataError(f"'{path}', line 1: two columns have one name: {', '.join(names)}")
    return reader


def _rows(path: Path, stream: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a text file, with the numbers of their lines; those of a .json file are numbered from 0."""
    suffix = path.suffix.lower()
    if suffix in _DELIMITERS:
        reader = _csv_reader(path, stream)
        for row in reader:
            if None in row or None in row.values():
                num_names = len(reader.fieldnames or ())
                raise DataError(f"'{path}', line {reader.line_num}: expected {num_names} fields, as in the first line")
            yield reader.line_num, row
        return
    if suffix in _LINES:
        lines = ((number, f"'{path}', line {number}", line) for number, line in enumerate(stream, start=1))
        found = ((number, where, _parsed(line, where)) for number, where, line in lines if line.strip())
    else:
        rows = _parsed(stream.read(), f"'{path}'")
        if not isinstance(rows, list):
            raise DataError(f"'{path}': expected a list of objects, found {preview(rows)}")
        found = ((number, f"'{path}', row {number}", row) for number, row in enumerate(rows))
    for number, where, row in found:
        if not isinstance(row, dict):
            raise DataError(f'{where}: expected an object such as {{"path": ..., "label": ...}}, found {preview(row)}')
        yield number, row


def _parsed(text: str, where: str) -> Any:
    try:
        return read_json(text)
    except ValueError as exc:
        raise DataError(f"{where} is not JSON: {exc}") from exc


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[TextIO]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            yield stream
    except OSError as exc:
        raise DataError(f"cannot read '{path}': {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise DataError(f"'{path}' is not UTF-8 text: byte {exc.object[exc.start]:#04x}; convert it") from exc
    except csv.Error as exc:
        raise DataError(f"'{path}' cannot be read as {path.suffix[1:].upper()}: {exc}") from exc


@contextlib.contextmanager
def parquet_file(path: Path) -> Iterator[Any]:
    try:
        import pyarrow  # type: ignore[import-untyped,unused-ignore]  # an extra, without types
        import pyarrow.parquet  # type: ignore[import-untyped,unused-ignore]
    except ImportError as exc:
        raise PipesError(f"'{path}': Parquet needs pyarrow; install it: pip install 'dali-pipes[parquet]'") from exc
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as exc:  # texts not in UTF-8, dates of no year
        raise DataError(f"'{path}' cannot be read as Parquet: {' '.join(str(exc).split())}") from exc
