"""Small data sets in each layout, and an embedded node that the tests share."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from prep.sources import hf as hf_module
from prep.sources import tables
from prep.sources.record import Record, Source
from tests.builders import image_bytes

REPOSITORY = Path(__file__).parents[1]


def encode_photo(
    extension: str = "jpg", *, size: tuple[int, int] = (32, 24), mode: str = "RGB", seed: int = 0
) -> bytes:
    """A photo of noise: seeds give different bytes."""
    generator = np.random.default_rng(seed)
    height_width = (size[1], size[0])
    shape = height_width if mode == "L" else (*height_width, len(mode))
    photo = Image.fromarray(generator.integers(0, 256, shape, np.uint8))
    return image_bytes(photo, {"jpg": "JPEG", "png": "PNG", "gif": "GIF", "webp": "WEBP"}[extension])


def encode_mask(*, size: tuple[int, int] = (32, 24)) -> bytes:
    return image_bytes(np.full((size[1], size[0]), 2, np.uint8))


def write_pets(directory: Path, names: Mapping[str, int], *, header: bool = True) -> Path:
    """A data set in Oxford's layout: ``names`` are photos and class ids."""
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
    """A JPEG of 16 x 16 pixels by its header and end, with noise between them."""
    return b"\xff\xd8\xff\xc0\0\x0b\x08\0\x10\0\x10\1\1\x11\0" + noise + b"\xff\xd9"


def make_source(count: int, *, num_bytes: int = 700, seed: int = 0) -> Source:
    """Records of two components, and ``cls``; photos that only their first and last bytes make so."""
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


def wait_until(is_true: Callable[[], object], what: str = "it never came") -> None:
    """Return when this is true; after two minutes, which a loaded machine may need, the test fails with ``what``."""
    deadline_s = time.monotonic() + 120
    while not is_true():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


def start_python(script: str, *arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
    """Run a script in an interpreter of its own, which finds the packages wherever pytest runs."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables)
