"""Small data sets in each layout, and an embedded node that the tests share."""

import io
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from prep import embedded
from prep.records import Record, Source
from prep.store import AisStore

REPOSITORY = Path(__file__).parents[2]


def encode_photo(
    extension: str = "jpg", *, size: tuple[int, int] = (32, 24), mode: str = "RGB", seed: int = 0
) -> bytes:
    """A photo of noise: seeds give different bytes."""
    generator = np.random.default_rng(seed)
    height_width = (size[1], size[0])
    shape = height_width if mode == "L" else (*height_width, len(mode))
    photo = Image.fromarray(generator.integers(0, 256, shape, np.uint8))
    stream = io.BytesIO()
    photo.save(stream, {"jpg": "JPEG", "png": "PNG", "gif": "GIF", "webp": "WEBP"}[extension])
    return stream.getvalue()


def encode_mask(*, size: tuple[int, int] = (32, 24)) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((size[1], size[0]), 2, np.uint8)).save(stream, "PNG")
    return stream.getvalue()


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


def make_source(count: int, *, num_bytes: int = 700, seed: int = 0) -> Source:
    """Records of two components, and ``cls``; photos that only their first bytes make so."""
    generator = np.random.default_rng(seed)
    records = [
        Record(
            key=f"folder/{number:04d}",
            components={
                "image.jpg": b"\xff\xd8\xff" + generator.bytes(num_bytes + 7 * number),
                "json": b'{"number": %d}' % number,
            },
            label=number % 3,
        )
        for number in range(count)
    ]
    return Source(name="made up", records=records, classes={0: "zero", 1: "one", 2: "two"})


def start_python(script: str, *arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
    """Run a script in an interpreter of its own, which finds the packages wherever pytest runs."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables)


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of an embedded node that all tests share; each uses a bucket of its own."""
    with embedded.start(tmp_path_factory.mktemp("node")) as running:
        yield running.endpoint


@pytest.fixture
def bucket(node: str, request: pytest.FixtureRequest) -> AisStore:
    """A bucket that is not made yet."""
    return AisStore(node, f"b{abs(hash(request.node.nodeid)):x}")


@pytest.fixture
def closed_port() -> int:
    """A port at which nothing answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
