"""Photos, samples, tars, shards and data sets of each layout, for all tests."""

import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dali_pipes.formats.names import classes_name, described
from dali_pipes.store.base import Store
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from prep.pack import pack as packing
from prep.sources import hf as hf_module
from prep.sources import tables
from prep.sources.record import Record, Source


def pack(source: Source, **fields: Any) -> packing.PackReport:
    """Pack records by a `prep.pack.pack.PackJob` of these fields."""
    return packing.pack(source, packing.PackJob(**fields))


@dataclass(frozen=True)
class Sample:
    """One sample as it goes into a tar: key and component -> bytes."""

    key: str
    components: dict[str, bytes]


def pixels_of(seed: int = 0, *, size: tuple[int, int] = (50, 40), mode: str = "RGB") -> Image.Image:
    """A photo of noise; ``size`` is (width, height)."""
    noise = np.random.default_rng(seed).integers(1, 256, (size[1], size[0], 3)).astype(np.uint8)
    return Image.fromarray(noise).convert(mode)


def photo_bytes(seed: int, width: int, height: int, *, mode: str = "RGB", **options: object) -> bytes:
    """A JPEG with smooth colours and some noise, so that neither decoder has it too easy."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (max(2, height // 24), max(2, width // 24), 3), np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    pixels = np.asarray(image, np.int16) + draw.integers(-8, 9, (height, width, 3), np.int16)
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).convert(mode)
    return image_bytes(image, "JPEG", **({"quality": 88} | options))


def mask_bytes(seed: int, width: int, height: int) -> bytes:
    """A PNG, gray, 8 bit, of the values 1, 2, 3."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(1, 4, (max(2, height // 30), max(2, width // 30)), np.uint8)
    return image_bytes(Image.fromarray(coarse).resize((width, height), Image.Resampling.NEAREST))


def make_samples(sizes: Sequence[tuple[int, int]], *, first: int = 0, num_classes: int = 5) -> list[Sample]:
    """A sample for each (width, height): photo, class id from 1, mask."""
    return [
        Sample(
            f"s{first + i:05d}",
            {
                "cls": str((first + i) % num_classes + 1).encode(),
                "image.jpg": photo_bytes(first + i, width, height),
                "trimap.png": mask_bytes(first + i, width, height),
            },
        )
        for i, (width, height) in enumerate(sizes)
    ]


def with_data(samples: Iterable[Sample], data: Mapping[int, bytes], *, component: str = "image.jpg") -> list[Sample]:
    """The samples, some of them, by their numbers, with other data of a component."""
    return [
        Sample(sample.key, sample.components | {component: data[number]}) if number in data else sample
        for number, sample in enumerate(samples)
    ]


def write_tar(path: Path, samples: Iterable[Sample], *, format: int = tarfile.USTAR_FORMAT) -> Path:
    """A tar of these samples, members in the order in which a sample's components are listed."""
    members = [(f"{sample.key}.{name}", data) for sample in samples for name, data in sample.components.items()]
    path.write_bytes(tar_bytes(members, format=format))
    return path


def write_shards(directory: Path, samples: Sequence[Sample], *, per_shard: int, index: bool = True) -> Path:
    """Shards ``s-000000.tar``, ... of these samples, indexed."""
    directory.mkdir(parents=True, exist_ok=True)
    for shard, first in enumerate(range(0, len(samples), per_shard)):
        write_tar(directory / f"s-{shard:06d}.tar", samples[first : first + per_shard])
    if index:
        index_shards(resolve_shards(directory, endpoint=None))
    return directory


def fill_bucket(store: AisStore, directory: Path, *, folder: str = "") -> None:
    """Make the bucket, copy the shards ``s-*`` of a directory into its ``folder/``, and index them there."""
    store.create()
    for path in sorted(directory.glob("s-*.tar")):
        store.upload(f"{folder}{path.name}", path)
    index_shards(resolve_shards(f"{store.url}/{folder}s-", endpoint=store.endpoint))


def samples_and_shards(sizes: Sequence[tuple[int, int]], *, per_shard: int) -> tuple[Any, Any]:
    """Two fixtures of a module: the samples of `make_samples`, and the directory of their indexed shards."""

    @pytest.fixture(scope="module")
    def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_shards(tmp_path_factory.mktemp("shards"), make_samples(sizes), per_shard=per_shard)

    return pytest.fixture(scope="module")(lambda: make_samples(sizes)), shards


def image_bytes(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    """A file of a photo: a Pillow image, or pixels of shape (height, width) or (height, width, 3).

    Options are those of Pillow's ``save``.
    """
    stream = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(stream, kind, **options)
    return stream.getvalue()


def npy_bytes(array: Any) -> bytes:
    """An ``.npy`` file of this array."""
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def tar_bytes(
    members: Mapping[str, bytes] | Iterable[tuple[str, bytes]], *, format: int = tarfile.USTAR_FORMAT, **fields: Any
) -> bytes:
    """A tar of these members in this order; fields are set on each `tarfile.TarInfo`."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=format) as archive:
        for name, data in members.items() if isinstance(members, Mapping) else members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            for field, value in fields.items():
                setattr(member, field, value)
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def read_tar(data: bytes) -> list[tuple[str, bytes]]:
    """Names and bytes of a tar's members, in order."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return [(member.name, archive.extractfile(member).read()) for member in archive]  # type: ignore[union-attr]


def members_of(store: Store, names: Iterable[str]) -> list[tuple[str, bytes]]:
    """Member names and bytes in the order of the shards."""
    return [member for name in names for member in read_tar(store.read(name))]


def contents_of(store: Store, prefix: str = "") -> dict[str, bytes]:
    """The shards of a prefix, and what describes them, by the objects' names."""
    starts = (described(prefix), prefix)
    return {entry.name: store.read(entry.name) for start in starts for entry in store.list(start)}


def files_of(directory: Path) -> dict[str, bytes]:
    """All files of a directory by their paths in it, hidden ones, too."""
    paths = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def copy_files(directory: Path, store: Store) -> None:
    """Copy the shards of a directory, and the files that describe them, into a store."""
    for name, data in files_of(directory).items():
        store.write(name, data)


def write_classes(directory: Path, classes: Mapping[str, str], *, prefix: str = "s-") -> None:
    """Write a class table as `pack` does."""
    LocalStore(directory).write(classes_name(prefix), json.dumps(classes).encode())


def encode_photo(
    extension: str = "jpg", *, size: tuple[int, int] = (32, 24), mode: str = "RGB", seed: int = 0
) -> bytes:
    """Encode a photo of noise; each seed gives different bytes."""
    return image_bytes(pixels_of(seed, size=size, mode=mode), {"jpg": "JPEG"}.get(extension, extension.upper()))


def encode_mask(*, size: tuple[int, int] = (32, 24)) -> bytes:
    return image_bytes(np.full((size[1], size[0]), 2, np.uint8))


def write_pets(directory: Path, names: Mapping[str, int], *, header: bool = True) -> Path:
    """Write a data set in Oxford's layout; ``names`` maps each photo to its class id."""
    (directory / "images").mkdir(parents=True)
    (directory / "annotations" / "trimaps").mkdir(parents=True)
    rows = ["#Image CLASS-ID SPECIES BREED ID"] if header else []
    for number, (name, label) in enumerate(names.items()):
        (directory / "images" / f"{name}.jpg").write_bytes(encode_photo(seed=number))
        (directory / "annotations" / "trimaps" / f"{name}.png").write_bytes(encode_mask())
        rows.append(f"{name} {label} 1 1")
    (directory / "annotations" / "list.txt").write_text("\n".join(rows) + "\n")
    return directory


def table(path: Path, **fields: Any) -> Source:
    """The records of a list, with labels unless ``has_labels`` says otherwise."""
    return tables.table(path, tables.Fields(**{"has_labels": True, **fields}))


def hf(files: Sequence[Path], **fields: Any) -> Source:
    """The records of Parquet files with photos in them."""
    return hf_module.hf(files, tables.Fields(**fields))


def no_pixels(noise: bytes) -> bytes:
    """A JPEG header of 16 x 16 pixels, noise, and a JPEG end: no decoder can read it."""
    return b"\xff\xd8\xff\xc0\0\x0b\x08\0\x10\0\x10\1\1\x11\0" + noise + b"\xff\xd9"


def make_source(count: int, *, num_bytes: int = 700, seed: int = 0) -> Source:
    """Records with ``image.jpg``, ``json`` and a label; the photos have a JPEG header and end, but no pixels."""
    generator = np.random.default_rng(seed)
    records = [
        Record(
            key=f"folder/{number:04d}",
            components={
                "image.jpg": no_pixels(generator.bytes(num_bytes + 7 * number - 14)),
                "json": b'{"number": %d}' % number,
            },
            label=number % 3,
        )
        for number in range(count)
    ]
    return Source(name="made up", records=records, classes={0: "zero", 1: "one", 2: "two"})
