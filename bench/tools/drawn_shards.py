"""Draw photos and masks, and write them into shards, for runs without a data set."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from bench.tools.repeat import encoded, write_shard
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_set import ShardSet
from prep.index import index_shards

PHOTO, MASK = "image.jpg", "trimap.png"
"""The components of drawn samples, beside ``cls``."""
QUALITY = 90
# Width and height of drawn photos. The shorter side of some is below a crop of 350, as in the pets sample.
DRAWN_SIZES = ((500, 375), (375, 500), (500, 333), (400, 300), (640, 480), (300, 225))
MASK_CELL = 40
"""Side in pixels of a mask's rectangles."""


def draw_shards(
    directory: Path,
    *,
    num: int,
    num_shards: int = 4,
    sizes: Sequence[tuple[int, int]] = DRAWN_SIZES,
    mask_cell: int = MASK_CELL,
    folder: str = "",
) -> ShardSet:
    """Make indexed shards of drawn photos, masks and class ids 1 to 5, the same each time; keys begin with ``folder``.

    Photos have smooth colours with noise. Their bytes for each pixel are, within a tenth, those of photographs of
    quality 90.
    """
    names = tuple(f"drawn-{shard:06d}.tar" for shard in range(num_shards))
    for shard, name in enumerate(names):
        members: list[tuple[str, bytes]] = []
        for number in range(num * shard // num_shards, num * (shard + 1) // num_shards):
            draw = np.random.default_rng([0, number])
            width, height = sizes[number % len(sizes)]
            key = f"{folder}{number:06d}"
            members.append((f"{key}.cls", str(number % 5 + 1).encode()))
            members.append((f"{key}.{PHOTO}", _draw_photo(draw, width, height)))
            members.append((f"{key}.{MASK}", _draw_mask(draw, width, height, mask_cell)))
        write_shard(directory / name, members)
    shards = ShardSet(store=LocalStore(directory), names=names)
    index_shards(shards)
    return shards


def _draw_photo(draw: np.random.Generator, width: int, height: int) -> bytes:
    coarse = Image.fromarray(draw.integers(0, 256, (max(2, height // 24), max(2, width // 24), 3), np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noisy = np.clip(pixels + draw.integers(-9, 10, pixels.shape, np.int16), 0, 255).astype(np.uint8)
    return encoded(Image.fromarray(noisy), "JPEG", quality=QUALITY)


def _draw_mask(draw: np.random.Generator, width: int, height: int, cell: int) -> bytes:
    coarse = Image.fromarray(draw.integers(1, 4, (max(2, height // cell), max(2, width // cell)), np.uint8))
    return encoded(coarse.resize((width, height), Image.Resampling.NEAREST), "PNG")
