"""Find the newest version of a data set, and write the next one.

A version is a manifest that never changes, ``PREFIXmanifest@3.safetensors``. ``PREFIXmanifest.safetensors`` is a copy
of the newest one, which readers find without a listing. A version exists from the moment when its own manifest is
created, and only one writer can create it (`Store.write_new`). The copy follows: whoever wrote it looks afterwards
whether there is a later version by now. So the copy stays behind only if a writer is stopped in between. Then readers
read the version before, and the next command that changes the data set writes the copy first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from dali_pipes.data_set.indexing import class_table_file
from dali_pipes.data_set.named import known_shards
from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.manifest import Change, Manifest, ShardsPart, write_steps
from dali_pipes.formats.names import classes_name, manifest_name, recoded_name, version_name
from dali_pipes.store.base import Store
from dali_pipes.store.shard_set import ShardSet, index_command

TOKEN_DIGITS = 10
"""Hexadecimal digits of the digest that identifies a change; it is in the history, and in the names of new objects."""


@dataclass(frozen=True, kw_only=True)
class Newest:
    """The newest version of a data set."""

    store: Store
    prefix: str
    manifest: Manifest

    @property
    def url(self) -> str:
        return self.store.locate(self.prefix)

    @property
    def parts(self) -> tuple[ShardsPart, ...]:
        """The column files; version 1 has one."""
        return self.manifest.parts or (ShardsPart("", self.manifest.num_shards),)

    @property
    def shards(self) -> ShardSet:
        return ShardSet(
            store=self.store, names=tuple(self.manifest.names), manifest=self.manifest, manifest_prefix=self.prefix
        )


def open_newest(url: str, *, endpoint: str | None) -> Newest:
    """The newest version of the data set that ``url`` names; a copy that stayed behind is written anew.

    Raises:
        DataError: If the data set is not indexed, or the manifest is broken.
        StoreError: See `dali_pipes.data_set.named.known_shards`.
        ValueError: If ``url`` names an older version, or only some of the data set's shards.
    """
    shards = known_shards(url, endpoint=endpoint)
    where = shards.store.locate(shards.prefix)
    if shards.version is not None:
        raise ValueError(f"'{url}' names a version, and only the newest can be changed; name '{where}'")
    manifest = shards.manifest
    if manifest is None:
        raise DataError(
            f"'{where}' has no manifest, so it has no versions; index it first: "
            f"{index_command(shards.store, shards.prefix)}"
        )
    if len(shards.names) != manifest.num_shards:
        raise ValueError(
            f"'{url}' names {len(shards.names)} of {manifest.num_shards} shards; name the whole data set: '{where}'"
        )
    if (later := _later(shards.store, shards.prefix, manifest)) is not None:
        manifest = _publish(shards.store, shards.prefix, later)
    return Newest(store=shards.store, prefix=shards.prefix, manifest=manifest)


def history_of(manifest: Manifest) -> tuple[Change, ...]:
    """All versions up to this one."""
    samples, shards = manifest.num_kept, manifest.num_shards
    return manifest.history or (Change(1, "", "index", "", "", num_samples=samples, num_shards=shards, digest=""),)


def write_version(
    old: Newest, shards: Manifest, parts: Sequence[ShardsPart], *, what: str, token: str, command: str
) -> Manifest:
    """Write the next version of a data set, make it the newest, and return it.

    ``shards`` is its manifest, without its version, and ``parts`` are its column files; these are written already, as
    are its shards and their indexes. ``what`` is as in `Change`; ``token`` is the same whenever the
    same command is run.

    Raises:
        StoreError: If another command wrote this version meanwhile. What it wrote stays as it is.
    """
    store, prefix, before = old.store, old.prefix, old.manifest
    if before.version == 1:
        _keep_first(store, prefix, before, by=token)
    made = replace(shards, version=before.version + 1, parts=tuple(parts), history=())
    entry = Change(
        version=made.version,
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        what=what,
        token=token,
        command=command,
        num_samples=made.num_kept,
        num_shards=made.num_shards,
        digest=before.digest,
    )
    made = replace(made, history=(*history_of(before), entry))
    if store.write_new(version_name(prefix, made.version), made.to_bytes(), by=token):
        _publish(store, prefix, made)
        return made  # there may be a later version by now
    other = find_version(store, prefix, made.version)
    assert other is not None, "it was there a moment ago"
    newest = _publish(store, prefix, _later(store, prefix, other) or other)
    written = other.history[-1]
    if written.token == token and written.what == what:
        return other  # by an earlier run of this command
    raise StoreError(
        f"another command wrote version {other.version} of '{old.url}' meanwhile: {written.command or written.what}, "
        f"{written.date}; this one wrote no version; run it again, and it changes version {newest.version}"
    )


def _keep_first(store: Store, prefix: str, first: Manifest, *, by: str) -> None:
    """Give version 1 a manifest that never changes."""
    name = version_name(prefix, 1)
    if store.write_new(name, store.read(manifest_name(prefix)), by=by):
        return
    kept = find_version(store, prefix, 1)
    if kept is None or kept.digest != first.digest:
        raise StoreError(
            f"'{store.locate(name)}' lists other shards than '{store.locate(manifest_name(prefix))}', expected its "
            "copy; were the shards indexed anew meanwhile? delete it if no job reads that version"
        )


def _publish(store: Store, prefix: str, manifest: Manifest) -> Manifest:
    """Make a version the newest, or a later one that exists by then; returns that."""
    while True:
        # The files beside the shards, for commands that pack or shuffle them; older versions have a part of each.
        for name, data in (
            (classes_name(prefix), class_table_file(manifest.classes) if manifest.classes else None),
            (recoded_name(prefix), write_steps(manifest.recoded) if manifest.recoded else None),
        ):
            if data is not None and store.find(name) != data:
                store.write(name, data)
        store.write(manifest_name(prefix), store.read(version_name(prefix, manifest.version)))
        later = _later(store, prefix, manifest)
        if later is None:
            return manifest
        manifest = later


def _later(store: Store, prefix: str, before: Manifest) -> Manifest | None:
    """The last version after this one; ``None`` if there is none."""
    found: Manifest | None = None
    while (later := find_version(store, prefix, before.version + 1)) is not None:
        if later.history[-1].digest != before.digest:
            raise DataError(
                f"'{store.locate(version_name(prefix, later.version))}' does not follow version {before.version}, "
                f"expected one made from manifest {before.digest[:12]}..., found {later.history[-1].digest[:12]}...; "
                "were the shards packed or indexed anew? delete it if no job reads that version"
            )
        found = before = later
    return found


def find_version(store: Store, prefix: str, version: int) -> Manifest | None:
    """The manifest of one version, from its own file; ``None`` if there is none."""
    name = version_name(prefix, version)
    data = store.find(name)
    return None if data is None else Manifest.from_bytes(data, where=store.locate(name))
