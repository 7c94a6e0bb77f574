"""Hold the photos, masks and shards that `bench gpu` decodes, in the sizes and kinds that its settings ask for.

Without shards the photos are drawn (`bench.tools.repeat`). They exercise the path; published figures need real
photos.
"""

import functools
import io
import operator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from PIL import Image

import dali_pipes as dp
from bench.loaders.encoded import samples_of, shard_urls
from bench.tools.environment import available_cores
from bench.tools.repeat import QUALITY, encoded, scaled
from dali_pipes.errors import DataError
from dali_pipes.graph.definition import Graph
from dali_pipes.store.shard_set import ShardSet

Device = Literal["gpu", "cpu"]

LOADER_BYTES = 512 << 20
"""Bytes of shards that a loader reads. Its first epoch stages them; that is not timed, and must not take long."""
# 1,024 photos of 2,048 pixels would keep all cores busy for a minute; a session often has only an hour.
MAX_REENCODED = 256


@dataclass(frozen=True, kw_only=True)
class GpuSetting:
    device: Device
    num_threads: int
    batch_size: int
    hw_decoder_load: float = 0.65
    photo_side: int | None = None
    """Longer side in pixels of photos that are encoded again; ``None``: as they are stored."""
    progressive_share: float | None = None
    """Share of progressive photos among photos that are encoded again; ``None``: as they are stored."""
    size_hint: int = 0
    """Width and height for which the recipes' decoders allocate at the start; 0: as photos need it."""

    @property
    def decoder_device(self) -> Literal["mixed", "cpu"]:
        return "mixed" if self.device == "gpu" else "cpu"


@dataclass(frozen=True, kw_only=True)
class Photos:
    """JPEG files in memory, and a mask for each."""

    photos: tuple[bytes, ...]
    masks: tuple[bytes, ...] = ()
    """PNGs; empty unless all samples have one."""
    is_drawn: bool

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """What figures depend on. JPEG engines do not decode progressive photos."""
        is_progressive, heights, widths = zip(*map(photo_header, self.photos), strict=True)
        return {
            "num_photos": len(self.photos),
            "drawn": self.is_drawn,
            "encoded_bytes_mean": round(fmean(map(len, self.photos)), 1),
            "pixels_mean": round(fmean(map(operator.mul, heights, widths)), 1),
            "progressive_share": round(fmean(is_progressive), 4),
        }


@dataclass
class Workload:
    """The photos and shards of a run; photos of another size or kind are made once.

    It pickles without the photos: another process reads them again.
    """

    shards: ShardSet
    _: KW_ONLY
    photo: str
    mask: str
    """The mask's component; empty if there is none."""
    num_photos: int
    directory: Path
    is_drawn: bool

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @functools.cached_property
    def stored(self) -> Photos:
        return read_photos(self.shards, photo=self.photo, mask=self.mask, num=self.num_photos, is_drawn=self.is_drawn)

    @functools.cached_property
    def _first_shards(self) -> ShardSet:
        names: list[str] = []
        total = 0
        for name in self.shards.names:
            total += self.shards.store.size(name) or 0
            if names and total > LOADER_BYTES:
                break
            names.append(name)
        return replace(self.shards, names=tuple(names))

    def open_loader(self, graph: Graph, *, device: Device, **options: Any) -> Any:
        """Open a `dali_pipes.loader` over the first shards, as many as fit `LOADER_BYTES`."""
        return dp.loader(
            shard_urls(self._first_shards),
            graph,
            device=device,
            # The other scenarios also time photos of samples without a mask.
            select=dp.Select(missing="skip"),
            cache=dp.Cache(show_progress=False),
            rank=0,
            world_size=1,
            endpoint=self.shards.store.endpoint,
            **options,
        )

    def photos(self, setting: GpuSetting) -> Photos:
        if (setting.photo_side, setting.progressive_share) == (None, None):
            return self.stored
        photos = tuple(path.read_bytes() for path in sorted(self.files(setting).rglob("*.jpg")))
        return Photos(photos=photos, is_drawn=self.is_drawn)

    def files(self, setting: GpuSetting) -> Path:
        """Return a directory whose folder ``photos`` holds the photos as files, as DALI's file reader needs it."""
        directory = self.directory / f"files-{setting.photo_side}-{setting.progressive_share}"
        if not directory.exists():
            made = reencode(self.stored, side=setting.photo_side, progressive_share=setting.progressive_share)
            # It gets its name when it is complete: after a full disk another case must not time a part of the photos.
            partial = directory.with_name(f"{directory.name}.partial")
            inner = partial / "photos"
            inner.mkdir(parents=True, exist_ok=True)
            for number, data in enumerate(made.photos):
                (inner / f"{number:06d}.jpg").write_bytes(data)
            partial.rename(directory)
        return directory


def read_photos(shards: ShardSet, *, photo: str, mask: str, num: int, is_drawn: bool = False) -> Photos:
    """Read the first ``num`` JPEGs of the shards, and their masks if all have one."""
    photos: list[bytes] = []
    masks: list[bytes] = []
    for _, components in samples_of(shards):
        data = next((components[name] for name in photo.split(";") if name in components), None)
        if data is None or not data.startswith(b"\xff\xd8"):
            continue
        photos.append(data)
        if mask in components:
            masks.append(components[mask])
        if len(photos) == num:
            break
    if not photos:
        raise DataError(f"'{shards.url}' holds no JPEG named '{photo}'; name the component: --photo")
    return Photos(photos=tuple(photos), masks=tuple(masks) if len(masks) == len(photos) else (), is_drawn=is_drawn)


def reencode(photos: Photos, *, side: int | None, progressive_share: float | None) -> Photos:
    """Encode the first 256 photos again, with a longer side of ``side`` pixels, at quality 90, 4:2:0.

    Without a ``side`` each photo keeps its size. ``progressive_share``, 0 to 1, is spread evenly over the photos. If
    both are ``None``, the photos are returned unchanged.
    """
    if side is None and progressive_share is None:
        return photos
    share = progressive_share or 0.0
    chosen = photos.photos[:MAX_REENCODED]

    def encode(number: int) -> bytes:
        image = Image.open(io.BytesIO(chosen[number])).convert("RGB")
        if side is not None:
            image = scaled(image, side, Image.Resampling.BICUBIC)
        # Spread evenly: progressive where the whole part of the count goes up.
        is_progressive = int((number + 1) * share + 1e-9) > int(number * share + 1e-9)
        return encoded(image, "JPEG", quality=QUALITY, subsampling=2, progressive=is_progressive)

    with ThreadPoolExecutor(max_workers=min(32, available_cores())) as pool:
        made = tuple(pool.map(encode, range(len(chosen))))
    return replace(photos, photos=made, masks=photos.masks[:MAX_REENCODED])


def photo_header(data: bytes) -> tuple[bool, int, int]:
    with Image.open(io.BytesIO(data)) as image:
        return bool(image.info.get("progressive", 0)), image.height, image.width
