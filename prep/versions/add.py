"""Add the records of a source to a data set: pack and index new shards, and write a version that has them, too.

Of the data set's files the manifest is read. If keys are compared, column files are read, too: its own, and those of
the data sets beside it; and where its photos are as large as an added one, some shard indexes and photos. The names of
the new shards hold a digest of the records, such as ``shuffled-add-3f9a6c01d2-000000.tar``. So two writers at a time
use different names, and an interrupted command finds the shards that it has written already when it is run again.
"""

import hashlib
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dali_pipes.data_set.data_set import DataSet
from dali_pipes.errors import DataError
from dali_pipes.formats.manifest import ShardsPart, concatenate
from dali_pipes.formats.names import classes_name, recoded_name
from dali_pipes.store.shard_set import ShardSet
from prep.index import index_without_manifest
from prep.pack.pack import NoRecordLeftError, PackJob, PackReport, pack
from prep.sources.record import Source, as_entry
from prep.tar.writer import Part as Content
from prep.versions.fit import check_components, fit_classes, leave_out_known
from prep.versions.publish import Newest, write_version
from prep.versions.same_photos import warn_of_same_photos

if TYPE_CHECKING:
    from prep.left_out import MaxBad
    from prep.recode.photos import Recoding


WHAT = "add"
TOKEN_DIGITS = 10
_log = logging.getLogger(__name__)
# Arguments of `pack` by which the bytes of shards differ.
_MATTERS = ("max_count", "max_bytes", "on_bad", "max_pixels", "recode")


@dataclass(frozen=True, kw_only=True)
class AddReport:
    """The result of an addition, or with ``dry_run`` the result that it would have."""

    url: str
    """The data set: ``ais://pets/shuffled-``."""
    version: int
    """The version that has the records; with ``dry_run``, the version that there is."""
    packed: PackReport | None = None
    """The new shards; ``None`` if an earlier run of the command wrote this version, or no record is new."""
    num_known: int = 0
    """Records that were left out, because the data set has their keys."""
    elsewhere: Mapping[str, int] = field(default_factory=dict)
    """URL of another data set beside it -> records that were left out, because that one has their keys."""
    num_same_photos: int = 0
    """Added samples whose photo the data set had under another key: see `warn_of_same_photos`."""
    new_classes: dict[int, str]
    """Class id -> name, of the classes that the data set did not have."""
    num_shards: int
    """Of the whole data set."""
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
    any_components: bool = False,
    dry_run: bool = False,
    show_progress: bool = False,
    **packing: Any,
) -> AddReport:
    """Add the records of a source to a data set, as its next version.

    Args:
        source: The records.
        old: The data set: see `prep.versions.publish.open_newest`.
        command: The command line, for the history.
        compare_keys: Whether the column files of the data set and of those beside it are read, which takes about 20
            bytes a sample, to find keys that they have already; and to warn of photos that the data set has already.
        skip_known: Leave out records whose key the data set has, or one beside it; otherwise they are an error, unless
            an earlier run of the command added them.
        shares_keys: Take keys that only other data sets have.
        any_components: Allow records that lack a component which all samples of the data set have.
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
    source = fit_classes(source, old.manifest, url=old.url)
    report = AddReport(
        url=old.url,
        version=old.manifest.version,
        new_classes={label: source.classes[label] for label in sorted(source.classes.keys() - old.manifest.classes)},
        num_shards=old.manifest.num_shards,
        num_samples=old.manifest.num_kept,
        dry_run=dry_run,
    )
    token = token_of(source, packing)
    packing["max_bad"] = _of_whole_source(packing.get("max_bad"), source)
    new, num_known, elsewhere = _new_records(source, old, token, compare_keys, skip_known, shares_keys)
    if new.records:
        _warn_of_recoding(old, packing.get("recode"))
        job = PackJob(
            store=old.store,
            prefix=f"{old.prefix}{_free_part(old, token_of(new, packing))}",
            dry_run=dry_run,
            show_progress=show_progress,
            check_components=None if any_components else partial(check_components, old, source.name),
            **packing,
        )
        packed = _pack(new, job, all_new=len(new.records) == len(source.records))
        report = replace(report, packed=packed)
        if packed is not None and any((change.what, change.token) == (WHAT, token) for change in old.manifest.history):
            _log.warning("%d samples that an earlier run added were removed since; they come back", packed.num_samples)
    if report.packed is not None and not dry_run:
        shards = _index(report.packed, job, source.classes)
        assert shards.manifest is not None
        parts = [*old.parts, ShardsPart(job.prefix.removeprefix(old.prefix), len(shards.names))]
        whole = concatenate([old.manifest, shards.manifest])
        made = write_version(old, whole, parts, what=WHAT, token=token, command=command)
        num_same_photos = warn_of_same_photos(DataSet(shards), DataSet(old.shards)) if compare_keys else 0
        report = replace(report, version=made.version, num_shards=made.num_shards, num_samples=made.num_kept)
        report = replace(report, num_same_photos=num_same_photos)
    return replace(report, num_known=num_known, elsewhere=elsewhere, elapsed_s=time.perf_counter() - started)


def _new_records(
    source: Source, old: Newest, token: str, compare_keys: bool, skip_known: bool, shares_keys: bool
) -> tuple[Source, int, Mapping[str, int]]:
    """The records to be added, and how many are left out: see `leave_out_known`."""
    added = [
        change.num_samples - before.num_samples
        for before, change in pairwise(old.manifest.history)
        if (change.what, change.token) == (WHAT, token)
    ]
    if added and not compare_keys:
        if sum(added) == _num_of_part(old, _part(token)):
            return replace(source, records=[]), 0, {}
        raise DataError(
            f"{source.name}: an earlier prep add added these records to '{old.url}', and since then some were removed "
            "or written anew; leave out --no-compare-keys, so that none is added twice"
        )
    data_set = DataSet(old.shards)
    if not data_set.has_columns():
        raise DataError(f"'{old.url}' has no column file; index it anew: {old.shards.index_command}")
    if not compare_keys:
        return source, 0, {}
    # The records of an earlier run of the same command are no mistake.
    return leave_out_known(source, data_set, old, skip=skip_known or bool(added), shares_keys=shares_keys)


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


def token_of(source: Source, packing: Mapping[str, Any]) -> str:
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


def _num_of_part(old: Newest, part: str) -> int | None:
    """How many samples of a part's shards are in the data set; ``None`` if it does not list such shards."""
    manifest = old.manifest
    rows = [row for row, name in enumerate(manifest.names) if name.startswith(f"{old.prefix}{part}")]
    return int((manifest.samples - manifest.num_removed)[rows].sum()) if rows else None


def _free_part(old: Newest, digest: str) -> str:
    """The part of the new shards' names; if there are shards of that name, their samples were removed."""
    if _num_of_part(old, _part(digest)) is not None:
        # The manifest is the same until a version is written.
        digest = hashlib.sha256(f"{digest} {old.manifest.digest}".encode()).hexdigest()[:TOKEN_DIGITS]
    return _part(digest)


def _part(token: str) -> str:
    return f"{WHAT}-{token}-"


def _of_whole_source(max_bad: "MaxBad | None", source: Source) -> "MaxBad | None":
    """The limit as a number: a share is one of all records, also of those that are known and left out."""
    if max_bad is None or max_bad.count is not None:
        return max_bad
    total = len(source.records) + len(source.skipped) + len(source.broken)
    return replace(max_bad, count=int(max_bad.share * total))


def _warn_of_recoding(old: Newest, recode: "Recoding | None") -> None:
    """Say so if the photos of the data set were resized or optimized, and those of the records will not be."""
    if old.manifest.recoded and (recode is None or not recode.is_on):
        settings = ", ".join(f"{name}={value}" for name, value in old.manifest.recoded[-1].settings.items())
        _log.warning(
            "the photos of '%s' were recoded (%s), and those that are added keep their bytes; to recode them alike, "
            "give prep add the same options, such as --short-side", old.url, settings,
        )  # fmt: skip


def described_classes(classes: Mapping[int, str]) -> str:
    """``2 new classes: 'dog' (3), 'fox' (4)``."""
    names: Iterable[str] = (f"'{name}' ({label})" for label, name in list(classes.items())[:5])
    more = f" and {len(classes) - 5} more" if len(classes) > 5 else ""
    return f"{len(classes)} new class{'' if len(classes) == 1 else 'es'}: {', '.join(names)}{more}"
