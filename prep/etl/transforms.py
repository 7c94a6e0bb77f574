"""Transform a shard: apply one function to each sample, in order. Keys stay the same.

The output depends only on the shard's bytes, the transform and its libraries: headers hold no time and no owner. A JPEG
decoder of another version may round pixels differently.
"""

import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import unquote

from dali_pipes.errors import DataError
from dali_pipes.formats.names import split_key
from dali_pipes.formats.tar_reader import BLOCK, ArchiveReader
from prep.sources.folders import MASK, PHOTO
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


@dataclass(frozen=True)
class ShardTransform:
    """Applies a function to all samples of a shard. Several threads may use it at a time."""

    name: str
    """The text from which `load_transform` made it."""
    function: Callable[[Sample], Mapping[str, bytes]]
    """Returns the components to write for a sample, in order; an empty mapping leaves the sample out."""

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

        ``path`` is ``BUCKET/NAME``, quoted or not; ``etl_args``, the arguments of a request, must be empty.
        """
        if etl_args:
            raise ValueError(f"transform '{self.name}' takes no arguments with a request, got '{etl_args}'")
        return b"".join(self.pieces(io.BytesIO(data), shard=unquote(path).rpartition("/")[2]))

    def _members(self, key: str, sample: Sample, shard: str) -> dict[str, bytes]:
        """Transform a sample, and check the result; return its files by name."""
        where = f"shard '{shard}', key '{key}': transform '{self.name}'"
        try:
            made: object = self.function(sample)
        except Exception as exc:
            cause = str(exc) if isinstance(exc, DataError) else f"{type(exc).__name__}: {exc}"
            raise DataError(f"{where} failed: {' '.join(cause.split())}") from exc
        if not isinstance(made, Mapping):
            raise DataError(
                f"{where} returned {type(made).__name__}, expected a dict of component to bytes; an empty one leaves "
                "the sample out"
            )
        for component, data in made.items():
            is_name = isinstance(component, str) and split_key(f"{key}.{component}") == (key, component)
            if not is_name or component.lower() != component:
                raise DataError(
                    f"{where} named a component {component!r}, expected an extension in lower case, such as 'jpg' or "
                    "'seg.png'"
                )
            if not isinstance(data, bytes):
                raise DataError(f"{where} made component '{component}' of {type(data).__name__}, expected bytes")
        return {f"{key}.{component}": data for component, data in made.items()}


def pets(sample: Sample, *, crop: int = CROP) -> Sample:
    """The tutorial's transform: crops photo and trimap to their centre, normalises the photo, stores both as ``.npy``.

    ``image.npy`` replaces ``image.jpg``: float32 [3, crop, crop], ``(pixel / 255 - mean) / std`` with ImageNet's mean
    and standard deviation. ``trimap.npy`` replaces ``trimap.png``: uint8 [1, crop, crop], the mask's values. The crop
    is that of torchvision's ``CenterCrop``; outside a smaller photo, pixels are 0 before they are normalised. Other
    components stay as they are. A sample grows to 1.5 MB, so pack small shards for it (``--max-count 100``).

    Raises:
        DataError: If photo or trimap is missing or cannot be decoded.
    """
    import numpy as np

    if lacking := next((name for name in (PHOTO, MASK) if name not in sample), None):
        raise DataError(f"no component '{lacking}' (found: {', '.join(sample)})")
    made: Sample = {}
    for component, data in sample.items():
        if component == PHOTO:
            pixels = _center_crop(data, "RGB", crop, component=PHOTO).astype(np.float32)
            pixels /= np.float32(255)
            pixels -= np.array(MEAN, np.float32)
            pixels /= np.array(STD, np.float32)
            made["image.npy"] = _as_npy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
        elif component == MASK:
            made["trimap.npy"] = _as_npy(_center_crop(data, "L", crop, component=MASK)[None])
        else:
            made[component] = data
    return made


def load_transform(spec: str) -> ShardTransform:
    """Return the transform ``pets``, or ``MODULE:NAME``: a function of a sample, or a `ShardTransform`.

    The module may also lie in the current directory, which is searched last.

    Raises:
        ValueError: If ``spec`` has another form, the module or the name does not exist, or it cannot be called.
    """
    if spec == "pets":
        return ShardTransform(spec, pets)
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
    if isinstance(found, ShardTransform):
        return found
    if not callable(found):
        raise ValueError(f"transform '{spec}' is {type(found).__name__}, expected a function of a sample")
    return ShardTransform(spec, found)


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


def _center_crop(data: bytes, mode: str, crop: int, *, component: str) -> "npt.NDArray[np.uint8]":
    """Decode a photo and cut its centre, [crop, crop] or [crop, crop, 3]; 0 where the photo is smaller."""
    import numpy as np
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            left, top = (_crop_start(size, crop) for size in image.size)
            converted: Image.Image = image if image.mode == mode else image.convert(mode)
            return np.asarray(converted.crop((left, top, left + crop, top + crop)), np.uint8)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as exc:
        raise DataError(f"component '{component}' cannot be decoded: {exc}") from exc


def _crop_start(size: int, crop: int) -> int:
    """The first of ``crop`` central pixels, negative if there are fewer; rounds halves to even, as torchvision.

    >>> _crop_start(355, 350), _crop_start(347, 350)
    (2, -1)
    """
    return round((size - crop) / 2) if size >= crop else -((crop - size) // 2)


def _as_npy(array: "npt.NDArray[Any]") -> bytes:
    import numpy as np

    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version=(1, 0), allow_pickle=False)
    return stream.getvalue()
