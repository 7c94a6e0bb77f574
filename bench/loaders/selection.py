"""Select loaders by their names on a command line, check whether they can be opened here, and open them."""

import contextlib
import importlib
import importlib.util
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.loaders.protocol import BenchLoader, LoaderOptions, Prepared
from bench.loaders.registry import GROUPS, LOADERS, PLACES, Place
from bench.loaders.s3 import remove_uploads, upload_folder, uploaded_folder
from dali_pipes.errors import PipesError
from dali_pipes.store.shard_set import ShardSet


@dataclass(frozen=True, kw_only=True)
class LoaderSpec:
    """A loader as a command names it: ``dali``, or with a decoder, ``webloader:turbo``."""

    name: str
    decode: str | None = None
    """One of the loader's decoders, by default the first; ``None`` if DALI decodes."""

    def __post_init__(self) -> None:
        if self.decode is None and LOADERS[self.name].decodes:
            object.__setattr__(self, "decode", LOADERS[self.name].decodes[0])

    @classmethod
    def parse(cls, text: str) -> "LoaderSpec":
        """Read ``NAME`` or ``NAME:DECODE``.

        >>> LoaderSpec.parse("webloader")
        LoaderSpec(name='webloader', decode='pil')
        """
        name, colon, decode = text.partition(":")
        check_name(name)
        if colon and decode not in LOADERS[name].decodes:
            choice = " or ".join(LOADERS[name].decodes) or "DALI alone"
            raise ValueError(f"loader '{name}' decodes with {choice}, got '{text}'")
        return cls(name=name, decode=decode or None)

    def __str__(self) -> str:
        return self.name if self.decode is None else f"{self.name}:{self.decode}"

    def apply(self, options: LoaderOptions) -> LoaderOptions:
        """Return the run's options with this loader's decoder."""
        return options if self.decode is None else replace(options, decode=self.decode)


@dataclass(frozen=True, kw_only=True)
class SelectedLoaders:
    """The loaders to open."""

    specs: tuple[LoaderSpec, ...]
    skipped: tuple[str, ...]
    """A line for each loader of a group that cannot be opened here."""


def select_loaders(texts: Sequence[str], *, shards: ShardSet | None = None) -> SelectedLoaders:
    """Resolve names, ``NAME:DECODE`` and `GROUPS` to loaders, each loader once.

    A loader of a group comes with each of its decoders, and is skipped if it cannot be opened.
    """
    found = available_loaders(shards)
    specs: list[LoaderSpec] = []
    skipped: dict[str, str] = {}
    for text in texts:
        if text not in GROUPS:
            spec = LoaderSpec.parse(text)
            if (reason := found[spec.name]) is not None:
                raise PipesError(reason)
            if spec in specs:
                raise ValueError(f"loaders must not repeat, got '{spec}' twice")
            specs.append(spec)
            continue
        for name in filter(GROUPS[text], LOADERS):
            if (reason := found[name]) is not None:
                skipped[name] = f"skipped: {reason}"
                continue
            of_name = [LoaderSpec(name=name, decode=decode) for decode in LOADERS[name].decodes or (None,)]
            specs += [spec for spec in of_name if spec not in specs]
    return SelectedLoaders(specs=tuple(specs), skipped=tuple(skipped.values()))


def available_loaders(shards: ShardSet | None = None) -> dict[str, str | None]:
    """Map each loader to the reason why it cannot be opened, or to ``None`` if it can.

    Args:
        shards: The shards to read; ``None``: check only whether the packages are installed.
    """
    return {name: reason_against(name, shards) for name in LOADERS}


def reason_against(name: str, shards: ShardSet | None) -> str | None:
    """Say why a loader cannot be opened; ``None`` if it can."""
    check_name(name)
    entry = LOADERS[name]
    for package in entry.requires:
        if not _is_installed(package):
            return (
                f"loader '{name}' needs the package '{package}', which is not installed; "
                f"pip install 'dali-pipes[{entry.extra or 'bench'}]'"
            )
    if shards is None or "converted" in entry.source:
        return None
    if place_of(shards) in entry.source:
        return None
    wanted = " or ".join(PLACES[place] for place in entry.source)
    return f"loader '{name}' reads shards {wanted}, got '{shards.url}'"


def place_of(shards: ShardSet) -> Place:
    """Where the shards lie, of `PLACES`."""
    if shards.store.cluster is not None:
        return "ais"
    if shards.store.directory is not None:
        return "local"
    return "s3" if shards.store.url.startswith("s3://") else "cloud"


def check_name(name: str) -> None:
    if name not in LOADERS:
        raise ValueError(f"loader must be one of {', '.join(LOADERS)}, got '{name}'")


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the part before the dot of a dotted name
        return False


def open_loader(
    name: str, shards: ShardSet, *, options: LoaderOptions, prepared: Prepared | None = None
) -> contextlib.AbstractContextManager[BenchLoader]:
    """Open the loader ``name``; leaving the context ends its threads and processes.

    Args:
        name: A name of `LOADERS`.
        shards: The shards to read.
        options: The run's options.
        prepared: The result of `prepare_loader`. Without it, a loader that needs a conversion converts the shards to a
            temporary directory while it is opened, so pass it if the opening is timed.

    Raises:
        PipesError: If a package is missing (the error names the extra), or the loader cannot read such shards.
        ValueError: If there is no such loader.
    """
    module = _module(name, shards)
    if not hasattr(module, "prepare"):
        opened: contextlib.AbstractContextManager[BenchLoader] = module.open_loader(shards, options=options)
        return opened
    return _open_converted(module, name, shards, options=options, prepared=prepared)


@contextlib.contextmanager
def _open_converted(
    module: Any, name: str, shards: ShardSet, *, options: LoaderOptions, prepared: Prepared | None
) -> Iterator[BenchLoader]:
    with contextlib.ExitStack() as stack:
        if prepared is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dali-pipes-prepared-")))
            stack.callback(remove_prepared, name, shards, directory=directory)
            prepared = prepare_loader(name, shards, directory=directory)
        assert prepared is not None, "the module has `prepare`"
        if LOADERS[name].in_bucket:
            remote = stack.enter_context(uploaded_folder(shards, prepared.url))
            yield stack.enter_context(module.open_remote(shards, options=options, remote=remote))
        else:
            yield stack.enter_context(module.open_loader(shards, options=options, prepared=prepared))


def prepare_loader(name: str, shards: ShardSet, *, directory: Path) -> Prepared | None:
    """Convert the shards for the loader ``name``; ``None`` if it reads the shards themselves.

    ``directory`` is an empty directory of the caller; the loader reads from it while it is open.
    """
    module = _module(name, shards)
    if not hasattr(module, "prepare"):
        return None
    started = time.perf_counter()
    module.prepare(shards, directory=directory)
    if LOADERS[name].in_bucket:
        upload_folder(shards, directory)
    return Prepared.of(directory, wall_s=time.perf_counter() - started)


def remove_prepared(name: str, shards: ShardSet, *, directory: Path) -> None:
    """Delete what `prepare_loader` put into the shards' bucket, even if it failed on the way."""
    if LOADERS[name].in_bucket:
        remove_uploads(shards, directory)


def _module(name: str, shards: ShardSet) -> Any:
    if (reason := reason_against(name, shards)) is not None:
        raise PipesError(reason)
    return importlib.import_module(LOADERS[name].module)
