"""Plan the output shards of a shuffle: their names, and their samples in order. Find existing shards of these names.

All errors of a plan are raised here, before anything is written.
"""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dali_pipes.arrays import Bools, Int64s
from dali_pipes.data_set.indexing import parse_label
from dali_pipes.errors import DataError, shown
from dali_pipes.formats.names import (
    LABEL_COMPONENT,
    classes_name,
    columns_name,
    described,
    index_name,
    manifest_name,
    recoded_name,
    record_names,
    version_start,
)
from dali_pipes.formats.tar_reader import BLOCK
from dali_pipes.store.shard_names import ObjectEntry, Template, extension_of
from prep.shuffle.contents import Contents
from prep.shuffle.key_map import OUTPUT_DIGITS, Grouping, KeyMap, group_by, regexes_of
from prep.shuffle.order import arrange, cut, key_of, parse_content
from prep.shuffle.request import Request, common_prefix

_log = logging.getLogger(__name__)

# Output names beyond the computed number: an unused name costs nothing, but one name too few fails the job.
_SPARE_NAMES = 16

# The files that describe a set of shards.
_DESCRIBING = (manifest_name, columns_name, classes_name, recoded_name)


class PlannedShard(NamedTuple):
    """An output shard: its name, and the positions of its samples in the contents of the input."""

    name: str
    positions: Int64s

    def num_bytes(self, contents: Contents) -> int:
        """Bytes of the tar: the samples, and the two empty blocks at the end."""
        return int(contents.samples["tar_bytes"][self.positions].sum()) + 2 * BLOCK


@dataclass
class ShufflePlan:
    """The output shards of a shuffle."""

    request: Request
    contents: Contents
    """The contents of the input."""
    outputs: list[PlannedShard]
    templates: Sequence[Template]
    """The names of each set of output shards."""
    shard_bytes: int
    kept: Bools | None = None
    """bool [sample], which samples of the input come out; ``None``: all."""
    not_by_dsort: str = ""
    """Why no cluster can do it; empty if a cluster can."""
    key_map: dict[str, list[str]] | None = None
    """The external key map for a cluster."""

    @property
    def own_outputs(self) -> Sequence[PlannedShard]:
        """The outputs of this process's part."""
        return self.request.part.of(self.outputs)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(output.name for output in self.outputs)

    @cached_property
    def prefixes(self) -> frozenset[str]:
        """The prefix of each set of output shards."""
        return frozenset(template.prefix for template in self.templates)

    @property
    def num_samples(self) -> int:
        """The number of samples that come out."""
        return self.contents.num_samples if self.kept is None else int(self.kept.sum())

    def is_output(self, name: str) -> bool:
        """Whether a shard of this name belongs to an output set, or would be read as part of one.

        The extension does not matter: a set with two extensions could be neither indexed nor shuffled again.
        """
        extension = extension_of(name)
        stem = name.removesuffix(extension)
        first = len(stem.rstrip("0123456789"))
        return bool(extension) and (
            any(stem[:stop] in self.prefixes for stop in range(first, len(stem)))
            or any(template.holds(stem) for template in self.templates)
        )


def make_plan(request: Request, contents: Contents) -> ShufflePlan:
    """Plan the output; for the errors see `prep.shuffle.shuffle.shuffle`."""
    algorithm = request.algorithm
    names = [contents.name(position) for position in range(contents.num_samples)]
    values = contents.values[algorithm.component.lower()] if algorithm.kind == "content" else ()
    keys = [
        parse_content(value, algorithm=algorithm, where=contents.where(position))
        for position, value in enumerate(values)
    ]
    order = np.array(arrange(names, algorithm=algorithm, contents=keys), np.int64)
    shard_bytes = request.shard_bytes
    if shard_bytes is None:
        num_shards = len(request.shards.names) if request.outputs is None else len(request.outputs)
        shard_bytes = max(1, -(-int(contents.samples["num_bytes"].sum()) // num_shards))
    if request.mapped is None:
        plan = _plan_cut(request, contents, order, shard_bytes)
    else:
        plan = _plan_mapped(request, contents, names, order, shard_bytes)
    if algorithm.kind == "none":
        # Seen on AIS 4.9: it writes samples in the order in which its threads read them, on a single target, too.
        plan.not_by_dsort = "dSort does not keep the order of samples"
    if algorithm.key_type != "string":
        spaced = next((at for at, value in enumerate(values) if value and value != value.strip()), None)
        if spaced is not None:
            plan.not_by_dsort = (
                f"dSort cannot read a number with white space around it, such as '{algorithm.component}' of "
                f"{contents.where(spaced)}"
            )
    return plan


def _plan_cut(request: Request, contents: Contents, order: Int64s, shard_bytes: int) -> ShufflePlan:
    sizes = contents.samples["num_bytes"]
    counts = cut(sizes[order].tolist(), target=shard_bytes)
    template = request.outputs
    if template is None:
        # Every shard but the last is filled to shard_bytes at least.
        num_names = -(-int(sizes.sum()) // shard_bytes) + _SPARE_NAMES
        if num_names > 10**OUTPUT_DIGITS:
            raise ValueError(
                f"{num_names} output shards, at most {10**OUTPUT_DIGITS} can be named; use a larger --shard-bytes"
            )
        template = Template([request.prefix, ""], [range(num_names)], [OUTPUT_DIGITS])
    if len(counts) > len(template):
        raise ValueError(
            f"'{template}' names {len(template)} output shards, {len(counts)} of {shard_bytes} bytes are needed; "
            "name more, or take larger shards"
        )
    runs = np.split(order, np.cumsum(counts)[:-1]) if counts else []
    outputs = [PlannedShard(f"{n}{request.extension}", run) for n, run in zip(template.names(), runs, strict=False)]
    return ShufflePlan(request, contents, outputs, [template], shard_bytes)


def _plan_mapped(
    request: Request, contents: Contents, names: Sequence[str], order: Int64s, shard_bytes: int
) -> ShufflePlan:
    sizes = contents.samples["num_bytes"] + BLOCK * contents.samples["num_members"]
    mapped = request.mapped
    if isinstance(mapped, Grouping):
        by = mapped.by
        mapped = group_by(
            names,
            grouping=mapped,
            prefix=request.prefix,
            labels=[_label(contents, position) for position in range(len(names))] if request.needs_labels else (),
            num_shards=max(1, -(-int(contents.samples["num_bytes"].sum()) // shard_bytes)),
            seed=request.algorithm.seed,
        )
        if by == "balanced":
            # Each shard is a group of its own, and must not be cut.
            shard_bytes = int(sizes.sum())
    assert mapped is not None
    groups = np.array(mapped.assign(names), np.int64)
    kept = groups >= 0
    _check_mapped(request, mapped, names, kept)
    found = mapped.cut(groups[order].tolist(), sizes[order].tolist(), target=shard_bytes)
    outputs = [PlannedShard(f"{stem}{request.extension}", order[positions]) for _, stem, positions in found]
    outputs.sort(key=lambda output: output.name)
    if twice := [a.name for a, b in itertools.pairwise(outputs) if a.name == b.name]:
        raise DataError(f"{mapped.where}: two templates name shard '{twice[0]}'")
    used = sorted({group for group, _, _ in found})
    plan = ShufflePlan(request, contents, outputs, [mapped.outputs[group] for group in used], shard_bytes)
    if not kept.all():
        plan.kept = kept
        # With the setting that ignores missing keys, dSort ends its own process.
        plan.not_by_dsort = "dSort cannot leave samples out"
    if not request.is_local:
        keys: dict[int, list[str]] = {group: [] for group in used}
        for name, group in zip(names, groups.tolist(), strict=True):
            if group >= 0:
                keys[group].append(key_of(name))
        # A cluster takes a template's names as they are, with their extension.
        plan.key_map = {f"{mapped.outputs[group]}{request.extension}": regexes_of(keys[group]) for group in used}
    return plan


def _check_mapped(request: Request, mapped: KeyMap, names: Sequence[str], kept: Bools) -> None:
    if not kept.all() and not request.drop_unmapped:
        odd = [key_of(names[position]) for position in np.flatnonzero(~kept)[:4].tolist()]
        raise DataError(
            f"{mapped.where}: names no shard for {int((~kept).sum())} of {len(names)} keys: {shown(odd)}; an entry is "
            "a whole key, or a regular expression such as '^cats/'. Leave such samples out with --drop-unmapped"
        )
    if not kept.any():
        raise DataError(f"{mapped.where}: names no shard for any of the {len(names)} keys")
    if isinstance(request.mapped, KeyMap) and (unused := mapped.unused(names)):
        # A key may be misspelt, or the map may cover more than these shards.
        _log.warning(
            "%s: no sample for %d of its %d keys: %s", mapped.where, len(unused), len(mapped.keys), shown(unused)
        )


def _label(contents: Contents, position: int) -> int:
    value = contents.values[LABEL_COMPONENT][position]
    if value is None:
        raise DataError(f"{contents.where(position)}: no component '{LABEL_COMPONENT}' to group by")
    return parse_label(value, shard=contents.shard_of(position), key=key_of(contents.name(position)))


def find_existing(plan: ShufflePlan) -> dict[str, ObjectEntry]:
    """Find the shards under the output's names, and the files that describe such shards; these files come first.

    Raises:
        ValueError: If the output's names include a shard of the input.
    """
    request, target = plan.request, plan.request.output_store
    if target is not request.shards.store and not target.exists():
        return {}
    entries = list_outputs(plan)
    found = [name for name in entries if plan.is_output(name)]
    same_place = target.identity("") == request.shards.store.identity("")
    clashing = set(request.shards.names).intersection([*found, *plan.names]) if same_place else set()
    if clashing:
        if isinstance(request.mapped, KeyMap):
            raise ValueError(f"{request.mapped.where}: names a shard of the input itself, '{min(clashing)}'")
        raise ValueError(f"output prefix '{request.prefix}' names the input itself; {request.way_out}")
    versions = [name for prefix in plan.prefixes for name in entries if name.startswith(version_start(prefix))]
    if versions:
        raise ValueError(
            f"output '{target.locate(min(plan.prefixes))}' is a data set with versions, {shown(versions)}; "
            f"{request.way_out}, or delete it first"
        )
    describing = {name(prefix) for prefix in plan.prefixes for name in _DESCRIBING}
    describing |= {name for prefix in plan.prefixes for name in record_names(prefix)}
    describing |= set(map(index_name, {*found, *plan.names}))
    return {name: entries[name] for name in [*(name for name in entries if name in describing), *found]}


def list_outputs(plan: ShufflePlan) -> dict[str, ObjectEntry]:
    """List the objects whose names start with a prefix of the output, and those that describe such shards."""
    by_folder: dict[str, list[str]] = {}
    for prefix in sorted([*plan.prefixes, *map(described, plan.prefixes)]):
        by_folder.setdefault(prefix.rpartition("/")[0], []).append(prefix)
    entries: dict[str, ObjectEntry] = {}
    for prefixes in by_folder.values():
        common = common_prefix(prefixes)
        # One listing for a thousand classes; but for cats- and dogs- it would list the whole bucket.
        for prefix in [common] if common.rpartition("/")[2] else prefixes:
            entries |= {entry.name: entry for entry in plan.request.output_store.list_all(prefix)}
    return entries
