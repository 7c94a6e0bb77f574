"""Read a list of paths and labels, with one sample a row: CSV, TSV, JSON, JSON lines or Parquet.

Only the needed columns are kept in memory; a record is made when it is used.
"""

import contextlib
import csv
import io
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TextIO

from dali_pipes.errors import DataError, shown
from dali_pipes.formats.names import read_json
from dali_pipes.formats.photo_header import is_photo, read_photo_header
from dali_pipes.formats.photo_names import has_mask_word, is_mask_name
from prep.sources.record import Record, Source, photo_component
from prep.tar.inside import parquet_file
from prep.tar.writer import Range

# Usual names of columns, in upper or lower case. The first one that a table has is taken.
PATH_COLUMNS = ("path", "image", "image_path", "filepath", "file", "file_name", "filename", "img")
LABEL_COLUMNS = ("label", "class", "cls", "class_id", "class_name", "category", "target")
KEY_COLUMNS = ("key", "__key__")
VALUE_EXTENSIONS = frozenset({"txt", "text", "json", "jsn", "npy"})
"""Extensions of components whose columns hold contents, or paths that end in the extension."""

# A photo's format -> the extension for photos that have no name.
_EXTENSIONS = {
    "JPEG": "jpg",
    "PNG": "png",
    "WEBP": "webp",
    "TIFF": "tif",
    "BMP": "bmp",
    "PPM": "ppm",
    "JPEG2000": "jp2",
    "GIF": "gif",
    "APNG": "png",
}
_CONTENTS = {"json": "JSON", "jsn": "JSON", "npy": "a path, or numbers in rows of one length"}
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_LINES = (".jsonl", ".ndjson")
TABLE_SUFFIXES = (*_DELIMITERS, ".json", *_LINES, ".parquet")


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The columns of a table that become parts of samples, as a user names them."""

    components: Mapping[str, str] = field(default_factory=dict)
    """Component -> column of paths, or for `VALUE_EXTENSIONS` of contents: ``caption.txt`` a text, ``boxes.json`` a
    value or JSON, ``vector.npy`` a list of numbers; if all of its cells end in that extension, they are paths. The
    component ``image`` gets the file's extension: ``image.png`` for ``a.png``. If none of them is a photo (masks do not
    count), the photo is in the first column of `PATH_COLUMNS`, with only an extension: ``jpg`` for ``a.JPEG``."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Component -> column whose cells are contents, whatever they end in."""
    label: str | None = None
    """The column of labels; by default the first of `LABEL_COLUMNS`. If all are integers, they are class ids; otherwise
    they are names of classes, whose ids count them in sorted order, from 0."""
    has_labels: bool | None = None
    """``False`` packs no ``cls``, ``True`` needs a column of labels; by default they are packed if there is one."""
    key: str | None = None
    """The column of keys; by default the first of `KEY_COLUMNS`, else the path (of the first component) as the list has
    it, without its extension."""
    masks: tuple[str, ...] | None = None
    """Components that hold a class id for each pixel; by default they are found by their names, as in `prep verify`."""
    root: Path | None = None
    """The directory that paths start from; by default that of the list."""

    def found_in(self, names: Sequence[str], *, photo: str | None, path: Path) -> "Fields":
        """The fields with the columns that have usual names; ``photo`` is the column of the photo by default.

        `DataError` if a column is missing from ``names``, the columns of the file ``path``.
        """
        components = self.components
        if photo is not None and photo not in components.values() and not any(map(_is_photo_name, components)):
            components = {"": photo, **components}
        label = None if self.has_labels is False else self.label or find_known(names, LABEL_COLUMNS)
        if self.has_labels and label is None:
            raise _no_column(path, names, LABEL_COLUMNS, what="labels", option="--label COLUMN, or --unlabelled")
        found = replace(self, components=components, label=label, key=self.key or find_known(names, KEY_COLUMNS))
        if odd := next((column for column in found.columns if column not in names), None):
            raise DataError(f"'{path}' has no column '{odd}' (found: {', '.join(names)})")
        return found

    @property
    def columns(self) -> list[str]:
        """All columns, each once."""
        others = filter(None, [self.key, self.label])
        return list(dict.fromkeys([*self.components.values(), *self.values.values(), *others]))


class Table(NamedTuple):
    """The columns of a table, all of equal length."""

    cells: Mapping[str, Sequence[Any]]
    """A cell of a file is its path, or the part itself."""
    where: Callable[[int], str]
    """A row's place in the file, for errors."""

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.cells.values())))


def table(path: Path, fields: Fields) -> Source:
    """The records of a list, in its order. A missing file is found when it is packed: see ``on_bad`` of `PackJob`.

    ``path`` is ``.csv`` or ``.tsv`` with a row of names first, ``.json`` (a list of objects), ``.jsonl``, ``.ndjson``
    or ``.parquet``.

    Raises:
        DataError: If the file cannot be read in the format of its name, a column is missing, or a cell has a wrong
            value; names the line or row.
        PipesError: If the file is Parquet, and pyarrow is not installed.
        ValueError: If the file's suffix is not known, or a mask is not a component.
    """
    names = column_names(path)
    photo = find_known(names, PATH_COLUMNS)
    if photo is None and not fields.components:
        raise _no_column(path, names, PATH_COLUMNS, what="paths", option="--component image.jpg=COLUMN")
    found = fields.found_in(names, photo=photo, path=path)
    read = read_columns(path, found.columns)
    if not read.num_rows:
        raise DataError(f"'{path}' has no rows")
    found = replace(found, root=fields.root or path.parent)
    return source_of(read, found, name=f"table '{path}'", names=names)


def _no_column(path: Path, names: Sequence[str], known: Sequence[str], *, what: str, option: str) -> DataError:
    return DataError(
        f"'{path}' has no column of {what} by any of the names {', '.join(known)} (found: {shown(names) or 'none'}); "
        f"name it: {option}"
    )


def find_known(names: Iterable[str], known: Sequence[str]) -> str | None:
    """The column that has the first of the ``known`` names, in upper or lower case; ``None`` if none has.

    >>> find_known(["Label", "Path"], ["path", "file"])
    'Path'
    """
    by_lower = {name.lower(): name for name in reversed(list(names))}
    return next((by_lower[name] for name in known if name in by_lower), None)


# Table to records


def source_of(
    read: Table,
    fields: Fields,
    *,
    name: str,
    names: Sequence[str],
    classes: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    broken: list[str] | None = None,
) -> Source:
    """The records of columns that were read.

    Args:
        read: The columns.
        fields: What becomes of them; all are found.
        name: Of the source.
        names: All columns of the file.
        classes: The names of the classes, by id; by default the column of labels gives them.
        keys: The records' keys, if no column has them; by default the paths.
        broken: See `Source`.
    """
    cells, where = read
    files = {name: column for name, column in fields.components.items() if _are_files(name, cells[column])}
    for column in files.values():
        for row, cell in enumerate(cells[column]):
            if not isinstance(cell, Range | Path) and not (isinstance(cell, str) and PurePosixPath(cell).suffix[1:]):
                raise DataError(
                    f"{where(row)}: column '{column}' must hold the path of a file with an extension, "
                    f"got {_preview(cell)}"
                )
    labels, found = _labels(read, fields.label) if fields.label is not None else (None, {})
    contents = {name: column for name, column in fields.components.items() if name not in files} | dict(fields.values)
    root = fields.root or Path()

    def key_of(row: int) -> str:
        if fields.key is not None:
            key = cells[fields.key][row]
            if not isinstance(key, str | int) or isinstance(key, bool) or key == "":
                raise DataError(f"{where(row)}: a key must be a text or an integer, got {_preview(key)}")
            return str(key)
        if keys is not None:
            return keys[row]
        text = cells[next(iter(files.values()))][row] if files else ""
        path = PurePosixPath(text)
        if not text or "." in path.stem or ".." in path.parts:
            raise DataError(
                f"{where(row)}: '{text}' makes no key: WebDataset cuts at the first dot of a file's name, "
                "and a key cannot contain '..'; name a column of keys: --key COLUMN"
            )
        return str(path.with_suffix("")).removeprefix("/")

    def record_of(row: int) -> Record:
        parts: list[tuple[str, bytes | Path | Range]] = []
        for name, column in files.items():
            cell = cells[column][row]
            parts.append((_component(name, cell), root / cell if isinstance(cell, str) else cell))
        parts += [(name, _content(name, cells[column][row], where(row))) for name, column in contents.items()]
        components = dict(parts)
        if len(components) < len(parts):
            names = [name for name, _ in parts]
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"{where(row)}: two files would be component '{twice}'; name them apart")
        return Record(key=key_of(row), components=components, label=None if labels is None else labels[row])

    return Source(
        name=name,
        records=_Rows(read.num_rows, record_of),
        classes=dict(enumerate(classes)) if classes is not None and labels is not None else found,
        numbers_classes=classes is None and any(name != str(label) for label, name in found.items()),
        masks=_masks(read, files, fields.masks),
        unused=[name for name in names if name not in fields.columns],
        broken=broken or [],
    )


class _Rows(Sequence[Record]):
    """Makes each record when it is used."""

    def __init__(self, count: int, record_of: Callable[[int], Record]) -> None:
        self._rows, self._record_of = range(count), record_of

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: Any) -> Any:
        return self._record_of(self._rows[row])


def _is_photo_name(name: str) -> bool:
    """Whether a component that a user names is a photo, and not a mask."""
    is_file = is_photo(name) or ("." not in name and name.lower() not in VALUE_EXTENSIONS)
    return is_file and not has_mask_word(name if "." in name else f"{name}.png")


def _are_files(name: str, cells: Sequence[Any]) -> bool:
    """Whether the cells of a component's column are files, and not contents: see `Fields`."""
    extension = name.rpartition(".")[2].lower()
    are_paths = (isinstance(cell, str) and cell.lower().endswith(f".{extension}") for cell in cells)
    return extension not in VALUE_EXTENSIONS or all(are_paths)


def _component(name: str, file: str | Range | Path) -> str:
    if isinstance(file, Range):
        extension = _EXTENSIONS.get(read_photo_header(file.head or b"").format, "jpg")
    else:
        extension = PurePosixPath(file).suffix[1:].lower()
    if not name:
        return photo_component(extension)
    return name if "." in name or is_photo(name) or name == extension else f"{name}.{extension}"


def _content(name: str, cell: Any, where: str) -> bytes:
    """The bytes of a cell as ``webdataset.TarWriter`` would write them for the component ``name``."""
    extension = name.rpartition(".")[2].lower()
    if isinstance(cell, bytes):
        return cell
    try:
        if extension in ("json", "jsn"):
            if not isinstance(cell, str):
                return json.dumps(cell).encode()
            read_json(cell)
        elif isinstance(cell, list) and extension == "npy":
            import numpy as np

            array = np.array(cell)
            stream = io.BytesIO()
            array = array.astype(np.float32) if array.dtype == np.float64 else array
            np.lib.format.write_array(stream, array, allow_pickle=False)
            return stream.getvalue()
        elif cell is None:
            return b""  # a bad record, as with an empty cell of a CSV file
        if not isinstance(cell, str | int | float) or extension == "npy":
            raise TypeError(f"it is a {type(cell).__name__}")
        return str(cell).encode()
    except (TypeError, ValueError, RecursionError) as exc:
        expected = _CONTENTS.get(extension, "a text or a number")
        raise DataError(f"{where}: '{name}' must be {expected}, got {_preview(cell)}: {exc}") from exc


def _masks(read: Table, files: Mapping[str, str], masks: Sequence[str] | None) -> frozenset[str] | None:
    # The extensions of components may differ from row to row.
    columns = [(name, read.cells[column]) for name, column in files.items()]
    rows = range(read.num_rows) if len(columns) > 1 or masks else range(0)
    sets = {tuple(_component(name, cells[row]) for name, cells in columns) for row in rows}
    if masks is None:
        photos = [{component for component in names if is_photo(component)} for names in sets]
        return frozenset(name for names in photos for name in names if is_mask_name(name, names)) or None
    found = {component for names in sets for component in names}
    if other := next((name for name in masks if name not in found), None):
        raise ValueError(f"mask '{other}' is not a component (found: {', '.join(sorted(found))})")
    return frozenset(masks)


def _labels(read: Table, column: str) -> "tuple[array[int], dict[int, str]]":
    """The class ids of all rows, and the class table."""
    cells = read.cells[column]
    for row, cell in enumerate(cells):
        if isinstance(cell, bool) or not isinstance(cell, str | int) or cell == "":
            raise DataError(
                f"{read.where(row)}: column '{column}' must hold class ids or names of classes, got {_preview(cell)}"
            )
    if all(isinstance(cell, int) or _INTEGER.fullmatch(cell) for cell in cells):
        try:
            ids = array("q", map(int, cells))
        except OverflowError as exc:
            raise DataError(f"'{column}' of {read.where(0).partition(', ')[0]} holds integers past 64 bits") from exc
        return ids, {label: str(label) for label in sorted(set(ids))}
    # In a typed table, a number among names is a name, too.
    numbers = {name: number for number, name in enumerate(sorted(set(map(str, cells))))}
    return array("q", (numbers[str(cell)] for cell in cells)), {number: name for name, number in numbers.items()}


def _preview(value: object) -> str:
    """A value for an error's text, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Files to columns


def column_names(path: Path) -> list[str]:
    """The names of a table's columns; `ValueError` if the suffix is not one of `TABLE_SUFFIXES`."""
    suffix = path.suffix.lower()
    if suffix not in TABLE_SUFFIXES:
        raise ValueError(f"'{path}': a table's suffix must be one of {', '.join(TABLE_SUFFIXES)}, got '{suffix}'")
    if suffix == ".parquet":
        with parquet_file(path) as parquet:
            return list(parquet.file.schema_arrow.names)
    with _reading(path) as stream:
        _, row = next(_rows(path, stream), (0, {}))
    if not row:
        raise DataError(f"'{path}' has no rows; expected a row of column names and others, or objects with names")
    return list(row)


def read_columns(path: Path, wanted: list[str]) -> Table:
    """Some columns of a table, which it has; for errors see `table`."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        with parquet_file(path) as parquet:
            cells = {name: parquet.values(name) for name in wanted}
        return Table(cells, lambda row: f"'{path}', row {row}")
    cells = {name: [] for name in wanted}
    numbers = array("q")
    unit = "row" if suffix == ".json" else "line"
    with _reading(path) as stream:
        for number, found in _rows(path, stream):
            for name, column in cells.items():
                if name not in found:
                    raise DataError(f"'{path}', {unit} {number}: no '{name}' (found: {', '.join(found)})")
                column.append(found[name])
            numbers.append(number)
    return Table(cells, lambda row: f"'{path}', {unit} {numbers[row]}")


def _rows(path: Path, stream: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a text file, with the numbers of their lines; those of a .json file are numbered from 0."""
    suffix = path.suffix.lower()
    if suffix in _DELIMITERS:
        reader = csv.DictReader(stream, delimiter=_DELIMITERS[suffix], strict=True)
        names = reader.fieldnames or ()
        if len(set(names)) != len(names):
            raise DataError(f"'{path}', line 1: two columns have one name: {', '.join(names)}")
        for row in reader:
            if None in row or None in row.values():
                raise DataError(f"'{path}', line {reader.line_num}: expected {len(names)} fields, as in the first line")
            yield reader.line_num, row
        return
    found: Iterable[tuple[int, str, Any]]
    if suffix in _LINES:
        lines = ((number, f"'{path}', line {number}", line) for number, line in enumerate(stream, start=1))
        found = ((number, where, _parsed(line, where)) for number, where, line in lines if line.strip())
    else:
        rows = _parsed(stream.read(), f"'{path}'")
        if not isinstance(rows, list):
            raise DataError(f"'{path}': expected a list of objects, found {_preview(rows)}")
        found = ((number, f"'{path}', row {number}", row) for number, row in enumerate(rows))
    for number, where, row in found:
        if not isinstance(row, dict):
            raise DataError(f'{where}: expected an object such as {{"path": ..., "label": ...}}, found {_preview(row)}')
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
