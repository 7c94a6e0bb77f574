"""What all loaders of `bench` share: the recipes' names, options, batches, and the object that yields epochs."""

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

from bench.tools.environment import available_cores

if TYPE_CHECKING:
    from torch import Tensor

Device = Literal["auto", "cpu", "gpu"]
Recipe = Literal["segmentation", "classification", "evaluation", "encoded"]
"""What the loaders of a run make of a sample: see `bench.loaders.recipe`."""

Dtype = Literal["float32", "uint8"]

DECODES = ("pil", "turbo", "nvimgcodec")
"""The decoders of loaders without DALI: Pillow; libjpeg-turbo through ``torchvision.io``; and NVIDIA's nvImageCodec,
which comes with DALI: on the CPU it has libjpeg-turbo decode only the crop of a photo, as DALI does (whole masks, by
torchvision)."""
ALL_PARTS = frozenset({"image", "mask", "label", "key", "normalised", "encoded"})
"""The parts of a `BenchBatch`, and ``normalised`` for normalised photos."""
PARTS: Mapping[str, frozenset[str]] = {
    "segmentation": ALL_PARTS - {"encoded"},
    "classification": ALL_PARTS - {"encoded", "mask"},
    "evaluation": ALL_PARTS - {"encoded", "mask"},
    "encoded": frozenset({"encoded", "label", "key"}),
}
"""Recipe -> the parts of its batches."""
CROPS: Mapping[str, int] = {"segmentation": 350, "classification": 224, "evaluation": 224, "encoded": 224}
"""Recipe -> the default height and width of its image, in pixels."""


class BenchBatch(TypedDict, total=False):
    """The batch of one step. B is the batch size, or less in a short last batch.

    A loader leaves out the parts that its registry entry does not give (`LoaderEntry.gives`).
    """

    image: "Tensor"
    """float32 [B, 3, crop, crop], ImageNet-normalised; uint8 if the run asks for that, or the loader gives no other."""
    mask: "Tensor"
    """uint8 [B, 1, crop, crop], 0 outside the mask; the segmentation recipe only."""
    label: "Tensor"
    """int64 [B], the class id in ``cls``."""
    key: list[str]
    encoded: "Tensor"
    """uint8 [sum of bytes], the photos' files, one after the other; the encoded recipe only."""
    cu_seqlens: "Tensor"
    """int32 [B + 1], where each photo's file begins in ``encoded``, and the sum."""


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
    dtype: Dtype = "float32"
    """Of images. ``uint8``: pixels as they are, which the model normalises."""
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
    def resize(self) -> int:
        """The shorter side to which the evaluation recipe resizes a photo: 256 for a crop of 224."""
        return self.crop * 256 // 224

    @property
    def delivery_device(self) -> str:
        """The device on which a training step expects its batches: ``cpu`` or ``cuda``, as torch names it."""
        import torch

        if self.device == "gpu" and not torch.cuda.is_available():
            raise ValueError("device='gpu', but torch finds no CUDA device; use 'auto' or 'cpu'")
        return "cuda" if self.device != "cpu" and torch.cuda.is_available() else "cpu"


class BenchLoader:
    """An open loader: a new epoch ends the one before, if that was left early.

    Args:
        start: Starts an epoch and returns its batches, on the options' device. If they have a method ``close``, as
            generators do, it ends an epoch that was left early.
        options: The run's options.
        decode: ``dali``, ``pil`` or ``turbo``, ``none`` for `synthetic`; by default what the options say.
        num_workers: Worker processes; 0 if threads of this process decode.
    """

    def __init__(
        self,
        start: Callable[[], Iterator[BenchBatch]],
        *,
        options: LoaderOptions,
        decode: str | None = None,
        num_workers: int = 0,
    ) -> None:
        self.num_workers, self.decode = num_workers, decode or options.decode
        self.device = options.delivery_device
        self._start: Callable[[], Iterator[BenchBatch]] | None = start
        self._epoch: Any = None

    def epoch(self) -> Iterator[BenchBatch]:
        """Start a new epoch."""
        assert self._start is not None, "the loader is open"
        self._leave_epoch()
        self._epoch = self._start()
        return cast("Iterator[BenchBatch]", self._epoch)

    def close(self) -> None:
        """Let go of everything, even if a caller still holds an epoch. Can be called twice."""
        self._leave_epoch()
        self._start = None

    def _leave_epoch(self) -> None:
        if isinstance(self._epoch, Generator):
            # Since Python 3.12, close() leaves a generator its variables, and with them a pipeline and its workers.
            with contextlib.suppress(GeneratorExit, StopIteration):
                self._epoch.throw(GeneratorExit)
        elif hasattr(self._epoch, "close"):
            self._epoch.close()
        self._epoch = None
