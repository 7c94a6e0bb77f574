"""Find out what a source is: class folders, the pets layout, photos, a table, tars, Parquet files.

Nothing is read but names, the columns of tables, and the first photo in each folder.
"""

import os
import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from dali_pipes.errors import DataError, PipesError, printable, shown
from dali_pipes.formats.photo_header import is_photo
from dali_pipes.store.shard_names import extension_of
from dali_pipes.store.urls import is_remote
from prep.sources import Kind
from prep.sources.hf import read_schema, split_of_file, split_of_folder
from prep.sources.imagefolder import folders_of, holds_photos
from prep.sources.record import Source, find_known
from prep.sources.table_files import TABLE_SUFFIXES, column_names
from prep.sources.tables import PATH_COLUMNS

_LOOKED_FOR = (
    "class folders (cat/1.jpg), photos, the pets layout (images, annotations/list.txt), a table (.csv, .tsv, .json, "
    ".jsonl, .ndjson or .parquet, with paths), Hugging Face's Parquet files, tars"
)

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
    """What was found, in words: ``class folders: 3 classes ('cat', 'dog', 'owl')``."""
    files: tuple[Path, ...] = ()
    """The files of the source, for kinds that take files."""
    splits: tuple[str, ...] = ()
    """The splits that the source has: folders, or names of files."""
    is_class: bool = False
    """Whether the source is the folder of one class."""

    def open(
        self,
        *,
        endpoint: str | None = None,
        fields: Mapping[str, Any] | None = None,
        jobs: int | None = None,
        show_progress: bool = False,
    ) -> Source:
        """The records.

        Args:
            endpoint: AIStore's proxy, for tars in a bucket.
            fields: Arguments of the source's own function that name columns: ``components``, ``values``,
                ``label``, ``has_labels``, ``key``, ``masks``, ``root``. Those that are ``None`` or empty count as not
                given.
            jobs: The number of processes.
            show_progress: Draw bars.

        Raises:
            ValueError: If this kind of source does not take one of the ``fields``.
            PipesError: See the source's own function.
        """
        given = {name: value for name, value in (fields or {}).items() if value is not None and value != {}}
        if odd := sorted(set(given) - _FIELDS[self.kind]):
            raise ValueError(
                f"'{self.source}' is {self.text}; {', '.join(_OPTIONS[name] for name in odd)} "
                f"{'does' if len(odd) == 1 else 'do'} not go with {self.kind}"
            )
        shared: dict[str, Any] = {"jobs": jobs, "show_progress": show_progress}
        directory = Path(self.source)
        if self.kind == "imagefolder":
            from prep.sources.imagefolder import imagefolder

            if self.is_class:
                folder = directory.absolute()
                return imagefolder(folder.parent, only=folder.name, show_progress=show_progress)
            return imagefolder(directory, splits=self.splits, show_progress=show_progress)
        if self.kind == "photos":
            from prep.sources.imagefolder import photo_folder

            return photo_folder(directory)
        if self.kind == "pets":
            from prep.sources.pets import pets

            return pets(directory)
        if self.kind == "table":
            from prep.sources.tables import table

            return table(self.files[0], **{"has_labels": None, **given})
        if self.kind == "hf":
            from prep.sources.hf import hf

            return hf(self.files, with_splits=bool(self.splits), **shared, **given)
        from dali_pipes.data_set.named import list_shards
        from prep.sources.tars import tars

        return tars(list_shards(self.source, endpoint=endpoint, compressed=True), **shared)


_COLUMNS = frozenset({"components", "values", "label", "has_labels", "key"})
_FIELDS: dict[str, frozenset[str]] = {
    **dict.fromkeys(get_args(Kind), frozenset()),
    "table": _COLUMNS | {"masks", "root"},
    "hf": _COLUMNS | {"masks"},
}
_OPTIONS = {
    "components": "--component",
    "values": "--value",
    "label": "--label",
    "has_labels": "--unlabelled",
    "key": "--key",
    "masks": "--mask",
    "root": "--root",
}


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
    found = [one for one in candidates if kind is None or one.kind == kind]
    if len(found) == 1:
        return found[0]
    here = "; ".join(f"{one.text} (--kind {one.kind})" for one in candidates)
    if not candidates:
        raise DataError(f"'{source}' is no source that is known: looked for {_LOOKED_FOR}; found {_inventory(path)}")
    if not found:
        raise DataError(f"'{source}' is no {kind}: found {here}")
    raise DataError(
        f"'{source}' may be several things: {here}; say which with --kind; each kind has a command of its own, too: "
        + ", ".join(f"dali-pipes prep pack {one.kind} {shlex.quote(one.source)} URL" for one in found)
    )


def _by_name(source: str) -> list[Detected]:
    """A URL, or a path that is none: tars by a prefix, a glob or braces."""
    if is_remote(source) or "://" in source or extension_of(source) or any(mark in source for mark in "*?[{"):
        return [Detected(source=source, kind="tars", text="tars")]
    folder, _, prefix = source.rpartition("/")
    parent = Path(folder or ("/" if source.startswith("/") else "."))
    if prefix and parent.is_dir() and _has_tars(parent, prefix):
        return [Detected(source=source, kind="tars", text="tars")]
    raise DataError(f"no such file or directory: '{source}'")


def _has_tars(folder: Path, prefix: str) -> bool:
    return any(extension_of(path.name) for path in folder.iterdir() if path.name.startswith(prefix))


def _file(path: Path) -> list[Detected]:
    if extension_of(path.name):
        return [Detected(source=str(path), kind="tars", text="a tar", files=(path,))]
    if path.suffix.lower() == ".parquet" and read_schema(path).photos:
        return [Detected(source=str(path), kind="hf", text="a Parquet file with photos in it", files=(path,))]
    if path.suffix.lower() in TABLE_SUFFIXES:
        text = f"a table with the columns {', '.join(map(printable, column_names(path)))}"
        return [Detected(source=str(path), kind="table", text=text, files=(path,))]
    return []


def _in_directory(path: Path, classes: Collection[str]) -> list[Detected]:
    """All that a directory may be."""
    if pets := _pets(path):
        return [pets]
    names = [entry.name for entry in os.scandir(path) if entry.is_file() and not entry.name.startswith(".")]
    tables = [one for name in sorted(names) for one in _tables(path / name)]
    num_tars = sum(bool(extension_of(name)) for name in names)
    tars = [Detected(source=str(path), kind="tars", text=_counted(num_tars, "tar"))] if num_tars else []
    return [*_parquet(path), *tars, *tables, *_photos(path, names, classes)]


def _pets(path: Path) -> Detected | None:
    root = path / "oxford-iiit-pet" if (path / "oxford-iiit-pet").is_dir() else path
    if (root / "images").is_dir() and (root / "annotations" / "list.txt").is_file():
        return Detected(source=str(path), kind="pets", text="the layout of Oxford-IIIT Pet")
    return None


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
    text = f"{_counted(len(files), 'Parquet file')} with photos in {'it' if len(files) == 1 else 'them'}"
    text += f", splits {shown(splits)}" if splits else ""
    return [Detected(source=str(path), kind="hf", text=text, files=tuple(files), splits=splits)]


def _tables(path: Path) -> list[Detected]:
    """The file, if it is a table with a column of paths."""
    if path.suffix.lower() not in TABLE_SUFFIXES:
        return []
    try:
        names = column_names(path)
    except PipesError:
        return []  # a .json of another kind
    if find_known(names, PATH_COLUMNS) is None or (path.suffix.lower() == ".parquet" and read_schema(path).photos):
        return []
    text = f"the table '{printable(path.name)}' with the columns {', '.join(map(printable, names))}"
    return [Detected(source=str(path), kind="table", text=text, files=(path,))]


def _photos(path: Path, names: Sequence[str], classes: Collection[str]) -> list[Detected]:
    """Class folders, or photos without classes."""
    source = str(path)
    here = sum(map(is_photo, (name for name in names if "." in name)))
    folders = [name for name in folders_of(path) if holds_photos(path / name)]
    flat = Detected(source=source, kind="photos", text="photos without classes")
    are_known = not here and set(folders) <= set(classes)
    if here and (name := path.absolute().name) in classes:
        text = f"{_counted(here, 'photo')} of the class {shown([name])}"
        return [Detected(source=source, kind="imagefolder", text=text, is_class=True)]
    if here and not folders:
        return [Detected(source=source, kind="photos", text=f"{_counted(here, 'photo')} without classes")]
    if folders and not here and not are_known and all(map(split_of_folder, folders)):
        return [_splits(path, folders)]
    if len(folders) == 1 and not here and not are_known:
        inside = [name for name in folders_of(path / folders[0]) if holds_photos(path / folders[0] / name)]
        text = f"photos without classes, in the folder {shown(folders)}"
        found = [Detected(source=source, kind="photos", text=text)]
        if inside:
            return [*found, Detected(source=source, kind="imagefolder", text=f"one class {shown(folders)}")]
        if not classes or folders[0].lower() in _PHOTO_FOLDERS:
            return found
    if folders:
        text = f"class folders: {_counted(len(folders), 'class', 'classes')} ({shown(folders)})"
        by_class = Detected(source=source, kind="imagefolder", text=text)
        # Photos beside folders may be what the folders are about, or left over; folders of photos and of their masks
        # are no classes.
        lower = {name.lower() for name in folders}
        has_masks = not _MASK_FOLDERS.isdisjoint(lower) and not _PHOTO_FOLDERS.isdisjoint(lower)
        return [by_class, flat] if here or has_masks else [by_class]
    return []


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
        text = f"photos without classes, splits {shown(splits)}"
        return Detected(source=str(path), kind="photos", text=text, splits=splits)
    classes = sorted({name for names in inside.values() for name in names})
    text = f"class folders: {_counted(len(classes), 'class', 'classes')} ({shown(classes)}), splits {shown(splits)}"
    return Detected(source=str(path), kind="imagefolder", text=text, splits=splits)


def _inventory(path: Path) -> str:
    """What a directory has, by extension: ``12 .heic, 1 .txt, 2 folders``."""
    if not path.is_dir():
        return f"a file {path.suffix or 'without an extension'}"
    counts = Counter(
        "folders" if entry.is_dir() else Path(entry.name).suffix.lower() or "without an extension"
        for entry in os.scandir(path)
    )
    return ", ".join(f"{number} {what}" for what, number in counts.most_common(8)) or "nothing"


def _counted(number: int, what: str, several: str = "") -> str:
    return f"{number} {what if number == 1 else several or f'{what}s'}"
