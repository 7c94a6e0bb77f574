"""Source files to records: what `prep.pack` writes, found and named, but not yet read.

A record is the files of one sample before they are in a shard. Its bytes are read when its turn comes, so a source of
any size costs memory for its names only.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prep.errors import DataError, PipesError, shown
from prep.photos import is_photo
from prep.progress import bar

__all__ = ["LABEL_COMPONENT", "Record", "Source", "download_pets", "imagefolder", "pets"]

# As `prep.manifest` has it, whose numpy and safetensors a worker would import for it alone.
LABEL_COMPONENT = "cls"
PHOTO = "image.jpg"
MASK = "trimap.png"

# What stands before a photo's number in its name.
_BREED = re.compile(r"(?P<breed>.+)_\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One sample to be packed."""

    key: str
    components: Mapping[str, object]
    """component -> its bytes, the file that holds them, a `Range` of one, or a value that is encoded as
    `webdataset.TarWriter` does: a string, what JSON can hold for ``json``, an array for ``npy``."""
    label: int | None
    """The class id as the source counts it; packed as the component ``cls``. ``None``: there is none, or the components
    hold it already."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Records in the order in which they are packed, and what belongs to all of them."""

    name: str
    """Where they come from, for messages."""
    records: Sequence[Record]
    """How many there are is known before one is read: ``len(source.records)``."""
    classes: Mapping[int, str]
    """class id -> name."""
    skipped: Sequence[str] = ()
    """What was left out, one line each: the record's name and why."""
    masks: frozenset[str] = frozenset()
    """The components that hold class ids a pixel, which must be 8-bit grey PNGs of their photo's size."""
    decodes_masks: bool = False
    """Whether each mask is decoded before it is packed, 0.2 ms of CPU; else headers and checksums speak for it."""
    broken: Sequence[str] = ()
    """Records that were found and cannot be packed, one line each: where, and why."""
    reads: frozenset[str] = frozenset()
    """URLs of shards, and absolute paths, that are read while the records are packed: not to be written over."""
    keeps_order: bool = False
    """Whether components stay in the order in which a record has them; otherwise they are sorted, as ``TarWriter``
    does."""


def pets(directory: Path) -> Source:
    """The records of a directory laid out as the Oxford-IIIT Pet data set, in the order of its ``list.txt``.

    Read are ``images/*.jpg``, ``annotations/trimaps/*.png`` and ``annotations/list.txt``, rows ``NAME CLASS-ID SPECIES
    BREED-ID``. A sample is ``{"__key__": NAME, "image.jpg", "cls", "trimap.png"}``; class ids stay Oxford's, from 1.
    Breeds are named by the files: ``Abyssinian_34`` is an Abyssinian. A record with a missing part is skipped.

    Args:
        directory: Holds ``images`` and ``annotations``, itself or in the folder ``oxford-iiit-pet`` that torchvision
            makes.

    Raises:
        DataError: If a directory or file of this layout is not there or empty, or a row is not as described.
    """
    root = directory / "oxford-iiit-pet" if (directory / "oxford-iiit-pet").is_dir() else directory
    _require_directory(root)
    photos = _files(root / "images", ".jpg")
    trimaps = _files(root / "annotations" / "trimaps", ".png")
    rows = _read_pets_rows(root / "annotations" / "list.txt")
    if not photos:
        raise DataError(f"'{root / 'images'}' holds no .jpg; expected the photos of the Oxford-IIIT Pet data set")

    records: list[Record] = []
    skipped: list[str] = []
    for name, label in rows.items():
        missing = [what for what, found in (("photo", photos), ("trimap", trimaps)) if name not in found]
        if missing:
            skipped.append(f"{name}: no {' and no '.join(missing)}")
        else:
            records.append(Record(key=name, components={PHOTO: photos[name], MASK: trimaps[name]}, label=label))
    skipped += [f"{name}: no row in list.txt" for name in sorted(photos) if name not in rows]
    if not records:
        raise DataError(f"'{root}' holds no complete record: {shown(skipped, are_names=False)}")
    return Source(
        name=f"pets '{directory}'",
        records=records,
        classes=_breeds(rows, root / "annotations" / "list.txt"),
        skipped=skipped,
        masks=frozenset({MASK}),
    )


def imagefolder(directory: Path, *, show_progress: bool = False) -> Source:
    """The records of a directory with one folder for each class, sorted by class and name.

    Class ids count the folders in sorted order, from 0. ``cats/a/001.JPG`` becomes the key ``cats/a/001`` with the
    component ``jpg``. Files that start with a dot are passed over, those that are no photos skipped and named.

    Args:
        directory: Holds the folders.
        show_progress: Draw a bar, in classes, where finding the photos takes more than a second.

    Raises:
        DataError: If there is no such directory, class or photo; if two photos differ in their extension only, as
            they would be one sample; or if a file's name holds a second dot, at which WebDataset would cut the key.
    """
    _require_directory(directory)
    folders = sorted(entry.name for entry in os.scandir(directory) if entry.is_dir() and not entry.name.startswith("."))
    if not folders:
        raise DataError(f"'{directory}' holds no folder; expected one for each class: {directory}/cat/001.jpg")
    records: list[Record] = []
    skipped: list[str] = []
    with bar(what="find", total=len(folders), unit="classes", shown=show_progress, delay_s=1) as drawn:
        for label, folder in enumerate(folders):
            paths = _walk(directory / folder)
            skipped += [
                f"{path.relative_to(directory)}: not a photo by its extension" for path in paths if not _named(path)
            ]
            photos = [path for path in paths if _named(path)]
            if not photos:
                skipped.append(f"{folder}: no photo in this class")
            records += _imagefolder_records(directory, photos, label)
            drawn.update(1)
    if not records:
        raise DataError(f"'{directory}' holds no photo: {shown(skipped, are_names=False)}")
    return Source(name=f"imagefolder '{directory}'", records=records, classes=dict(enumerate(folders)), skipped=skipped)


def download_pets(directory: Path) -> None:
    """Download the Oxford-IIIT Pet data set (800 MB) into ``directory`` through torchvision; kept where it is there.

    Raises:
        PipesError: If torchvision is not installed, or the download fails.
    """
    try:
        from torchvision.datasets import OxfordIIITPet
    except ImportError as exc:
        raise PipesError("--download needs torchvision; install it: pip install 'dali-pipes[bench]'") from exc
    try:
        directory.mkdir(parents=True, exist_ok=True)
        OxfordIIITPet(directory, download=True)
    except (OSError, RuntimeError) as exc:
        raise PipesError(f"cannot download the Oxford-IIIT Pet data set into '{directory}': {exc}") from exc


def _read_pets_rows(path: Path) -> dict[str, int]:
    """Name -> class id, in the file's order."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise DataError(f"cannot read '{path}', which names the records: {exc}") from exc
    rows: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        fields = line.split()
        if not fields or line.startswith("#"):
            continue
        where = f"'{path}', line {number}"
        if len(fields) < 2:
            raise DataError(f"{where}: expected 'NAME CLASS-ID SPECIES BREED-ID', found '{line}'")
        name, label = fields[:2]  # the rest, species and breed, is not used
        # ASCII digits only: int() also takes "1_0" and digits of other scripts.
        if not re.fullmatch(r"[0-9]{1,9}", label):
            raise DataError(f"{where}: class id must be an integer, got '{label}' for '{name}'")
        if name in rows:
            raise DataError(f"{where}: '{name}' has a row already; one row a photo")
        rows[name] = int(label)
    if not rows:
        raise DataError(f"'{path}' holds no rows; expected 'NAME CLASS-ID SPECIES BREED-ID' in each line")
    return rows


def _breeds(rows: Mapping[str, int], path: Path) -> dict[int, str]:
    classes: dict[int, str] = {}
    for name, label in rows.items():
        match = _BREED.fullmatch(name)
        breed = match["breed"] if match else name
        if classes.setdefault(label, breed) != breed:
            raise DataError(f"'{path}' gives class id {label} to '{classes[label]}' and to '{breed}' ('{name}')")
    return dict(sorted(classes.items()))


def _imagefolder_records(directory: Path, photos: Iterable[Path], label: int) -> Iterator[Record]:
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


def _named(path: Path) -> bool:
    return is_photo(path.name)


def _walk(folder: Path) -> list[Path]:
    """All files below ``folder`` whose path has no hidden part, sorted by path; links are followed."""
    found: list[Path] = []
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in files if not name.startswith(".")]
    return sorted(found)


def _files(directory: Path, extension: str) -> dict[str, Path]:
    _require_directory(directory)
    return {
        entry.name.removesuffix(extension): Path(entry.path)
        for entry in os.scandir(directory)
        if entry.name.endswith(extension) and not entry.name.startswith(".") and entry.is_file()
    }


def _require_directory(directory: Path) -> None:
    if not directory.exists():
        raise DataError(f"no such directory: '{directory}'")
    if not directory.is_dir():
        raise DataError(f"'{directory}' is a file, expected a directory")
    if next(directory.iterdir(), None) is None:
        raise DataError(f"'{directory}' is empty")
