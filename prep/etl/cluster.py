"""Transform shards by a cluster's ETL: read one shard through it, or run a job from bucket to bucket.

AIStore runs a transform in pods, one beside each target, so it needs Kubernetes. The embedded node runs it as a
process, if that is allowed.
"""

import contextlib
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

from dali_pipes.errors import StoreError, shown
from dali_pipes.progress import bar
from dali_pipes.store.base import Bucket
from dali_pipes.store.cluster.etl import asking_etl
from dali_pipes.store.messages import message_of
from dali_pipes.store.shard_set import ShardSet
from prep.etl.local import Output, TransformReport, check_output, copy_classes, write_names

if TYPE_CHECKING:
    from aistore import Client
    from aistore.sdk.types import JobSnap


IMAGE = "dali-pipes-etl:0.1.0"
"""The image that ``deploy/etl`` builds; a cluster pulls it under the name of its registry."""
# Seconds between two looks at a job: the first pause and the longest; the pause doubles.
POLL_S = (0.05, 1.0)
# A job over a list of objects does not end by itself. It is done when all targets were idle at this many looks. AIS
# reports a target as idle after four seconds without work.
NUM_IDLE = 2
_READ_BYTES = 1 << 20


def start_etl(store: Bucket, name: str, *, transform: str, image: str = IMAGE, init_timeout_s: int = 300) -> None:
    """Start the ETL ``name``, and wait until its pods answer.

    Args:
        store: Any bucket of the cluster.
        name: 6 to 32 lower-case letters, digits and dashes.
        transform: ``pets``, or ``MODULE:FUNCTION`` of a module in the image.
        image: The image of ``deploy/etl``, or one based on it.
        init_timeout_s: The cluster waits this long for the pods.

    Raises:
        NoEtlError: If the cluster cannot run ETLs.
        StoreError: If the ETL does not start, for example because the name is taken or the image is not found.
        ValueError: If the name is invalid.
    """
    etl = store.client.etl(name)  # raises ValueError
    with asking_etl(store, name):
        etl.init(
            image=image,
            command=["python", "-m", "prep.etl", transform],
            init_timeout=f"{init_timeout_s}s",
            comm_type="hpush",  # hpull sends clients to the pods, which are not reached from outside Kubernetes
            direct_put=False,  # the server gives its results only to the node that started it, see `prep.etl.refusals`
        )


def stop_etl(store: Bucket, name: str) -> None:
    """End the ETL's pods and delete the ETL; raises `StoreError` for an unknown name."""
    etl = store.client.etl(name)
    with asking_etl(store, name):
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
    """Transform shards by a running ETL, from bucket to bucket of one cluster; return when all outputs exist.

    Raises:
        NoEtlError: If the cluster cannot run ETLs.
        StoreError: If outputs exist already, or the job fails; includes the transform's message about a shard.
        ValueError: If an output is an input, or one of the two is a directory.
    """
    why = "a cluster's ETL goes from bucket to bucket; here: dali-pipes prep transform"
    source, target = shards.store.need_cluster(why), output.store.need_cluster(why)
    with asking_etl(source, etl):
        source.client.etl(etl).view()  # refuses an ETL that does not run, before any output is deleted or created
    check_output(shards, output, overwrite=overwrite)
    write_names(shards, output)
    started = time.perf_counter()
    names = [output.name_of(name) for name in shards.names]
    if overwrite:
        # Deleted, so that all outputs that exist afterwards come from this job.
        outputs = set(names)
        for entry in target.list_all(output.name_of(shards.prefix)):
            if entry.name in outputs:
                target.delete(entry.name)
    group = source.client.bucket(source.bucket, provider=source.provider).objects(obj_names=list(shards.names))
    to_bucket = target.client.bucket(target.bucket, provider=target.provider)
    with asking_etl(source, etl):
        job = str(group.transform(to_bucket, etl, prepend=output.prefix))
        reason = _wait(source.client, job, num_shards=len(names), show_progress=show_progress)
    sizes = {entry.name: entry.size for entry in target.list_all(output.name_of(shards.prefix))}
    if missing := [name for name in names if name not in sizes]:
        cause = _object_errors(source, etl, job) or reason or "it gives no reason; see `ais etl view-logs`"
        raise StoreError(
            f"ETL job '{job}' at {source.endpoint} left {len(missing)} of {len(names)} shards untransformed, "
            f"{shown(missing)}: {cause}"
        )
    copy_classes(shards, output)
    return TransformReport(
        url=target.locate(output.prefix),
        shards=tuple(names),
        num_bytes=sum(sizes[name] for name in names),
        elapsed_s=time.perf_counter() - started,
        job=job,
    )


def _wait(client: "Client", job: str, *, num_shards: int, show_progress: bool) -> str:
    """Wait until the job is done; return the reason of an abort, or an empty text."""
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
    """Whether a target has done its part: it is idle, or its part has ended because it was idle for long."""
    has_ended = bool(snap.end_time) and not snap.end_time.startswith("0001")  # Go's zero
    return bool(snap.is_idle or has_ended)


def _object_errors(store: Bucket, name: str, job: str) -> str:
    """Return the messages of the job's transforms, if the cluster kept them."""
    with contextlib.suppress(StoreError), asking_etl(store, name):
        errors = store.client.etl(name).view(job_id=job).obj_errors or []
        texts = [f"'{error.obj_name}': {message_of(error.msg) or 'no reason given'}" for error in errors]
        return shown(texts, are_names=False)
    return ""
