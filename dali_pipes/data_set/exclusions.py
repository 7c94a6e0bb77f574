"""Find the ordinals that a plan leaves out: samples that were removed from the data set, listed samples, samples that a
predicate refuses, and incomplete ones.

Only the needed files are read: the column file for keys, labels and components, and the indexes of shards that a list
names. No file is read if the manifest's sums show that no sample lacks a component.
"""

import itertools
import logging
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
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
        counted = ", ".join(f"{num} {why}" for why, num in self._reasons if num)
        num = len(self._excluded)
        if num == self._num_samples:
            raise ValueError(f"none of the {num} samples of '{self._indexed.shards.url}' is left: {counted}")
        return Chosen(self._excluded, f"{num} sample{'' if num == 1 else 's'} left out{f': {counted}' if num else ''}")

    def refused_by(self, where: Where) -> Int64s:
        refused = [np.empty(0, np.int64)]
        for first, columns in self._indexed.columns_in_parts():
            if not len(columns):
                continue
            keep = _answer(where, columns)
            if first == 0:
                _check_judges_alone(where, columns, keep)
            refused.append(first + np.flatnonzero(~keep))
        found = np.concatenate(refused)
        if len(found) == self._num_samples:
            raise ValueError(
                f"where keeps none of the {self._num_samples} samples of '{self._indexed.shards.url}'; the first is "
                f"'{self._a_key()}'"
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
        return np.array(self._listed_in_shards(by_shard) + self._listed_by_key(by_key), np.int64)

    def _listed_in_shards(self, by_shard: Mapping[str, Sequence[Exclusion]]) -> list[int]:
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
            name, first = self._manifest.names[number], int(self._stops[number] - self._manifest.samples[number])
            set_ = split_set(name)[0]
            # In the list of one data set, a key may begin like the set's name in the mixture.
            stored = {
                entry: entry.key.removeprefix(f"{set_}/") if entry.shard == name and self._is_mixture else entry.key
                for entry in by_number[number]
            }
            rows = _rows_of(index.keys, stored.values())
            for entry, key in stored.items():
                if key not in rows:
                    raise DataError(
                        f"{entry.where}: shard '{name}' has no key '{entry.key}'; was the list "
                        "made from these shards, as they are now? mend the line, or delete it"
                    )
                ordinals += [first + row for row in rows[key]]
        return ordinals

    @property
    def _is_mixture(self) -> bool:
        return self._indexed.set_names != ("",)

    def _shard_numbers(self, by_shard: Mapping[str, Sequence[Exclusion]]) -> dict[str, int]:
        """Name as listed -> the loader's shard. In a mixture, a shard is also found by its name without the set's."""
        rows: dict[str, list[int]] = defaultdict(list)
        # Among all indexed shards: the list may mean a shard that the loader does not read.
        whole = self._indexed.whole.names
        for row, name in enumerate(whole):
            for listed in (name, split_set(name)[1]) if self._is_mixture else (name,):
                if listed in by_shard:
                    rows[listed].append(row)
        for listed, found in rows.items():
            if len(found) > 1:
                where = by_shard[listed][0].where
                raise DataError(
                    f"{where}: shard '{listed}' may be '{whole[found[0]]}' or '{whole[found[1]]}'; write which"
                )
        numbers = {row: number for number, row in enumerate(self._indexed.rows.tolist())}
        return {listed: numbers[row] for listed, (row,) in rows.items() if row in numbers}

    def _listed_by_key(self, by_key: Mapping[str, Exclusion]) -> list[int]:
        if not by_key:
            return []
        stops = np.append(0, self._stops)[np.append(0, np.cumsum(self._indexed.set_shards))].tolist()
        places = dict(zip(self._indexed.set_names, itertools.pairwise(stops), strict=True))
        stored = {key: self._without_set(key) for key in by_key}
        rows = _rows_in_parts(self._indexed.columns_in_parts(), stored.values())
        listed: list[int] = []
        missing: list[str] = []
        for key, own in stored.items():
            start, stop = (0, self._num_samples) if own == key else places[split_set(key)[0]]
            found = [row for row in rows.get(own, ()) if start <= row < stop]
            listed += found
            if not found:
                missing.append(key)
        if missing:
            self._check_are_elsewhere(by_key, missing, stored)
        return listed

    def _without_set(self, key: str) -> str:
        """Take the set's name from a key of a mixture, if it has one."""
        set_, own = split_set(key)
        return own if self._is_mixture and set_ in self._indexed.set_names and own else key

    def _check_are_elsewhere(
        self, by_key: Mapping[str, Exclusion], missing: Sequence[str], stored: Mapping[str, str]
    ) -> None:
        """Refuse missing keys that are not in shards that were indexed together with the loader's either."""
        elsewhere: Container[str] = ()
        if self._manifest.num_shards != self._indexed.whole.num_shards:
            elsewhere = _rows_in_parts(self._indexed.columns_in_parts(of_whole=True), map(stored.__getitem__, missing))
        if unknown := [by_key[key] for key in missing if stored[key] not in elsewhere]:
            raise DataError(
                f"{unknown[0].where}: key '{unknown[0].key}' is not in '{self._indexed.shards.url}' ({len(unknown)} "
                f"such keys are listed); expected keys such as '{self._a_key()}'; {unknown[0].cure}"
            )
        _log.warning(
            "exclude: %d of %d listed keys are in shards that the loader does not read, such as '%s'",
            len(missing),
            len(by_key),
            printable(min(missing)),
        )

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
        parts = self._indexed.columns_in_parts()
        return np.concatenate([first + np.flatnonzero(lack(columns.samples, asked)) for first, columns in parts])

    def _a_key(self) -> str:
        """Return one key of the data set as an example for errors; in a mixture the set's name stands before it."""
        columns = next(columns for _, columns in self._indexed.columns_in_parts() if len(columns))
        set_ = f"{split_set(str(columns.shards[0]))[0]}/" if self._is_mixture else ""
        return f"{set_}{columns.samples.keys[0]}"

    def _indexes(self, shards: Sequence[int]) -> Iterator[tuple[int, ShardIndex]]:
        """Yield these shards' indexes, in order, without keeping them."""
        with PatientThreads(NUM_READERS) as readers:
            for first in range(0, len(shards), _AHEAD):
                numbers = shards[first : first + _AHEAD]
                yield from zip(numbers, readers.map(self._read_index, numbers), strict=True)

    def _read_index(self, shard: int) -> ShardIndex:
        where = self._indexed.locate(index_name(self._manifest.names[shard]))
        return self._manifest.shard_index(shard, self._indexed.read_index(shard), where=where)


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
