"""Find the records of Parquet files whose cells hold photos, as Hugging Face's ``datasets`` writes them.

Each file is read once, to judge its photos; their bytes are read again, row group by row group, when they are packed.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dali_pipes.errors import DataError, shown
from dali_pipes.formats.photo_header import MAX_PHOTO_BYTES, read_whole_photo_header
from dali_pipes.formats.photo_names import has_mask_word
from dali_pipes.progress import bar
from prep.sources.record import HEAD_BYTES, Source, find_known
from prep.sources.table_files import Table, parquet_file
from prep.sources.tables import PATH_COLUMNS, Fields, source_of
from prep.tar.parquet import ParquetCells, read_cells
from prep.tar.writer import Range
from prep.workers import Report, Workers

SPLITS = ("train", "training", "val", "valid", "validation", "dev", "test", "testing")
"""Usual names of splits, of folders and of files."""
NO_FEATURES = b'{"info": {"features": {}}}'
# As COCO's train2017.
_SPLIT_FOLDER = re.compile(rf"({'|'.join(SPLITS)})[0-9]*", re.IGNORECASE)
_SPLIT = re.compile(rf"({'|'.join(SPLITS)})(?![a-z])", re.IGNORECASE)


class Schema(NamedTuple):
    """The columns of a Parquet file."""

    names: list[str]
    photos: list[str]
    """Columns of bytes, or of structs of bytes and path."""
    classes: dict[str, list[str]]
    """Columns of class ids -> the names of the classes, by id."""


def hf(
    files: Sequence[Path],
    fields: Fields,
    *,
    with_splits: bool = False,
    jobs: int | None = None,
    show_progress: bool = False,
) -> Source:
    """The records of Parquet files with photos in them, in the files' order; rows without a photo are ``broken``.

    Args:
        files: Files with the same columns.
        fields: As for `prep.sources.tables.table`; a column of photos holds their bytes, or paths that start in the
            file's directory. ``mask`` gets the extension of its bytes: ``mask.png``. By default the photo is the column
            ``image``, or the only one with photos; its component is ``jpg``, ``png``, ... The names of classes are
            those of the ``ClassLabel`` in the files' metadata, where they have one. The key is by default the file's
            name and the row: ``train-00000-of-00008/000017``.
        with_splits: Let keys begin with the name of the file's split: see `split_of_file`.
        jobs: The number of processes, each of which reads a file.
        show_progress: Draw a bar.

    Raises:
        DataError: If a file cannot be read, the files have different columns, no column holds photos or several might,
            a column is missing, or a cell has a wrong value; names file and row.
        PipesError: If pyarrow is not installed.
    """
    schema = read_schema(files[0])
    for path in files[1:]:
        if (other := read_schema(path)) != schema:
            raise DataError(
                f"'{path}' has the columns {', '.join(other.names)}, expected those of '{files[0]}', "
                f"{', '.join(schema.names)}, with the same types and classes; pack them apart"
            )
    found = fields.found_in(schema.names, photo=_photo_column(files[0], schema, fields), path=files[0])
    tasks = [(path, found, schema.photos, _prefix(path, files, with_splits=with_splits)) for path in files]
    with (
        Workers(jobs, at_most=len(files)) as workers,
        bar(what="read", total=len(files), unit="files", shown=show_progress) as drawn,
    ):
        parts = list(workers.map(_read_file, tasks, inline=lambda _: len(files) == 1, on_progress=drawn.update))
    places = [(path, row) for path, part in zip(files, parts, strict=True) for row in part.rows]
    broken = [line for part in parts for line in part.broken]
    name = f"Parquet '{files[0]}'" + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    if not places:
        raise DataError(f"{name}: no row can be packed: {shown(broken, are_names=False) or 'the files are empty'}")
    names = schema.classes.get(found.label or "")
    return source_of(
        Table(
            columns={column: [cell for part in parts for cell in part.columns[column]] for column in found.columns},
            where=lambda row: f"'{places[row][0]}', row {places[row][1]}",
        ),
        replace(found, root=fields.root or files[0].parent),
        name=name,
        unused=[name for name in schema.names if name not in found.columns],
        classes=None if names is None else dict(enumerate(names)),
        keys=None if found.key else [key for part in parts for key in part.keys],
        broken=broken,
    )


def find_parquet(paths: Sequence[Path]) -> list[Path]:
    """The named files, and of a directory its ``.parquet`` files, also those in folders below it, sorted."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(entry for entry in path.rglob("*.parquet") if entry.is_file())
            if not inside:
                raise DataError(f"directory '{path}' holds no .parquet; name the files")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise DataError(f"no such file or directory: '{path}'")
    return files


def split_of_file(path: Path) -> str:
    """The split that a file belongs to, by its name or its folder's; empty if neither says one.

    >>> split_of_file(Path("data/train-00000-of-00002.parquet")), split_of_file(Path("plain_text/test/0000.parquet"))
    ('train', 'test')
    >>> split_of_file(Path("trainers.parquet"))
    ''
    """
    match = _SPLIT.match(path.name) or _SPLIT.fullmatch(path.parent.name)
    return match[1].lower() if match else ""


def split_of_folder(name: str) -> str:
    """The split that a folder of photos is, by its name; empty if it is none.

    >>> split_of_folder("val2017"), split_of_folder("Train"), split_of_folder("trains")
    ('val', 'train', '')
    """
    match = _SPLIT_FOLDER.fullmatch(name)
    return match[1].lower() if match else ""


def read_schema(path: Path) -> Schema:
    """The columns of a Parquet file."""
    with parquet_file(path) as file:
        import pyarrow  # type: ignore[import-untyped,unused-ignore]  # an extra, without types

        found = file.schema_arrow

        def is_bytes(kind: Any) -> bool:
            return bool(pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind))

        def holds_photos(kind: Any) -> bool:
            if not pyarrow.types.is_struct(kind):
                return is_bytes(kind)
            return any(field.name == "bytes" and is_bytes(field.type) for field in kind)

        photos = [field.name for field in found if holds_photos(field.type)]
        return Schema(list(found.names), photos, _classes(found.metadata or {}, path))


def _classes(metadata: Mapping[bytes, bytes], path: Path) -> dict[str, list[str]]:
    """The ``ClassLabel`` columns by Hugging Face's part of a file's metadata."""
    labels: dict[str, list[str]] = {}
    try:
        for name, feature in json.loads(metadata.get(b"huggingface", NO_FEATURES))["info"]["features"].items():
            # A list's feature is a list with one feature, a struct's a dict of features.
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and feature["names"]:
                labels[name] = feature["names"]
        if any(not isinstance(text, str) for names in labels.values() for text in names):
            raise TypeError("a name of a class is no text")
        if any(not isinstance(names, list) for names in labels.values()):
            raise TypeError("the names of classes are no list")
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise DataError(
            f"'{path}': its metadata 'huggingface' are not as datasets writes them ({type(exc).__name__}: {exc}); "
            "write the file anew, or without them"
        ) from exc
    return labels


def _photo_column(path: Path, schema: Schema, fields: Fields) -> str | None:
    photos = [name for name in schema.photos if not has_mask_word(f"{name}.png")]
    found = find_known(photos, PATH_COLUMNS) or (photos[0] if len(photos) == 1 else None)
    if found is None and not fields.components:
        raise DataError(
            f"'{path}' must have one column of photos, found {', '.join(photos) or 'none'} (columns: "
            f"{', '.join(schema.names)}); name the photo: --component image=COLUMN; a list of paths is packed by "
            "dali-pipes prep pack table"
        )
    return found


def _prefix(path: Path, files: Sequence[Path], *, with_splits: bool) -> str:
    """The start of the keys of a file's rows: its name, after its folder's if another file has the same name."""
    is_shared = sum(other.name == path.name for other in files) > 1
    name = f"{path.parent.name}-{path.name}" if is_shared else path.name
    # WebDataset would cut the key at a dot of its last part.
    stem = name.removesuffix(".parquet").replace(".", "-")
    return f"{split_of_file(path)}/{stem}" if with_splits else stem


# Files


class _Part(NamedTuple):
    """What is taken of one file."""

    columns: dict[str, list[Any]]
    keys: list[str]
    rows: list[int]
    broken: list[str]


def _read_file(task: tuple[Path, Fields, list[str], str], report: Report) -> _Part:
    path, fields, photos, prefix = task
    files = [column for column in fields.components.values() if column in photos]
    others = [column for column in fields.columns if column not in files]
    part = _Part({column: [] for column in fields.columns}, [], [], [])
    first = 0
    with parquet_file(path) as file:
        for group in range(file.num_row_groups):
            cells = _parts(file, path, group, tuple(dict.fromkeys(files)), fields.root or path.parent)
            if others:
                read = file.read_row_group(group, columns=others)
                cells |= {column: read.column(column).to_pylist() for column in others}
            num_rows = file.metadata.row_group(group).num_rows
            if odd := next((column for column, found in cells.items() if len(found) != num_rows), None):
                raise DataError(
                    f"'{path}' is damaged: its row group {group} has {num_rows} rows, and column '{odd}' has "
                    f"{len(cells[odd])}; get it anew"
                )
            for row in range(num_rows):
                lacking = [column for column in files if cells[column][row] is None]
                if lacking:
                    part.broken.append(f"'{path}', row {first + row}: no photo in column '{lacking[0]}'")
                    continue
                for column, taken in part.columns.items():
                    taken.append(cells[column][row])
                part.keys.append(f"{prefix}/{first + row:06d}")
                part.rows.append(first + row)
            first += num_rows
    report(1)
    return part


def _parts(file: Any, path: Path, group: int, columns: tuple[str, ...], root: Path) -> dict[str, list[Any]]:
    """Column -> the place of each photo of a row group: in the file, or in a file of its own; ``None`` without one."""
    found: dict[str, list[Any]] = {column: [] for column in columns}
    if not columns:
        return found
    place, offset = ParquetCells(path, group, columns), 0
    for column, data, name in read_cells(file, group, columns):
        if data is not None:
            header = read_whole_photo_header(data) if len(data) <= MAX_PHOTO_BYTES else None
            found[column].append(Range(place, offset, len(data), bytes(data[:HEAD_BYTES]), header))
            offset += len(data)
        else:
            found[column].append(root / name if name else None)
    return found
