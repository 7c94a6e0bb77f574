"""The shards of one store that a user named."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, cast

from dali_pipes.errors import DataError, PipesError, StoreError, shown
from dali_pipes.formats.names import manifest_name
from dali_pipes.store.base import Store
from dali_pipes.store.checksums import XXH64_TYPES, damaged
from dali_pipes.store.shard_names import ObjectEntry, ending_of, prefix_of, shared_prefix

if TYPE_CHECKING:
    from dali_pipes.formats.manifest import Manifest
    from dali_pipes.store.listings import Found


@dataclass(frozen=True, kw_only=True)
class ShardSet:
    """Shards of one store, in the order they were named."""

    store: Store
    names: Sequence[str]
    """Of the shards; a whole manifest's are its own `Texts`."""
    manifest: "Manifest | None" = field(default=None, compare=False, repr=False)
    """The manifest that named these shards, with all shards that it lists; ``None``: none was asked."""
    manifest_prefix: str | None = None
    """The prefix of that manifest's name; ``None``: the prefix that the shards share."""
    version: int | None = None

    named_by: str = field(default="", compare=False)
    """Without a manifest: what names shards beside the listing, for errors: see `dali_pipes.data_set.written`."""
    recorded: tuple[int, int] | None = field(default=None, compare=False)
    """Number and bytes of all shards of the set, as the record of the command that wrote them says."""

    def __hash__(self) -> int:
        return hash((self.store, len(self.names), self.manifest_prefix, self.version))  # a million names, too

    @cached_property
    def prefix(self) -> str:
        """The prefix of the names of these shards' manifest and class table: see `shared_prefix`."""
        return shared_prefix(self.names) if self.manifest_prefix is None else self.manifest_prefix

    @property
    def url(self) -> str:
        """The set in one line, for messages and commands: ``ais://pets/shuffled-``, ``ais://pets/shuffled-@3``."""
        return f"{self.store.locate(self.prefix)}{'' if self.version is None else f'@{self.version}'}"

    @property
    def index_command(self) -> str:
        """The command that indexes these shards, for messages."""
        return index_command(self.store, self.prefix)

    @property
    def drop_command(self) -> str:
        """The command that drops shards from this data set, for messages."""
        if self.manifest is not None and self.manifest.version > 1:
            return f"dali-pipes prep remove '{self.store.locate(self.prefix)}' --shard NAME"
        return f"{self.index_command} --allow-missing"

    def entries(self) -> Sequence[ObjectEntry]:
        """The store's entry of each shard, see `all_of`. For a shard that is read through an ETL: of the stored one."""
        return self.all_of(self.store.find_all(self.names))

    def all_of(self, found: "Found") -> Sequence[ObjectEntry]:
        """What `Store.find_all` found for these shards.

        Raises:
            StoreError: If a shard is missing (names the first ones), or their bytes are not those of the record.
        """
        if missing := found.lacking(self.names):
            raise self.missing(missing)
        entries = cast("Sequence[ObjectEntry]", found)
        num_shards, num_bytes = self.recorded or (0, 0)
        if num_shards == len(entries) and (num := sum(entry.size for entry in entries)) != num_bytes:
            raise StoreError(
                f"'{self.url}': the {num_shards} shards have {num} bytes, and the command that wrote them recorded "
                f"{num_bytes}; it was stopped, or a shard was replaced: run it again, or, if the shards are complete: "
                f"{self.drop_command}"
            )
        return entries

    def missing(self, names: Sequence[str]) -> StoreError:
        """The error for some of these shards, which are not in the store."""
        store = self.store
        if self.manifest is None and not self.named_by:
            return named_missing(store, names, num_named=len(self.names))
        at = f" at {store.endpoint}" if store.endpoint else ""
        text = f"no shard {shown(list(map(store.locate, names)))}{at}; "
        if self.named_by:
            text += f"{self.named_by}, missing: {len(names)} of {len(self.names)}; "
            text += "perhaps a target of the cluster is away; " if store.cluster is not None else ""
        else:
            manifest = store.locate(manifest_name(self.prefix))
            text += f"'{manifest}' lists {len(self.names)}, {len(names)} of them missing; "
        return StoreError(f"{text}{missing_advice(self.drop_command)}")


def index_command(store: Store, prefix: str) -> str:
    """The command that indexes the shards under a prefix, for messages."""
    return f"dali-pipes prep index '{store.locate(prefix)}'{f' --etl {store.etl}' if store.etl else ''}"


def named_missing(store: Store, missing: Sequence[str], *, num_named: int) -> StoreError:
    """The error for shards that a user named one by one, and that are not in the store."""
    at = f" at {store.endpoint}" if store.endpoint else ""
    text = f"no shard {shown(list(map(store.locate, missing)))}{at}; "
    if store.directory is None and any("*" in name for name in missing):
        text += "'*' is no wildcard in a bucket: name the prefix alone; "
    prefix = os.path.commonprefix(missing)  # noqa: RUF071 (by character is what is meant)
    return StoreError(f"{text}{num_named} were named{there_is(store, prefix)}")


def there_is(store: Store, prefix: str) -> str:
    """The data sets in a prefix's folder, as the end of an error's text; empty if none is listed."""
    folder = prefix.rpartition("/")[0]
    try:
        names = [entry.name for entry in store.list(f"{folder}/" if folder else "")]
    except (PipesError, OSError):
        return ""  # the error that this text is for matters more
    prefixes = sorted({prefix_of(name) for name in names if ending_of(name)})
    return f"; found: {shown([store.locate(name) for name in prefixes])}" if prefixes else ""


def missing_advice(drop_command: str = "dali-pipes prep index URL --allow-missing") -> str:
    """What to do about a shard that a manifest lists and its store lacks, as the end of an error's text."""
    return (
        "put it back; to read the data set without it, pass select=Select(allow_missing=True) to a loader, or "
        f"--allow-missing to a command that has it; to drop it for good: {drop_command}"
    )


def check_bytes(store: Store, entry: ObjectEntry, checksum: int) -> None:
    """Refuse a shard that was read with other bytes than AIStore stored: a target sends what its disk has.

    Raises:
        DataError: If the listing's checksum is another XXH64.
    """
    found, cluster = f"{checksum:016x}", store.cluster
    if store.etl or cluster is None or entry.checksum in (None, found):
        return
    kind, known = store.access().known_checksum(entry) or ("", "")
    if kind in XXH64_TYPES and known != found:
        cause = f"its bytes have the {kind} {found}, AIStore stored it with {known}"
        target = cluster.target_of(entry.name)
        raise DataError(damaged(store.locate(entry.name), cause, target=target, bucket=store.url))
