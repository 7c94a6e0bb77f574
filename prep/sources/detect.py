"""Find out what a source is: class folders, the pets layout, photos, a table, tars, Parquet files.

Nothing is read but names, the columns of tables, and the first photo in each folder.
"""

import os
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from dali_pipes.errors import DataError, PipesError, printable, shown
from dali_pipes.formats.photo_header import is_photo
from dali_pipes.store.shard_names import extension_of
from dali_pipes.store.urls import is_remote
from prep.sources import Kind
from prep.sources.hf import hf, read_schema, split_of_file, split_of_folder
from prep.sources.imagefolder import folders_of, holds_photos, imagefolder, photo_folder
from prep.sources.pets import pets, pets_root
from prep.sources.record import Source, find_known
from prep.sources.table_files import TABLE_SUFFIXES, column_names
from prep.sources.tables import PATH_COLUMNS, Fields, table

_PHOTO_FOLDERS = frozenset({"image", "images", "img", "imgs", "photos", "jpegimages"})
_MASK_FOLDERS = frozenset(
    {"mask", "masks", "annotation", "annotations", "label", "labels", "trimaps", "segmentation", "segmentationclass"}
)


@dataclass(frozen=True, kw_only=True)
class Detected:
    """What a source is."""

    source: str
    kind: Kind
    text: str
    """The kind of source in words: ``class folders: 'cat', 'dog', 'owl'``."""
    files: tuple[Path, ...] = ()
    """The files of a table or of Parquet."""
    splits: tuple[str, ...] = ()
    """The splits that the source has: folders, or names of files."""
    is_class: bool = False
    """Whether the source is the folder of one class."""

    def open(
        self,
        *,
        endpoint: str | None = None,
        fields: Fields | None = None,
        jobs: int | None = None,
        show_progress: bool = False,
    ) -> Source:
        """The records.

        Args:
            endpoint: AIStore's proxy, for tars in a bucket.
            fields: Columns, for a table or Parquet files.
            jobs: The number of processes.
            show_progress: Draw bars.

        Raises:
            ValueError: If ``fields`` are given for another kind of source.
            PipesError: See the source's own function.
        """
        fields = fields or Fields()
        directory = Path(self.source)
        if self.kind == "table":
            return table(self.files[0], fields)
        if self.kind == "hf":
            return hf(self.files, fields, with_splits=bool(self.splits), jobs=jobs, show_progress=show_progress)
        if fields != Fields():
            raise ValueError(
                f"'{self.source}' is {self.text}; --component, --value, --label, --unlabelled, --key, --mask and "
                "--root are for tables and Parquet files"
            )
        if self.kind == "imagefolder" and self.is_class:
            folder = directory.absolute()
            return imagefolder(folder.parent, only=folder.name, show_progress=show_progress)
        if self.kind == "imagefolder":
            return imagefolder(directory, splits=self.splits, show_progress=show_progress)
        if self.kind == "photos":
            return photo_folder(directory)
        if self.kind == "pets":
            return pets(directory)
        from dali_pipes.data_set.named import list_shards
        from prep.sources.tars import tars

        shards = list_shards(self.source, endpoint=endpoint, compressed=True)
        return tars(shards, jobs=jobs, show_progress=show_progress)


def detect(source: str, *, kind: Kind | None = None, classes: Collection[str] = ()) -> Detected:
    """What ``source`` is: a directory, a file, or a URL, glob or list in braces of tars.

    Args:
        source: The source.
        kind: What it is to be taken for, where it might be several things.
        classes: The classes of the data set to which the source is added. They decide: a folder with the name of one
            is a class, also if it is ``source`` itself. With classes, a folder of photos that is the only one is a
            class, too, as each of several is.

    Raises:
        DataError: If there is no such file or directory, or it is no source that is known, or might be several, or is
            not of the given ``kind``: the text says what was looked for and what was found.
    """
    path = Path(source)
    if is_remote(source) or "://" in source or not os.path.lexists(path):
        candidates = _by_name(source)
    elif path.is_dir():
        candidates = _in_directory(path, classes)
        if kind == "photos" and not any(one.kind == kind for one in candidates) and holds_photos(path):
            candidates.append(Detected(source=source, kind=kind, text="photos without classes"))
    else:
        candidates = _file(path)
    if not candidates:
        raise DataError(
            f"'{source}' is no source that is known: looked for class folders (cat/1.jpg), photos, the pets layout "
            "(images, annotations/list.txt), a table of paths (.csv, .tsv, .json, .jsonl, .ndjson or .parquet), "
            "Hugging Face's Parquet files, and tars"
        )
    found = [one for one in candidates if kind is None or one.kind == kind]
    if len(found) == 1:
        return found[0]
    here = "; ".join(f"{one.text} (--kind {one.kind})" for one in candidates)
    if not found:
        raise DataError(f"'{source}' is no {kind}: found {here}")
    raise DataError(
        f"'{source}' may be several things: {here}; say which with --kind; each kind has a command of its own, too: "
        + ", ".join(f"dali-pipes prep pack {one.kind} {shlex.quote(one.source)} URL" for one in found)
    )


def _by_name(source: str) -> list[Detected]:
    """A URL, or a path that is none: tars by a prefix, a glob or braces."""
    folder, _, prefix = source.rpartition("/")
    parent = Path(folder or ("/" if source.startswith("/") else "."))
    if is_remote(source) or "://" in source or extension_of(source) or any(mark in source for mark in "*?[{"):
        is_tars = True
    else:
        names = [path.name for path in parent.iterdir()] if prefix and parent.is_dir() else []
        is_tars = any(name.startswith(prefix) and extension_of(name) for name in names)
    if not is_tars:
        raise DataError(f"no such file or directory: '{source}'")
    return [Detected(source=source, kind="tars", text="tars")]


def _file(path: Path) -> list[Detected]:
    if extension_of(path.name):
        return [Detected(source=str(path), kind="tars", text="tars")]
    if path.suffix.lower() == ".parquet" and read_schema(path).photos:
        return [Detected(source=str(path), kind="hf", text="a Parquet file with photos in it", files=(path,))]
    return [_table(path, column_names(path))] if path.suffix.lower() in TABLE_SUFFIXES else []


def _table(path: Path, names: Sequence[str]) -> Detected:
    text = f"the table '{printable(path.name)}' with the columns {', '.join(map(printable, names))}"
    return Detected(source=str(path), kind="table", text=text, files=(path,))


def _in_directory(path: Path, classes: Collection[str]) -> list[Detected]:
    """All that a directory may be."""
    root = pets_root(path)
    if (root / "images").is_dir() and (root / "annotations" / "list.txt").is_file():
        return [Detected(source=str(path), kind="pets", text="the layout of Oxford-IIIT Pet")]
    names = sorted(entry.name for entry in os.scandir(path) if entry.is_file() and not entry.name.startswith("."))
    found = _parquet(path)
    if any(map(extension_of, names)):
        found.append(Detected(source=str(path), kind="tars", text="tars"))
    for name in names:
        found += _table_of_paths(path / name)
    return found + _photos(path, names, classes)


def _parquet(path: Path) -> list[Detected]:
    files = sorted(entry for entry in path.rglob("*.parquet") if entry.is_file())
    if not files or not read_schema(files[0]).photos:
        return []
    found = {split_of_file(file) for file in files}
    splits = tuple(sorted(found)) if len(found) > 1 else ()
    if "" in splits:
        odd = next(file for file in files if not split_of_file(file))
        raise DataError(
            f"'{path}' holds Parquet files of the splits {shown(sorted(found - {''}))}, and '{odd}', whose name says "
            "none; make each from a folder of its own"
        )
    text = f"Parquet files with photos in them{_with_splits(splits)}"
    return [Detected(source=str(path), kind="hf", text=text, files=tuple(files), splits=splits)]


def _table_of_paths(path: Path) -> list[Detected]:
    """The file, if it is a table with a column of paths."""
    if path.suffix.lower() not in TABLE_SUFFIXES:
        return []
    try:
        names = column_names(path)
    except PipesError:
        return []  # a .json of another kind
    holds_photos = path.suffix.lower() == ".parquet" and read_schema(path).photos
    return [] if holds_photos or find_known(names, PATH_COLUMNS) is None else [_table(path, names)]


def _photos(path: Path, names: Sequence[str], classes: Collection[str]) -> list[Detected]:
    """Class folders, or photos without classes."""
    source = str(path)
    has_photos = any(is_photo(name) for name in names if "." in name)
    folders = [name for name in folders_of(path) if holds_photos(path / name)]
    flat = Detected(source=source, kind="photos", text="photos without classes")
    are_known = not has_photos and set(folders) <= set(classes)
    if has_photos and (name := path.absolute().name) in classes:
        return [Detected(source=source, kind="imagefolder", text=f"photos of the class {shown([name])}", is_class=True)]
    if not folders:
        return [flat] if has_photos else []
    if not has_photos and not are_known and all(map(split_of_folder, folders)):
        return [_splits(path, folders)]
    if len(folders) == 1 and not has_photos and not are_known:
        inside = [name for name in folders_of(path / folders[0]) if holds_photos(path / folders[0] / name)]
        text = f"photos without classes, in the folder {shown(folders)}"
        found = [Detected(source=source, kind="photos", text=text)]
        if inside:
            return [*found, Detected(source=source, kind="imagefolder", text=f"one class {shown(folders)}")]
        if not classes or folders[0].lower() in _PHOTO_FOLDERS:
            return found
    by_class = Detected(source=source, kind="imagefolder", text=f"class folders: {shown(folders)}")
    # Photos beside folders may be what the folders are about, or left over; folders of photos and of their masks are
    # no classes.
    lower = {name.lower() for name in folders}
    has_masks = not _MASK_FOLDERS.isdisjoint(lower) and not _PHOTO_FOLDERS.isdisjoint(lower)
    return [by_class, flat] if has_photos or has_masks else [by_class]


def _splits(path: Path, folders: Sequence[str]) -> Detected:
    """A directory whose folders are called train, val, test."""
    inside = {name: [one for one in folders_of(path / name) if holds_photos(path / name / one)] for name in folders}
    with_classes = [name for name in folders if inside[name]]
    if with_classes and len(with_classes) < len(folders):
        odd = next(name for name in folders if not inside[name])
        raise DataError(
            f"'{path}' holds splits: '{with_classes[0]}' has folders of classes, and '{odd}' has photos without them; "
            f"make them apart: SOURCE is then '{path / with_classes[0]}'"
        )
    splits = tuple(folders)
    if not with_classes:
        text = f"photos without classes{_with_splits(splits)}"
        return Detected(source=str(path), kind="photos", text=text, splits=splits)
    classes = sorted({name for names in inside.values() for name in names})
    text = f"class folders: {shown(classes)}{_with_splits(splits)}"
    return Detected(source=str(path), kind="imagefolder", text=text, splits=splits)


def _with_splits(splits: Sequence[str]) -> str:
    return f", splits {shown(splits)}" if splits else ""
