"""A list of paths and labels to records: CSV, TSV, JSON, JSON lines or Parquet, a row a sample.

Only the columns that are needed are kept, as they stand; a record is made when it is asked for.
"""

import contextlib
import csv
import json
import re
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, overload

from dali_pipes.errors import DataError, PipesError, shown
from dali_pipes.formats.photo_header import is_photo
from prep.sources.record import Record, Source

__all__ = ["KEY_COLUMNS", "LABEL_COLUMNS", "PATH_COLUMNS", "TABLE_SUFFIXES", "table"]

# Names that columns are known by, the first that is there; in whatever case.
PATH_COLUMNS = ("path", "image", "image_path", "filepath", "file", "file_name", "filename", "img")
LABEL_COLUMNS = ("label", "class", "cls", "class_id", "class_name", "category", "target")
KEY_COLUMNS = ("key", "__key__")

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_LINES = (".jsonl", ".ndjson")
TABLE_SUFFIXES = (*_DELIMITERS, ".json", *_LINES, ".parquet")

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


@dataclass(frozen=True, kw_only=True)
class _Table:
    """Columns of equal length."""

    columns: Mapping[str, Sequence[Any]]
    where: Callable[[int], str]
    """A row's place in the file, for errors."""

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.columns.values())))


def table(
    path: Path,
    *,
    components: Mapping[str, str] | None = None,
    values: Mapping[str, str] | None = None,
    label: str | None = None,
    has_labels: bool = True,
    key: str | None = None,
    root: Path | None = None,
    masks: Collection[str] | None = None,
) -> Source:
    """The records of a list, in its order. Files are looked for when they are packed: see ``on_bad`` of `prep.pack.pack`.

    Args:
        path: ``.csv`` or ``.tsv`` with a row of names first, ``.json`` (a list of objects), ``.jsonl``, ``.ndjson`` or
            ``.parquet``.
        components: Component -> column of paths. ``image.jpg`` is the component's name; ``image`` takes the file's
            extension along: ``image.png`` of ``a.png``. By default the first column of `PATH_COLUMNS`, and the file's
            extension is the name.
        values: Component -> column whose cells are written themselves, as `webdataset.TarWriter` does: ``caption.txt``
            a text, ``boxes.json`` what a JSON table has there.
        label: The column of labels; by default the first of `LABEL_COLUMNS`. Integers are class ids; if one is none,
            all are names of classes, whose ids count them in sorted order, from 0.
        has_labels: ``False`` packs no ``cls``.
        key: The column of keys; by default the first of `KEY_COLUMNS`, else the path (of the first component) as it
            stands in the list, without its extension.
        root: What paths in the list start from; by default the list's own directory.
        masks: Components that hold class ids a pixel: each must be an 8-bit grey PNG that can be decoded, of its
            photo's height and width. By default those that `prep verify` takes for masks, by their names; none of a
            list of one photo a row.

    Raises:
        DataError: If the file cannot be read as what its name says, a column is not there, or a cell is not what it
            must be; names the line or row.
        PipesError: If it is Parquet, and pyarrow is not installed.
        ValueError: If the file's suffix is not known, or a mask is no component.
    """
    names = _column_names(path)
    paths = components or {"": _known(path, names, PATH_COLUMNS, what="paths", option="--component image.jpg=COLUMN")}
    if key is None:
        key = _find(names, KEY_COLUMNS)
    if has_labels and label is None:
        label = _known(path, names, LABEL_COLUMNS, what="labels", option="--label COLUMN, or --unlabelled")
    asked = [*paths.values(), *(values or {}).values(), *filter(None, [key, label if has_labels else None])]
    for column in asked:
        if column not in names:
            raise DataError(f"'{path}' has no column '{column}' (found: {', '.join(names)})")
    read = _read(path, list(dict.fromkeys(asked)))
    if not read.num_rows:
        raise DataError(f"'{path}' has no rows")
    for column in paths.values():
        _check_paths(read, column)
    labels, classes = _labels(read, label) if label is not None and has_labels else (None, {})
    records = _Rows(
        read, paths=paths, values=values or {}, key=key, labels=labels, root=root if root is not None else path.parent
    )
    return Source(
        name=f"table '{path}'",
        records=records,
        classes=classes,
        masks=_masks(read, paths, masks),
        decodes_masks=True,
    )


class _Rows(Sequence[Record]):
    """Records, made from the columns when they are asked for."""

    def __init__(
        self,
        read: _Table,
        *,
        paths: Mapping[str, str],
        values: Mapping[str, str],
        key: str | None,
        labels: "array[int] | None",
        root: Path,
    ) -> None:
        self._table, self._paths, self._values = read, paths, values
        self._key, self._labels, self._root = key, labels, root
        self._first = next(iter(paths.values()))

    def __len__(self) -> int:
        return self._table.num_rows

    @overload
    def __getitem__(self, row: int) -> Record: ...

    @overload
    def __getitem__(self, row: slice) -> "list[Record]": ...

    def __getitem__(self, row: int | slice) -> "Record | list[Record]":
        if isinstance(row, slice):
            return [self[number] for number in range(*row.indices(len(self)))]
        if not 0 <= row < len(self):
            raise IndexError(row)
        columns = self._table.columns
        components: dict[str, object] = {}
        for name, column in self._paths.items():
            self._add(components, row, _component(name, columns[column][row]), self._root / columns[column][row])
        for name, column in self._values.items():
            self._add(components, row, name, columns[column][row])
        label = self._labels[row] if self._labels is not None else None
        return Record(key=self._key_of(row), components=components, label=label)

    def _add(self, components: dict[str, object], row: int, name: str, content: object) -> None:
        if name in components:
            raise DataError(f"{self._table.where(row)}: two files would be component '{name}'; name them apart")
        components[name] = content

    def _key_of(self, row: int) -> str:
        if self._key is not None:
            key = self._table.columns[self._key][row]
            if not isinstance(key, str | int) or isinstance(key, bool) or key == "":
                raise DataError(f"{self._table.where(row)}: a key must be a text or an integer, got {_shown(key)}")
            return str(key)
        text = self._table.columns[self._first][row]
        path = PurePosixPath(text)
        if "." in path.stem or ".." in path.parts:
            raise DataError(
                f"{self._table.where(row)}: '{text}' makes no key: WebDataset cuts at the first dot of a file's name, "
                "and '..' is no part of one; name a column of keys: --key COLUMN"
            )
        return str(path.with_suffix("")).removeprefix("/")


def _component(name: str, path: str) -> str:
    extension = PurePosixPath(path).suffix[1:].lower()
    if not name:
        return extension
    return name if "." in name or is_photo(name) or name == extension else f"{name}.{extension}"


def _check_paths(read: _Table, column: str) -> None:
    for row, text in enumerate(read.columns[column]):
        if not isinstance(text, str) or not PurePosixPath(text).suffix[1:]:
            raise DataError(
                f"{read.where(row)}: column '{column}' must hold the path of a file with an extension, "
                f"got {_shown(text)}"
            )


def _masks(read: _Table, paths: Mapping[str, str], masks: Collection[str] | None) -> frozenset[str]:
    """The components that are masks, as they are called; extensions may differ from row to row."""
    columns = [(name, read.columns[column]) for name, column in paths.items()]
    rows = range(read.num_rows) if len(columns) > 1 or masks else range(0)
    sets = {tuple(_component(name, cells[row]) for name, cells in columns) for row in rows}
    if masks is None:
        from prep.inspect.verify_shard import is_mask_name

        photos = [{component for component in names if is_photo(component)} for names in sets]
        return frozenset(component for names in photos for component in names if is_mask_name(component, names))
    found = {component for names in sets for component in names}
    if other := next((name for name in masks if name not in found), None):
        raise ValueError(f"mask '{other}' is no component (found: {', '.join(sorted(found))})")
    return frozenset(masks)


def _labels(read: _Table, column: str) -> "tuple[array[int], dict[int, str]]":
    cells = read.columns[column]
    for row, cell in enumerate(cells):
        if isinstance(cell, bool) or not isinstance(cell, str | int) or cell == "":
            raise DataError(
                f"{read.where(row)}: column '{column}' must hold class ids or names of classes, got {_shown(cell)}"
            )
    if all(isinstance(cell, int) or _INTEGER.fullmatch(cell) for cell in cells):
        with contextlib.suppress(OverflowError):
            ids = array("q", map(int, cells))
            return ids, {label: str(label) for label in sorted(set(ids))}
        raise DataError(f"'{column}' of {read.where(0).partition(', ')[0]} holds integers past 64 bits")
    # In a typed table a number among names is a name, too.
    names = sorted({str(cell) for cell in cells})
    numbers = {name: number for number, name in enumerate(names)}
    return array("q", (numbers[str(cell)] for cell in cells)), dict(enumerate(names))


def _find(names: Sequence[str], known: Sequence[str]) -> str | None:
    lower = {name.lower(): name for name in reversed(names)}
    return next((lower[name] for name in known if name in lower), None)


def _known(path: Path, names: Sequence[str], known: Sequence[str], *, what: str, option: str) -> str:
    found = _find(names, known)
    if found is None:
        raise DataError(
            f"'{path}' has no column of {what} by any of the names {', '.join(known)} (found: "
            f"{shown(names) or 'none'}); name it: {option}"
        )
    return found


# Files to columns


def _column_names(path: Path) -> list[str]:
    suffix = path.suffix.lower()
    if suffix not in TABLE_SUFFIXES:
        raise ValueError(f"'{path}': a table's suffix must be one of {', '.join(TABLE_SUFFIXES)}, got '{suffix}'")
    if suffix == ".parquet":
        with _parquet(path) as file:
            return list(file.schema_arrow.names)
    with _reading(path):
        if suffix in _DELIMITERS:
            with path.open(encoding="utf-8-sig", newline="") as stream:
                names = next(csv.reader(stream, delimiter=_DELIMITERS[suffix], strict=True), [])
            if len(set(names)) != len(names):
                raise DataError(f"'{path}', line 1: two columns have one name: {', '.join(names)}")
        else:
            first = next(_objects(path), None)
            names = list(first[1]) if first else []
    if not names:
        raise DataError(f"'{path}' is empty; expected a row of column names, or objects, such as path and label")
    return names


def _read(path: Path, wanted: list[str]) -> _Table:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        with _parquet(path) as file:
            read = file.read(columns=wanted)
            columns = {name: read.column(name).to_pylist() for name in wanted}
        return _Table(columns=columns, where=lambda row: f"'{path}', row {row}")
    with _reading(path):
        return _read_rows(path, wanted) if suffix in _DELIMITERS else _read_objects(path, wanted)


def _read_rows(path: Path, wanted: list[str]) -> _Table:
    columns: dict[str, list[str]] = {name: [] for name in wanted}
    lines = array("q")
    with path.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, delimiter=_DELIMITERS[path.suffix.lower()], strict=True)
        names = next(reader)
        picked = [(columns[name], names.index(name)) for name in wanted]
        for row in reader:
            if not row:
                continue  # an empty line
            if len(row) != len(names):
                raise DataError(
                    f"'{path}', line {reader.line_num}: {len(row)} fields, the first line names {len(names)} columns"
                )
            for column, number in picked:
                column.append(row[number])
            lines.append(reader.line_num)
    return _Table(columns=columns, where=lambda row: f"'{path}', line {lines[row]}")


def _read_objects(path: Path, wanted: list[str]) -> _Table:
    columns: dict[str, list[Any]] = {name: [] for name in wanted}
    numbers = array("q")
    unit = "line" if path.suffix.lower() in _LINES else "row"
    for number, found in _objects(path):
        for name, column in columns.items():
            if name not in found:
                raise DataError(f"'{path}', {unit} {number}: no '{name}' (found: {', '.join(found)})")
            column.append(found[name])
        numbers.append(number)
    return _Table(columns=columns, where=lambda row: f"'{path}', {unit} {numbers[row]}")


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows, numbered from 0, or with the number of their lines."""
    if path.suffix.lower() in _LINES:
        with path.open(encoding="utf-8-sig") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, _object(_parsed(line, f"'{path}', line {number}"), f"'{path}', line {number}")
        return
    rows = _parsed(path.read_text("utf-8-sig"), f"'{path}'")
    if not isinstance(rows, list):
        raise DataError(f"'{path}': expected a list of objects, found {_shown(rows)}")
    for number, row in enumerate(rows):
        yield number, _object(row, f"'{path}', row {number}")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise DataError(f"{where}: is no JSON: {exc}") from exc


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f'{where}: expected an object such as {{"path": ..., "label": ...}}, found {_shown(row)}')
    return row


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise DataError(f"cannot read '{path}': {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise DataError(f"'{path}' is no UTF-8 text: byte {exc.object[exc.start]:#04x}; convert it") from exc
    except csv.Error as exc:
        raise DataError(f"'{path}' cannot be read as {path.suffix[1:].upper()}: {exc}") from exc


@contextlib.contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    try:
        import pyarrow  # type: ignore[import-untyped,unused-ignore]  # an extra, without types
        import pyarrow.parquet  # type: ignore[import-untyped,unused-ignore]
    except ImportError as exc:
        raise PipesError(f"'{path}': Parquet needs pyarrow; install it: pip install 'dali-pipes[parquet]'") from exc

    def refuse(exc: Exception) -> NoReturn:
        raise DataError(f"'{path}' cannot be read as Parquet: {' '.join(str(exc).split())}") from exc

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except pyarrow.ArrowException as exc:
        refuse(exc)
    except OSError as exc:
        refuse(exc)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
