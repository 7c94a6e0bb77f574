"""A request for shards in another order to what is to come out: every output shard, and the samples in it, in order.

Everything that can be refused is refused here, before anything is written.
"""

import itertools
import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from dali_pipes.data_set.indexing import find_manifest, parse_label
from dali_pipes.errors import DataError, StoreError, shown
from dali_pipes.formats.names import LABEL_COMPONENT, manifest_name
from dali_pipes.store.ais import AisStore
from dali_pipes.store.base import PROVIDERS, ObjectEntry, Store
from dali_pipes.store.shard_names import EXTENSIONS, Template, extension_of, template_of
from dali_pipes.store.urls import ShardSet, check_object_name
from prep.shuffle.client import Output
from prep.shuffle.contents import BLOCK, Contents, check_unique, indexed_contents, read_contents
from prep.shuffle.dsort_spec import DsortSpec, Place
from prep.shuffle.key_map import Grouping, KeyMap, group_by, regexes_of
from prep.shuffle.order import Algorithm, arrange, cut, cut_mapped, key_of, parse_content

__all__ = [
    "Engine",
    "Plan",
    "Request",
    "check_input",
    "check_prefix",
    "check_request",
    "common_prefix",
    "input_extension",
    "make_plan",
    "read_input",
    "spec_of",
]

_log = logging.getLogger(__name__)

Engine = Literal["auto", "dsort", "client"]

# Digits in the names of output shards, as in those that `pack` writes.
OUTPUT_DIGITS = 6
# Output names beyond those that sizes ask for: an unused name costs nothing, one too few fails the job.
SPARE_NAMES = 16

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for; see `prep.shuffle.shuffle.shuffle` for what each is."""

    shards: ShardSet
    target: Store
    prefix: str
    outputs: Template | None
    """``None``: as many names under the prefix as are needed, or those of a key map."""
    algorithm: Algorithm
    shard_bytes: int | None
    mapped: KeyMap | Grouping | None
    drop_unmapped: bool
    extension: str
    engine: str
    overwrite: bool
    dry_run: bool
    spool_dir: Path | None
    show_progress: bool
    description: str = "dali-pipes prep shuffle"
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def is_local(self) -> bool:
        """Whether no cluster can do it: a side is a directory."""
        return not isinstance(self.shards.store, AisStore) or not isinstance(self.target, AisStore)


class Plan:
    """What is to come out."""

    def __init__(
        self, contents: Contents, outputs: list[Output], templates: Sequence[Template], shard_bytes: int
    ) -> None:
        self.contents, self.outputs, self.templates, self.shard_bytes = contents, outputs, templates, shard_bytes
        self.kept: Bools | None = None
        """Which samples come out; ``None``: all."""
        self.not_by_dsort = ""
        """Why no cluster can do it; empty where it can."""
        self.key_map: bytes | None = None
        """For a cluster."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the output shards."""
        return tuple(output.name for output in self.outputs)

    @cached_property
    def prefixes(self) -> list[str]:
        """What the names of each set of output shards start with."""
        return sorted({template.prefix for template in self.templates})

    def is_output(self, name: str) -> bool:
        """Whether a shard of this name is one of a set that is to come out, or would be read as one.

        Whatever it ends in: a set of two kinds could be neither indexed nor shuffled again.
        """
        extension = extension_of(name)
        stem = name.removesuffix(extension)
        if not extension:
            return False
        # There may be a template for each class, or each shard: not all of them are asked.
        first = len(stem.rstrip("0123456789"))
        if any(stem[:stop] in self._counted for stop in range(first, len(stem))):
            return True
        return any(template.holds(stem) for template in self._others)

    @cached_property
    def _counted(self) -> frozenset[str]:
        return frozenset(self.prefixes)

    @cached_property
    def _others(self) -> list[Template]:
        """Those whose names are more than a prefix and a number."""
        return [template for template in self.templates if len(template.ranges) != 1 or template.parts[1]]


def check_request(request: Request) -> None:
    """Raises `ValueError` for what no engine, or not the one that is asked for, can do."""
    if request.engine not in get_args(Engine):
        raise ValueError(f"engine must be one of {', '.join(get_args(Engine))}, got '{request.engine}'")
    if request.extension not in EXTENSIONS:
        raise ValueError(f"extension must be one of {', '.join(EXTENSIONS)}, got '{request.extension}'")
    if request.shard_bytes is not None and request.shard_bytes < 1:
        raise ValueError(f"shard_bytes must be positive, got {request.shard_bytes}")
    if request.drop_unmapped and not isinstance(request.mapped, KeyMap):
        raise ValueError("drop_unmapped leaves out what a key map has nothing for; no key map is given")
    input_extension(request.shards.names)
    if request.engine == "dsort" and request.is_local:
        raise ValueError(
            f"'{request.shards.store.url}' is a directory; engine 'dsort' needs a bucket, because dSort runs in the "
            "AIStore cluster: use --engine client, or pack the shards into ais://BUCKET"
        )
    templates = [request.outputs] if request.outputs is not None else []
    templates += request.mapped.outputs if isinstance(request.mapped, KeyMap) else ()
    for template in templates:
        for end in template.ends():
            check_object_name(end, url=request.target.locate(end))


def check_prefix(prefix: str, *, url: str) -> None:
    """Raises `ValueError` for what output names cannot start with."""
    if not prefix or re.search(r"[{}\s]", prefix):
        raise ValueError(f"a prefix must hold neither braces nor white space for dSort, got '{prefix}'")
    if prefix.endswith("/") or prefix[-1].isdigit():
        raise ValueError(f"a prefix must end in a name's start that is no digit, such as 'shuffled-', got '{prefix}'")
    check_object_name(prefix, url=f"{url}/{prefix}")


def input_extension(names: Sequence[str]) -> str:
    """What all shards end in; raises `ValueError` where they differ, or end in none that is known."""
    found = sorted({extension_of(name) for name in names})
    if len(found) != 1 or not found[0]:
        odd = next((name for name in names if not extension_of(name)), names[0])
        raise ValueError(
            f"shards must all end in one of {', '.join(EXTENSIONS)}, got '{odd}'"
            if "" in found
            else f"shards must all end alike, got {' and '.join(found)}"
        )
    return found[0]


def check_input(shards: ShardSet) -> dict[str, ObjectEntry]:
    """What the store has of the shards; raises `StoreError` where one is not there."""
    listed = {entry.name: entry for entry in shards.store.list(common_prefix(shards.names))}
    for name in shards.names:
        # Local shards may lie in several folders, which one listing does not cover.
        if name not in listed and (size := shards.store.size(name)) is not None:
            listed[name] = ObjectEntry(name=name, size=size, checksum=None)
    missing = [name for name in shards.names if name not in listed]
    if missing:
        located = [shards.store.locate(name) for name in missing]
        raise StoreError(f"no shard {shown(located)}; {len(shards.names)} were named")
    return listed


def common_prefix(names: Sequence[str]) -> str:
    """What all names start with, digits and all."""
    return os.path.commonprefix(names)  # noqa: RUF071 (by character is what is meant)


def read_input(request: Request, listed: dict[str, ObjectEntry]) -> Contents:
    """What the input holds; raises `DataError`: see `shuffle`."""
    shards = request.shards
    by_class = isinstance(request.mapped, Grouping) and request.mapped.by in ("class", "balanced")
    components = {request.algorithm.component.lower()} if request.algorithm.component else set()
    components |= {LABEL_COMPONENT} if by_class else set()
    manifest = find_manifest(shards) if all(name.endswith(".tar") for name in shards.names) else None
    samples = {} if manifest is None else dict(zip(manifest.names, manifest.samples.tolist(), strict=True))
    if request.dry_run and manifest is not None:
        sizes = dict(zip(manifest.names, manifest.shard_bytes.tolist(), strict=True))
        if all(sizes.get(name) == listed[name].size for name in shards.names):
            found = indexed_contents(shards.store, shards.names, components=sorted(components))
            if found is not None:
                return found
    contents = read_contents(
        shards.store,
        shards.names,
        components=sorted(components),
        what="read",
        show_progress=request.show_progress,
    )
    for name, count in zip(shards.names, np.diff(contents.starts).tolist(), strict=True):
        if samples.get(name, count) != count:
            raise DataError(
                f"manifest '{shards.store.locate(manifest_name(shards.prefix))}' counts {samples[name]} samples in "
                f"'{name}', the shard holds {count}; index the shards again: dali-pipes prep index {shards.url}"
            )
    if not contents.num_samples:
        raise DataError(f"'{shards.url}': the {len(shards.names)} shards hold no sample")
    check_unique(shards.store, contents)
    return contents


def make_plan(request: Request, contents: Contents, *, seed: int) -> Plan:
    """The output; ``seed`` is what a `Grouping` draws from. Raises `DataError`, or `ValueError` if names run out."""
    names = [contents.name(position) for position in range(contents.num_samples)]
    total = int(contents.num_bytes.sum())
    num_shards = len(request.shards.names)
    if request.outputs is not None:
        num_shards = len(request.outputs)
    shard_bytes = request.shard_bytes if request.shard_bytes is not None else max(1, -(-total // num_shards))
    values = contents.values[request.algorithm.component.lower()] if request.algorithm.kind == "content" else ()
    sort_by = None
    if request.algorithm.kind == "content":
        sort_by = [
            parse_content(value, algorithm=request.algorithm, where=contents.where(position))
            for position, value in enumerate(values)
        ]
    order = np.array(arrange(names, algorithm=request.algorithm, contents=sort_by), np.int64)
    if request.mapped is not None:
        plan = _plan_mapped(request, contents, names, order, shard_bytes=shard_bytes, seed=seed)
    else:
        plan = _plan_cut(request, contents, order, shard_bytes=shard_bytes)
    if request.algorithm.key_type != "string":
        spaced = next((at for at, value in enumerate(values) if value and value != value.strip()), None)
        if spaced is not None:
            plan.not_by_dsort = (
                f"dSort reads no number with white space around it, as {contents.where(spaced)} has it in "
                f"'{request.algorithm.component}'"
            )
    return plan


def _plan_cut(request: Request, contents: Contents, order: npt.NDArray[np.int64], *, shard_bytes: int) -> Plan:
    total = int(contents.num_bytes.sum())
    counts = cut(contents.num_bytes[order].tolist(), target=shard_bytes)
    template = request.outputs or _output_template(request.prefix, num_bytes=total, shard_bytes=shard_bytes)
    if len(counts) > len(template):
        raise ValueError(
            f"'{template}' names {len(template)} output shards, {len(counts)} of {shard_bytes} bytes are needed; "
            "name more, or take larger shards"
        )
    stops = np.cumsum(counts)
    runs = [order[stop - count : stop] for stop, count in zip(stops.tolist(), counts, strict=True)]
    outputs = [Output(f"{n}{request.extension}", run) for n, run in zip(template.names(), runs, strict=False)]
    return Plan(contents, outputs, [template], shard_bytes)


def _plan_mapped(
    request: Request,
    contents: Contents,
    names: Sequence[str],
    order: npt.NDArray[np.int64],
    *,
    shard_bytes: int,
    seed: int,
) -> Plan:
    mapped = request.mapped
    assert mapped is not None
    total = int(contents.num_bytes.sum())
    if isinstance(mapped, Grouping):
        labels = None
        if mapped.by in ("class", "balanced"):
            labels = [_label(contents, position) for position in range(contents.num_samples)]
        num_shards = max(1, -(-total // shard_bytes))
        by = mapped.by
        mapped = group_by(
            names,
            grouping=mapped,
            prefix=request.prefix,
            labels=labels,
            num_shards=num_shards,
            seed=seed,
            digits=OUTPUT_DIGITS,
        )
        if by == "balanced":
            # Each shard is a group of its own, and must not be cut.
            shard_bytes = total + BLOCK * int(contents.num_members.sum())
    groups = np.array(mapped.assign(names), np.int64)
    kept = groups >= 0
    if not kept.all() and not request.drop_unmapped:
        odd = [key_of(names[position]) for position in np.flatnonzero(~kept)[:4].tolist()]
        raise DataError(
            f"{mapped.where}: has nothing for {int((~kept).sum())} of {len(names)} keys: {shown(odd)}; an entry is a "
            "whole key, or a regular expression such as '^cats/'. Leave such samples out with --drop-unmapped"
        )
    if not kept.any():
        raise DataError(f"{mapped.where}: has nothing for any of the {len(names)} keys")
    if isinstance(request.mapped, KeyMap) and (unused := mapped.unused(names)):
        # One that was misspelt looks like this; so does a map of more than these shards.
        _log.warning(
            "%s: no sample for %d of its %d keys: %s", mapped.where, len(unused), len(mapped.keys), shown(unused)
        )
    try:
        found = cut_mapped(
            groups[order].tolist(),
            (contents.num_bytes + BLOCK * contents.num_members)[order].tolist(),
            limits=[len(template) for template in mapped.outputs],
            labels=[str(template) for template in mapped.outputs],
            target=shard_bytes,
        )
    except DataError as exc:
        raise DataError(f"{mapped.where}: {exc}; name more there, or take larger shards: --shard-bytes") from exc
    supplies = [template.names() for template in mapped.outputs]
    outputs = [Output(f"{next(supplies[group])}{request.extension}", order[positions]) for group, positions in found]
    outputs.sort(key=lambda output: output.name)
    if twice := [a.name for a, b in itertools.pairwise(outputs) if a.name == b.name]:
        raise DataError(f"{mapped.where}: two templates name shard '{twice[0]}'")
    used = sorted({group for group, _ in found})
    plan = Plan(contents, outputs, [mapped.outputs[group] for group in used], shard_bytes)
    if not kept.all():
        plan.kept = kept
        # One that is told to ignore a missing key ends its process.
        plan.not_by_dsort = "dSort cannot leave samples out"
    if not request.is_local:
        keys_of = {group: [key_of(names[at]) for at in np.flatnonzero(groups == group).tolist()] for group in used}
        # A cluster takes a template's names as they are, extension and all.
        entries = {f"{mapped.outputs[group]}{request.extension}": regexes_of(keys) for group, keys in keys_of.items()}
        plan.key_map = json.dumps(entries).encode()
    return plan


def _label(contents: Contents, position: int) -> int:
    value = contents.values[LABEL_COMPONENT][position]
    if value is None:
        raise DataError(f"{contents.where(position)}: no component '{LABEL_COMPONENT}' to group by")
    shard = int(np.searchsorted(contents.starts, position, side="right")) - 1
    return parse_label(value, shard=contents.shards[shard], key=key_of(contents.name(position)))


def _output_template(prefix: str, *, num_bytes: int, shard_bytes: int) -> Template:
    # Every shard but the last is filled to shard_bytes at least.
    count = -(-num_bytes // shard_bytes) + SPARE_NAMES
    if count > 10**OUTPUT_DIGITS:
        raise ValueError(f"{count} output shards, names count to {10**OUTPUT_DIGITS}; use a larger --shard-bytes")
    return Template([prefix, ""], [range(count)], [OUTPUT_DIGITS])


def spec_of(request: Request, plan: Plan) -> dict[str, Any]:
    """The request to dSort."""
    source, target = request.shards.store, request.target
    assert isinstance(source, AisStore)
    assert isinstance(target, AisStore)
    extension = input_extension(request.shards.names)
    template = template_of([name.removesuffix(extension) for name in request.shards.names])
    return DsortSpec(
        source=Place(source.bucket, PROVIDERS[source.scheme]),
        target=Place(target.bucket, PROVIDERS[target.scheme]),
        inputs=template if template is not None else request.shards.names,
        input_extension=extension,
        outputs=plan.templates[0] if request.mapped is None else None,
        output_extension=request.extension,
        shard_bytes=plan.shard_bytes,
        algorithm=request.algorithm,
        description=request.description,
        settings=request.settings,
    ).json()
