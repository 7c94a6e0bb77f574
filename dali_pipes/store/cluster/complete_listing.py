"""List a bucket completely: wait until the cluster can do it, or say that it cannot.

While a cluster moves objects between its targets (a rebalance: a target went to maintenance, came or left) or between
the disks of a target (a resilver), it lists only some of them, without an error. Seen on AIS 4.9: 10,536 of 20,000 for
some seconds. Its jobs tell that it does so; it is asked before and after the listing, because the job may begin in
between. Two listings that agree are the second guard, for clusters that do not tell their jobs to everyone.

A target that died starts no job: the map lacks it, and its objects are not listed. So the map is asked, too, before and
after. A target that was lost before the first look is not noticed here: see `dali_pipes.data_set.written`.
"""

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dali_pipes.errors import StoreError
from dali_pipes.store.base import Bucket
from dali_pipes.store.cluster.transport.proxies import SETTLED_S
from dali_pipes.store.entries import ObjectEntry
from dali_pipes.store.messages import cause_of, error_text
from dali_pipes.store.patience import Waiting, pause

if TYPE_CHECKING:
    from aistore.sdk.types import JobSnap

_log = logging.getLogger(__name__)

_KINDS = ("rebalance", "resilver")
# `cmn/cos/node_state.go`
_REBALANCING = 8
# Listings that are compared, at most. Where a job writes or deletes under the prefix, two may differ.
_MAX_LISTINGS = 5


def list_completely(bucket: Bucket, prefix: str) -> Sequence[ObjectEntry]:
    """List until two consecutive listings agree, on a cluster that moves no objects and has all its targets.

    Raises:
        StoreError: If within the patience the cluster does not finish moving objects, or a target does not come back;
            if the listings keep changing.
    """
    if bucket.provider != "ais":
        return bucket.list(prefix)  # the cloud lists it
    watch = _Watch(bucket, bucket.locate(prefix))
    watch.wait_for_rest()
    entries, num_listings = bucket.list(prefix), 1
    while num_listings < _MAX_LISTINGS:
        before, entries = entries, bucket.list(prefix)
        num_listings += 1
        if entries == before:
            if not watch.wait_for_rest():
                return entries
            # Something changed meanwhile: both listings may lack the same objects.
            entries, num_listings = bucket.list(prefix), 1
    raise StoreError(
        f"'{watch.where}' at {bucket.endpoint}: {_MAX_LISTINGS} listings differ, the last ones have {len(before)} and "
        f"{len(entries)} objects; wait for whoever writes or deletes there, and for a cluster that is changing"
    )


class _Watch:
    """Looks at a cluster's jobs and map, and waits while objects may not be listed."""

    def __init__(self, bucket: Bucket, where: str) -> None:
        self.where = where
        self._bucket = bucket
        self._waiting = Waiting(bucket.patience, bucket.endpoint)
        self._tells_jobs = True
        self._settles_at = 0.0

    def wait_for_rest(self) -> bool:
        """Wait until the cluster is at rest; whether there was anything to wait for.

        Raises:
            StoreError: If it is not at rest within the patience.
        """
        has_waited = False
        while cause := self._moving() or self._changed_map():
            has_waited = True
            pause_s = self._waiting.next_pause_s(cause)
            if pause_s is None:
                raise StoreError(
                    f"'{self.where}' at {self._bucket.endpoint} cannot be listed now: {cause}, and until then only "
                    "some of the objects are listed; wait for it (ais show job, ais show cluster), or name the shards "
                    "so that nothing is listed: by the prefix of their manifest, or with braces: "
                    "PREFIX{000000..000099}.tar"
                )
            pause(pause_s)
        self._waiting.progress()
        return has_waited

    def _moving(self) -> str:
        """What moves objects; empty for nothing, or if the cluster does not tell it."""
        from aistore.sdk.errors import AISError

        bucket = self._bucket
        for kind in _KINDS if self._tells_jobs else ():
            with bucket.asking(bucket.url):
                try:
                    by_target = bucket.client.job(job_kind=kind).get_details().root
                except AISError as exc:
                    if not _is_rebalancing(bucket):
                        self._tells_jobs = False
                        _log.warning(
                            "%s does not tell its jobs (%s): if a target was restarted or a disk replaced just now, a "
                            "listing of '%s' may lack objects",
                            bucket.endpoint, error_text(exc), self.where,
                        )  # fmt: skip
                        break
                    return "a rebalance of the cluster runs and must finish"
            if state := next((state for jobs in by_target.values() if (state := _state(jobs))), None):
                return f"a {kind} of the cluster {state} and must finish"
        return ""

    def _changed_map(self) -> str:
        """Why the map says that a listing may not be complete; empty if it does not, or cannot be read."""
        from requests import RequestException

        bucket, session = self._bucket, self._bucket.client.cluster().client.session_manager.session
        bucket.learn_map()
        try:
            found = session.cluster_map()
        except ValueError:
            return ""  # the token may not read it
        except RequestException as exc:
            return f"the cluster does not show its map ({cause_of(exc)}) and must answer"
        if bucket.proxies.lacks_targets(found):
            return "a target that was there when this command began is missing and must come back"
        if bucket.proxies.settled_version not in (None, found.version):
            # A rebalance begins a moment after the map has changed.
            self._settles_at = time.monotonic() + SETTLED_S
        bucket.proxies.settled_version = found.version
        return "nodes came or left, and the cluster must settle" if time.monotonic() < self._settles_at else ""


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
