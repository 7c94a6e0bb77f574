"""Find the records of a directory in the layout of the Oxford-IIIT Pet data set, or download it."""

import os
import re
from pathlib import Path

from dali_pipes.errors import DataError, PipesError, shown
from prep.sources.record import Record, Source, require_directory

PHOTO = "image.jpg"
MASK = "trimap.png"
# Species and breed are not used.
_ROW = re.compile(r"\s*(?P<name>\S+)\s+(?P<label>[0-9]{1,9})(?:\s|$)")
# A photo's name is its breed and a number.
_NUMBER = re.compile(r"(?<=.)_\d+$")


def pets(directory: Path) -> Source:
    """The records of a directory laid out as the Oxford-IIIT Pet data set, in the order of its ``list.txt``.

    ``directory`` holds ``images`` and ``annotations``, itself or in the folder ``oxford-iiit-pet`` that torchvision
    makes. The function reads ``images/*.jpg``, ``annotations/trimaps/*.png`` and ``annotations/list.txt``, with rows
    ``NAME CLASS-ID SPECIES BREED-ID``; a photo may also be a .heic, .heif or .avif, to be converted. A sample is
    ``{"__key__": NAME, "image.jpg", "cls", "trimap.png"}``; class ids are Oxford's, from 1. The files' names give the
    breeds: ``Abyssinian_34`` is an Abyssinian. A record with a missing
    part is skipped.

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
    for name, label in rows.items():
        missing = [what for what, found in (("photo", photos), ("trimap", trimaps)) if name not in found]
        if missing:
            skipped.append(f"{name}: no {' and no '.join(missing)}")
        else:
            # A photo that is yet to be converted is `image.heic` or the like.
            photo = f"image{photos[name].suffix.lower()}"
            records.append(Record(key=name, components={photo: photos[name], MASK: trimaps[name]}, label=label))
    skipped += [f"{name}: no row in list.txt" for name in sorted(photos) if name not in rows]
    if not records:
        raise DataError(f"'{root}' holds no complete record: {shown(skipped, are_names=False)}")
    classes: dict[int, str] = {}
    for name, label in rows.items():
        breed = _NUMBER.sub("", name)
        if classes.setdefault(label, breed) != breed:
            raise DataError(f"'{table}' gives class id {label} to '{classes[label]}' and to '{breed}' ('{name}')")
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
    found = [Path(entry.path) for entry in os.scandir(directory) if not entry.name.startswith(".") and entry.is_file()]
    return {path.stem: path for extension in extensions for path in found if path.suffix.lower() == extension}
