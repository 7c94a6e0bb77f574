"""Write the index of a set of shards: a shard index for each, one column file and one manifest.

Each shard is read once, front to back: its checksum is computed, its members are located, its photos' headers are read.
For shards that are read through an ETL (`dali_pipes.store.cluster.transformed`), the transformed ones are indexed.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TypedDict, Unpack

import numpy as np

from dali_pipes.arrays import Int64s
from dali_pipes.data_set.indexing import (
    IndexedRun,
    IndexRun,
    find_manifest,
    index_bar,
    index_run,
    join_runs,
    read_class_table,
    stored_versions,
)
from dali_pipes.errors import DataError, StoreError, shown
from dali_pipes.formats.column_spool import ROWS_IN_MEMORY, ColumnsBuilder
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import columns_name, index_name, manifest_name
from dali_pipes.store.listings import Found, rows_among
from dali_pipes.store.shard_set import ShardSet
from prep.part import JobPart
from prep.workers import Report, WorkersKind, open_workers

_log = logging.getLogger(__name__)

# A run has at most so many shards; on Ray few, because a run that a lost node worked on is done again.
_RUN_SHARDS = 256
_RAY_RUN_SHARDS = 8
# Runs for each CPU whose results may wait for an earlier one.
_RUNS_AHEAD = 4


class Indexing(TypedDict, total=False):
    """How shards are indexed; the files are the same whatever is taken."""

    on: WorkersKind
    """Who reads the shards: threads of this process, or ``"ray"``: see `prep.workers.open_workers`."""
    anew: bool
    """Read each shard, also those whose index could be taken over."""
    is_indexed: bool
    """The shard indexes are there, by `index_part`: no shard is read."""
    show_progress: bool
    """Draw a bar, in bytes."""
    on_before: Callable[[int], object]
    """Called before the manifest is written with the number of shard indexes that were taken over."""


def index_shards(
    shards: ShardSet,
    *,
    classes: Mapping[int, str] | None = None,
    overwrite: bool = False,
    allow_missing: bool = False,
    **how: Unpack[Indexing],
) -> Manifest:
    """Write a shard index for each shard, the column file for them all and, last, the manifest.

    An interrupted run leaves the old manifest as it was. When it is run again, it goes on: it takes over the shard
    indexes that are surely of the shards as they are now (Note [indexed before] in `dali_pipes.data_set.indexing`).

    Args:
        shards: The shards, in the order in which their samples are numbered.
        classes: Class id -> name; ``None``: the table that `pack` left beside the shards, if there is one.
        overwrite: Replace a manifest that lists other shards, too: they will belong to no data set.
        allow_missing: Replace a manifest that lists shards which the store lacks.
        how: See `Indexing`.

    Raises:
        DataError: If a shard is cut off or empty, samples are interleaved or doubled, a name is not UTF-8 or holds a
            control character, a header claims more than there is, or a label is not an integer: the text names shard,
            key and component. Nothing is written for that shard, and no manifest.
        StoreError: If a shard is missing, or the ETL that it is read through fails; if the manifest that is there lists
            a shard that is not among ``shards``, and ``overwrite`` is false; if the data set has versions, to which
            shards are added with `prep.versions`. Nothing is written then.
        PipesError: If Ray is not installed, or cannot be reached, or a node has another directory. Nothing is written
            then.
    """
    _check_has_no_versions(shards)
    if not overwrite:
        _check_keeps_all(shards, allow_missing=allow_missing)
    # Another command may begin meanwhile.
    check = partial(_check_has_no_versions, shards)
    manifest = index_without_manifest(shards, classes=classes, before_columns=check, **how)
    shards.store.write(manifest_name(shards.prefix), manifest.to_bytes())
    return manifest


def index_part(shards: ShardSet, part: JobPart, **how: Unpack[Indexing]) -> ShardSet:
    """Write the shard indexes of one part of the shards, and nothing else; returns these shards.

    When all parts are done, `merge_indexes` makes the manifest. For errors see `index_shards`.
    """
    _check_has_no_versions(shards)
    own = part.of_shards(shards)
    if own.names:
        for _ in _indexed_runs(own, read_class_table(own.store, own.prefix), **how):
            pass  # the part alone has no column file: nothing is kept of its runs
    return own


def merge_indexes(
    shards: ShardSet, *, overwrite: bool = False, allow_missing: bool = False, **how: Unpack[Indexing]
) -> Manifest:
    """Write the column file and, last, the manifest of shards whose indexes `index_part` has written.

    The shards are not read. The files are those that `index_shards` writes.

    Raises:
        StoreError: See `index_shards`; also if shards have no index: the text names some.
        DataError: If a shard index is not one, or not the one of its shard.
    """
    store = shards.store
    listed = store.find_all(list(map(index_name, shards.names)))
    if lacking := listed.lacking(shards.names):
        raise StoreError(
            f"{len(lacking)} of {len(shards.names)} shards have no shard index: "
            f"{shown([store.locate(name) for name in lacking])}; a part is not done, or was stopped: run it again, "
            f"{shards.index_command} --part I/N"
        )
    how["is_indexed"] = True
    return index_shards(shards, overwrite=overwrite, allow_missing=allow_missing, **how)


def index_without_manifest(
    shards: ShardSet,
    *,
    classes: Mapping[int, str] | None,
    before_columns: Callable[[], object] = lambda: None,
    **how: Unpack[Indexing],
) -> Manifest:
    """As `index_shards`, but the manifest is only returned. ``before_columns`` is a last check."""
    if classes is None:
        classes = read_class_table(shards.store, shards.prefix)
    with ColumnsBuilder(ROWS_IN_MEMORY) as columns:
        manifest = join_runs(shards, _indexed_runs(shards, classes, **how), columns, classes=classes)
        before_columns()
        num_bytes, chunks = columns.stream(manifest=manifest.shards_digest)
        shards.store.write_stream(columns_name(shards.prefix), chunks, num_bytes=num_bytes)
    return manifest


def _indexed_runs(
    shards: ShardSet,
    classes: Mapping[int, str] | None,
    *,
    on: WorkersKind = "processes",
    show_progress: bool = False,
    anew: bool = False,
    is_indexed: bool = False,
    on_before: Callable[[int], object] = lambda _: None,
) -> Iterator[IndexedRun]:
    """Write the shard indexes; yields the runs, in order."""
    # Parsing holds the GIL little enough that a second process would cost more than it gains.
    with open_workers(on, 1 if on == "processes" else None) as workers:
        workers.check_reach(directory for directory in [shards.store.directory] if directory is not None)
        indexes: Found | None = None
        if anew or is_indexed or shards.store.etl:
            entries = shards.entries()
        else:
            # Shards are listed last: one that is replaced meanwhile is then seen to be newer than its index.
            indexes = shards.store.find_all(list(map(index_name, shards.names)))
            entries = shards.entries()
        whole = IndexRun(shards=shards, entries=entries, classes=classes, is_indexed=is_indexed)
        runs = _divided(whole, indexes, _RUN_SHARDS if on == "processes" else _RAY_RUN_SHARDS)
        num_before = 0
        with index_bar(shards, entries, shown=show_progress) as drawn:
            for result in workers.map(
                _work,
                runs,
                on_progress=drawn.update,
                name=lambda run: f"shards '{run.shards.names[0]}' to '{run.shards.names[-1]}'",
                max_ahead=_RUNS_AHEAD * workers.jobs,
            ):
                num_before += result.num_before
                yield result
    on_before(num_before)


def _work(run: IndexRun, report: Report) -> IndexedRun:
    return index_run(run, run.shards.store.write, report)


def _divided(whole: IndexRun, indexes: Found | None, most: int) -> Iterator[IndexRun]:
    """Runs of at most ``most`` of the shards; ``indexes`` are the shard indexes that may be taken over."""
    names, old = whole.shards.names, None
    rows = np.full(len(names), -1)  # of each shard in the old manifest; -1 if it is not there
    if indexes is not None:
        with contextlib.suppress(DataError):  # the caller has warned
            old = find_manifest(whole.shards)
        rows = rows if old is None else rows_among(old.names, names)
    shards = replace(whole.shards, manifest=None, manifest_prefix=whole.shards.prefix)
    for start in range(0, len(names), most):
        stop = min(start + most, len(names))
        entries = [] if indexes is None else [indexes[row] for row in range(start, stop)]
        yield replace(
            whole,
            shards=replace(shards, names=list(names[start:stop])),
            entries=[whole.entries[row] for row in range(start, stop)],
            before=entries,
            listed={} if old is None else _listed(old, rows[start:stop]),
        )


def _listed(manifest: Manifest, rows: Int64s) -> dict[str, tuple[int, int, int]]:
    """`IndexRun.listed` of some rows of a manifest; -1 is none."""
    found = manifest.take(rows[rows >= 0])
    numbers = (found.checksums.tolist(), found.index_bytes.tolist(), found.index_checksums.tolist())
    return dict(zip(found.names, zip(*numbers, strict=True), strict=True))


def _check_has_no_versions(shards: ShardSet) -> None:
    """Refuse to index a data set anew whose manifest says more than its shards do: what was removed, and when."""
    versions = [] if shards.store.etl else stored_versions(shards.store, shards.prefix)
    if versions:
        where = shards.store.locate(shards.prefix)
        raise StoreError(
            f"'{where}' has versions ({shown(list(map(str, versions)), are_names=False)}), and only a data set without "
            f"them can be indexed anew; to add shards: dali-pipes prep add TARS '{where}'; to begin a data set of "
            f"its own: dali-pipes prep pack tars '{where}' URL"
        )


def _check_keeps_all(shards: ShardSet, *, allow_missing: bool) -> None:
    """Refuse to replace a manifest by one that lacks some of its shards, unless they may be and are missing."""
    where = shards.store.locate(manifest_name(shards.prefix))
    try:
        old = find_manifest(shards)
    except DataError as exc:
        _log.warning("%s; it is replaced", exc)
        return
    if old is None:
        return
    missing = np.flatnonzero(rows_among(sorted(shards.names), old.names) < 0)
    lost = [old.names[row] for row in missing.tolist()]
    if lost and allow_missing:
        lost = [entry.name for entry in shards.store.find_all(lost) if entry is not None]
    if lost:
        raise StoreError(
            f"manifest '{where}' lists {old.num_shards} shards, and {len(lost)} of them are not among the "
            f"{len(shards.names)} to be indexed: {shown(lost)}; put them back, or name them too; --overwrite replaces "
            "the manifest, and the data set is then without them"
        )
