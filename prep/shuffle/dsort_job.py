"""Run a dSort job on a cluster: start it, wait for it, and clean up if it fails."""

import contextlib
import json
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from dali_pipes.errors import StoreError
from dali_pipes.progress import bar
from dali_pipes.store.base import Bucket
from dali_pipes.store.messages import error_text

if TYPE_CHECKING:
    from aistore.sdk.dsort.core import Dsort
    from aistore.sdk.dsort.types import JobInfo


POLL_S = (0.05, 1.0)
"""Seconds between two questions about the job: at first, and at most; the pause doubles."""


# Part of a message of a job that this cluster cannot do -> the reason.
_REASONS = {
    "requesting ekm file": "its targets cannot read the key map",
    # The input was checked: each sample has the component. So a shard calls it 'CLS', which dSort does not find.
    "key is missing for": "dSort distinguishes component 'CLS' from 'cls'",
}


class NoDsortError(StoreError):
    """The cluster's dSort cannot do the job, but another engine can."""


def run_job(
    store: Bucket,
    spec: Mapping[str, Any],
    *,
    key_map: bytes | None,
    key_map_name: str,
    clear: Callable[[], None],
    num_input_shards: int,
    show_progress: bool,
) -> None:
    """Start the job and wait for it; if it fails, abort it and delete its output.

    Args:
        store: The input's bucket.
        spec: The request.
        key_map: An external key map, as JSON; it is stored in the bucket while the job runs.
        key_map_name: The key map's name in the bucket.
        clear: Deletes the job's output.
        num_input_shards: The total of the progress bar.
        show_progress: Draw a bar.

    Raises:
        NoDsortError: If the cluster cannot start the job, or cannot read the key map.
        StoreError: If the job fails.
    """
    dsort = store.client.dsort()
    try:
        if key_map is not None:
            spec = {**spec, "ekm_file": _put_key_map(store, key_map_name, key_map)}
        _start(store, dsort, spec)
        _wait(store, dsort, num_input_shards=num_input_shards, show_progress=show_progress)
    except BaseException:
        with contextlib.suppress(StoreError):
            if dsort.dsort_id:
                with store.asking(store.url):
                    dsort.abort()
        with contextlib.suppress(StoreError):
            clear()
        raise
    finally:
        if key_map is not None:
            with contextlib.suppress(StoreError):
                store.delete(key_map_name)


def _put_key_map(store: Bucket, name: str, data: bytes) -> str:
    """Store a key map; returns a URL at which the cluster's targets can read it.

    Targets send the headers of cluster nodes. If the cluster has internal networks, a node's public port refuses such
    requests with 403 (AIS 4.9; the SDK gives the URL of the proxy's public port). So the URL names the target that
    holds the object, in the cluster's internal network.
    """
    store.write(name, data)
    bucket = store.client.bucket(store.bucket, provider=store.provider)
    with store.asking(store.locate(name)):
        head = bucket.client.request(
            "HEAD", path=f"objects/{store.bucket}/{quote(name)}", params={**bucket.qparam, "props": "location"}
        )
        nodes = store.client.cluster().get_info().tmap
    found = re.match(r"t\[([^\]]+)\]", head.headers.get("Ais-Location", ""))
    if found is None or found[1] not in nodes:
        raise NoDsortError(f"no target at {store.endpoint} reports that it holds the key map '{store.locate(name)}'")
    url = nodes[found[1]].intra_data_net.direct_url
    return f"{url}/v1/objects/{store.bucket}/{quote(name)}?provider={bucket.qparam['provider']}"


def _start(store: Bucket, dsort: "Dsort", spec: Mapping[str, Any]) -> None:
    from aistore.sdk.errors import AISError, ErrBckNotFound

    with tempfile.TemporaryDirectory(prefix="dali-pipes-shuffle-") as folder:
        path = Path(folder) / "dsort.json"
        path.write_text(json.dumps(spec))
        with store.asking(store.url):
            try:
                dsort.start(path)
            except ErrBckNotFound:
                raise
            except AISError as exc:
                # 400: AIS 5.0, whose own broadcast fails. 404, 405, 501: built without dSort.
                if exc.status_code not in (400, 404, 405, 501):
                    raise
                raise NoDsortError(
                    f"no dSort that works at {store.endpoint}: {error_text(exc)}; it needs an AIStore built with "
                    "dSort, 4.x (5.0 has it and cannot start it). Without it, shuffle from here: --engine exchange"
                ) from exc


def _wait(store: Bucket, dsort: "Dsort", *, num_input_shards: int, show_progress: bool) -> None:
    pause, longest = POLL_S
    with bar(what="dSort", total=2 * num_input_shards, unit="shards", shown=show_progress) as drawn:
        while True:
            with store.asking(store.url):
                jobs = list(dsort.get_job_info().values())
            failures = [text for job in jobs for text in job.metrics.errors or () if text]
            if failures or any(job.metrics.aborted or job.aborted for job in jobs):
                # Most nodes only report that another one failed.
                causes = [text for text in failures if not text.endswith(" aborted")] or failures
                reason = causes[0] if causes else "aborted"
                text = f"dSort job '{dsort.dsort_id}' at {store.endpoint} failed: {reason}"
                if why := next((why for said, why in _REASONS.items() if said in reason), None):
                    raise NoDsortError(f"{text}; {why}. Shuffle from here: --engine exchange")
                raise StoreError(text)
            _draw(drawn, jobs, num_input_shards=num_input_shards)
            if jobs and all(job.metrics.shard_creation.finished for job in jobs):
                return
            time.sleep(pause)
            pause = min(2 * pause, longest)


def _draw(drawn: Any, jobs: Sequence["JobInfo"], *, num_input_shards: int) -> None:
    """Draw half of the bar for shards that were read and half for shards that were written, over all targets."""
    extracted = sum(int(job.metrics.local_extraction.extracted_count) for job in jobs)
    created = sum(int(job.metrics.shard_creation.created_count) for job in jobs)
    to_create = sum(int(job.metrics.shard_creation.to_create) for job in jobs)
    drawn.total = num_input_shards + (to_create or num_input_shards)
    drawn.update(extracted + created - drawn.n)
