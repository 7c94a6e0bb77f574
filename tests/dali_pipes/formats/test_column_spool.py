"""The column file of a large data set, made by temporary files: the same bytes as in memory."""

import json
import tempfile
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from dali_pipes.errors import StoreError
from dali_pipes.formats.column_file import save_columns
from dali_pipes.formats.column_spool import ColumnsBuilder
from tests.simulated import index_of_rows

COMPONENTS = ["cls", "jpg", "seg.png", "txt"]
LABELS = st.one_of(st.integers(-3, 200), st.sampled_from([2**15, -(2**31), 2**31, 2**63 - 1, -(2**63)]))
SIDES = st.one_of(st.integers(0, 500), st.sampled_from([2**16 - 1, 2**16, 2**31 - 1]))
ROWS = st.tuples(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    st.frozensets(st.sampled_from(COMPONENTS), min_size=1),
    LABELS,
    SIDES,
)
Row = tuple[str, frozenset[str], int, int]  # key, components, label, a photo's height


def fill(builder: ColumnsBuilder, runs: list[list[list[Row]]]) -> None:
    """Add the shards of each run: of every other run one by one, of the others as its worker's columns."""
    for number, shards in enumerate(runs):
        if number % 2:
            own = ColumnsBuilder()
            for rows in shards:
                own.add(index_of_rows(rows))
            builder.add_columns(own.finish(), shard="s.tar")
        else:
            for rows in shards:
                builder.add(index_of_rows(rows))


def spooled(runs: list[list[list[Row]]], rows_in_memory: int) -> bytes:
    with ColumnsBuilder(rows_in_memory) as spool:
        fill(spool, runs)
        file = spool.stream(manifest="0" * 64)
        data = b"".join(file.chunks())
        assert b"".join(file.chunks()) == data, "a transfer that broke is made again"
    assert file.num_bytes == len(data)
    return data


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.lists(ROWS, max_size=12), max_size=3), max_size=4), st.sampled_from([1, 2, 5, 20, 1000]))
def test_file_is_the_one_made_in_memory(runs: list[list[list[Row]]], rows_in_memory: int) -> None:
    """It does not matter where the pieces end, and which rows lack labels, components or sizes."""
    builder = ColumnsBuilder()
    fill(builder, runs)
    assert spooled(runs, rows_in_memory) == builder.finish().to_bytes(manifest="0" * 64)


def test_memory_is_flat() -> None:
    """The columns of a million samples take 40 MB; the spool holds only about 50,000 samples in memory at a time."""
    same = index_of_rows([(f"key-{row:016d}", frozenset(COMPONENTS), row, 500) for row in range(20_000)])
    tracemalloc.start()
    try:
        with ColumnsBuilder(50_000) as spool:
            for _ in range(50):
                spool.add(same)
            num_bytes = sum(map(len, spool.stream(manifest="0" * 64).chunks()))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes > 37_000_000
    assert peak < 20_000_000


def test_full_disk_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda buffering: open("/dev/full", "w+b", buffering))  # noqa: PTH123, SIM115
    with pytest.raises(StoreError, match=r"columns of 1 samples .* No space left .* with TMPDIR"):
        spooled([[[("a", frozenset({"cls"}), 1, 0)]]], 1)


@pytest.mark.parametrize("length", [0, 7])
def test_files_are_those_of_the_safetensors_library(length: int) -> None:
    """Order of columns, alignment, and the escapes of their names."""
    rng = np.random.default_rng(length)
    columns = {
        f"{name}{kind}": rng.integers(0, 100, length).astype(kind)
        for name in ("a/", 'é"\\\n', "日本/")
        for kind in ("u1", "i1", "u2", "i2", "i4", "i8", "u8")
    }
    header = {"kind": 'ü "x"', "rows": length}
    assert save_columns(columns, header) == save(columns, metadata={"header": json.dumps(header)})
