"""Choose samples of a set and read them to show: photo and mask, upright and small, boxes, caption, and what is bad."""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from dali_pipes.arrays import Int64s
from dali_pipes.errors import DataError, shown
from dali_pipes.formats.names import read_json
from dali_pipes.formats.orientation import read_orientation
from dali_pipes.formats.photo_header import PhotoRules, is_photo
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.progress import bar
from dali_pipes.store.shard_set import ShardSet
from prep.inspect.findings import ShardFinding
from prep.inspect.indexed_set import IndexedSet
from prep.photos.decoders import Undecodable, check_size, decode, open_decoder, turned_upright

MAX_BOXES = 100
CAPTION_CHARS = 400
_MAX_BYTES = 1 << 20  # of a component with boxes or a caption; a longer one is not read
_BOX_WORDS = ("boxes", "bboxes", "bbox", "box")
_CAPTION_WORDS = ("caption", "captions", "txt", "text")
_CLASS_ID = re.compile(r"-?[0-9]{1,18}")  # of at most 64 bits

Pixels = npt.NDArray[np.uint8]


@dataclass(kw_only=True)
class ShownSample:
    """One sample as it is shown. Photo and mask are upright; their longer side has the pixels that were asked for."""

    shard: str
    key: str
    label: int | None
    """The class id; ``None`` without one."""
    photo: Pixels | None = None
    """uint8 [height, width, 3]; ``None``: it has none, or it cannot be decoded."""
    mask: Pixels | None = None
    """uint8 [height, width], of the photo's shape; ``None`` also if it has another shape."""
    size: tuple[int, int] = (0, 0)
    """Height and width of the whole photo, upright; 0 x 0 without a photo."""
    boxes: Sequence[tuple[float, ...]] = ()
    """Left, top, right and bottom of each box, as shares of the photo's width and height."""
    caption: str = ""
    problems: list[ShardFinding] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """How samples are chosen and shown."""

    num: int
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


class ChosenSamples:
    """Some samples of a set, which are read one by one.

    Raises:
        DataError: If there is no sample, key or class of this name, or the manifest, an index or a shard cannot be
            read.
    """

    def __init__(self, shards: ShardSet, options: ShowOptions, *, show_progress: bool) -> None:
        self.indexed = IndexedSet(shards, show_progress=show_progress)
        self._options, self._show_progress = options, show_progress
        manifest = self.indexed.manifest
        if not manifest.num_samples:
            raise DataError(f"'{shards.url}' holds no sample to show")
        self._starts = manifest.sample_stops - manifest.samples
        if options.keys:
            matching: Int64s = self._by_keys(options.keys)
            drawn = np.arange(len(matching))[: options.num]
        else:
            matching = self._of_classes(options.labels) if options.labels else np.arange(manifest.num_samples)
            draw, num = np.random.default_rng(options.seed), min(options.num, len(matching))
            drawn = np.sort(draw.choice(len(matching), num, replace=False))
        self._ordinals = matching[drawn]
        self.num_matching = len(matching)
        """The number of samples from which they were chosen."""

    def read(self, *, side: int) -> list[ShownSample]:
        """Read the samples; the longer side of their photos gets ``side`` pixels.

        Raises:
            DataError: If a sample lacks the component that the options name.
        """
        samples: list[ShownSample] = []
        row_of_index, index = -1, None
        with bar(what="view", total=len(self._ordinals), unit="samples", shown=self._show_progress, delay_s=1) as drawn:
            for ordinal in self._ordinals.tolist():
                row = int(np.searchsorted(self.indexed.manifest.sample_stops, ordinal, side="right"))
                if index is None or row != row_of_index:
                    row_of_index, index = row, self.indexed.read(row)
                at = ordinal - int(self._starts[row])
                samples.append(_Reader(self.indexed, index, at).sample(self._options, side))
                drawn.update(1)
        return samples

    @property
    def about(self) -> str:
        """The choice in words."""
        options = self._options
        which = "as named" if options.keys else f"drawn by seed {options.seed}"
        of_classes = f"; class {', '.join(options.labels)}" if options.labels else ""
        return f"{len(self._ordinals)} of {self.num_matching} samples, {which}{of_classes}"

    def _by_keys(self, keys: Sequence[str]) -> Int64s:
        asked = set(keys)
        found: dict[str, int] = {}
        for row, index in self.indexed.each():
            found |= {key: at for at, key in enumerate(index.keys, int(self._starts[row])) if key in asked}
        if missing := [key for key in keys if key not in found]:
            raise DataError(f"no sample of '{self.indexed.shards.url}' has key {shown(missing)}")
        return np.array([found[key] for key in keys], np.int64)

    def _of_classes(self, labels: Sequence[str]) -> Int64s:
        by_name = {name: label for label, name in self.indexed.manifest.classes.items()}
        ids = []
        for text in labels:
            if text not in by_name and not _CLASS_ID.fullmatch(text):
                table = shown(sorted(by_name)) if by_name else "none: the set has no class table, name the id"
                raise DataError(f"no class '{text}' in '{self.indexed.shards.url}' (found: {table})")
            ids.append(by_name[text] if text in by_name else int(text))
        found = [np.zeros(0, np.int64)]
        for row, index in self.indexed.each():
            if index.labels is not None:
                found.append(self._starts[row] + np.flatnonzero(np.isin(index.labels, ids) & index.has_label))
        matching = np.concatenate(found)
        if not len(matching):
            raise DataError(f"no sample of '{self.indexed.shards.url}' is of class {', '.join(map(str, ids))}")
        return matching


class _Reader:
    """Reads the components of one sample."""

    def __init__(self, indexed: IndexedSet, index: ShardIndex, at: int) -> None:
        self._indexed, self._index, self._at = indexed, index, at
        self._there = [component for component, offsets in index.offsets.items() if offsets[at] >= 0]
        label = int(index.labels[at]) if index.labels is not None and index.has_label[at] else None
        self._sample = ShownSample(shard=index.shard, key=index.keys[at], label=label)

    def sample(self, options: ShowOptions, side: int) -> ShownSample:
        sample = self._sample
        photo, mask = self._chosen(options.photo, options.mask)
        if photo is not None and (picture := self._picture(photo)) is not None:
            sample.size, sample.photo = (
                (picture.height, picture.width),
                _scaled(picture, side, Image.Resampling.LANCZOS),
            )
            sample.boxes = self._boxes()
            if mask and (picture := self._picture(mask)) is not None:
                small = _scaled(picture, side, Image.Resampling.NEAREST)[..., 0]
                sample.mask = small if small.shape == sample.photo.shape[:2] else None
        sample.caption = self._caption()
        return sample

    def _chosen(self, photo: str | None, mask: str | None) -> tuple[str | None, str]:
        for name in (photo, mask):
            if name and name not in self._there:
                where = f"shard '{self._sample.shard}', key '{self._sample.key}'"
                found = ", ".join(self._there) or "none"
                raise DataError(f"{where}: no component '{name}' to show (found: {found})")
        roles = self._indexed.roles
        if photo is None:
            # A sample that lacks the set's photo may have another one.
            photos = [*roles.photos, *filter(is_photo, self._there)]
            photo = next((name for name in photos if name in self._there and name != mask), None)
        if mask is None:
            mask = next((name for name in roles.masks if name in self._there and name != photo), "")
        return photo, mask

    def _picture(self, component: str) -> Image.Image | None:
        """The component in RGB, upright by its own EXIF; ``None`` if it cannot be decoded, which is a problem."""
        sample, size = self._sample, int(self._index.sizes[component][self._at])
        try:
            check_size(size)
            data = self._read(component)
            header, pixels = decode(open_decoder("pillow"), data, rules=PhotoRules(), output="rgb")
        except Undecodable as exc:
            sample.problems.append(ShardFinding("photo", str(exc), sample.shard, sample.key, component))
            return None
        return turned_upright(Image.fromarray(pixels), read_orientation(data, header.format).value)

    def _boxes(self) -> list[tuple[float, ...]]:
        """The boxes of the first component that holds some; none if no component does."""
        height, width = self._sample.size
        for component in self._named(_BOX_WORDS, ("json",)):
            found = _corners(self._value(component))
            if found is not None:
                shares = found[:MAX_BOXES] / np.array([width, height, width, height], np.float64)
                return [tuple(box) for box in shares.clip(0, 1).tolist()]
        return []

    def _caption(self) -> str:
        """The text of the first component that holds one; empty if no component does."""
        for component in self._named(_CAPTION_WORDS, ("json", "txt")):
            value = self._value(component)
            if isinstance(value, Mapping):
                value = next((value[word] for word in _CAPTION_WORDS if isinstance(value.get(word), str)), None)
            if isinstance(value, list) and value and isinstance(value[0], str):
                value = value[0]
            if isinstance(value, str) and value.strip():
                return value.strip()
        return ""

    def _named(self, words: Sequence[str], extensions: Sequence[str]) -> list[str]:
        """The components whose names say so first, then those that may hold it by their extension."""
        named = [name for name in self._there if not is_photo(name) and not set(name.split(".")).isdisjoint(words)]
        return named + [name for name in self._there if name.rpartition(".")[2] in extensions and name not in named]

    def _value(self, component: str) -> Any:
        """A component as JSON, an array or text, by its extension; ``None`` if it is none of these, or too long."""
        if self._index.sizes[component][self._at] > _MAX_BYTES:
            return None
        data = self._read(component)
        try:
            if component.endswith("npy"):  # and no other file that `numpy.load` takes
                return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
            return read_json(data) if component.endswith("json") else data.decode()
        except Exception:  # noqa: BLE001 (numpy raises many types for a broken header)
            return None

    def _read(self, component: str) -> bytes:
        start, size = self._index.offsets[component][self._at], self._index.sizes[component][self._at]
        return self._indexed.shards.store.read_range(self._sample.shard, start=int(start), size=int(size))


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


def _scaled(picture: Image.Image, side: int, resampling: Image.Resampling) -> Pixels:
    """Scale a photo at once, because a page or a sheet holds many."""
    width, height = (max(1, round(length * side / max(picture.size))) for length in picture.size)
    return np.asarray(picture.resize((width, height), resampling))
