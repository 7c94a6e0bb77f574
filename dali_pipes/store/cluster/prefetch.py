"""Make a cluster fetch objects from its bucket's backend, a cloud or another cluster, to its own disks."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from dali_pipes.errors import StoreError
from dali_pipes.progress import bar
from dali_pipes.store.base import Bucket
from dali_pipes.store.cluster.client import TargetJob
from dali_pipes.store.patience import pause

_log = logging.getLogger(__name__)

_KIND = "prefetch-listrange"
# Seconds between two questions about the job: the first pause, and the longest. Each is twice as long as the last.
_POLL_S = (0.1, 2.0)


class Prefetched(NamedTuple):
    """The result of a job."""

    job: str
    num_objects: int
    """Objects that the job fetched; the cluster had the others already."""
    num_bytes: int


def prefetch(
    bucket: Bucket, names: Sequence[str], *, num_bytes: int, blob_threshold: int = 0, show_progress: bool = False
) -> Prefetched:
    """Start AIStore's prefetch job for objects, and wait for its end. Ctrl-C ends the wait, not the job.

    Args:
        bucket: The bucket, which must have a backend.
        names: The objects. One that the cluster has already is not fetched again.
        num_bytes: The bytes of all of them, for the progress bar.
        blob_threshold: Targets fetch objects of this size or more in parts, several at a time; 0: none.
        show_progress: Draw the bar.

    Raises:
        StoreError: If the job fails or is aborted, or an object cannot be fetched: says why.
        ValueError: If the bucket has no backend.
    """
    if not bucket.has_backend():
        raise ValueError(
            f"'{bucket.url}' has no backend: its objects are in the cluster {bucket.endpoint} already; stage them on "
            "this node instead: dali-pipes cache warm URL --cache DIRECTORY"
        )
    value = {"objnames": list(names), "blob-threshold": blob_threshold, "coer": True}
    with bucket.asking(bucket.url):
        message = {"action": _KIND, "value": value}
        _, content = bucket.requests.call(f"buckets/{bucket.parts.bucket}", message, method="POST", **bucket.query)
    job = content.decode(errors="replace").strip()
    try:
        parts = _wait(bucket, job, num_bytes=num_bytes, show_progress=show_progress)
    except KeyboardInterrupt:
        _log.warning("the job '%s' goes on in the cluster: ais show job %s; to end it: ais stop %s", job, job, job)
        raise
    if errors := list(dict.fromkeys(part.error for part in parts if part.error)):
        raise StoreError(f"prefetch job '{job}' of '{bucket.url}' at {bucket.endpoint}: {'; '.join(errors)}")
    if any(part.is_aborted for part in parts):
        raise StoreError(f"prefetch job '{job}' of '{bucket.url}' at {bucket.endpoint} was aborted")
    return Prefetched(job, sum(part.num_objects for part in parts), sum(part.num_bytes for part in parts))


def _wait(bucket: Bucket, job: str, *, num_bytes: int, show_progress: bool) -> list[TargetJob]:
    """Wait until no target works at the job; its part of each target."""
    pause_s, longest_s = _POLL_S
    with bar(what="prefetch", total=num_bytes, unit="B", shown=show_progress) as drawn:
        while True:
            with bucket.asking(f"job {job}"):
                parts = [part for of_target in bucket.requests.jobs(kind=_KIND, job=job) for part in of_target]
            drawn.set_postfix_str(f"{sum(part.num_objects for part in parts)} objects", refresh=False)
            drawn.update(min(sum(part.num_bytes for part in parts), num_bytes) - drawn.n)
            if parts and not any(part.is_running for part in parts):
                return parts
            pause(pause_s)
            pause_s = min(2 * pause_s, longest_s)
