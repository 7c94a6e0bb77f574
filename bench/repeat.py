"""Few samples to many: the shards of a small set written again under new keys, until a run is long enough to time."""

import io
import tarfile
from pathlib import Path

from prep.archive import ArchiveReader
from prep.errors import DataError
from prep.progress import progress
from prep.store import LocalStore
from prep.urls import ShardSet

__all__ = ["repeat_shards"]


def repeat_shards(shards: ShardSet, *, num_samples: int, directory: Path) -> ShardSet:
    """Write ``num_samples`` samples into as many shards as there were, and return those.

    Round *r* of sample ``a/001`` has the key ``r0/a/001``, ``r1/a/001``, ...; its bytes are the original's. The last
    round is cut short.

    Raises:
        DataError: If there is no sample.
    """
    samples = [sample for name in shards.names for sample in _samples(shards, name)]
    if not samples:
        raise DataError(f"'{shards.url}' holds no sample to repeat")
    num_shards = len(shards.names)
    bounds = [num_samples * shard // num_shards for shard in range(num_shards + 1)]
    names = [f"repeated-{shard:06d}.tar" for shard in range(num_shards)]
    for shard in progress(range(num_shards), what="repeat samples", unit="shard"):
        with tarfile.open(directory / names[shard], "w") as archive:
            for row in range(bounds[shard], bounds[shard + 1]):
                for name, data in samples[row % len(samples)]:
                    member = tarfile.TarInfo(f"r{row // len(samples)}/{name}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    return ShardSet(store=LocalStore(directory), names=tuple(names))


def _samples(shards: ShardSet, name: str) -> list[list[tuple[str, bytes]]]:
    """The samples of a shard, each its members' names and bytes."""
    samples: list[list[tuple[str, bytes]]] = []
    current: str | None = None
    with shards.store.open(name) as stream:
        for member in ArchiveReader(stream, shard=shards.store.locate(name)):
            if member.key != current:
                samples.append([])
                current = member.key
            samples[-1].append((member.name, member.read()))
    return samples
