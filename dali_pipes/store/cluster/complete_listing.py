"""List a bucket completely, or say that the cluster cannot do it now.

While a cluster moves objects between its targets (a rebalance: a target went to maintenance, came or left) or between
the disks of a target (a resilver), it lists only some of them, without an error. Seen on AIS 4.9: 10,536 of 20,000 for
some seconds. Its jobs tell that it does so; it is asked before and after the listing, because the job may begin in
between. Two listings that agree are the second guard, for clusters that do not tell their jobs to everyone.
"""

import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dali_pipes.errors import StoreError
from dali_pipes.store.base import Bucket
from dali_pipes.store.entries import ObjectEntry
from dali_pipes.store.messages import error_text

if TYPE_CHECKING:
    from aistore.sdk.types import JobSnap

_log = logging.getLogger(__name__)

_KINDS = ("rebalance", "resilver")
# `cmn/cos/node_state.go`
_REBALANCING = 8
# Listings that are compared, at most. Where a job writes or deletes under the prefix, two may differ.
_MAX_LISTINGS = 5


def list_completely(bucket: Bucket, prefix: str) -> Sequence[ObjectEntry]:
    """List until two consecutive listings agree, on a cluster that moves no objects.

    Raises:
        StoreError: If the cluster moves objects, did not finish moving them, or the listings keep changing.
    """
    if bucket.provider != "ais":
        return bucket.list(prefix)  # the cloud lists it
    where = bucket.locate(prefix)
    _refuse_while_moving(bucket, where)
    entries = bucket.list(prefix)
    for _ in range(_MAX_LISTINGS - 1):
        before, entries = entries, bucket.list(prefix)
        if entries == before:
            _refuse_while_moving(bucket, where)
            return entries
    raise StoreError(
        f"'{where}' at {bucket.endpoint}: {_MAX_LISTINGS} listings differ, the last ones have {len(before)} and "
        f"{len(entries)} objects; wait for whoever writes or deletes there, and for a cluster that is changing"
    )


def _refuse_while_moving(bucket: Bucket, where: str) -> None:
    from aistore.sdk.errors import AISError

    for kind in _KINDS:
        with bucket.asking(bucket.url):
            try:
                by_target = bucket.client.job(job_kind=kind).get_details().root
            except AISError as exc:
                if _is_rebalancing(bucket):
                    raise _moves(bucket, where, "rebalance", "runs") from None
                _log.warning(
                    "%s does not tell its jobs (%s): if a target was restarted or a disk replaced just now, a listing "
                    "of '%s' may lack objects",
                    bucket.endpoint, error_text(exc), where,
                )  # fmt: skip
                return
        if state := next((state for jobs in by_target.values() if (state := _state(jobs))), None):
            raise _moves(bucket, where, kind, state)


def _moves(bucket: Bucket, where: str, kind: str, state: str) -> StoreError:
    return StoreError(
        f"'{where}' at {bucket.endpoint} cannot be listed now: a {kind} of the cluster {state}, and until one has "
        "finished, only some of the objects are listed; wait for it (ais show job), or name the shards so that nothing "
        "is listed: by the prefix of their manifest, or with braces: PREFIX{000000..000099}.tar"
    )


def _is_rebalancing(bucket: Bucket) -> bool:
    """What the proxy's health says; it needs no right, but only some proxies of a large cluster know it."""
    client = bucket.client.cluster().client
    answer = client.session_manager.session.get(
        f"{bucket.endpoint.rstrip('/')}/v1/health", params={"cii": "true"}, timeout=client.timeout
    )
    with contextlib.suppress(ValueError, AttributeError):  # another version's answer
        flags = answer.json().get("flags")
        return isinstance(flags, int) and bool(flags & _REBALANCING)
    return False


def _state(jobs: "list[JobSnap]") -> str | None:
    """What the latest of a target's jobs of one kind says; ``None`` if it has finished, or there is none."""
    if not jobs:
        return None
    latest = max(jobs, key=lambda job: job.start_time)
    if latest.aborted or latest.abort_err:
        return f"was aborted (start it again: ais start {latest.kind})"
    # Go's zero time.
    return "runs" if not latest.end_time or latest.end_time.startswith("0001-") else None
