"""Read the input of a shuffle and check it, and compare the output with it.

The comparison counts keys, names of components and their bytes, each sample as often as it comes. The order of the
samples does not count.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dali_pipes.data_set.indexing import find_manifest
from dali_pipes.errors import DataError, StoreError, shown
from dali_pipes.formats.names import LABEL_COMPONENT, manifest_name
from dali_pipes.store.base import Store
from dali_pipes.store.shard_set import check_bytes
from prep.shuffle.contents import Contents, UInt64s, indexed_contents, read_contents, sorted_rows
from prep.shuffle.order import key_of
from prep.shuffle.request import Request
from prep.workers import Workers

# Orders that shard indexes are enough for: they have neither the case of names nor the bytes of components.
_BY_KEYS = ("shuffle", "none")


def read_input(request: Request, workers: Workers | None = None) -> Contents:
    """Read the contents of the input, from its shard indexes if that is enough: for a dry run or an exchange.

    Args:
        request: The shuffle.
        workers: Reads the shards; ``None``: threads of this process.

    Raises:
        StoreError: If a shard does not exist.
        DataError: See `prep.shuffle.shuffle.shuffle`.
    """
    shards, algorithm = request.shards, request.algorithm
    entries = {entry.name: entry for entry in shards.entries()}
    components = {algorithm.component.lower()} if algorithm.component else set()
    components |= {LABEL_COMPONENT} if request.needs_labels else set()
    manifest = find_manifest(shards) if all(name.endswith(".tar") for name in shards.names) else None
    if manifest is not None and (request.dry_run or (request.is_exchange and algorithm.kind in _BY_KEYS)):
        sizes = dict(zip(manifest.names, manifest.shard_bytes.tolist(), strict=True))
        if all(sizes.get(name) == entries[name].size for name in shards.names):
            found = indexed_contents(shards, manifest, components=sorted(components))
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
        components=sorted(components),
        what="read",
        show_progress=request.show_progress,
        workers=workers,
    )
    for name, checksum in zip(contents.shards, contents.checksums.tolist(), strict=True):
        if name.endswith(".tar"):
            check_bytes(shards.store, entries[name], checksum)
    counts = {} if manifest is None else dict(zip(manifest.names, manifest.samples.tolist(), strict=True))
    for name, count in zip(shards.names, np.diff(contents.starts).tolist(), strict=True):
        if counts.get(name, count) != count:
            raise DataError(
                f"manifest '{shards.store.locate(manifest_name(shards.prefix))}' counts {counts[name]} samples in "
                f"'{name}', the shard holds {count}; index the shards again: dali-pipes prep index {shards.url}"
            )
    if not contents.num_samples:
        raise DataError(f"'{shards.url}': the {len(shards.names)} shards hold no sample")
    _check_unique(shards.store, contents)
    return contents


def _check_unique(store: Store, contents: Contents) -> None:
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
    """Refuse an output that does not hold exactly the input's samples.

    Args:
        store: The output's store.
        went_in: The input's contents.
        came_out: The output's contents.
        kept: bool [sample], which of the input's samples should come out; ``None``: all.

    Raises:
        DataError: If samples are missing, extra or changed; names some of them.
    """
    expected = went_in.sorted_rows if kept is None else sorted_rows(went_in.rows[kept])
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
        int(side.rows[position, 0]): key_of(side.name(position))
        for side in sides
        for position in np.flatnonzero(np.isin(side.rows[:, 0], digests)).tolist()
    }
