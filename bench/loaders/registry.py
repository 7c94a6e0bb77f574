"""List every loader that can be timed; choose loaders by their names, convert shards for them, and open them.

To add a peer, write one file and one line:

1. ``bench/loaders/peers/NAME.py`` with ``open_loader(shards, *, options)``, which returns a context manager that yields
   a `bench.loaders.protocol.BenchLoader`. If the peer reads another format, the file also has
   ``prepare(shards, *, directory)``, which converts the shards, and ``open_loader`` takes ``place=`` too: the
   directory, or with ``in_bucket`` the ``s3://`` address to which the directory was uploaded. For a peer that is a
   torch ``DataLoader``, `bench.loaders.workers.open_data_loader` does the rest.
2. A line in `LOADERS`.

A peer that decodes in this process calls ``torch.set_num_threads(1)``, as `bench.loaders.peers.spdl` does. Otherwise
torch's threads compete with its own, and the comparison is unfair. Readers lower-case the names of components.

Commands, tests and reports find the peer in `LOADERS`. The module is imported when the loader is opened, so a missing
library affects only its own loader.
"""

import contextlib
import importlib
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bench.loaders.protocol import ALL_PARTS, DECODES, BenchLoader, LoaderOptions
from bench.loaders.s3 import remove_uploads, upload_folder, uploaded_folder
from dali_pipes.errors import PipesError
from dali_pipes.store.shard_set import ShardSet

Place = Literal["ais", "local", "s3", "cloud"]
PLACES: Mapping[str, str] = {
    "ais": "in a bucket of AIStore",
    "local": "in a directory",
    "s3": "in a bucket of S3",
    "cloud": "in a bucket of another cloud",
}


@dataclass(frozen=True, kw_only=True)
class LoaderEntry:
    """The facts about a loader that are needed before it is imported."""

    module: str
    opens: str = "open_loader"
    prepares: str | None = None
    """The function that converts the shards; ``None``: the loader reads the shards themselves."""
    extra: str | None = None
    """The extra of this project that installs what the loader needs beyond ``bench``."""
    requires: tuple[str, ...] = ()
    decodes: tuple[str, ...] = ()
    """The decoders, of `DECODES`, that ``NAME:DECODE`` can choose; empty if DALI decodes, or nothing does."""
    gives: frozenset[str] = ALL_PARTS
    """The parts of a batch that the loader makes from the shards, of `ALL_PARTS`. Without ``normalised`` its photos are
    uint8. If empty, its batches have the shapes of all parts, but their content does not come from the shards. Missing
    parts are not compared and not timed, and tables mark the loader."""
    source: tuple[Place | Literal["converted"], ...] = ("ais", "local", "s3", "cloud")
    """Where shards may lie, of `PLACES`; ``converted``: anywhere, the loader reads what was made of them."""
    makes: str = "a copy"
    """How a report describes the data that the loader prepares."""
    in_bucket: bool = False
    """The result is uploaded into the shards' own bucket, and read from there by S3's protocol."""
    decodes_window: bool = False
    """The loader decodes only the part of a photo that the crop keeps, as DALI can. The others decode whole photos."""


def _peer(file: str, **facts: Any) -> LoaderEntry:
    return LoaderEntry(module=f"bench.loaders.peers.{file}", **facts)


_OURS, _INDEX = "bench.loaders.ours", "an index, by one process"
_LITDATA: dict[str, Any] = {"prepares": "prepare", "extra": "litdata", "requires": ("litdata",), "decodes": DECODES}
_MOSAIC: dict[str, Any] = {"prepares": "prepare", "extra": "mosaic", "requires": ("streaming",), "decodes": DECODES}
_BY_S3: dict[str, Any] = {"source": ("ais", "s3"), "in_bucket": True}
_EACH_CORE = "by a process on each core"
_DALI_INDEX: dict[str, Any] = {
    "prepares": "prepare_index",
    "makes": "index files for DALI's reader, by one process",
    "decodes_window": True,
}

LOADERS: dict[str, LoaderEntry] = {
    "dali": LoaderEntry(module=_OURS, opens="open_dali", makes=_INDEX, decodes_window=True),
    "memory": LoaderEntry(module=_OURS, opens="open_memory", makes=_INDEX, decodes_window=True),
    "obstore": LoaderEntry(
        module=_OURS,
        opens="open_obstore",
        prepares="prepare_obstore",
        extra="cloud",
        requires=("obstore",),
        source=("s3",),
        makes="the numbers of samples",
        gives=frozenset(),
    ),
    "webloader": _peer("webloader", decodes=DECODES),
    "dali-webdataset": _peer("dali_readers", opens="open_local", source=("local",), **_DALI_INDEX),
    "dali-s3": _peer("dali_readers", opens="open_s3", source=("ais", "s3"), **_DALI_INDEX),
    "dali-external": _peer("plain_dali", opens="open_external", decodes_window=True),
    "aistore": _peer(
        "bucket_readers",
        opens="open_aistore",
        extra="aistore-pytorch",
        requires=("alive_progress", "aistore.pytorch"),
        decodes=DECODES,
        source=("ais",),
    ),
    "s3torchconnector": _peer(
        "bucket_readers",
        opens="open_s3torchconnector",
        extra="s3torchconnector",
        requires=("s3torchconnector",),
        decodes=DECODES,
        source=("ais", "s3"),
    ),
    "spdl": _peer("spdl", extra="spdl", requires=("spdl.pipeline",), decodes=DECODES),
    "energon": _peer(
        "energon",
        prepares="prepare",
        extra="energon",
        requires=("megatron.energon",),
        decodes=DECODES,
        source=("local",),
        makes=f"Energon's index, {_EACH_CORE}",
    ),
    "litdata": _peer(
        "litdata",
        **_LITDATA,
        source=("converted",),
        makes=f"chunks, {_EACH_CORE}; the time includes starting them",
    ),
    "litdata-s3": _peer(
        "litdata", **_LITDATA, **_BY_S3, makes=f"chunks in the bucket, {_EACH_CORE}; the time includes starting them"
    ),
    "mosaic": _peer("mosaic", **_MOSAIC, source=("converted",), makes="its own shards, by one process"),
    "mosaic-s3": _peer("mosaic", **_MOSAIC, **_BY_S3, makes="its own shards in the bucket, by one process"),
    "synthetic": LoaderEntry(module=_OURS, opens="open_synthetic", gives=frozenset()),
}


def is_peer(name: str) -> bool:
    """Return whether a loader is another project's."""
    return LOADERS[name].module.startswith("bench.loaders.peers.")


def is_ours(name: str) -> bool:
    """Return whether a name of a record is this project's loader: ``dali``, which `bench feed` calls ``dali-pipes``."""
    return name in ("dali", "dali-pipes")


GROUPS: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True,
    "peers": is_peer,
    "dali-decode": lambda name: not LOADERS[name].decodes and "image" in LOADERS[name].gives,
    "python-decode": lambda name: bool(LOADERS[name].decodes),
}
"""Names for several loaders: all, the loaders of other projects, the loaders that decode photos with DALI, and the
loaders that decode in Python."""


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
        if name not in LOADERS:
            raise ValueError(f"loader must be one of {', '.join(LOADERS)}, got '{name}'")
        if colon and decode not in LOADERS[name].decodes:
            choice = " or ".join(LOADERS[name].decodes) or "DALI alone"
            raise ValueError(f"loader '{name}' decodes with {choice}, got '{text}'")
        return cls(name=name, decode=decode or None)

    def __str__(self) -> str:
        return self.name if self.decode is None else f"{self.name}:{self.decode}"

    def apply(self, options: LoaderOptions) -> LoaderOptions:
        return options if self.decode is None else replace(options, decode=self.decode)


def select_loaders(
    texts: Sequence[str], *, shards: ShardSet | None = None
) -> tuple[tuple[LoaderSpec, ...], tuple[str, ...]]:
    """Resolve names, ``NAME:DECODE`` and `GROUPS` to loaders, each loader once; and a line for each one that was
    skipped.

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
    return tuple(specs), tuple(skipped.values())


def available_loaders(shards: ShardSet | None = None) -> dict[str, str | None]:
    """Map each loader to the reason why it cannot be opened, or to ``None``; without shards only packages are looked
    for.
    """
    return {name: _reason_against(name, shards) for name in LOADERS}


def _reason_against(name: str, shards: ShardSet | None) -> str | None:
    entry = LOADERS[name]
    for package in entry.requires:
        if not _is_installed(package):
            return (
                f"loader '{name}' needs the package '{package}', which is not installed; "
                f"pip install 'dali-pipes[{entry.extra or 'bench'}]'"
            )
    if shards is None or "converted" in entry.source or place_of(shards) in entry.source:
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


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the part before the dot of a dotted name
        return False


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The converted shards of a loader, and the cost of the conversion."""

    directory: Path
    wall_s: float
    num_bytes: int


def prepare_loader(name: str, shards: ShardSet, *, directory: Path) -> Prepared | None:
    """Convert the shards for the loader ``name``; ``None`` if it reads the shards themselves.

    ``directory`` is an empty directory of the caller; the loader reads from it while it is open.
    """
    module, entry = _module(name, shards), LOADERS[name]
    if entry.prepares is None:
        return None
    started = time.perf_counter()
    getattr(module, entry.prepares)(shards, directory=directory)
    if entry.in_bucket:
        upload_folder(shards, directory)
    files = (path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    num_bytes = sum(path.stat().st_size for path in files)
    return Prepared(directory=directory, wall_s=time.perf_counter() - started, num_bytes=num_bytes)


def remove_prepared(name: str, shards: ShardSet, *, directory: Path) -> None:
    """Delete what `prepare_loader` put into the shards' bucket, even if it failed on the way."""
    if LOADERS[name].in_bucket:
        remove_uploads(shards, directory)


@contextlib.contextmanager
def open_loader(
    name: str, shards: ShardSet, *, options: LoaderOptions, prepared: Prepared | None = None
) -> Iterator[BenchLoader]:
    """Open the loader ``name``; leaving the context ends its threads and processes.

    Without ``prepared``, the result of `prepare_loader`, a loader that needs a conversion converts the shards to a
    temporary directory while it is opened, so pass it if the opening is timed. An error names the extra of a missing
    package.
    """
    module, entry = _module(name, shards), LOADERS[name]
    with contextlib.ExitStack() as stack:
        arguments: dict[str, Any] = {}
        if entry.prepares is not None:
            if prepared is None:
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dali-pipes-prepared-")))
                stack.callback(remove_prepared, name, shards, directory=directory)
                prepared = prepare_loader(name, shards, directory=directory)
            assert prepared is not None, "the entry prepares"
            arguments["place"] = str(prepared.directory)
            if entry.in_bucket:
                arguments["place"] = stack.enter_context(uploaded_folder(shards, prepared.directory))
        yield stack.enter_context(getattr(module, entry.opens)(shards, options=options, **arguments))


def _module(name: str, shards: ShardSet) -> Any:
    if (reason := _reason_against(name, shards)) is not None:
        raise PipesError(reason)
    return importlib.import_module(LOADERS[name].module)
