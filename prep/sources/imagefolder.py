"""Find the records of a directory with one folder of photos for each class."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from dali_pipes.errors import DataError, StoreError, shown
from dali_pipes.formats.photo_header import is_photo
from dali_pipes.progress import bar
from prep.sources.record import Record, Source, require_directory


def imagefolder(directory: Path, *, show_progress: bool = False) -> Source:
    """The records of a directory with one folder for each class, sorted by class and name.

    Class ids number the sorted folders from 0. ``cats/a/001.JPG`` becomes the key ``cats/a/001`` with the component
    ``jpg``. Files that start with a dot are ignored; files that are not photos are skipped and named. With
    ``show_progress`` a bar counts classes, if finding the photos takes more than a second.

    Raises:
        StoreError: If a folder cannot be read.
        DataError: If there is no such directory, class or photo; if a link leads to a folder that is found under
            another path as well, since its photos would be packed again, or without end; if two photos
            differ only in their extension, since they would be one sample; or if a file's name has a second dot, at
            which WebDataset would cut the key.
    """
    require_directory(directory)
    folders = sorted(entry.name for entry in os.scandir(directory) if entry.is_dir() and not entry.name.startswith("."))
    if not folders:
        raise DataError(f"'{directory}' holds no folder; expected one for each class: {directory}/cat/001.jpg")
    records: list[Record] = []
    skipped: list[str] = []
    seen = {_identity(directory): directory}
    with bar(what="find", total=len(folders), unit="classes", shown=show_progress, delay_s=1) as drawn:
        for label, folder in enumerate(folders):
            paths = sorted(_walk(directory / folder, seen))
            photos = [path for path in paths if is_photo(path.name)]
            others = (path.relative_to(directory) for path in paths if not is_photo(path.name))
            skipped += [f"{path}: not a photo by its extension" for path in others]
            if not photos:
                skipped.append(f"{folder}: no photo in this class")
            records += _class_records(directory, photos, label)
            drawn.update(1)
    if not records:
        raise DataError(f"'{directory}' holds no photo: {shown(skipped, are_names=False)}")
    return Source(name=f"imagefolder '{directory}'", records=records, classes=dict(enumerate(folders)), skipped=skipped)


def _class_records(directory: Path, photos: Iterable[Path], label: int) -> Iterator[Record]:
    earlier: dict[str, Path] = {}
    for path in photos:
        if "." in path.stem:
            raise DataError(
                f"'{path}' has more than one dot in its name; WebDataset cuts the key at the first dot: rename it"
            )
        key = path.relative_to(directory).with_suffix("").as_posix()
        if key in earlier:
            raise DataError(
                f"'{earlier[key]}' and '{path}' differ in their extension only; both would be key '{key}': rename one"
            )
        earlier[key] = path
        yield Record(key=key, components={path.suffix[1:].lower(): path}, label=label)


def _walk(folder: Path, seen: dict[tuple[int, int], Path]) -> Iterator[Path]:
    """All files below ``folder`` without a hidden part in their path; links are followed.

    ``seen`` remembers the folders of all classes: device and inode -> path.
    """
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=_refuse):
        here = Path(parent)
        earlier = seen.setdefault(_identity(here), here)
        if earlier != here:
            raise DataError(
                f"'{here}' and '{earlier}' are the same folder: its photos would be packed again; remove the link"
            )
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (here / name for name in files if not name.startswith("."))


def _refuse(exc: OSError) -> NoReturn:
    raise StoreError(f"cannot read the folder '{exc.filename}': {exc.strerror or exc}") from exc


def _identity(folder: Path) -> tuple[int, int]:
    try:
        found = folder.stat()
    except OSError as exc:
        _refuse(exc)
    return found.st_dev, found.st_ino
