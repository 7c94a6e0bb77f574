"""Compare one epoch of a loader with Pillow and torchvision, sample by sample, before anything is timed.

Parts that a loader does not give (`LoaderEntry.gives`) are not compared, and are named in the result. The reference
keeps only the place of each sample, so memory does not grow with the photos. Shards in a bucket are copied to a
temporary directory for as long as the comparison takes.
"""

import contextlib
import functools
import itertools
import shutil
import signal
import tempfile
from collections.abc import Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.compare.data import DataSets
from bench.compare.settings import TurnSetting
from bench.engine.scenario import failure_text
from bench.loaders.encoded import shard_urls
from bench.loaders.protocol import PARTS, BenchBatch, LoaderOptions, Recipe, num_rows
from bench.loaders.registry import LOADERS, LoaderSpec, is_peer, open_loader
from bench.loaders.transforms import IMAGENET_MEAN, IMAGENET_STD, SampleDecoder, TensorSample
from bench.tools.environment import available_cores
from dali_pipes.errors import DataError, PipesError, shown
from dali_pipes.formats.tar_reader import ArchiveReader
from dali_pipes.progress import bar, progress

if TYPE_CHECKING:
    from dali_pipes.store.shard_set import ShardSet


class OutputError(PipesError):
    """A loader's samples differ from the shards; the text names loader, key, the differing part and the difference."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The allowed differences of a normalised photo from the reference. One grey level of 255 is 0.017."""

    max_abs: float
    mean_abs: float
    """The largest mean difference over the values of one sample."""


SAME_PIXELS = Tolerance(max_abs=1e-6, mean_abs=1e-6)
"""The same pixels, normalised in another order: a float32 near 2.6 has steps of 2.4e-7.

This holds for turbo, too: torchvision 0.29 and Pillow 13 gave the same levels of the 292 photos of an Oxford-IIIT Pet
sample, and of JPEGs of all subsamplings, gray and CMYK. A wheel that was built with another libjpeg would fail here."""

GPU = Tolerance(max_abs=4.8, mean_abs=0.07)
"""Not measured, so wide: nvJPEG repeats chroma where the CPU's decoder interpolates it. Any single value passes, and
four levels on average do not. ``bench gpu --scenarios parity`` measures what should stand here."""


RESIZED = Tolerance(max_abs=0.8, mean_abs=0.01)
"""The recipes that resize, for loaders that do not resize with Pillow.

Measured on the 292 photos of an Oxford-IIIT Pet sample: DALI's filter differs by 0.25 levels of 255 on average over the
values of the worst photo, and by up to 21 at its edge; torchvision's resampling of tensors by one level. A crop that is
one row off differs by at least 0.58 levels on average; the limit is 0.57."""


def tolerance_of(*, decode: str, device: str, recipe: Recipe = "segmentation") -> Tolerance:
    """Return the tolerance for a decoder, the device on which it decodes, and the recipe."""
    if decode == "dali" and device == "cuda":
        return GPU
    return RESIZED if recipe in ("classification", "evaluation") and decode != "pil" else SAME_PIXELS


@dataclass(frozen=True, kw_only=True)
class Comparison:
    loader: str
    num_samples: int
    max_photo_difference: float | None
    """``None`` where photos are not given."""
    mean_photo_difference: float | None
    max_tolerance: float
    mean_tolerance: float
    not_compared: tuple[str, ...] = ()


class Reference:
    """The samples of the shards: each key, and the tensors that Pillow and torchvision make from its photo and mask."""

    def __init__(self, paths: Sequence[Path], *, names: Sequence[str], options: LoaderOptions) -> None:
        self.recipe = options.recipe
        self._decode = SampleDecoder(
            LoaderOptions(recipe=options.recipe, crop=options.crop, photo=options.photo, mask=options.mask)
        )
        # Key -> component -> path, offset, size.
        self._places: dict[str, dict[str, tuple[Path, int, int]]] = {}
        for path, name in zip(paths, names, strict=True):
            current: str | None = None
            with path.open("rb") as stream:
                for member in ArchiveReader(stream, shard=name):
                    if member.key != current and member.key in self._places:
                        raise DataError(
                            f"key '{member.key}' comes twice in the shards; outputs are compared by key, so keys must "
                            "be unique"
                        )
                    current = member.key
                    components = self._places.setdefault(member.key, {})
                    components.setdefault(member.component, (path, member.offset, member.size))

    @classmethod
    @contextlib.contextmanager
    def open(cls, shards: "ShardSet", *, options: LoaderOptions) -> Iterator["Reference"]:
        """Open the reference of shards, wherever they lie."""
        names = shard_urls(shards)
        with tempfile.TemporaryDirectory(prefix="dali-pipes-compare-") as copies:
            paths = [Path(name) for name in names]
            if shards.store.directory is None:
                paths = [Path(copies) / f"{row:06d}.tar" for row in range(len(names))]
                for path, name in zip(paths, progress(shards.names, what="copy shards", unit="shard"), strict=True):
                    with shards.store.open(name) as source, path.open("wb") as target:
                        shutil.copyfileobj(source, target, 1 << 20)
            yield cls(paths, names=names, options=options)

    @property
    def keys(self) -> Set[str]:
        return self._places.keys()

    def sample(self, key: str) -> TensorSample:
        """Read and decode one sample; nothing is kept."""
        members: dict[str, Any] = {"__key__": key}
        for component, (path, offset, size) in self._places[key].items():
            with path.open("rb") as stream:
                stream.seek(offset)
                members[component] = stream.read(size)
        return self._decode(members)


def compare_epoch(
    batches: Iterable[BenchBatch],
    reference: Reference,
    *,
    loader: str,
    tolerance: Tolerance,
    gives: frozenset[str] | None = None,
    show: str | None = None,
) -> Comparison:
    """Compare one epoch with the reference: every key exactly once, labels and masks equal, photos close.

    Args:
        batches: One epoch.
        reference: What is expected.
        loader: For messages.
        tolerance: For photos.
        gives: The parts that the loader gives; only these are compared. Photos that are not ``normalised`` are
            normalised here. If it is empty, only rows are counted. ``None``: all parts of the recipe.
        show: The label of a progress bar; ``None``: no bar.

    Raises:
        OutputError: At the first difference.
    """
    parts, where = PARTS[reference.recipe], f"loader '{loader}'"
    gives = parts if gives is None else gives & parts
    check = functools.partial(_photo_difference, reference=reference, loader=loader, tolerance=tolerance, gives=gives)
    seen: set[str] = set()
    num_samples, largest, total = 0, 0.0, 0.0
    expected = len(reference.keys)
    with (
        bar(what=show or "", total=expected, unit="sample", shown=show is not None) as drawn,
        ThreadPoolExecutor(available_cores(), thread_name_prefix="compare") as pool,
    ):
        for batch in batches:
            num_samples += num_rows(batch)
            drawn.update(num_rows(batch))
            rows = _rows_of(batch, where=where, wanted=(gives | {"key"}) - {"normalised"}) if gives else []
            for key in (row["key"] for row in rows):
                if key in seen or key not in reference.keys:
                    wrong = "comes twice in one epoch" if key in seen else "is not in the shards"
                    raise OutputError(f"{where}, key '{key}': {wrong}")
                seen.add(key)
            for sample_largest, sample_mean in pool.map(check, rows):
                largest, total = max(largest, sample_largest), total + sample_mean
    if gives and (missing := sorted(reference.keys - seen)):
        raise OutputError(f"{where}: {len(seen)} of {expected} keys came in one epoch; missing: {shown(missing)}")
    if num_samples != expected:
        raise OutputError(f"{where}: {num_samples} samples came in one epoch, expected {expected}")
    has_photos = "image" in gives
    return Comparison(
        loader=loader,
        num_samples=num_samples,
        max_photo_difference=largest if has_photos else None,
        mean_photo_difference=total / max(num_samples, 1) if has_photos else None,
        max_tolerance=tolerance.max_abs,
        mean_tolerance=tolerance.mean_abs,
        not_compared=tuple(sorted(parts - gives)),
    )


def _rows_of(batch: BenchBatch, *, where: str, wanted: frozenset[str]) -> list[dict[str, Any]]:
    """The samples of a batch, each with the parts that are wanted, on the CPU."""
    if wanted - batch.keys():
        raise OutputError(f"{where}: a batch must have {', '.join(sorted(wanted))}, found {', '.join(sorted(batch))}")
    columns: dict[str, Any] = {
        name: part.cpu() if isinstance(part, torch.Tensor) else part for name, part in batch.items() if name in wanted
    }
    if "encoded" in wanted:
        ends = batch["cu_seqlens"].tolist()
        columns["encoded"] = [columns["encoded"][start:end] for start, end in itertools.pairwise(ends)]
    size = len(batch["key"])
    if wrong := {name: len(column) for name, column in columns.items() if len(column) != size}:
        raise OutputError(f"{where}: a batch of {size} keys has {wrong} rows")
    if "label" in wanted and (columns["label"].dtype != torch.int64 or columns["label"].ndim != 1):
        found = f"{columns['label'].dtype} {list(columns['label'].shape)}"
        raise OutputError(f"{where}: labels must be int64 [{size}], found {found}")
    return [{name: column[row] for name, column in columns.items()} for row in range(size)]


def _photo_difference(
    row: dict[str, Any], *, reference: Reference, loader: str, tolerance: Tolerance, gives: frozenset[str]
) -> tuple[float, float]:
    """Compare one sample; return the largest and the mean absolute difference of its photo, 0 without one."""
    where = f"loader '{loader}', key '{row['key']}'"
    expected: Any = reference.sample(row["key"])
    if "label" in row and int(row["label"]) != expected["label"]:
        raise OutputError(f"{where}: label differs: expected {expected['label']}, found {int(row['label'])}")
    if "encoded" in row and not torch.equal(row["encoded"], expected["encoded"]):
        raise OutputError(f"{where}: the photo's file differs from the one in the shard")
    if "image" in row and "normalised" not in gives and row["image"].dtype == torch.uint8:
        mean_level, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
        row = {**row, "image": (row["image"].float() / 255 - mean_level) / std}
    elif "image" in row and "normalised" not in gives:
        raise OutputError(f"{where}: an image that is not normalised must be torch.uint8, found {row['image'].dtype}")
    for name in row.keys() & {"image", "mask"}:
        found, wanted = ((values.dtype, list(values.shape)) for values in (row[name], expected[name]))
        if found != wanted:
            raise OutputError(f"{where}: {name} must be {wanted[0]} {wanted[1]}, found {found[0]} {found[1]}")
    if "mask" in row and (num_unequal := int((row["mask"] != expected["mask"]).sum())):
        raise OutputError(f"{where}: {num_unequal} mask pixels differ, expected 0")
    if "image" not in row:
        return 0.0, 0.0
    difference = (row["image"] - expected["image"]).abs()
    largest, mean = float(difference.max()), float(difference.mean())
    # Written so that NaN fails.
    if not (largest <= tolerance.max_abs and mean <= tolerance.mean_abs):
        raise OutputError(
            f"{where}: photo differs from Pillow and torchvision by up to {largest:.3g} (mean {mean:.3g}), expected at "
            f"most {tolerance.max_abs:g} (mean {tolerance.mean_abs:g})"
        )
    return largest, mean


def compare_outputs(
    data: DataSets,
    specs: Sequence[LoaderSpec],
    settings: Sequence[TurnSetting],
    *,
    options: LoaderOptions,
    timeout_s: float,
    failed: dict[LoaderSpec, str],
) -> dict[tuple[LoaderSpec, TurnSetting], Comparison]:
    """Compare the outputs of each loader for each setting.

    Each loader is compared once for each data set and crop: threads, batch size, ranks and latency do not change what a
    sample becomes. A peer that fails is left out and added to ``failed``, with its error; unless all loaders fail.
    """
    compared: dict[tuple[object, ...], Comparison] = {}
    found: dict[tuple[LoaderSpec, TurnSetting], Comparison] = {}
    for setting in settings:
        shards = data.shards(setting)
        kind = (shards.url, tuple(shards.names), setting.crop)
        missing = [spec for spec in specs if spec not in failed and (spec, *kind) not in compared]
        shared, alone = replace(options, crop=setting.crop), replace(setting, ranks=1)
        with Reference.open(shards, options=shared) if missing else contextlib.nullcontext() as reference:
            for spec in missing:
                assert reference is not None
                try:
                    (prepared,) = data.prepared(spec.name, alone)
                    with (
                        _limited(timeout_s, what=f"loader '{spec}' ({alone})"),
                        open_loader(spec.name, shards, options=spec.apply(shared), prepared=prepared) as loader,
                    ):
                        compared[spec, *kind] = compare_epoch(
                            loader.epoch(),
                            reference,
                            loader=str(spec),
                            tolerance=tolerance_of(decode=loader.decode, device=loader.device, recipe=shared.recipe),
                            gives=LOADERS[spec.name].gives - ({"normalised"} if shared.dtype == "uint8" else set()),
                            show=f"compare {spec}",
                        )
                except Exception as exc:
                    if not is_peer(spec.name) or len(failed) + 1 == len(specs):
                        raise
                    failed[spec] = failure_text(exc)
        found |= {(spec, setting): compared[spec, *kind] for spec in specs if spec not in failed}
    return {key: comparison for key, comparison in found.items() if key[0] not in failed}


@contextlib.contextmanager
def _limited(timeout_s: float, *, what: str) -> Iterator[None]:
    """Interrupt this process if it hangs, as Ctrl-C would."""

    def late(signum: int, frame: object) -> None:
        raise PipesError(
            f"the outputs of {what} were not compared within {timeout_s:g} s: it hangs or needs more time; raise "
            "--timeout-s, or leave the loader out"
        )

    previous = signal.signal(signal.SIGALRM, late)
    # The timer repeats, because closing the loader may hang, too.
    earlier = signal.setitimer(signal.ITIMER_REAL, timeout_s, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *earlier)
        signal.signal(signal.SIGALRM, previous)
