"""Find the photos of a directory: with one folder for each class, or without classes."""

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from dali_pipes.errors import DataError, StoreError, shown
from dali_pipes.formats.photo_header import is_photo
from dali_pipes.progress import bar
from prep.sources.record import (
    OTHER_PICTURES,
    Record,
    Source,
    photo_component,
    require_directory,
    without_empty_classes,
)


@dataclass
class _Found:
    """What is collected for a `Source`; see there."""

    records: list[Record] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    doubtful: dict[int, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    noted: list[str] = field(default_factory=list)

    def leave_out(self, path: Path) -> None:
        """Name a file that is in no class, or is no photo by its extension."""
        extension = path.suffix.lower()
        if is_photo(path.name):
            self.skipped.append(f"{path}: it is in no class's folder")
        elif extension[1:] in OTHER_PICTURES:
            self.skipped.append(f"{path}: {extension}: a picture that no loader reads")
        else:
            self.others.append(f"{path}: {extension or 'no extension'}: not a photo by its extension")

    def source(self, name: str, directory: Path, folders: Sequence[str]) -> Source:
        if not self.records:
            problems = [*self.broken, *self.skipped, *self.noted, *self.others]
            raise DataError(f"'{directory}' holds no photo: {shown(problems, are_names=False) or 'no file'}")
        source = Source(
            name=f"{name} '{directory}'",
            records=self.records,
            classes=dict(enumerate(folders)),
            numbers_classes=True,
            skipped=self.skipped,
            others=self.others,
            doubtful=self.doubtful,
            broken=self.broken,
            noted=self.noted,
        )
        return without_empty_classes(source, range(len(self.records)))


def imagefolder(directory: Path, *, splits: Sequence[str] = (), only: str = "", show_progress: bool = False) -> Source:
    """The records of a directory with one folder for each class, sorted by class and name.

    Class ids number the sorted folders that have photos from 0; an empty one is noted. ``cats/a/001.JPG`` becomes the
    key ``cats/a/001`` with the component ``jpg``; a file named ``.jpeg`` or ``.jpe`` has this component, too. A dot in
    a photo's name is a dash in its key, and noted: WebDataset cuts keys at a dot. Files that start with a dot are
    ignored; files that are not photos are skipped and named. Photos that would have one key are bad: ``a.jpg`` and
    ``a.gif`` are one doubtful record, ``a.jpg`` and ``a.JPG`` are broken. With ``show_progress`` a bar counts classes,
    if finding the photos takes more than a second.

    Args:
        directory: The directory.
        splits: Folders of ``directory`` that have the folders of classes, such as ``train`` and ``val``: keys begin
            with their names, and a class has the same id in all of them. By default ``directory`` itself has them.
        only: The one class whose photos are taken; what lies beside its folder is ignored.
        show_progress: Draw a bar.

    Raises:
        StoreError: If a folder cannot be read.
        DataError: If there is no such directory, class or photo; or if a link leads to a folder that is found under
            another path as well, since its photos would be packed again, or without end.
    """
    require_directory(directory)
    roots = [directory / split for split in splits] or [directory]
    folders = [only] if only else sorted({name for root in roots for name in folders_of(root)})
    if not folders:
        raise DataError(f"'{directory}' holds no folder; expected one for each class: {directory}/cat/001.jpg")
    found = _Found()
    seen = {_identity(directory): directory}
    for root in () if only else roots:
        for path in _files_of(root):
            found.leave_out(path.relative_to(directory))
    places = [(root, label, folder) for root in roots for label, folder in enumerate(folders)]
    with bar(what="find", total=len(places), unit="classes", shown=show_progress, delay_s=1) as drawn:
        for root, label, folder in places:
            before = len(found.records)
            if (root / folder).is_dir():
                _add(found, directory, sorted(_walk(root / folder, seen)), label)
            if len(found.records) == before:
                # A split may lack a class of another one: then no record is left out.
                lines = found.noted if (root / folder).is_dir() else found.others
                lines.append(f"{(root / folder).relative_to(directory)}: no photo in this class")
            drawn.update(1)
    return found.source("imagefolder", directory, folders)


def photo_folder(directory: Path) -> Source:
    """The photos of a directory and of all folders below it, sorted by path, without classes.

    Keys, components and errors are as those of `imagefolder`.
    """
    require_directory(directory)
    found = _Found()
    _add(found, directory, sorted(_walk(directory, {})), None)
    return found.source("photos", directory, ())


def folders_of(directory: Path) -> list[str]:
    """The names of a directory's folders, sorted; not those that start with a dot."""
    with _reading(directory), os.scandir(directory) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def holds_photos(directory: Path) -> bool:
    """Whether there is a photo in a directory, or in a folder below it."""
    return any(is_photo(path.name) for path in _walk(directory, {}))


def _add(found: _Found, directory: Path, paths: Sequence[Path], label: int | None) -> None:
    """Add the photos among the sorted files of a class, and name the other files."""
    photos = [path for path in paths if is_photo(path.name)]
    for path in paths:
        if not is_photo(path.name):
            found.leave_out(path.relative_to(directory))
    keyed = sorted(((_key(path.relative_to(directory)), path) for path in photos), key=lambda pair: pair[0])
    for key, group in itertools.groupby(keyed, key=lambda pair: pair[0]):
        _add_record(found, key, [path for _, path in group], directory, label)


def _add_record(found: _Found, key: str, paths: Sequence[Path], directory: Path, label: int | None) -> None:
    """Add the photos that have one key: mostly a single one."""
    components: dict[str, object] = {}
    for path in paths:
        earlier = components.setdefault(photo_component(path.suffix[1:]), path)
        if earlier is not path:
            found.broken.append(
                f"{key}: '{earlier}' and '{path}' would be one component of one key, expected one photo a key; "
                "rename one"
            )
            return
        if path.stem != Path(key).name:
            found.noted.append(f"{key}: '{path.relative_to(directory)}' has a dot in its name, where a key would end")
    if len(paths) > 1:
        names = [str(path.relative_to(directory)) for path in paths]
        found.doubtful[len(found.records)] = (
            f"{key}: {len(names)} photos have this key, expected one: {shown(names)}; rename one"
        )
    found.records.append(Record(key=key, components=components, label=label))


def _key(path: Path) -> str:
    return path.with_name(path.stem.replace(".", "-")).as_posix()


def _files_of(directory: Path) -> Iterable[Path]:
    with _reading(directory), os.scandir(directory) as entries:
        return sorted(Path(entry) for entry in entries if not entry.is_dir() and not entry.name.startswith("."))


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


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        _refuse(exc)


def _refuse(exc: OSError) -> NoReturn:
    raise StoreError(f"cannot read the folder '{exc.filename}': {exc.strerror or exc}") from exc


def _identity(folder: Path) -> tuple[int, int]:
    with _reading(folder):
        found = folder.stat()
    return found.st_dev, found.st_ino
