"""Transform a shard: apply one function to each sample, in order; keys stay.

The output is a function of the shard's bytes, the transform and its libraries: headers have no time and no owner, but a
JPEG decoder of another version may round differently.
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


# A tar is padded to a multiple of this.
RECORD = 20 * BLOCK

CROP = 350
"""As in the tutorial."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Sample = dict[str, bytes]
"""A sample's components and their bytes, in the shard's order."""


class ShardTransform(ABC):
    """Transforms shards; a subclass transforms a sample."""

    name: str
    """The text that `load_transform` makes it of."""

    @abstractmethod
    def transform_sample(self, sample: Sample) -> Mapping[str, bytes]:
        """The components to write instead of a sample's, in order; none: the sample is left out.

        It may raise anything: the error will name shard and key. Several threads may call it at a time.
        """

    def pieces(self, stream: BinaryIO, *, shard: str) -> Iterator[bytes]:
        """The new shard's bytes, sample by sample; two samples are in memory.

        Raises:
            DataError: While iterating, if the shard is not a tar, holds a sample in pieces, or the transform fails;
                names the ``shard``.
        """
        num_bytes = 0
        for key, sample in _samples(stream, shard):
            for name, data in self._members(key, sample, shard):
                for piece in (member_header(name, len(data)), data, bytes(-len(data) % BLOCK)):
                    num_bytes += len(piece)
                    yield piece
        # Two empty blocks, and padding.
        yield bytes(2 * BLOCK + -(num_bytes + 2 * BLOCK) % RECORD)

    def transform(self, data: bytes, path: str, etl_args: str = "") -> bytes:
        """The whole new shard, for an ETL server, which never sends a part before an error.

        Args:
            data: The shard.
            path: ``BUCKET/NAME``, quoted or not.
            etl_args: Arguments of a request; transforms take none.

        Raises:
            DataError: As `pieces`.
            ValueError: If there are ``etl_args``.
        """
        shard = unquote(path).rpartition("/")[2]
        if etl_args:
            raise ValueError(f"transform '{self.name}' takes no arguments with a request, got '{etl_args}'")
        return b"".join(self.pieces(io.BytesIO(data), shard=shard))

    def _members(self, key: str, sample: Sample, shard: str) -> list[tuple[str, bytes]]:
        where = f"shard '{shard}', key '{key}'"
        try:
            made: object = self.transform_sample(sample)
        except Exception as exc:
            cause = str(exc) if isinstance(exc, DataError) else f"{type(exc).__name__}: {exc}"
            raise DataError(f"{where}: transform '{self.name}' failed: {' '.join(cause.split())}") from exc
        if not isinstance(made, Mapping):
            raise DataError(
                f"{where}: transform '{self.name}' returned {type(made).__name__}, expected a dict of component to "
                "bytes; an empty one leaves the sample out"
            )
        members: dict[str, bytes] = {}
        for component, data in made.items():
            name = f"{key}.{component}"
            if not isinstance(component, str) or split_key(name) != (key, component):
                raise DataError(
                    f"{where}: transform '{self.name}' named a component {component!r}, expected an extension such as "
                    "'jpg' or 'seg.png'"
                )
            if component.lower() != component:
                raise DataError(
                    f"{where}: transform '{self.name}' named a component '{component}', expected lower case, as which "
                    "it is read"
                )
            if not isinstance(data, bytes):
                raise DataError(
                    f"{where}: transform '{self.name}' made component '{component}' of {type(data).__name__}, "
                    "expected bytes"
                )
            members[name] = data
        return list(members.items())


class FunctionTransform(ShardTransform):
    """Applies a function that takes a dict of component to bytes and returns another."""

    def __init__(self, function: Callable[[Sample], Mapping[str, bytes]], *, name: str) -> None:
        self.name = name
        self._function = function

    def transform_sample(self, sample: Sample) -> Mapping[str, bytes]:
        """The function's result."""
        return self._function(sample)


class PetsTransform(ShardTransform):
    """The tutorial's transform: crops photo and trimap to their centre, normalises the photo, stores both as ``.npy``.

    ``image.npy`` replaces ``image.jpg``: float32 [3, crop, crop], ``(pixel / 255 - mean) / std`` with ImageNet's mean
    and deviation. ``trimap.npy`` replaces ``trimap.png``: uint8 [1, crop, crop], the mask's values. The window is that
    of torchvision's ``CenterCrop``; outside a smaller photo, pixels are 0 before they are normalised. Other components
    stay as they are. A sample becomes 1.5 MB, so pack small shards for it (``--max-count 100``).
    """

    name = "pets"

    def __init__(self, *, crop: int = CROP) -> None:
        if crop < 1:
            raise ValueError(f"crop must be positive, got {crop}")
        self.crop = crop

    def transform_sample(self, sample: Sample) -> Mapping[str, bytes]:
        """The sample with its tensors; raises `DataError` if photo or trimap is missing or cannot be decoded."""
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
    """The transform ``pets``, or ``MODULE:NAME``: a function of a sample or a subclass of `ShardTransform`.

    A module that Python does not find otherwise is searched in the current directory.

    Raises:
        ValueError: If ``spec`` is neither, there is no such module or name, or it cannot be called.
    """
    if spec == PetsTransform.name:
        return PetsTransform()
    module_name, mark, name = spec.partition(":")
    if not (module_name and mark and name):
        raise ValueError(f"a transform is 'pets' or MODULE:FUNCTION, such as my_module:crop, got '{spec}'")
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 (sys.path holds strings)
        sys.path.append(here)  # last, so that it hides no other module
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
    """A shard's samples, in order; refuses a sample whose members do not stand together."""
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
                    f"shard '{shard}', key '{key}': its members do not stand together; pack or shuffle it anew"
                )
            seen.add(key)
        if member.component in sample:
            raise DataError(f"shard '{shard}', key '{key}': component '{member.component}' comes twice; pack it anew")
        sample[member.component] = member.read()
    if key is not None:
        yield key, sample


def _decode(data: bytes, mode: str, *, component: str) -> "npt.NDArray[np.uint8]":
    """Pixels, [height, width] or [height, width, 3]."""
    import numpy as np
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            converted: Image.Image = image if image.mode == mode else image.convert(mode)
            return np.asarray(converted, np.uint8)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as exc:
        raise DataError(f"component '{component}' cannot be decoded: {exc}") from exc


def _center_crop(pixels: "npt.NDArray[np.uint8]", crop: int) -> "npt.NDArray[np.uint8]":
    """[crop, crop, ...], 0 where the photo is smaller."""
    import numpy as np

    height, width = pixels.shape[:2]
    cropped = np.zeros((crop, crop, *pixels.shape[2:]), np.uint8)
    rows, to_rows = _center_window(height, crop)
    columns, to_columns = _center_window(width, crop)
    cropped[to_rows, to_columns] = pixels[rows, columns]
    return cropped


def _center_window(size: int, crop: int) -> tuple[slice, slice]:
    """The visible part of ``size`` pixels, and its place in the crop; rounds halves to even, as torchvision does.

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
