"""Run dSort jobs on a cluster."""

import contextlib
import json
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from dali_pipes.errors import StoreError
from dali_pipes.progress import bar
from dali_pipes.store.base import PROVIDERS, Bucket, Store
from dali_pipes.store.http.rules import error_text
from dali_pipes.store.shard_names import template_of
from prep.shuffle.plan import ShufflePlan

if TYPE_CHECKING:
    from aistore.sdk.dsort.core import Dsort

# Seconds between two questions about a job: at first, and at most; the pause doubles.
_POLL_S = (0.05, 1.0)
# Part of a message of a job that this cluster cannot do -> the reason.
_REASONS = {
    "requesting ekm file": "its targets cannot read the key map",
    # The input was checked: each sample has the component. So a shard calls it 'CLS', which dSort does not find.
    "key is missing for": "dSort distinguishes component 'CLS' from 'cls'",
}


class NoDsortError(StoreError):
    """The cluster's dSort cannot do the job, but another engine can."""


def spec_of(plan: ShufflePlan) -> dict[str, Any]:
    """The request to dSort, in AIStore's fields; a key map, which is stored for the job only, is not in it."""
    request, algorithm = plan.request, plan.request.algorithm
    extension = request.input_extension
    template = template_of([name.removesuffix(extension) for name in request.shards.names])
    order: dict[str, Any] = {"kind": algorithm.kind}
    if algorithm.kind == "shuffle":
        order["seed"] = str(algorithm.seed)  # a text, because AIS closes the connection on a number
    elif algorithm.kind != "none":
        order["decreasing"] = algorithm.decreasing
    if algorithm.kind == "content":
        order |= {"extension": f".{algorithm.component}", "content_key_type": algorithm.key_type}
    return {
        "description": request.description,
        "input_bck": _bucket_fields(request.shards.store),
        "input_format": {"objnames": list(request.shards.names)} if template is None else {"template": str(template)},
        "input_extension": extension,
        "output_bck": _bucket_fields(request.output_store),
        "output_format": str(plan.templates[0]) if request.mapped is None else "",
        "output_extension": request.extension,
        "output_shard_size": f"{plan.shard_bytes}B",
        "algorithm": order,
        **request.settings,
    }


def _bucket_fields(store: Store) -> dict[str, str]:
    bucket = store.need_cluster("dSort runs in a cluster")
    return {"name": bucket.bucket, "provider": PROVIDERS[bucket.scheme]}


def run_job(plan: ShufflePlan, spec: Mapping[str, Any], *, clear: Callable[[], None]) -> None:
    """Start the job and wait for it; if it fails, abort it and ``clear`` its output.

    Raises:
        NoDsortError: If the cluster cannot start the job, or cannot read the key map.
        StoreError: If the job fails.
    """
    request = plan.request
    store = request.shards.store.need_cluster("dSort runs in a cluster")
    dsort = store.client.dsort()
    # It is stored in the bucket while the job runs.
    key_map_name = f"{request.prefix}key-map-{uuid.uuid4().hex[:12]}.json"
    try:
        if plan.key_map is not None:
            spec = {**spec, "ekm_file": _put_key_map(store, key_map_name, json.dumps(plan.key_map).encode())}
        _start(store, dsort, spec)
        _wait(store, dsort, num_input_shards=len(request.shards.names), show_progress=request.show_progress)
    except BaseException:
        with contextlib.suppress(StoreError):
            if dsort.dsort_id:
                with store.asking(store.url):
                    dsort.abort()
        with contextlib.suppress(StoreError):
            clear()
        raise
    finally:
        if plan.key_map is not None:
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
    pause, longest = _POLL_S
    with bar(what="dSort reads", total=num_input_shards, unit="shards", shown=show_progress) as drawn:
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
            drawn.update(sum(int(job.metrics.local_extraction.extracted_count) for job in jobs) - drawn.n)
            if jobs and all(job.metrics.shard_creation.finished for job in jobs):
                return
            time.sleep(pause)
            pause = min(2 * pause, longest)
