"""Find the ordinals that a plan leaves out: samples that were removed from the data set, listed samples, samples that a
predicate refuses, and incomplete ones.

Keys, labels and components are in the column file, of which only the needed parts are read. No file is read if the
manifest's sums show that no sample lacks a component.
"""

import itertools
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dali_pipes.arrays import Bools, Int64s
from dali_pipes.data_set.data_set import DataSet, split_set
from dali_pipes.errors import DataError, printable
from dali_pipes.formats.quarantine import Exclusion, read_exclusions
from dali_pipes.formats.sample_columns import Columns, Where, lack
from dali_pipes.order.selection import union

_log = logging.getLogger(__name__)

# Samples of which ``where`` is asked twice.
NUM_ASKED_AGAIN = 2000


class Chosen(NamedTuple):
    """The samples that a plan leaves out."""

    excluded: Int64s
    """Ordinals, sorted, each once: int64 [N]."""
    summary: str
    """``"12 samples left out: 10 by where, 2 by exclude"``. A sample counts for the first reason that excludes it."""


def excluded_ordinals(
    indexed: DataSet,
    *,
    exclude: str | Path | Iterable[str | Path] = (),
    entries: Sequence[Exclusion] = (),
    where: Where | None = None,
    lacking: Sequence[str] = (),
) -> Chosen:
    """Find the samples of the loader's shards that must not be read; those that were removed are always among them.

    Args:
        indexed: The data set.
        exclude: Files that list samples, see `dali_pipes.formats.quarantine.read_exclusions`. In a mixture a shard
            is called ``SET/SHARD``, and a key ``SET/KEY``; a shard's own name is enough if only one set has it. A key
            without a set's name means every sample that has it; one that begins with a set's name and a slash is always
            of that set. Listed samples of shards that the loader does not read are counted and logged.
        entries: Further samples, as such a file lists them.
        where: Called with a `dali_pipes.formats.sample_columns.Columns` of some shards at a time; returns bool [N],
            ``True`` for each sample to keep. It must judge each sample by that sample alone. It sees removed samples,
            too; its answer for them has no effect.
        lacking: Components; samples without one of them are left out. A sample lacks ``"jpg;jpeg"`` if it has neither.

    Raises:
        DataError: If a list names a key that its shard does not have, or a shard that several sets have; if the column
            file is needed and missing; if no sample has a component of ``lacking``.
        TypeError: If ``where`` returns anything but one bool for each sample.
        ValueError: If no sample is left; if the answer of ``where`` for a sample depends on the others.
    """
    excluded, counts = np.empty(0, np.int64), []
    for why, ordinals in _left_out(indexed, [*read_exclusions(exclude), *entries], where, lacking):
        together = union(excluded, ordinals)
        if num := len(together) - len(excluded):
            counts.append(f"{num} {why}")
        excluded = together
    num, counted = len(excluded), ", ".join(counts)
    if num == indexed.manifest.num_samples:
        raise ValueError(f"none of the {num} samples of '{indexed.shards.url}' is left: {counted}")
    return Chosen(excluded, f"{num} sample{'' if num == 1 else 's'} left out{f': {counted}' if num else ''}")


def _left_out(
    indexed: DataSet, listed: Sequence[Exclusion], where: Where | None, lacking: Sequence[str]
) -> Iterator[tuple[str, Int64s]]:
    """Yield each reason to leave samples out, and their ordinals."""
    yield "by prep remove", indexed.manifest.removed
    if where is not None:
        yield "by where", _refused_by(indexed, where)
    in_shards: dict[str, list[Exclusion]] = defaultdict(list)
    by_key: dict[str, Exclusion] = {}
    for entry in listed:
        if entry.shard is None:
            by_key.setdefault(entry.key, entry)
        else:
            in_shards[entry.shard].append(entry)
    ordinals = _listed_in_shards(indexed, in_shards) if in_shards else []
    ordinals += _listed_by_key(indexed, by_key) if by_key else []
    yield "by exclude", np.array(ordinals, np.int64)
    for component in lacking:
        yield f"without '{component}'", _lacking(indexed, component)


def _refused_by(indexed: DataSet, where: Where) -> Int64s:
    refused = [np.empty(0, np.int64)]
    for first, columns in indexed.columns_in_parts():
        if not len(columns):
            continue
        keep = _answer(where, columns)
        if first == 0:
            _check_judges_alone(where, columns, keep)
        refused.append(first + np.flatnonzero(~keep))
    found = np.concatenate(refused)
    if len(found) == indexed.manifest.num_samples:
        raise ValueError(
            f"where keeps none of the {len(found)} samples of '{indexed.shards.url}'; the first is '{_a_key(indexed)}'"
        )
    return found


def _listed_in_shards(indexed: DataSet, by_shard: Mapping[str, Sequence[Exclusion]]) -> list[int]:
    """The ordinals of samples that are listed with their shards."""
    numbers = _shard_numbers(indexed, by_shard)
    if elsewhere := [entry for name, entries in by_shard.items() if name not in numbers for entry in entries]:
        _log.warning(
            "exclude: %d of %d listed samples are in shards that the loader does not read, such as '%s'",
            len(elsewhere), sum(map(len, by_shard.values())), printable(elsewhere[0].shard or ""),
        )  # fmt: skip
    by_number: dict[int, list[Exclusion]] = defaultdict(list)
    for name, number in numbers.items():
        by_number[number] += by_shard[name]
    manifest, ordinals = indexed.manifest, []
    chosen = np.array(sorted(by_number), np.int64)
    keys = itertools.chain.from_iterable(columns.samples.keys for _, columns in indexed.columns_in_parts(shards=chosen))
    for number in chosen.tolist():
        name, num_samples = manifest.names[number], int(manifest.samples[number])
        start = int(manifest.sample_stops[number]) - num_samples
        # In the list of one data set, a key may begin like the set's name in the mixture.
        set_ = f"{split_set(name)[0]}/" if indexed.is_mixture else ""
        stored = {e: e.key.removeprefix(set_) if e.shard == name else e.key for e in by_number[number]}
        rows = _rows_of(itertools.islice(keys, num_samples), stored.values())
        for entry, key in stored.items():
            if key not in rows:
                raise DataError(
                    f"{entry.where}: shard '{name}' has no key '{entry.key}'; was the list "
                    "made from these shards, as they are now? mend the line, or delete it"
                )
            ordinals += [start + row for row in rows[key]]
    return ordinals


def _shard_numbers(indexed: DataSet, by_shard: Mapping[str, Sequence[Exclusion]]) -> dict[str, int]:
    """Name as listed -> the loader's shard. In a mixture, a shard is also found by its name without the set's."""
    rows: dict[str, list[int]] = defaultdict(list)
    # Among all indexed shards: the list may mean a shard that the loader does not read.
    whole = indexed.whole.names
    for row, name in enumerate(whole):
        for listed in (name, split_set(name)[1]) if indexed.is_mixture else (name,):
            if listed in by_shard:
                rows[listed].append(row)
    for listed, found in rows.items():
        if len(found) > 1:
            where = by_shard[listed][0].where
            raise DataError(f"{where}: shard '{listed}' may be '{whole[found[0]]}' or '{whole[found[1]]}'; write which")
    numbers = {row: number for number, row in enumerate(indexed.rows.tolist())}
    return {listed: numbers[row] for listed, (row,) in rows.items() if row in numbers}


def _listed_by_key(indexed: DataSet, by_key: Mapping[str, Exclusion]) -> list[int]:
    """The ordinals of samples that are listed by their keys alone."""
    stops = np.append(0, indexed.manifest.sample_stops)[np.append(0, np.cumsum(indexed.set_shards))].tolist()
    places = dict(zip(indexed.set_names, itertools.pairwise(stops), strict=True))
    # Key as listed -> name of its set, empty for any set, and the key as it is stored there.
    stored = {key: ("", key) for key in by_key}
    if indexed.is_mixture:
        stored |= {key: split_set(key) for key in by_key if split_set(key)[0] in places and split_set(key)[1]}
    wanted = {key for _, key in stored.values()}
    rows: dict[str, list[int]] = defaultdict(list)
    for first, columns in indexed.columns_in_parts():
        for key, found in _rows_of(columns.samples.keys, wanted).items():
            rows[key] += [first + row for row in found]
    listed: list[int] = []
    missing: list[str] = []
    for key, (set_, own) in stored.items():
        start, stop = places[set_] if set_ else (0, stops[-1])
        found = [row for row in rows.get(own, ()) if start <= row < stop]
        listed += found
        if not found:
            missing.append(key)
    if missing:
        _check_are_elsewhere(indexed, by_key, {key: stored[key][1] for key in missing})
    return listed


def _check_are_elsewhere(indexed: DataSet, by_key: Mapping[str, Exclusion], missing: Mapping[str, str]) -> None:
    """Refuse missing keys that are not in shards that were indexed together with the loader's either."""
    elsewhere: set[str] = set()
    if indexed.manifest.num_shards != indexed.whole.num_shards:
        for _, columns in indexed.columns_in_parts(of_whole=True):
            elsewhere.update(_rows_of(columns.samples.keys, missing.values()))
    if unknown := [by_key[key] for key, own in missing.items() if own not in elsewhere]:
        raise DataError(
            f"{unknown[0].where}: key '{unknown[0].key}' is not in '{indexed.shards.url}' ({len(unknown)} "
            f"such keys are listed); expected keys such as '{_a_key(indexed)}'; {unknown[0].cure}"
        )
    _log.warning(
        "exclude: %d of %d listed keys are in shards that the loader does not read, such as '%s'",
        len(missing), len(by_key), printable(min(missing)),
    )  # fmt: skip


def _lacking(indexed: DataSet, component: str) -> Int64s:
    whole = indexed.whole
    # Counts over all indexed shards. If none or all of these samples have a component, so do the loader's samples.
    counts = {name: whole.components.get(name, 0) for name in component.split(";")}
    if max(counts.values()) == whole.num_samples:
        return np.empty(0, np.int64)
    if not max(counts.values()):
        there = ", ".join(f"'{name}'" for name in whole.components)
        raise DataError(f"no sample of '{indexed.shards.url}' has component '{component}' (found: {there or 'none'})")
    asked = [name for name, count in counts.items() if count]
    parts = indexed.columns_in_parts()
    return np.concatenate([first + np.flatnonzero(lack(columns.samples, asked)) for first, columns in parts])


def _a_key(indexed: DataSet) -> str:
    """Return one key of the data set as an example for errors; in a mixture the set's name stands before it."""
    columns = next(columns for _, columns in indexed.columns_in_parts() if len(columns))
    set_ = f"{split_set(str(columns.shards[0]))[0]}/" if indexed.is_mixture else ""
    return f"{set_}{columns.samples.keys[0]}"


def _answer(where: Where, columns: Columns) -> Bools:
    """What ``where`` says of these samples: bool [N]."""
    keep: Any = where(columns)
    if not isinstance(keep, np.ndarray) or keep.dtype != np.bool_ or keep.shape != (len(columns),):
        found = f"{keep.dtype} of shape {list(keep.shape)}" if isinstance(keep, np.ndarray) else type(keep).__name__
        raise TypeError(
            f"where must return a numpy array of bool, one for each of {len(columns)} samples, got {found}; "
            'for instance: lambda columns: np.strings.startswith(columns.keys, "cat/")'
        )
    return keep


def _check_judges_alone(where: Where, columns: Columns, keep: Bools) -> None:
    """Refuse a predicate that says otherwise of a sample when it is shown fewer samples.

    The first samples are asked again in two halves. That finds predicates that count, number or draw samples.
    """
    num = min(len(columns), NUM_ASKED_AGAIN)
    for start, stop in ((0, num // 2), (num // 2, num)):
        if start == stop:
            continue  # one sample: numpy makes floats of an empty list, and the answer would be refused
        again = _answer(where, columns.between(start, stop))
        if (differs := again != keep[start:stop]).any():
            row = start + int(np.argmax(differs))
            raise ValueError(
                "where= is called for some shards at a time, so it must judge each sample by that sample alone; of "
                f"sample '{columns.samples.keys[row]}' it says {keep[row]} among {len(columns)} samples, and "
                f"{not keep[row]} among {stop - start}"
            )


def _rows_of(keys: Iterable[str], wanted: Iterable[str]) -> dict[str, list[int]]:
    """Key -> its rows, for the wanted keys that are found; a key may be in several shards."""
    asked = frozenset(wanted)
    rows: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        if key in asked:
            rows.setdefault(key, []).append(row)
    return rows
