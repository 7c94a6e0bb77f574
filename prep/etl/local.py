"""Shards to transformed shards from here, with no cluster: a process a core, each with a few samples in memory."""

import json
import tempfile
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dali_pipes.errors import StoreError, shown
from dali_pipes.formats.names import classes_name, columns_name, index_name, manifest_name
from dali_pipes.progress import bar
from dali_pipes.store.ais import AisStore
from dali_pipes.store.base import Store
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import ShardSet, check_object_name, is_remote, open_store
from prep.etl.transforms import ShardTransform, load_transform
from prep.workers import Report, Workers, default_jobs

__all__ = ["Output", "TransformReport", "check_output", "copy_classes", "open_output", "transform_shards"]


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where transformed shards go: a store, and what comes before each shard's own name."""

    store: Store
    prefix: str

    def name_of(self, shard: str) -> str:
        """The output's name of a shard: all of its own follows, as a cluster's ETL has it.

        >>> Output(store=LocalStore(Path("out")), prefix="small/").name_of("train/samples-000000.tar")
        'small/train/samples-000000.tar'
        """
        return f"{self.prefix}{shard}"


@dataclass(frozen=True, kw_only=True)
class TransformReport:
    """What was done."""

    url: str
    """What the names of all outputs start with."""
    shards: tuple[str, ...]
    num_bytes: int
    """Of the outputs."""
    elapsed_s: float
    job: str | None = None
    """The cluster's number for it, where a cluster did it."""


@dataclass(frozen=True)
class _Task:
    transform: str
    source: str
    """The root of the store that is read; ``target`` that of the one that is written."""
    shard: str
    target: str
    name: str
    endpoint: str | None


def transform_shards(
    shards: ShardSet,
    output: Output,
    *,
    transform: str,
    overwrite: bool = False,
    jobs: int | None = None,
    endpoint: str | None = None,
    show_progress: bool = False,
) -> TransformReport:
    """Apply a transform to each shard; the class table beside them is copied.

    An output is there whole or not at all. What is written before an error stays.

    Args:
        shards: The input.
        output: Where the shards go, under their names.
        transform: ``pets`` or ``MODULE:FUNCTION``.
        overwrite: Replace what is there under these names.
        jobs: Processes; the cores, at most 16, where ``None``.
        endpoint: AIStore's proxy, where one of the two is a bucket.
        show_progress: Draw a bar where stderr is a terminal.

    Raises:
        DataError: If a shard cannot be read or a sample transformed; names shard and key.
        StoreError: If outputs are there already, or a store fails.
        ValueError: If there is no such transform, or an output is an input.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be positive, got {jobs}")
    load_transform(transform)  # before anything starts
    check_output(shards, output, overwrite=overwrite)
    started = time.perf_counter()
    tasks = [
        _Task(transform, _root(shards.store), name, _root(output.store), output.name_of(name), endpoint)
        for name in shards.names
    ]
    with (
        Workers(min(jobs or default_jobs(), len(tasks))) as workers,
        bar(what="transform", total=len(tasks), unit="shards", shown=show_progress) as drawn,
    ):
        num_bytes = sum(workers.map(_transform_one, tasks, on_progress=drawn.update))
    copy_classes(shards, output)
    return TransformReport(
        url=output.store.locate(output.prefix),
        shards=tuple(task.name for task in tasks),
        num_bytes=num_bytes,
        elapsed_s=time.perf_counter() - started,
    )


def open_output(url: str | Path, *, endpoint: str | None) -> Output:
    """``ais://BUCKET[/PREFIX]`` or ``DIRECTORY[/PREFIX]``: as for `pack`, but that shards keep their names.

    A last part that ends in ``-`` or ``_`` comes before the names, any other is a folder.

    Raises:
        ValueError: If the URL names shards, or a bucket's or object's name is none.
    """
    text = str(url)
    if "{" in text or text.endswith(".tar"):
        raise ValueError(f"'{text}' names shards; expected where they go, such as ais://pets/small or DIRECTORY")
    if is_remote(text):
        store, prefix = open_store(text, endpoint=endpoint)
        folder = not prefix or prefix.endswith(("-", "_", "/"))
        prefix = prefix if folder else f"{prefix}/"
        check_object_name(prefix, url=text)
        return Output(store=store, prefix=prefix)
    store, name = open_store(text, endpoint=endpoint)  # raises for other schemes
    if text.endswith(("-", "_")) and not Path(text).is_dir():
        return Output(store=store, prefix=name)
    return Output(store=LocalStore(Path(text)), prefix="")


def check_output(shards: ShardSet, output: Output, *, overwrite: bool) -> None:
    """Refuse outputs that are the input, or there; make the bucket, delete what describes shards to be replaced.

    Raises:
        StoreError: If an output is there, and ``overwrite`` does not allow it.
        ValueError: If a shard would become an input.
    """
    store, names = output.store, [output.name_of(name) for name in shards.names]
    inputs = {_resolved(shards.store, name) for name in shards.names}
    if same := next((name for name in names if _resolved(store, name) in inputs), None):
        raise ValueError(f"'{store.locate(same)}' is an input; give the output another place or prefix")
    if isinstance(store, AisStore):
        store.create()
        listed = {entry.name for entry in store.list(output.name_of(shards.prefix))}
        there = [name for name in names if name in listed]
    else:
        there = [name for name in names if store.size(name) is not None]
    if there and not overwrite:
        raise StoreError(f"'{store.url}' has {shown(there)} already; pass --overwrite to replace, or another output")
    prefix = output.name_of(shards.prefix)
    for name in there:
        store.delete(index_name(name))
    if there:
        for name in (manifest_name(prefix), columns_name(prefix)):
            store.delete(name)


def copy_classes(shards: ShardSet, output: Output) -> None:
    """The class table goes with the shards, if there is one: `prep index` takes it from there."""
    name = classes_name(shards.prefix)
    if shards.store.size(name) is not None:
        table = shards.store.read(name)
        json.loads(table)  # an index would fail at it much later
        output.store.write(output.name_of(name), table)


def _transform_one(task: _Task, report: Report) -> int:
    """The output's bytes; in a worker."""
    source, target = _store(task.source, task.endpoint), _store(task.target, task.endpoint)
    pieces = _transform(task.transform).pieces
    with tempfile.TemporaryDirectory(prefix="dali-pipes-etl-") as folder:
        # Its length is known at the end, and an upload says it first; and nothing half done is ever in a bucket.
        path = Path(folder) / "shard.tar"
        with source.open(task.shard) as stream, path.open("wb") as file:
            for piece in pieces(stream, shard=task.shard):
                file.write(piece)
        target.upload(task.name, path)
        num_bytes = path.stat().st_size
    report(1)
    return num_bytes


@lru_cache(maxsize=2)
def _store(root: str, endpoint: str | None) -> Store:
    return open_store(f"{root}/", endpoint=endpoint)[0]


@lru_cache(maxsize=1)
def _transform(spec: str) -> ShardTransform:
    return load_transform(spec)


def _root(store: Store) -> str:
    return str(store.directory.absolute()) if isinstance(store, LocalStore) else store.url


def _resolved(store: Store, name: str) -> str:
    return str((store.directory / name).resolve()) if isinstance(store, LocalStore) else store.locate(name)
