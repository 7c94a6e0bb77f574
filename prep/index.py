"""Write the index of a set of shards: a shard index for each, one column file and one manifest.

Each shard is read once, front to back: its checksum is computed, its members are located, its photos' headers are read.
For shards that are read through an ETL (`dali_pipes.store.cluster.transformed`), the transformed ones are indexed.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from dali_pipes.arrays import Int64s
from dali_pipes.data_set.indexing import (
    Before,
    IndexedRun,
    IndexRun,
    find_manifest,
    index_bar,
    index_run,
    join_runs,
    known_before,
    read_class_table,
    stored_versions,
)
from dali_pipes.errors import DataError, StoreError, shown
from dali_pipes.formats.column_spool import ROWS_IN_MEMORY, ColumnsBuilder
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import columns_name, index_name, manifest_name
from dali_pipes.store.entries import ObjectEntry
from dali_pipes.store.listings import Found, rows_among
from dali_pipes.store.shard_set import ShardSet
from prep.part import JobPart
from prep.workers import Report, WorkersKind, open_workers

_log = logging.getLogger(__name__)

T = TypeVar("T")

# A run has at most so many shards, and on Ray begins no other after so many bytes; each CPU gets several.
_RUN_SHARDS = 256
_RUN_BYTES = 256 << 20
_TASKS_EACH = 4
# Runs for each CPU whose results may wait for an earlier one.
_RUNS_AHEAD = 4


def index_shards(
    shards: ShardSet,
    *,
    classes: Mapping[int, str] | None = None,
    overwrite: bool = False,
    allow_missing: bool = False,
    on: WorkersKind = "processes",
    anew: bool = False,
    show_progress: bool = False,
    on_before: Callable[[int], object] = lambda _: None,
) -> Manifest:
    """Write a shard index beside each shard, the column file beside them all and, last, the manifest.

    An interrupted run leaves the old manifest as it was. When it is run again, it goes on: it takes over the shard
    indexes that are surely of the shards as they are now (Note [indexed before] in `dali_pipes.data_set.indexing`).
    The files are the same whoever works.

    Args:
        shards: The shards, in the order in which their samples are numbered.
        classes: Class id -> name; ``None``: the table that `pack` left beside the shards, if there is one.
        overwrite: Replace a manifest that lists other shards, too: they will belong to no data set.
        allow_missing: Replace a manifest that lists shards which the store lacks.
        on: Who reads the shards: threads of this process, or ``"ray"``: see `prep.workers.open_workers`.
        anew: Read each shard, also those whose index could be taken over.
        show_progress: Draw a bar, in bytes.
        on_before: Called before the manifest is written with the number of shard indexes that were taken over.

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
    _check(shards, overwrite=overwrite, allow_missing=allow_missing)
    return _write(shards, classes, on=on, anew=anew, show_progress=show_progress, on_before=on_before)


def index_part(
    shards: ShardSet,
    part: JobPart,
    *,
    on: WorkersKind = "processes",
    anew: bool = False,
    show_progress: bool = False,
    on_before: Callable[[int], object] = lambda _: None,
) -> ShardSet:
    """Write the shard indexes of one part of the shards, and nothing else; returns these shards.

    When all parts are done, `merge_indexes` makes the manifest. For arguments and errors see `index_shards`.
    """
    _check_has_no_versions(shards)
    own = part.of_shards(shards)
    if own.names:
        # The part alone has no column file: nothing is kept of its runs.
        each = lambda runs, _: deque(runs, maxlen=0)  # noqa: E731
        _index(own, None, each, on=on, anew=anew, show_progress=show_progress, on_before=on_before)
    return own


def merge_indexes(
    shards: ShardSet,
    *,
    overwrite: bool = False,
    allow_missing: bool = False,
    on: WorkersKind = "processes",
    show_progress: bool = False,
) -> Manifest:
    """Write the column file and, last, the manifest of shards whose indexes `index_part` has written.

    The shards are not read. The files are those that `index_shards` writes.

    Raises:
        StoreError: See `index_shards`; also if shards have no index: the text names some.
        DataError: If a shard index is not one, or not the one of its shard.
    """
    store = shards.store
    (listed,) = store.find_all([index_name(name) for name in shards.names])
    if lacking := listed.lacking(shards.names):
        raise StoreError(
            f"{len(lacking)} of {len(shards.names)} shards have no shard index: "
            f"{shown([store.locate(name) for name in lacking])}; a part is not done, or was stopped: run it again, "
            f"{shards.index_command} --part I/N"
        )
    _check(shards, overwrite=overwrite, allow_missing=allow_missing)
    return _write(shards, None, on=on, is_indexed=True, show_progress=show_progress)


def index_without_manifest(
    shards: ShardSet,
    *,
    classes: Mapping[int, str] | None,
    on: WorkersKind = "processes",
    show_progress: bool = False,
    before_columns: Callable[[], object] = lambda: None,
    **options: Any,
) -> Manifest:
    """As `index_shards`, but the manifest is only returned. ``before_columns`` is a last check."""
    with ColumnsBuilder(ROWS_IN_MEMORY) as columns:
        join = lambda runs, classes: join_runs(shards, runs, columns, classes=classes)  # noqa: E731
        manifest = _index(shards, classes, join, on=on, show_progress=show_progress, **options)
        before_columns()
        num_bytes, chunks = columns.stream(manifest=manifest.shards_digest)
        shards.store.write_stream(columns_name(shards.prefix), chunks, num_bytes=num_bytes)
    return manifest


def _write(shards: ShardSet, classes: Mapping[int, str] | None, **options: Any) -> Manifest:
    # Another command may begin meanwhile.
    manifest = index_without_manifest(
        shards, classes=classes, before_columns=lambda: _check_has_no_versions(shards), **options
    )
    shards.store.write(manifest_name(shards.prefix), manifest.to_bytes())
    return manifest


def _index(
    shards: ShardSet,
    classes: Mapping[int, str] | None,
    join: Callable[[Iterable[IndexedRun], Mapping[int, str] | None], T],
    *,
    on: WorkersKind,
    show_progress: bool,
    anew: bool = False,
    is_indexed: bool = False,
    on_before: Callable[[int], object] = lambda _: None,
) -> T:
    """Write the shard indexes; returns what ``join`` makes of the runs, which come in order, and of the classes."""
    # Parsing holds the GIL little enough that a second process would cost more than it gains.
    with open_workers(on, 1 if on == "processes" else None) as workers:
        workers.check_reach(directory for directory in [shards.store.directory] if directory is not None)
        if classes is None:
            classes = read_class_table(shards.store, shards.prefix)
        takes_over = not (anew or is_indexed or shards.store.etl)
        entries, before = _look_before(shards) if takes_over else (shards.entries(), None)
        run = IndexRun(shards=shards, entries=(), classes=classes, is_indexed=is_indexed)
        # Threads of one process do a run's shards ahead of each other: it can be large.
        small = {"most": -(-len(entries) // (_TASKS_EACH * workers.jobs)), "num_bytes": _RUN_BYTES}
        runs = divided_runs(run, entries, before, **({} if on == "processes" else small))
        num_before = 0

        def counted(results: Iterable[IndexedRun]) -> Iterator[IndexedRun]:
            nonlocal num_before
            for result in results:
                num_before += result.num_before
                yield result

        with index_bar(shards, entries, shown=show_progress) as drawn:
            results = workers.map(
                _work, runs, on_progress=drawn.update, name=name_of_run, max_ahead=_RUNS_AHEAD * workers.jobs
            )
            made = join(counted(results), classes)
    on_before(num_before)
    return made


def _work(run: IndexRun, report: Report) -> IndexedRun:
    """Index a run's shards, in any process, and write their indexes to the store."""
    return index_run(run, run.shards.store.write, report)


def name_of_run(run: IndexRun) -> str:
    """A run's name in errors."""
    return f"shards '{run.shards.names[0]}' to '{run.shards.names[-1]}'"


def divided_runs(
    run: IndexRun,
    entries: Sequence[ObjectEntry],
    before: "_Before | None" = None,
    *,
    most: int = _RUN_SHARDS,
    num_bytes: float = math.inf,
) -> Iterator[IndexRun]:
    """Runs like ``run``, of at most ``most`` of its shards, whose columns fit in memory.

    None begins another shard after ``num_bytes``, because a run that a lost node worked on is done again.
    """
    shards, first = replace(run.shards, manifest=None, manifest_prefix=run.shards.prefix), 0
    rest = iter(entries)
    while first < len(entries):
        own: list[ObjectEntry] = []
        done = 0
        while first + len(own) < len(entries) and len(own) < min(most, _RUN_SHARDS) and done < num_bytes:
            own.append(next(rest))
            done += own[-1].size
        stop = first + len(own)
        yield replace(
            run,
            shards=replace(shards, names=list(shards.names[first:stop])),
            entries=own,
            before=() if before is None else [before.of(row) for row in range(first, stop)],
        )
        first = stop


class _Before(NamedTuple):
    """The shard indexes that are there already; an object for each would take more memory than they do."""

    indexes: Found
    old: Manifest | None
    rows: Int64s
    """int64 [shards], the row of each shard in ``old``; -1 if it is not there."""

    def of(self, row: int) -> Before | None:
        entry = self.indexes[row]
        return None if entry is None else known_before(self.old, int(self.rows[row]), entry)


def _look_before(shards: ShardSet) -> tuple[Sequence[ObjectEntry], _Before | None]:
    """The entries of the shards and what is known of the indexes that are there, by one listing."""
    names = shards.names
    found, indexes = shards.store.find_all(names, [index_name(name) for name in names])
    entries = shards.all_of(found)
    try:
        old = find_manifest(shards)
    except DataError:
        old = None  # the caller has warned
    if old is None:
        return entries, _Before(indexes, None, np.full(len(names), -1))
    return entries, _Before(indexes, old, rows_among(old.names, names))


def _check(shards: ShardSet, *, overwrite: bool, allow_missing: bool) -> None:
    _check_has_no_versions(shards)
    if not overwrite:
        _check_keeps_all(shards, allow_missing=allow_missing)


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
    """Refuse to replace a manifest by one that lacks some of its shards.

    With ``allow_missing``, it may lack shards that the store lacks, too.
    """
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
        lost = [entry.name for entry in shards.store.find_all(lost)[0] if entry is not None]
    if lost:
        raise StoreError(
            f"manifest '{where}' lists {old.num_shards} shards, and {len(lost)} of them are not among the "
            f"{len(shards.names)} to be indexed: {shown(lost)}; put them back, or name them too; --overwrite replaces "
            "the manifest, and the data set is then without them"
        )
