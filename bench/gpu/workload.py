"""Hold the photos and shards that `bench gpu` decodes, in the sizes and kinds that its settings ask for."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

import dali_pipes as dp
from bench.gpu.photos import Photos, read_photos, reencode, write_files, write_lines
from bench.loaders.encoded import endpoint_of, shard_urls
from dali_pipes.graph.graph import Graph
from dali_pipes.reader.segments import MAX_LINES, index_text
from dali_pipes.store.shard_set import ShardSet

Device = Literal["gpu", "cpu"]

LOADER_BYTES = 512 << 20
"""Shards that loaders read. The first epoch of each loader stages them; that is not timed, and must not take long."""


@dataclass(frozen=True, kw_only=True)
class GpuSetting:
    """One point of a sweep."""

    device: Device
    num_threads: int
    batch_size: int
    hw_decoder_load: float = 0.65
    """DALI's default."""
    photo_side: int | None = None
    """Longer side of photos that are encoded again; ``None``: as they are stored."""
    progressive_share: float | None = None
    """Of photos that are encoded again; ``None``: as they are stored."""
    size_hint: int = 0
    """Width and height for which decoders allocate at the start; 0: as photos come."""


class Workload:
    """The photos and shards of a run; photos of another size or kind are made once.

    Args:
        shards: Where photos and masks come from, and what loaders read.
        photo: The photo's component.
        mask: The mask's.
        num_photos: Kept in memory.
        directory: A temporary one, in memory if possible.
        is_drawn: Whether the photos were drawn, and are not photographs.
    """

    def __init__(
        self, shards: ShardSet, *, photo: str, mask: str, num_photos: int, directory: Path, is_drawn: bool
    ) -> None:
        self.shards, self.photo, self.mask, self._directory = shards, photo, mask, directory
        self.stored = read_photos(shards, photo=photo, mask=mask, num=num_photos, is_drawn=is_drawn)
        self._first = _first_shards(shards)
        self._made: dict[tuple[int | None, float | None], Photos] = {(None, None): self.stored}
        self._files: dict[tuple[int | None, float | None], Path] = {}

    def open_loader(self, graph: Graph, *, device: Device, **options: Any) -> Any:
        """Open a `dali_pipes.loader` over the first shards, as many as fit `LOADER_BYTES`."""
        return dp.loader(
            shard_urls(self._first),
            graph,
            device=device,
            # The other scenarios also time photos of samples without a mask.
            select=dp.Select(missing="skip"),
            cache=dp.Cache(show_progress=False),
            rank=0,
            world_size=1,
            endpoint=endpoint_of(self._first),
            **options,
        )

    def photos(self, setting: GpuSetting) -> Photos:
        """The photos in the size and of the kind that a setting asks for."""
        wanted = setting.photo_side, setting.progressive_share
        if wanted not in self._made:
            self._made[wanted] = reencode(self.stored, side=wanted[0], progressive_share=wanted[1])
        return self._made[wanted]

    def files(self, setting: GpuSetting) -> Path:
        """A directory with these photos, for `fn.readers.file`."""
        wanted = setting.photo_side, setting.progressive_share
        if wanted not in self._files:
            directory = self._directory / f"files-{setting.photo_side}-{setting.progressive_share}"
            self._files[wanted] = write_files(self.photos(setting).photos, directory)
        return self._files[wanted]

    def lines(self, setting: GpuSetting) -> tuple[Path, str]:
        """One file with these photos, and DALI's index of it: of whole batches, so that the reader wraps after one."""
        photos = self.photos(setting).photos
        path = self._directory / f"lines-{setting.photo_side}-{setting.progressive_share}"
        offsets, sizes = write_lines(photos, path)
        num_batches = min(math.ceil(len(photos) / setting.batch_size), max(1, MAX_LINES // setting.batch_size))
        rows = np.arange(num_batches * setting.batch_size) % len(photos)
        return path, index_text(rows, [offsets[rows]], [sizes[rows]])


def _first_shards(shards: ShardSet) -> ShardSet:
    names: list[str] = []
    total = 0
    for name in shards.names:
        total += shards.store.size(name) or 0
        if names and total > LOADER_BYTES:
            break
        names.append(name)
    return replace(shards, names=tuple(names))
