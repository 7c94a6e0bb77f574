"""The shards of one store that a user named."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, cast

from dali_pipes.errors import DataError, StoreError, shown
from dali_pipes.formats.names import manifest_name
from dali_pipes.store.base import Store
from dali_pipes.store.checksums import XXH64_TYPES
from dali_pipes.store.entries import ObjectEntry
from dali_pipes.store.messages import damaged
from dali_pipes.store.patterns import there_is
from dali_pipes.store.shard_names import shared_prefix

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
    """The version of the data set that was asked for; ``None``: the newest."""

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
        """The store's entry of each shard. For a shard that is read through an ETL: of the stored shard.

        Raises:
            StoreError: If a shard is missing; names the first ones.
        """
        (found,) = self.store.find_all(self.names)
        return self.all_of(found)

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

    def missing(self, names: Sequence[str], *, is_read: bool = True) -> StoreError:
        """The error for some of these shards, which are not in the store; ``is_read``: see `missing_shards`."""
        if self.named_by:
            causes = "perhaps the command that writes them was stopped"
            if self.store.cluster is not None:
                causes = f"perhaps a target of the cluster is away, or {causes.removeprefix('perhaps ')}"
            where = f" at {self.store.endpoint}" if self.store.endpoint else ""
            return StoreError(
                f"no shard {shown([self.store.locate(name) for name in names])}{where}; {self.named_by}, missing: "
                f"{len(names)} of {len(self.names)}; {causes}; put them back, or write them again; to go on without "
                f"them: {self.drop_command}; a loader also takes select=Select(allow_missing=True)"
            )
        manifest = None if self.manifest is None else self.store.locate(manifest_name(self.prefix))
        return missing_shards(
            self.store,
            names,
            num_named=len(self.names),
            manifest=manifest,
            drop_command=self.drop_command,
            is_read=is_read,
        )


def index_command(store: Store, prefix: str) -> str:
    """The command that indexes the shards under a prefix, for messages."""
    return f"dali-pipes prep index '{store.locate(prefix)}'{f' --etl {store.etl}' if store.etl else ''}"


def missing_shards(
    store: Store,
    missing: Sequence[str],
    *,
    num_named: int,
    manifest: str | None = None,
    drop_command: str = "",
    is_read: bool = True,
) -> StoreError:
    """The error for shards that are not in their store, and that a user, or the ``manifest`` there, named.

    ``is_read``: for a loader or a command that can read the data set without them.
    """
    where = f" at {store.endpoint}" if store.endpoint else ""
    text = f"no shard {shown([store.locate(name) for name in missing])}{where}; "
    advice = missing_advice(drop_command) if is_read else dropping_advice(drop_command)
    if manifest is None:
        if store.directory is None and (odd := next((name for name in missing if "*" in name), None)):
            start = store.locate(odd.partition("*")[0])
            text += f"'*' is no wildcard in a bucket, '{start}' names all shards that start so; "
        found = there_is(store, os.path.commonprefix(missing))  # noqa: RUF071 (by character is what is meant)
        return StoreError(f"{text}{num_named} were named{found}")
    return StoreError(f"{text}'{manifest}' lists {num_named}, {len(missing)} of them missing; {advice}")


def missing_advice(drop_command: str = "dali-pipes prep index URL --allow-missing") -> str:
    """What to do about a shard that the manifest lists and the store lacks, as the end of an error's text."""
    without = "to read the data set without it, pass select=Select(allow_missing=True) (--allow-missing); "
    return f"put it back; {without}{dropping_advice(drop_command).removeprefix('put it back; ')}"


def dropping_advice(drop_command: str) -> str:
    """The same where a command cannot go on without the shard."""
    return f"put it back; to drop it for good: {drop_command}"


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
