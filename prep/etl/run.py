"""Transform shards: on this machine, by a process for each core; or by a cluster's ETL, bucket to bucket.

AIStore runs a transform in pods, one beside each target, so it needs Kubernetes. The embedded node runs it as a
process, if that is allowed.
"""

import contextlib
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from dali_pipes.errors import StoreError, shown
from dali_pipes.formats.names import classes_name, columns_name, index_name, manifest_name, record_names
from dali_pipes.progress import bar
from dali_pipes.store.base import Bucket, Store
from dali_pipes.store.cluster.transformed import asking_etl
from dali_pipes.store.http.rules import message_of
from dali_pipes.store.shard_names import shared_prefix
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import open_prefix
from prep.etl.transforms import load_transform
from prep.workers import Report, WorkersKind, open_workers

if TYPE_CHECKING:
    from aistore import Client


@dataclass(frozen=True, kw_only=True)
class Output:
    """The place of transformed shards: a store, and a prefix before each shard's own name."""

    store: Store
    prefix: str

    def name_of(self, shard: str) -> str:
        """Return the name of a shard's output: the prefix and the whole name, as in a cluster's ETL."""
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


class _Task(NamedTuple):
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
    _prepare(shards, output, whole=whole or shards, overwrite=overwrite)
    started = time.perf_counter()
    tasks = [_Task(transform, shards.store, name, output.store, output.name_of(name)) for name in shards.names]
    with (
        open_workers(on, jobs, at_most=len(tasks)) as workers,
        bar(what="transform", total=len(tasks), unit="shards", shown=show_progress) as drawn,
    ):
        workers.check_reach(store.directory for store in (shards.store, output.store) if store.directory is not None)
        sizes = workers.map(
            _transform_one, tasks, on_progress=drawn.update, name=lambda task: f"'{task.source.locate(task.shard)}'"
        )
        num_bytes = sum(sizes)
    _copy_classes(shards, output)
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


def _prepare(shards: ShardSet, output: Output, *, whole: ShardSet, overwrite: bool) -> None:
    """Refuse outputs that are inputs or exist; create the bucket, delete what describes replaced shards, and write the
    record of the outputs of all shards: see `dali_pipes.data_set.written`.
    """
    from dali_pipes.data_set.written import WrittenShards, read_record, write_record  # not in workers, as below

    store, names = output.store, [output.name_of(name) for name in shards.names]
    inputs = {shards.store.identity(name) for name in shards.names}
    if same := next((name for name in names if store.identity(name) in inputs), None):
        raise ValueError(f"'{store.locate(same)}' is an input; give the output another place or prefix")
    store.create()
    there = [entry.name for entry in store.find_all(names) if entry is not None]
    if there and not overwrite:
        raise StoreError(f"'{store.url}' has {shown(there)} already; pass --overwrite to replace, or another output")
    prefix = output.name_of(shards.prefix)
    for name in map(index_name, there):
        store.delete(name)
    for name in (manifest_name(prefix), columns_name(prefix), *record_names(prefix)) if there else ():
        store.delete(name)
    folders: dict[str, list[str]] = {}
    for name in map(output.name_of, whole.names):
        folders.setdefault(name.rpartition("/")[0], []).append(name)
    for folder, written in folders.items():
        before = read_record(store, shared_prefix(written))  # of earlier runs
        own = {name.removeprefix(f"{folder}/") for name in written}.union(before.names if before is not None else ())
        write_record(store, shared_prefix(written), WrittenShards(names=sorted(own)))


def _copy_classes(shards: ShardSet, output: Output) -> None:
    """Copy the class table, if it exists: `prep index` reads it beside the outputs."""
    if (table := shards.store.find(classes_name(shards.prefix))) is not None:
        # Workers import this module, and numpy would cost each of them a tenth of a second.
        from dali_pipes.data_set.indexing import read_class_table

        read_class_table(shards.store, shards.prefix)  # so that a broken table is found here, and not by the index
        output.store.write(classes_name(output.name_of(shards.prefix)), table)


_load = lru_cache(maxsize=1)(load_transform)


def _transform_one(task: _Task, report: Report) -> int:
    """Transform one shard, in a worker; returns the output's bytes."""
    with tempfile.TemporaryDirectory(prefix="dali-pipes-etl-") as folder:
        # A file, because an upload begins with the length, which is not known before the end.
        path = Path(folder) / "shard.tar"
        with task.source.open(task.shard) as stream, path.open("wb") as file:
            file.writelines(_load(task.transform).pieces(stream, shard=task.shard))
        task.target.upload(task.name, path)
        num_bytes = path.stat().st_size
    report(1)
    return num_bytes


# By a cluster

IMAGE = "dali-pipes-etl:0.1.0"
"""The image that ``deploy/etl`` builds; a cluster pulls it under the name of its registry."""
# Seconds between two looks at a job: the first pause and the longest; the pause doubles.
_POLL_S = (0.05, 1.0)
# A job over a list of objects does not end by itself. It is done when all targets were idle at this many looks. AIS
# reports a target as idle after four seconds without work.
_NUM_IDLE = 2
_READ_BYTES = 1 << 20


@contextlib.contextmanager
def _by_sdk(store: Bucket, name: str, *, shard: str | None = None) -> Iterator[None]:
    from dali_pipes.store.cluster.sessions import sdk_errors

    with asking_etl(store, name, shard=shard), sdk_errors():
        yield


def start_etl(store: Bucket, name: str, *, transform: str, image: str = IMAGE) -> None:
    """Start the ETL ``name``, and wait until its pods answer.

    ``store`` is any bucket of the cluster, ``transform`` is ``pets`` or ``MODULE:FUNCTION`` of a module in the image.

    Raises:
        NoEtlError: If the cluster cannot run ETLs.
        StoreError: If the ETL does not start, for example because the name is taken or the image is not found.
        ValueError: If the name is not 6 to 32 lower-case letters, digits and dashes.
    """
    etl = store.client.etl(name)  # raises ValueError
    with _by_sdk(store, name):
        etl.init(
            image=image,
            command=["python", "-m", "prep.etl", transform],
            init_timeout="300s",
            comm_type="hpush",  # hpull sends clients to the pods, which are not reached from outside Kubernetes
            direct_put=False,  # the server gives its results only to the node that started it, see `refusal`
        )


def stop_etl(store: Bucket, name: str) -> None:
    """End the ETL's pods and delete the ETL; raises `StoreError` for an unknown name."""
    etl = store.client.etl(name)
    with _by_sdk(store, name):
        etl.stop()
        etl.delete()


@contextlib.contextmanager
def running_etl(store: Bucket, *, transform: str, image: str = IMAGE) -> Iterator[str]:
    """Start an ETL under a new name, and stop it at the end; raises the errors of `start_etl`."""
    name = f"dali-pipes-{uuid.uuid4().hex[:12]}"
    start_etl(store, name, transform=transform, image=image)
    try:
        yield name
    except BaseException:
        with contextlib.suppress(StoreError):
            stop_etl(store, name)
        raise
    stop_etl(store, name)


def get_transformed(store: Bucket, shard: str, file: BinaryIO, *, etl: str) -> int:
    """Read one shard through an ETL into ``file``, and return its size in bytes. The cluster stores nothing.

    Raises:
        NoEtlError: If the cluster cannot run ETLs.
        StoreError: If the shard or the ETL does not exist, or the transform fails; includes the transform's message.
    """
    from aistore.sdk.etl import ETLConfig

    # `raw` does not retry, and does not read in the SDK's chunks of 10 KiB. A transform may take long to answer.
    bucket = store.sdk_bucket
    num_bytes = 0
    with _by_sdk(store, etl, shard=shard):
        raw: Any = bucket.object(shard).get_reader(etl=ETLConfig(name=etl)).raw()
        with contextlib.closing(raw):
            while piece := raw.read(_READ_BYTES):
                file.write(piece)
                num_bytes += len(piece)
    return num_bytes


def run_offline(
    shards: ShardSet, output: Output, *, etl: str, overwrite: bool = False, show_progress: bool = False
) -> TransformReport:
    """Transform shards by a running ETL, from bucket to bucket of one cluster; return when all outputs exist.

    Raises:
        NoEtlError: If the cluster cannot run ETLs.
        StoreError: If outputs exist already, or the job fails; includes the transform's message about a shard.
        ValueError: If an output is an input, or one of the two is a directory.
    """
    why = "a cluster's ETL goes from bucket to bucket; here: dali-pipes prep transform"
    source, target = shards.store.need_cluster(why), output.store.need_cluster(why)
    with _by_sdk(source, etl):
        source.client.etl(etl).view()  # refuses an ETL that does not run, before any output is deleted or created
    _prepare(shards, output, whole=shards, overwrite=overwrite)
    started = time.perf_counter()
    names = [output.name_of(name) for name in shards.names]
    for entry in target.find_all(names) if overwrite else ():
        if entry is not None:  # deleted, so that all outputs that exist afterwards come from this job
            target.delete(entry.name)
    group = source.sdk_bucket.objects(obj_names=list(shards.names))
    with _by_sdk(source, etl):
        job = str(group.transform(target.sdk_bucket, etl, prepend=output.prefix))
        reason = _wait(source.client, job, num_shards=len(names), show_progress=show_progress)
    sizes = {entry.name: entry.size for entry in target.list_all(output.name_of(shards.prefix))}
    if missing := [name for name in names if name not in sizes]:
        cause = _object_errors(source, etl, job) or reason or "it gives no reason; see `ais etl view-logs`"
        raise StoreError(
            f"ETL job '{job}' at {source.endpoint} left {len(missing)} of {len(names)} shards untransformed, "
            f"{shown(missing)}: {cause}"
        )
    _copy_classes(shards, output)
    return TransformReport(
        url=target.locate(output.prefix),
        shards=tuple(names),
        num_bytes=sum(sizes[name] for name in names),
        elapsed_s=time.perf_counter() - started,
        job=job,
    )


def _wait(client: "Client", job: str, *, num_shards: int, show_progress: bool) -> str:
    """Wait until the job is done; return the reason of an abort, or an empty text."""
    pause, longest = _POLL_S
    num_idle = 0
    with bar(what="ETL", total=num_shards, unit="shards", shown=show_progress) as drawn:
        while True:
            details = client.job(job).get_details()
            snaps = details.list_snapshots()
            done = sum(int(snap.stats.objects) for snap in snaps if snap.stats)
            drawn.update(min(done, num_shards) - drawn.n)
            if details.any_aborted():
                return next((str(snap.abort_err) for snap in snaps if snap.abort_err), "aborted")
            # A target's part may also have ended because it was idle for long; 0001 is Go's zero.
            is_idle = snaps and all(
                snap.is_idle or (snap.end_time and not snap.end_time.startswith("0001")) for snap in snaps
            )
            num_idle = num_idle + 1 if is_idle else 0
            if num_idle == _NUM_IDLE:
                return ""
            time.sleep(pause)
            pause = min(2 * pause, longest)


def _object_errors(store: Bucket, name: str, job: str) -> str:
    """Return the messages of the job's transforms, if the cluster kept them."""
    with contextlib.suppress(StoreError), _by_sdk(store, name):
        errors = store.client.etl(name).view(job_id=job).obj_errors or []
        texts = [f"'{error.obj_name}': {message_of(error.msg) or 'no reason given'}" for error in errors]
        return shown(texts, are_names=False)
    return ""
