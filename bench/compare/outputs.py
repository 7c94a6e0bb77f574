"""Compare one epoch of a loader with Pillow and torchvision, sample by sample, before anything is timed.

Parts that a loader does not give (`LoaderEntry.gives`) are not compared, and are named in the result.

The reference reads each sample's bytes again, decodes them and transforms them with torchvision; nothing but the place
of each sample is kept, so memory does not grow with the pictures. Shards in a bucket are copied to a temporary
directory for as long as the comparison takes.
"""

import contextlib
import functools
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from bench.loaders.protocol import BenchBatch, LoaderOptions, num_rows
from bench.loaders.registry import ALL_PARTS
from bench.loaders.transforms import IMAGENET_MEAN, IMAGENET_STD, SampleDecoder, TensorSample
from bench.tools.environment import available_cores
from dali_pipes.errors import DataError, PipesError
from dali_pipes.formats.tar_reader import ArchiveReader
from dali_pipes.progress import bar, progress

if TYPE_CHECKING:
    from torch import Tensor

    from dali_pipes.store.shard_set import ShardSet


_TENSORS: tuple[Literal["image", "trimap", "label"], ...] = ("image", "trimap", "label")


class OutputError(PipesError, AssertionError):
    """A loader does not yield what the shards hold; names loader, key, what differs and by how much."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far a normalised photo may be from the reference: one level of 255 is 0.017 there."""

    max_abs: float
    """Of any one value."""
    mean_abs: float
    """Of one sample's values on average."""


SAME_PIXELS = Tolerance(max_abs=1e-6, mean_abs=1e-6)
"""The same pixels, normalised in another order: a float32 near 2.6 has steps of 2.4e-7."""

TURBO = Tolerance(max_abs=1e-6, mean_abs=1e-6)
"""torchvision 0.29 against Pillow 13, measured: 0 of 255 levels, mean 0, on the 292 photos of an Oxford-IIIT Pet sample
(JPEG 4:4:4 and 4:2:0, progressive, one RGBA PNG) and on JPEGs of all subsamplings, gray and CMYK. Both carry
libjpeg-turbo and both use its accurate transform and smooth upsampling; a wheel built otherwise would fail here."""

GPU = Tolerance(max_abs=4.8, mean_abs=0.07)
"""Not measured, and so wide: nvJPEG repeats chroma where the CPU's decoder interpolates it, from which a level or two
are to be expected on average, and up to a hundred at the edge of two colours. Any single value passes, four levels on
average do not. ``bench gpu --scenarios parity`` measures what should stand here."""


def tolerance_of(*, decode: str, device: str) -> Tolerance:
    """The tolerance for what a loader decodes with, and where."""
    if decode == "turbo":
        return TURBO
    return GPU if decode == "dali" and device == "cuda" else SAME_PIXELS


def assert_images_close(
    actual: "Tensor", expected: "Tensor", *, tolerance: Tolerance, where: str
) -> tuple[float, float]:
    """Check two photos of one shape; the one place where closeness is defined.

    Returns:
        The largest and the mean absolute difference.

    Raises:
        OutputError: If shape or dtype differ, or the difference is above ``tolerance`` (or not a number).
    """
    _assert_alike(actual, expected, what="photo", where=where)
    difference = (actual.float() - expected.float()).abs()
    largest, mean = float(difference.max()), float(difference.mean())
    # Written so that NaN fails.
    if not (largest <= tolerance.max_abs and mean <= tolerance.mean_abs):
        at = _position(difference, int(difference.argmax()))
        raise OutputError(
            f"{where}: photo differs from Pillow and torchvision by up to {largest:.3g} (mean {mean:.3g}), expected at "
            f"most {tolerance.max_abs:g} (mean {tolerance.mean_abs:g}); the largest at {at}: "
            f"expected {float(expected[at]):.6g}, found {float(actual[at]):.6g}"
        )
    return largest, mean


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of comparing one loader's epoch. A difference above the tolerance is an error instead."""

    loader: str
    num_samples: int
    max_photo_difference: float | None
    """``None`` where photos are not given."""
    mean_photo_difference: float | None
    max_tolerance: float
    mean_tolerance: float
    not_compared: tuple[str, ...] = ()
    """The parts that the loader does not give."""

    def to_json(self) -> dict[str, Any]:
        """The fields, for the report."""
        return asdict(self)


@dataclass(frozen=True)
class _Place:
    shard: int
    offset: int
    size: int


class Reference:
    """What the shards hold: keys, and for each the tensors that Pillow and torchvision make of it."""

    def __init__(self, paths: Sequence[Path], *, names: Sequence[str], options: LoaderOptions) -> None:
        self._paths = paths
        self._decode = SampleDecoder(LoaderOptions(crop=options.crop, photo=options.photo, mask=options.mask))
        self._places: dict[str, dict[str, _Place]] = {}
        for row, name in enumerate(names):
            self._add_shard(row, name)

    @classmethod
    @contextlib.contextmanager
    def open(cls, shards: "ShardSet", *, options: LoaderOptions) -> Iterator["Reference"]:
        """The reference for ``shards``.

        Raises:
            DataError: If a shard is no whole tar, or a key comes twice in the shards: samples are matched by key.
        """
        with contextlib.ExitStack() as stack:
            if shards.store.directory is not None:
                paths = [Path(shards.store.locate(name)) for name in shards.names]
            else:
                copies = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dali-pipes-compare-")))
                paths = []
                for row, name in enumerate(progress(shards.names, what="copy shards", unit="shard")):
                    path = copies / f"{row:06d}.tar"
                    with shards.store.open(name) as source, path.open("wb") as target:
                        shutil.copyfileobj(source, target, 1 << 20)
                    paths.append(path)
            yield cls(paths, names=[shards.store.locate(name) for name in shards.names], options=options)

    @property
    def keys(self) -> set[str]:
        return set(self._places)

    def sample(self, key: str) -> TensorSample:
        """The reference for one key; its bytes are read and decoded anew each time."""
        members: dict[str, Any] = {"__key__": key}
        for component, place in self._places[key].items():
            with self._paths[place.shard].open("rb") as stream:
                stream.seek(place.offset)
                members[component] = stream.read(place.size)
        return self._decode(members)

    def _add_shard(self, row: int, name: str) -> None:
        current: str | None = None
        with self._paths[row].open("rb") as stream:
            for member in ArchiveReader(stream, shard=name):
                if member.key != current and member.key in self._places:
                    raise DataError(
                        f"key '{member.key}' comes twice in the shards; outputs are compared by key, so keys must be "
                        "unique"
                    )
                current = member.key
                place = _Place(row, member.offset, member.size)
                self._places.setdefault(member.key, {}).setdefault(member.component, place)


def compare_epoch(
    batches: Iterable[BenchBatch],
    reference: Reference,
    *,
    loader: str,
    tolerance: Tolerance,
    gives: frozenset[str] = ALL_PARTS,
    show: str | None = None,
) -> Comparison:
    """Compare one epoch with the reference: every key exactly once, labels and masks equal, photos close.

    Args:
        batches: One epoch.
        reference: What is expected.
        loader: For messages.
        tolerance: For photos.
        gives: The parts that are compared, those that the loader gives. Photos that it does not normalise are
            normalised here. Of a loader that gives nothing, rows are counted.
        show: The label of a progress bar; none is drawn without.

    Raises:
        OutputError: At the first difference.
    """
    expected_keys = reference.keys
    seen: set[str] = set()
    num_samples = 0
    largest, total = 0.0, 0.0
    check = functools.partial(
        _check_sample, reference=reference, loader=loader, tolerance=tolerance, is_normalised="normalised" in gives
    )
    with (
        bar(what=show or "", total=len(expected_keys), unit="sample", shown=show is not None) as drawn,
        ThreadPoolExecutor(available_cores(), thread_name_prefix="compare") as pool,
    ):
        for batch in batches:
            _check_batch(batch, loader=loader, gives=gives)
            num_samples += num_rows(batch)
            if not gives:
                drawn.update(num_rows(batch))
                continue
            for key in batch["key"]:
                if key in seen:
                    raise OutputError(f"loader '{loader}', key '{key}': comes twice in one epoch")
                if key not in expected_keys:
                    raise OutputError(f"loader '{loader}', key '{key}': is not in the shards")
                seen.add(key)
            for sample_largest, sample_mean in pool.map(check, batch["key"], *_columns(batch, gives)):
                largest, total = max(largest, sample_largest), total + sample_mean
                drawn.update(1)
    missing = sorted(expected_keys - seen) if gives else []
    if missing:
        named = ", ".join(f"'{key}'" for key in missing[:3])
        raise OutputError(
            f"loader '{loader}': {len(seen)} of {len(expected_keys)} keys came in one epoch; missing: {named}"
            f"{', ...' if len(missing) > 3 else ''}"
        )
    if num_samples != len(expected_keys):
        raise OutputError(f"loader '{loader}': {num_samples} samples came in one epoch, expected {len(expected_keys)}")
    has_photos = "image" in gives
    return Comparison(
        loader=loader,
        num_samples=num_samples,
        max_photo_difference=largest if has_photos else None,
        mean_photo_difference=total / max(num_samples, 1) if has_photos else None,
        max_tolerance=tolerance.max_abs,
        mean_tolerance=tolerance.mean_abs,
        not_compared=tuple(sorted(ALL_PARTS - gives)),
    )


def _columns(batch: BenchBatch, gives: frozenset[str]) -> tuple[Iterable[Any], Iterable[Any], Iterable[Any]]:
    """Photos, masks and labels, row by row; ``None`` in place of what is not given."""
    absent = [None] * len(batch["key"])
    return (
        # A batch on the GPU is brought over once.
        batch["image"].cpu() if "image" in gives else absent,
        batch["trimap"].cpu() if "trimap" in gives else absent,
        batch["label"].tolist() if "label" in gives else absent,
    )


def _check_batch(batch: BenchBatch, *, loader: str, gives: frozenset[str]) -> None:
    wanted = (gives or ALL_PARTS) - {"normalised"}
    if wanted - batch.keys():
        raise OutputError(f"loader '{loader}': a batch must have {_named(wanted)}, found {_named(batch)}")
    if not gives:
        return
    size = len(batch["key"])
    lengths = {name: len(batch[name]) for name in _TENSORS if name in gives}
    wrong = {name: length for name, length in lengths.items() if length != size}
    if wrong:
        raise OutputError(f"loader '{loader}': a batch of {size} keys has {wrong} rows")
    if "label" in gives and (batch["label"].dtype != torch.int64 or batch["label"].ndim != 1):
        found = f"{batch['label'].dtype} {list(batch['label'].shape)}"
        raise OutputError(f"loader '{loader}': labels must be int64 [{size}], found {found}")


def _named(parts: Iterable[str]) -> str:
    return ", ".join(sorted(parts)) or "nothing"


def _check_sample(
    key: str,
    image: "Tensor | None",
    trimap: "Tensor | None",
    label: int | None,
    *,
    reference: Reference,
    loader: str,
    tolerance: Tolerance,
    is_normalised: bool,
) -> tuple[float, float]:
    where = f"loader '{loader}', key '{key}'"
    expected = reference.sample(key)
    if label is not None and label != expected["label"]:
        raise OutputError(f"{where}: label differs: expected {expected['label']}, found {label}")
    if trimap is not None:
        _check_mask(trimap, expected["trimap"], where=where)
    if image is None:
        return 0.0, 0.0
    if not is_normalised:
        image = _normalised(image, where=where)
    return assert_images_close(image, expected["image"], tolerance=tolerance, where=where)


def _check_mask(trimap: "Tensor", expected: "Tensor", *, where: str) -> None:
    _assert_alike(trimap, expected, what="mask", where=where)
    unequal = trimap != expected
    if unequal.any():
        at = _position(unequal, int(unequal.int().argmax()))
        raise OutputError(
            f"{where}: {int(unequal.sum())} mask pixels differ, expected 0; the first at {at}: "
            f"expected {int(expected[at])}, found {int(trimap[at])}"
        )


def _normalised(image: "Tensor", *, where: str) -> "Tensor":
    """A photo as it is decoded, uint8 [3, crop, crop], normalised as the reference does."""
    if image.dtype != torch.uint8:
        raise OutputError(f"{where}: a photo that is not normalised must be torch.uint8, found {image.dtype}")
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    return (image.float() / 255 - mean) / std


def _assert_alike(actual: "Tensor", expected: "Tensor", *, what: str, where: str) -> None:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise OutputError(
            f"{where}: {what} must be {expected.dtype} {list(expected.shape)}, "
            f"found {actual.dtype} {list(actual.shape)}"
        )


def _position(values: "Tensor", flat: int) -> tuple[int, ...]:
    return tuple(int(index) for index in torch.unravel_index(torch.tensor(flat), values.shape))
