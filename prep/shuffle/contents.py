"""Shards to what they hold, some 150 bytes a sample; and whether two sets of shards hold the same.

Keys, components' names and bytes count, each sample as often as it comes; the order of samples, and of the components
of one, does not.
"""

import contextlib
import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt
import xxhash

from dali_pipes.errors import DataError, shown
from dali_pipes.formats.keys import split_key
from dali_pipes.formats.names import LABEL_COMPONENT, index_name
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.formats.tar_reader import ArchiveReader
from dali_pipes.progress import bar
from dali_pipes.store.base import Store
from prep.shuffle.order import key_of
from prep.tar.writer import header_bytes, member_header

__all__ = [
    "BLOCK",
    "Contents",
    "Sample",
    "check_same",
    "check_unique",
    "indexed_contents",
    "join_contents",
    "open_shard",
    "read_contents",
    "read_samples",
    "read_shard",
]

# Shards read at a time. Reading waits for the store; parsing holds the GIL, so more gain nothing.
NUM_READERS = 4
BLOCK = 512

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a set of shards holds, sample by sample, in order."""

    shards: tuple[str, ...]
    starts: Int64s
    """int64 [shards + 1], the first sample of each."""
    names: Sequence[bytes]
    """Of each sample's first member, of which its key is the first part."""
    rows: UInt64s
    """uint64 [sample, (key, content)]."""
    num_bytes: Int64s
    """int64 [sample], of its components; a tar's headers and fill are not counted, neither are they by dSort."""
    num_members: Int64s
    """int64 [sample]."""
    tar_bytes: Int64s
    """int64 [sample], with headers and fill, in a tar that `prep.shuffle.client` writes."""
    checksums: UInt64s
    """uint64 [shards], XXH64 of each tar, of a compressed one what is inside."""
    values: Mapping[str, Sequence[bytes | None]] = field(default_factory=dict)
    """What each component that was asked for holds, ``None`` where a sample lacks it."""

    @property
    def num_samples(self) -> int:
        """All of them."""
        return len(self.names)

    @cached_property
    def sorted_rows(self) -> UInt64s:
        """`rows`, in an order that depends on nothing else."""
        return self.rows[np.lexsort((self.rows[:, 1], self.rows[:, 0]))]

    def name(self, position: int) -> str:
        """The name of a sample's first member."""
        return self.names[position].decode("utf-8", "surrogateescape")

    def where(self, position: int) -> str:
        """A sample, for errors: ``shard 'a-0.tar', key '7'``."""
        shard = int(np.searchsorted(self.starts, position, side="right")) - 1
        return f"shard '{self.shards[shard]}', key '{key_of(self.name(position))}'"


class _Whole(ArchiveReader):
    """An archive whose samples are all there: what reads it would pass over a link, and the next one not have it."""

    def _pass_over_link(self, name: str) -> None:
        if split_key(name) is not None:
            shown = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
            raise DataError(
                f"shard '{self._shard}', member '{shown}': is a link, which no reader of shards follows; pack it anew "
                "(tar: --hard-dereference or -h)"
            )


@dataclass
class Sample:
    """A run of members that share a key, as a reader of the shard groups them."""

    name: str
    """Of its first member."""
    key: str
    content: int = 0
    """The sum of its components' digests, each of name and bytes: their order within a sample is free."""
    num_bytes: int = 0
    num_members: int = 0
    tar_bytes: int = 0
    values: dict[str, bytes] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    """Its components; they are not counted where its pieces are asked for."""
    twice: str = ""
    """A component that it has twice."""
    pieces: "list[bytes] | None" = None
    """Its part of a tar, where that was asked for."""


@contextlib.contextmanager
def open_shard(store: Store, name: str) -> Iterator[BinaryIO]:
    """A stream of a shard's tar, decompressed where its name says so.

    Raises:
        DataError: While it is read, if it is no gzip file or was cut off.
    """
    with store.open(name) as stream:
        if name.endswith(".tar"):
            yield stream
            return
        try:
            with gzip.GzipFile(fileobj=stream) as inside:
                yield cast("BinaryIO", inside)
        except (gzip.BadGzipFile, EOFError, zlib.error) as exc:
            raise DataError(f"shard '{store.locate(name)}' is no whole gzip file: {exc}; pack it anew") from exc


def check_unique(store: Store, contents: Contents) -> None:
    """Refuse keys that come more than once.

    Raises:
        DataError: Names some of them.
    """
    keys = contents.sorted_rows[:, 0]
    twice = keys[1:][keys[1:] == keys[:-1]]
    if len(twice):
        found = sorted(_find_keys([contents], np.unique(twice)).values())
        raise DataError(
            f"'{store.url}': {len(found)} keys come more than once in the {len(contents.shards)} shards: "
            f"{shown(found)}; shuffled, two of them could stand together and be read as one sample: "
            "pack them with other keys"
        )


def check_same(store: Store, went_in: Contents, came_out: Contents, *, kept: npt.NDArray[np.bool_] | None) -> None:
    """Refuse another multiset of samples than went in.

    Args:
        store: Of the output.
        went_in: Before.
        came_out: After.
        kept: bool [sample], which of them were to come out; ``None``: all.

    Raises:
        DataError: Names some of those that are missing, extra or changed.
    """
    expected = went_in.sorted_rows if kept is None else _sorted(went_in.rows[kept])
    if np.array_equal(expected, came_out.sorted_rows):
        return
    rows, inverse = np.unique(np.concatenate([expected, came_out.rows]), axis=0, return_inverse=True)
    counts = np.zeros(len(rows), np.int64)
    np.add.at(counts, inverse.ravel()[: len(expected)], 1)
    np.add.at(counts, inverse.ravel()[len(expected) :], -1)
    lost = set(rows[counts > 0][:, 0].tolist())
    gained = set(rows[counts < 0][:, 0].tolist())
    keys = _find_keys([went_in, came_out], np.array(sorted(lost | gained), np.uint64))
    findings = [
        f"{len(digests)} {what} ({shown(sorted(keys[digest] for digest in digests))})"
        for what, digests in (
            ("missing", lost - gained),
            ("extra", gained - lost),
            ("changed", lost & gained),
        )
        if digests
    ]
    raise DataError(
        f"dSort changed the data: {len(expected)} samples went in, {came_out.num_samples} came out of '{store.url}': "
        f"{', '.join(findings)}. Do not use '{store.locate(came_out.shards[0])}' and the following; "
        "the input is as it was"
    )


def read_contents(
    store: Store, names: Sequence[str], *, components: Sequence[str] = (), what: str, show_progress: bool
) -> Contents:
    """Read shards, several at a time, and digest every sample.

    Args:
        store: Where they are.
        names: The shards.
        components: Those whose bytes are kept, for an order or a map by content; in lower case.
        what: The bar's label.
        show_progress: Draw a bar.

    Raises:
        DataError: If one is no whole tar.
    """
    parts: list[Contents] = []
    with (
        bar(what=what, total=len(names), unit="shards", shown=show_progress) as drawn,
        ThreadPoolExecutor(NUM_READERS) as readers,
    ):
        try:
            for part in readers.map(lambda name: read_shard(store, name, components=components), names):
                parts.append(part)
                drawn.update(1)
        except BaseException:
            readers.shutdown(cancel_futures=True)
            raise
    return join_contents(parts)


def read_shard(store: Store, name: str, *, components: Sequence[str] = ()) -> Contents:
    """`read_contents` of one shard, in this thread."""
    names: list[bytes] = []
    rows: list[tuple[int, int]] = []
    numbers: list[tuple[int, int, int]] = []
    values: dict[str, list[bytes | None]] = {component: [] for component in components}
    with open_shard(store, name) as stream:
        archive = _Whole(stream, shard=store.locate(name))
        for sample in read_samples(archive, components=components):
            if sample.twice:
                raise DataError(
                    f"shard '{store.locate(name)}', key '{sample.key}': component '{sample.twice}' is there twice, and "
                    "dSort keeps one of them; pack it anew"
                )
            names.append(sample.name.encode("utf-8", "surrogateescape"))
            rows.append((_digest(sample.key), sample.content))
            numbers.append((sample.num_bytes, sample.num_members, sample.tar_bytes))
            for component, found in values.items():
                found.append(sample.values.get(component))
    columns = np.array(numbers, np.int64).reshape(-1, 3)
    return Contents(
        shards=(name,),
        starts=np.array([0, len(names)], np.int64),
        names=names,
        rows=np.array(rows, np.uint64).reshape(-1, 2),
        num_bytes=columns[:, 0],
        num_members=columns[:, 1],
        tar_bytes=columns[:, 2],
        checksums=np.array([archive.checksum], np.uint64),
        values=values,
    )


def join_contents(parts: Sequence[Contents]) -> Contents:
    """Contents of several sets of shards, one after the other."""
    counts = np.concatenate([np.zeros(1, np.int64), *(np.diff(part.starts) for part in parts)])
    return Contents(
        shards=tuple(shard for part in parts for shard in part.shards),
        starts=np.cumsum(counts, dtype=np.int64),
        names=[name for part in parts for name in part.names],
        rows=np.concatenate([np.empty((0, 2), np.uint64), *(part.rows for part in parts)]),
        num_bytes=np.concatenate([np.empty(0, np.int64), *(part.num_bytes for part in parts)]),
        num_members=np.concatenate([np.empty(0, np.int64), *(part.num_members for part in parts)]),
        tar_bytes=np.concatenate([np.empty(0, np.int64), *(part.tar_bytes for part in parts)]),
        checksums=np.concatenate([np.empty(0, np.uint64), *(part.checksums for part in parts)]),
        values={c: [value for part in parts for value in part.values[c]] for c in (parts[0].values if parts else ())},
    )


def read_samples(
    archive: ArchiveReader, *, components: Sequence[str] = (), with_pieces: bool = False
) -> Iterator[Sample]:
    """The samples of a shard, front to back. How many is known at its end: see `ArchiveReader`.

    Args:
        archive: The shard.
        components: Those whose bytes are kept.
        with_pieces: Keep what each is in a tar, in place of its digest: one sample is in memory at a time.
    """
    sample: Sample | None = None
    for member in archive:
        if sample is None or sample.key != member.key:
            if sample is not None:
                yield sample
            sample = Sample(member.name, member.key, pieces=[] if with_pieces else None)
        data = member.read()
        sample.num_bytes += len(data)
        sample.num_members += 1
        fill = -len(data) % BLOCK
        sample.tar_bytes += header_bytes(member.name, len(data)) + len(data) + fill
        if member.component in components:
            sample.values[member.component] = data
        if sample.pieces is not None:
            sample.pieces += [member_header(member.name, len(data)), data, bytes(fill)]
            continue
        sample.twice = member.component if member.component in sample.seen else sample.twice
        sample.seen.add(member.component)
        state = xxhash.xxh64(member.component.encode("utf-8", "surrogateescape") + b"\0")
        state.update(data)
        sample.content = (sample.content + state.intdigest()) % 2**64
    if sample is not None:
        yield sample


def _digest(key: str) -> int:
    # An archive may hold names that are no UTF-8.
    return int(xxhash.xxh64_intdigest(key.encode("utf-8", "surrogateescape")))


def _sorted(rows: UInt64s) -> UInt64s:
    return rows[np.lexsort((rows[:, 1], rows[:, 0]))]


def _find_keys(sides: Sequence[Contents], digests: UInt64s) -> dict[int, str]:
    """The keys that have these digests."""
    return {
        int(side.rows[position, 0]): key_of(side.name(position))
        for side in sides
        for position in np.flatnonzero(np.isin(side.rows[:, 0], digests)).tolist()
    }


def indexed_contents(store: Store, names: Sequence[str], *, components: Sequence[str]) -> Contents | None:
    """What the shard indexes beside the shards say of them, for a plan: without digests, nothing of the shards is read.

    Returns:
        ``None`` where an index is missing, or does not say what these components hold: it knows class ids only.

    Raises:
        DataError: If what is there is no shard index.
    """
    if not set(components) <= {LABEL_COMPONENT}:
        return None
    parts: list[Contents] = []
    for name in names:
        if store.size(index_name(name)) is None:
            return None
        index = ShardIndex.from_bytes(store.read(index_name(name)), where=store.locate(index_name(name)))
        places = {component: index.offsets[component].tolist() for component in index.offsets}
        sizes = {component: index.sizes[component].tolist() for component in index.sizes}
        first: list[bytes] = []
        numbers: list[tuple[int, int, int]] = []
        for row, key in enumerate(index.keys):
            there = sorted((places[component][row], component) for component in places if places[component][row] >= 0)
            first.append(f"{key}.{there[0][1]}".encode())
            size = [sizes[component][row] for _, component in there]
            heads = (header_bytes(f"{key}.{c}", sizes[c][row]) for _, c in there)
            numbers.append((sum(size), len(size), sum(heads) + sum(-(-one // BLOCK) * BLOCK for one in size)))
        columns = np.array(numbers, np.int64).reshape(-1, 3)
        labels: list[bytes | None] = [None] * len(first)
        if index.labels is not None:
            has = (index.offsets[LABEL_COMPONENT] >= 0).tolist()
            labels = [
                str(label).encode() if there else None for label, there in zip(index.labels.tolist(), has, strict=True)
            ]
        parts.append(
            Contents(
                shards=(name,),
                starts=np.array([0, len(first)], np.int64),
                names=first,
                rows=np.zeros((len(first), 2), np.uint64),
                num_bytes=columns[:, 0],
                num_members=columns[:, 1],
                tar_bytes=columns[:, 2],
                checksums=np.array([index.shard_checksum], np.uint64),
                values=dict.fromkeys(components, labels),
            )
        )
    return join_contents(parts)
