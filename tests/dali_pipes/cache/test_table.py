"""The state table: derived columns say what the states say, whatever was cut short."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.cache.extents import extent_starts
from dali_pipes.cache.table import State, StateTable

STARTS = extent_starts([5000, 1, 4096, 9000, 12_000, 300])
NUM_SHARDS = len(STARTS) - 1


@pytest.fixture
def table(tmp_path: Path) -> StateTable:
    return StateTable(tmp_path / "t", starts=STARTS)


def check_derived(table: StateTable) -> None:
    """Resident shards, their places and bytes are those of the states."""
    resident = np.flatnonzero(table.state != State.EMPTY)
    assert sorted(table.resident.tolist()) == resident.tolist()
    assert table.resident_bytes == table.extent_bytes(resident).sum()
    assert table.resident[table._place[table.resident].argsort()].tolist() == table.resident.tolist()


def make_ready(table: StateTable, *shards: int, slot: int = 0) -> None:
    with table.changing():
        table.fill(shards, slot)
        table.finish(shards)


OPERATIONS: dict[str, tuple[tuple[State, ...], Callable[[StateTable, int], None]]] = {
    "fill": ((State.EMPTY, State.READY, State.UNCHECKED), lambda table, shard: table.fill([shard], 1)),
    "finish": ((State.FILLING, State.CHECKING), lambda table, shard: table.finish([shard])),
    "end_check": ((State.FILLING, State.CHECKING), lambda table, shard: table.end_check(np.array([shard]))),
    "drop": ((State.READY, State.UNCHECKED, State.FILLING), lambda table, shard: table.drop([shard], 2)),
    "remove": (tuple(State), lambda table, shard: table.remove([shard])),  # of others: nothing
}
steps = st.lists(st.tuples(st.sampled_from(list(OPERATIONS)), st.integers(0, NUM_SHARDS - 1)), max_size=60)


@given(steps)
def test_derived_columns_follow_the_states(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    """Any sequence of changes: what is resident, and how many bytes, is kept without looking at all shards."""
    table = StateTable(tmp_path_factory.mktemp("table") / "t", starts=STARTS)
    table.open_row(1)
    for name, shard in steps:
        allowed, change = OPERATIONS[name]
        if table.state[shard] in allowed:
            before = int(table.state[shard])
            with table.changing():
                change(table, shard)
            if name == "remove" and before != State.DROPPING:
                assert table.state[shard] == before
            check_derived(table)
    table.close()


@given(st.binary(min_size=NUM_SHARDS, max_size=NUM_SHARDS), st.integers(0, 2**31))
def test_repair_makes_derived_columns_from_the_states(
    tmp_path_factory: pytest.TempPathFactory, states: bytes, noise: int
) -> None:
    """Whatever a killed process left in them: any states, any garbage beside."""
    path = tmp_path_factory.mktemp("table") / "t"
    table = StateTable(path, starts=STARTS)
    draw = np.random.default_rng(noise)
    table.state[:] = np.frombuffer(states, np.uint8) % len(State)
    table._resident[:], table._place[:] = draw.integers(0, 2**40, (2, NUM_SHARDS))
    table._header["num_resident"], table._header["resident_bytes"] = draw.integers(0, 2**40, 2)
    table._header["dirty"] = 1
    table.close()
    other = StateTable(path)
    with other.changing():
        pass
    assert not other.is_dirty
    check_derived(other)
    other.close()


def test_a_change_that_fails_is_put_right(table: StateTable) -> None:
    """An exception in the middle of a change leaves states, and columns that say the same."""
    make_ready(table, 0, 3)

    def fail() -> None:
        with table.changing():
            table.state[3] = State.EMPTY
            table.state[4] = State.FILLING
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    check_derived(table)
    assert not table.is_dirty


def test_pages_are_reserved_before_they_are_written(shared_memory: Path) -> None:
    """A write to a page for which a full tmpfs has no space is a SIGBUS; only rows of unused slots have no pages."""
    num_shards = 50_000
    table = StateTable(shared_memory / "t", starts=np.arange(num_shards + 1) * 4096)

    def blocks() -> int:
        return (shared_memory / "t").stat().st_blocks * 512

    made = blocks()
    assert num_shards * (4 * 8 + 2 + 1) <= made < num_shards * (4 * 8 + 2 + 1) + 20 * 4096
    table.state[:] = table.owner[:] = table.used_ns[:] = 1
    table.repair()
    assert blocks() == made
    table.open_row(200)
    reserved = blocks()
    assert made + num_shards <= reserved <= made + num_shards + 2 * 4096
    table.holds[200] = 1
    assert blocks() == reserved


def test_a_million_shards_open_without_reading_them(tmp_path: Path) -> None:
    """What opening costs does not grow with the data set."""
    StateTable(tmp_path / "t", starts=np.arange(1_000_001) * 4096).close()
    tracemalloc.start()
    table = StateTable(tmp_path / "t")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert table.num_shards == 1_000_000
    assert len(table.resident) == 0
    table.close()
