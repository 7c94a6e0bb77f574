"""The state of every shard of one cache file, in a table that all processes of a node map: who fills it, who holds it.

Nothing here locks: the caller has the cache's mutex (`dali_pipes.cache.cache`). A process changes the table between two
writes of ``dirty``. If it is killed in between, the next process sees that, and computes the derived columns again from
the states.

A shard's life: ``EMPTY`` -> ``FILLING`` (its owner writes) -> ``READY`` (whole and checked) -> ``DROPPING`` (its owner
frees its blocks) -> ``EMPTY``. ``UNCHECKED``: it was ready before the machine was restarted. It must be checked again,
because bytes that the disk had not yet written are lost with the power. ``CHECKING``: its owner takes its checksum, and
fetches it again if that is wrong; if the owner ends before, the shard is ``UNCHECKED``.

# Note [checked]: a cache file that is kept may be changed while nobody uses it. So ``checked`` marks the ready shards
whose bytes were written or checked since the cache file was last unused. `dali_pipes.cache.share` decides by it which
ready shards a loader may read at once.
"""

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from dali_pipes.arrays import Bools, Int64s
from dali_pipes.cache.directory import DamagedFileError, open_own
from dali_pipes.cache.extents import punch
from dali_pipes.errors import CacheError

NUM_SLOTS = 256
"""Loaders that can use one cache directory at a time: each has a slot, and a row of holds in its cache file's table."""

PAGE = mmap.PAGESIZE
NOBODY = -1
_MAGIC = 0x3354_4950_494C_4144  # "DALIPIT3" in the file
_HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("num_shards", "<i8"),
        ("num_resident", "<i8"),
        ("resident_bytes", "<i8"),
        ("boot", "<u8"),
        ("starts_checksum", "<u8"),
        ("dirty", "u1"),
        ("keep", "u1"),
    ]
)


class State(IntEnum):
    """State of a shard's extent."""

    EMPTY = 0
    FILLING = 1
    READY = 2
    DROPPING = 3
    UNCHECKED = 4
    CHECKING = 5


def is_unfinished(states: npt.NDArray[np.uint8]) -> Bools:
    """Mark the shards that are being filled, checked or dropped."""
    unfinished: Bools = (states == State.FILLING) | (states == State.DROPPING) | (states == State.CHECKING)
    return unfinished


class StateTable:
    """The table of one cache file, mapped. Columns are numpy views of the file.

    Args:
        path: The table's file.
        starts: Extents, from `extent_starts`, for a new file; ``None`` opens an existing one.
        sizes: Bytes that each shard takes, for a new file: int64 [shards].
        directory: Descriptor of the directory that ``path`` is relative to; ``None``: the working directory.

    Raises:
        CacheError: If there is no space for the file.
        DamagedFileError: If it is not a table of this version, or not a file of this user.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        starts: Int64s | None = None,
        sizes: Int64s | None = None,
        directory: int | None = None,
    ) -> None:
        self._file = open_own(path, directory=directory, flags=0 if starts is None else os.O_CREAT | os.O_EXCL)
        try:
            if starts is not None and sizes is not None:
                self._create(starts, sizes)
            head = os.pread(self._file, _HEADER.itemsize, 0)
            if len(head) < _HEADER.itemsize or (header := np.frombuffer(head, _HEADER)[0])["magic"] != _MAGIC:
                raise DamagedFileError(f"'{path}' is not a state table of this version")
            self.num_shards, found = int(header["num_shards"]), os.fstat(self._file).st_size
            # The layout of far too many shards would overflow.
            places, size = _layout(self.num_shards if 0 <= self.num_shards <= found else 0)
            if (self.num_shards,) != places["state"][2] or size != found:
                raise DamagedFileError(f"'{path}' has {found} bytes, which do not fit its {self.num_shards} shards")
            self._map = mmap.mmap(self._file, size)
        except BaseException:
            os.close(self._file)
            raise
        view: Any = {
            name: np.ndarray(shape, dtype, self._map, offset) for name, (offset, dtype, shape) in places.items()
        }
        self._header = view["header"]
        self.starts: Int64s = view["starts"]
        self.sizes: Int64s = view["sizes"]
        """int64 [shards]: bytes that the shard takes. If only some of its samples are brought, these are less than its
        extent, and an estimate until it is `READY` for the first time."""
        self.state: npt.NDArray[np.uint8] = view["state"]
        self.owner: npt.NDArray[np.int16] = view["owner"]
        """int16 [shards]: the slot that fills, checks or drops the shard; `NOBODY` if there is none."""
        self.used_ns: Int64s = view["used_ns"]
        """When a loader last ended its hold of the shard, in ns of the wall clock."""
        self._resident: Int64s = view["resident"]  # the shards that are not EMPTY, in no order
        self._place: Int64s = view["place"]  # the position of each shard in it
        self.checked: npt.NDArray[np.uint8] = view["checked"]
        """uint8 [shards]: Note [checked]."""
        self.holds: npt.NDArray[np.uint8] = view["holds"]
        """uint8 [slots, shards]: 1 if the slot's loader holds the shard."""

    @property
    def resident(self) -> Int64s:
        """The shards that take space, in no order: a copy."""
        return np.array(self._resident[: int(self._header["num_resident"])])

    @property
    def resident_bytes(self) -> int:
        return int(self._header["resident_bytes"])

    @property
    def keep(self) -> bool:
        """Whether the cache file stays when nobody uses it."""
        return bool(self._header["keep"])

    def set_keep(self) -> None:
        self._header["keep"] = 1

    @property
    def is_dirty(self) -> bool:
        """Whether a change was interrupted, so that the derived columns need `repair`."""
        return bool(self._header["dirty"])

    def extent_bytes(self, shards: Int64s | Sequence[int]) -> Int64s:
        """Bytes that each of these shards takes: int64 [N]."""
        sizes: Int64s = self.sizes[np.asarray(shards, np.int64)]
        return sizes

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Wrap every change, so that it is repaired if an exception or the end of the process interrupts it."""
        if self._header["dirty"]:
            self.repair()
        self._header["dirty"] = 1
        try:
            yield
        except BaseException:
            self.repair()
            raise
        self._header["dirty"] = 0

    def check(self, *, file_bytes: int) -> None:
        """Check what the file says before it is used; ``file_bytes`` is the size of the cache file.

        The derived columns are computed again. Any value of the others is harmless.

        Raises:
            DamagedFileError: If it was changed, or the cache file was cut.
        """
        if xxhash.xxh64_intdigest(self.starts) != int(self._header["starts_checksum"]):
            raise DamagedFileError("its extents were changed")
        if file_bytes != int(self.starts[-1]):
            raise DamagedFileError(f"its cache file has {file_bytes} bytes, and its extents {int(self.starts[-1])}")
        if ((self.sizes < 0) | (self.sizes > np.diff(self.starts))).any():
            raise DamagedFileError("it has shards that are larger than their extents")
        if (self.state > max(State)).any() or ((self.owner < NOBODY) | (self.owner >= NUM_SLOTS)).any():
            raise DamagedFileError("it has states or owners that do not exist")
        self.repair()

    def fill(self, shards: Int64s | Sequence[int], slot: int) -> None:
        """``EMPTY`` -> ``FILLING``, ``READY`` or ``UNCHECKED`` -> ``CHECKING``; held by the slot."""
        for shard in np.asarray(shards, np.int64).tolist():
            self.owner[shard] = slot
            self.holds[slot, shard] = 1
            if self.state[shard] != State.EMPTY:
                self.state[shard] = State.CHECKING
                continue
            last = int(self._header["num_resident"])
            self._resident[last], self._place[shard] = shard, last
            self._header["num_resident"] = last + 1
            self._header["resident_bytes"] += int(self.sizes[shard])
            self.state[shard] = State.FILLING

    def finish(self, shards: Int64s | Sequence[int], sizes: Int64s | None = None) -> None:
        """``FILLING`` or ``CHECKING`` -> ``READY``; ``sizes`` are the bytes that these take, if that is known now."""
        rows = np.asarray(shards, np.int64)
        if sizes is not None:
            self._header["resident_bytes"] += int((sizes - self.sizes[rows]).sum())
            self.sizes[rows] = sizes
        self.owner[rows] = NOBODY
        self.checked[rows] = 1
        self.state[rows] = State.READY

    def end_check(self, shards: Int64s) -> Int64s:
        """``CHECKING`` -> ``UNCHECKED``: the bytes stay, and the next loader checks them. Returns the other shards."""
        is_check = self.state[shards] == State.CHECKING
        self.owner[shards[is_check]] = NOBODY
        self.state[shards[is_check]] = State.UNCHECKED
        others: Int64s = shards[~is_check]
        return others

    def drop(self, shards: Int64s | Sequence[int], slot: int) -> None:
        """-> ``DROPPING``: the slot's loader is about to free the blocks of these shards."""
        rows = np.asarray(shards, np.int64)
        self.owner[rows] = slot
        self.state[rows] = State.DROPPING

    def remove(self, shards: Int64s | Sequence[int]) -> None:
        """``DROPPING`` -> ``EMPTY``: the blocks are freed."""
        for shard in np.asarray(shards, np.int64).tolist():
            if self.state[shard] != State.DROPPING:
                continue
            self.state[shard] = State.EMPTY
            self.owner[shard] = NOBODY
            last = int(self._header["num_resident"]) - 1
            place, moved = int(self._place[shard]), int(self._resident[last])
            self._resident[place], self._place[moved] = moved, place
            self._header["num_resident"] = last
            self._header["resident_bytes"] -= int(self.sizes[shard])

    def held(self, shards: Int64s, slots: Sequence[int]) -> Bools:
        """Mark the ``shards`` that one of ``slots`` holds: bool [N]."""
        found: npt.NDArray[np.uint8] = np.zeros(len(shards), np.uint8)
        for slot in slots:  # row by row: half the time of one lookup in two dimensions
            found |= self.holds[slot][shards]
        is_held: Bools = found != 0
        return is_held

    def open_row(self, slot: int) -> None:
        """Make an empty row of holds for a slot; its pages are reserved, so that writing there cannot fail later."""
        self._reserve(*self._row(slot))
        self.holds[slot] = 0

    def repair(self) -> None:
        """Compute the derived columns from the states."""
        resident = np.flatnonzero(self.state != State.EMPTY)
        self._resident[: len(resident)] = resident
        self._place[resident] = np.arange(len(resident))
        self._header["num_resident"] = len(resident)
        self._header["resident_bytes"] = int(self.extent_bytes(resident).sum())
        self._header["dirty"] = 0

    def greet(self, boot: int, *, file: int) -> None:
        """After a restart of the machine, mark ready shards ``UNCHECKED`` and free all other blocks of the cache file.

        Nothing else in the table is reliable: some of its pages had reached the disk, and others had not.
        """
        if int(self._header["boot"]) == boot:
            return
        with self.changing():
            first, size = self._row(0)[0], os.fstat(self._file).st_size
            punch(self._file, first, size - first)
            self.owner[:] = NOBODY
            kept = np.isin(self.state, [State.READY, State.UNCHECKED, State.CHECKING])
            # One call for each run of neighbours that are not kept.
            edges = np.flatnonzero(np.diff(np.concatenate([[True], kept, [True]])))
            for start, stop in self.starts[edges].reshape(-1, 2).tolist():
                punch(file, start, stop - start)
            self.state[:] = np.where(kept, State.UNCHECKED, State.EMPTY)
            self.repair()
            self._header["dirty"] = 1
            self._header["boot"] = boot

    def close(self) -> None:
        """Close the file; the views stay mapped until they are collected. Can be called twice."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _reserve(self, start: int, size: int) -> None:
        # On a full tmpfs a write to a page that does not exist is a SIGBUS.
        try:
            os.posix_fallocate(self._file, start, size)
        except OSError as exc:
            raise CacheError(f"no space for {size} bytes of the cache's table: {exc.strerror}") from exc

    def _row(self, slot: int) -> tuple[int, int]:
        places, size = _layout(self.num_shards)
        start = places["holds"][0] + slot * self.num_shards
        first = start // PAGE * PAGE
        return first, min(-(-(start + self.num_shards) // PAGE) * PAGE, size) - first

    def _create(self, starts: Int64s, sizes: Int64s) -> None:
        places, size = _layout(len(starts) - 1)
        os.ftruncate(self._file, size)
        self._reserve(0, places["holds"][0])  # the rows of holds are reserved one by one
        header = np.zeros((), _HEADER)
        header["num_shards"], header["boot"] = len(starts) - 1, boot_id()
        extents = np.ascontiguousarray(starts, np.int64).tobytes()
        header["starts_checksum"] = xxhash.xxh64_intdigest(extents)
        os.pwrite(self._file, extents, places["starts"][0])
        os.pwrite(self._file, np.ascontiguousarray(sizes, np.int64).tobytes(), places["sizes"][0])
        os.pwrite(self._file, np.full(len(starts) - 1, NOBODY, np.int16).tobytes(), places["owner"][0])
        header["magic"] = _MAGIC
        os.pwrite(self._file, header.tobytes(), 0)
        # Columns that are never written again must survive a power failure; `greet` repairs others; sizes may be old.
        os.fsync(self._file)


def boot_id() -> int:
    """A number that changes each time the machine is started."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return 0
    return int(text.replace("-", "")[:16], 16)


def _layout(num_shards: int) -> tuple[dict[str, tuple[int, Any, tuple[int, ...]]], int]:
    """Offset, dtype and shape of each column, and the size of the file."""
    columns: list[tuple[str, Any, tuple[int, ...]]] = [
        ("header", _HEADER, ()),
        ("starts", np.int64, (num_shards + 1,)),
        ("sizes", np.int64, (num_shards,)),
        ("used_ns", np.int64, (num_shards,)),
        ("resident", np.int64, (num_shards,)),
        ("place", np.int64, (num_shards,)),
        ("owner", np.int16, (num_shards,)),
        ("state", np.uint8, (num_shards,)),
        ("checked", np.uint8, (num_shards,)),
        ("holds", np.uint8, (NUM_SLOTS, num_shards)),
    ]
    places, position = {}, 0
    for name, dtype, shape in columns:
        places[name] = (position, dtype, shape)
        size = int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))
        position = -(-(position + size) // PAGE) * PAGE
    return places, position
