"""The options and the interface of all loaders of `bench`, and their batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, cast

from bench.loaders.registry import Recipe
from bench.tools.environment import available_cores

if TYPE_CHECKING:
    from torch import Tensor


Device = Literal["auto", "cpu", "gpu"]


class BenchBatch(TypedDict, total=False):
    """The batch of one step. B is the batch size, or less in a short last batch.

    A loader leaves out the parts that its registry entry does not give (`LoaderEntry.gives`).
    """

    image: "Tensor"
    """float32 [B, 3, crop, crop], ImageNet-normalised; uint8 if the loader does not give ``normalised``."""
    mask: "Tensor"
    """uint8 [B, 1, crop, crop], 0 outside the mask; the segmentation recipe only."""
    label: "Tensor"
    """int64 [B], the class id in ``cls``."""
    key: list[str]
    encoded: "Tensor | list[Any]"
    """The photos' files; the encoded recipe only. uint8 [sum of bytes], one after the other; or, of a loader that hands
    over its own memory, a list of B arrays, uint8 [bytes]."""
    cu_seqlens: "Tensor"
    """int32 [B + 1], where each photo's file begins in a tensor ``encoded``, and the sum; not beside a list."""


def num_rows(batch: BenchBatch) -> int:
    """The number of samples of a batch; it does not matter which parts the batch has."""
    parts = cast("dict[str, Sequence[object]]", batch)
    return len(next(part for name, part in parts.items() if name not in ("encoded", "cu_seqlens")))


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """The options that all loaders of one run share."""

    batch_size: int = 64
    num_threads: int = field(default_factory=available_cores)
    """DALI's threads, or worker processes: one for each core, for every loader."""
    crop: int = 350
    decode: str = "pil"
    """One of `DECODES`; loaders that decode with DALI ignore it."""
    recipe: Recipe = "segmentation"
    photo: str = "image.jpg"
    """A component, or alternatives as graphs take them: ``jpg;jpeg``."""
    mask: str | None = "trimap.png"
    """Likewise, for the segmentation recipe; ``None`` for the others."""
    seed: int = 7
    device: Device = "auto"
    keeps_shards: bool = True
    """Whether a loader that can choose keeps the shards of a bucket on this machine, for the epochs after the first. A
    run of a single epoch gets its first batch sooner if it does not."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_threads", "crop"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if (self.mask is None) != (self.recipe != "segmentation"):
            raise ValueError(f"mask must name a component for the recipe segmentation only, got {self.mask!r}")

    @property
    def delivery_device(self) -> str:
        """The device on which a training step expects its batches: ``cpu`` or ``cuda``, as torch names it."""
        import torch

        if self.device == "gpu" and not torch.cuda.is_available():
            raise ValueError("device='gpu', but torch finds no CUDA device; use 'auto' or 'cpu'")
        return "cuda" if self.device != "cpu" and torch.cuda.is_available() else "cpu"


class BenchLoader(Protocol):
    """An open loader."""

    num_workers: int
    """Worker processes; 0 if threads of this process decode."""
    decode: str
    """The decoder: ``dali``, ``pil`` or ``turbo``; ``none`` for `synthetic`."""
    device: str
    """The device of the batches: ``cpu`` or ``cuda``. If the step runs on another device, the engine copies them."""

    def epoch(self) -> Iterator[BenchBatch]:
        """Start a new epoch, also if the epoch before was left early."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The converted shards of a loader, and the cost of the conversion."""

    url: str
    """The directory."""
    wall_s: float
    num_bytes: int
    """Bytes of the files in the directory."""

    @classmethod
    def of(cls, directory: Path, *, wall_s: float) -> "Prepared":
        """Measure the files in ``directory``, at every depth, but not those that links lead to."""
        files = (path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
        return cls(url=str(directory), wall_s=wall_s, num_bytes=sum(path.stat().st_size for path in files))
