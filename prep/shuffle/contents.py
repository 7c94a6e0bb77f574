"""Read the contents of shards: keys, sizes, and a digest of each sample's components; about 150 bytes a sample.

The contents of a shuffle's input are checked before it is planned, and compared with dSort's output: keys, names of
components and their bytes, each sample as often as it comes. The order of the samples does not count.
"""

import contextlib
import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
import xxhash

from dali_pipes.arrays import Bools, Int64s, UInt64s
from dali_pipes.data_set.indexing import find_manifest
from dali_pipes.errors import DataError, StoreError, printable, shown
from dali_pipes.formats.names import LABEL_COMPONENT, index_name, manifest_name, split_key
from dali_pipes.formats.tar_reader import BLOCK, LINKS, ArchiveReader
from dali_pipes.progress import bar
from dali_pipes.store.base import Store
from dali_pipes.store.shard_names import ObjectEntry
from dali_pipes.store.shard_set import ShardSet, check_bytes
from prep.shuffle.order import key_of
from prep.shuffle.request import Request
from prep.tar.writer import tar_bytes
from prep.workers import Report, Workers

if TYPE_CHECKING:
    from dali_pipes.formats.manifest import Manifest

MAX_VALUE_BYTES = 64 << 10
"""Bytes of a component by which samples can be ordered."""

SAMPLE = np.dtype(
    [("key", "u8"), ("content", "u8"), ("num_bytes", "i8"), ("num_members", "i8"), ("tar_bytes", "i8"), ("end", "i8")]
)
"""A sample: digests of its key and its components, in whatever order they stand; the components' bytes without headers
and padding, as dSort counts them, and their number; the bytes of all that in a tar that `prep.tar.writer` writes; and
the byte of its shard's tar at which its last member ends, padding included."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The samples of a set of shards, in order: names, sizes and digests."""

    shards: tuple[str, ...]
    starts: Int64s
    """int64 [shards + 1], the first sample of each shard."""
    names: Sequence[bytes]
    """Name of each sample's first member; its first part is the key."""
    samples: npt.NDArray[np.void]
    """`SAMPLE` [sample]."""
    checksums: Sequence[int]
    """XXH64 of each shard's tar; of a compressed shard, of the tar inside."""
    values: Mapping[str, Sequence[bytes | None]] = field(default_factory=dict)
    """The bytes of each component that was asked for; ``None`` where a sample lacks it."""
    has_digests: bool = True
    """Whether the samples have digests of contents; those that were read from shard indexes have 0 there."""

    @property
    def num_samples(self) -> int:
        return len(self.names)

    @cached_property
    def digests(self) -> UInt64s:
        """uint64 [sample, (key, content)]."""
        return np.stack([self.samples["key"], self.samples["content"]], axis=1)

    def name(self, position: int) -> str:
        """The name of a sample's first member."""
        return self.names[position].decode("utf-8", "surrogateescape")

    def shards_of(self, positions: Int64s) -> Int64s:
        """int64 [position], the shard of each sample, as a row of ``shards``."""
        return np.searchsorted(self.starts, positions, side="right") - 1

    def shard_of(self, position: int) -> str:
        return self.shards[int(np.searchsorted(self.starts, position, side="right")) - 1]

    def where(self, position: int) -> str:
        """Describe a sample in errors: ``shard 'a-0.tar', key '7'``."""
        return f"shard '{self.shard_of(position)}', key '{key_of(self.name(position))}'"


def read_contents(
    store: Store,
    names: Sequence[str],
    workers: Workers,
    *,
    components: Sequence[str] = (),
    what: str,
    show_progress: bool,
) -> Contents:
    """Read shards, several at a time, and digest every sample; keep the bytes of some ``components``, in lower case.

    Raises:
        DataError: If a shard is not a complete tar, or a sample has a link or a component twice.
    """
    with bar(what=what, total=len(names), unit="shards", shown=show_progress) as drawn:
        read = partial(_read_shard, store, components=tuple(components))
        parts = workers.map(read, names, name=lambda name: f"shard '{store.locate(name)}'", on_progress=drawn.update)
        return _join(list(parts))


def _read_shard(store: Store, name: str, report: Report, *, components: Sequence[str]) -> Contents:
    """Read the contents of one shard, front to back."""
    names: list[bytes] = []
    samples: list[tuple[int, ...]] = []
    values: dict[str, list[bytes | None]] = {component: [] for component in components}
    where = store.locate(name)
    with open_shard(store, name) as stream:
        archive = _LinkRefuser(stream, shard=where)
        for key, members in groupby(archive, key=attrgetter("key")):
            first_name, seen, kept = "", set(), {}
            content = num_bytes = num_tar_bytes = end = 0
            for member in members:
                if member.component in seen:
                    raise DataError(
                        f"shard '{where}', key '{key}': component '{member.component}' occurs twice, and "
                        "dSort keeps one of them; pack it anew"
                    )
                first_name = first_name or member.name
                seen.add(member.component)
                num_bytes += member.size
                num_tar_bytes += tar_bytes(member.name, member.size)
                end = member.offset + member.size + -member.size % BLOCK
                state = component_state(member.component)
                if member.component in components:
                    if member.size > MAX_VALUE_BYTES:  # those of all samples are in memory at a time
                        raise DataError(
                            f"key '{key}': component '{member.component}' has {member.size} bytes, samples are "
                            f"ordered by at most {MAX_VALUE_BYTES}; choose another component"
                        )
                    kept[member.component] = member.read()
                    state.update(kept[member.component])
                for piece in member.pieces():
                    state.update(piece)
                content = (content + state.intdigest()) % 2**64
            names.append(first_name.encode("utf-8", "surrogateescape"))
            samples.append((key_digest(key), content, num_bytes, len(seen), num_tar_bytes, end))
            for component, found in values.items():
                found.append(kept.get(component))
    report(1)
    return _of_shard(name, names, samples, checksum=archive.checksum, values=values)


def component_state(component: str) -> "xxhash.xxh64":
    """The state of a component's digest before its bytes; a sample's digest is the sum of these, modulo 2**64."""
    return xxhash.xxh64(component.encode("utf-8", "surrogateescape") + b"\0")


def key_digest(key: str) -> int:
    """XXH64 of a key."""
    # An archive may hold names that are not UTF-8.
    return int(xxhash.xxh64_intdigest(key.encode("utf-8", "surrogateescape")))


@contextlib.contextmanager
def open_shard(store: Store, name: str) -> Iterator[BinaryIO]:
    """Open a shard's tar, decompressed if the name says that it is compressed."""
    with store.open(name) as stream:
        if name.endswith(".tar"):
            yield stream
            return
        try:
            with gzip.GzipFile(fileobj=stream) as inside:
                yield cast("BinaryIO", inside)
        except (gzip.BadGzipFile, EOFError, zlib.error) as exc:
            raise DataError(f"shard '{store.locate(name)}' is not a complete gzip file: {exc}; pack it anew") from exc


class _LinkRefuser(ArchiveReader):
    """Refuses links: readers skip a link, so the sample would be written without that component."""

    def _skip_special(self, name: str, kind: int) -> None:
        if kind in LINKS and split_key(name) is not None:
            raise DataError(
                f"shard '{self._shard}', member '{printable(name)}': is a link, which no reader of shards follows; "
                "pack it anew (tar: --hard-dereference or -h)"
            )


def _read_indexes(shards: ShardSet, manifest: "Manifest", *, components: Sequence[str]) -> Contents | None:
    """Read the contents from the shard indexes: no shard is read, so the digests of contents are zero.

    ``None`` if an index is missing. Raises `DataError` if one is broken, or of another shard.
    """
    parts: list[Contents] = []
    store = shards.store
    listed = manifest.rows_of(shards.names, where=store.locate(manifest_name(shards.prefix)))
    for name, shard in zip(shards.names, listed.tolist(), strict=True):
        data = store.find(index_name(name))
        if data is None:
            return None
        index = manifest.shard_index(shard, data, where=store.locate(index_name(name)))
        offsets = {component: column.tolist() for component, column in index.offsets.items()}
        sizes = {component: column.tolist() for component, column in index.sizes.items()}
        names: list[bytes] = []
        samples: list[tuple[int, ...]] = []
        for row, key in enumerate(index.keys):
            there = sorted((offsets[c][row], c, sizes[c][row]) for c in offsets if offsets[c][row] >= 0)
            names.append(f"{key}.{there[0][1]}".encode())
            last, _, size = there[-1]
            num_tar_bytes = sum(tar_bytes(f"{key}.{c}", size) for _, c, size in there)
            num_bytes = sum(size for _, _, size in there)
            end = last + size + -size % BLOCK
            samples.append((key_digest(key), 0, num_bytes, len(there), num_tar_bytes, end))
        labels: list[bytes | None] = [None] * len(names)
        if index.labels is not None:
            has_label = zip(index.labels.tolist(), offsets[LABEL_COMPONENT], strict=True)
            labels = [str(label).encode() if offset >= 0 else None for label, offset in has_label]
        values = dict.fromkeys(components, labels)
        parts.append(_of_shard(name, names, samples, checksum=index.shard_checksum, values=values, has_digests=False))
    return _join(parts)


def _of_shard(
    name: str, names: Sequence[bytes], samples: Sequence[tuple[int, ...]], *, checksum: int, **columns: Any
) -> Contents:
    starts = np.array([0, len(names)], np.int64)
    rows = np.array(samples, SAMPLE)
    return Contents(shards=(name,), starts=starts, names=names, samples=rows, checksums=[checksum], **columns)


def _join(parts: Sequence[Contents]) -> Contents:
    return Contents(
        shards=tuple(shard for part in parts for shard in part.shards),
        starts=np.cumsum([0, *(part.num_samples for part in parts)], dtype=np.int64),
        names=[name for part in parts for name in part.names],
        samples=np.concatenate([part.samples for part in parts]),
        checksums=[checksum for part in parts for checksum in part.checksums],
        values={c: [value for part in parts for value in part.values[c]] for c in parts[0].values},
        has_digests=all(part.has_digests for part in parts),
    )


def read_input(request: Request, entries: Sequence[ObjectEntry], workers: Workers) -> Contents:
    """Read the contents of the input, from its shard indexes if that is enough: for a dry run or an exchange.

    ``entries`` are the shards as the store lists them. For the errors see `prep.shuffle.shuffle.shuffle`.
    """
    shards, algorithm = request.shards, request.algorithm
    components = {algorithm.component.lower()} if algorithm.component else set()
    components |= {LABEL_COMPONENT} if request.needs_labels else set()
    manifest = find_manifest(shards) if request.input_extension == ".tar" else None
    # Shard indexes have neither the case of names nor the bytes of components, but they have the labels.
    is_enough = request.dry_run or (request.is_exchange and algorithm.kind in ("shuffle", "none"))
    if manifest is not None and is_enough and components <= {LABEL_COMPONENT}:
        sizes = dict(zip(manifest.names, manifest.shard_bytes.tolist(), strict=True))
        if all(sizes.get(entry.name) == entry.size for entry in entries):
            found = _read_indexes(shards, manifest, components=sorted(components))
            if found is not None:
                _check_unique(shards.store, found)
                return found
    if not request.part.is_all:
        raise StoreError(
            f"'{shards.url}': parts of a shuffle plan by the shard indexes of the input, and it has no complete ones, "
            f"or is ordered by '{algorithm.kind}', which they do not know; {shards.index_command}, or shuffle it "
            "without --part"
        )
    contents = read_contents(
        shards.store,
        shards.names,
        workers,
        components=sorted(components),
        what="read",
        show_progress=request.show_progress,
    )
    counts = {} if manifest is None else dict(zip(manifest.names, manifest.samples.tolist(), strict=True))
    for entry, checksum, count in zip(entries, contents.checksums, np.diff(contents.starts).tolist(), strict=True):
        if request.input_extension == ".tar":
            check_bytes(shards.store, entry, checksum)
        if counts.get(entry.name, count) != count:
            raise DataError(
                f"manifest '{shards.store.locate(manifest_name(shards.prefix))}' counts {counts[entry.name]} samples "
                f"in '{entry.name}', the shard holds {count}; index the shards again: dali-pipes prep index "
                f"{shards.url}"
            )
    if not contents.num_samples:
        raise DataError(f"'{shards.url}': the {len(shards.names)} shards hold no sample")
    _check_unique(shards.store, contents)
    return contents


def _check_unique(store: Store, contents: Contents) -> None:
    keys, counts = np.unique(contents.samples["key"], return_counts=True)
    if (counts > 1).any():
        found = sorted(_find_keys([contents], keys[counts > 1]).values())
        raise DataError(
            f"'{store.url}': {len(found)} keys come more than once in the {len(contents.shards)} shards: "
            f"{shown(found)}; shuffled, two of them could stand together and be read as one sample: "
            "pack them with other keys"
        )


def check_same(store: Store, went_in: Contents, came_out: Contents, *, kept: Bools | None) -> None:
    """Refuse an output, in ``store``, that does not hold exactly the input's samples; the error names some of them.

    ``kept`` is bool [sample], which of the input's samples should come out; ``None``: all.
    """
    expected = went_in.digests if kept is None else went_in.digests[kept]
    rows, inverse = np.unique(np.concatenate([expected, came_out.digests]), axis=0, return_inverse=True)
    counts = np.bincount(inverse.ravel()[: len(expected)], minlength=len(rows))
    counts -= np.bincount(inverse.ravel()[len(expected) :], minlength=len(rows))
    if not counts.any():
        return
    lost = set(rows[counts > 0][:, 0].tolist())
    gained = set(rows[counts < 0][:, 0].tolist())
    keys = _find_keys([went_in, came_out], np.array(sorted(lost | gained), np.uint64))
    findings = [
        f"{len(digests)} {what} ({shown(sorted(keys[digest] for digest in digests))})"
        for what, digests in (("missing", lost - gained), ("extra", gained - lost), ("changed", lost & gained))
        if digests
    ]
    raise DataError(
        f"dSort changed the data: {len(expected)} samples went in, {came_out.num_samples} came out of '{store.url}': "
        f"{', '.join(findings)}. Do not use '{store.locate(came_out.shards[0])}' and the following; "
        "the input is as it was"
    )


def _find_keys(sides: Sequence[Contents], digests: UInt64s) -> dict[int, str]:
    """The keys that have these digests."""
    return {
        int(side.samples["key"][position]): key_of(side.name(position))
        for side in sides
        for position in np.flatnonzero(np.isin(side.samples["key"], digests)).tolist()
    }
