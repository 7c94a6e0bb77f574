"""List a bucket completely: wait until the cluster can do it, or say that it cannot.

While a cluster moves objects between its targets (a rebalance: a target went to maintenance, came or left) or between
the disks of a target (a resilver), it lists only some of them, without an error. Seen on AIS 4.9: 10,536 of 20,000 for
some seconds. Its jobs tell that it does so; it is asked before and after the listing, because the job may begin in
between. Two listings that agree are the second guard, for clusters that do not tell their jobs to everyone.

A target that died starts no job: the map lacks it, and its objects are not listed. So the map is asked, too, before and
after. A target that was lost before the first look is not noticed here: see `dali_pipes.data_set.written`.
"""

import logging
import random
import secrets
import time
from collections.abc import Iterator, Sequence

from dali_pipes.errors import StoreError, shown
from dali_pipes.store.base import Bucket, Store
from dali_pipes.store.cluster.access import SETTLED_S, ask_json
from dali_pipes.store.cluster.client import NotAisError, RefusedError
from dali_pipes.store.http.client import NoAnswerError
from dali_pipes.store.http.rules import cause_of
from dali_pipes.store.patience import Waiting, pause
from dali_pipes.store.shard_names import ObjectEntry


def read_pages(bucket: Bucket, prefix: str, *, where: str) -> Iterator[list[ObjectEntry]]:
    """The pages of a listing of ``where``, from a server that may be no AIStore.

    Raises:
        StoreError: If a page leads back to an earlier one.
        Exception: What `dali_pipes.store.cluster.client.ClusterClient.json` raises.
    """
    wanted = {"prefix": prefix, "props": "name,size,checksum", "uuid": "", "continuation_token": ""}
    tokens = {""}
    while True:
        page = bucket.requests.json(
            f"buckets/{bucket.parts.bucket}", {"action": "list", "value": wanted}, **bucket.query
        )
        try:
            rows = page["entries"] or ()
            entries = [
                ObjectEntry(name=row["name"], size=int(row.get("size", 0)), checksum=row.get("checksum") or None)
                for row in rows
            ]
            wanted |= {"uuid": str(page["uuid"]), "continuation_token": str(page["continuation_token"])}
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            raise NotAisError("this is not the page of a listing") from None
        texts = {type(text) for entry in entries for text in (entry.name, entry.checksum or "")}
        if texts - {str} or any(not entry.name or entry.size < 0 for entry in entries):
            raise NotAisError("it lists an entry without a name or a size")
        yield entries
        if not (token := wanted["continuation_token"]):
            return
        if token in tokens:
            raise StoreError(f"'{where}': its listing has no end: page {len(tokens)} leads back to an earlier one")
        tokens.add(token)


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
    """Asks a cluster for its jobs and map, and waits while objects may not be listed."""

    def __init__(self, bucket: Bucket, where: str) -> None:
        self.where = where
        self._bucket = bucket
        self._client = bucket.requests.http
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
        bucket = self._bucket
        for kind in _KINDS if self._tells_jobs else ():
            with bucket.asking(bucket.url):
                try:
                    jobs = bucket.requests.jobs(kind=kind)
                except RefusedError as exc:
                    if self._is_rebalancing():
                        return "a rebalance of the cluster runs and must finish"
                    self._tells_jobs = False
                    _log.warning(
                        "%s does not tell its jobs (%s): if a target was restarted or a disk replaced just now, a "
                        "listing of '%s' may lack objects",
                        bucket.endpoint, exc, self.where,
                    )  # fmt: skip
                    break
            for of_target in filter(None, jobs):
                latest = max(of_target, key=lambda job: job.started)
                if latest.is_aborted:
                    return f"a {kind} of the cluster was aborted (start it again: ais start {kind}) and must finish"
                if latest.is_running:
                    return f"a {kind} of the cluster runs and must finish"
        return ""

    def _is_rebalancing(self) -> bool:
        """What the proxy's health says; it needs no right, but only some proxies of a large cluster know it."""
        try:
            found = ask_json(self._client, self._bucket.endpoint, "health?cii=true")
        except (NoAnswerError, ValueError):
            return False
        flags = found.get("flags") if isinstance(found, dict) else None  # another version's answer has none
        return isinstance(flags, int) and bool(flags & _REBALANCING)

    def _changed_map(self) -> str:
        """Why the map says that a listing may not be complete; empty if it does not, or cannot be read."""
        proxies = self._bucket.proxies
        self._bucket.learn_map()
        try:
            found = proxies.ask_map(self._client)
        except ValueError:
            return ""
        except NoAnswerError as exc:
            return f"the cluster does not show its map ({cause_of(exc.cause)}) and must answer"
        if found is None:
            return ""  # the token may not read it
        if proxies.lacks_targets(found):
            return "a target that was there when this command began is missing and must come back"
        if proxies.settled_version not in (None, found.version):
            # A rebalance begins a moment after the map has changed.
            self._settles_at = time.monotonic() + SETTLED_S
        proxies.settled_version = found.version
        return "nodes came or left, and the cluster must settle" if time.monotonic() < self._settles_at else ""


NUM_ATTEMPTS = 6
LONGEST_PAUSE_S = 1.0


def write_claimed(store: Store, name: str, data: bytes, *, by: str) -> bool:
    """See `Store.write_new`: create an object that no other writer replaces; AIStore knows no conditional writes.

    A writer first writes a claim, an object of its own beside the wanted one, and then lists all claims. It goes on
    only if there is no other's. Of two writers, the one that wrote its claim later sees the claim of the other, or the
    finished object, so at most one of them goes on. If both see each other, both withdraw their claims and try again
    after pauses of random lengths. A writer that is stopped leaves its claim behind. Its own job, run again, ignores
    that claim; other jobs are told.
    """
    start = f"{name}.claim-"
    own_job = f"{start}{by}-"
    claim = f"{own_job}{secrets.token_hex(8)}"
    failure: StoreError | None = None
    for attempt in range(NUM_ATTEMPTS):
        if attempt:
            pause(random.uniform(0, LONGEST_PAUSE_S))
        if store.size(name) is not None:
            return False
        store.write(claim, b"claimed")
        try:
            claims = [entry.name for entry in store.list_all(start)]
        except StoreError as exc:  # also where claims come and go
            failure = exc
            store.delete(claim)
            continue
        others = [found for found in claims if not found.startswith(own_job)]
        if not others:
            is_new = store.size(name) is None
            if is_new:
                store.write(name, data)
            # Once the object is there, no claim matters any more.
            for found in claims:
                store.delete(found)
            return is_new
        store.delete(claim)
        failure = StoreError(
            f"cannot create '{store.locate(name)}': another job has claimed this name ({shown(others)}) and has not "
            "written it; if that job is at work, wait for it; if it was stopped, run it again, or delete its claim"
        )
    assert failure is not None, "each attempt ends or fails"
    raise failure
