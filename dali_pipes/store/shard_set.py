"""The shards of one store that a user named."""

from dataclasses import dataclass

from dali_pipes.errors import StoreError, shown
from dali_pipes.store.base import Store
from dali_pipes.store.entries import ObjectEntry
from dali_pipes.store.shard_names import shared_prefix


@dataclass(frozen=True, kw_only=True)
class ShardSet:
    """Shards of one store, in the order they were named."""

    store: Store
    names: tuple[str, ...]

    @property
    def prefix(self) -> str:
        """The prefix of the names of these shards' manifest and class table: see `shared_prefix`."""
        return shared_prefix(self.names)

    @property
    def url(self) -> str:
        """The set in one line, for messages and commands: ``ais://pets/shuffled-``."""
        return self.store.locate(self.prefix)

    @property
    def index_command(self) -> str:
        """The command that indexes these shards, for messages."""
        return f"dali-pipes prep index '{self.url}'{f' --etl {self.store.etl}' if self.store.etl else ''}"

    def entries(self) -> list[ObjectEntry]:
        """The store's entry of each shard. For a shard that is read through an ETL: of the stored shard.

        Raises:
            StoreError: If a shard is missing; names the first ones.
        """
        found = self.store.find_all(self.names)
        if missing := [name for name in self.names if name not in found]:
            raise missing_shards(self.store, missing, num_named=len(self.names))
        return [found[name] for name in self.names]


def missing_shards(store: Store, missing: list[str], *, num_named: int) -> StoreError:
    """The error for shards that were named and are not in their store."""
    where = f" at {store.endpoint}" if store.endpoint else ""
    return StoreError(f"no shard {shown([store.locate(name) for name in missing])}{where}; {num_named} were named")
