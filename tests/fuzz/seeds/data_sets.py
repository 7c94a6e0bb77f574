"""The files that `dali-pipes prep index` writes."""

import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.builders import make_samples, write_shards


class IndexFiles(NamedTuple):
    """The files of a data set of two shards."""

    manifest: bytes
    columns: bytes
    indexes: list[bytes]


def index_files() -> IndexFiles:
    """Index a few small samples."""
    with tempfile.TemporaryDirectory(prefix="dali-pipes-seeds-") as folder:
        path = write_shards(Path(folder) / "s", make_samples([(9, 8)] * 5), per_shard=3)
        manifest, columns = ((path / f"s-{kind}.safetensors").read_bytes() for kind in ("manifest", "columns"))
        indexes = [file.read_bytes() for file in sorted(path.glob("*.index.safetensors"))]
    return IndexFiles(manifest, columns, indexes)
