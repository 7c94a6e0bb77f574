"""The shards of a directory, staged into a cache file."""

from pathlib import Path

from dali_pipes.cache.cache import Verify
from dali_pipes.data_set.data_set import DataSet
from dali_pipes.formats.names import index_name
from dali_pipes.store.urls import resolve_shards


class Job:
    """The shards of a directory, a share of their cache file, and a stager that fills it."""

    def __init__(
        self,
        shards: Path,
        cache_dir: Path | None,
        *,
        reserved: int | None = None,
        cache_bytes: int | None = None,
        group: int = 1,
        verify: Verify = "first",
    ) -> None:
        self.directory = shards
        self.indexed = DataSet(resolve_shards(shards, endpoint=None))
        self.share = self.indexed.open_share(
            reserved=reserved,
            is_windowed=reserved is not None,
            group=group,
            cache_dir=cache_dir,
            cache_bytes=cache_bytes,
            verify=verify,
        )
        self.stager = self.indexed.open_stager(self.share, num_fetchers=3)
        self.all = list(range(self.indexed.manifest.num_shards))

    def object_bytes(self, shard: int) -> int:
        """Bytes of a shard and its index."""
        manifest = self.indexed.manifest
        return int(manifest.shard_bytes[shard] + manifest.index_bytes[shard])

    def wrong(self) -> list[int]:
        """The shards that do not lie there byte for byte, with their indexes."""
        return [shard for shard in self.all if not self._is_right(shard)]

    def check(self, *shards: int) -> None:
        """Shard and index lie there, byte for byte."""
        assert all(map(self._is_right, shards))

    def _is_right(self, shard: int) -> bool:
        path = self.directory / self.indexed.manifest.names[shard]
        index = path.with_name(index_name(path.name))
        return (
            self.share.shard_extent(shard).read() == path.read_bytes()
            and self.share.index_extent(shard).read() == index.read_bytes()
        )

    def close(self) -> None:
        self.stager.close()
        self.share.close()
