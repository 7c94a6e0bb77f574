"""Names to loaders: what each needs, reads and gives, known without importing it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

__all__ = ["ALL_PARTS", "DECODES", "GROUPS", "LOADERS", "LoaderEntry", "Source"]

DECODES = ("pil", "turbo")
"""What the loaders without DALI decode with: Pillow, or libjpeg-turbo and libpng through ``torchvision.io``."""

ALL_PARTS = frozenset({"image", "trimap", "label", "key", "normalised"})
"""The parts of a `Batch`, and ``normalised`` for what is done to its photos."""

Source = Literal["ais", "local", "converted"]


@dataclass(frozen=True, kw_only=True)
class LoaderEntry:
    """What is known of a loader without importing it."""

    module: str
    extra: str | None = None
    """The extra of this project that brings what it needs beyond ``bench``."""
    requires: tuple[str, ...] = ()
    """Packages that must be there, by the name they are imported by."""
    decodes: tuple[str, ...] = ()
    """Those of `DECODES` that ``NAME:DECODE`` can ask for; none where DALI decodes."""
    gives: frozenset[str] = ALL_PARTS
    """The parts of a `Batch` that it makes of the shards, of `ALL_PARTS`. Without ``normalised`` its photos are uint8.
    Empty: its batches have the shape of all parts and come from no shard. What is not among them is neither compared
    nor part of what is timed, and a table marks it."""
    source: tuple[Source, ...] = ("ais", "local")
    """What it reads: shards in a bucket, shards in a directory, or what ``prepare`` has made of either."""
    reads_index_beside: bool = False
    """It reads the index that ``prep index`` has made, beside the shards; its ``prepare`` makes it again, elsewhere,
    only to show what that takes, and is not called by opening it."""
    decodes_window: bool = False
    """Of a photo it decodes the window that the crop wants, as DALI can; the others decode all of it and cut, which
    takes the longer the more of it is cut off."""

    def __post_init__(self) -> None:
        if unknown := self.gives - ALL_PARTS:
            raise ValueError(f"gives must be of {', '.join(sorted(ALL_PARTS))}, got {', '.join(sorted(unknown))}")
        if self.gives and "key" not in self.gives:
            raise ValueError(
                f"gives must hold 'key', by which outputs are compared, got {', '.join(sorted(self.gives))}"
            )
        if unknown := frozenset(self.decodes) - set(DECODES):
            raise ValueError(f"decodes must be of {', '.join(DECODES)}, got {', '.join(sorted(unknown))}")


LOADERS: dict[str, LoaderEntry] = {
    "dali": LoaderEntry(module="bench.loaders.dali", reads_index_beside=True, decodes_window=True),
    "memory": LoaderEntry(module="bench.loaders.memory", reads_index_beside=True, decodes_window=True),
    "webloader": LoaderEntry(module="bench.loaders.webloader", decodes=DECODES),
    "webloader-tutorial": LoaderEntry(module="bench.loaders.webloader_tutorial", decodes=("pil",)),
    "dali-s3": LoaderEntry(module="bench.loaders.dali_s3", source=("ais",), decodes_window=True),
    "dali-external": LoaderEntry(module="bench.loaders.dali_external", decodes_window=True),
    "imagefolder": LoaderEntry(module="bench.loaders.imagefolder", decodes=DECODES, source=("converted",)),
    "aistore": LoaderEntry(
        module="bench.loaders.aistore",
        extra="aistore-pytorch",
        requires=("alive_progress",),
        decodes=DECODES,
        source=("ais",),
    ),
    "spdl": LoaderEntry(module="bench.loaders.spdl", extra="spdl", requires=("spdl.pipeline",), decodes=DECODES),
    "litdata": LoaderEntry(
        module="bench.loaders.litdata", extra="litdata", requires=("litdata",), decodes=DECODES, source=("converted",)
    ),
    "mosaic": LoaderEntry(
        module="bench.loaders.mosaic", extra="mosaic", requires=("streaming",), decodes=DECODES, source=("converted",)
    ),
    "synthetic": LoaderEntry(module="bench.loaders.synthetic", gives=frozenset()),
}
"""Name to entry, in the order of a table of all."""

GROUPS: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True,
    "peers": lambda name: name not in ("dali", "memory", "synthetic"),
    "dali-decode": lambda name: not LOADERS[name].decodes and bool(LOADERS[name].gives),
    "python-decode": lambda name: bool(LOADERS[name].decodes),
}
"""Names that stand for several loaders, and which: all, those that are not this project's own, those whose photos DALI
decodes and those that decode in Python."""
