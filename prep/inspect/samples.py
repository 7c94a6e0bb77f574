"""Choose samples of a set and read them to show: photo and mask, upright and small, boxes, caption, and what is bad."""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from dali_pipes.arrays import Int64s
from dali_pipes.errors import DataError, shown
from dali_pipes.formats.names import read_json
from dali_pipes.formats.orientation import read_orientation
from dali_pipes.formats.photo_header import is_photo
from dali_pipes.formats.photo_rules import PhotoRules
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.progress import bar
from dali_pipes.store.shard_set import ShardSet
from prep.inspect.findings import ShardFinding
from prep.inspect.indexed_set import IndexedSet
from prep.photos.apart import turned_upright
from prep.photos.decoders import Undecodable, check_size, decode, open_decoder

MAX_SAMPLES = 1000
"""The largest number of samples on a page or picture: a picture is then 53,000 pixels high."""
MAX_BOXES = 100
"""Boxes of one photo that are shown."""
CAPTION_CHARS = 400
"""Characters of a caption that are shown."""
_MAX_BYTES = 1 << 20  # of a component with boxes or a caption; a longer one is not read
_BOX_WORDS = ("boxes", "bboxes", "bbox", "box")
_CAPTION_WORDS = ("caption", "captions", "txt", "text")
# Numbers of 18 digits fit into 64 bits.
_CLASS_ID = re.compile(r"-?[0-9]{1,18}")

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class ShownSample:
    """One sample as it is shown. Photo and mask are upright; their longer side has the pixels that were asked for."""

    shard: str
    key: str
    label: int | None
    """The class id; ``None`` without one."""
    components: Sequence[str]
    """All of its components."""
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


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """How samples are chosen and shown."""

    num: int
    """The most samples, at most `MAX_SAMPLES`."""
    seed: int = 0
    """Draws the samples; they are shown in the shards' order."""
    labels: Sequence[str] = ()
    """Class ids or names: only samples of these classes. Empty: of all classes."""
    keys: Sequence[str] = ()
    """Only samples with these keys, in this order; then ``seed`` is not used."""
    photo: str | None = None
    """The component to show; ``None``: the photo, see `dali_pipes.formats.photo_names.photo_roles`."""
    mask: str | None = None
    """The component to lay over it; ``None``: the mask; an empty name: no mask."""

    def __post_init__(self) -> None:
        if not 1 <= self.num <= MAX_SAMPLES:
            raise ValueError(f"num must be in [1, {MAX_SAMPLES}], got {self.num}")


class ChosenSamples:
    """Some samples of a set, which are read one by one.

    Raises:
        DataError: If there is no sample, key or class of this name, or the manifest, an index or a shard cannot be
            read.
    """

    def __init__(self, shards: ShardSet, options: ShowOptions, *, show_progress: bool) -> None:
        self.indexed = IndexedSet(shards, show_progress=show_progress)
        self._options, self._show_progress = options, show_progress
        if not self.indexed.manifest.num_samples:
            raise DataError(f"'{shards.url}' holds no sample to show")
        self.places: list[tuple[int, int]]
        """Row of the shard and row in its index, of each sample."""
        self.num_matching: int
        """The number of samples from which they were chosen."""
        if options.keys:
            self.places, self.num_matching = self._by_keys(options.keys)[: options.num], len(options.keys)
        elif options.labels:
            self._draw(self._of_classes(options.labels))
        else:
            self._draw(None)

    def read(self, *, side: int, with_texts: bool = False) -> "list[ShownSample]":
        """Read the samples; the longer side of their photos gets ``side`` pixels.

        Raises:
            DataError: If a sample lacks the component that the options name.
        """
        samples: list[ShownSample] = []
        row_of_index, index = -1, None
        with bar(what="view", total=len(self.places), unit="samples", shown=self._show_progress, delay_s=1) as drawn:
            for row, at in self.places:
                if index is None or row != row_of_index:
                    row_of_index, index = row, self.indexed.read(row)
                samples.append(_Reader(self.indexed, index, at).sample(self._options, side, with_texts=with_texts))
                drawn.update(1)
        return samples

    @property
    def about(self) -> str:
        """The choice in words."""
        options = self._options
        which = "as named" if options.keys else f"drawn by seed {options.seed}"
        of_classes = f"; class {', '.join(options.labels)}" if options.labels else ""
        return f"{len(self.places)} of {self.num_matching} samples, {which}{of_classes}"

    def _draw(self, matching: Int64s | None) -> None:
        """Draw from the matching samples, int64 [samples, 2], or from all."""
        manifest, options = self.indexed.manifest, self._options
        self.num_matching = manifest.num_samples if matching is None else len(matching)
        num = min(options.num, self.num_matching)
        drawn = np.sort(np.random.default_rng(options.seed).choice(self.num_matching, num, replace=False))
        if matching is None:
            stops = np.cumsum(manifest.samples)
            rows = np.searchsorted(stops, drawn, side="right")
            found = np.stack([rows, drawn - (stops - manifest.samples)[rows]], axis=1)
        else:
            found = matching[drawn]
        self.places = [(row, at) for row, at in found.tolist()]

    def _by_keys(self, keys: Sequence[str]) -> list[tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        missing_keys = set(keys)
        for row, index in self.indexed.each():
            for at, key in enumerate(index.keys) if missing_keys else ():
                if key in missing_keys:
                    missing_keys.discard(key)
                    found[key] = (row, at)
        if missing_keys:
            named = shown([key for key in keys if key in missing_keys])
            raise DataError(f"no sample of '{self.indexed.shards.url}' has key {named}")
        return [found[key] for key in keys]

    def _of_classes(self, labels: Sequence[str]) -> Int64s:
        ids = self._class_ids(labels)
        found = [np.zeros((0, 2), np.int64)]
        for row, index in self.indexed.each():
            if index.labels is not None:
                ats = np.flatnonzero(np.isin(index.labels, ids) & index.has_label)
                found.append(np.stack([np.full(len(ats), row), ats], axis=1))
        matching = np.concatenate(found)
        if not len(matching):
            raise DataError(f"no sample of '{self.indexed.shards.url}' is of class {', '.join(map(str, ids))}")
        return matching

    def _class_ids(self, labels: Sequence[str]) -> list[int]:
        by_name = {name: label for label, name in self.indexed.manifest.classes.items()}
        ids = []
        for text in labels:
            if text in by_name:
                ids.append(by_name[text])
            elif _CLASS_ID.fullmatch(text):
                ids.append(int(text))
            else:
                table = shown(sorted(by_name)) if by_name else "none: the set has no class table, name the id"
                raise DataError(f"no class '{text}' in '{self.indexed.shards.url}' (found: {table})")
        return ids


class _Reader:
    """Reads the components of one sample."""

    def __init__(self, indexed: IndexedSet, index: ShardIndex, at: int) -> None:
        self.shard, self.key = index.shard, index.keys[at]
        self.there = [component for component, offsets in index.offsets.items() if offsets[at] >= 0]
        self.problems: list[ShardFinding] = []
        self._indexed, self._index, self._at = indexed, index, at

    def sample(self, options: ShowOptions, side: int, *, with_texts: bool) -> ShownSample:
        photo, mask = self._chosen(options.photo, options.mask)
        size, shown_photo, shown_mask = (0, 0), None, None
        if photo is not None and (found := self._picture(photo)) is not None:
            size, shown_photo = (found.height, found.width), _scaled(found, side, is_mask=False)
        if shown_photo is not None and mask and (found := self._picture(mask)) is not None:
            shown_mask = _scaled(found, side, is_mask=True)[..., 0]
        is_of_another_shape = (
            shown_mask is not None and shown_photo is not None and shown_mask.shape != shown_photo.shape[:2]
        )
        labels = self._index.labels
        return ShownSample(
            shard=self.shard,
            key=self.key,
            label=int(labels[self._at]) if labels is not None and self._index.has_label[self._at] else None,
            components=self.there,
            photo=shown_photo,
            mask=None if is_of_another_shape else shown_mask,
            size=size,
            boxes=self._boxes(size) if with_texts and all(size) else [],
            caption=self._caption() if with_texts else "",
            problems=self.problems,
            is_mask_of_another_shape=is_of_another_shape,
        )

    def _chosen(self, photo: str | None, mask: str | None) -> tuple[str | None, str]:
        """The photo and the mask to show."""
        for name in (photo, mask):
            if name and name not in self.there:
                found = ", ".join(self.there) or "none"
                raise DataError(
                    f"shard '{self.shard}', key '{self.key}': no component '{name}' to show (found: {found})"
                )
        roles = self._indexed.roles
        if photo is None:
            # A sample that lacks the set's photo may have another one.
            photos = [*roles.photos, *filter(is_photo, self.there)]
            photo = next((name for name in photos if name in self.there and name != mask), None)
        if mask is None:
            mask = next((name for name in roles.masks if name in self.there and name != photo), "")
        return photo, mask

    def _picture(self, component: str) -> Image.Image | None:
        """The component in RGB, upright by its own EXIF; ``None`` if it cannot be decoded, which is a problem."""
        start, size = self._place(component)
        try:
            check_size(size)
            data = self._read(start, size)
            header, pixels = decode(open_decoder("pillow"), data, rules=PhotoRules(), output="rgb")
        except Undecodable as exc:
            self.problems.append(ShardFinding("photo", self.shard, self.key, component, str(exc)))
            return None
        return turned_upright(Image.fromarray(pixels), read_orientation(data, header.format).value)

    def _boxes(self, size: tuple[int, int]) -> list[tuple[float, float, float, float]]:
        """The boxes of the first component that holds some; none if no component does."""
        height, width = size
        for component in self._named(_BOX_WORDS, "json", "npy"):
            found = _corners(self._value(component))
            if found is not None:
                shares = found[:MAX_BOXES] / np.array([width, height, width, height], np.float64)
                return [(left, top, right, bottom) for left, top, right, bottom in shares.clip(0, 1).tolist()]
        return []

    def _caption(self) -> str:
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
