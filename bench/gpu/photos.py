"""Shards, or nothing, to photos and masks as `bench gpu` decodes them: in memory and as files, of a size and a kind.

Without shards the photos are drawn: smooth colours with noise, of the sizes and, within a tenth, the bytes a pixel of
photographs at quality 90. They exercise the path; figures that are to be shown want real photos.
"""

import io
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from bench.loaders import available_cores
from dali_pipes.errors import DataError
from dali_pipes.formats.tar_reader import ArchiveReader
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import ShardSet
from prep.index import index_shards

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Photos", "draw_shards", "photo_header", "read_photos", "reencode", "write_files", "write_lines"]

QUALITY = 90
# What is encoded anew is for an hour's session: 1,024 photos of 2,048 pixels would take a minute of all cores.
MAX_REENCODED = 256
# Width and height of drawn photos, the shorter side of some below a crop of 350, as in the pets sample.
DRAWN_SIZES = ((500, 375), (375, 500), (500, 333), (400, 300), (640, 480), (300, 225))
BLOCK = 512
"""DALI's reader takes offsets that are multiples of this, as a tar's members lie."""


@dataclass(frozen=True, kw_only=True)
class Photos:
    """JPEG files in memory, and a mask for each."""

    photos: tuple[bytes, ...]
    masks: tuple[bytes, ...]
    """PNGs; empty where there are none."""
    is_drawn: bool

    @property
    def encoded_bytes(self) -> float:
        """Of a photo, on average."""
        return sum(len(photo) for photo in self.photos) / len(self.photos)

    @property
    def pixels(self) -> float:
        """Of a photo, on average."""
        sizes = [photo_header(photo)[1:] for photo in self.photos]
        return sum(height * width for height, width in sizes) / len(sizes)

    @property
    def progressive_share(self) -> float:
        """How many are progressive, which JPEG engines do not decode."""
        return sum(photo_header(photo)[0] for photo in self.photos) / len(self.photos)

    def to_json(self) -> dict[str, object]:
        """What figures depend on."""
        return {
            "num_photos": len(self.photos),
            "drawn": self.is_drawn,
            "encoded_bytes_mean": round(self.encoded_bytes, 1),
            "pixels_mean": round(self.pixels, 1),
            "progressive_share": round(self.progressive_share, 4),
        }


def read_photos(shards: ShardSet, *, photo: str, mask: str, num: int, is_drawn: bool = False) -> Photos:
    """The first ``num`` photos of the shards that are JPEG, and their masks where all have one.

    Raises:
        DataError: If there is no JPEG under that name.
    """
    photos: list[bytes] = []
    masks: list[bytes] = []
    for components in _samples(shards):
        data = components.get(photo)
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


def _samples(shards: ShardSet) -> Iterator[dict[str, bytes]]:
    for name in shards.names:
        key: str | None = None
        components: dict[str, bytes] = {}
        with shards.store.open(name) as stream:
            for member in ArchiveReader(stream, shard=shards.store.locate(name)):
                if member.key != key and components:
                    yield components
                    components = {}
                key = member.key
                components[member.component] = member.read()
        if components:
            yield components


def reencode(photos: Photos, *, side: int | None, progressive_share: float | None) -> Photos:
    """The first 256 photos with a longer side of ``side`` pixels, so many of them progressive, at quality 90, 4:2:0.

    Args:
        photos: What to encode anew; as they are where neither is given.
        side: ``None``: each keeps its size.
        progressive_share: 0 to 1; spread evenly. ``None``: none where ``side`` is given.
    """
    if side is None and progressive_share is None:
        return photos
    share = progressive_share or 0.0
    chosen = photos.photos[:MAX_REENCODED]

    def encode(number: int) -> bytes:
        image = Image.open(io.BytesIO(chosen[number])).convert("RGB")
        if side is not None:
            scale = side / max(image.size)
            image = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
        # Evenly: the whole part of the count goes up at those.
        is_progressive = int((number + 1) * share + 1e-9) > int(number * share + 1e-9)
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=QUALITY, subsampling=2, progressive=is_progressive)
        return stream.getvalue()

    with ThreadPoolExecutor(max_workers=min(32, available_cores())) as pool:
        made = tuple(pool.map(encode, range(len(chosen))))
    return Photos(photos=made, masks=photos.masks[:MAX_REENCODED], is_drawn=photos.is_drawn)


def photo_header(data: bytes) -> tuple[bool, int, int]:
    """Of a JPEG: whether it is progressive, its height and width."""
    with Image.open(io.BytesIO(data)) as image:
        return bool(image.info.get("progressive", 0)), image.height, image.width


def write_files(photos: Sequence[bytes], directory: Path) -> Path:
    """A file each, in a folder of a folder, as `fn.readers.file` takes classes; returns the outer one."""
    inner = directory / "photos"
    inner.mkdir(parents=True)
    for number, data in enumerate(photos):
        (inner / f"{number:06d}.jpg").write_bytes(data)
    return directory


def write_lines(photos: Sequence[bytes], path: Path) -> "tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]":
    """One file of all, each at a multiple of 512 as in the image: offsets and sizes, int64 [N] each."""
    sizes = np.array([len(photo) for photo in photos], np.int64)
    offsets = np.concatenate([[0], np.cumsum(-(-sizes // BLOCK) * BLOCK)]).astype(np.int64)
    with path.open("wb") as stream:
        for data, offset in zip(photos, offsets[:-1].tolist(), strict=True):
            stream.seek(offset)
            stream.write(data)
        stream.truncate(int(offsets[-1]))
    return offsets[:-1], sizes


def draw_shards(directory: Path, *, num: int, num_shards: int = 4, seed: int = 0) -> ShardSet:
    """Indexed shards of drawn photos, masks and class ids 1 to 5."""
    names = [f"drawn-{shard:06d}.tar" for shard in range(num_shards)]
    for shard, name in enumerate(names):
        _draw_shard(directory / name, range(num * shard // num_shards, num * (shard + 1) // num_shards), seed=seed)
    shards = ShardSet(store=LocalStore(directory), names=tuple(names))
    index_shards(shards)
    return shards


def _draw_shard(path: Path, numbers: range, *, seed: int) -> None:
    import tarfile

    with tarfile.open(path, "w") as archive:
        for number in numbers:
            draw = np.random.default_rng([seed, number])
            width, height = DRAWN_SIZES[number % len(DRAWN_SIZES)]
            members = {
                "cls": str(number % 5 + 1).encode(),
                "image.jpg": _draw_photo(draw, width, height),
                "trimap.png": _draw_mask(draw, width, height),
            }
            for component, data in members.items():
                member = tarfile.TarInfo(f"{number:06d}.{component}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def _draw_photo(draw: np.random.Generator, width: int, height: int) -> bytes:
    coarse = Image.fromarray(draw.integers(0, 256, (max(2, height // 24), max(2, width // 24), 3), np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noisy = np.clip(pixels + draw.integers(-9, 10, pixels.shape, np.int16), 0, 255).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noisy).save(stream, "JPEG", quality=QUALITY)
    return stream.getvalue()


def _draw_mask(draw: np.random.Generator, width: int, height: int) -> bytes:
    coarse = Image.fromarray(draw.integers(1, 4, (max(2, height // 40), max(2, width // 40)), np.uint8))
    stream = io.BytesIO()
    coarse.resize((width, height), Image.Resampling.NEAREST).save(stream, "PNG")
    return stream.getvalue()
