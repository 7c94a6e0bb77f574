"""The shards that should be there where no manifest names them yet: by the record of the command that wrote them.

A listing alone proves nothing. A cluster that has lost a target lists the objects of the others, without an error; a
command that was stopped has written some of its shards. So a command that writes shards leaves a record of them,
``.dali-pipes/PREFIXwritten.json``. Shards of other tools have no record: then their numbers must not have gaps.
"""

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from dali_pipes.errors import DataError
from dali_pipes.formats.names import read_json, record_names
from dali_pipes.store.base import Store
from dali_pipes.store.shard_names import (
    MAX_EXPANDED,
    Template,
    ending_of,
    extension_of,
    is_object_name,
    stem_of,
    template_of,
)
from dali_pipes.store.urls import Pattern

_EXPECTED = 'expected {"shards": "x-{000000..000063}.tar", "num_samples": 2400, "num_bytes": 10485760}'
# Numbers that are further apart on average do not count shards.
_SPARSE = 64
_NUMBERED = re.compile(r"(.*?)([0-9]+)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class WrittenShards:
    """The record of the shards that a command wrote under one prefix."""

    names: Sequence[str]
    """Without their folder, so that a data set may be moved."""
    num_samples: int | None = None
    """``None``: not known before the shards were written."""
    num_bytes: int | None = None
    """Bytes of all shards; ``None``: not known then."""

    def to_bytes(self) -> bytes:
        """The object's bytes; the same shards always give the same."""
        extension = extension_of(self.names[0]) if self.names else ""
        template = template_of([stem_of(name) for name in self.names])
        shards = list(self.names) if template is None else f"{template}{extension}"
        value = {"shards": shards, "num_samples": self.num_samples, "num_bytes": self.num_bytes}
        return json.dumps(value, indent=0, ensure_ascii=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> Self:
        """Read a record; raises `DataError` for other files."""
        try:
            value = read_json(data)
            shards, *counts = (value[name] for name in ("shards", "num_samples", "num_bytes"))
            if isinstance(shards, str):
                template = Template.parse(stem_of(shards))
                if len(template) > MAX_EXPANDED:
                    raise ValueError("too many names")
                shards = [f"{name}{extension_of(shards)}" for name in template.names()]
            if not all(count is None or (type(count) is int and count >= 0) for count in counts):
                raise ValueError("a count is not a number")
            if not all(isinstance(name, str) and is_object_name(name) and "/" not in name for name in shards):
                raise ValueError("a name is not that of a shard")
            return cls(names=tuple(shards), num_samples=counts[0], num_bytes=counts[1])
        except (KeyError, TypeError, ValueError) as exc:
            raise DataError(
                f"'{where}' is not a record of written shards ({_EXPECTED}); write the shards again; if they are "
                "complete, delete it, and the like that end in 'written-2.json' and so on"
            ) from exc


def write_record(store: Store, prefix: str, written: WrittenShards) -> None:
    """Write the record of the shards under a prefix: to two nodes of a cluster, if it has two.

    Records of other shards must have been deleted. Nothing is read: a token for packing may only write.
    """
    store.write_apart(record_names(prefix), written.to_bytes())


def stored_records(store: Store, prefix: str) -> list[str]:
    """The names under which the record of the shards under a prefix is stored; empty for none."""
    names = record_names(prefix)
    return [entry.name for entry in store.list(names[0].removesuffix(".json")) if entry.name in names]


def read_record(store: Store, prefix: str) -> WrittenShards | None:
    """The record of the shards under a prefix; ``None`` for none; raises `DataError` if it is broken."""
    names = stored_records(store, prefix)
    return WrittenShards.from_bytes(store.read(names[0]), where=store.locate(names[0])) if names else None


@dataclass(frozen=True, kw_only=True)
class ExpectedShards:
    """The shards that a pattern stands for: those that are listed, and those that a record or a gap adds."""

    locations: Sequence[str]
    """URLs or paths of all of them."""
    source: str
    """What names them, for errors: ``'ais://b/.dali-pipes/x-written.json' lists 64 shards``. Empty for a listing."""
    recorded: tuple[int, int] | None = None
    """Number and bytes of the shards, if one record names exactly these."""


def expected_shards(pattern: Pattern, listed: Sequence[str]) -> ExpectedShards:
    """Add to the listed shards those of their records, or, without a record, those in the gaps of their numbers.

    Args:
        pattern: The pattern that was listed.
        listed: URLs or paths of the shards that it chose.

    Raises:
        DataError: If a record cannot be read.
        StoreError: If the store cannot be read.
    """
    store, place = pattern.store, pattern.store.url.rstrip("/")
    prefixes = [p for p in pattern.listing.record_prefixes if any(name.startswith(f"{place}/{p}") for name in listed)]
    if not prefixes and pattern.prefix != (set_prefix := pattern.prefix.rstrip("0123456789")):
        prefixes = [set_prefix] if stored_records(store, set_prefix) else []
    expected, sources, recorded = set(listed), [], None
    stems = {stem_of(name) for name in listed}  # a shard may have been compressed since
    for prefix in prefixes:
        name = stored_records(store, prefix)[0]
        written = WrittenShards.from_bytes(store.read(name), where=store.locate(name))
        folder = prefix.rpartition("/")[0]
        names = [f"{folder}/{name}" if folder else name for name in written.names]
        chosen = {f"{place}/{name}" for name in pattern.matching(names, store)}
        expected |= {name for name in chosen if stem_of(name) not in stems}
        samples = "" if written.num_samples is None else f" with {written.num_samples} samples"
        sources.append(f"'{store.locate(name)}' lists {len(names)} shards{samples}")
        if written.num_bytes is not None and chosen == expected and len(chosen) == len(names):
            recorded = len(names), written.num_bytes
    if not prefixes and (gaps := _numbers_in_gaps(listed)):
        in_gaps = pattern.matching([name.removeprefix(f"{place}/") for name in gaps], store)
        if in_gaps:
            expected.update(f"{place}/{name}" for name in in_gaps)
            sources = [f"the numbers of its {len(listed)} shards have gaps"]
    return ExpectedShards(locations=sorted(expected), source=", ".join(sources), recorded=recorded)


def _numbers_in_gaps(names: Iterable[str]) -> list[str]:
    """The names that are missing between the first and the last number of shards that are counted.

    Numbers count shards if they have three digits or more, some begin with 0, and they are not far apart: dates and ids
    do not count.

    >>> _numbers_in_gaps(["a-007.tar", "a-009.tar", "b-2026-11-01.tar", "b-2026-11-03.tar"])
    ['a-008.tar']
    """
    numbers: dict[tuple[str, int, str], list[int]] = {}
    for name in names:
        if match := _NUMBERED.fullmatch(stem_of(name)):
            numbers.setdefault((match[1], len(match[2]), ending_of(name)), []).append(int(match[2]))
    return [
        f"{start}{number:0{width}}{ending}"
        for (start, width, ending), there in numbers.items()
        if width > 2 and min(there) < 10 ** (width - 1) and max(there) - min(there) < _SPARSE * len(there)
        for before, after in itertools.pairwise(sorted(there))
        for number in range(before + 1, after)
    ]
