"""Write the samples of shards to new shards in another order, by dSort in the cluster or by an exchange.

A dSort job whose input is missing "succeeds", and a job that loses a sample would not report it. So the input is read
first, and the output is planned from it; afterwards the output is read and compared. Both engines follow the same plan:
the cluster gets a request that leads to it, the exchange carries it out (`prep.shuffle.exchange`).
"""

import contextlib
import json
import logging
import posixpath
import re
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import numpy as np

from dali_pipes.data_set.written import WrittenShards, write_record
from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.names import classes_name, index_name, recoded_name, record_names
from dali_pipes.progress import bar
from dali_pipes.store.base import PROVIDERS, Bucket, Store
from dali_pipes.store.cluster.client import RefusedError
from dali_pipes.store.shard_names import ObjectEntry, extension_of, shared_prefix, template_of
from prep.shuffle.contents import check_same, read_contents, read_input
from prep.shuffle.exchange import Exchange
from prep.shuffle.key_map import KeyMap
from prep.shuffle.plan import ShufflePlan, find_existing, list_outputs, make_plan
from prep.shuffle.request import Request, common_prefix
from prep.workers import Workers, open_workers

if TYPE_CHECKING:
    from aistore.sdk.dsort.core import Dsort

_log = logging.getLogger(__name__)

# A process for each of these bytes of the input: to start one takes as long as to read some of them.
_BYTES_A_WORKER = 64 << 20


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


@dataclass(frozen=True, kw_only=True)
class ShuffleReport:
    """The result of a shuffle, or with ``dry_run`` the expected result."""

    url: str
    """The beginning of the output's names: ``ais://pets/shuffled-``."""
    shards: tuple[str, ...]
    """The output shards, in order, of this process's part; the last one of a set may be small."""
    num_input_shards: int
    num_samples: int
    """Samples of the output: all samples of the input, except those that a key map leaves out."""
    num_dropped: int
    """Samples that were left out because the key map does not name them."""
    num_bytes: int
    """Bytes of the output shards."""
    num_written: int
    """Shards that were written; the exchange keeps finished shards of an earlier run."""
    engine: str
    """The engine that was used: ``dsort`` or ``exchange``."""
    planned: tuple[dict[str, Any], ...]
    """Name, samples and bytes of each planned output. A cluster of several targets cuts at other places."""
    spec: dict[str, Any] | None
    """The request to dSort; ``None`` if input or output is a directory."""
    dry_run: bool
    elapsed_s: float


def shuffle(request: Request) -> ShuffleReport:
    """Write the samples of shards, in another order, to new shards.

    The input stays; its class table is copied beside the output. The exchange and the embedded node write the same
    shards for the same seed. A cluster of several targets does not (seen on AIS 4.9): it permutes records in the
    order in which its targets delivered them. The exchange leaves out files that belong to no sample (a README).

    Raises:
        ValueError: If the output's names include a shard of the input, or there are fewer names than output shards.
        StoreError: If an input shard does not exist; if other shards have the output's names and ``overwrite`` is
            false; if the engine is ``dsort`` and the cluster has no working dSort; or if the job fails: then its output
            is deleted.
        DataError: If the input is not a readable tar, has a key twice (a reader would join two such samples that stand
            together), lacks a component to sort by, a mapped key or a sample for each split, or has another number of
            samples than its manifest says. If the output does not hold exactly the input's samples: the text names
            some that are missing, extra or changed, and the output is left for inspection.
    """
    started = time.perf_counter()
    entries = request.shards.entries()
    at_most = None if request.jobs else 1 + sum(entry.size for entry in entries) // _BYTES_A_WORKER
    with open_workers(request.on, request.jobs, at_most=at_most) as workers:
        stores = (request.shards.store, request.output_store)
        workers.check_reach(store.directory for store in stores if store.directory is not None)
        contents = read_input(request, entries, workers)
        plan = make_plan(request, contents)
        spec = None if request.is_local else spec_of(plan)
        engine = _choose_engine(plan)
        existing = find_existing(plan)
        planned: tuple[dict[str, Any], ...] = tuple(
            {"name": output.name, "num_samples": len(output.positions), "num_bytes": output.num_bytes(contents)}
            for output in plan.own_outputs
        )
        if request.dry_run:
            names, num_written = tuple(shard["name"] for shard in planned), 0
            num_bytes = sum(shard["num_bytes"] for shard in planned)
            existing_shards = [name for name in existing if plan.is_output(name)]
            if existing_shards and not request.overwrite:
                _log.warning(
                    "%d shards are there already, from '%s': if they are not as planned, the shuffle will need "
                    "--overwrite", len(existing_shards), request.output_store.locate(existing_shards[0]),
                )  # fmt: skip
        else:
            with Exchange(plan, workers) as exchange:
                done = _find_done(exchange, existing, engine=engine)
                engine = _write(exchange, spec, existing, done=done, engine="exchange" if done else engine)
            made = _finish(plan, workers, engine=engine)
            names, num_bytes = tuple(entry.name for entry in made), sum(entry.size for entry in made)
            num_written = len(names) - len(done)
    return ShuffleReport(
        url=request.output_store.locate(shared_prefix(names) if isinstance(request.mapped, KeyMap) else request.prefix),
        shards=names,
        num_input_shards=len(request.shards.names),
        num_samples=plan.num_samples if request.part.is_all else sum(shard["num_samples"] for shard in planned),
        num_dropped=contents.num_samples - plan.num_samples,
        num_bytes=num_bytes,
        num_written=num_written,
        engine=engine,
        planned=planned,
        spec=spec,
        dry_run=request.dry_run,
        elapsed_s=time.perf_counter() - started,
    )


def _choose_engine(plan: ShufflePlan) -> str:
    request = plan.request
    if request.is_exchange:
        return "exchange"
    if not plan.not_by_dsort:
        return "dsort"
    if request.engine == "dsort":
        raise ValueError(f"{plan.not_by_dsort}; use --engine exchange")
    _log.warning("%s: shuffling from here, all bytes pass through this machine", plan.not_by_dsort)
    return "exchange"


def _find_done(exchange: Exchange, existing: dict[str, ObjectEntry], *, engine: str) -> set[str]:
    """The outputs of this part that exist as planned: an earlier run wrote them.

    Raises:
        StoreError: If other shards have the output's names and must stay.
    """
    plan, request = exchange.plan, exchange.plan.request
    of_others = set(plan.names).difference(output.name for output in plan.own_outputs)
    shards = [name for name in existing if plan.is_output(name)]
    # A cluster cannot write only the missing ones.
    is_compared = engine == "exchange" or (request.engine == "auto" and not request.overwrite)
    done = exchange.find_done(existing) if is_compared else set()
    if request.overwrite or all(name in done or name in of_others for name in shards):
        return done
    if isinstance(request.mapped, KeyMap):
        where, other = request.output_store.url, f"name others in {request.mapped.where}"
    else:
        where, other = request.output_store.locate(request.prefix), request.way_out
    raise StoreError(
        f"'{where}' holds {len(shards)} shards already, from '{shards[0]}'; --overwrite replaces them, or {other}"
    )


def _write(
    exchange: Exchange,
    spec: dict[str, Any] | None,
    existing: dict[str, ObjectEntry],
    *,
    done: set[str],
    engine: str,
) -> str:
    """Write the missing outputs; returns the engine that wrote them."""
    plan, target = exchange.plan, exchange.plan.request.output_store
    missing = [output for output in plan.own_outputs if output.name not in done]
    if not missing and set(plan.names).issuperset(name for name in existing if plan.is_output(name)):
        return engine
    if not target.exists():
        target.create()
    # Files that describe the output are deleted first: they must not stand beside other shards.
    complete = set(plan.names).difference(output.name for output in missing)
    kept = (set(plan.names) if engine == "exchange" else complete) | set(map(index_name, complete))
    for name in existing:
        if name not in kept:
            target.delete(name)
    if engine == "dsort":
        assert spec is not None
        try:
            _run_dsort(plan, spec)
            return "dsort"
        except NoDsortError as exc:
            if plan.request.engine == "dsort":
                raise
            _log.warning("%s. Shuffling from here now: all bytes pass through this machine", str(exc).partition(";")[0])
    _write_planned(plan)
    exchange.write(missing)
    return "exchange"


def _finish(plan: ShufflePlan, workers: Workers, *, engine: str) -> list[ObjectEntry]:
    """Compare dSort's output with the input, write the records and the tables; returns the output shards."""
    store, entries = plan.request.output_store, list_outputs(plan)
    if engine == "dsort":
        made = [entries[name] for name in sorted(entries) if plan.is_output(name)]
        if not made:
            num_inputs = len(plan.request.shards.names)
            raise DataError(f"dSort at '{store.url}' reported success and wrote no shard; {num_inputs} went in")
        names = [entry.name for entry in made]
        came_out = read_contents(store, names, workers, what="verify", show_progress=plan.request.show_progress)
        check_same(store, plan.contents, came_out, kept=plan.kept)
        counts = np.diff(came_out.starts).tolist()
        _write_records(plan, list(zip(names, counts, (entry.size for entry in made), strict=True)))
    else:
        names = [output.name for output in plan.own_outputs]
        if missing := [name for name in names if name not in entries]:
            raise StoreError(
                f"'{store.locate(missing[0])}' was written, and is gone; does another process write or delete there? "
                "Run the command again"
            )
        made = [entries[name] for name in names]
        _write_planned(plan)
    _copy_tables(plan)
    return made


def _write_planned(plan: ShufflePlan) -> None:
    """Write the records of the output as planned, of all parts."""
    is_tar = plan.request.extension == ".tar"
    sizes = (output.num_bytes(plan.contents) if is_tar else None for output in plan.outputs)
    rows = zip(plan.names, (len(output.positions) for output in plan.outputs), sizes, strict=True)
    _write_records(plan, list(rows))


def _write_records(plan: ShufflePlan, shards: Sequence[tuple[str, int, int | None]]) -> None:
    """Write the record of each set of output shards, from name, samples and bytes of each shard."""
    store, remaining = plan.request.output_store, list(shards)
    for prefix in sorted(plan.prefixes, key=len, reverse=True):
        rows = [row for row in remaining if row[0].startswith(prefix)]
        remaining = [row for row in remaining if not row[0].startswith(prefix)]
        sizes = [row[2] for row in rows if row[2] is not None]
        written = WrittenShards(
            names=[posixpath.basename(row[0]) for row in rows],
            num_samples=sum(row[1] for row in rows),
            num_bytes=sum(sizes) if len(sizes) == len(rows) else None,
        )
        if rows and store.find(record_names(prefix)[0]) != written.to_bytes():
            write_record(store, prefix, written)


def _copy_tables(plan: ShufflePlan) -> None:
    """Copy the tables that `prep pack` wrote beside the shards, for `prep index`."""
    shards, target = plan.request.shards, plan.request.output_store
    stem = common_prefix([shard.removesuffix(extension_of(shard)) for shard in shards.names])
    for name_of in (classes_name, recoded_name):
        data = shards.store.find(name_of(stem.rstrip("0123456789")))
        if data is None:
            continue
        for name in map(name_of, plan.prefixes):
            if target.find(name) != data:
                target.write(name, data)


# By dSort


def spec_of(plan: ShufflePlan) -> dict[str, Any]:
    """Return the request to dSort in AIStore's fields. The key map is not included: the start of the job stores it."""
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


def _bucket_fields(store: Store) -> dict[str, Any]:
    bucket = store.need_cluster("dSort runs in a cluster")
    name, uuid, namespace = bucket.parts
    found: dict[str, Any] = {"name": name, "provider": PROVIDERS[bucket.scheme]}
    if uuid or namespace:
        found["namespace"] = {"uuid": uuid, "name": namespace}
    return found


def _run_dsort(plan: ShufflePlan, spec: Mapping[str, Any]) -> None:
    """Start the job and wait for it; if it fails, abort it and delete its output.

    Raises:
        NoDsortError: If the cluster cannot start the job, or cannot read the key map.
        StoreError: If the job fails.
    """
    request = plan.request
    store = request.shards.store.need_cluster("dSort runs in a cluster")
    dsort = store.client.dsort()
    # dSort decides the final names. Until its output was compared, the record says 0 bytes: no shards match that.
    _write_records(plan, [(output.name, len(output.positions), 0) for output in plan.outputs])
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
                with store.by_sdk(store.url):
                    dsort.abort()
        with contextlib.suppress(StoreError):
            records = {name for prefix in plan.prefixes for name in record_names(prefix)}
            for name in list_outputs(plan):
                if name in records or plan.is_output(name):
                    request.output_store.delete(name)
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
    with store.by_sdk(store.locate(name)) as bucket:
        head = bucket.client.request(
            "HEAD", path=f"objects/{store.parts.bucket}/{quote(name)}", params={**bucket.qparam, "props": "location"}
        )
        nodes = store.client.cluster().get_info().tmap
    found = re.match(r"t\[([^\]]+)\]", head.headers.get("Ais-Location", ""))
    if found is None or found[1] not in nodes:
        raise NoDsortError(f"no target at {store.endpoint} reports that it holds the key map '{store.locate(name)}'")
    url = nodes[found[1]].intra_data_net.direct_url
    return f"{url}/v1/objects/{store.parts.bucket}/{quote(name)}?{urlencode(bucket.qparam)}"


def _start(store: Bucket, dsort: "Dsort", spec: Mapping[str, Any]) -> None:
    from dali_pipes.store.cluster.sessions import sdk_errors

    with tempfile.TemporaryDirectory(prefix="dali-pipes-shuffle-") as folder:
        path = Path(folder) / "dsort.json"
        path.write_text(json.dumps(spec))
        with store.asking(store.url):
            try:
                with sdk_errors():
                    dsort.start(path)
            except RefusedError as exc:
                # 400: AIS 5.0, whose own broadcast fails. 404, 405, 501: built without dSort.
                if exc.is_bucket_missing or exc.status not in (400, 404, 405, 501):
                    raise
                raise NoDsortError(
                    f"no dSort that works at {store.endpoint}: {exc}; it needs an AIStore built with "
                    "dSort, 4.x (5.0 has it and cannot start it). Without it, shuffle from here: --engine exchange"
                ) from exc


def _wait(store: Bucket, dsort: "Dsort", *, num_input_shards: int, show_progress: bool) -> None:
    pause, longest = _POLL_S
    with bar(what="dSort reads", total=num_input_shards, unit="shards", shown=show_progress) as drawn:
        while True:
            with store.by_sdk(store.url):
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
