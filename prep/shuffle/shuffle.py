"""Write the samples of shards to new shards in another order, by dSort in the cluster or from this machine.

A dSort job whose input is missing "succeeds", and a job that loses a sample would not report it. So the input is read
first, and the output is planned from it; afterwards the output is read and compared. Both engines follow the same plan:
the cluster gets a request that leads to it, this machine carries it out (`prep.shuffle.client`).
"""

import contextlib
import logging
import posixpath
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dali_pipes.data_set.written import WrittenShards, write_record
from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.names import classes_name, index_name, recoded_name, record_names
from dali_pipes.store.entries import ObjectEntry
from dali_pipes.store.shard_names import extension_of, shared_prefix
from prep.shuffle.client import find_done, write_outputs
from prep.shuffle.compare import check_same, read_input
from prep.shuffle.contents import Contents, read_contents
from prep.shuffle.dsort_job import NoDsortError, run_job
from prep.shuffle.exchange import MANY_SAMPLES, SMALL_SAMPLE_BYTES, Exchange
from prep.shuffle.key_map import KeyMap
from prep.shuffle.plan import ShufflePlan, find_existing, list_outputs, make_plan, spec_of
from prep.shuffle.request import Request, common_prefix
from prep.workers import Workers, open_workers

_log = logging.getLogger(__name__)


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
    """Shards that were written; the client's engine keeps finished shards of an earlier run."""
    engine: str
    """The engine that was used: ``dsort``, ``client`` or ``exchange``."""
    planned: tuple[dict[str, Any], ...]
    """Name, samples and bytes of each planned output. A cluster of several targets cuts at other places."""
    spec: dict[str, Any] | None
    """The request to dSort; ``None`` if input or output is a directory."""
    dry_run: bool
    elapsed_s: float


def shuffle(request: Request) -> ShuffleReport:
    """Write the samples of shards, in another order, to new shards.

    The input stays; its class table is copied beside the output. The client's engine and the embedded node write the
    same shards for the same seed. A cluster of several targets does not (seen on AIS 4.9): it permutes records in the
    order in which its targets delivered them. The client's engine leaves out files that belong to no sample (a README).

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
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(open_workers(request.on, request.jobs)) if request.is_exchange else None
        if workers is not None:
            stores = (request.shards.store, request.output_store)
            workers.check_reach(store.directory for store in stores if store.directory is not None)
        return _shuffle(request, workers, started)


def _shuffle(request: Request, workers: Workers | None, started: float) -> ShuffleReport:
    contents = read_input(request, workers)
    plan = make_plan(request, contents)
    own = request.part.of(plan.outputs)
    spec = None if request.is_local else spec_of(request, plan)
    engine = _choose_engine(request, plan)
    existing = find_existing(request, plan)
    planned: tuple[dict[str, Any], ...] = tuple(
        {"name": output.name, "num_samples": len(output.positions), "num_bytes": output.num_bytes(contents)}
        for output in own
    )
    names, num_bytes, num_written = (
        tuple(output.name for output in own),
        sum(shard["num_bytes"] for shard in planned),
        0,
    )
    found = [name for name in existing if plan.is_output(name)]
    if not request.dry_run:
        exchange = _open_exchange(request, contents, workers) if engine == "exchange" else None
        done, engine = _check_existing(request, plan, existing, found, engine=engine, exchange=exchange)
        engine = _write(request, plan, spec, existing=existing, done=done, engine=engine, exchange=exchange)
        made = _list_made(request, plan, engine=engine)
        names, num_bytes = tuple(entry.name for entry in made), sum(entry.size for entry in made)
        if engine == "dsort":
            came_out = read_contents(request.output_store, names, what="verify", show_progress=request.show_progress)
            check_same(request.output_store, contents, came_out, kept=plan.kept)
            counts = np.diff(came_out.starts).tolist()
            _write_records(request, plan, zip(names, counts, (entry.size for entry in made), strict=True))
        else:
            _write_records(request, plan)
        _copy_tables(request, plan)
        num_written = len(names) - len(done)
    elif found and not request.overwrite:
        # A dry run does not compare these shards with the plan.
        _log.warning(
            "%d shards are there already, from '%s': if they are not as planned, the shuffle will need --overwrite",
            len(found), request.output_store.locate(found[0]),
        )  # fmt: skip
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


def _choose_engine(request: Request, plan: ShufflePlan) -> str:
    if request.is_exchange:
        mean_bytes = int(plan.contents.tar_bytes.mean())
        if mean_bytes < SMALL_SAMPLE_BYTES and plan.num_samples > MANY_SAMPLES:
            _log.warning(
                "samples have %d bytes on average, and an exchange sends about one request for each of %d: "
                "--engine client, which reads whole shards, may be faster", mean_bytes, plan.num_samples,
            )  # fmt: skip
        return "exchange"
    if request.is_local or request.engine == "client":
        return "client"
    if not plan.not_by_dsort:
        return "dsort"
    if request.engine == "dsort":
        raise ValueError(f"{plan.not_by_dsort}; use --engine client")
    _log.warning("%s: shuffling from here, all bytes pass through this machine", plan.not_by_dsort)
    return "client"


def _open_exchange(request: Request, contents: Contents, workers: Workers | None) -> Exchange:
    assert workers is not None, "an exchange has workers"
    return Exchange(
        source=request.shards.store,
        target=request.output_store,
        contents=contents,
        workers=workers,
        show_progress=request.show_progress,
    )


def _check_existing(
    request: Request,
    plan: ShufflePlan,
    existing: dict[str, ObjectEntry],
    found: list[str],
    *,
    engine: str,
    exchange: Exchange | None,
) -> tuple[set[str], str]:
    """The outputs of this part that exist as planned, and the engine that completes them."""
    store = request.output_store
    done: set[str] = set()
    if found and exchange is not None:
        done, others = exchange.find_done(request.part.of(plan.outputs), existing=existing)
        if not others and set(found) <= set(plan.names):
            return done, engine
    elif found and (engine == "client" or (request.engine == "auto" and not request.overwrite)):
        done, others = find_done(
            store, plan.contents, plan.outputs, existing=existing, show_progress=request.show_progress
        )
        if not others and set(found) <= set(plan.names):
            # These are outputs of an earlier run. A cluster cannot write only the missing ones.
            return done, "client"
    if found and not request.overwrite:
        if isinstance(request.mapped, KeyMap):
            where, other = store.url, f"name others in {request.mapped.where}"
        else:
            where, other = store.locate(request.prefix), request.way_out
        raise StoreError(
            f"'{where}' holds {len(found)} shards already, from '{found[0]}'; --overwrite replaces them, or {other}"
        )
    return done, engine


def _write(
    request: Request,
    plan: ShufflePlan,
    spec: dict[str, Any] | None,
    *,
    existing: dict[str, ObjectEntry],
    done: set[str],
    engine: str,
    exchange: Exchange | None,
) -> str:
    """Write the missing outputs; returns the engine that wrote them."""
    source, target = request.shards.store, request.output_store
    left = [output for output in request.part.of(plan.outputs) if output.name not in done]
    if not left and set(plan.names).issuperset(name for name in existing if plan.is_output(name)):
        return engine if exchange is not None else "client"
    if not target.exists():
        target.create()
    # Files that describe the output are deleted first: they must not stand beside other shards.
    others = set(plan.names).difference(output.name for output in left)
    kept = {name for output in others for name in (output, index_name(output))}
    kept |= set(plan.names) if engine != "dsort" else set()
    for name in existing:
        if name not in kept:
            target.delete(name)

    def clear() -> None:
        records = {name for prefix in plan.prefixes for name in record_names(prefix)}
        for name in list_outputs(request, plan):
            if name in records or plan.is_output(name):
                target.delete(name)

    if engine == "dsort":
        assert spec is not None
        # dSort decides the final names. Until its output was compared, the record says 0 bytes: no shards match that.
        _write_records(request, plan, ((output.name, len(output.positions), 0) for output in plan.outputs))
        try:
            run_job(
                source.need_cluster("dSort runs in a cluster"),
                spec,
                key_map=plan.key_map,
                key_map_name=f"{request.prefix}key-map-{uuid.uuid4().hex[:12]}.json",
                clear=clear,
                num_input_shards=len(request.shards.names),
                show_progress=request.show_progress,
            )
            return "dsort"
        except NoDsortError as exc:
            if request.engine == "dsort":
                raise
            _log.warning("%s. Shuffling from here now: all bytes pass through this machine", str(exc).partition(";")[0])
    if exchange is not None:
        _write_records(request, plan)
        exchange.write(left)
        return engine
    write_outputs(
        source,
        plan.contents,
        left,
        target=target,
        prefix=request.prefix,
        spool_dir=request.spool_dir,
        before_writing=lambda: _write_records(request, plan),
        show_progress=request.show_progress,
    )
    return "client"


def _write_records(
    request: Request, plan: ShufflePlan, shards: Iterable[tuple[str, int, int | None]] | None = None
) -> None:
    """Write the record of each set of output shards: see `dali_pipes.data_set.written`.

    Args:
        request: The shuffle.
        plan: Its plan.
        shards: Name, samples and bytes of each shard; ``None``: as planned, for all parts.
    """
    if shards is None:
        is_plain = request.extension == ".tar"
        shards = (
            (output.name, len(output.positions), output.num_bytes(plan.contents) if is_plain else None)
            for output in plan.outputs
        )
    prefixes = sorted(plan.prefixes, key=len, reverse=True)
    sets: dict[str, list[tuple[str, int, int | None]]] = {}
    for name, num_samples, num_bytes in shards:
        prefix = next(prefix for prefix in prefixes if name.startswith(prefix))
        sets.setdefault(prefix, []).append((posixpath.basename(name), num_samples, num_bytes))
    for prefix, rows in sets.items():
        written = WrittenShards(
            names=[row[0] for row in rows],
            num_samples=sum(row[1] for row in rows),
            num_bytes=None if rows[0][2] is None else sum(row[2] or 0 for row in rows),
        )
        if request.output_store.find(record_names(prefix)[0]) != written.to_bytes():
            write_record(request.output_store, prefix, written)


def _list_made(request: Request, plan: ShufflePlan, *, engine: str) -> list[ObjectEntry]:
    """The output shards as the store lists them."""
    store, entries = request.output_store, list_outputs(request, plan)
    if engine == "dsort":
        made = [entries[name] for name in sorted(entries) if plan.is_output(name)]
        if not made:
            raise DataError(
                f"dSort at '{store.url}' reported success and wrote no shard; {len(request.shards.names)} went in"
            )
        return made
    names = [output.name for output in request.part.of(plan.outputs)]
    if gone := [name for name in names if name not in entries]:
        raise StoreError(
            f"'{store.locate(gone[0])}' was written, and is gone; does another process write or delete there? "
            "Run the command again"
        )
    return [entries[name] for name in names]


def _copy_tables(request: Request, plan: ShufflePlan) -> None:
    """Copy what `prep pack` wrote beside the shards, for `prep index`."""
    stem = common_prefix([shard.removesuffix(extension_of(shard)) for shard in request.shards.names])
    for name_of in (classes_name, recoded_name):
        data = request.shards.store.find(name_of(stem.rstrip("0123456789")))
        if data is None:
            continue
        for name in map(name_of, plan.prefixes):
            if request.output_store.find(name) != data:
                request.output_store.write(name, data)
