"""Transform shards on this machine: one process for each core, each with a few samples in memory."""

import tempfile
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dali_pipes.errors import StoreError, shown
from dali_pipes.formats.names import classes_name, columns_name, index_name, manifest_name, record_names
from dali_pipes.progress import bar
from dali_pipes.store.base import Store
from dali_pipes.store.shard_names import shared_prefix
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import open_prefix
from prep.etl.transforms import load_transform
from prep.workers import Report, WorkersKind, open_workers


@dataclass(frozen=True, kw_only=True)
class Output:
    """The place of transformed shards: a store, and a prefix before each shard's own name."""

    store: Store
    prefix: str

    def name_of(self, shard: str) -> str:
        """Return the name of a shard's output: the prefix and the whole name, as in a cluster's ETL.

        >>> from dali_pipes.store.local import LocalStore
        >>> Output(store=LocalStore(Path("out")), prefix="small/").name_of("train/samples-000000.tar")
        'small/train/samples-000000.tar'
        """
        return f"{self.prefix}{shard}"


@dataclass(frozen=True, kw_only=True)
class TransformReport:
    """The result of a transform."""

    url: str
    """The beginning of all outputs' names."""
    shards: tuple[str, ...]
    num_bytes: int
    """Bytes of the outputs."""
    elapsed_s: float
    job: str | None = None
    """The id of the cluster's job, for a transform in a cluster."""


@dataclass(frozen=True)
class _Task:
    transform: str
    source: Store
    shard: str
    target: Store
    name: str


def transform_shards(
    shards: ShardSet,
    output: Output,
    *,
    transform: str,
    whole: ShardSet | None = None,
    overwrite: bool = False,
    jobs: int | None = None,
    on: WorkersKind = "processes",
    show_progress: bool = False,
) -> TransformReport:
    """Apply a transform to each shard, and copy the class table beside the outputs.

    ``transform`` is ``pets`` or ``MODULE:FUNCTION``; ``whole``: all shards of the input, if ``shards`` is a part of
    them; ``jobs`` is the number of processes, by default the number of cores, at most 16; ``on`` says who works, see
    `prep.workers.open_workers`. An output is either complete or does not exist. Outputs that were written before an
    error stay.

    Raises:
        DataError: If a shard cannot be read or a sample cannot be transformed; names shard and key.
        StoreError: If outputs exist already, or a store fails.
        ValueError: If the transform does not exist, or an output is an input.
    """
    load_transform(transform)  # so that a wrong name is refused before any work
    check_output(shards, output, overwrite=overwrite)
    write_names(whole or shards, output)
    started = time.perf_counter()
    tasks = [_Task(transform, shards.store, name, output.store, output.name_of(name)) for name in shards.names]
    with (
        open_workers(on, jobs, at_most=len(tasks)) as workers,
        bar(what="transform", total=len(tasks), unit="shards", shown=show_progress) as drawn,
    ):
        workers.check_reach(store.directory for store in (shards.store, output.store) if store.directory is not None)
        num_bytes = sum(
            workers.map(
                _transform_one, tasks, on_progress=drawn.update, name=lambda task: f"'{task.source.locate(task.shard)}'"
            )
        )
    copy_classes(shards, output)
    return TransformReport(
        url=output.store.locate(output.prefix),
        shards=tuple(task.name for task in tasks),
        num_bytes=num_bytes,
        elapsed_s=time.perf_counter() - started,
    )


def open_output(url: str | Path, *, endpoint: str | None) -> Output:
    """The output that ``ais://BUCKET[/PREFIX]`` or ``DIRECTORY[/PREFIX]`` names: see `open_prefix`."""
    store, prefix = open_prefix(url, endpoint=endpoint)
    return Output(store=store, prefix=prefix)


def check_output(shards: ShardSet, output: Output, *, overwrite: bool) -> None:
    """Refuse outputs that are inputs or exist; create the bucket, and delete files that describe replaced shards.

    Raises:
        StoreError: If an output exists and ``overwrite`` is false.
        ValueError: If an output is an input.
    """
    store, names = output.store, [output.name_of(name) for name in shards.names]
    inputs = {shards.store.identity(name) for name in shards.names}
    if same := next((name for name in names if store.identity(name) in inputs), None):
        raise ValueError(f"'{store.locate(same)}' is an input; give the output another place or prefix")
    store.create()
    there = [entry.name for entry in store.find_all(names)[0] if entry is not None]
    if there and not overwrite:
        raise StoreError(f"'{store.url}' has {shown(there)} already; pass --overwrite to replace, or another output")
    prefix = output.name_of(shards.prefix)
    for name in there:
        store.delete(index_name(name))
    for name in (manifest_name(prefix), columns_name(prefix), *record_names(prefix)) if there else ():
        store.delete(name)


def write_names(shards: ShardSet, output: Output) -> None:
    """Write the record of the outputs of these shards, beside those of earlier runs: `dali_pipes.data_set.written`."""
    from dali_pipes.data_set.written import WrittenShards, read_record, write_record  # not in workers, as below

    folders: dict[str, list[str]] = {}
    for name in map(output.name_of, shards.names):
        folders.setdefault(name.rpartition("/")[0], []).append(name)
    for folder, names in folders.items():
        prefix = shared_prefix(names)
        before = read_record(output.store, prefix)
        own = {name.removeprefix(f"{folder}/") for name in names}.union(before.names if before is not None else ())
        write_record(output.store, prefix, WrittenShards(names=sorted(own)))


def copy_classes(shards: ShardSet, output: Output) -> None:
    """Copy the class table, if it exists: `prep index` reads it beside the outputs."""
    name = classes_name(shards.prefix)
    if (table := shards.store.find(name)) is not None:
        # Workers import this module, and numpy would cost each of them a tenth of a second.
        from dali_pipes.data_set.indexing import read_class_table

        read_class_table(shards.store, shards.prefix)  # so that a broken table is found here, and not by the index
        output.store.write(output.name_of(name), table)


def _transform_one(task: _Task, report: Report) -> int:
    """Transform one shard, in a worker; returns the output's bytes."""
    with tempfile.TemporaryDirectory(prefix="dali-pipes-etl-") as folder:
        # A file, because an upload begins with the length, which is not known before the end.
        path = Path(folder) / "shard.tar"
        with task.source.open(task.shard) as stream, path.open("wb") as file:
            file.writelines(_transform(task.transform).pieces(stream, shard=task.shard))
        task.target.upload(task.name, path)
        num_bytes = path.stat().st_size
    report(1)
    return num_bytes


_transform = lru_cache(maxsize=1)(load_transform)
