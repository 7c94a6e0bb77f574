"""Shards in, batches out: every loader that can be timed, in one registry.

A loader's module has one function, ``open_loader(shards, *, options)``, a context manager that yields a `Loader`. It is
imported when the loader is opened, so that the registry costs nothing and a missing library hurts only its own loader.
"""

import contextlib
import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol, TypedDict, cast, get_args

if TYPE_CHECKING:
    from torch import Tensor

    from prep.urls import ShardSet

__all__ = ["DECODES", "LOADERS", "Batch", "Loader", "LoaderOptions", "LoaderSpec", "available_cores", "open_loader"]

LOADERS = {
    "dali": "bench.loaders.dali",
    "memory": "bench.loaders.memory",
    "webloader": "bench.loaders.webloader",
    "webloader-tutorial": "bench.loaders.webloader_tutorial",
}
"""Name to module."""

DECODES = ("pil", "turbo")
"""What the loaders without DALI decode with: Pillow, or libjpeg-turbo and libpng through ``torchvision.io``."""

Device = Literal["auto", "cpu", "gpu"]


def available_cores() -> int:
    """The cores that this process may use, which is fewer than the machine has under ``taskset`` or Slurm."""
    return len(os.sched_getaffinity(0))


class Batch(TypedDict):
    """What one step consumes. B is the batch size, and less in a short last batch."""

    image: "Tensor"
    """float32 [B, 3, crop, crop], ImageNet-normalised."""
    trimap: "Tensor"
    """uint8 [B, 1, crop, crop], 0 where the crop reaches past the mask."""
    label: "Tensor"
    """int64 [B], the class id as ``cls`` holds it."""
    key: list[str]


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """What all loaders of one run share."""

    batch_size: int = 64
    num_threads: int = field(default_factory=available_cores)
    """DALI's threads, or worker processes: one a core for everybody."""
    crop: int = 350
    decode: str = "pil"
    """One of `DECODES`; DALI takes no notice."""
    photo: str = "image.jpg"
    mask: str = "trimap.png"
    seed: int = 7
    device: Device = "auto"

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_threads", "crop"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.decode not in DECODES:
            raise ValueError(f"decode must be one of {', '.join(DECODES)}, got '{self.decode}'")
        if self.device not in get_args(Device):
            raise ValueError(f"device must be one of {', '.join(get_args(Device))}, got '{self.device}'")


@dataclass(frozen=True, kw_only=True)
class LoaderSpec:
    """A loader as a command names it: ``dali``, or with a decoder of its own, ``webloader:turbo``."""

    name: str
    decode: str | None = None

    @classmethod
    def parse(cls, text: str) -> "LoaderSpec":
        """Read ``NAME`` or ``NAME:DECODE``.

        Raises:
            ValueError: If there is no such loader or decoder, or the loader decodes with DALI and takes no other.

        >>> LoaderSpec.parse("webloader:turbo")
        LoaderSpec(name='webloader', decode='turbo')
        """
        name, colon, decode = text.partition(":")
        if name not in LOADERS:
            raise ValueError(f"loader must be one of {', '.join(LOADERS)}, got '{name}'")
        if colon and decode not in DECODES:
            raise ValueError(f"decode must be one of {', '.join(DECODES)}, got '{decode}' in '{text}'")
        if colon and name != "webloader":
            raise ValueError(f"only webloader has a choice of decoders, got '{text}'")
        return cls(name=name, decode=decode or None)

    def apply(self, options: LoaderOptions) -> LoaderOptions:
        """The run's options with this loader's decoder in place of theirs."""
        return options if self.decode is None else replace(options, decode=self.decode)


class Loader(Protocol):
    """An open loader."""

    num_workers: int
    """Worker processes; 0 where threads of this process decode."""
    decode: str
    """What decodes: ``dali``, ``pil`` or ``turbo``."""
    device: str
    """Where batches are delivered: ``cpu`` or ``cuda``."""

    def epoch(self) -> Iterator[Batch]:
        """One new epoch from its start, whether the last one was finished or left early."""


class _LoaderModule(Protocol):
    def open_loader(
        self, shards: "ShardSet", *, options: LoaderOptions
    ) -> contextlib.AbstractContextManager[Loader]: ...


def open_loader(name: str, shards: "ShardSet", *, options: LoaderOptions) -> contextlib.AbstractContextManager[Loader]:
    """Open the loader ``name``; leaving the context ends its threads and processes.

    Raises:
        ValueError: If there is no such loader.
    """
    if name not in LOADERS:
        raise ValueError(f"loader must be one of {', '.join(LOADERS)}, got '{name}'")
    module = cast("_LoaderModule", importlib.import_module(LOADERS[name]))
    return module.open_loader(shards, options=options)
