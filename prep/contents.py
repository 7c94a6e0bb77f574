"""Shards to what they hold, in 16 bytes a sample; and whether two sets of shards hold the same.

Keys, components' names and bytes count, each sample as often as it comes; the order of samples, and of the components
of one, does not.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from prep.archive import ArchiveReader
from prep.errors import DataError, shown
from prep.progress import bar
from prep.store import Store

__all__ = ["Digests", "check_same", "check_unique", "digest_contents"]

# Shards read at a time. Reading waits for the store; parsing holds the GIL, so more gain nothing.
NUM_READERS = 4

UInt64s = npt.NDArray[np.uint64]


class Digests(NamedTuple):
    """What a set of shards holds, in 16 bytes a sample."""

    rows: UInt64s
    """uint64 [sample, (key, content)], sorted."""
    num_bytes: int
    """Of all components; a tar's headers and fill are not counted, neither are they by dSort."""


def check_unique(store: Store, names: Sequence[str], digests: Digests) -> None:
    """Refuse keys that come more than once.

    Raises:
        DataError: Names some of them.
    """
    keys = digests.rows[:, 0]
    twice = set(keys[1:][keys[1:] == keys[:-1]].tolist())
    if twice:
        found = sorted(_find_keys(store, names, twice).values())
        raise DataError(
            f"'{store.url}': {len(found)} keys come more than once in the {len(names)} shards: {shown(found)}; "
            "shuffled, two of them could stand together and be read as one sample: pack them with other keys"
        )


def check_same(store: Store, before: Sequence[str], after: Sequence[str], went_in: Digests, came_out: Digests) -> None:
    """Refuse another multiset of samples than went in.

    Raises:
        DataError: Names some of those that are missing, extra or changed; both sides are read once more for that.
    """
    if not np.array_equal(went_in.rows, came_out.rows):
        raise DataError(_difference(store, before, after, went_in.rows, came_out.rows))


def digest_contents(store: Store, names: Sequence[str], *, what: str, show_progress: bool) -> Digests:
    """Read shards, several at a time, and digest every sample.

    Args:
        store: Where they are.
        names: The shards.
        what: The bar's label.
        show_progress: Draw a bar.

    Raises:
        DataError: If one is no whole tar.
    """
    parts: list[UInt64s] = []
    num_bytes = 0
    with (
        bar(what=what, total=len(names), unit="shards", shown=show_progress) as drawn,
        ThreadPoolExecutor(NUM_READERS) as readers,
    ):
        try:
            for part in readers.map(lambda name: _digest_shard(store, name), names):
                parts.append(part.rows)
                num_bytes += part.num_bytes
                drawn.update(1)
        except BaseException:
            readers.shutdown(cancel_futures=True)
            raise
    rows = np.concatenate(parts)
    return Digests(rows[np.lexsort((rows[:, 1], rows[:, 0]))], num_bytes)


def _digest_shard(store: Store, name: str) -> Digests:
    samples = list(_samples(store, name))
    rows = [(_digest_key(sample.key), sample.content) for sample in samples]
    return Digests(np.array(rows, np.uint64).reshape(-1, 2), sum(sample.num_bytes for sample in samples))


def _digest_key(key: str) -> int:
    # An archive may hold names that are no UTF-8.
    return int(xxhash.xxh64_intdigest(key.encode("utf-8", "surrogateescape")))


@dataclass
class _Sample:
    key: str
    content: int = 0
    """The sum of its components' digests, each of name and bytes: their order within a sample is free."""
    num_bytes: int = 0


def _samples(store: Store, name: str) -> Iterator[_Sample]:
    """Each run of members that share a key, as a reader of the shard groups them."""
    sample: _Sample | None = None
    with store.open(name) as stream:
        for member in ArchiveReader(stream, shard=store.locate(name)):
            if sample is None or sample.key != member.key:
                if sample is not None:
                    yield sample
                sample = _Sample(member.key)
            data = member.read()
            state = xxhash.xxh64(member.component.encode("utf-8", "surrogateescape") + b"\0")
            state.update(data)
            sample.content = (sample.content + state.intdigest()) % 2**64
            sample.num_bytes += len(data)
    if sample is not None:
        yield sample


def _difference(store: Store, before: Sequence[str], after: Sequence[str], went_in: UInt64s, came_out: UInt64s) -> str:
    """What went wrong, with the keys: both sides are read once more for them."""
    rows, inverse = np.unique(np.concatenate([went_in, came_out]), axis=0, return_inverse=True)
    counts = np.zeros(len(rows), np.int64)
    np.add.at(counts, inverse.ravel()[: len(went_in)], 1)
    np.add.at(counts, inverse.ravel()[len(went_in) :], -1)
    lost = set(rows[counts > 0][:, 0].tolist())
    gained = set(rows[counts < 0][:, 0].tolist())
    keys = _find_keys(store, [*before, *after], lost | gained)
    findings = [
        f"{len(digests)} {what} ({shown(sorted(keys[digest] for digest in digests))})"
        for what, digests in (
            ("missing", lost - gained),
            ("extra", gained - lost),
            ("changed", lost & gained),
        )
        if digests
    ]
    return (
        f"dSort changed the data: {len(went_in)} samples went in, {len(came_out)} came out of '{store.url}': "
        f"{', '.join(findings)}. Do not use '{store.locate(after[0])}' and the following; the input is as it was"
    )


def _find_keys(store: Store, names: Sequence[str], digests: set[int]) -> dict[int, str]:
    """The keys that have these digests."""
    return {
        digest: sample.key
        for name in names
        for sample in _samples(store, name)
        if (digest := _digest_key(sample.key)) in digests
    }
