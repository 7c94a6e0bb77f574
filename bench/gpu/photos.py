"""Read or draw the photos and masks that `bench gpu` decodes, and write them in other sizes and kinds.

Without shards the photos are drawn: smooth colours with noise, in the sizes of photographs and, within a tenth, with as
many bytes a pixel as photographs of quality 90. They exercise the path; figures that are to be shown need real photos.
"""

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import webdataset
from PIL import Image

from bench.loaders.encoded import samples_of
from bench.tools.environment import available_cores
from dali_pipes.errors import DataError
from dali_pipes.formats.tar_reader import BLOCK
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_set import ShardSet
from prep.index import index_shards

if TYPE_CHECKING:
    import numpy.typing as npt


QUALITY = 90
# 1,024 photos of 2,048 pixels would take a minute of all cores; a session often has an hour only.
MAX_REENCODED = 256
# Width and height of drawn photos, the shorter side of some below a crop of 350, as in the pets sample.
DRAWN_SIZES = ((500, 375), (375, 500), (500, 333), (400, 300), (640, 480), (300, 225))


@dataclass(frozen=True, kw_only=True)
class Photos:
    """JPEG files in memory, and a mask for each."""

    photos: tuple[bytes, ...]
    masks: tuple[bytes, ...]
    """PNGs; empty unless all samples have one."""
    is_drawn: bool

    @property
    def encoded_bytes(self) -> float:
        """Average of the photos."""
        return sum(len(photo) for photo in self.photos) / len(self.photos)

    @property
    def pixels(self) -> float:
        """Average of the photos."""
        sizes = [photo_header(photo)[1:] for photo in self.photos]
        return sum(height * width for height, width in sizes) / len(sizes)

    @property
    def progressive_share(self) -> float:
        """Share of progressive photos, which JPEG engines do not decode."""
        return sum(photo_header(photo)[0] for photo in self.photos) / len(self.photos)

    def to_json(self) -> dict[str, object]:
        """The properties of photos that figures depend on."""
        return {
            "num_photos": len(self.photos),
            "drawn": self.is_drawn,
            "encoded_bytes_mean": round(self.encoded_bytes, 1),
            "pixels_mean": round(self.pixels, 1),
            "progressive_share": round(self.progressive_share, 4),
        }


def read_photos(shards: ShardSet, *, photo: str, mask: str, num: int, is_drawn: bool = False) -> Photos:
    """Read the first ``num`` JPEGs of the shards, and their masks if all have one.

    Raises:
        DataError: If there is no JPEG under that name.
    """
    photos: list[bytes] = []
    masks: list[bytes] = []
    for _, components in samples_of(shards):
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


def reencode(photos: Photos, *, side: int | None, progressive_share: float | None) -> Photos:
    """Encode the first 256 photos again, with a longer side of ``side`` pixels, at quality 90, 4:2:0.

    Args:
        photos: What to encode again; returned as they are if neither of the others is given.
        side: ``None``: each keeps its size.
        progressive_share: Share of progressive photos, 0 to 1, spread evenly; ``None``: none.
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
        # Spread evenly: progressive where the whole part of the count goes up.
        is_progressive = int((number + 1) * share + 1e-9) > int(number * share + 1e-9)
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=QUALITY, subsampling=2, progressive=is_progressive)
        return stream.getvalue()

    with ThreadPoolExecutor(max_workers=min(32, available_cores())) as pool:
        made = tuple(pool.map(encode, range(len(chosen))))
    return Photos(photos=made, masks=photos.masks[:MAX_REENCODED], is_drawn=photos.is_drawn)


def photo_header(data: bytes) -> tuple[bool, int, int]:
    """Return whether a JPEG is progressive, its height and its width."""
    with Image.open(io.BytesIO(data)) as image:
        return bool(image.info.get("progressive", 0)), image.height, image.width


def write_files(photos: Sequence[bytes], directory: Path) -> Path:
    """Write a file for each photo, in a folder of a folder, as `fn.readers.file` expects; returns the outer one."""
    inner = directory / "photos"
    inner.mkdir(parents=True)
    for number, data in enumerate(photos):
        (inner / f"{number:06d}.jpg").write_bytes(data)
    return directory


def write_lines(photos: Sequence[bytes], path: Path) -> "tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]":
    """Write all photos to one file, each at a multiple of 512; returns offsets and sizes, int64 [N] each."""
    sizes = np.array([len(photo) for photo in photos], np.int64)
    offsets = np.concatenate([[0], np.cumsum(-(-sizes // BLOCK) * BLOCK)]).astype(np.int64)
    with path.open("wb") as stream:
        for data, offset in zip(photos, offsets[:-1].tolist(), strict=True):
            stream.seek(offset)
            stream.write(data)
        stream.truncate(int(offsets[-1]))
    return offsets[:-1], sizes


def draw_shards(directory: Path, *, num: int, num_shards: int = 4, seed: int = 0) -> ShardSet:
    """Make indexed shards of drawn photos, masks and class ids 1 to 5."""
    names = [f"drawn-{shard:06d}.tar" for shard in range(num_shards)]
    for shard, name in enumerate(names):
        with webdataset.TarWriter(str(directory / name), encoder=False) as writer:
            for number in range(num * shard // num_shards, num * (shard + 1) // num_shards):
                draw = np.random.default_rng([seed, number])
                width, height = DRAWN_SIZES[number % len(DRAWN_SIZES)]
                writer.write(
                    {
                        "__key__": f"{number:06d}",
                        "cls": str(number % 5 + 1).encode(),
                        "image.jpg": _draw_photo(draw, width, height),
                        "trimap.png": _draw_mask(draw, width, height),
                    }
                )
    shards = ShardSet(store=LocalStore(directory), names=tuple(names))
    index_shards(shards)
    return shards


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
