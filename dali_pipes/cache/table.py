"""The state of every shard of one image, in a file that all processes of a node map: who fills, who holds, what is old.

Nothing here locks: the caller has the cache's mutex (`dali_pipes.cache.cache`). What a process does to the table it
does between two writes of ``dirty``, so that whoever comes after one that was killed in the middle knows, and puts the
derived columns right again.

A shard's life: ``EMPTY`` -> ``FILLING`` (its owner writes) -> ``READY`` (whole and checked) -> ``DROPPING`` (its owner
punches) -> ``EMPTY``. ``UNCHECKED``: it was ready before the machine was started anew, and is believed only after its
checksum was taken again, because what a disk had not yet written is lost with the power.
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

from dali_pipes.cache.blocks import punch
from dali_pipes.errors import CacheError

__all__ = ["NUM_SLOTS", "State", "StateTable", "boot_id"]

NUM_SLOTS = 256
"""Loaders that can use one cache directory at a time: each has a slot, and a row of holds in its image's table."""

PAGE = mmap.PAGESIZE
NOBODY = -1
_MAGIC = 0x3154_4950_494C_4144  # "DALIPIT1" in the file
_HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("num_shards", "<i8"),
        ("num_resident", "<i8"),
        ("resident_bytes", "<i8"),
        ("boot", "<u8"),
        ("dirty", "u1"),
        ("keep", "u1"),
    ]
)

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class State(IntEnum):
    """What a shard's extent holds."""

    EMPTY = 0
    FILLING = 1
    READY = 2
    DROPPING = 3
    UNCHECKED = 4


class StateTable:
    """One image's table, mapped. Columns are numpy views of the file; all are int64 but where said.

    Args:
        path: The table's file.
        starts: Extents, from `extent_starts`, to make a new file with; ``None`` opens one that is there.

    Raises:
        CacheError: If the file is none of this version, or there is no room for it.
    """

    def __init__(self, path: Path, *, starts: Int64s | None = None) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if starts is not None else 0)
        self._file = os.open(path, flags, 0o600)
        try:
            if starts is not None:
                self._create(starts)
            head = os.pread(self._file, _HEADER.itemsize, 0)
            if len(head) < _HEADER.itemsize or (header := np.frombuffer(head, _HEADER)[0])["magic"] != _MAGIC:
                raise CacheError(f"'{path}' is no state table of this version; remove it: dali-pipes cache clear")
            self.num_shards = int(header["num_shards"])
            places, size = _layout(self.num_shards)
            if os.fstat(self._file).st_size != size:
                raise CacheError(f"'{path}' is cut off; remove it: dali-pipes cache clear")
            self._map = mmap.mmap(self._file, size)
        except BaseException:
            os.close(self._file)
            raise
        view: Any = {
            name: np.ndarray(shape, dtype, self._map, offset) for name, (offset, dtype, shape) in places.items()
        }
        self._header = view["header"]
        self.starts: Int64s = view["starts"]
        self.state: npt.NDArray[np.uint8] = view["state"]
        self.owner: npt.NDArray[np.int16] = view["owner"]
        """The slot that fills or drops the shard, else `NOBODY`."""
        self.used_ns: Int64s = view["used_ns"]
        """When the shard was last given up by a holder, in ns of the wall clock."""
        self._resident: npt.NDArray[np.int64] = view["resident"]  # the shards that are not EMPTY, in no order
        self._place: npt.NDArray[np.int64] = view["place"]  # where in it
        self.holds: npt.NDArray[np.uint8] = view["holds"]
        """uint8 [slots, shards]: 1 where the slot's loader needs the shard to stay."""

    @property
    def resident(self) -> Int64s:
        """The shards that take room, in no order: a copy."""
        return np.array(self._resident[: int(self._header["num_resident"])])

    @property
    def resident_bytes(self) -> int:
        """Bytes of their extents."""
        return int(self._header["resident_bytes"])

    @property
    def keep(self) -> bool:
        """Whether the image stays when nobody uses it."""
        return bool(self._header["keep"])

    @property
    def is_dirty(self) -> bool:
        """Whether a change was cut short and the derived columns wait for `repair`."""
        return bool(self._header["dirty"])

    def set_keep(self) -> None:
        """Let the image stay when nobody uses it."""
        self._header["keep"] = 1

    def extent_bytes(self, shards: Int64s | Sequence[int]) -> Int64s:
        """What each of these shards takes: int64 [N]."""
        rows = np.asarray(shards, np.int64)
        return self.starts[rows + 1] - self.starts[rows]

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around every change: what is cut short, by an exception or by the end of the process, is put right."""
        if self._header["dirty"]:
            self.repair()
        self._header["dirty"] = 1
        try:
            yield
        except BaseException:
            self.repair()
            raise
        self._header["dirty"] = 0

    def fill(self, shard: int, slot: int) -> None:
        """``EMPTY`` or ``UNCHECKED`` -> ``FILLING``, held by the slot."""
        self.owner[shard] = slot
        self.holds[slot, shard] = 1
        if self.state[shard] == State.EMPTY:
            self._add(shard)
        self.state[shard] = State.FILLING

    def finish(self, shard: int) -> None:
        """``FILLING`` -> ``READY``."""
        self.owner[shard] = NOBODY
        self.state[shard] = State.READY

    def drop(self, shards: Int64s | Sequence[int], slot: int) -> None:
        """-> ``DROPPING``: the slot's loader is about to punch these."""
        rows = np.asarray(shards, np.int64)
        self.owner[rows] = slot
        self.state[rows] = State.DROPPING

    def remove(self, shards: Int64s | Sequence[int]) -> None:
        """``DROPPING`` -> ``EMPTY``: the holes are punched."""
        for shard in np.asarray(shards, np.int64).tolist():
            if self.state[shard] != State.DROPPING:
                continue
            self.state[shard] = State.EMPTY
            self.owner[shard] = NOBODY
            last = int(self._header["num_resident"]) - 1
            place, moved = int(self._place[shard]), int(self._resident[last])
            self._resident[place], self._place[moved] = moved, place
            self._header["num_resident"] = last
            self._header["resident_bytes"] -= int(self.starts[shard + 1] - self.starts[shard])

    def held(self, shards: Int64s, slots: Sequence[int]) -> Bools:
        """Which of ``shards`` one of ``slots`` holds: bool [N]."""
        found: npt.NDArray[np.uint8] = np.zeros(len(shards), np.uint8)
        for slot in slots:  # row by row: half the time of one lookup in two dimensions
            found |= self.holds[slot][shards]
        return found.view(np.bool_)

    def open_row(self, slot: int) -> None:
        """Make a slot's row of holds, empty; its pages are reserved, so that writing there cannot fail later.

        Raises:
            CacheError: If there is no room.
        """
        start, size = self._row(slot)
        try:
            os.posix_fallocate(self._file, start, size)
        except OSError as exc:
            raise CacheError(f"no room for {size} bytes of the cache's table: {exc.strerror}") from exc
        self.holds[slot] = 0

    def repair(self) -> None:
        """Make the derived columns anew from the states."""
        resident = np.flatnonzero(self.state != State.EMPTY)
        self._resident[: len(resident)] = resident
        self._place[resident] = np.arange(len(resident))
        self._header["num_resident"] = len(resident)
        self._header["resident_bytes"] = int(self.extent_bytes(resident).sum())
        self._header["dirty"] = 0

    def greet(self, boot: int, *, file: int) -> None:
        """After a start of the machine: what was ready is to be checked, all else of the image is punched.

        Nothing else is believed: what of the table had reached the disk is one page's news and another's old state.

        Args:
            boot: See `boot_id`.
            file: The cache file, open.
        """
        if int(self._header["boot"]) == boot:
            return
        with self.changing():
            first, size = self._row(0)[0], os.fstat(self._file).st_size
            punch(self._file, first, size - first)
            self.owner[:] = NOBODY
            kept = (self.state == State.READY) | (self.state == State.UNCHECKED)
            # From each run of shards that go to its end, in one call.
            edges = np.flatnonzero(np.diff(np.concatenate([[True], kept, [True]])))
            for start, stop in self.starts[edges].reshape(-1, 2).tolist():
                punch(file, start, stop - start)
            self.state[:] = np.where(kept, State.UNCHECKED, State.EMPTY)
            self.repair()
            self._header["dirty"] = 1
            self._header["boot"] = boot

    def close(self) -> None:
        """Close the file. The views stay mapped until they are collected. Can be called twice."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _add(self, shard: int) -> None:
        last = int(self._header["num_resident"])
        self._resident[last], self._place[shard] = shard, last
        self._header["num_resident"] = last + 1
        self._header["resident_bytes"] += int(self.starts[shard + 1] - self.starts[shard])

    def _row(self, slot: int) -> tuple[int, int]:
        places, size = _layout(self.num_shards)
        start = places["holds"][0] + slot * self.num_shards
        first = start // PAGE * PAGE
        return first, min(-(-(start + self.num_shards) // PAGE) * PAGE, size) - first

    def _create(self, starts: Int64s) -> None:
        places, size = _layout(len(starts) - 1)
        os.ftruncate(self._file, size)
        try:
            # All but the rows of holds, which are reserved one by one: a write to a page that is not there, on a full
            # tmpfs, is a SIGBUS.
            os.posix_fallocate(self._file, 0, places["holds"][0])
        except OSError as exc:
            raise CacheError(f"no room for {places['holds'][0]} bytes of the cache's table: {exc.strerror}") from exc
        header = np.zeros((), _HEADER)
        header["num_shards"], header["boot"] = len(starts) - 1, boot_id()
        os.pwrite(self._file, np.ascontiguousarray(starts, np.int64).tobytes(), places["starts"][0])
        os.pwrite(self._file, np.full(len(starts) - 1, NOBODY, np.int16).tobytes(), places["owner"][0])
        header["magic"] = _MAGIC
        os.pwrite(self._file, header.tobytes(), 0)
        # What is never written again must survive a loss of power; the rest is put right by `greet`.
        os.fsync(self._file)


def boot_id() -> int:
    """A number that is another each time the machine is started."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return 0
    return int(text.replace("-", "")[:16], 16)


def _layout(num_shards: int) -> tuple[dict[str, tuple[int, Any, tuple[int, ...]]], int]:
    """Where each column lies, its dtype and shape; and the file's size."""
    columns: list[tuple[str, Any, tuple[int, ...]]] = [
        ("header", _HEADER, ()),
        ("starts", np.int64, (num_shards + 1,)),
        ("used_ns", np.int64, (num_shards,)),
        ("resident", np.int64, (num_shards,)),
        ("place", np.int64, (num_shards,)),
        ("owner", np.int16, (num_shards,)),
        ("state", np.uint8, (num_shards,)),
        ("holds", np.uint8, (NUM_SLOTS, num_shards)),
    ]
    places, position = {}, 0
    for name, dtype, shape in columns:
        places[name] = (position, dtype, shape)
        size = int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))
        position = -(-(position + size) // PAGE) * PAGE
    return places, position
