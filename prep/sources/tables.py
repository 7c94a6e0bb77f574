"""Read a list of paths and labels, with one sample a row: CSV, TSV, JSON, JSON lines or Parquet.

Only the needed columns are kept in memory; a record is made when it is used.
"""

import contextlib
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, overload

from dali_pipes.errors import DataError, shown
from dali_pipes.formats.names import read_json
from dali_pipes.formats.photo_header import is_photo, read_photo_header
from dali_pipes.formats.photo_names import has_mask_word, is_mask_name
from prep.sources.record import PHOTO_EXTENSION, Record, Source, find_known, number_classes, photo_component, preview
from prep.sources.table_files import Table, column_names, read_columns
from prep.tar.writer import Range

# Usual names of columns, in upper or lower case. The first one that a table has is taken.
PATH_COLUMNS = ("path", "image", "image_path", "filepath", "file", "file_name", "filename", "img")
LABEL_COLUMNS = ("label", "class", "cls", "class_id", "class_name", "category", "target")
KEY_COLUMNS = ("key", "__key__")
VALUE_EXTENSIONS = frozenset({"txt", "text", "json", "jsn", "npy"})
"""Extensions of components whose columns hold contents, or paths that end in the extension."""

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The columns of a table that become parts of samples, as a user names them."""

    components: Mapping[str, str] = field(default_factory=dict)
    """Component -> column, of files or of contents. A photo's column holds paths: ``image.jpg`` is the component's
    name; with ``image`` the file's extension is added: ``image.png`` for ``a.png``. A column for one of
    `VALUE_EXTENSIONS` holds the contents themselves, ``caption.txt`` a text, ``boxes.json`` a value or JSON,
    ``vector.npy`` a list of numbers; if all of its cells end in that extension, they are paths. Any other column holds
    paths. If none of them is a photo (masks do not count), the photo is, as by default, in the first column of
    `PATH_COLUMNS`, and the file's extension is its component: ``jpg`` for ``a.JPEG``."""
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
    """Components that hold a class id for each pixel. They must be 8-bit grey PNGs that can be decoded, and have their
    photo's height and width. By default they are found by their names, as in `prep verify`; a list of one photo a row
    has no mask."""
    root: Path | None = None
    """The directory that paths start from; by default that of the list."""

    def found_in(self, names: Sequence[str], *, photo: str | None, path: Path) -> "Fields":
        """The fields with the columns that have usual names; ``photo`` is the column of the photo by default.

        Raises:
            DataError: If a column is missing from ``names``, the columns of the file ``path``.
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
    return source_of(
        read,
        replace(found, root=fields.root or path.parent),
        name=f"table '{path}'",
        unused=[name for name in names if name not in found.columns],
    )


def _no_column(path: Path, names: Sequence[str], known: Sequence[str], *, what: str, option: str) -> DataError:
    return DataError(
        f"'{path}' has no column of {what} by any of the names {', '.join(known)} (found: {shown(names) or 'none'}); "
        f"name it: {option}"
    )


def source_of(
    read: Table,
    fields: Fields,
    *,
    name: str,
    unused: Sequence[str],
    classes: Mapping[int, str] | None = None,
    keys: Sequence[str] | None = None,
    broken: Sequence[str] = (),
) -> Source:
    """The records of columns that were read.

    Args:
        read: The columns. A cell of a file is its path, or the part itself, in ``fields.components``.
        fields: What becomes of them; all are found.
        name: Of the source.
        unused: See `Source`.
        classes: Class ids and their names; by default the column of labels gives them.
        keys: The records' keys, if no column has them; by default the paths.
        broken: See `Source`.
    """
    files = {name: column for name, column in fields.components.items() if _are_files(name, read.columns[column])}
    for column in files.values():
        _check_paths(read, column)
    labels, found = _labels(read, fields.label) if fields.label is not None else (None, {})
    contents = {name: column for name, column in fields.components.items() if name not in files}
    return Source(
        name=name,
        records=_Rows(read, fields, files=files, values={**contents, **fields.values}, keys=keys, labels=labels),
        classes=found if classes is None or fields.label is None else classes,
        numbers_classes=classes is None and any(name != str(label) for label, name in found.items()),
        masks=_masks(read, files, fields.masks),
        finds_masks=fields.masks is None,
        unused=unused,
        broken=broken,
    )


class _Rows(Sequence[Record]):
    """Makes each record from the columns when it is used."""

    def __init__(
        self,
        read: Table,
        fields: Fields,
        *,
        files: Mapping[str, str],
        values: Mapping[str, str],
        keys: Sequence[str] | None,
        labels: "array[int] | None",
    ) -> None:
        self._table, self._fields, self._files, self._values = read, fields, files, values
        self._keys, self._labels = keys, labels

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
        for name, column in self._files.items():
            cell = columns[column][row]
            content = (self._fields.root or Path()) / cell if isinstance(cell, str) else cell
            self._add(components, row, _component(name, cell), content)
        for name, column in self._values.items():
            self._add(components, row, name, _content(name, columns[column][row], self._table.where, row))
        label = self._labels[row] if self._labels is not None else None
        return Record(key=self._key_of(row), components=components, label=label)

    def _add(self, components: dict[str, object], row: int, name: str, content: object) -> None:
        if name in components:
            raise DataError(f"{self._table.where(row)}: two files would be component '{name}'; name them apart")
        components[name] = content

    def _key_of(self, row: int) -> str:
        if self._fields.key is not None:
            key = self._table.columns[self._fields.key][row]
            if not isinstance(key, str | int) or isinstance(key, bool) or key == "":
                raise DataError(f"{self._table.where(row)}: a key must be a text or an integer, got {preview(key)}")
            return str(key)
        if self._keys is not None:
            return self._keys[row]
        text = self._table.columns[next(iter(self._files.values()))][row] if self._files else ""
        path = PurePosixPath(text)
        if not text or "." in path.stem or ".." in path.parts:
            raise DataError(
                f"{self._table.where(row)}: '{text}' makes no key: WebDataset cuts at the first dot of a file's name, "
                "and a key cannot contain '..'; name a column of keys: --key COLUMN"
            )
        return str(path.with_suffix("")).removeprefix("/")


def _is_photo_name(name: str) -> bool:
    """Whether a component that a user names is a photo, and not a mask."""
    is_file = is_photo(name) or ("." not in name and name.lower() not in VALUE_EXTENSIONS)
    return is_file and not has_mask_word(name if "." in name else f"{name}.png")


def _are_files(name: str, cells: Sequence[Any]) -> bool:
    """Whether the cells of a component's column are files, and not contents: see `table`."""
    extension = name.rpartition(".")[2].lower()
    return extension not in VALUE_EXTENSIONS or all(
        isinstance(cell, str) and cell.lower().endswith(f".{extension}") for cell in cells
    )


def _component(name: str, file: str | Range | Path) -> str:
    if isinstance(file, Range):
        extension = PHOTO_EXTENSION.get(read_photo_header(file.head or b"").format, "jpg")
    else:
        extension = PurePosixPath(file).suffix[1:].lower()
    if not name:
        return photo_component(extension)
    return name if "." in name or is_photo(name) or name == extension else f"{name}.{extension}"


def _content(name: str, cell: Any, where: Callable[[int], str], row: int) -> object:
    """A cell as the value that `encode_value` takes for the component ``name``."""
    extension = name.rpartition(".")[2].lower()
    if cell is None and extension not in ("json", "jsn"):
        return b""  # a bad record, as with an empty cell of a CSV file
    if extension in ("txt", "text") and isinstance(cell, int | float):
        return str(cell)
    if extension in ("json", "jsn") and isinstance(cell, str):
        try:
            read_json(cell)
        except ValueError as exc:
            raise DataError(f"{where(row)}: '{name}' must be JSON, got {preview(cell)}: {exc}") from exc
    if extension == "npy" and isinstance(cell, str):
        raise DataError(f"{where(row)}: '{name}' must be a list of numbers or a path, got {preview(cell)}")
    if extension == "npy" and isinstance(cell, list):
        import numpy as np

        try:
            array = np.array(cell)
        except ValueError as exc:
            raise DataError(f"{where(row)}: '{name}' must be numbers in rows of one length: {exc}") from exc
        return array.astype(np.float32) if array.dtype == np.float64 else array
    return cell


def _check_paths(read: Table, column: str) -> None:
    for row, cell in enumerate(read.columns[column]):
        if isinstance(cell, Range | Path):
            continue
        if not isinstance(cell, str) or not PurePosixPath(cell).suffix[1:]:
            raise DataError(
                f"{read.where(row)}: column '{column}' must hold the path of a file with an extension, "
                f"got {preview(cell)}"
            )


def _masks(read: Table, files: Mapping[str, str], masks: Sequence[str] | None) -> frozenset[str]:
    # The extensions of components may differ from row to row.
    columns = [(name, read.columns[column]) for name, column in files.items()]
    rows = range(read.num_rows) if len(columns) > 1 or masks else range(0)
    sets = {tuple(_component(name, cells[row]) for name, cells in columns) for row in rows}
    if masks is None:
        photos = [{component for component in names if is_photo(component)} for names in sets]
        return frozenset(component for names in photos for component in names if is_mask_name(component, names))
    found = {component for names in sets for component in names}
    if other := next((name for name in masks if name not in found), None):
        raise ValueError(f"mask '{other}' is not a component (found: {', '.join(sorted(found))})")
    return frozenset(masks)


def _labels(read: Table, column: str) -> "tuple[array[int], dict[int, str]]":
    """The class ids of all rows, and the class table."""
    cells = read.columns[column]
    for row, cell in enumerate(cells):
        if isinstance(cell, bool) or not isinstance(cell, str | int) or cell == "":
            raise DataError(
                f"{read.where(row)}: column '{column}' must hold class ids or names of classes, got {preview(cell)}"
            )
    if all(isinstance(cell, int) or _INTEGER.fullmatch(cell) for cell in cells):
        with contextlib.suppress(OverflowError):
            ids = array("q", map(int, cells))
            return ids, {label: str(label) for label in sorted(set(ids))}
        raise DataError(f"'{column}' of {read.where(0).partition(', ')[0]} holds integers past 64 bits")
    # In a typed table, a number among names is a name, too.
    numbers = number_classes(map(str, cells))
    return array("q", (numbers[str(cell)] for cell in cells)), {number: name for name, number in numbers.items()}
