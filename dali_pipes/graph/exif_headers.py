"""Read the orientations of a batch's photos together, from EXIF blocks in the one buffer in which their bytes lie.

It says the same as `dali_pipes.formats.orientation.exif_orientation`, or leaves a block to it.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.arrays import Int64s
from dali_pipes.formats.orientation import FRACTION_BYTES, ORIENTATION_TAG, TEXT_TAGS, UPRIGHT

UInt8s = npt.NDArray[np.uint8]

# Entries of a directory that are looked at together; cameras write 8 to 20.
_MAX_ENTRIES = 32
_TEXT = 255
_SHORT = 3
_HEAD_BYTES = 8
_ENTRY_BYTES = 12


def _kinds_of_tags() -> UInt8s:
    """What an entry points to, by its tag: nothing that matters, a text, or this number of bytes."""
    kinds = np.zeros(1 << 16, np.uint8)
    kinds[list(TEXT_TAGS)] = _TEXT
    for tag, num_bytes in FRACTION_BYTES.items():
        kinds[tag] = num_bytes
    return kinds


_KINDS = _kinds_of_tags()


def read_plain_orientations(buffer: UInt8s, starts: Int64s, stops: Int64s) -> Int64s:
    """The orientation in each of N blocks, 1 to 8; 0 where a block is not plain, or must be read alone: int64 [N].

    ``starts`` and ``stops`` are the blocks' places in ``buffer``, which goes on for eight bytes behind each stop.
    """
    found = np.zeros(len(starts), np.int64)
    is_long = stops - starts >= _HEAD_BYTES + 2
    words = _numbers(buffer, ">u4")
    marks = words[np.where(is_long, starts, 0)]
    for order, mark in (("<", 0x49492A00), (">", 0x4D4D002A)):
        rows = np.flatnonzero(is_long & (marks == mark))
        if len(rows):
            found[rows] = _read(buffer, starts[rows], stops[rows], order)
    return found


def _read(buffer: UInt8s, starts: Int64s, stops: Int64s, order: str) -> Int64s:
    """The same for blocks of one byte order."""
    shorts, longs = _numbers(buffer, f"{order}u2"), _numbers(buffer, f"{order}u4")
    sizes = stops - starts
    first = longs[starts + 4].astype(np.int64)
    is_read = first + 2 <= sizes
    first = np.where(is_read, first, 0)
    num = shorts[starts + first].astype(np.int64)
    is_read &= (num <= _MAX_ENTRIES) & (first + 2 + _ENTRY_BYTES * num <= sizes)
    num = np.where(is_read, num, 0)
    entry = np.arange(num.max())
    is_there = entry < num[:, None]  # [row, entry]
    at = np.where(is_there, (starts + first)[:, None] + 2 + _ENTRY_BYTES * entry, starts[:, None])
    tags = shorts[at]
    kinds = _KINDS[tags] * is_there
    counts, places = longs[at + 4].astype(np.int64), longs[at + 8].astype(np.int64)
    reach = np.where(kinds == _TEXT, np.where(counts > 4, places + counts, 0), (places + kinds) * (kinds > 0))
    is_read &= (reach <= sizes[:, None]).all(axis=1)
    is_orientation = (tags == ORIENTATION_TAG) & is_there
    num_orientations = np.count_nonzero(is_orientation, axis=1)
    is_read &= num_orientations <= 1
    value = np.full(len(starts), UPRIGHT, np.int64)
    if (rows := np.flatnonzero(is_read & (num_orientations == 1))).size:
        place = at[rows, np.argmax(is_orientation[rows], axis=1)]
        is_read[rows] &= (shorts[place + 2] == _SHORT) & (longs[place + 4] == 1)
        given = shorts[place + 8].astype(np.int64)
        value[rows] = np.where((given >= 1) & (given <= 8), given, UPRIGHT)
    return value * is_read


def _numbers(buffer: UInt8s, dtype: str) -> npt.NDArray[Any]:
    """The numbers of this kind that begin at each byte of a buffer."""
    kind = np.dtype(dtype)
    return np.ndarray(len(buffer) - kind.itemsize + 1, kind, buffer, strides=(1,))
