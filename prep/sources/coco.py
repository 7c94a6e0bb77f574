"""Read photos with boxes in COCO's layout: a JSON file for each split, which lists photos, boxes and classes."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dali_pipes.errors import DataError, shown
from prep.sources.record import Record, Source, photo_component, require_directory, unpacked_photos

BOXES = "boxes.json"
"""The component of a photo's boxes, which `dali_pipes.detection` reads: a list of COCO's annotations."""
# Where the files lie: COCO's own, and what Roboflow exports.
_PATTERNS = ("annotations/instances_*.json", "annotations/*.json", "*/_annotations.coco.json", "_annotations.coco.json")
_LISTS = ("images", "annotations", "categories")
_HEAD_BYTES = 1 << 20
SLACK = 1.0
"""Pixels that a box may reach outside its photo, as in `dali_pipes.detection`."""


def coco_files(directory: Path) -> dict[str, Path]:
    """Find COCO's files, by split; a directory in another layout has none. The file or its folder names the split.

    The first mebibyte tells whether a file is COCO's: files of captions have no ``categories``, and files of other
    programs have none of the three lists.
    """
    for pattern in _PATTERNS:
        if files := [path for path in sorted(directory.glob(pattern)) if _is_coco(path)]:
            in_folders = pattern.startswith("*")
            return {path.parent.name if in_folders else path.stem.removeprefix("instances_"): path for path in files}
    return {}


def _is_coco(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    found = re.findall(rb'"(images|annotations|categories)"\s*:\s*\[', head)
    return len(set(found)) == len(_LISTS) or (len(head) == _HEAD_BYTES and bool(found))


def coco(directory: Path) -> Source:
    """The records of a directory in COCO's layout, in the order of its files: each photo with its boxes.

    ``annotations/instances_train2017.json`` lists the photos of ``train2017``, which lie in ``train2017``,
    ``images/train2017``, ``images`` or beside the file. A record has the photo and ``boxes.json``, a list of its
    annotations: ``bbox`` (left, top, width, height), ``category_id``, and ``iscrowd`` where it is 1. A photo without
    annotations has an empty list. A photo that is not there, or has a box that does not lie on it, is a broken record.
    With several files, keys begin with the split. Classes keep COCO's ids.

    Raises:
        DataError: If there is no such file, or one is not as COCO's are; names the entry.
    """
    require_directory(directory)
    files = coco_files(directory)
    if not files:
        raise DataError(f"'{directory}' holds no file of COCO; looked for {', '.join(_PATTERNS)}")
    found = _Found(directory)
    for split, path in files.items():
        found.add(path, split, prefix=f"{split}/" if len(files) > 1 else "")
    return found.finished()


class _Found:
    """A source whose records are being found."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._classes: dict[int, str] = {}
        self._records: list[Record] = []
        self._broken: list[str] = []
        self._left_out: list[Path] = []  # and named already
        self._noted: list[str] = []

    def add(self, path: Path, split: str, *, prefix: str) -> None:
        """Add the photos that a file lists."""
        lists = _read(path)
        for entry in lists["categories"]:
            number, name = entry["id"], entry["name"]
            if self._classes.setdefault(number, name) != name:
                raise DataError(
                    f"'{path}': category {number} is '{name}', and '{self._classes[number]}' in another file"
                )
        boxes: dict[Any, list[dict[str, Any]]] = {entry["id"]: [] for entry in lists["images"]}
        if len(boxes) < len(lists["images"]):
            raise DataError(f"'{path}': two images have the same id; each needs an id of its own")
        for entry in lists["annotations"]:
            if entry["image_id"] not in boxes:
                raise DataError(
                    f"'{path}': annotation {entry.get('id')} is of image {entry['image_id']}, which the file does not "
                    "list"
                )
            if entry["category_id"] not in self._classes:
                raise DataError(
                    f"'{path}': annotation {entry.get('id')} is of category {entry['category_id']}, which the file "
                    "does not list"
                )
            if len(entry["bbox"]) != 4:
                raise DataError(
                    f"'{path}': annotation {entry.get('id')} has the bbox {entry['bbox']}, not four numbers"
                )
            kept = ("bbox", "category_id", *(["iscrowd"] if entry.get("iscrowd") else []))
            boxes[entry["image_id"]].append({name: entry[name] for name in kept})
        names = [entry["file_name"] for entry in lists["images"]]
        if odd := next((name for name in names if Path(name).is_absolute() or ".." in Path(name).parts), None):
            raise DataError(f"'{path}' lists the photo '{odd}'; expected a path below a folder of photos")
        root = self._root_of(path, split, names)
        for entry, name in zip(lists["images"], names, strict=True):
            if not (photo := root / name).is_file():
                self._broken.append(f"{name}: '{path.name}' lists it, and it is not in '{root}'")
                continue
            key = Path(name).with_suffix("").as_posix().replace(".", "-")
            if wrong := next((box["bbox"] for box in boxes[entry["id"]] if not _is_on_photo(box["bbox"], entry)), None):
                self._broken.append(
                    f"{prefix}{key}: the box {wrong} is not on the photo of {entry.get('width')} x "
                    f"{entry.get('height')} pixels; COCO's boxes are left, top, width and height"
                )
                self._left_out.append(photo)
                continue
            component = photo_component(photo.suffix[1:])
            content = json.dumps(boxes[entry["id"]]).encode()
            self._records.append(
                Record(key=f"{prefix}{key}", components={component: photo, BOXES: content}, label=None)
            )
        num_empty = sum(not boxes[entry["id"]] for entry in lists["images"])
        if num_empty:
            self._noted.append(f"{path.name}: {num_empty} photos have no boxes, and an empty list")

    def _root_of(self, path: Path, split: str, names: list[str]) -> Path:
        roots = [path.parent, *(self._directory / name for name in (split, f"images/{split}", "images", "."))]
        for root in roots:
            if any((root / name).is_file() for name in names[:20]):
                return root
        looked = shown([str(root) for root in roots])
        raise DataError(f"'{path}' lists photos such as {shown(names[:1])}, which are in none of {looked}")

    def finished(self) -> Source:
        tried = [Record(key="", components={"": photo}, label=None) for photo in self._left_out]
        skipped = unpacked_photos(self._directory, [*self._records, *tried], why="no file of COCO lists it")
        return Source(
            name=f"COCO '{self._directory}'",
            records=self._records,
            classes=dict(sorted(self._classes.items())),
            skipped=list(skipped),
            broken=self._broken,
            noted=self._noted,
        )


def _is_on_photo(box: list[Any], image: Mapping[str, Any]) -> bool:
    """Whether a box is as loaders take it; the file gives the photo's size."""
    try:
        (left, top, width, height), sides = map(float, box), [float(image[name]) for name in ("width", "height")]
    except (KeyError, TypeError, ValueError):
        return True  # no size, or no numbers: the loader says so
    ends = left + width - sides[0], top + height - sides[1]
    return min(width, height) >= 0 and min(left, top) >= -SLACK and max(ends) <= SLACK


def _read(path: Path) -> Mapping[str, list[dict[str, Any]]]:
    """The three lists of a file, with the fields that are needed."""
    fields: dict[str, dict[str, Any]] = {
        "images": {"id": int | str, "file_name": str},
        "annotations": {"image_id": int | str, "category_id": int, "bbox": list},
        "categories": {"id": int, "name": str},
    }
    try:
        document: Any = json.loads(path.read_bytes())
    except ValueError as exc:
        raise DataError(f"'{path}' is no JSON: {exc}") from exc
    for name, types in fields.items():
        entries = document.get(name) if isinstance(document, dict) else None
        if not isinstance(entries, list):
            raise DataError(f"'{path}' is no file of COCO: it has no list '{name}'")
        for number, entry in enumerate(entries):
            for field, kind in types.items():
                if not isinstance(entry, dict) or not isinstance(entry.get(field), kind):
                    raise DataError(
                        f"'{path}': entry {number} of '{name}' has no '{field}' as COCO's have, got {entry!r:.200}"
                    )
    lists: dict[str, list[dict[str, Any]]] = {name: document[name] for name in fields}
    return lists
