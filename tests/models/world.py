"""Small data sets whose every byte, label and size a model knows."""

import io
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import dali_pipes as dp
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards


@dataclass(frozen=True)
class Truth:
    """One sample as it was packed."""

    key: str
    label: int
    height: int
    width: int
    photo: bytes
    caption: bytes | None


@dataclass(frozen=True)
class World:
    """A directory of indexed shards, and its samples in the manifest's order."""

    url: str
    samples: Sequence[Truth]
    shard_of: Sequence[int] = field(repr=False)

    @property
    def keys(self) -> list[str]:
        """The keys in the manifest's order."""
        return [sample.key for sample in self.samples]


def photo_of(number: int, height: int, width: int) -> bytes:
    """A PNG in one colour that encodes the sample's number."""
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[:] = (number % 256, number // 256, 200)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG", compress_level=1)
    return stream.getvalue()


def draw_samples(
    random: np.random.Generator, num: int, *, prefix: str = "k", num_classes: int = 4, complete: bool = True
) -> list[Truth]:
    """Samples with random sizes and classes; without `complete`, some have no caption."""
    samples = []
    for number in range(num):
        height, width = (int(side) for side in random.integers(8, 40, 2))
        caption = f"sample {number}".encode() if complete or random.random() < 0.7 else None
        label = int(random.integers(num_classes))
        samples.append(Truth(f"{prefix}{number:04d}", label, height, width, photo_of(number, height, width), caption))
    return samples


def build(folder: Path, samples: Sequence[Truth], random: np.random.Generator) -> World:
    """Write the samples into shards of random lengths, and index them."""
    folder.mkdir(parents=True)
    shard_of: list[int] = []
    while len(shard_of) < len(samples):
        first, shard = len(shard_of), shard_of[-1] + 1 if shard_of else 0
        stop = min(len(samples), first + int(random.integers(1, 14)))
        with tarfile.open(folder / f"s-{shard:06d}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for sample in samples[first:stop]:
                parts = {"png": sample.photo, "cls": str(sample.label).encode(), "txt": sample.caption}
                for component, data in parts.items():
                    if data is not None:
                        member = tarfile.TarInfo(f"{sample.key}.{component}")
                        member.size = len(data)
                        archive.addfile(member, io.BytesIO(data))
        shard_of += [shard] * (stop - first)
    index_shards(resolve_shards(folder, endpoint=None))
    return World(str(folder), samples, shard_of)


def probe(components: dp.Components, random: dp.Random) -> dict[str, Any]:
    """The ordinal, label, bytes, decoded colour and random numbers of each sample."""
    from nvidia.dali import fn, types

    photo = components["png"]
    start, shape = random.resized_crop("png", scale=(0.3, 1.0))
    image = fn.decoders.image_slice(photo, start, shape, axes=(0, 1), device=components.device, output_type=types.RGB)
    return {
        "ordinal": components.array(lambda batch: batch.ordinals),
        "label": components.label,
        "length": photo.shape(),
        "sum": fn.reductions.sum(fn.cast(photo, dtype=types.INT64)),
        "colour": fn.reductions.mean(fn.cast(image, dtype=types.FLOAT), axes=(0, 1)),
        "area": fn.cast(shape[0] * shape[1], dtype=types.INT64),
        "uniform": random.uniform(0.0, 1.0),
        "flip": random.coin_flip(0.5),
    }


@dataclass(frozen=True)
class Row:
    """What a batch says of one sample."""

    key: str
    label: int
    random: tuple[float, ...]
    valid: bool


def rows_of(batch: dict[str, Any], world: World) -> list[Row]:
    """The rows of a batch of `probe`, each compared with the sample that was packed."""
    rows = []
    for number, key in enumerate(batch["key"]):
        truth = world.samples[int(batch["ordinal"][number])]
        assert key.split("/", 1)[-1] == truth.key
        assert int(batch["label"][number]) == truth.label, key
        assert int(batch["length"][number].flatten()[0]) == len(truth.photo), key
        assert int(batch["sum"][number]) == sum(truth.photo), key
        colour = int(truth.key[-4:])
        assert batch["colour"][number].round().tolist() == [colour % 256, colour // 256, 200], key
        area = int(batch["area"][number])
        assert 1 <= area <= truth.height * truth.width, key
        drawn = (float(batch["uniform"][number]), float(batch["flip"][number]), float(area))
        rows.append(Row(key, truth.label, drawn, bool(batch["valid"][number])))
    return rows


def open_probe(url: Any, **options: Any) -> dp.Loader:
    """A loader of `probe` on the CPU, with keys and the mask of valid rows."""
    usual = {"device": "cpu", "outputs": dp.Outputs(keys=True, valid=True), "decode": dp.Decode(threads=1)}
    return dp.loader(url, probe, **(usual | options))
