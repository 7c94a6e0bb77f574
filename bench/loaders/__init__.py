"""Shards in, batches out: every loader that can be timed, in one registry.

A loader's module has one function, ``open_loader(shards, *, options)``, a context manager that yields a `Loader`. One
that needs something made of the shards first, an index or a format of its own, has ``prepare(shards, *, directory)``
too, which returns a `Prepared`, and its ``open_loader`` takes that as ``prepared=``, but where the index lies beside
the shards already (`LoaderEntry.reads_index_beside`). A module is imported when it is
used, so that the registry costs nothing and a missing library hurts only its own loader.
"""

import contextlib
import importlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypedDict, cast, get_args

from bench.loaders.registry import ALL_PARTS, DECODES, GROUPS, LOADERS, LoaderEntry
from dali_pipes.errors import PipesError

if TYPE_CHECKING:
    from torch import Tensor

    from dali_pipes.store.urls import ShardSet

__all__ = [
    "ALL_PARTS",
    "DECODES",
    "GROUPS",
    "LOADERS",
    "Batch",
    "Loader",
    "LoaderEntry",
    "LoaderOptions",
    "LoaderSpec",
    "Prepared",
    "Selection",
    "available_cores",
    "available_loaders",
    "num_rows",
    "open_loader",
    "prepare_loader",
    "select_loaders",
]

Device = Literal["auto", "cpu", "gpu"]


def available_cores() -> int:
    """The cores that this process may use, which is fewer than the machine has under ``taskset`` or Slurm."""
    return len(os.sched_getaffinity(0))


class Batch(TypedDict, total=False):
    """What one step consumes, as far as its loader `gives` it. B is the batch size, and less in a short last batch."""

    image: "Tensor"
    """float32 [B, 3, crop, crop], ImageNet-normalised; uint8 where the loader does not give ``normalised``."""
    trimap: "Tensor"
    """uint8 [B, 1, crop, crop], 0 where the crop reaches past the mask."""
    label: "Tensor"
    """int64 [B], the class id as ``cls`` holds it."""
    key: list[str]


def num_rows(batch: Batch) -> int:
    """The samples of a batch, whichever parts it has."""
    rows: Sequence[object] = next(iter(cast("dict[str, Sequence[object]]", batch).values()))
    return len(rows)


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
    keeps_shards: bool = True
    """Whether a loader that can, but need not, keep a bucket's shards on this machine does so: for the epochs after the
    first. One that draws a single epoch has its first batch sooner without."""

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
        if colon and decode not in LOADERS[name].decodes:
            having = ", ".join(other for other, entry in LOADERS.items() if decode in entry.decodes)
            raise ValueError(f"loader '{name}' does not decode with {decode}, got '{text}'; these do: {having}")
        return cls(name=name, decode=decode or None)

    def __str__(self) -> str:
        return self.name if self.decode is None else f"{self.name}:{self.decode}"

    def apply(self, options: LoaderOptions) -> LoaderOptions:
        """The run's options with this loader's decoder in place of theirs."""
        return options if self.decode is None else replace(options, decode=self.decode)


class Loader(Protocol):
    """An open loader."""

    num_workers: int
    """Worker processes; 0 where threads of this process decode."""
    decode: str
    """What decodes: ``dali``, ``pil`` or ``turbo``; ``none`` of `synthetic`."""
    device: str
    """Where batches are delivered: ``cpu`` or ``cuda``."""
    gives: frozenset[str]
    """As its entry says; see `LoaderEntry.gives`."""

    def epoch(self) -> Iterator[Batch]:
        """One new epoch from its start, whether the last one was finished or left early."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a loader had made of the shards before it could read them, and what that took."""

    url: str
    """A directory, or wherever else it is; not read where the loader's entry `reads_index_beside`."""
    wall_s: float
    num_bytes: int
    """Of what was made, on disk."""

    @classmethod
    def of(cls, directory: Path, *, started: float) -> "Prepared":
        """What lies in ``directory``, made since ``time.perf_counter()`` gave ``started``."""
        wall_s = time.perf_counter() - started
        files = (Path(folder) / name for folder, _, names in os.walk(directory) for name in names)
        return cls(url=str(directory), wall_s=wall_s, num_bytes=sum(path.stat().st_size for path in files))


class _LoaderModule(Protocol):
    def open_loader(
        self, shards: "ShardSet", *, options: LoaderOptions
    ) -> contextlib.AbstractContextManager[Loader]: ...


class _PreparingModule(Protocol):
    def prepare(self, shards: "ShardSet", *, directory: Path) -> Prepared: ...

    def open_loader(
        self, shards: "ShardSet", *, options: LoaderOptions, prepared: Prepared
    ) -> contextlib.AbstractContextManager[Loader]: ...


def open_loader(
    name: str, shards: "ShardSet", *, options: LoaderOptions, prepared: Prepared | None = None
) -> contextlib.AbstractContextManager[Loader]:
    """Open the loader ``name``; leaving the context ends its threads and processes.

    Args:
        name: Of `LOADERS`.
        shards: What it reads.
        options: What all loaders of a run share.
        prepared: What `prepare_loader` gave. Without, a loader that needs it has it made when it is opened, in a
            temporary directory that goes when it is closed: what is timed should be given it. Of no use to one that
            reads the index beside the shards.

    Raises:
        PipesError: If a package is missing, with the extra that brings it, or the loader cannot read such shards.
        ValueError: If there is no such loader.
    """
    module = _import(name, shards)
    if not hasattr(module, "prepare") or LOADERS[name].reads_index_beside:
        return cast("_LoaderModule", module).open_loader(shards, options=options)
    preparing = cast("_PreparingModule", module)
    if prepared is not None:
        return preparing.open_loader(shards, options=options, prepared=prepared)
    return _prepared_for_once(preparing, shards, options=options)


@contextlib.contextmanager
def _prepared_for_once(module: _PreparingModule, shards: "ShardSet", *, options: LoaderOptions) -> Iterator[Loader]:
    with tempfile.TemporaryDirectory(prefix="dali-pipes-prepared-") as directory:
        prepared = module.prepare(shards, directory=Path(directory))
        with module.open_loader(shards, options=options, prepared=prepared) as loader:
            yield loader


def prepare_loader(name: str, shards: "ShardSet", *, directory: Path) -> Prepared | None:
    """Have made of the shards what the loader ``name`` reads; ``None`` for one that reads them as they are.

    Args:
        name: Of `LOADERS`.
        shards: What it is made of.
        directory: Empty, and the caller's; the loader reads from it as long as it is open. Of a loader that reads the
            index beside the shards: a copy of that index, which only shows what making it takes.

    Raises:
        PipesError: As `open_loader`.
        ValueError: If there is no such loader.
    """
    module = _import(name, shards)
    return cast("_PreparingModule", module).prepare(shards, directory=directory) if hasattr(module, "prepare") else None


def available_loaders(shards: "ShardSet | None" = None) -> dict[str, str | None]:
    """Each loader of the registry, and why it cannot be opened: ``None`` where it can.

    Args:
        shards: What is to be read; without, only packages are asked for.
    """
    return {name: _missing(name) or (None if shards is None else _unreadable(name, shards)) for name in LOADERS}


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which loaders to open."""

    specs: tuple[LoaderSpec, ...]
    skipped: tuple[str, ...]
    """A line for each loader of a group that cannot be opened here."""


def select_loaders(texts: Sequence[str], *, shards: "ShardSet | None" = None) -> Selection:
    """From what a command was told, names, ``NAME:DECODE`` and `GROUPS`, to loaders, none twice.

    A loader of a group comes with each of its decoders, and is skipped where it cannot be opened.

    Raises:
        PipesError: If a loader that is named cannot be opened.
        ValueError: If there is no such loader, group or decoder, or one is named twice: ``webloader`` is
            ``webloader:pil``.
    """
    found = available_loaders(shards)
    specs: list[LoaderSpec] = []
    skipped: dict[str, str] = {}
    for text in texts:
        if text not in GROUPS:
            spec = LoaderSpec.parse(text)
            if (reason := found[spec.name]) is not None:
                raise PipesError(reason)
            if (twin := _twin(spec, specs)) is not None:
                same = "twice" if twin == spec else f"and '{twin}', which are one loader"
                raise ValueError(f"loaders must not repeat, got '{spec}' {same}")
            specs.append(spec)
            continue
        for name in filter(GROUPS[text], LOADERS):
            if (reason := found[name]) is not None:
                skipped[name] = f"skipped: {reason}"
                continue
            for decode in LOADERS[name].decodes or (None,):
                if _twin(spec := LoaderSpec(name=name, decode=decode), specs) is None:
                    specs.append(spec)
    return Selection(specs=tuple(specs), skipped=tuple(skipped.values()))


def _twin(spec: LoaderSpec, specs: Sequence[LoaderSpec]) -> LoaderSpec | None:
    """The one of ``specs`` that is the same loader with the same decoder: one that names none has the default's."""

    def named(one: LoaderSpec) -> tuple[str, str | None]:
        return one.name, (one.decode or LoaderOptions.decode) if LOADERS[one.name].decodes else None

    return next((one for one in specs if named(one) == named(spec)), None)


def _import(name: str, shards: "ShardSet") -> object:
    _check_name(name)
    if (reason := _missing(name) or _unreadable(name, shards)) is not None:
        raise PipesError(reason)
    return importlib.import_module(LOADERS[name].module)


def _check_name(name: str) -> None:
    if name not in LOADERS:
        raise ValueError(f"loader must be one of {', '.join(LOADERS)}, got '{name}'")


def _missing(name: str) -> str | None:
    entry = LOADERS[name]
    missing = [package for package in entry.requires if not _is_installed(package)]
    if not missing:
        return None
    return (
        f"loader '{name}' needs the package '{missing[0]}', which is not installed; "
        f"pip install 'dali-pipes[{entry.extra or 'bench'}]'"
    )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of a dotted name, the part before the dot
        return False


def _unreadable(name: str, shards: "ShardSet") -> str | None:
    from dali_pipes.store.ais import AisStore

    source, kind = LOADERS[name].source, "ais" if isinstance(shards.store, AisStore) else "local"
    if "converted" in source or kind in source:
        return None
    wanted = "shards in a bucket" if source == ("ais",) else "shards in a directory"
    return f"loader '{name}' reads {wanted}, got '{shards.url}'"
