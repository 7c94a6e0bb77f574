"""Find out what a source is: class folders, the pets layout, COCO's, YOLO's, VOC's, photos, a table, tars, Parquet.

Nothing is read but names, the columns of tables, the beginning of files that may be COCO's, and the first photo in each
folder.
"""

import itertools
import os
import shlex
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from dali_pipes.data_set.named import list_shards
from dali_pipes.errors import DataError, PipesError, printable, shown
from dali_pipes.formats.photo_header import is_photo
from dali_pipes.store.shard_names import extension_of
from dali_pipes.store.urls import is_remote
from prep.sources import Kind
from prep.sources.coco import coco, coco_files
from prep.sources.folders import folders_of, holds_photos, imagefolder, pets, pets_root, photo_folder
from prep.sources.hf import find_parquet, hf, is_split, read_schema, split_of_file
from prep.sources.record import Source
from prep.sources.tables import PATH_COLUMNS, TABLE_SUFFIXES, Fields, column_names, find_known, table
from prep.sources.tars import tars
from prep.sources.voc import voc, voc_folders, voc_splits
from prep.sources.yolo import yolo, yolo_folders

_PHOTO_FOLDERS = frozenset({"image", "images", "img", "imgs", "photos", "jpegimages"})
_MASK_FOLDERS = frozenset(
    {"mask", "masks", "annotation", "annotations", "label", "labels", "trimaps", "segmentation", "segmentationclass"}
)


@dataclass(frozen=True)
class Detected:
    """What a source is."""

    source: str
    kind: Kind
    text: str
    """The kind of source in words: ``class folders: 'cat', 'dog', 'owl'``."""
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
        """The records, by the source's own function; ``endpoint`` is for tars in a bucket.

        Raises:
            ValueError: If ``fields`` are given for another kind of source than a table or Parquet files.
            PipesError: See the source's own function.
        """
        fields = fields or Fields()
        path = Path(self.source)
        if self.kind == "table":
            return table(path, fields)
        if self.kind == "hf":
            return hf(find_parquet([path]), fields, jobs=jobs, show_progress=show_progress)
        if fields != Fields():
            raise ValueError(
                f"'{self.source}' is {self.text}; --component, --value, --label, --unlabelled, --key, --mask and "
                "--root are for tables and Parquet files"
            )
        if self.is_class:
            return imagefolder(path.absolute().parent, only=path.absolute().name, show_progress=show_progress)
        if self.kind == "imagefolder":
            return imagefolder(path, splits=self.splits, show_progress=show_progress)
        if self.kind == "photos":
            return photo_folder(path)
        if self.kind == "pets":
            return pets(path)
        if self.kind == "coco":
            return coco(path)
        if self.kind == "yolo":
            return yolo(path)
        if self.kind == "voc":
            return voc(path)
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
        candidates = [_by_name(source)]
    else:
        candidates = _in_directory(path, classes) if path.is_dir() else _file(path)
    if kind == "photos" and path.is_dir() and not any(one.kind == kind for one in candidates) and holds_photos(path):
        candidates.append(Detected(source, kind, "photos without classes"))
    if not candidates:
        raise DataError(
            f"'{source}' is no source that is known: looked for class folders (cat/1.jpg), photos, the pets layout "
            "(images, annotations/list.txt), COCO's (annotations/instances_*.json), YOLO's (images, labels), VOC's "
            "(JPEGImages, Annotations), a table of paths (.csv, .tsv, .json, .jsonl, .ndjson or .parquet), Hugging "
            f"Face's Parquet files, and tars{_found_in(path)}"
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


def _found_in(path: Path) -> str:
    """What lies in a directory without photos."""
    files = (entry for entry in path.rglob("*") if entry.is_file()) if path.is_dir() else ()
    kinds = Counter(entry.suffix.lower() or entry.name for entry in itertools.islice(files, 10_000))
    most = ", ".join(f"{number} x {printable(kind)}" for kind, number in kinds.most_common(3))
    return f"; found {most or 'nothing'}; photos only: no video, audio or text" if path.is_dir() else ""


def _by_name(source: str) -> Detected:
    """Tars by a URL, a prefix, a glob or braces."""
    parent, _, prefix = source.rpartition("/")
    folder = Path(parent or ("/" if source.startswith("/") else "."))
    is_named = is_remote(source) or "://" in source or extension_of(source) or any(mark in source for mark in "*?[{")
    beside = folder.iterdir() if not is_named and prefix and folder.is_dir() else ()
    if is_named or any(path.name.startswith(prefix) and extension_of(path.name) for path in beside):
        return Detected(source, "tars", "tars")
    raise DataError(f"no such file or directory: '{source}'")


def _file(path: Path) -> list[Detected]:
    if extension_of(path.name):
        return [Detected(str(path), "tars", "tars")]
    if path.suffix.lower() not in TABLE_SUFFIXES:
        return []
    if _is_hf(path):
        return [Detected(str(path), "hf", "a Parquet file with photos in it")]
    return [_table(path, column_names(path))]


def _is_hf(path: Path) -> bool:
    return path.suffix.lower() == ".parquet" and bool(read_schema(path).photos)


def _table(path: Path, names: Sequence[str]) -> Detected:
    text = f"the table '{printable(path.name)}' with the columns {', '.join(map(printable, names))}"
    return Detected(str(path), "table", text)


def _in_directory(path: Path, classes: Collection[str]) -> list[Detected]:
    """All that a directory may be."""
    root = pets_root(path)
    if (root / "images").is_dir() and (root / "annotations" / "list.txt").is_file():
        return [Detected(str(path), "pets", "the layout of Oxford-IIIT Pet")]
    if files := coco_files(path):
        splits = tuple(files) if len(files) > 1 else ()
        return [_split(path, "coco", f"photos with boxes, by {shown([one.name for one in files.values()])}", splits)]
    if folders := yolo_folders(path):
        splits = tuple(folders) if len(folders) > 1 else ()
        return [_split(path, "yolo", "photos with boxes in YOLO's text files", splits)]
    if voc_folders(path):
        return [_split(path, "voc", "photos with boxes in Pascal VOC's XML files", voc_splits(path))]
    names = sorted(entry.name for entry in os.scandir(path) if entry.is_file() and not entry.name.startswith("."))
    found = _parquet(path)
    if any(map(extension_of, names)):
        found.append(Detected(str(path), "tars", "tars"))
    for file in (path / name for name in names):
        try:
            columns = column_names(file) if file.suffix.lower() in TABLE_SUFFIXES else []
        except PipesError:
            continue  # a .json of another kind
        if find_known(columns, PATH_COLUMNS) is not None and not _is_hf(file):
            found.append(_table(file, columns))
    return found + _photos(path, names, classes)


def _parquet(path: Path) -> list[Detected]:
    files = sorted(entry for entry in path.rglob("*.parquet") if entry.is_file())
    if not files or not _is_hf(files[0]):
        return []
    splits = sorted({split_of_file(file) for file in files})
    if len(splits) > 1 and "" in splits:
        odd = next(file for file in files if not split_of_file(file))
        raise DataError(
            f"'{path}' holds Parquet files of the splits {shown(splits[1:])}, and '{odd}', whose name says none; make "
            "each from a folder of its own"
        )
    return [_split(path, "hf", "Parquet files with photos in them", splits if len(splits) > 1 else ())]


def _photos(path: Path, names: Sequence[str], classes: Collection[str]) -> list[Detected]:
    """Class folders, or photos without classes."""
    source = str(path)
    has_photos = any(is_photo(name) for name in names if "." in name)
    folders = [name for name in folders_of(path) if holds_photos(path / name)]
    flat = Detected(source, "photos", "photos without classes")
    are_known = not has_photos and set(folders) <= set(classes)
    if has_photos and (name := path.absolute().name) in classes:
        return [Detected(source, "imagefolder", f"photos of the class {shown([name])}", is_class=True)]
    if not folders:
        return [flat] if has_photos else []
    if not has_photos and not are_known and all(map(is_split, folders)):
        return [_splits(path, folders)]
    if len(folders) == 1 and not has_photos and not are_known:
        found = [Detected(source, "photos", f"photos without classes, in the folder {shown(folders)}")]
        if _classes_in(path / folders[0]):
            return [*found, Detected(source, "imagefolder", f"one class {shown(folders)}")]
        if not classes or folders[0].lower() in _PHOTO_FOLDERS:
            return found
    by_class = Detected(source, "imagefolder", f"class folders: {shown(folders)}")
    # Photos beside folders may be what the folders are about, or left over; folders of photos and of their masks are
    # no classes.
    lower = {name.lower() for name in folders}
    has_masks = not _MASK_FOLDERS.isdisjoint(lower) and not _PHOTO_FOLDERS.isdisjoint(lower)
    return [by_class, flat] if has_photos or has_masks else [by_class]


def _splits(path: Path, folders: Sequence[str]) -> Detected:
    """A directory whose folders are called train, val, test."""
    inside = {name: _classes_in(path / name) for name in folders}
    with_classes = [name for name in folders if inside[name]]
    if not with_classes:
        return _split(path, "photos", "photos without classes", folders)
    if odd := next((name for name in folders if not inside[name]), None):
        raise DataError(
            f"'{path}' holds splits: '{with_classes[0]}' has folders of classes, and '{odd}' has photos without them; "
            f"make them apart: SOURCE is then '{path / with_classes[0]}'"
        )
    classes = sorted({name for names in inside.values() for name in names})
    return _split(path, "imagefolder", f"class folders: {shown(classes)}", folders)


def _classes_in(folder: Path) -> list[str]:
    return [name for name in folders_of(folder) if holds_photos(folder / name)]


def _split(path: Path, kind: Kind, text: str, splits: Sequence[str]) -> Detected:
    return Detected(str(path), kind, f"{text}, splits {shown(splits)}" if splits else text, tuple(splits))
