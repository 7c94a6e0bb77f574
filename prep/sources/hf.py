"""Find the records of Parquet files whose cells hold photos, as Hugging Face's ``datasets`` writes them.

Each file is read once, to judge its photos; their bytes are read again, row group by row group, when they are packed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dali_pipes.errors import DataError, shown
from dali_pipes.formats.names import read_json
from dali_pipes.formats.photo_header import MAX_PHOTO_BYTES, read_whole_photo_header
from dali_pipes.formats.photo_names import has_mask_word
from dali_pipes.progress import bar
from prep.sources.record import HEAD_BYTES, Source
from prep.sources.tables import PATH_COLUMNS, Fields, Table, find_known, source_of
from prep.tar.inside import Parquet, ParquetCells, parquet_file, read_cells
from prep.tar.writer import Range
from prep.workers import Report, Workers

# Usual names of splits, of folders (as COCO's train2017) and of files.
_SPLITS = "train|training|val|valid|validation|dev|test|testing"
_SPLIT_FOLDER = re.compile(rf"({_SPLITS})[0-9]*", re.IGNORECASE)
_SPLIT = re.compile(rf"({_SPLITS})(?![a-z])", re.IGNORECASE)


class Schema(NamedTuple):
    """The columns of a Parquet file."""

    names: list[str]
    photos: list[str]
    """The columns that hold bytes, or structs of bytes and path."""
    classes: dict[str, list[str]]
    """Column of class ids -> the class names, in the order of the ids."""


def hf(files: Sequence[Path], fields: Fields, *, jobs: int | None = None, show_progress: bool = False) -> Source:
    """The records of Parquet files with photos in them, in the files' order; rows without a photo are ``broken``.

    Args:
        files: Files with the same columns. If they are of several splits (see `split_of_file`), keys begin with these.
        fields: As for `prep.sources.tables.table`; a column of photos holds their bytes, or paths that start in the
            file's directory. ``mask`` gets the extension of its bytes: ``mask.png``. By default the photo is the column
            ``image``, or the only one with photos; its component is ``jpg``, ``png``, ... The names of classes are
            those of the ``ClassLabel`` in the files' metadata, where they have one. The key is by default the file's
            name and the row: ``train-00000-of-00008/000017``.
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
    tasks = [(path, found, schema.photos, prefix) for path, prefix in zip(files, _prefixes(files), strict=True)]
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
    cells = {column: [cell for part in parts for cell in part.columns[column]] for column in found.columns}
    return source_of(
        Table(cells, lambda row: f"'{places[row][0]}', row {places[row][1]}"),
        replace(found, root=fields.root or files[0].parent),
        name=name,
        names=schema.names,
        classes=schema.classes.get(found.label or ""),
        keys=[key for part in parts for key in part.keys],
        broken=broken,
    )


def find_parquet(paths: Sequence[Path]) -> list[Path]:
    """The named files, and of a directory its ``.parquet`` files, also those in folders below it, sorted."""
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise DataError(f"no such file or directory: '{path}'")
        inside = sorted(entry for entry in path.rglob("*.parquet") if entry.is_file()) if path.is_dir() else [path]
        if not inside:
            raise DataError(f"directory '{path}' holds no .parquet; name the files")
        files += inside
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


def is_split(folder: str) -> bool:
    """Whether a folder of photos is a split by its name.

    >>> is_split("val2017"), is_split("Train"), is_split("trains")
    (True, True, False)
    """
    return _SPLIT_FOLDER.fullmatch(folder) is not None


def read_schema(path: Path) -> Schema:
    """The columns of a Parquet file."""
    with parquet_file(path) as parquet:
        import pyarrow  # type: ignore[import-untyped,unused-ignore]  # an extra, without types

        found = parquet.file.schema_arrow

        def holds_photos(kind: Any) -> bool:
            kinds = [field.type for field in kind if field.name == "bytes"] if pyarrow.types.is_struct(kind) else [kind]
            return any(pyarrow.types.is_binary(one) or pyarrow.types.is_large_binary(one) for one in kinds)

        photos = [field.name for field in found if holds_photos(field.type)]
        return Schema(list(found.names), photos, _classes(found.metadata or {}, path))


def _classes(metadata: Mapping[bytes, bytes], path: Path) -> dict[str, list[str]]:
    """The ``ClassLabel`` columns by Hugging Face's part of a file's metadata."""
    if b"huggingface" not in metadata:
        return {}
    try:
        features = read_json(metadata[b"huggingface"])["info"]["features"]
        # A list's feature is a list with one feature, a struct's a dict of features.
        dicts = {name: feature for name, feature in features.items() if isinstance(feature, dict)}
        labels = {name: feature["names"] for name, feature in dicts.items() if feature.get("_type") == "ClassLabel"}
        found = {name: names for name, names in labels.items() if names}
        for names in found.values():
            if not isinstance(names, list) or not all(isinstance(text, str) for text in names):
                raise TypeError("the names of classes are no list of texts")
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise DataError(
            f"'{path}': its metadata 'huggingface' are not as datasets writes them ({type(exc).__name__}: {exc}); "
            "write the file anew, or without them"
        ) from exc
    return found


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


def _prefixes(files: Sequence[Path]) -> list[str]:
    """The start of the keys of each file's rows: its name, after its folder's if another file has the same name."""
    names = [path.name for path in files]
    splits = [split_of_file(path) for path in files]
    prefixes = []
    for path, split in zip(files, splits, strict=True):
        name = f"{path.parent.name}-{path.name}" if names.count(path.name) > 1 else path.name
        # WebDataset would cut the key at a dot of its last part.
        stem = name.removesuffix(".parquet").replace(".", "-")
        prefixes.append(f"{split}/{stem}" if len(set(splits)) > 1 else stem)
    return prefixes


class _Part(NamedTuple):
    """The rows of one file that have photos."""

    columns: dict[str, list[Any]]
    keys: list[str]
    rows: list[int]
    """Their numbers in the file."""
    broken: list[str]


def _read_file(task: tuple[Path, Fields, list[str], str], report: Report) -> _Part:
    path, fields, photos, prefix = task
    files = tuple(dict.fromkeys(column for column in fields.components.values() if column in photos))
    others = [column for column in fields.columns if column not in files]
    part = _Part({column: [] for column in fields.columns}, [], [], [])
    first = 0
    with parquet_file(path) as parquet:
        for group in range(parquet.file.num_row_groups):
            cells = _parts(parquet, path, group, files, fields.root or path.parent)
            cells |= {column: parquet.values(column, group) for column in others}
            num_rows = parquet.file.metadata.row_group(group).num_rows
            if odd := next((column for column, found in cells.items() if len(found) != num_rows), None):
                raise DataError(
                    f"'{path}' is damaged: its row group {group} has {num_rows} rows, and column '{odd}' has "
                    f"{len(cells[odd])}; get it anew"
                )
            for row in range(num_rows):
                if lacking := next((column for column in files if cells[column][row] is None), None):
                    part.broken.append(f"'{path}', row {first + row}: no photo in column '{lacking}'")
                    continue
                for column, taken in part.columns.items():
                    taken.append(cells[column][row])
                part.keys.append(f"{prefix}/{first + row:06d}")
                part.rows.append(first + row)
            first += num_rows
    report(1)
    return part


def _parts(parquet: Parquet, path: Path, group: int, columns: tuple[str, ...], root: Path) -> dict[str, list[Any]]:
    """Column -> the place of each photo of a row group: in the file, or in a file of its own; ``None`` without one."""
    found: dict[str, list[Any]] = {column: [] for column in columns}
    if not columns:
        return found
    place, offset = ParquetCells(path, group, columns), 0
    for column, data, name in read_cells(parquet, group, columns):
        if data is not None:
            header = read_whole_photo_header(data) if len(data) <= MAX_PHOTO_BYTES else None
            found[column].append(Range(place, offset, len(data), bytes(data[:HEAD_BYTES]), header))
            offset += len(data)
        else:
            found[column].append(root / name if name else None)
    return found
