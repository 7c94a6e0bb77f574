"""Find the photos of a directory: with one folder for each class, or without classes."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
    dotted: list[str] = field(default_factory=list)
    """Photos whose names have a dot before the extension."""

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
        if self.dotted:
            self.noted.append(f"a dot in a photo's name is a dash in its key: {shown(self.dotted)}")
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
    seen = {(directory.stat().st_dev, directory.stat().st_ino): directory}
    for root in () if only else roots:
        for entry in _entries(root):
            if not _is_folder(entry):
                found.leave_out(Path(entry).relative_to(directory))
    places = [(root, label, folder) for root in roots for label, folder in enumerate(folders)]
    with bar(what="find", total=len(places), unit="classes", shown=show_progress, delay_s=1) as drawn:
        for root, label, folder in places:
            before = len(found.records)
            if (root / folder).is_dir():
                _add(found, directory, root / folder, seen, label)
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
    _add(found, directory, directory, {}, None)
    return found.source("photos", directory, ())


def folders_of(directory: Path) -> list[str]:
    """The names of a directory's folders, sorted; not those that start with a dot."""
    return [entry.name for entry in _entries(directory) if _is_folder(entry)]


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def holds_photos(directory: Path) -> bool:
    """Whether there is a photo in a directory, or in a folder below it."""
    return any(is_photo(path.name) for path in _walk(directory, {}))


def _add(found: _Found, directory: Path, folder: Path, seen: dict[tuple[int, int], Path], label: int | None) -> None:
    """Add the photos of a class's folder, and name the other files; mostly a key has a single photo."""
    keyed: dict[str, list[Path]] = {}
    for path in sorted(_walk(folder, seen)):
        name = path.relative_to(directory)
        if not is_photo(path.name):
            found.leave_out(name)
            continue
        key = name.with_name(name.stem.replace(".", "-")).as_posix()
        keyed.setdefault(key, []).append(path)
    for key, paths in sorted(keyed.items()):
        components: dict[str, object] = {photo_component(path.suffix[1:]): path for path in paths}
        names = [str(path.relative_to(directory)) for path in paths]
        if len(components) < len(paths):
            found.broken.append(f"{key}: {shown(names)} would be one component of one key; rename all but one")
            continue
        found.dotted += [name for name in names if "." in Path(name).stem]
        if len(paths) > 1:
            found.doubtful[len(found.records)] = (
                f"{key}: {len(names)} photos have this key, expected one: {shown(names)}; rename one"
            )
        found.records.append(Record(key=key, components=components, label=label))


def _walk(folder: Path, seen: dict[tuple[int, int], Path]) -> Iterator[Path]:
    """All files below ``folder`` without a hidden part in their path; links are followed.

    ``seen`` remembers the folders of all classes: device and inode -> path.
    """
    found = folder.stat()
    earlier = seen.setdefault((found.st_dev, found.st_ino), folder)
    if earlier != folder:
        raise DataError(
            f"'{folder}' and '{earlier}' are the same folder: its photos would be packed again; remove the link"
        )
    for entry in _entries(folder):
        if _is_folder(entry):
            yield from _walk(Path(entry), seen)
        else:
            yield Path(entry)


def _entries(folder: Path) -> "list[os.DirEntry[str]]":
    """The entries of a folder that are not hidden, sorted by name."""
    try:
        with os.scandir(folder) as entries:
            return sorted((entry for entry in entries if entry.name[0] != "."), key=lambda entry: entry.name)
    except OSError as exc:
        raise StoreError(f"cannot read the folder '{folder}': {exc.strerror or exc}") from exc
