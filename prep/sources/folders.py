"""Find the photos of a directory: one folder for each class, no classes, or the layout of Oxford-IIIT Pet."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from dali_pipes.errors import DataError, PipesError, StoreError, shown
from dali_pipes.formats.photo_header import is_photo
from dali_pipes.progress import bar
from prep.sources.record import Record, Source, photo_component, require_directory, without_empty_classes

_OTHER_PICTURES = frozenset(
    {
        *(".jxl", ".jxr", ".jfif", ".svg", ".psd", ".tga", ".ico", ".exr", ".hdr", ".eps", ".pcx"),
        *(".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf", ".pef", ".srw"),  # cameras' raw files
    }
)
"""Extensions of pictures that are no photo component, because no decoder here reads them."""

_LABEL_FILES = (".txt", ".xml", ".json", ".jsonl", ".csv", ".tsv", ".parquet")
"""Extensions of files that may hold labels of the photos beside them: YOLO's, Pascal VOC's, tables."""

PHOTO = "image.jpg"
MASK = "trimap.png"
"""The components of Oxford-IIIT Pet."""
# Species and breed are not used.
_ROW = re.compile(r"\s*(?P<name>\S+)\s+(?P<label>[0-9]{1,9})(?:\s|$)")
# A photo's name is its breed and a number.
_NUMBER = re.compile(r"(?<=.)_\d+$")


def imagefolder(directory: Path, *, splits: Sequence[str] = (), only: str = "", show_progress: bool = False) -> Source:
    """The records of a directory with one folder for each class, sorted by class and name.

    Class ids number the sorted folders that have photos from 0; an empty one is noted. ``cats/a/001.JPG`` becomes the
    key ``cats/a/001`` with the component ``jpg``; a file named ``.jpeg`` or ``.jpe`` has this component, too. A dot in
    a photo's name is a dash in its key, and noted: WebDataset cuts keys at a dot. Files that start with a dot are
    ignored; files that are not photos are skipped and named. Photos that would have one key are bad: ``a.jpg`` and
    ``a.gif`` are one doubtful record, ``a.jpg`` and ``a.JPG`` are broken.

    Args:
        directory: The directory.
        splits: Folders of ``directory`` that have the folders of classes, such as ``train`` and ``val``: keys begin
            with their names, and a class has the same id in all of them. By default ``directory`` itself has them.
        only: The one class whose photos are taken; what lies beside its folder is ignored.
        show_progress: Draw a bar that counts classes, if finding the photos takes more than a second.

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
    found = _Found(f"imagefolder '{directory}'", directory, folders)
    for root in () if only else roots:
        for entry in _entries(root):
            if not _is_folder(entry):
                found.leave_out(Path(entry))
    places = [(root / folder, label) for root in roots for label, folder in enumerate(folders)]
    with bar(what="find", total=len(places), unit="classes", shown=show_progress, delay_s=1) as drawn:
        for folder, label in places:
            if folder.is_dir() and not found.add(folder, label):
                found.source.noted.append(f"{folder.relative_to(directory)}: no photo in this class")
            drawn.update(1)
    for root in roots:
        if lacking := [name for name in folders if not (root / name).is_dir()]:
            found.source.noted.append(
                f"{root.name}: no folder of the classes {shown(lacking)}, which other splits have"
            )
    return found.finished()


def photo_folder(directory: Path) -> Source:
    """The photos of a directory and of all folders below it, sorted by path, without classes.

    Keys, components and errors are as those of `imagefolder`.
    """
    require_directory(directory)
    found = _Found(f"photos '{directory}'", directory, ())
    found.add(directory, None)
    return found.finished()


def folders_of(directory: Path) -> list[str]:
    """The names of a directory's folders, sorted; not those that start with a dot."""
    return [entry.name for entry in _entries(directory) if _is_folder(entry)]


def holds_photos(directory: Path) -> bool:
    """Whether there is a photo in a directory, or in a folder below it."""
    return any(is_photo(path.name) and path.name[0] != "." for path in _walk(directory, {}))


class _Found:
    """A source whose records are being found, in the folders of classes."""

    def __init__(self, name: str, directory: Path, classes: Sequence[str]) -> None:
        self._records: list[Record] = []
        self._doubtful: dict[int, str] = {}
        self.source = Source(
            name=name,
            records=self._records,
            classes=dict(enumerate(classes)),
            numbers_classes=True,
            doubtful=self._doubtful,
        )
        self._directory = directory
        self._seen: dict[tuple[int, int], Path] = {}

    def leave_out(self, path: Path) -> None:
        """Name a file that is in no class, or is no photo by its extension."""
        name, extension = path.relative_to(self._directory), path.suffix.lower()
        if is_photo(path.name):
            self.source.skipped.append(f"{name}: it is in no class's folder")
        elif extension in _OTHER_PICTURES:
            self.source.skipped.append(f"{name}: {extension}: a picture that no loader reads")
        else:
            self.source.others.append(f"{name}: {extension or 'no extension'}: not a photo by its extension")

    def add(self, folder: Path, label: int | None) -> bool:
        """Add the photos of a class's folder, and name its other files; whether there is a photo to pack."""
        before = len(self._records)
        keyed: dict[str, list[Path]] = {}  # mostly a key has a single photo
        for path in sorted(_walk(folder, self._seen)):
            if path.name[0] == ".":
                # Of macOS's archives, a file ._1.jpg beside each 1.jpg is no photo.
                if is_photo(path.name) and path.name[:2] != "._":
                    self.source.others.append(f"{path.relative_to(self._directory)}: hidden, begins with a dot")
                continue
            if not is_photo(path.name):
                self.leave_out(path)
                continue
            name = path.relative_to(self._directory)
            keyed.setdefault(name.with_name(name.stem.replace(".", "-")).as_posix(), []).append(path)
        for key, paths in sorted(keyed.items()):
            components = {photo_component(path.suffix[1:]): path for path in paths}
            names = shown([str(path.relative_to(self._directory)) for path in paths])
            if len(components) < len(paths):
                self.source.broken.append(f"{key}: {names} would be one component of one key; rename all but one")
                continue
            if len(paths) > 1:
                self._doubtful[len(self._records)] = (
                    f"{key}: {len(paths)} photos have this key, expected one: {names}; rename one"
                )
            self._records.append(Record(key=key, components=components, label=label))
        return len(self._records) > before

    def finished(self) -> Source:
        source = self.source
        if not self._records:
            problems = [*source.broken, *source.skipped, *source.noted, *source.others]
            raise DataError(f"'{self._directory}' holds no photo: {shown(problems, are_names=False) or 'no file'}")
        paths = (path for record in self._records for path in record.components.values() if isinstance(path, Path))
        if dotted := [str(path.relative_to(self._directory)) for path in paths if "." in path.stem]:
            source.noted.append(f"a dot in a photo's name is a dash in its key: {shown(dotted)}")
        names = [line.partition(":")[0] for line in source.others]
        labels = [name for name in names if Path(name).suffix.lower() in _LABEL_FILES]
        if labels and not source.classes:
            source.noted.append(
                f"not used, although they may hold labels: {shown(labels)}; labels are read from folders of classes, "
                "the layouts of COCO, YOLO and VOC, and tables (prep pack table)"
            )
        return without_empty_classes(source, range(len(self._records)))


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _walk(folder: Path, seen: dict[tuple[int, int], Path]) -> Iterator[Path]:
    """All files below ``folder``, not below hidden folders; links are followed.

    ``seen`` remembers the folders of all classes: device and inode -> path.
    """
    found = folder.stat()
    earlier = seen.setdefault((found.st_dev, found.st_ino), folder)
    if earlier != folder:
        raise DataError(
            f"'{folder}' and '{earlier}' are the same folder: its photos would be packed again; remove the link"
        )
    for entry in _entries(folder, hidden=True):
        if not _is_folder(entry):
            yield Path(entry)
        elif entry.name[0] != ".":
            yield from _walk(Path(entry), seen)


def _entries(folder: Path, *, hidden: bool = False) -> "list[os.DirEntry[str]]":
    """List a folder's entries, sorted by name; ``hidden``: also those whose names begin with a dot."""
    try:
        with os.scandir(folder) as entries:
            return sorted((entry for entry in entries if hidden or entry.name[0] != "."), key=lambda entry: entry.name)
    except OSError as exc:
        raise StoreError(f"cannot read the folder '{folder}': {exc.strerror or exc}") from exc


# Oxford-IIIT Pet


def pets(directory: Path) -> Source:
    """The records of a directory laid out as the Oxford-IIIT Pet data set, in the order of its ``list.txt``.

    ``directory`` holds ``images`` and ``annotations``, itself or in the folder ``oxford-iiit-pet`` that torchvision
    makes. The function reads ``images/*.jpg``, ``annotations/trimaps/*.png`` and ``annotations/list.txt``, with rows
    ``NAME CLASS-ID SPECIES BREED-ID``; a photo may also be a .heic, .heif or .avif, to be converted. A sample is
    ``{"__key__": NAME, "image.jpg", "cls", "trimap.png"}``; class ids are Oxford's, from 1. The files' names give the
    breeds: ``Abyssinian_34`` is an Abyssinian. A record with a missing part is skipped.

    Raises:
        DataError: If a directory or file of this layout is missing or empty, or a row has another form.
    """
    root = pets_root(directory)
    photos = _files(root / "images", ".avif", ".heif", ".heic", ".jpg")
    trimaps = _files(root / "annotations" / "trimaps", ".png")
    table = root / "annotations" / "list.txt"
    rows = _read_rows(table)
    if not photos:
        raise DataError(f"'{root / 'images'}' holds no .jpg; expected the photos of the Oxford-IIIT Pet data set")
    records: list[Record] = []
    skipped: list[str] = []
    classes: dict[int, str] = {}
    for name, label in rows.items():
        missing = [what for what, found in (("photo", photos), ("trimap", trimaps)) if name not in found]
        if missing:
            skipped.append(f"{name}: no {' and no '.join(missing)}")
        else:
            # A photo that is yet to be converted is `image.heic` or the like.
            photo = f"image{photos[name].suffix.lower()}"
            records.append(Record(key=name, components={photo: photos[name], MASK: trimaps[name]}, label=label))
        breed = _NUMBER.sub("", name)
        if classes.setdefault(label, breed) != breed:
            raise DataError(f"'{table}' gives class id {label} to '{classes[label]}' and to '{breed}' ('{name}')")
    skipped += [f"{name}: no row in list.txt" for name in sorted(photos) if name not in rows]
    if not records:
        raise DataError(f"'{root}' holds no complete record: {shown(skipped, are_names=False)}")
    return Source(
        name=f"pets '{directory}'",
        records=records,
        classes=dict(sorted(classes.items())),
        skipped=skipped,
        masks=frozenset({MASK}),
    )


def pets_root(directory: Path) -> Path:
    """The directory that holds ``images`` and ``annotations``: the folder that torchvision makes, or ``directory``."""
    below = directory / "oxford-iiit-pet"
    return below if below.is_dir() else directory


def download_pets(directory: Path) -> None:
    """Download the Oxford-IIIT Pet data set (800 MB) into ``directory`` by torchvision, unless it is there."""
    try:
        from torchvision.datasets import OxfordIIITPet
    except ImportError as exc:
        raise PipesError("--download needs torchvision; install it: pip install 'dali-pipes[bench]'") from exc
    try:
        directory.mkdir(parents=True, exist_ok=True)
        OxfordIIITPet(directory, download=True)
    except (OSError, RuntimeError) as exc:
        raise PipesError(f"cannot download the Oxford-IIIT Pet data set into '{directory}': {exc}") from exc


def _read_rows(path: Path) -> dict[str, int]:
    """Name -> class id, in the file's order."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise DataError(f"cannot read '{path}', which names the records: {exc}") from exc
    rows: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        found = _ROW.match(line)
        if found is None:
            raise DataError(f"'{path}', line {number}: expected 'NAME CLASS-ID SPECIES BREED-ID', found '{line}'")
        if found["name"] in rows:
            raise DataError(f"'{path}', line {number}: '{found['name']}' has a row already; one row a photo")
        rows[found["name"]] = int(found["label"])
    return rows


def _files(directory: Path, *extensions: str) -> dict[str, Path]:
    """The files with one of the extensions, by name; of two that differ in it only, the one with the later."""
    require_directory(directory)
    found = [path for path in directory.iterdir() if not path.name.startswith(".") and path.is_file()]
    return {path.stem: path for extension in extensions for path in found if path.suffix.lower() == extension}
