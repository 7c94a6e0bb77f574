"""The shared cache after the end of any process at any line, and after any sequence of changes."""

import itertools
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dali_pipes.cache.cache
import dali_pipes.cache.files
import dali_pipes.cache.table
from dali_pipes.cache.cache import NodeCache
from dali_pipes.cache.files import cache_root
from dali_pipes.cache.table import State
from tests.dali_pipes.cache.member import KEY, OTHER, PAGE, Member, blocks


def status_of(directory: Path) -> list[dali_pipes.cache.cache.CacheFileStatus]:
    cache = NodeCache(directory)
    try:
        return cache.status()
    finally:
        cache.close()


# What is done to the cache while it is watched, line by line. Two loaders are there, with shards of all states.
CHANGES: dict[str, Callable[[Member, Member], object]] = {
    "fill": lambda one, two: (one.cache.clear(), one.take(4)),
    "take": lambda one, two: one.take(1),
    "evict": lambda one, two: one.take(4),
    "release": lambda one, two: one.release(0),
    "finish": lambda one, two: (one.write(3), one.cache.finish([3])),
    "fail": lambda one, two: one.cache.fail([3]),
    "check": lambda one, two: (forget_checks(one), one.take(1), one.cache.finish([1])),
    "check given up": lambda one, two: (forget_checks(one), one.take(1), one.cache.fail([1])),
    "fill several": lambda one, two: (one.cache.clear(), one.cache.take(np.array([1, 4]), most=2, most_bytes=PAGE * 2)),
    "leave": lambda one, two: one.cache._leave(),
    "leave as the last": lambda one, two: (two.die(), one.cache._leave()),
    "sweep": lambda one, two: (two.die(), one.cache.budget()),
    "clear": lambda one, two: one.cache.clear(),
    "join": lambda one, two: Member(one.directory, reserved=1, allowed=5, group=3, key=OTHER),
    "join with less": lambda one, two: Member(one.directory, reserved=1, allowed=4, group=3),
    "new start": lambda one, two: Member(one.directory, reserved=1, allowed=5, group=3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_kill_at_any_line_leaves_a_sound_cache(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """The files are copied as they are at each line of a change: the state that a SIGKILL there leaves.

    Of each copy: no shard is ready that is not whole, no block is there that nobody counts, no more than allowed, and
    another job gets all its shards.
    """
    (shared_memory / "live").mkdir()
    copies: list[Path] = []
    one, two = prepare(shared_memory / "live")
    root = cache_root(shared_memory / "live")
    package = str(Path(dali_pipes.cache.cache.__file__).parent)
    errors: list[BaseException] = []
    before: list[object] = [None]

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(package):
            return None
        if event == "line" and (now := contents(root)) != before[0]:
            before[0] = now
            copies.append(shared_memory / f"copy-{len(copies)}")
            copy_sparse(root, copies[-1] / root.name)
        return trace

    def run() -> None:
        sys.settrace(trace)
        try:
            CHANGES[change](one, two)
        except BaseException as exc:  # noqa: BLE001 (raised in the test's thread)
            errors.append(exc)
        finally:
            sys.settrace(None)

    if change == "new start":
        monkeypatch.setattr(dali_pipes.cache.files, "boot_id", lambda: 12345)
        one.die()
        two.die()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    assert len(copies) > 3
    for copy in copies:
        check_sound(copy)
    one.die()
    two.die()


def forget_checks(member: Member) -> None:
    """As when the cache file was unused: what is ready is checked when it is taken."""
    member.cache._opened.table.checked[:] = 0


def prepare(directory: Path) -> tuple[Member, Member]:
    one = Member(directory, reserved=2, allowed=5, keep=False)
    two = Member(directory, reserved=1, allowed=5, group=2, keep=False)
    one.fill(0)
    two.fill(1, 2)
    two.release(1)
    two.fill(5)
    two.release(5)
    assert one.take(3).fill.tolist() == [3]
    one.write(3, 1000)
    return one, two


def contents(root: Path) -> list[tuple[str, int, bytes]]:
    return sorted((path.name, path.stat().st_blocks, path.read_bytes()) for path in root.iterdir())


def copy_sparse(source: Path, target: Path) -> None:
    """Sparse files."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        with path.open("rb") as read, (target / path.name).open("wb") as write:
            size = os.fstat(read.fileno()).st_size
            write.truncate(size)
            position = 0
            while position < size:
                try:
                    position = os.lseek(read.fileno(), position, os.SEEK_DATA)
                except OSError:
                    break
                stop = os.lseek(read.fileno(), position, os.SEEK_HOLE)
                os.pwrite(write.fileno(), os.pread(read.fileno(), stop - position, position), position)
                position = stop


def check_sound(directory: Path) -> None:
    if not cache_root(directory).exists():
        return
    for share in status_of(directory):
        assert not share.pids
        assert not share.num_held
    if not (cache_root(directory) / f"{KEY}.table").exists():
        assert blocks(directory) == 0
    third = Member(directory, reserved=5, allowed=5, group=9)
    table = third.cache._opened.table
    assert set(third.states()) <= {State.EMPTY, State.READY, State.UNCHECKED}
    resident = np.flatnonzero(table.state != State.EMPTY)
    assert sorted(table.resident.tolist()) == resident.tolist()
    assert blocks(directory) == table.resident_bytes == len(resident) * PAGE <= 5 * PAGE
    for shard in range(6):
        if table.state[shard] == State.READY:
            assert third.read(shard) == third.content(shard)
    for shards in (range(5), [5]):
        third.fill(*shards)
        third.release(*shards)
        assert blocks(directory) <= 5 * PAGE
    third.close()
    names = {path.name for path in cache_root(directory).iterdir()} - {"lock", "slots"}
    keys = {path.stem for path in cache_root(directory).glob("*.table")}
    assert names == {f"{key}.{suffix}" for key in keys for suffix in ("image", "source", "table")}


operations = st.lists(
    st.tuples(
        st.sampled_from(
            ["take", "take", "take", "finish", "fail", "release", "leave", "die", "clear", "boot", "dirty"]
        ),
        st.integers(0, 3),
        st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(operations, st.integers(0, 2**31))
def test_any_sequence_keeps_every_reservation(operations: list[tuple[str, int, list[int]]], noise: int) -> None:
    """Four loaders of two cache files and three groups; some die, the machine is restarted, columns are garbage.

    What is handed out as ready is whole; what is held stays; blocks never pass the budget; and who asks for what was
    reserved by it gets it, or has to wait for a loader that is at work on it.
    """
    allowed = 8
    plans = [
        {"key": KEY, "group": 1, "reserved": 4},
        {"key": KEY, "group": 1, "reserved": 4},
        {"key": KEY, "group": 2, "reserved": 2},
        {"key": OTHER, "group": 3, "reserved": 2},
    ]
    draw = np.random.default_rng(noise)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="dali-pipes-test-") as name,
        pytest.MonkeyPatch.context() as patch,
    ):
        directory = Path(name)
        members: list[Member | None] = [None] * 4
        filling: list[set[int]] = [set() for _ in range(4)]
        boot = itertools.count(1)
        set_boot(patch, 0)
        for operation, number, shards in operations:
            member = members[number]
            if operation == "boot":
                for other in members:
                    if other is not None:
                        other.die()
                members, filling = [None] * 4, [set() for _ in range(4)]
                set_boot(patch, next(boot))
                continue
            if member is None:
                member = members[number] = Member(directory, pages=8, allowed=allowed, **plans[number])  # type: ignore[arg-type]
            if operation == "take":
                check_take(members, filling, number, [s for s in shards if s not in member.held], plans)
            elif operation in ("finish", "fail"):
                for shard in list(filling[number]):
                    if operation == "finish":
                        member.write(shard)
                        member.cache.finish([shard])
                    else:
                        member.write(shard, 1000)
                        member.cache.fail([shard])
                        member.held.discard(shard)
                    filling[number].discard(shard)
            elif operation == "release":
                member.release(*[s for s in shards if s in member.held and s not in filling[number]])
            elif operation in ("leave", "die"):
                member.close() if operation == "leave" else member.die()
                members[number], filling[number] = None, set()
            elif operation == "clear":
                member.cache.clear()
            elif operation == "dirty":
                table = member.cache._opened.table
                table._resident[:], table._place[:] = draw.integers(0, 2**40, (2, 8))
                table._header["num_resident"], table._header["resident_bytes"] = draw.integers(0, 2**40, 2)
                table._header["dirty"] = 1
            assert blocks(directory) <= allowed * PAGE
            for other, mine in zip(members, filling, strict=True):
                for shard in () if other is None else other.held - mine:
                    assert other is not None
                    assert other.read(shard) == other.content(shard), "a held shard was evicted"
        for member in members:
            if member is not None:
                member.close()


def set_boot(patch: pytest.MonkeyPatch, number: int) -> None:
    for module in (dali_pipes.cache.files, dali_pipes.cache.table):
        patch.setattr(module, "boot_id", lambda: number)


def check_take(
    members: list[Member | None], filling: list[set[int]], number: int, wanted: list[int], plans: list[dict[str, Any]]
) -> None:
    member = members[number]
    assert member is not None
    if not wanted:
        return

    def held_by(plan: dict[str, Any]) -> int:
        group = [m for m, p in zip(members, plans, strict=True) if p["group"] == plan["group"] and m is not None]
        return len(set().union(*(m.held for m in group)))

    promise_is_due = held_by(plans[number]) + 1 <= plans[number]["reserved"] and all(
        held_by(plan) <= plan["reserved"] for plan in plans
    )
    taken = member.take(*wanted)
    for shard in taken.fill.tolist():
        filling[number].add(shard)
        if taken.is_there and member.read(shard) == member.content(shard):
            member.cache.finish([shard])
            filling[number].discard(shard)
    for shard in taken.ready.tolist():
        assert member.read(shard) == member.content(shard)
    if promise_is_due and not len(taken.ready) and not len(taken.fill):
        busy = {
            shard
            for other, mine, plan in zip(members, filling, plans, strict=True)
            if other is not None and plan["key"] == plans[number]["key"]
            for shard in mine
        }
        assert taken.blocked == "busy", f"a reservation is broken: {taken}"
        assert wanted[0] in busy
