"""Read photos with boxes in YOLO's layout: a text file for each photo, with a line for each box."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from dali_pipes.errors import DataError
from dali_pipes.formats.photo_header import is_photo
from prep.sources.coco import BOXES
from prep.sources.record import Record, Source, photo_component, require_directory, size_of_upright, unpacked_photos

# In data.yaml: `names: [cat, dog]`, or a line for each name, `- cat` or `0: cat`.
_INLINE = re.compile(r"^names\s*:\s*\[(?P<names>[^\]]*)\]", re.MULTILINE)
_LINES = re.compile(r"^names\s*:\s*(?:#.*)?\n(?P<names>(?:[ \t]*(?:-|\d+\s*:)[^\n]*(?:\n|\Z))+)", re.MULTILINE)
_NAME = re.compile(r"\s*(?:-|(?P<id>\d+)\s*:)\s*(?P<name>.*?)\s*(?:\s#.*)?$")


def yolo_folders(directory: Path) -> dict[str, tuple[Path, Path]]:
    """Find YOLO's folders: split -> photos and labels; the split is empty if there is one folder of each.

    They are ``images/train`` and ``labels/train``, ``train/images`` and ``train/labels``, or ``images`` and ``labels``.
    """
    images, labels = directory / "images", directory / "labels"
    if images.is_dir() and labels.is_dir():
        both = [path.name for path in sorted(images.iterdir()) if (labels / path.name).is_dir()]
        found = {split: (images / split, labels / split) for split in both} or {"": (images, labels)}
    else:
        folders = sorted(
            path for path in directory.iterdir() if (path / "images").is_dir() and (path / "labels").is_dir()
        )
        found = {path.name: (path / "images", path / "labels") for path in folders}
    return {split: pair for split, pair in found.items() if next(pair[1].glob("*.txt"), None) is not None}


def yolo(directory: Path) -> Source:
    """The records of a directory in YOLO's layout: each photo with its boxes, sorted by split and name.

    A line of a label file is ``CLASS X Y WIDTH HEIGHT``: the box's centre and size as shares of the upright photo's; or
    a class and the corners of a polygon, which becomes the box around it. A record has the photo and ``boxes.json``,
    with boxes in pixels and class ids. A photo without a label file has no boxes. ``data.yaml`` names the classes.

    Raises:
        DataError: If the directory has another layout, or its ``data.yaml`` names no class.
    """
    require_directory(directory)
    folders = yolo_folders(directory)
    if not folders:
        raise DataError(f"'{directory}' has not YOLO's layout: looked for images/ and labels/ with .txt files in it")
    records: list[Record] = []
    broken: list[Path] = []
    source = Source(name=f"YOLO '{directory}'", records=records, classes=_read_names(directory))
    for split, (images, labels) in folders.items():
        photos: dict[str, Path] = {}
        for path in sorted(images.iterdir()):
            if is_photo(path.name):
                photos.setdefault(path.stem, path)  # another photo of this name is named below
        files = {path.stem: path for path in sorted(labels.glob("*.txt"))}
        prefix = f"{split}/" if len(folders) > 1 else ""
        source.skipped.extend(f"{files[name].relative_to(directory)}: no photo" for name in files if name not in photos)
        without = [name for name in photos if name not in files]
        if without:
            source.noted.append(
                f"{images.relative_to(directory)}: {len(without)} photos have no label file, and no boxes"
            )
        for name, photo in photos.items():
            key = f"{prefix}{name.replace('.', '-')}"
            try:
                boxes = _read_boxes(files.get(name), photo, classes=source.classes)
            except DataError as exc:
                source.broken.append(f"{key}: {exc}")
                broken.append(photo)
                continue
            parts: dict[str, bytes | Path] = {
                photo_component(photo.suffix[1:]): photo,
                BOXES: json.dumps(boxes).encode(),
            }
            records.append(Record(key=key, components=parts, label=None))
    tried = [Record(key="", components={"": photo}, label=None) for photo in broken]
    why = "another photo has its label file, or its folder has none"
    source.skipped.extend(unpacked_photos(directory, [*records, *tried], why=why))
    return source


def _read_names(directory: Path) -> dict[int, str]:
    path = next((one for name in ("data.yaml", "data.yml", "*.yaml", "*.yml") for one in directory.glob(name)), None)
    text = path.read_text("utf-8", errors="replace") if path else ""
    if inline := _INLINE.search(text):
        return {number: name.strip().strip("'\"") for number, name in enumerate(inline["names"].split(","))}
    if not (lines := _LINES.search(text)):
        raise DataError(f"'{path or directory / 'data.yaml'}' names no class: expected a list 'names'")
    found = [_NAME.match(line) for line in lines["names"].splitlines()]
    named = (
        (number if match["id"] is None else int(match["id"]), match) for number, match in enumerate(found) if match
    )
    return {number: match["name"].strip("'\"") for number, match in named}


def _read_boxes(labels: Path | None, photo: Path, *, classes: Mapping[int, str]) -> dict[str, list[object]]:
    boxes: list[object] = []
    ids: list[object] = []
    lines = [] if labels is None else labels.read_text("utf-8", errors="replace").splitlines()
    if any(line.strip() for line in lines):
        height, width = size_of_upright(photo)
    for number, line in enumerate(lines, 1):
        if not (words := line.split()):
            continue
        try:
            label, *shares = int(words[0]), *map(float, words[1:])
        except ValueError:
            label, shares = -1, []
        is_box = len(shares) == 4
        if label not in classes or not (is_box or (len(shares) >= 6 and len(shares) % 2 == 0)):
            raise DataError(
                f"'{labels}', line {number}: expected CLASS X Y WIDTH HEIGHT, or CLASS and the corners of a polygon, "
                f"with a class that has a name, found '{line:.80}'"
            )
        if is_box:
            x, y, w, h = shares
            left, top, right, bottom = x - w / 2, y - h / 2, x + w / 2, y + h / 2
        else:
            left, right, top, bottom = min(shares[::2]), max(shares[::2]), min(shares[1::2]), max(shares[1::2])
        if not all(-0.01 <= share <= 1.01 for share in (left, top, right, bottom)):
            raise DataError(f"'{labels}', line {number}: the box is not in the photo: '{line:.80}'")
        boxes.append([left * width, top * height, right * width, bottom * height])
        ids.append(label)
    return {"boxes": boxes, "labels": ids}
