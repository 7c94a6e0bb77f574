"""Order the samples of a shuffle and cut them into shards: pure functions of names, sizes and contents.

They are dSort's rules, so the exchange and a cluster of one target write the same samples for one request.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dali_pipes.errors import DataError
from dali_pipes.formats.names import split_key

_INTEGER = re.compile(rb"([+-]?)0*([0-9]{1,19})")  # 64 bits; for more digits Python raises other errors
KINDS = ("shuffle", "alphanumeric", "content", "none")
"""The algorithms, by AIS's names. (AIS's ``md5`` computes no hash: it orders by name, too.)"""
KEY_TYPES = ("int", "float", "string")


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """An order of samples.

    Raises:
        ValueError: If a value is out of range, or the kind does not take it.
    """

    kind: str = "shuffle"
    """``shuffle``: random, from ``seed``. ``alphanumeric``: by the name of a sample's first member, byte by byte.
    ``content``: by the bytes of its ``component``. ``none``: the input's order."""
    seed: int = 0
    """Used by ``shuffle``; in [0, 2**63), the range that a cluster accepts."""
    decreasing: bool = False
    """Used by ``alphanumeric`` and ``content``."""
    component: str = ""
    """Used by ``content``: ``cls``, ``seg.png``; a dot before it, as AIS writes it, is dropped."""
    key_type: str = "string"
    """Used by ``content``: the component holds an ``int`` (64 bits), a ``float`` or a ``string`` (compared as
    bytes)."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"algorithm must be one of {', '.join(KINDS)}, got '{self.kind}'")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be in [0, 2**63), got {self.seed}")
        if self.key_type not in KEY_TYPES:
            raise ValueError(f"key type must be one of {', '.join(KEY_TYPES)}, got '{self.key_type}'")
        if self.decreasing and self.kind not in ("alphanumeric", "content"):
            raise ValueError(f"algorithm '{self.kind}' has no decreasing order; only alphanumeric and content have one")
        object.__setattr__(self, "component", self.component.strip().removeprefix("."))
        if (self.kind == "content") != bool(self.component):
            raise ValueError(
                "algorithm 'content' needs the component that holds the sort key, such as cls"
                if self.kind == "content"
                else f"algorithm '{self.kind}' does not take a component, got '{self.component}'; did you mean content?"
            )


def shuffled(keys: Sequence[str], *, seed: int) -> list[int]:
    """The positions of ``keys`` in shuffled order; they depend only on the keys, their order and the seed.

    Positions are sorted by a hash of (seed, position, key), so every machine and Python version gives the same order.

    >>> shuffled(["a", "b", "c", "d"], seed=0)
    [1, 2, 3, 0]
    """

    def rank(position: int) -> bytes:
        text = f"{seed}/{position}/{keys[position]}"
        return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).digest()

    return sorted(range(len(keys)), key=rank)


def cut(sizes: Iterable[int], *, target: int) -> list[int]:
    """Cut consecutive items into shards; a shard ends with the item that brings it to ``target`` bytes.

    This is dSort's rule; the last shard may be tiny. Returns the number of items of each shard.

    >>> cut([3, 3, 3, 3, 3], target=6)
    [2, 2, 1]
    """
    counts: list[int] = []
    num_bytes = count = 0
    for size in sizes:
        num_bytes += size
        count += 1
        if num_bytes >= target:
            counts.append(count)
            num_bytes = count = 0
    return [*counts, count] if count else counts


def parse_content(data: bytes | None, *, algorithm: Algorithm, where: str) -> int | float | bytes:
    """Parse the value by which ``content`` sorts a sample; white space around a number is allowed.

    Raises:
        DataError: If the component is missing (``None``), or is not a number of this type; names the sample, ``where``.
    """
    if data is None:
        raise DataError(f"{where}: no component '{algorithm.component}' to sort by")
    if algorithm.key_type == "string":
        return data
    text = data.strip()
    if algorithm.key_type == "int":
        match = _INTEGER.fullmatch(text)
        if match is not None and -(2**63) <= (number := int(match[1] + match[2])) < 2**63:
            return number
    else:
        try:
            # Python alone allows underscores in numbers.
            if b"_" not in text and not math.isnan(value := float(text)):
                return value
        except ValueError:
            pass
    shown = data[:40].decode("ascii", "backslashreplace")
    raise DataError(
        f"{where}: component '{algorithm.component}' holds '{shown}', expected {algorithm.key_type} to sort by"
    )


def arrange(names: Sequence[str], *, algorithm: Algorithm, contents: Sequence[int | float | bytes] = ()) -> list[int]:
    """The positions of samples in output order. Samples with equal values stay in input order.

    ``names`` are those of the samples' first members; ``contents`` are the values for ``content``: see `parse_content`.
    """
    if algorithm.kind == "none":
        return list(range(len(names)))
    if algorithm.kind == "shuffle":
        return shuffled([key_of(name) for name in names], seed=algorithm.seed)
    if algorithm.kind == "alphanumeric":
        # As in AIS, the bytes of the whole name are compared: 'a-b.jpg' comes before 'a.jpg'.
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        return sorted(range(len(names)), key=encoded.__getitem__, reverse=algorithm.decreasing)
    return sorted(range(len(names)), key=contents.__getitem__, reverse=algorithm.decreasing)


def key_of(name: str) -> str:
    """The key of a member; the whole name if the member does not belong to a sample."""
    parts = split_key(name)
    return name if parts is None else parts[0]
