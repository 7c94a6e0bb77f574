"""List every loader that can be timed, with its requirements, input and output. This module imports no loader.

To add a peer, write one file and one line:

1. ``bench/loaders/peers/NAME.py`` with ``open_loader(shards, *, options)``, which returns a context manager that yields
   a `bench.loaders.protocol.BenchLoader`. If the peer reads another format, the file also has
   ``prepare(shards, *, directory)``, which converts the shards, and ``open_loader`` takes ``prepared=`` too. With
   ``in_bucket`` in its line, it reads the result from the bucket: ``open_remote(shards, *, options, remote)``. For a
   peer that is a torch ``DataLoader``, `bench.loaders.workers.open_data_loader` does the rest.
2. A line in `LOADERS`.

A peer that decodes in this process calls ``torch.set_num_threads(1)``, as `bench.loaders.peers.spdl` does. Otherwise
torch's threads compete with its own, and the comparison is unfair. Readers lower-case the names of components.

The commands, the comparison of outputs, the contract tests and the reports find the peer in `LOADERS`. The module is
imported when the loader is opened, so a missing library affects only its own loader.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

DECODES = ("pil", "turbo")
"""The decoders of loaders without DALI: Pillow, or libjpeg-turbo and libpng through ``torchvision.io``."""

ALL_PARTS = frozenset({"image", "mask", "label", "key", "normalised", "encoded"})
"""The parts of a `BenchBatch`, and ``normalised`` for normalised photos."""

Recipe = Literal["segmentation", "classification", "encoded"]
"""What the loaders of a run make of a sample: see `bench.loaders.recipe`."""

PARTS: Mapping[str, frozenset[str]] = {
    "segmentation": ALL_PARTS - {"encoded"},
    "classification": ALL_PARTS - {"encoded", "mask"},
    "encoded": frozenset({"encoded", "label", "key"}),
}
"""Recipe -> the parts of its batches."""

CROPS: Mapping[str, int] = {"segmentation": 350, "classification": 224, "encoded": 224}
"""Recipe -> the default height and width of its image, in pixels."""

Place = Literal["ais", "local", "s3", "cloud"]
Source = Place | Literal["converted"]

PLACES: Mapping[Source, str] = {
    "ais": "in a bucket of AIStore",
    "local": "in a directory",
    "s3": "in a bucket of S3",
    "cloud": "in a bucket of another cloud",
}
"""Where shards lie -> the words for it; ``converted`` is made from any of them."""


@dataclass(frozen=True, kw_only=True)
class LoaderEntry:
    """The facts about a loader that are needed before it is imported."""

    module: str
    extra: str | None = None
    """The extra of this project that installs what the loader needs beyond ``bench``."""
    requires: tuple[str, ...] = ()
    """Import names of the packages that must be installed."""
    decodes: tuple[str, ...] = ()
    """The decoders, of `DECODES`, that ``NAME:DECODE`` can choose; empty if DALI decodes, or nothing does."""
    gives: frozenset[str] = ALL_PARTS
    """The parts of a batch that the loader makes from the shards, of `ALL_PARTS`. Without ``normalised`` its photos are
    uint8. If empty, its batches have the shapes of all parts, but their content does not come from the shards. Missing
    parts are not compared and not timed, and tables mark the loader."""
    source: tuple[Source, ...] = ("ais", "local", "s3", "cloud")
    """The loader's input: where shards lie, of `PLACES`, or the result of ``prepare`` for any place."""
    makes: str = "a copy"
    """Describes the result of ``prepare``, and what the time for it includes, in reports."""
    in_bucket: bool = False
    """The result of ``prepare`` is uploaded into the shards' own bucket, from where the module's ``open_remote`` reads
    it, by S3's protocol."""
    decodes_window: bool = False
    """The loader decodes only the part of a photo that the crop keeps, as DALI can. The others decode whole photos."""


_INDEX = "an index, by one process"

LOADERS: dict[str, LoaderEntry] = {
    "dali": LoaderEntry(module="bench.loaders.dali", makes=_INDEX, decodes_window=True),
    "memory": LoaderEntry(module="bench.loaders.memory", makes=_INDEX, decodes_window=True),
    "webloader": LoaderEntry(module="bench.loaders.peers.webloader", decodes=DECODES),
    "webloader-tutorial": LoaderEntry(module="bench.loaders.peers.webloader_tutorial", decodes=("pil",)),
    "dali-s3": LoaderEntry(
        module="bench.loaders.peers.dali_s3",
        source=("ais", "s3"),
        makes="index files for DALI's reader, by one process",
        decodes_window=True,
    ),
    "dali-external": LoaderEntry(module="bench.loaders.peers.dali_external", decodes_window=True),
    "aistore": LoaderEntry(
        module="bench.loaders.peers.aistore",
        extra="aistore-pytorch",
        requires=("alive_progress",),
        decodes=DECODES,
        source=("ais",),
    ),
    "s3torchconnector": LoaderEntry(
        module="bench.loaders.peers.s3torchconnector",
        extra="s3torchconnector",
        requires=("s3torchconnector",),
        decodes=DECODES,
        source=("ais", "s3"),
    ),
    "spdl": LoaderEntry(module="bench.loaders.peers.spdl", extra="spdl", requires=("spdl.pipeline",), decodes=DECODES),
    "energon": LoaderEntry(
        module="bench.loaders.peers.energon",
        extra="energon",
        requires=("megatron.energon",),
        decodes=DECODES,
        source=("local",),
        makes="Energon's index, by a process on each core",
    ),
    "litdata": LoaderEntry(
        module="bench.loaders.peers.litdata",
        extra="litdata",
        requires=("litdata",),
        decodes=DECODES,
        source=("converted",),
        makes="chunks, by a process on each core; the time includes starting them",
    ),
    "litdata-s3": LoaderEntry(
        module="bench.loaders.peers.litdata",
        in_bucket=True,
        extra="litdata",
        requires=("litdata",),
        decodes=DECODES,
        source=("ais", "s3"),
        makes="chunks in the bucket, by a process on each core; the time includes starting them",
    ),
    "mosaic": LoaderEntry(
        module="bench.loaders.peers.mosaic",
        extra="mosaic",
        requires=("streaming",),
        decodes=DECODES,
        source=("converted",),
        makes="its own shards, by one process",
    ),
    "mosaic-s3": LoaderEntry(
        module="bench.loaders.peers.mosaic",
        in_bucket=True,
        extra="mosaic",
        requires=("streaming",),
        decodes=DECODES,
        source=("ais", "s3"),
        makes="its own shards in the bucket, by one process",
    ),
    "synthetic": LoaderEntry(module="bench.loaders.synthetic", gives=frozenset()),
}
"""Name to entry, in the order of a table that shows all of them."""


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
