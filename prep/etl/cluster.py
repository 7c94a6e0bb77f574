"""Shards through a cluster's ETL: one read transformed, or many, bucket to bucket, by a job that is waited for.

AIStore runs a transform in pods, one beside each target, so it needs Kubernetes. The embedded node runs it as a
process of its own, where that was allowed.
"""

import contextlib
import logging
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

from dali_pipes.errors import StoreError, shown
from dali_pipes.progress import bar
from dali_pipes.store.ais import AisStore
from dali_pipes.store.etl_errors import asking_etl, no_etl, told
from dali_pipes.store.messages import error_text
from dali_pipes.store.urls import ShardSet
from prep.etl.local import Output, TransformReport, check_output, copy_classes

if TYPE_CHECKING:
    from aistore import Client
    from aistore.sdk.types import JobSnap

__all__ = [
    "IMAGE",
    "get_transformed",
    "run_offline",
    "running_etl",
    "start_etl",
    "stop_etl",
]


_log = logging.getLogger(__name__)
IMAGE = "dali-pipes-etl:latest"
"""What ``deploy/etl`` builds; a cluster pulls it under the name of its registry."""
POLL_S = (0.05, 1.0)
"""The first pause between two looks at a job, doubled up to the second."""
# A job over a list of objects does not end with it, more may be asked of it: it is done when all targets were idle at
# so many looks. AIS calls a target idle after four seconds without work.
NUM_IDLE = 2
_READ_BYTES = 1 << 20


def start_etl(store: AisStore, name: str, *, transform: str, image: str = IMAGE, init_timeout_s: int = 300) -> None:
    """Start the ETL ``name``, and wait until its pods answer.

    Args:
        store: A bucket of the cluster, whichever.
        name: 6 to 32 lower-case letters, digits and dashes.
        transform: ``pets``, or ``MODULE:FUNCTION`` of a module that the image has.
        image: Made by ``deploy/etl``, or from that.
        init_timeout_s: How long the cluster waits for its pods.

    Raises:
        NoEtlError: If the cluster has none.
        StoreError: If it cannot be started: a name that is taken, an image that is not found.
        ValueError: If the name is none.
    """
    from aistore.sdk.errors import AISError

    etl = store.client.etl(name)  # raises ValueError
    with asking_etl(store, name):
        try:
            etl.init(
                image=image,
                command=["python", "-m", "prep.etl", transform],
                init_timeout=f"{init_timeout_s}s",
                comm_type="hpush",  # hpull sends clients to the pods, which are not reached from outside Kubernetes
                direct_put=True,
            )
        except AISError as exc:
            if (none := no_etl(store.endpoint, exc.status_code, error_text(exc))) is not None:
                raise none from exc
            raise


def stop_etl(store: AisStore, name: str) -> None:
    """End the ETL's pods and forget it.

    Raises:
        StoreError: If there is none of that name.
    """
    etl = store.client.etl(name)
    with asking_etl(store, name):
        etl.stop()
        etl.delete()


@contextlib.contextmanager
def running_etl(store: AisStore, *, transform: str, image: str = IMAGE) -> Iterator[str]:
    """An ETL of a name of its own, stopped afterwards.

    Raises:
        NoEtlError: As `start_etl`.
        StoreError: As `start_etl`.
    """
    name = f"dali-pipes-{uuid.uuid4().hex[:12]}"
    start_etl(store, name, transform=transform, image=image)
    try:
        yield name
    except BaseException:
        with contextlib.suppress(StoreError):
            stop_etl(store, name)
        raise
    stop_etl(store, name)


def get_transformed(store: AisStore, shard: str, file: BinaryIO, *, etl: str) -> int:
    """Read one shard through an ETL into ``file``, with nothing stored in the cluster; its bytes.

    Raises:
        NoEtlError: If the cluster has none.
        StoreError: If there is no such shard or ETL, or the transform fails, with what it said.
    """
    from aistore.sdk.etl import ETLConfig

    # Not retried, and not through the SDK's chunks of 10 KiB. A transform may take long to answer.
    bucket = store.client.bucket(store.bucket, provider=store.provider)
    num_bytes = 0
    with asking_etl(store, etl, shard=shard):
        raw: Any = bucket.object(shard).get_reader(etl=ETLConfig(name=etl)).raw()
        with contextlib.closing(raw):
            while piece := raw.read(_READ_BYTES):
                file.write(piece)
                num_bytes += len(piece)
    return num_bytes


def run_offline(
    shards: ShardSet, output: Output, *, etl: str, overwrite: bool = False, show_progress: bool = False
) -> TransformReport:
    """Transform shards bucket to bucket, inside the cluster; returns when all are there.

    Args:
        shards: The input, in a bucket.
        output: A bucket of the same cluster.
        etl: A running ETL's name.
        overwrite: Replace what is there under these names.
        show_progress: Draw a bar where stderr is a terminal.

    Raises:
        NoEtlError: If the cluster has none.
        StoreError: If outputs are there already or the job fails, with what the transform said of which shard.
        ValueError: If an output is an input, or not both are buckets.
    """
    source, target = shards.store, output.store
    if not (isinstance(source, AisStore) and isinstance(target, AisStore)):
        local = source if not isinstance(source, AisStore) else target
        raise ValueError(
            f"'{local.url}' is a directory, a cluster's ETL goes from bucket to bucket; here: dali-pipes prep transform"
        )
    _check_etl(source, etl)
    check_output(shards, output, overwrite=overwrite)
    started = time.perf_counter()
    names = [output.name_of(name) for name in shards.names]
    if overwrite:
        # What is there afterwards is of this job.
        for entry in target.list(output.name_of(shards.prefix)):
            if entry.name in names:
                target.delete(entry.name)
    group = source.client.bucket(source.bucket, provider=source.provider).objects(obj_names=list(shards.names))
    to_bucket = target.client.bucket(target.bucket, provider=target.provider)
    with asking_etl(source, etl):
        job = str(group.transform(to_bucket, etl, prepend=output.prefix))
        reason = _wait(source.client, job, num_shards=len(names), show_progress=show_progress)
    sizes = {entry.name: entry.size for entry in target.list(output.name_of(shards.prefix))}
    if missing := [name for name in names if name not in sizes]:
        told = _object_errors(source, etl, job) or reason or "it says no reason; see `ais etl view-logs`"
        raise StoreError(
            f"ETL job '{job}' at {source.endpoint} left {len(missing)} of {len(names)} shards untransformed, "
            f"{shown(missing)}: {told}"
        )
    copy_classes(shards, output)
    return TransformReport(
        url=target.locate(output.prefix),
        shards=tuple(names),
        num_bytes=sum(sizes[name] for name in names),
        elapsed_s=time.perf_counter() - started,
        job=job,
    )


def _check_etl(store: AisStore, name: str) -> None:
    """An ETL that is not there is found before anything is deleted or made."""
    with asking_etl(store, name):
        store.client.etl(name).view()


def _wait(client: "Client", job: str, *, num_shards: int, show_progress: bool) -> str:
    """Until the job is done; why it was aborted, if it was."""
    pause, longest = POLL_S
    num_idle = 0
    watched = client.job(job)
    with bar(what="ETL", total=num_shards, unit="shards", shown=show_progress) as drawn:
        while True:
            details = watched.get_details()
            snaps = details.list_snapshots()
            done = sum(int(snap.stats.objects) for snap in snaps if snap.stats)
            drawn.update(min(done, num_shards) - drawn.n)
            if details.any_aborted():
                return next((str(snap.abort_err) for snap in snaps if snap.abort_err), "aborted")
            num_idle = num_idle + 1 if snaps and all(map(_is_idle, snaps)) else 0
            if num_idle == NUM_IDLE:
                return ""
            time.sleep(pause)
            pause = min(2 * pause, longest)


def _is_idle(snap: "JobSnap") -> bool:
    """Whether a target has done its part: idle for some seconds, or, where nobody looked in time, ended for that."""
    has_ended = bool(snap.end_time) and not snap.end_time.startswith("0001")  # Go's zero
    return bool(snap.is_idle or has_ended)


def _object_errors(store: AisStore, name: str, job: str) -> str:
    """What the job's transforms said, if the cluster kept it."""
    with contextlib.suppress(StoreError), asking_etl(store, name):
        errors = store.client.etl(name).view(job_id=job).obj_errors or []
        return shown([f"'{error.obj_name}': {told(error.msg)}" for error in errors], are_names=False)
    return ""
