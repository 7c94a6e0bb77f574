"""Read a sample to show: its photo, upright and small, its mask, its boxes and caption, and what is wrong with it."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from dali_pipes.errors import DataError
from dali_pipes.formats.names import LABEL_COMPONENT, read_json
from dali_pipes.formats.orientation import read_orientation
from dali_pipes.formats.photo_header import is_photo
from dali_pipes.formats.photo_names import is_mask_name
from dali_pipes.formats.photo_rules import PhotoRules
from dali_pipes.formats.shard_index import ShardIndex
from prep.inspect.findings import ShardFinding
from prep.inspect.indexed_set import IndexedSet
from prep.photos.decoders import Undecodable, check_size, decode, open_decoder

MAX_BOXES = 100
"""Boxes of one photo that are shown."""
CAPTION_CHARS = 400
"""Characters of a caption that are shown."""
_MAX_BYTES = 1 << 20  # of a component with boxes or a caption; a longer one is not read
_BOX_WORDS = ("boxes", "bboxes", "bbox", "box")
_CAPTION_WORDS = ("caption", "captions", "txt", "text")
# EXIF's orientation -> what makes the photo upright, as Pillow's `exif_transpose` has it.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class ShownSample:
    """One sample as it is shown. Photo and mask are upright; their longer side has the pixels that were asked for."""

    shard: str
    key: str
    label: int | None
    """The class id; ``None`` without one."""
    photo: Pixels | None
    """uint8 [height, width, 3]; ``None``: it has none, or it cannot be decoded."""
    mask: Pixels | None
    """uint8 [height, width], of the photo's shape."""
    size: tuple[int, int]
    """Height and width of the whole photo, upright; 0 x 0 without a photo."""
    boxes: Sequence[tuple[float, float, float, float]]
    """Left, top, right and bottom of each box, as shares of the photo's width and height."""
    caption: str
    problems: Sequence[ShardFinding]
    """What cannot be decoded, and why."""
    is_mask_of_another_shape: bool


def read_sample(
    indexed: IndexedSet,
    row: int,
    at: int,
    index: ShardIndex,
    *,
    side: int,
    photo: str | None = None,
    mask: str | None = None,
    with_texts: bool = False,
) -> ShownSample:
    """Read the sample of row ``at`` in a shard's index.

    Args:
        indexed: The set.
        row: The shard's row in the manifest.
        at: The sample's row in the index.
        index: The shard's index.
        side: Pixels of the longer side of the photo that is returned; a smaller photo is enlarged.
        photo: The component to show; ``None``: the first photo that is not a mask, if there is one.
        mask: The mask's component; ``None``: the first mask; an empty name: no mask.
        with_texts: Read boxes and a caption, too.

    Raises:
        DataError: If the sample lacks the component that ``photo`` or ``mask`` names.
    """
    reader = _Reader(indexed, row, at, index)
    photo, mask = reader.chosen(photo, mask)
    size, shown_photo, shown_mask = (0, 0), None, None
    if photo is not None and (found := reader.picture(photo)) is not None:
        size, shown_photo = (found.height, found.width), _scaled(found, side, is_mask=False)
    if shown_photo is not None and mask and (found := reader.picture(mask)) is not None:
        shown_mask = _scaled(found, side, is_mask=True)[..., 0]
    is_of_another_shape = (
        shown_mask is not None and shown_photo is not None and shown_mask.shape != shown_photo.shape[:2]
    )
    has_label = index.labels is not None and LABEL_COMPONENT in reader.there
    return ShownSample(
        shard=reader.shard,
        key=reader.key,
        label=int(index.labels[at]) if has_label and index.labels is not None else None,
        photo=shown_photo,
        mask=None if is_of_another_shape else shown_mask,
        size=size,
        boxes=reader.boxes(size) if with_texts and all(size) else [],
        caption=reader.caption() if with_texts else "",
        problems=reader.problems,
        is_mask_of_another_shape=is_of_another_shape,
    )


class _Reader:
    """Reads the components of one sample."""

    def __init__(self, indexed: IndexedSet, row: int, at: int, index: ShardIndex) -> None:
        self.shard, self.key = indexed.manifest.names[row], index.keys[at]
        self.there = [component for component, offsets in index.offsets.items() if offsets[at] >= 0]
        self.problems: list[ShardFinding] = []
        self._indexed, self._index, self._at = indexed, index, at

    def chosen(self, photo: str | None, mask: str | None) -> tuple[str | None, str]:
        """The photo and the mask to show."""
        photos = [component for component in self.there if is_photo(component)]
        masks = [component for component in photos if is_mask_name(component, set(photos))]
        for name in (photo, mask):
            if name and name not in self.there:
                found = ", ".join(self.there) or "none"
                raise DataError(
                    f"shard '{self.shard}', key '{self.key}': no component '{name}' to show (found: {found})"
                )
        if photo is None:
            photo = next((component for component in photos if component not in masks and component != mask), None)
        if mask is None:
            mask = next((component for component in masks if component != photo), "")
        return photo, mask

    def picture(self, component: str) -> Image.Image | None:
        """The component in RGB, upright by its own EXIF; ``None`` if it cannot be decoded, which is a problem."""
        start, size = self._place(component)
        try:
            check_size(size)
            data = self._read(start, size)
            header, pixels = decode(open_decoder("pillow"), data, rules=PhotoRules(), output="rgb")
        except Undecodable as exc:
            self.problems.append(ShardFinding("photo", self.shard, self.key, component, str(exc)))
            return None
        picture, turn = Image.fromarray(pixels), _TURNS.get(read_orientation(data, header.format).value)
        return picture if turn is None else picture.transpose(turn)

    def boxes(self, size: tuple[int, int]) -> list[tuple[float, float, float, float]]:
        """The boxes of the first component that holds some; none if no component does."""
        height, width = size
        for component in self._named(_BOX_WORDS, "json", "npy"):
            found = _corners(self._value(component))
            if found is not None:
                shares = found[:MAX_BOXES] / np.array([width, height, width, height], np.float64)
                return [(left, top, right, bottom) for left, top, right, bottom in shares.clip(0, 1).tolist()]
        return []

    def caption(self) -> str:
        """The text of the first component that holds one; empty if no component does."""
        for component in self._named(_CAPTION_WORDS, "json", "txt"):
            value = self._value(component)
            if isinstance(value, Mapping):
                value = next((value[word] for word in _CAPTION_WORDS if isinstance(value.get(word), str)), None)
            if isinstance(value, list) and value and isinstance(value[0], str):
                value = value[0]
            if isinstance(value, str) and value.strip():
                return value.strip()
        return ""

    def _named(self, words: Sequence[str], *extensions: str) -> list[str]:
        """The components whose names say so first, then those that may hold it by their extension."""
        named = [name for name in self.there if not is_photo(name) and not set(name.split(".")).isdisjoint(words)]
        others = [name for name in self.there if name.rpartition(".")[2] in extensions and name not in named]
        return named + [name for name in others if not name.endswith("npy")]

    def _value(self, component: str) -> Any:
        """A component as JSON, an array or text, by its extension; ``None`` if it is none of these, or too long."""
        start, size = self._place(component)
        if size > _MAX_BYTES:
            return None
        data = self._read(start, size)
        try:
            if component.endswith("npy"):
                return _array(data)
            return read_json(data) if component.endswith("json") else data.decode()
        except ValueError:
            return None

    def _place(self, component: str) -> tuple[int, int]:
        return int(self._index.offsets[component][self._at]), int(self._index.sizes[component][self._at])

    def _read(self, start: int, size: int) -> bytes:
        return self._indexed.shards.store.read_range(self.shard, start=start, size=size)


def _array(data: bytes) -> npt.NDArray[Any]:
    """The array of a ``.npy`` file, and of no other file that `numpy.load` takes."""
    try:
        found: npt.NDArray[Any] = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except Exception as exc:  # numpy raises many types for a broken header
        raise ValueError("no .npy file") from exc
    return found


def _corners(value: Any) -> npt.NDArray[np.float64] | None:
    """Boxes as left, top, right, bottom in pixels, float64 [boxes, 4]; ``None`` if the value holds no boxes.

    Taken are the forms of the graph for detection: ``{"boxes": [[left, top, right, bottom], ...]}``, rows of an array
    that begin so, and COCO's ``[{"bbox": [left, top, width, height]}, ...]``.
    """
    if isinstance(value, Mapping):
        value = next((value[word] for word in _BOX_WORDS if word in value), None)
    is_coco = isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) for one in value)
    if is_coco:
        value = [one.get("bbox") for one in value]
    try:
        found = np.asarray(value, np.float64)
    except (ValueError, TypeError, OverflowError):
        return None
    if found.ndim != 2 or found.shape[1] < 4 or not np.isfinite(found[:, :4]).all():
        return None
    boxes = found[:, :4].copy()
    if is_coco:
        boxes[:, 2:] += boxes[:, :2]
    return boxes


def _scaled(picture: Image.Image, side: int, *, is_mask: bool) -> Pixels:
    """Scale a photo down at once, because a page or a sheet holds many."""
    resampling = Image.Resampling.NEAREST if is_mask else Image.Resampling.LANCZOS
    scale = side / max(picture.size)
    height, width = (max(1, round(length * scale)) for length in (picture.height, picture.width))
    return np.asarray(picture.resize((width, height), resampling))
