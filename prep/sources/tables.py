"""Read a list of paths and labels, with one sample a row: CSV, TSV, JSON, JSON lines or Parquet.

Only the needed columns are kept in memory; a record is made when it is used.
"""

import contextlib
import re
from array import array
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import overload

from dali_pipes.errors import DataError, shown
from dali_pipes.formats.photo_header import is_photo
from prep.photos.masks import is_mask_name
from prep.sources.record import Record, Source, find_known, number_classes, preview
from prep.sources.table_files import Table, column_names, read_columns

# Usual names of columns, in upper or lower case. The first one that a table has is taken.
PATH_COLUMNS = ("path", "image", "image_path", "filepath", "file", "file_name", "filename", "img")
LABEL_COLUMNS = ("label", "class", "cls", "class_id", "class_name", "category", "target")
KEY_COLUMNS = ("key", "__key__")

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


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
    """The records of a list, in its order. A missing file is found when it is packed: see ``on_bad`` of `pack`.

    Args:
        path: ``.csv`` or ``.tsv`` with a row of names first, ``.json`` (a list of objects), ``.jsonl``, ``.ndjson`` or
            ``.parquet``.
        components: Component -> column of paths. ``image.jpg`` is the component's name; with ``image`` the file's
            extension is added: ``image.png`` for ``a.png``. By default the first column of `PATH_COLUMNS`, and the
            file's extension is the name.
        values: Component -> column whose cells are written themselves, as `webdataset.TarWriter` does: ``caption.txt``
            a text, ``boxes.json`` a value of a JSON table.
        label: The column of labels; by default the first of `LABEL_COLUMNS`. If all are integers, they are class ids;
            otherwise they are names of classes, whose ids count them in sorted order, from 0.
        has_labels: ``False`` packs no ``cls``.
        key: The column of keys; by default the first of `KEY_COLUMNS`, else the path (of the first component) as the
            list has it, without its extension.
        root: The directory that paths in the list start from; by default the list's own directory.
        masks: Components that hold a class id for each pixel. They must be 8-bit grey PNGs that can be decoded, and
            have their photo's height and width. By default they are found by their names, as in `prep verify`; a list
            of one photo a row has no mask.

    Raises:
        DataError: If the file cannot be read in the format of its name, a column is missing, or a cell has a wrong
            value; names the line or row.
        PipesError: If the file is Parquet, and pyarrow is not installed.
        ValueError: If the file's suffix is not known, or a mask is not a component.
    """
    names = column_names(path)
    paths = components or {"": _known(path, names, PATH_COLUMNS, what="paths", option="--component image.jpg=COLUMN")}
    if key is None:
        key = find_known(names, KEY_COLUMNS)
    if has_labels and label is None:
        label = _known(path, names, LABEL_COLUMNS, what="labels", option="--label COLUMN, or --unlabelled")
    asked = [*paths.values(), *(values or {}).values(), *filter(None, [key, label if has_labels else None])]
    for column in asked:
        if column not in names:
            raise DataError(f"'{path}' has no column '{column}' (found: {', '.join(names)})")
    read = read_columns(path, list(dict.fromkeys(asked)))
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
    """Makes each record from the columns when it is used."""

    def __init__(
        self,
        read: Table,
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
                raise DataError(f"{self._table.where(row)}: a key must be a text or an integer, got {preview(key)}")
            return str(key)
        text = self._table.columns[self._first][row]
        path = PurePosixPath(text)
        if "." in path.stem or ".." in path.parts:
            raise DataError(
                f"{self._table.where(row)}: '{text}' makes no key: WebDataset cuts at the first dot of a file's name, "
                "and a key cannot contain '..'; name a column of keys: --key COLUMN"
            )
        return str(path.with_suffix("")).removeprefix("/")


def _component(name: str, path: str) -> str:
    extension = PurePosixPath(path).suffix[1:].lower()
    if not name:
        return extension
    return name if "." in name or is_photo(name) or name == extension else f"{name}.{extension}"


def _check_paths(read: Table, column: str) -> None:
    for row, text in enumerate(read.columns[column]):
        if not isinstance(text, str) or not PurePosixPath(text).suffix[1:]:
            raise DataError(
                f"{read.where(row)}: column '{column}' must hold the path of a file with an extension, "
                f"got {preview(text)}"
            )


def _masks(read: Table, paths: Mapping[str, str], masks: Collection[str] | None) -> frozenset[str]:
    # The extensions of components may differ from row to row.
    columns = [(name, read.columns[column]) for name, column in paths.items()]
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


def _known(path: Path, names: Sequence[str], known: Sequence[str], *, what: str, option: str) -> str:
    found = find_known(names, known)
    if found is None:
        raise DataError(
            f"'{path}' has no column of {what} by any of the names {', '.join(known)} (found: "
            f"{shown(names) or 'none'}); name it: {option}"
        )
    return found
