"""Transform a shard: apply one function to each sample, in order. Keys stay the same.

The output depends only on the shard's bytes, the transform and its libraries: headers hold no time and no owner. A JPEG
decoder of another version may round pixels differently.
"""

import importlib
import io
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import unquote

from dali_pipes.errors import DataError
from dali_pipes.formats.keys import split_key
from dali_pipes.formats.tar_reader import BLOCK, ArchiveReader
from prep.sources.pets import MASK, PHOTO
from prep.tar.writer import member_header

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


_RECORD = 20 * BLOCK  # a tar is padded to a multiple of this
CROP = 350  # as in the tutorial
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

MAX_SAMPLE_BYTES = 1 << 30
"""Bytes of a sample that a transform takes: it holds all of them."""

Sample = dict[str, bytes]
"""A sample's components and their bytes, in the shard's order."""


class ShardTransform(ABC):
    """Transforms shards; a subclass says how to transform a sample."""

    name: str
    """The text from which `load_transform` made it."""

    @abstractmethod
    def transform_sample(self, sample: Sample) -> Mapping[str, bytes]:
        """Return the components to write for a sample, in order; an empty mapping leaves the sample out.

        It may raise any exception: the error will name shard and key. Several threads may call it at a time.
        """

    def pieces(self, stream: BinaryIO, *, shard: str) -> Iterator[bytes]:
        """Yield the new shard's bytes, sample by sample; two samples are in memory.

        Raises:
            DataError: While iterating, if the shard is not a tar, the members of a sample do not stand together, or the
                transform fails; names the ``shard``.
        """
        num_bytes = 0
        for key, sample in _samples(stream, shard):
            for name, data in self._members(key, sample, shard).items():
                for piece in (member_header(name, len(data)), data, bytes(-len(data) % BLOCK)):
                    num_bytes += len(piece)
                    yield piece
        # Two empty blocks, and padding.
        yield bytes(2 * BLOCK + -(num_bytes + 2 * BLOCK) % _RECORD)

    def transform(self, data: bytes, path: str, etl_args: str = "") -> bytes:
        """Return the whole new shard, for an ETL server, which must not send a part of a shard before an error.

        ``path`` is ``BUCKET/NAME``, quoted or not.

        Raises:
            DataError: For the same reasons as `pieces`.
            ValueError: If ``etl_args``, the arguments of a request, is not empty.
        """
        shard = unquote(path).rpartition("/")[2]
        if etl_args:
            raise ValueError(f"transform '{self.name}' takes no arguments with a request, got '{etl_args}'")
        return b"".join(self.pieces(io.BytesIO(data), shard=shard))

    def _members(self, key: str, sample: Sample, shard: str) -> dict[str, bytes]:
        """Transform a sample, and check the result; return its files by name."""
        where = f"shard '{shard}', key '{key}': transform '{self.name}'"
        try:
            made: object = self.transform_sample(sample)
        except Exception as exc:
            cause = str(exc) if isinstance(exc, DataError) else f"{type(exc).__name__}: {exc}"
            raise DataError(f"{where} failed: {' '.join(cause.split())}") from exc
        if not isinstance(made, Mapping):
            raise DataError(
                f"{where} returned {type(made).__name__}, expected a dict of component to bytes; an empty one leaves "
                "the sample out"
            )
        members: dict[str, bytes] = {}
        for component, data in made.items():
            name = f"{key}.{component}"
            if not isinstance(component, str) or split_key(name) != (key, component):
                expected = "an extension such as 'jpg' or 'seg.png'"
                raise DataError(f"{where} named a component {component!r}, expected {expected}")
            if component.lower() != component:
                raise DataError(f"{where} named a component '{component}', expected lower case: readers lower the name")
            if not isinstance(data, bytes):
                raise DataError(f"{where} made component '{component}' of {type(data).__name__}, expected bytes")
            members[name] = data
        return members


class FunctionTransform(ShardTransform):
    """Applies a function that takes a dict of component to bytes and returns another."""

    def __init__(self, function: Callable[[Sample], Mapping[str, bytes]], *, name: str) -> None:
        self.name = name
        self._function = function

    def transform_sample(self, sample: Sample) -> Mapping[str, bytes]:
        """Call the function."""
        return self._function(sample)


class PetsTransform(ShardTransform):
    """The tutorial's transform: crops photo and trimap to their centre, normalises the photo, stores both as ``.npy``.

    ``image.npy`` replaces ``image.jpg``: float32 [3, crop, crop], ``(pixel / 255 - mean) / std`` with ImageNet's mean
    and standard deviation. ``trimap.npy`` replaces ``trimap.png``: uint8 [1, crop, crop], the mask's values. The crop
    is that of torchvision's ``CenterCrop``; outside a smaller photo, pixels are 0 before they are normalised. Other
    components stay as they are. A sample grows to 1.5 MB, so pack small shards for it (``--max-count 100``).
    """

    name = "pets"

    def __init__(self, *, crop: int = CROP) -> None:
        if crop < 1:
            raise ValueError(f"crop must be positive, got {crop}")
        self.crop = crop

    def transform_sample(self, sample: Sample) -> Mapping[str, bytes]:
        """Return the sample with its tensors; raises `DataError` if a component is missing or cannot be decoded."""
        if lacking := next((name for name in (PHOTO, MASK) if name not in sample), None):
            raise DataError(f"no component '{lacking}' (found: {', '.join(sample)})")
        made: dict[str, bytes] = {}
        for component, data in sample.items():
            if component == PHOTO:
                made["image.npy"] = _as_npy(self._photo(data))
            elif component == MASK:
                made["trimap.npy"] = _as_npy(self._mask(data))
            else:
                made[component] = data
        return made

    def _photo(self, data: bytes) -> "npt.NDArray[np.float32]":
        import numpy as np

        pixels = _center_crop(_decode(data, "RGB", component=PHOTO), self.crop).astype(np.float32)
        pixels /= np.float32(255)
        pixels -= np.array(MEAN, np.float32)
        pixels /= np.array(STD, np.float32)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))

    def _mask(self, data: bytes) -> "npt.NDArray[np.uint8]":
        return _center_crop(_decode(data, "L", component=MASK), self.crop)[None]


def load_transform(spec: str) -> ShardTransform:
    """Return the transform ``pets``, or ``MODULE:NAME``: a function of a sample or a subclass of `ShardTransform`.

    The module may also lie in the current directory, which is searched last.

    Raises:
        ValueError: If ``spec`` has another form, the module or the name does not exist, or it cannot be called.
    """
    if spec == PetsTransform.name:
        return PetsTransform()
    module_name, mark, name = spec.partition(":")
    if not (module_name and mark and name):
        raise ValueError(f"a transform is 'pets' or MODULE:FUNCTION, such as my_module:crop, got '{spec}'")
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 (sys.path holds strings)
        sys.path.append(here)  # last, so that it does not hide another module
        importlib.invalidate_caches()
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as exc:
        what = f"no module '{exc.name}'" if exc.name else str(exc)
        raise ValueError(f"transform '{spec}': {what} in '{here}' or on Python's path; set PYTHONPATH") from exc
    except AttributeError as exc:
        raise ValueError(f"transform '{spec}': module '{module_name}' has no '{name}'") from exc
    except Exception as exc:
        raise ValueError(f"transform '{spec}': importing it failed: {type(exc).__name__}: {exc}") from exc
    if isinstance(found, type) and issubclass(found, ShardTransform):
        made = found()
        made.name = spec
        return made
    if not callable(found):
        raise ValueError(f"transform '{spec}' is {type(found).__name__}, expected a function of a sample")
    return FunctionTransform(found, name=spec)


def _samples(stream: BinaryIO, shard: str) -> Iterator[tuple[str, Sample]]:
    """Yield a shard's samples, in order; refuse a sample whose members do not stand together."""
    seen: set[str] = set()
    key: str | None = None
    sample: Sample = {}
    for member in ArchiveReader(stream, shard=shard):
        if member.key != key:
            if key is not None:
                yield key, sample
            key, sample = member.key, {}
            if key in seen:
                raise DataError(
                    f"shard '{shard}', key '{key}': its members do not stand together; pack or shuffle it again"
                )
            seen.add(key)
        if member.component in sample:
            raise DataError(f"shard '{shard}', key '{key}': component '{member.component}' comes twice; pack it again")
        if (num_bytes := sum(map(len, sample.values())) + member.size) > MAX_SAMPLE_BYTES:
            raise DataError(
                f"shard '{shard}', key '{key}': a sample of {num_bytes} bytes or more, a transform takes at most "
                f"{MAX_SAMPLE_BYTES}"
            )
        sample[member.component] = member.read()
    if key is not None:
        yield key, sample


def _decode(data: bytes, mode: str, *, component: str) -> "npt.NDArray[np.uint8]":
    """Return pixels, [height, width] or [height, width, 3]."""
    import numpy as np
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            converted: Image.Image = image if image.mode == mode else image.convert(mode)
            return np.asarray(converted, np.uint8)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as exc:
        raise DataError(f"component '{component}' cannot be decoded: {exc}") from exc


def _center_crop(pixels: "npt.NDArray[np.uint8]", crop: int) -> "npt.NDArray[np.uint8]":
    """Return [crop, crop, ...], filled with 0 where the photo is smaller."""
    import numpy as np

    height, width = pixels.shape[:2]
    cropped = np.zeros((crop, crop, *pixels.shape[2:]), np.uint8)
    rows, to_rows = _center_window(height, crop)
    columns, to_columns = _center_window(width, crop)
    cropped[to_rows, to_columns] = pixels[rows, columns]
    return cropped


def _center_window(size: int, crop: int) -> tuple[slice, slice]:
    """Return the visible part of ``size`` pixels, and its place in the crop; rounds halves to even, as torchvision.

    >>> _center_window(355, 350), _center_window(347, 350)
    ((slice(2, 352, None), slice(0, 350, None)), (slice(0, 347, None), slice(1, 348, None)))
    """
    if size >= crop:
        start = round((size - crop) / 2)
        return slice(start, start + crop), slice(0, crop)
    start = (crop - size) // 2
    return slice(0, size), slice(start, start + size)


def _as_npy(array: "npt.NDArray[Any]") -> bytes:
    import numpy as np

    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version=(1, 0), allow_pickle=False)
    return stream.getvalue()
