"""Add the records of a source to a data set: pack and index new shards, and write a version that has them, too.

Of the data set's files the manifest is read. If keys are compared, column files are read, too: its own, and those of
the data sets beside it; and where photos are as high and wide as an added one, indexes of shards. The names
of the new shards hold a digest of the records, such as ``shuffled-add-3f9a6c01d2-000000.tar``. So two writers at a
time use different names, and an interrupted command finds the shards that it has written when it is run again.
"""

import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dali_pipes.arrays import Int64s
from dali_pipes.data_set.data_set import DataSet
from dali_pipes.data_set.indexing import stored_versions
from dali_pipes.errors import DataError
from dali_pipes.formats.manifest import ShardsPart, concatenate
from dali_pipes.formats.names import classes_name, described, recoded_name
from dali_pipes.store.shard_set import ShardSet
from prep.index import index_without_manifest
from prep.pack.pack import NoRecordLeftError, PackJob, PackReport, pack
from prep.sources.record import Source, as_entry
from prep.tar.writer import Part as Content
from prep.versions.fit import (
    MAX_READ_BYTES,
    check_components,
    find_same_photos,
    fit_classes,
    leave_out,
    leave_out_known,
    same_photos_text,
    sets_beside,
)
from prep.versions.publish import TOKEN_DIGITS, Newest, find_version, write_version

_log = logging.getLogger(__name__)
SamePhotos = Literal["add", "skip", "fail"]
# Arguments of `pack` by which the bytes of shards differ.
_MATTERS = ("max_count", "max_bytes", "on_bad", "max_pixels", "recode")


@dataclass(frozen=True, kw_only=True)
class AddReport:
    """The result of an addition, or with ``dry_run`` the result that it would have."""

    url: str
    version: int
    """The version that has the records; with ``dry_run``, the version that there is."""
    packed: PackReport | None = None
    """The new shards; ``None`` if an earlier run of the command wrote this version, or no record is new."""
    num_known: int = 0
    """Records that were left out, because the data set has their keys."""
    elsewhere: Mapping[str, int] = field(default_factory=dict)
    """URL of another data set beside it -> records that were left out, because that one has their keys."""
    num_same_photos: int = 0
    """Samples whose photo the data set has, or one beside it, under another key: added, or with "skip" left out."""
    new_classes: dict[int, str]
    """Class id -> name, of the classes that the data set did not have."""
    num_shards: int
    num_samples: int
    elapsed_s: float = 0
    dry_run: bool


def add(
    source: Source,
    old: Newest,
    *,
    command: str = "",
    compare_keys: bool = True,
    skip_known: bool = False,
    shares_keys: bool = False,
    same_photos: SamePhotos = "add",
    any_components: bool = False,
    drop: Int64s | None = None,
    dry_run: bool = False,
    show_progress: bool = False,
    **packing: Any,
) -> AddReport:
    """Add the records of a source to a data set, as its next version.

    Args:
        source: The records.
        old: The data set: see `prep.versions.publish.open_newest`.
        command: For the history.
        compare_keys: Whether the column files of the data set and of those beside it are read, which takes about 20
            bytes a sample, to find keys and photos that they have already. Keys are always compared if an earlier run
            of this command added records, so that none is added twice.
        skip_known: Leave out records whose key the data set has, or one beside it; otherwise they are an error, unless
            an earlier run of the command added them.
        shares_keys: Take keys, and photos, that only other data sets have.
        same_photos: What happens to records whose photo, after recoding, the data set or one beside it has under
            another key. For this, their shards are packed first; they are deleted before new ones, or an error.
        any_components: Allow records that lack a component which all samples of the data set have.
        drop: All ordinals that the new version, a ``relabel``, leaves out, sorted; the records replace some of them.
        dry_run: Check and plan only.
        show_progress: Draw bars.
        packing: Further fields of `prep.pack.pack.PackJob`: ``max_count``, ``max_bytes``, ``on_bad``,
            ``recode``, ``jobs``, ``on`` (who also indexes) and others; no ``prefix``, ``overwrite`` or ``copy``. A
            share in ``max_bad`` is one of all records, the known ones included.

    Raises:
        DataError: If classes, keys or components do not fit (see `prep.versions.fit`), and where `pack` and
            `prep.index.index_shards` raise it. No version is written then.
        StoreError: If another command wrote the next version meanwhile, and where `pack` raises it.
    """
    started = time.perf_counter()
    beside = (other.manifest for other in sets_beside(old))
    source = fit_classes(source, old.manifest, url=old.url, beside=beside)
    report = AddReport(
        url=old.url,
        version=old.manifest.version,
        new_classes={label: source.classes[label] for label in sorted(source.classes.keys() - old.manifest.classes)},
        num_shards=old.manifest.num_shards,
        num_samples=old.manifest.num_kept,
        dry_run=dry_run,
    )
    if not DataSet(old.shards).has_columns():
        raise DataError(f"'{old.url}' has no column file; index it anew: {old.shards.index_command}")
    token, new = _token_of(source, packing), source
    is_again = any((change.what, change.token) == ("add", token) for change in old.manifest.history)
    if compare_keys or is_again:
        # The records of an earlier run of the same command are no mistake.
        new, num_known, elsewhere = leave_out_known(source, old, skip=skip_known or is_again, shares_keys=shares_keys)
        report = replace(report, num_known=num_known, elsewhere=elsewhere)
    if new.records:
        if drop is None:
            _warn_of_recoding(old, packing.get("recode"))
        max_bad = packing.get("max_bad")
        if max_bad is not None and max_bad.count is None:
            total = len(source.records) + len(source.skipped) + len(source.broken)
            packing["max_bad"] = replace(max_bad, count=int(max_bad.share * total))
        num_same = 0
        while new.records:
            digest = token if new is source else _token_of(new, packing)
            if same_photos != "add":  # these shards may be deleted again: no command with another rule takes any over
                rule = f"{digest} {same_photos} {shares_keys} {compare_keys}"
                digest = hashlib.sha256(rule.encode()).hexdigest()[:TOKEN_DIGITS]
            part = _free_part(old, digest)
            job = PackJob(
                store=old.store,
                prefix=f"{old.prefix}{part}",
                dry_run=dry_run,
                show_progress=show_progress,
                check_components=None if any_components else partial(check_components, old, source.name),
                **packing,
            )
            packed = _pack(new, job, all_new=len(new.records) == len(source.records))
            if packed is None or dry_run:
                break
            shards = _index(packed, job, source.classes)
            same = _same_photos(shards, old, beside=not shares_keys, rule=same_photos) if compare_keys else {}
            num_same += len(same)
            if not same or same_photos == "add":
                break
            _take_back(job, old)
            packed = None
            if same_photos == "fail":
                raise DataError(f"{same_photos_text(same, shards)}; leave them out with --same-photos skip")
            _log.warning("%s; they are left out", same_photos_text(same, shards))
            new = leave_out(new, same.keys())
        report = replace(report, packed=packed, num_same_photos=num_same)
    if is_again and report.packed is not None and not dry_run:  # a dry run compares no photos
        _log.warning(
            "%d samples of an earlier run are added again: they were removed since, or left out",
            report.packed.num_samples,
        )
    if report.packed is not None and not dry_run:
        assert shards.manifest is not None
        parts = [*old.parts, ShardsPart(part, len(shards.names))]
        whole = concatenate([old.manifest if drop is None else replace(old.manifest, removed=drop), shards.manifest])
        made = write_version(old, whole, parts, what="add" if drop is None else "relabel", token=token, command=command)
        report = replace(report, version=made.version, num_shards=made.num_shards, num_samples=made.num_kept)
    return replace(report, elapsed_s=time.perf_counter() - started)


def _pack(new: Source, job: PackJob, *, all_new: bool) -> PackReport | None:
    """Pack the records; ``None`` if all that are new are bad, and may be left out."""
    try:
        return pack(new, job)
    except NoRecordLeftError as exc:
        if all_new or not (job.max_bad is None or job.max_bad.allows(exc.num_left_out, of=0)):
            raise
        _log.warning("%s", exc)
        return None


def _index(packed: PackReport, job: PackJob, classes: Mapping[int, str]) -> ShardSet:
    """Index the new shards; returns them with their manifest, which is not written."""
    shards = ShardSet(store=job.store, names=packed.shards, manifest_prefix=job.prefix)
    manifest = index_without_manifest(shards, classes=classes, on=job.on, show_progress=job.show_progress)
    for name_of in (classes_name, recoded_name):  # the manifest has what they say
        job.store.delete(name_of(job.prefix))
    return replace(shards, manifest=manifest)


def _same_photos(shards: ShardSet, old: Newest, *, beside: bool, rule: SamePhotos) -> dict[str, tuple[str, str]]:
    """The new samples whose photo is there already; see `find_same_photos`. With "add" they are logged."""
    known = [old, *(sets_beside(old) if beside else ())]
    same = find_same_photos(DataSet(shards), known, max_bytes=MAX_READ_BYTES if rule == "add" else None)
    if same and rule == "add":
        _log.warning(
            "%s; prep remove --key takes them out, --same-photos skip leaves them out", same_photos_text(same, shards)
        )
    return same


def _take_back(job: PackJob, old: Newest) -> None:
    """Delete the new shards, unless a version has them."""
    versions = (find_version(old.store, old.prefix, number) for number in stored_versions(old.store, old.prefix))
    if not any(name.startswith(job.prefix) for version in versions if version is not None for name in version.names):
        for entry in [*job.store.list(job.prefix), *job.store.list(described(job.prefix))]:
            job.store.delete(entry.name)


def _token_of(source: Source, packing: Mapping[str, Any]) -> str:
    """A digest of what is packed: keys, classes, for each component its bytes, or its file, size and time; and how."""
    state = hashlib.sha256(repr([packing.get(name) for name in _MATTERS]).encode())
    for record in source.records:
        key, parts = as_entry(record, source)
        described = [(component, _described(content)) for component, content in parts]
        state.update(repr((key, described)).encode("utf-8", "surrogateescape"))
    return state.hexdigest()[:TOKEN_DIGITS]


def _described(content: Content) -> object:
    if isinstance(content, bytes):
        return hashlib.sha256(content).digest()
    if isinstance(content, str):
        return content, _size_and_time(Path(content))
    file = content.file
    name = str(file) if isinstance(file, Path) else file.url
    changed = _size_and_time(file) if isinstance(file, Path) else None
    return name, changed, content.offset, content.size, content.head


def _size_and_time(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None  # a bad record, as `pack` finds
    return found.st_size, found.st_mtime_ns


def _free_part(old: Newest, digest: str) -> str:
    """The part of the new shards' names; if there are shards of that name, their samples were removed."""
    if any(name.startswith(f"{old.prefix}add-{digest}-") for name in old.manifest.names):
        # The manifest is the same until a version is written.
        digest = hashlib.sha256(f"{digest} {old.manifest.digest}".encode()).hexdigest()[:TOKEN_DIGITS]
    return f"add-{digest}-"


def _warn_of_recoding(old: Newest, recode: Any) -> None:
    """Say so if the photos of the data set were resized or optimized, and those of the records will not be."""
    if old.manifest.recoded and (recode is None or not recode.is_on):
        settings = ", ".join(f"{name}={value}" for name, value in old.manifest.recoded[-1].settings.items())
        _log.warning(
            "the photos of '%s' were recoded (%s), and those that are added keep their bytes; to recode them alike, "
            "give prep add the same options, such as --short-side", old.url, settings,
        )  # fmt: skip
