"""Add the records of a source to a data set: pack and index new shards, and write a version that has them, too.

Of the data set's files the manifest is read. If keys are compared, column files are read, too: its own, and those of
the data sets beside it; and where its photos are as large as an added one, some shard indexes and photos. The names of
the new shards hold a digest of the records, such as ``shuffled-add-3f9a6c01d2-000000.tar``. So two writers at a time
use different names, and an interrupted command finds the shards that it has written already when it is run again.
"""

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dali_pipes.data_set.data_set import DataSet
from dali_pipes.errors import DataError, shown
from dali_pipes.formats.manifest import Manifest, ShardsPart, concatenate
from dali_pipes.formats.names import LABEL_COMPONENT, classes_name, recoded_name
from dali_pipes.store.shard_set import ShardSet
from prep.index import index_without_manifest
from prep.pack.pack import NoRecordLeftError, PackJob, PackReport, pack
from prep.sources.record import Source, as_entry
from prep.tar.writer import Part as Content
from prep.versions.known import Compared, leave_out_known, warn_of_same_photos
from prep.versions.publish import Newest, write_version
from prep.workers import WorkersKind

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
    packed: PackReport | None
    """The new shards; ``None`` if an earlier run of the command wrote this version, or no record is new."""
    num_known: int
    """Records that were left out, because the data set has their keys."""
    elsewhere: Mapping[str, int]
    """URL of another data set beside it -> records that were left out, because that one has their keys."""
    num_same_photos: int
    """Added samples whose photo the data set had under another key: see `warn_of_same_photos`."""
    new_classes: dict[int, str]
    """Class id -> name, of the classes that the data set did not have."""
    num_shards: int
    """Of the whole data set."""
    num_samples: int
    elapsed_s: float
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
        skip_known: Leave out records whose key the data set has, or one beside it; otherwise they are an error.
        shares_keys: Take keys that only other data sets have.
        any_components: Allow records that lack a component which all samples of the data set have.
        dry_run: Check and plan only.
        show_progress: Draw bars.
        packing: Further fields of `prep.pack.pack.PackJob`: ``max_count``, ``max_bytes``, ``on_bad``,
            ``recode``, ``jobs``, ``on`` (who also indexes) and others; no ``prefix``, ``overwrite`` or ``copy``. A
            share in ``max_bad`` is one of all records, the known ones included.

    Raises:
        DataError: If the classes do not fit (see `fit_classes`), keys are known or components missing, and where
            `pack` and `prep.index.index_shards` raise it. No version is written then.
        StoreError: If another command wrote the next version meanwhile, and where `pack` raises it.
    """
    started = time.perf_counter()
    source = fit_classes(source, old.manifest, url=old.url)
    new_classes = {label: source.classes[label] for label in sorted(source.classes.keys() - old.manifest.classes)}

    compared = Compared(source)

    def report(manifest: Manifest, *, packed: PackReport | None, num_same_photos: int = 0) -> AddReport:
        return AddReport(
            url=old.url,
            version=manifest.version,
            packed=packed,
            num_known=compared.num_known,
            elsewhere=compared.elsewhere or {},
            num_same_photos=num_same_photos,
            new_classes=new_classes,
            num_shards=manifest.num_shards,
            num_samples=manifest.num_kept,
            elapsed_s=time.perf_counter() - started,
            dry_run=dry_run,
        )

    num_lost = _num_lost(old, token_of(source, packing))
    if num_lost == 0:
        return report(old.manifest, packed=None)
    if num_lost and not compare_keys:
        raise DataError(
            f"{source.name}: an earlier prep add added these records to '{old.url}', and since then {num_lost} of the "
            "samples were removed or written anew; leave out --no-compare-keys, so that none is added twice"
        )
    _warn_of_recoding(old, packing.get("recode"))
    data_set = DataSet(old.shards)
    if not data_set.has_columns():
        raise DataError(f"'{old.url}' has no column file; index it anew: {old.shards.index_command}")
    num_records = len(source.records)
    packing["max_bad"] = _of_whole_source(packing.get("max_bad"), source)
    if compare_keys:
        compared = leave_out_known(source, data_set, old, skip=skip_known, shares_keys=shares_keys)
        source = compared.source
    some_known = len(source.records) < num_records
    if not source.records:
        return report(old.manifest, packed=None)
    token = _free_token(old, token_of(source, packing))
    part = f"{WHAT}-{token}-"
    prefix = f"{old.prefix}{part}"
    try:
        job = PackJob(
            store=old.store,
            prefix=prefix,
            dry_run=dry_run,
            show_progress=show_progress,
            check_components=None if any_components else partial(_check_components, old, source.name),
            **packing,
        )
        packed = pack(source, job)
    except NoRecordLeftError as exc:
        if not some_known or (packing["max_bad"] is not None and not packing["max_bad"].allows(exc.num_left_out, of=0)):
            raise
        _log.warning("%s", exc)
        return report(old.manifest, packed=None)
    if dry_run:
        return report(old.manifest, packed=packed)
    added = _index(old, packed, prefix, source.classes, on=packing.get("on", "processes"), show_progress=show_progress)
    new = ShardSet(store=old.store, names=packed.shards, manifest=added, manifest_prefix=prefix)
    num_same_photos = warn_of_same_photos(DataSet(new), data_set) if compare_keys else 0
    made = write_version(
        old,
        concatenate([old.manifest, added]),
        [*old.parts, ShardsPart(part, added.num_shards)],
        what=WHAT,
        token=token,
        command=command,
    )
    return report(made, packed=packed, num_same_photos=num_same_photos)


def _index(
    old: Newest,
    packed: PackReport,
    prefix: str,
    classes: Mapping[int, str],
    *,
    on: WorkersKind,
    show_progress: bool,
) -> Manifest:
    """Write the indexes and the column file of the new shards; returns their manifest, which is not written."""
    shards = ShardSet(store=old.store, names=packed.shards, manifest_prefix=prefix)
    added = index_without_manifest(shards, classes=classes, on=on, show_progress=show_progress)
    for name_of in (classes_name, recoded_name):  # the manifest has what they say
        old.store.delete(name_of(prefix))
    return added


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


def _num_lost(old: Newest, token: str) -> int | None:
    """How many samples that an earlier run of the command added are not in its shards any more, or not in the data set;
    ``None`` if there was no such run.
    """
    manifest, lost = old.manifest, None
    for own in _tokens(token):
        added = [
            change.num_samples - before.num_samples
            for before, change in pairwise(manifest.history)
            if (change.what, change.token) == (WHAT, own)
        ]
        if not added:
            return lost
        is_part = _is_part(old, own)
        lost = added[-1] - int((manifest.samples - manifest.num_removed)[is_part].sum())
        if not lost:
            return 0
    raise AssertionError("tokens have no end")


def _free_token(old: Newest, token: str) -> str:
    """The token, or one made from it, if there are shards of its name: samples that they hold were removed."""
    return next(own for own in _tokens(token) if not _is_part(old, own).any())


def _tokens(token: str) -> Iterator[str]:
    """The token, and those that stand for it when its records are added again."""
    while True:
        yield token
        token = hashlib.sha256(f"again {token}".encode()).hexdigest()[:TOKEN_DIGITS]


def _is_part(old: Newest, token: str) -> npt.NDArray[np.bool_]:
    start = f"{old.prefix}{WHAT}-{token}-"
    return np.array([name.startswith(start) for name in old.manifest.names], np.bool_)


def _of_whole_source(max_bad: "MaxBad | None", source: Source) -> "MaxBad | None":
    """The limit as a number: a share is one of all records, also of those that are known and left out."""
    if max_bad is None or max_bad.count is not None:
        return max_bad
    total = len(source.records) + len(source.skipped) + len(source.broken)
    return replace(max_bad, count=int(max_bad.share * total))


def _check_components(old: Newest, name: str, samples: Iterable[Set[str]]) -> None:
    """Refuse samples that lack a component which all samples have: a loader that takes it would refuse the data set."""
    usual = {component for component, number in old.manifest.components.items() if number == old.manifest.num_samples}
    lacking: Counter[str] = Counter()
    seen: set[str] = set()
    for components in samples:
        lacking.update(usual - components)
        seen |= components
    if lacking:
        counted = ", ".join(f"'{component}' ({number} records)" for component, number in sorted(lacking.items()))
        way = "name the components alike, or add the records as they are with --any-components"
        if LABEL_COMPONENT in lacking:
            way = f"for photos of a new class, give the folder that holds the class folder; or {way}"
        raise DataError(
            f"{name}: records lack components that every sample of '{old.url}' has: {counted}; found: "
            f"{shown(sorted(seen))}; {way}"
        )


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


# Classes


def fit_classes(source: Source, manifest: Manifest, *, url: str) -> Source:
    """The source with the class ids of a data set, and with the class table that the data set has afterwards.

    If the source only numbered the names of its classes (`Source.numbers_classes`), a known name gets the data set's
    id, and a new name the next id that is free. Otherwise its ids stay as they are. A table ``{0: "cat", 1: "dog"}``
    and the folders ``bird`` and ``dog`` give ``{0: "cat", 1: "dog", 2: "bird"}``.

    Raises:
        DataError: If the source has other names for known ids, or other ids for known names, and its ids must stay; or
            if only one of both has a class table.
    """
    known = dict(manifest.classes)
    if not source.classes:
        # Ids that the table lacks are refused when the shards are indexed.
        return replace(source, classes=known, numbers_classes=False)
    if not known and manifest.labels:
        raise DataError(
            f"'{url}' has class ids from {manifest.labels['min']} to {manifest.labels['max']} and no class table, and "
            f"{source.name} has names of classes ({shown(list(source.classes.values()))}); pack the source with ids "
            "(--label), or make the data set anew with a class table"
        )
    if not source.numbers_classes:
        _check_agree(source, known, url=url)
        return replace(source, classes=dict(source.classes) | known)
    ids = {name: label for label, name in known.items()}
    for name in sorted(source.classes.values()):
        ids.setdefault(name, max(ids.values(), default=-1) + 1)
    numbers = {label: ids[name] for label, name in source.classes.items()}
    # From here on the ids are the data set's: nothing may number the classes again.
    source = replace(source, classes={label: name for name, label in ids.items()}, numbers_classes=False)
    if all(label == number for label, number in numbers.items()):
        return source
    records = [
        record if record.label is None else replace(record, label=numbers[record.label]) for record in source.records
    ]
    return replace(source, records=records)


def _check_agree(source: Source, known: Mapping[int, str], *, url: str) -> None:
    ids = {name: label for label, name in known.items()}
    for label, name in source.classes.items():
        if name == str(label) and label in known:
            continue  # a source of ids names a class after its id
        if known.get(label, name) != name:
            raise DataError(
                f"class id {label} is '{name}' in {source.name}, and '{known[label]}' in '{url}'; expected one name; "
                "give the class another id in the source"
            )
        if ids.get(name, label) != label:
            raise DataError(
                f"class '{name}' has id {label} in {source.name}, and {ids[name]} in '{url}'; expected one id; give "
                f"the class the id {ids[name]} in the source"
            )
