"""Write the samples of shards to new shards in another order, by dSort in the cluster or from this machine.

Nothing is taken on trust: a dSort job whose input is missing "succeeds", and one that loses a sample would not say so.
So the input is read first and the output planned from it; afterwards the output is read and compared. Both engines
follow the same plan: the cluster gets a request that leads to it, this machine carries it out (`prep.shuffle.client`).
"""

import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.names import classes_name, index_name
from dali_pipes.store.base import Store
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.entries import ObjectEntry
from dali_pipes.store.shard_names import extension_of, shared_prefix
from dali_pipes.store.shard_set import ShardSet
from prep.shuffle.client import find_done, write_outputs
from prep.shuffle.compare import check_same
from prep.shuffle.contents import read_contents
from prep.shuffle.dsort_job import NoDsortError, run_job
from prep.shuffle.dsort_spec import DsortSpec
from prep.shuffle.input import epoch_prefix, epoch_seed, load_key_map, read_input, spec_names
from prep.shuffle.key_map import Grouping, KeyMap
from prep.shuffle.order import Algorithm
from prep.shuffle.plan import ShufflePlan, find_existing, list_outputs, make_plan, spec_of
from prep.shuffle.request import (
    Engine,
    Request,
    check_input,
    check_prefix,
    check_request,
    common_prefix,
    input_extension,
)

__all__ = [
    "DEFAULT_OUTPUT_PREFIX",
    "Algorithm",
    "Engine",
    "Grouping",
    "KeyMap",
    "ShuffleReport",
    "epoch_prefix",
    "epoch_seed",
    "load_key_map",
    "shuffle",
    "shuffle_spec",
]

_log = logging.getLogger(__name__)

DEFAULT_OUTPUT_PREFIX = "shuffled-"


@dataclass(frozen=True, kw_only=True)
class ShuffleReport:
    """What a shuffle did, or with ``dry_run`` would do."""

    url: str
    """The beginning of the output's names: ``ais://pets/shuffled-``."""
    shards: tuple[str, ...]
    """The output shards, in order; the last one of a set may be small."""
    num_input_shards: int
    num_samples: int
    """In the output: all of the input's, except those that a key map leaves out."""
    num_dropped: int
    """Left out because the key map does not name them."""
    num_bytes: int
    """Of the output shards."""
    num_written: int
    """Shards that were written; the client's engine does not write those that are there already."""
    engine: str
    """The engine that did it: ``dsort`` or ``client``."""
    planned: tuple[dict[str, Any], ...]
    """Name, samples and bytes of each output, by the plan. A cluster of several targets cuts elsewhere."""
    spec: dict[str, Any] | None
    """The request to dSort; ``None`` if input or output is a directory."""
    dry_run: bool
    elapsed_s: float


def shuffle(
    shards: ShardSet,
    *,
    output_prefix: str = DEFAULT_OUTPUT_PREFIX,
    target: Store | None = None,
    seed: int = 0,
    algorithm: Algorithm | None = None,
    shard_bytes: int | None = None,
    mapped: KeyMap | Grouping | None = None,
    drop_unmapped: bool = False,
    extension: str | None = None,
    engine: Engine = "auto",
    overwrite: bool = False,
    dry_run: bool = False,
    spool_dir: Path | None = None,
    show_progress: bool = False,
) -> ShuffleReport:
    """Write the samples of ``shards``, in another order, to new shards.

    The input stays; its class table is copied beside the output. The client's engine and the embedded node give the
    same shards for the same seed. A cluster of several targets does not (seen on AIS 4.9): it permutes records in the
    order in which its targets delivered them. The client's engine leaves out files of no sample (a README).

    Args:
        shards: The input: ``.tar``, ``.tgz`` or ``.tar.gz``, all of one kind.
        output_prefix: The beginning of the output's names, within the bucket or directory. With a ``mapped`` `KeyMap`
            the map names the shards.
        target: The store of the output; ``None``: that of the input.
        seed: Of the order, and of what a `Grouping` draws; in [0, 2**63).
        algorithm: The order; ``None``: a shuffle by ``seed``.
        shard_bytes: An output shard is full when its components take this much; ``None``: the input's mean.
        mapped: Which shards each sample goes to, by its key.
        drop_unmapped: Leave out samples that a `KeyMap` does not name.
        extension: Of the output; ``None``: the input's.
        engine: ``dsort``: the cluster. ``client``: this machine. ``auto``: the cluster; but this machine, with a
            warning, if the cluster has no working dSort, or to complete the output of an earlier run of it.
        overwrite: Replace shards under the output's names.
        dry_run: Check and plan only. Indexed shards are not read for it.
        spool_dir: See `write_outputs`.
        show_progress: Draw bars.

    Raises:
        ValueError: If an argument is out of range, or the engine does not support it.
        StoreError: If an input shard is not there; other shards are under the output's names and ``overwrite`` is
            false; the engine is ``dsort`` and the cluster has none that works; or the job fails. Then what it wrote is
            deleted.
        DataError: If the input is not a readable tar, has a key twice (two samples of one key that come to stand
            together would be read as one), lacks a component to sort by, a mapped key or a sample for each split, or
            has another number of samples than its manifest says. If the output does not hold exactly the input's
            samples: the text names some that are missing, extra or changed, and the output is left for inspection.
    """
    check_prefix(output_prefix, url=(target or shards.store).url)
    return _run(
        Request(
            shards=shards,
            target=target or shards.store,
            prefix=output_prefix,
            algorithm=algorithm or Algorithm(seed=seed),
            seed=seed,
            shard_bytes=shard_bytes,
            mapped=mapped,
            drop_unmapped=drop_unmapped,
            extension=input_extension(shards.names) if extension is None else extension,
            engine=engine,
            overwrite=overwrite,
            dry_run=dry_run,
            spool_dir=spool_dir,
            show_progress=show_progress,
        )
    )


def shuffle_spec(
    spec: DsortSpec,
    *,
    endpoint: str,
    drop_unmapped: bool = False,
    engine: Engine = "auto",
    overwrite: bool = False,
    dry_run: bool = False,
    spool_dir: Path | None = None,
    show_progress: bool = False,
) -> ShuffleReport:
    """Do what a dSort spec says, with the checks and the engines of `shuffle`; see there."""
    store, target = (AisStore(endpoint, place.name, provider=place.provider) for place in (spec.source, spec.target))
    names = spec_names(spec, store)
    mapped = None
    if spec.ekm_file:
        mapped = load_key_map(
            spec.ekm_file, endpoint=endpoint, separator=spec.ekm_file_sep, extension=spec.output_extension
        )
    return _run(
        Request(
            shards=ShardSet(store=store, names=names),
            target=target if spec.target != spec.source else store,
            prefix=spec.outputs.prefix if spec.outputs is not None else shared_prefix(names),
            outputs=spec.outputs,
            algorithm=spec.algorithm,
            seed=spec.algorithm.seed,
            shard_bytes=spec.shard_bytes,
            mapped=mapped,
            drop_unmapped=drop_unmapped,
            extension=spec.output_extension,
            engine=engine,
            overwrite=overwrite,
            dry_run=dry_run or spec.dry_run,
            spool_dir=spool_dir,
            show_progress=show_progress,
            description=spec.description,
            settings=dict(spec.settings),
        )
    )


def _run(request: Request) -> ShuffleReport:
    started = time.perf_counter()
    check_request(request)
    contents = read_input(request, check_input(request.shards))
    plan = make_plan(request, contents)
    spec = None if request.is_local else spec_of(request, plan)
    engine = _choose_engine(request, plan)
    existing = find_existing(request, plan)
    names, sizes, num_written = plan.names, [output.num_bytes(contents) for output in plan.outputs], 0
    if request.dry_run:
        _warn_of(existing, request, plan)
    else:
        done, engine = _check_existing(request, plan, existing, engine=engine)
        engine = _write(request, plan, spec, existing=existing, done=done, engine=engine)
        made = _made(request, plan, engine=engine)
        names, sizes = tuple(entry.name for entry in made), [entry.size for entry in made]
        if engine == "dsort":
            _verify(request, plan, names)
        _copy_class_table(request, plan)
        num_written = len(names) - len(done)
    return ShuffleReport(
        url=request.target.locate(shared_prefix(names) if isinstance(request.mapped, KeyMap) else request.prefix),
        shards=names,
        num_input_shards=len(request.shards.names),
        num_samples=plan.num_samples,
        num_dropped=contents.num_samples - plan.num_samples,
        num_bytes=sum(sizes),
        num_written=num_written,
        engine=engine,
        planned=tuple(plan.describe()),
        spec=spec,
        dry_run=request.dry_run,
        elapsed_s=time.perf_counter() - started,
    )


def _choose_engine(request: Request, plan: ShufflePlan) -> str:
    if request.is_local or request.engine == "client":
        return "client"
    if not plan.not_by_dsort:
        return "dsort"
    if request.engine == "dsort":
        raise ValueError(f"{plan.not_by_dsort}; use --engine client")
    _log.warning("%s: shuffling from here, all bytes pass through this machine", plan.not_by_dsort)
    return "client"


def _warn_of(existing: dict[str, ObjectEntry], request: Request, plan: ShufflePlan) -> None:
    """Warn in a dry run, which does not compare shards, that the shuffle itself may be refused."""
    if (found := [name for name in existing if plan.is_output(name)]) and not request.overwrite:
        _log.warning(
            "%d shards are there already, from '%s': where they are others, the shuffle itself asks for --overwrite",
            len(found), request.target.locate(found[0]),
        )  # fmt: skip


def _check_existing(
    request: Request, plan: ShufflePlan, existing: dict[str, ObjectEntry], *, engine: str
) -> tuple[set[str], str]:
    """The outputs that are there as planned, and the engine that completes them."""
    found = [name for name in existing if plan.is_output(name)]
    done: set[str] = set()
    if found and (engine == "client" or (request.engine == "auto" and not request.overwrite)):
        done, others = find_done(
            request.target, plan.contents, plan.outputs, existing=existing, show_progress=request.show_progress
        )
        if not others and plan.names_hold(found):
            # Outputs of an earlier run; a cluster cannot write some of its outputs.
            return done, "client"
    if found and not request.overwrite:
        if isinstance(request.mapped, KeyMap):
            where, other = request.target.url, f"name others in {request.mapped.where}"
        else:
            where, other = request.target.locate(request.prefix), "choose another prefix with --output"
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
) -> str:
    """Write the missing outputs; returns the engine that wrote them."""
    source, target = request.shards.store, request.target
    left = [output for output in plan.outputs if output.name not in done]
    if not left and plan.names_hold(name for name in existing if plan.is_output(name)):
        return "client"
    if not target.exists():
        target.create()
    # Files that describe the output are deleted first: they must not stand beside other shards.
    kept = {name for output in done for name in (output, index_name(output))}
    kept |= set(plan.names) if engine == "client" else set()
    for name in existing:
        if name not in kept:
            target.delete(name)

    def clear() -> None:
        for name in list_outputs(target, plan):
            if plan.is_output(name):
                target.delete(name)

    if engine == "dsort":
        assert spec is not None
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
    write_outputs(
        source,
        plan.contents,
        left,
        target=target,
        prefix=request.prefix,
        spool_dir=request.spool_dir,
        show_progress=request.show_progress,
    )
    return "client"


def _made(request: Request, plan: ShufflePlan, *, engine: str) -> list[ObjectEntry]:
    """The output shards as the store lists them."""
    entries = list_outputs(request.target, plan)
    if engine == "dsort":
        return [entries[name] for name in sorted(entries) if plan.is_output(name)]
    if gone := [name for name in plan.names if name not in entries]:
        raise StoreError(
            f"'{request.target.locate(gone[0])}' was written, and is gone; does another process write there, or "
            "delete? Run it again"
        )
    return [entries[name] for name in plan.names]


def _verify(request: Request, plan: ShufflePlan, names: Sequence[str]) -> None:
    store = request.target
    if not names:
        raise DataError(
            f"dSort at '{store.url}' reported success and wrote no shard; {len(request.shards.names)} went in"
        )
    came_out = read_contents(store, names, what="verify", show_progress=request.show_progress)
    check_same(store, plan.contents, came_out, kept=plan.kept)


def _copy_class_table(request: Request, plan: ShufflePlan) -> None:
    stem = common_prefix([shard.removesuffix(extension_of(shard)) for shard in request.shards.names])
    data = request.shards.store.find(classes_name(stem.rstrip("0123456789")))
    if data is None:
        return
    for name in map(classes_name, plan.prefixes):
        if request.target.find(name) != data:
            request.target.write(name, data)
