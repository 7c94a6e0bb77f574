"""Compare the output of a shuffle with its input, and refuse duplicate keys.

Keys and components' names and bytes count, each sample as often as it comes; the order of samples does not.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import DataError, shown
from dali_pipes.store.base import Store
from prep.shuffle.contents import Contents, sorted_rows
from prep.shuffle.order import key_of

UInt64s = npt.NDArray[np.uint64]


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
    """Refuse an output that holds other samples than went in.

    Args:
        store: Of the output.
        went_in: The input's contents.
        came_out: The output's contents.
        kept: bool [sample], which of the input's samples should come out; ``None``: all.

    Raises:
        DataError: Names some samples that are missing, extra or changed.
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
