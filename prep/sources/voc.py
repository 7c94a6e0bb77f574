"""Read photos with boxes and masks in the layout of Pascal VOC: an XML file for each photo."""

import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
from PIL import Image

from dali_pipes.errors import DataError, shown
from dali_pipes.formats.photo_header import is_photo
from prep.sources.coco import BOXES
from prep.sources.record import Record, Source, photo_component, require_directory, size_of_upright, unpacked_photos

MASK = "mask.png"
"""The component of a photo's mask of classes."""
# Pascal VOC's classes, in the order of their ids in VOC's masks. The ids begin at 1, and 0 is the background. Source:
# "The PASCAL Visual Object Classes Challenge 2012 Development Kit", section 3.2.
_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog"),
    *("horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
_SPLITS = ("train", "val", "test")


def voc_folders(directory: Path) -> dict[str, tuple[Path, Path]]:
    """Find VOC's folders: split -> photos and XML files; the split is empty if there is one folder of each.

    They are ``JPEGImages`` and ``Annotations``, in the directory or in its one folder ``VOC...`` or
    ``VOCdevkit/VOC...``; or photos with their XML files beside them, in a folder for each split or in the directory.

    Raises:
        DataError: If there are several such folders of VOC.
    """
    roots = [directory, *sorted(directory.glob("VOC*")), *sorted(directory.glob("VOCdevkit/VOC*"))]
    if found := [root for root in roots if (root / "JPEGImages").is_dir() and _has_xml(root / "Annotations")]:
        if len(found) > 1:
            raise DataError(
                f"'{directory}' holds several data sets of VOC, {shown(list(map(str, found)))}; make each by itself"
            )
        return {"": (found[0] / "JPEGImages", found[0] / "Annotations")}
    beside = {split: (directory / split, directory / split) for split in ("train", "valid", *_SPLITS[1:])}
    if found_splits := {split: pair for split, pair in beside.items() if _has_xml(pair[0])}:
        return found_splits
    return {"": (directory, directory)} if _has_xml(directory) else {}


def _has_xml(folder: Path) -> bool:
    first = next(folder.glob("*.xml"), None)
    return first is not None and b"<annotation" in first.read_bytes()[:1024]


def voc_splits(directory: Path) -> tuple[str, ...]:
    """The splits of a directory in VOC's layout, if it has several: its folders, or lists in ``ImageSets/Main``."""
    folders = voc_folders(directory)
    found = tuple(folders) if len(folders) > 1 else tuple(_lists(folders))
    return found if len(found) > 1 else ()


def _lists(folders: dict[str, tuple[Path, Path]]) -> dict[str, list[str]]:
    """Split -> names of photos, of VOC's own lists."""
    photos, _ = next(iter(folders.values()))
    paths = {split: photos.parent / "ImageSets" / "Main" / f"{split}.txt" for split in _SPLITS}
    lines = {split: path.read_text().splitlines() for split, path in paths.items() if path.is_file()}
    return {split: [line.split()[0] for line in found if line.strip()] for split, found in lines.items()}


def voc(directory: Path) -> Source:
    """The records of a directory in the layout of Pascal VOC, by split and name: each photo with its boxes and mask.

    A record has the photo and ``boxes.json``, with boxes in pixels of the upright photo and class ids; where
    ``SegmentationClass`` has one, ``mask.png``, too: grey, with a class id for each pixel. VOC counts pixels from 1 and
    a box's last pixel belongs to it: the box 1, 1, W, H is the whole photo, here 0, 0, W, H. If all names are VOC's,
    classes have the ids of its masks, from 1; else they number the sorted names from 1. 0 is the background. Boxes that
    are marked as difficult stay. A photo that none of VOC's lists has is left out, and noted. A photo without an XML
    file is a broken record.

    Raises:
        DataError: If the directory has another layout.
    """
    require_directory(directory)
    folders = voc_folders(directory)
    if not folders:
        raise DataError(f"'{directory}' has not VOC's layout: looked for JPEGImages/ and Annotations/*.xml")
    lists = _lists(folders)
    found: list[tuple[str, Path, list[tuple[str, list[float]]]]] = []
    records: list[Record] = []
    classes: dict[int, str] = {}
    source = Source(name=f"VOC '{directory}'", records=records, classes=classes, masks=frozenset({MASK}))
    left_out: list[Path] = []  # and named already
    for split, (images, annotations) in folders.items():
        photos = {path.stem: path for path in sorted(images.iterdir(), reverse=True) if is_photo(path.name)}
        files = {path.stem: path for path in sorted(annotations.glob("*.xml"))}
        source.skipped.extend(f"{files[name].relative_to(directory)}: no photo" for name in files if name not in photos)
        # VOC 2012 has 17,125 photos, and its lists for boxes have 11,540 of them.
        if unlisted := sorted(photos.keys() - {name for names in lists.values() for name in names}) if lists else []:
            source.noted.append(f"{len(unlisted)} photos are in no list of ImageSets/Main: {shown(unlisted)}")
            left_out += [photos[name] for name in unlisted]
        for part, names in lists.items() or [(split, sorted(photos))]:
            prefix = f"{part}/" if len(lists) > 1 or len(folders) > 1 else ""
            source.broken.extend(f"{name}: {part}.txt lists it, no photo" for name in names if name not in photos)
            for name in (name for name in names if name in photos):
                key = f"{prefix}{name.replace('.', '-')}"
                try:
                    found.append((key, photos[name], _read_boxes(files.get(name), photos[name])))
                except DataError as exc:
                    source.broken.append(f"{key}: {exc}")
                    left_out.append(photos[name])
    names = sorted({name for _, _, boxes in found for name, _ in boxes})
    classes |= dict(enumerate(_CLASSES if set(names) <= set(_CLASSES) else names, 1))
    ids = {name: number for number, name in classes.items()}
    num_masks = 0
    for key, photo, boxes in found:
        content = {"boxes": [box for _, box in boxes], "labels": [ids[name] for name, _ in boxes]}
        parts: dict[str, bytes | Path] = {photo_component(photo.suffix[1:]): photo, BOXES: json.dumps(content).encode()}
        if (mask := photo.parent.parent / "SegmentationClass" / f"{photo.stem}.png").is_file():
            parts[MASK] = _grey(mask)
            num_masks += 1
        records.append(Record(key=key, components=parts, label=None))
    if 0 < num_masks < len(records):
        source.noted.append(f"{num_masks} of {len(records)} photos have a mask in SegmentationClass")
    if num_empty := sum(not boxes for _, _, boxes in found):
        source.noted.append(f"{num_empty} photos have no boxes")
    packed = [*records, *(Record(key="", components={"": photo}, label=None) for photo in left_out)]
    source.skipped.extend(
        line
        for line in unpacked_photos(directory, packed, why="it is in no folder of VOC's photos")
        if not line.rpartition("/")[0].endswith(("SegmentationClass", "SegmentationObject"))
    )
    return source


def _grey(mask: Path) -> bytes | Path:
    """VOC's masks have a palette: a decoder would give colours. The same pixels in grey are class ids."""
    try:
        with Image.open(mask) as image:
            if image.mode != "P":
                return mask
            pixels = np.array(image)
    except (OSError, ValueError):
        return mask  # the check of masks says what is wrong with it
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def _read_boxes(file: Path | None, photo: Path) -> list[tuple[str, list[float]]]:
    """Names and boxes (left, top, right, bottom) of an XML file."""
    if file is None:  # a photo without objects has a file that lists none
        raise DataError(f"no file '{photo.stem}.xml': whether '{photo.name}' has objects is not known")
    try:
        root = ET.parse(file).getroot()  # noqa: S314 (expat limits how far entities expand)
        objects = [(one.findtext("name") or "", one.find("bndbox")) for one in root.iter("object")]
        corners = [
            (name.strip(), [float(box.findtext(side) or "") for side in ("xmin", "ymin", "xmax", "ymax")])
            for name, box in objects
            if box is not None
        ]
        size = [int(root.findtext(f"size/{side}") or 0) for side in ("height", "width")]
    except (ET.ParseError, ValueError) as exc:
        raise DataError(f"'{file}' is not as VOC's are: {exc}") from exc
    if len(corners) < len(objects) or not all(name for name, _ in corners):
        raise DataError(f"'{file}' has an object without a name or a bndbox")
    if corners and all(size) and (seen := size_of_upright(photo)) != tuple(size) and all(seen):
        raise DataError(
            f"'{file}' is for a photo of {size[1]} x {size[0]} pixels, and '{photo.name}' is shown with {seen[1]} x "
            f"{seen[0]}: its boxes would be at other places"
        )
    return [(name, [left - 1, top - 1, right, bottom]) for name, (left, top, right, bottom) in corners]
