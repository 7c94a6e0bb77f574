"""Find the ordinals that a plan leaves out: samples that were removed from the data set, listed samples, samples that a
predicate refuses, and incomplete ones.

Only the needed files are read: the column file for keys and labels, and the indexes of shards that a list names. No
file is read if the manifest's sums show that no sample lacks a component.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dali_pipes.arrays import Bools, Int64s
from dali_pipes.data_set.data_set import DataSet, split_set
from dali_pipes.errors import DataError, printable
from dali_pipes.formats.names import index_name
from dali_pipes.formats.quarantine import Exclusion, read_exclusions
from dali_pipes.formats.sample_columns import Columns, Where, lack
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.order.selection import union
from dali_pipes.store.patience import PatientThreads

_log = logging.getLogger(__name__)

# Shard indexes read at a time, to hide the store's latency.
NUM_READERS = 16
# Shard indexes that are requested ahead, and so kept in memory at most.
_AHEAD = 16 * NUM_READERS

# Sorted ordinals are copied a few times on their way to the plan, so 0.5 GB become 1.5 GB.
MAX_REFUSED = 1 << 26
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
            without a set's name means every sample that has it. Listed samples of shards that the loader does not read
            are counted and logged.
        entries: Further samples, as such a file lists them.
        where: Called with a `dali_pipes.formats.sample_columns.Columns` of some shards at a time; returns bool [N],
            ``True`` for each sample to keep. It must judge each sample by that sample alone. It sees removed samples,
            too; its answer for them has no effect.
        lacking: Components; samples without one of them are left out. A sample lacks ``"jpg;jpeg"`` if it has neither.

    Raises:
        DataError: If a list names a key that its shard does not have, or a shard that several sets have; if keys or
            labels are needed and there is no column file; if no sample has a component of ``lacking``.
        TypeError: If ``where`` returns anything but one bool for each sample.
        ValueError: If no sample is left; if the answer of ``where`` for a sample depends on the others; if more samples
            are left out than memory should hold.
    """
    choice = _Choice(indexed)
    if where is not None:
        choice.leave_out("by where", choice.refused_by(where))
    if listed := [*read_exclusions(exclude), *entries]:
        choice.leave_out("by exclude", choice.listed(listed))
    for component in lacking:
        choice.leave_out(f"without '{component}'", choice.lacking(component))
    return choice.chosen()


class _Choice:
    """The ordinals left out so far, and why."""

    def __init__(self, indexed: DataSet) -> None:
        self._indexed, self._manifest = indexed, indexed.manifest
        self._stops = np.cumsum(self._manifest.samples, dtype=np.int64)
        self._num_samples = int(self._stops[-1])
        self._excluded = np.empty(0, np.int64)
        self._reasons: list[tuple[str, int]] = []
        self.leave_out("by prep remove", self._manifest.removed)

    def leave_out(self, why: str, ordinals: Int64s) -> None:
        excluded = union(self._excluded, ordinals)
        self._reasons.append((why, len(excluded) - len(self._excluded)))
        self._excluded = excluded

    def chosen(self) -> Chosen:
        counted = [f"{num} {why}" for why, num in self._reasons if num]
        num = len(self._excluded)
        summary = f"{num} sample{'' if num == 1 else 's'} left out{': ' if counted else ''}{', '.join(counted)}"
        if num == self._num_samples:
            raise ValueError(f"none of the {num} samples of '{self._indexed.shards.url}' is left: {', '.join(counted)}")
        return Chosen(self._excluded, summary)

    def refused_by(self, where: Where) -> Int64s:
        refused = _Collected(self._indexed.shards.url)
        first_key = ""
        for first, columns in self._indexed.columns_in_parts():
            if not len(columns):
                continue
            keep = _answer(where, columns)
            if first == 0:
                _check_judges_alone(where, columns, keep)
                first_key = columns.samples.keys[0] if len(columns) and not keep.any() else ""
            refused.add(first, ~keep, "where refuses")
        if len(found := refused.all()) == self._num_samples:
            raise ValueError(
                f"where keeps none of the {self._num_samples} samples of '{self._indexed.shards.url}'; the first is "
                f"'{first_key}'"
            )
        return found

    def listed(self, entries: Sequence[Exclusion]) -> Int64s:
        by_shard: dict[str, list[Exclusion]] = defaultdict(list)
        by_key: dict[str, Exclusion] = {}
        for entry in entries:
            if entry.shard is None:
                by_key.setdefault(entry.key, entry)
            else:
                by_shard[entry.shard].append(entry)
        return np.concatenate([self._listed_in_shards(by_shard), self._listed_by_key(by_key)])

    def _listed_in_shards(self, by_shard: Mapping[str, Sequence[Exclusion]]) -> Int64s:
        numbers = self._shard_numbers(by_shard)
        if elsewhere := [entry for name, entries in by_shard.items() if name not in numbers for entry in entries]:
            _log.warning(
                "exclude: %d of %d listed samples are in shards that the loader does not read, such as '%s'",
                len(elsewhere),
                sum(map(len, by_shard.values())),
                printable(elsewhere[0].shard or ""),
            )
        by_number: dict[int, list[Exclusion]] = defaultdict(list)
        for name, number in numbers.items():
            by_number[number] += by_shard[name]
        ordinals: list[int] = []
        for number, index in self._indexes(sorted(by_number)):
            name = self._manifest.names[number]
            own_keys = {entry.key: self._own_key(entry.key, of=split_set(name)[0]) for entry in by_number[number]}
            rows = _rows_of(index.keys, own_keys.keys() | own_keys.values())
            for entry in by_number[number]:
                found = {key: rows[key] for key in (entry.key, own_keys[entry.key]) if key in rows}
                if not found:
                    raise DataError(
                        f"{entry.where}: shard '{name}' has no key '{entry.key}'; was the list "
                        "made from these shards, as they are now? mend the line, or delete it"
                    )
                _check_single(entry, found)
                ordinals += [self._first(number) + row for rows_of_key in found.values() for row in rows_of_key]
        return np.array(ordinals, np.int64)

    def _own_key(self, key: str, *, of: str | None = None) -> str:
        """Take the set's name from a key of a mixture, if it has one: that of any set, or of one."""
        set_, own = split_set(key)
        sets = self._indexed.set_names
        return own if sets != ("",) and set_ in (sets if of is None else (of,)) and own else key

    def _rows_of_set(self, rows: Sequence[int], set_: str) -> list[int]:
        """Take the rows that are samples of one data set."""
        stops = np.append(0, self._stops)[np.append(0, np.cumsum(self._indexed.set_shards))]
        number = self._indexed.set_names.index(set_)
        return [row for row in rows if stops[number] <= row < stops[number + 1]]

    def _shard_numbers(self, by_shard: Mapping[str, Sequence[Exclusion]]) -> dict[str, int]:
        """Name as listed -> the loader's shard. In a mixture, a shard is also found by its name without the set's."""
        if not by_shard:
            return {}
        indexed = self._indexed
        if indexed.set_names == ("",):
            return {name: number for number, name in enumerate(self._manifest.names) if name in by_shard}
        named: dict[str, int] = {}
        alike: dict[str, list[int]] = defaultdict(list)
        # Among all indexed shards: the list may mean a shard that the loader does not read.
        for row, name in enumerate(indexed.whole.names):
            if name in by_shard:
                named[name] = row
            if (own := split_set(name)[1]) in by_shard:
                alike[own].append(row)
        for own, found in alike.items():
            if own in named:
                continue
            if len(found) > 1:
                first, second = (indexed.whole.names[row] for row in found[:2])
                raise DataError(f"{by_shard[own][0].where}: shard '{own}' may be '{first}' or '{second}'; write which")
            named[own] = found[0]
        numbers = {row: number for number, row in enumerate(indexed.rows.tolist())}
        return {name: numbers[row] for name, row in named.items() if row in numbers}

    def _listed_by_key(self, by_key: Mapping[str, Exclusion]) -> Int64s:
        if not by_key:
            return np.empty(0, np.int64)
        own_keys = {key: self._own_key(key) for key in by_key}
        rows = _rows_in_parts(self._indexed.columns_in_parts(), own_keys.keys() | own_keys.values())
        listed: dict[str, list[int]] = {}
        for key, own in own_keys.items():
            found = {key: rows.get(key, [])}
            if own != key:
                found[own] = self._rows_of_set(rows.get(own, []), split_set(key)[0])
            _check_single(by_key[key], found)
            if any(found.values()):
                listed[key] = [row for rows_of_key in found.values() for row in rows_of_key]
        if missing := by_key.keys() - listed.keys():
            unknown = [by_key[key] for key in by_key if key in missing]
            if self._manifest.num_shards != self._indexed.whole.num_shards:
                # Keys of shards that were indexed together with the loader's, but that it does not read.
                asked = {*missing, *(own_keys[key] for key in missing)}
                elsewhere = _rows_in_parts(self._indexed.columns_in_parts(of_whole=True), asked)
                unknown = [entry for entry in unknown if not {entry.key, own_keys[entry.key]} & elsewhere.keys()]
            if unknown:
                _, columns = next(self._indexed.columns_in_parts())
                more = f"; nor are {len(unknown) - 1} more" if len(unknown) > 1 else ""
                raise DataError(
                    f"{unknown[0].where}: key '{unknown[0].key}' is not in '{self._indexed.shards.url}'{more}; "
                    f"expected keys such as '{columns.samples.keys[0]}'; {unknown[0].cure}"
                )
            _log.warning(
                "exclude: %d of %d listed keys are in shards that the loader does not read, such as '%s'",
                len(missing),
                len(by_key),
                printable(min(missing)),
            )
        return np.array([row for rows_of_key in listed.values() for row in rows_of_key], np.int64)

    def lacking(self, component: str) -> Int64s:
        names = component.split(";")
        whole = self._indexed.whole
        # Counts over all indexed shards. If none or all of these samples have a component, so do the loader's samples.
        counts = {name: whole.components.get(name, 0) for name in names}
        if max(counts.values()) == whole.num_samples:
            return np.empty(0, np.int64)
        if not max(counts.values()):
            there = ", ".join(f"'{name}'" for name in whole.components)
            raise DataError(
                f"no sample of '{self._indexed.shards.url}' has component '{component}' (found: {there or 'none'})"
            )
        asked = [name for name, count in counts.items() if count]
        if self._indexed.has_columns() and (lacks := self._lacking_by_columns(asked, component)) is not None:
            return lacks
        found = _Collected(self._indexed.shards.url)
        for number, index in self._indexes(range(self._manifest.num_shards)):
            is_there = np.zeros(index.num_samples, np.bool_)
            for name in asked:
                if name in index.offsets:
                    is_there |= index.offsets[name] >= 0
            found.add(self._first(number), ~is_there, f"component '{component}' is missing in")
        return found.all()

    def _lacking_by_columns(self, names: Sequence[str], component: str) -> Int64s | None:
        """The samples without any of these components; ``None`` if the column files do not list all of them."""
        found = _Collected(self._indexed.shards.url)
        for first, columns in self._indexed.columns_in_parts():
            if (lacks := lack(columns.samples, names)) is None:
                return None
            found.add(first, lacks, f"component '{component}' is missing in")
        return found.all()

    def _first(self, shard: int) -> int:
        """The ordinal of a shard's first sample."""
        return int(self._stops[shard] - self._manifest.samples[shard])

    def _indexes(self, shards: Sequence[int]) -> Iterator[tuple[int, ShardIndex]]:
        """Yield these shards' indexes, in order, without keeping them."""
        with PatientThreads(NUM_READERS) as readers:
            for first in range(0, len(shards), _AHEAD):
                numbers = shards[first : first + _AHEAD]
                yield from zip(numbers, readers.map(self._read_index, numbers), strict=True)

    def _read_index(self, shard: int) -> ShardIndex:
        where = self._indexed.locate(index_name(self._manifest.names[shard]))
        return self._manifest.shard_index(shard, self._indexed.read_index(shard), where=where)


class _Collected:
    """Ordinals that are found part by part, at most `MAX_REFUSED` of them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._parts = [np.empty(0, np.int64)]
        self._num = 0

    def add(self, first: int, found: Bools, what: str) -> None:
        """Add the samples of a part that are found; ``first`` is the part's first ordinal."""
        self._parts.append(first + np.flatnonzero(found))
        self._num += len(self._parts[-1])
        if self._num > MAX_REFUSED:
            raise ValueError(
                f"{what} {self._num} of the first {first + len(found)} samples of '{self._url}'; a loader leaves out "
                f"at most {MAX_REFUSED}, at 8 bytes each. Pack the samples that should stay as a data set of their "
                "own, or name fewer shards"
            )

    def all(self) -> Int64s:
        """The ordinals of all parts."""
        return np.concatenate(self._parts)


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


def _rows_in_parts(parts: Iterable[tuple[int, Columns]], wanted: Iterable[str]) -> dict[str, list[int]]:
    """Like `_rows_of`, over columns in parts."""
    asked = frozenset(wanted)
    rows: dict[str, list[int]] = {}
    for first, columns in parts:
        for key, found in _rows_of(columns.samples.keys, asked).items():
            rows.setdefault(key, []).extend(first + row for row in found)
    return rows


def _rows_of(keys: Sequence[str], wanted: Iterable[str]) -> dict[str, list[int]]:
    """Key -> its rows, for the wanted keys that are found; a key may be in several shards."""
    asked = frozenset(wanted)
    rows: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        if key in asked:
            rows.setdefault(key, []).append(row)
    return rows


def _check_single(entry: Exclusion, found: Mapping[str, Sequence[int]]) -> None:
    """Refuse a key of a mixture that is one sample's with its set's name, and another's without."""
    if len([key for key, rows in found.items() if rows]) > 1:
        raise DataError(
            f"{entry.where}: '{entry.key}' is a key, and also the key '{split_set(entry.key)[1]}' with the name of its "
            "data set; write it with its shard's name and its set's, 'SET/SHARD<tab>SET/KEY'"
        )
