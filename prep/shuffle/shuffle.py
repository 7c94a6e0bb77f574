"""Shards to shards in another order: by dSort in the AIStore cluster or from here, checked before and after.

dSort is trusted with nothing: a job whose input is not there "succeeds", and one that loses a sample would not say so.
So the input is read first, the output planned from it, and what is there afterwards read and compared. The plan serves
both engines: the cluster gets the request that leads to it, this machine follows it itself (`prep.shuffle.client`).
"""

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dali_pipes.errors import DataError, StoreError, shown
from dali_pipes.formats.names import classes_name, columns_name, index_name, manifest_name
from dali_pipes.store.ais import AisStore
from dali_pipes.store.base import ObjectEntry, Store
from dali_pipes.store.shard_names import Template, extension_of
from dali_pipes.store.urls import ShardSet, shared_prefix
from prep.shuffle.client import describe, find_done, write_outputs
from prep.shuffle.contents import check_same, read_contents
from prep.shuffle.dsort_job import NoDsortError, run_job
from prep.shuffle.dsort_spec import DsortSpec
from prep.shuffle.input import epoch_prefix, epoch_seed, load_key_map
from prep.shuffle.key_map import Grouping, KeyMap
from prep.shuffle.order import Algorithm
from prep.shuffle.plan import (
    Engine,
    Plan,
    Request,
    check_input,
    check_prefix,
    check_request,
    common_prefix,
    input_extension,
    make_plan,
    read_input,
    spec_of,
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

# Shards that an error names.
_NUM_MISSING = 3


@dataclass(frozen=True, kw_only=True)
class ShuffleReport:
    """What a shuffle did, or with ``dry_run`` would do."""

    url: str
    """``ais://pets/shuffled-``: what the output's names start with."""
    shards: tuple[str, ...]
    """The output shards, in order; a set's last one is as small as it comes out."""
    num_input_shards: int
    num_samples: int
    """In the output: all of the input's but those that a key map leaves out."""
    num_dropped: int
    """Left out because the key map has nothing for them."""
    num_bytes: int
    """Of the output shards."""
    num_written: int
    """Shards; the client's engine leaves those that are there already as they are."""
    engine: str
    """``dsort`` or ``client``: who did it."""
    planned: tuple[dict[str, Any], ...]
    """Name, samples and bytes of each output, by the plan. A cluster of several targets cuts elsewhere."""
    spec: dict[str, Any] | None
    """The request to dSort; ``None`` where there is none, for a directory."""
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

    The input is kept; its class table is copied beside the output. The client's engine and the embedded node give the
    same shards for the same seed. A cluster of several targets does not (seen on AIS 4.9): it permutes records in the
    order in which its targets happened to deliver them. Files that belong to no sample (a README) are not carried over
    by the client's engine.

    Args:
        shards: The input: ``.tar``, ``.tgz`` or ``.tar.gz``, all of one kind.
        output_prefix: What the names of the output start with, within the bucket or directory. With a ``mapped``
            `KeyMap` the map names the shards.
        target: Where to; ``None``: where the input is.
        seed: Of the order, and of what a `Grouping` draws. Not negative, below 2**63.
        algorithm: The order; ``None``: a shuffle by ``seed``.
        shard_bytes: An output shard is full when its components take this much; ``None``: the input's mean.
        mapped: Which shards each sample goes to, by its key.
        drop_unmapped: Leave out samples that a `KeyMap` has nothing for.
        extension: Of the output; ``None``: the input's.
        engine: ``dsort``: the cluster. ``client``: this machine. ``auto``: the cluster, and this machine where that
            has no dSort that works, with a warning, or where output of an earlier run of it is to be completed.
        overwrite: Replace what is under the output's names.
        dry_run: Check and plan, write nothing. Shards that are indexed are not read for it.
        spool_dir: See `write_outputs`.
        show_progress: Draw bars.

    Raises:
        ValueError: If an argument is out of range, or the engine cannot do what is asked.
        StoreError: If an input shard is not there, other shards are under the output's names and ``overwrite`` is
            false, the engine is ``dsort`` and the cluster has none that works, or the job fails; what it wrote by
            then is deleted.
        DataError: If the input is no readable tar, has a key twice (two samples of one key that come to stand together
            would be read as one), lacks a component to sort by, a key that is not mapped, or a sample for each split;
            if its manifest counts other samples. If the output does not hold exactly the input's samples: the text
            names some that are missing, extra or changed; the output is then left as it is, to be looked into.
    """
    check_prefix(output_prefix, url=(target or shards.store).url)
    return _run(
        Request(
            shards=shards,
            target=target or shards.store,
            prefix=output_prefix,
            outputs=None,
            algorithm=algorithm or Algorithm(seed=seed),
            shard_bytes=shard_bytes,
            mapped=mapped,
            drop_unmapped=drop_unmapped,
            extension=input_extension(shards.names) if extension is None else extension,
            engine=engine,
            overwrite=overwrite,
            dry_run=dry_run,
            spool_dir=spool_dir,
            show_progress=show_progress,
        ),
        seed=seed,
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
    """Do what a dSort spec says, with the checks of `shuffle` and by the engine that is asked for; see there."""
    store, target = (AisStore(endpoint, place.name, provider=place.provider) for place in (spec.source, spec.target))
    names = _spec_names(spec, store)
    prefix = spec.outputs.prefix if spec.outputs is not None else shared_prefix(names)
    mapped = None
    if spec.ekm_file:
        mapped = load_key_map(
            spec.ekm_file, endpoint=endpoint, separator=spec.ekm_file_sep, extension=spec.output_extension
        )
    return _run(
        Request(
            shards=ShardSet(store=store, names=names),
            target=target if spec.target != spec.source else store,
            prefix=prefix,
            outputs=spec.outputs,
            algorithm=spec.algorithm,
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
        ),
        seed=spec.algorithm.seed,
    )


def _run(request: Request, *, seed: int) -> ShuffleReport:
    started = time.perf_counter()
    check_request(request)
    listed = check_input(request.shards)
    contents = read_input(request, listed)
    plan = make_plan(request, contents, seed=seed)
    spec = None if request.is_local else spec_of(request, plan)
    engine = _choose_engine(request, plan)
    existing = _existing(request, plan)
    done: set[str] = set()
    if existing and request.dry_run:
        _warn_of(existing, request, plan)
    elif existing:
        done, engine = _check_existing(request, plan, existing, engine=engine)
    if not request.dry_run:
        engine = _write(request, plan, spec, existing=existing, done=done, engine=engine)
    made = [] if request.dry_run else _made(request, plan, engine=engine)
    names = plan.names if request.dry_run else tuple(entry.name for entry in made)
    if engine == "dsort" and not request.dry_run:
        _verify(request, plan, names)
    if not request.dry_run:
        _copy_class_table(request, plan)
    num_kept = contents.num_samples if plan.kept is None else int(plan.kept.sum())
    return ShuffleReport(
        url=request.target.locate(shared_prefix(names) if isinstance(request.mapped, KeyMap) else request.prefix),
        shards=names,
        num_input_shards=len(request.shards.names),
        num_samples=num_kept,
        num_dropped=contents.num_samples - num_kept,
        num_bytes=sum(output.num_bytes(contents) for output in plan.outputs)
        if request.dry_run
        else sum(entry.size for entry in made),
        num_written=0 if request.dry_run else len(names) - len(done),
        engine=engine,
        planned=tuple(describe(plan.outputs, contents)),
        spec=spec,
        dry_run=request.dry_run,
        elapsed_s=time.perf_counter() - started,
    )


def _spec_names(spec: DsortSpec, store: AisStore) -> tuple[str, ...]:
    if not isinstance(spec.inputs, Template):
        return spec.inputs
    if len(spec.inputs):
        return _template_names(spec.inputs, spec.input_extension, store)
    # A cluster takes a prefix and reads nothing; what is meant is clear.
    names = tuple(e.name for e in store.list(spec.inputs.prefix) if e.name.endswith(spec.input_extension))
    if not names:
        raise StoreError(f"'{store.locate(spec.inputs.prefix)}' matches no {spec.input_extension}")
    return names


def _template_names(template: Template, extension: str, store: AisStore) -> tuple[str, ...]:
    """The names of a template, up to the first three that are not there: it may stand for more than memory holds."""
    listed = {entry.name for entry in store.list(template.prefix)}
    names: list[str] = []
    missing: list[str] = []
    for stem in template.names():
        names.append(f"{stem}{extension}")
        if names[-1] not in listed:
            missing.append(store.locate(names[-1]))
        if len(missing) == _NUM_MISSING:
            break
    if missing:
        raise StoreError(f"no shard {shown(missing)}; {len(template)} were named")
    return tuple(names)


def _choose_engine(request: Request, plan: Plan) -> str:
    if request.is_local or request.engine == "client":
        return "client"
    if not plan.not_by_dsort:
        return "dsort"
    if request.engine == "dsort":
        raise ValueError(f"{plan.not_by_dsort}; use --engine client")
    _log.warning("%s: shuffling from here, all bytes pass through this machine", plan.not_by_dsort)
    return "client"


def _existing(request: Request, plan: Plan) -> dict[str, ObjectEntry]:
    """Shards under the output's names, and what describes such."""
    target = request.target
    if isinstance(target, AisStore) and target is not request.shards.store and not target.exists():
        return {}
    entries = _listed(target, plan)
    found = [name for name in entries if plan.is_output(name)]
    same_place = target.url == request.shards.store.url
    clashing = set(request.shards.names).intersection([*found, *plan.names]) if same_place else set()
    if clashing:
        if isinstance(request.mapped, KeyMap):
            raise ValueError(f"{request.mapped.where}: names a shard of the input itself, '{min(clashing)}'")
        raise ValueError(f"output prefix '{request.prefix}' names the input itself; choose another with --output")
    described = {name(prefix) for prefix in plan.prefixes for name in (manifest_name, columns_name, classes_name)}
    described |= set(map(index_name, {*found, *plan.names}))
    return {name: entries[name] for name in [*(name for name in entries if name in described), *found]}


def _listed(target: Store, plan: Plan) -> dict[str, ObjectEntry]:
    """What the store has under the output's names, and beside them."""
    by_folder: dict[str, list[str]] = {}
    for prefix in plan.prefixes:
        by_folder.setdefault(prefix.rpartition("/")[0], []).append(prefix)
    entries: dict[str, ObjectEntry] = {}
    for prefixes in by_folder.values():
        common = common_prefix(prefixes)
        # One listing for a thousand classes; not one of a whole bucket for cats- and dogs-.
        for prefix in [common] if common.rpartition("/")[2] else prefixes:
            entries |= {entry.name: entry for entry in target.list(prefix)}
    return entries


def _check_existing(
    request: Request, plan: Plan, existing: dict[str, ObjectEntry], *, engine: str
) -> tuple[set[str], str]:
    """The outputs that are there as planned, and the engine that completes them."""
    found = [name for name in existing if plan.is_output(name)]
    done: set[str] = set()
    can_resume = found and (engine == "client" or (request.engine == "auto" and not request.overwrite))
    if can_resume:
        done, others = find_done(
            request.target, plan.contents, plan.outputs, existing=existing, show_progress=request.show_progress
        )
        others += sorted(set(found).difference(plan.names))
        if not others:
            # Those of an earlier run; a cluster cannot write some of its outputs.
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


def _warn_of(existing: dict[str, ObjectEntry], request: Request, plan: Plan) -> None:
    """Say before a dry run ends what the shuffle itself may be refused for; it compares, which takes reading them."""
    if (found := [name for name in existing if plan.is_output(name)]) and not request.overwrite:
        _log.warning(
            "%d shards are there already, from '%s': where they are others, the shuffle itself asks for --overwrite",
            len(found), request.target.locate(found[0]),
        )  # fmt: skip


# Writing


def _write(
    request: Request,
    plan: Plan,
    spec: dict[str, Any] | None,
    *,
    existing: dict[str, ObjectEntry],
    done: set[str],
    engine: str,
) -> str:
    """Write what is missing; the engine that did."""
    target = request.target
    left = [output for output in plan.outputs if output.name not in done]
    if not left and not any(plan.is_output(name) for name in set(existing).difference(plan.names)):
        return "client"
    if isinstance(target, AisStore) and not target.exists():
        target.create()
    # What describes the output goes first: it must not stand beside other shards than it was made of.
    kept = {name for output in done for name in (output, index_name(output))}
    kept |= set(plan.names) if engine == "client" else set()
    for name in existing:
        if name not in kept:
            target.delete(name)
    if engine == "dsort":
        source = request.shards.store
        assert isinstance(source, AisStore)
        assert spec is not None
        try:
            run_job(
                source,
                spec,
                key_map=plan.key_map,
                key_map_name=f"{request.prefix}key-map-{uuid.uuid4().hex[:12]}.json",
                clear=_clearing(request, plan),
                num_input_shards=len(request.shards.names),
                show_progress=request.show_progress,
            )
            return "dsort"
        except NoDsortError as exc:
            if request.engine == "dsort":
                raise
            _log.warning("%s. Shuffling from here now: all bytes pass through this machine", str(exc).partition(";")[0])
    write_outputs(
        request.shards.store,
        plan.contents,
        left,
        target=target,
        prefix=request.prefix,
        spool_dir=request.spool_dir,
        show_progress=request.show_progress,
    )
    return "client"


def _clearing(request: Request, plan: Plan) -> Callable[[], None]:
    def clear() -> None:
        for name in _listed(request.target, plan):
            if plan.is_output(name):
                request.target.delete(name)

    return clear


def _made(request: Request, plan: Plan, *, engine: str) -> list[ObjectEntry]:
    entries = _listed(request.target, plan)
    if engine == "client":
        if gone := [name for name in plan.names if name not in entries]:
            raise StoreError(
                f"'{request.target.locate(gone[0])}' was written, and is gone; does another process write there, or "
                "delete? Run it again"
            )
        return [entries[name] for name in plan.names]
    return [entries[name] for name in sorted(entries) if plan.is_output(name)]


def _verify(request: Request, plan: Plan, names: Sequence[str]) -> None:
    store = request.target
    if not names:
        raise DataError(
            f"dSort at '{store.url}' reported success and wrote no shard; {len(request.shards.names)} went in"
        )
    came_out = read_contents(store, names, what="verify", show_progress=request.show_progress)
    check_same(store, plan.contents, came_out, kept=plan.kept)


def _copy_class_table(request: Request, plan: Plan) -> None:
    source = request.shards.store
    stem = common_prefix([shard.removesuffix(extension_of(shard)) for shard in request.shards.names])
    name = classes_name(stem.rstrip("0123456789"))
    if source.size(name) is None:
        return
    data = source.read(name)
    for prefix in plan.prefixes:
        copy = classes_name(prefix)
        if request.target.size(copy) is None or request.target.read(copy) != data:
            request.target.write(copy, data)
