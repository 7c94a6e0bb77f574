"""Make shards: of other shards' samples, repeated or scaled, or of drawn photos and masks, for runs without data."""

import io
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bench.loaders.encoded import KEY, samples_of
from bench.tools.folders import check_room
from dali_pipes.errors import DataError
from dali_pipes.progress import progress
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_set import ShardSet
from prep.index import index_shards

QUALITY = 90
"""JPEG quality of photos that were scaled or drawn; photos are most often stored with it."""
PHOTO, MASK = "image.jpg", "trimap.png"
"""The components of drawn samples, beside ``cls``."""
# Width and height of drawn photos. The shorter side of some is below a crop of 350, as in the pets sample.
DRAWN_SIZES = ((500, 375), (375, 500), (500, 333), (400, 300), (640, 480), (300, 225))
MASK_CELL = 40


def repeat_shards(
    shards: ShardSet,
    *,
    directory: Path,
    num_samples: int | None = None,
    num_shards: int | None = None,
    photo_side: int | None = None,
    photo: str = "image.jpg",
    mask: str | None = "trimap.png",
    option: str = "--work",
) -> ShardSet:
    """Write samples, all held in memory, into new shards in the empty ``directory``, and return those.

    Round *r* of sample ``a/001`` has the key ``r0/a/001``, ``r1/a/001``, ...; its bytes are the original's, unless
    photos are scaled. The last round may be incomplete.

    Args:
        shards: Where the samples come from.
        directory: For the new shards.
        num_samples: Samples to write; ``None``: as many as there are.
        num_shards: Shards to write, evenly filled; ``None``: as many as there were.
        photo_side: The longer side of each photo and mask, in pixels; ``None``: they keep their size.
        photo: Component that holds the photo, or alternatives: ``jpg;jpeg``; a scaled photo is written as a JPEG.
        mask: Component that holds the mask; ``None`` if there is none to scale.
        option: The command's option that names the directory, for errors.
    """
    samples = [sample for _, sample in samples_of(shards)]
    if not samples:
        raise DataError(f"'{shards.url}' holds no sample to repeat")
    num_samples, num_shards = num_samples or len(samples), num_shards or len(shards.names)
    if num_samples < num_shards:
        raise ValueError(
            f"{num_shards} shards need as many samples, got {num_samples}; repeat them: --samples {num_shards}"
        )
    if photo_side is not None:
        encoders = dict.fromkeys(photo.split(";"), _jpeg) | dict.fromkeys((mask or "").split(";"), _mask)
        for sample in progress(samples, what=f"photos of {photo_side} pixels", unit="photo"):
            sample.update({name: encoders[name](sample[name], photo_side) for name in encoders.keys() & sample.keys()})
    # The headers of a tar are left out.
    needed = num_samples * sum(len(data) for sample in samples for data in sample.values()) // len(samples)
    check_room(directory, needed, what=f"packing {num_samples} samples of '{shards.url}'", option=option)
    bounds = [num_samples * shard // num_shards for shard in range(num_shards + 1)]
    names = [f"repeated-{shard:06d}.tar" for shard in range(num_shards)]
    for shard in progress(range(num_shards), what="repeat samples", unit="shard"):
        members = (
            (f"r{row // len(samples)}/{samples[row % len(samples)][KEY]}.{name}", data)
            for row in range(bounds[shard], bounds[shard + 1])
            for name, data in samples[row % len(samples)].items()
            if name != KEY
        )
        write_shard(directory / names[shard], members)
    return ShardSet(store=LocalStore(directory), names=tuple(names))


def upload_shards(shards: ShardSet, endpoint: str, bucket: str) -> ShardSet:
    """Copy local shards into a new bucket of a server; their index is not copied."""
    store = AisStore(endpoint, bucket)
    store.create()
    for name in shards.names:
        store.upload(name, Path(shards.store.locate(name)))
    return ShardSet(store=store, names=shards.names)


def write_shard(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def _jpeg(data: bytes, side: int) -> bytes:
    return encoded(scaled(Image.open(io.BytesIO(data)).convert("RGB"), side), "JPEG", quality=QUALITY)


def _mask(data: bytes, side: int) -> bytes:
    # NEAREST: a value between two class ids would be another class id.
    return encoded(scaled(Image.open(io.BytesIO(data)), side, Image.Resampling.NEAREST), "PNG")


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def scaled(image: Image.Image, side: int, resampling: Image.Resampling = Image.Resampling.LANCZOS) -> Image.Image:
    scale = side / max(image.size)
    return image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))), resampling)


def draw_shards(
    directory: Path,
    *,
    num: int,
    num_shards: int = 4,
    sizes: Sequence[tuple[int, int]] = DRAWN_SIZES,
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
            members.append((f"{key}.{MASK}", _draw_mask(draw, width, height)))
        write_shard(directory / name, members)
    shards = ShardSet(store=LocalStore(directory), names=names)
    index_shards(shards)
    return shards


def _draw_photo(draw: np.random.Generator, width: int, height: int) -> bytes:
    coarse = Image.fromarray(draw.integers(0, 256, (max(2, height // 24), max(2, width // 24), 3), np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noisy = np.clip(pixels + draw.integers(-9, 10, pixels.shape, np.int16), 0, 255).astype(np.uint8)
    return encoded(Image.fromarray(noisy), "JPEG", quality=QUALITY)


def _draw_mask(draw: np.random.Generator, width: int, height: int) -> bytes:
    cells = draw.integers(1, 4, (max(2, height // MASK_CELL), max(2, width // MASK_CELL)), np.uint8)
    coarse = Image.fromarray(cells)
    return encoded(coarse.resize((width, height), Image.Resampling.NEAREST), "PNG")
