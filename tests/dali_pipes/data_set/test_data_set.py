"""Shards that are named, to an image: a part of what was indexed, shards without an index, no GPU library."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from dali_pipes.data_set.data_set import DataSet
from dali_pipes.errors import DataError
from dali_pipes.store.urls import resolve_shards
from tests.shards import Sample, samples_and_shards, write_tar

# Five shards.
samples, shards = samples_and_shards([(30, 30)] * 10, per_shard=2)


def test_shards_without_an_index_are_indexed_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is written beside the shards; the log says how to store the index. An empty shard keeps its place."""
    write_tar(tmp_path / "e-0.tar", [])
    with pytest.raises(DataError, match=r"hold no sample"):
        DataSet(resolve_shards(tmp_path, endpoint=None))
    write_tar(tmp_path / "e-1.tar", [Sample("a", {"txt": b"x"})])
    with caplog.at_level(logging.WARNING):
        indexed = DataSet(resolve_shards(tmp_path, endpoint=None))
    assert "indexed 2 of them in" in caplog.text
    assert "dali-pipes prep index" in caplog.text
    assert indexed.manifest.samples.tolist() == [0, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e-0.tar", "e-1.tar"]


def test_staging_needs_neither_dali_nor_torch(shards: Path, tmp_path: Path) -> None:
    """`cache warm` runs where nothing is decoded, in an init container for instance."""
    program = (
        "import sys\n"
        "for name in ('torch', 'nvidia', 'nvidia.dali'): sys.modules[name] = None\n"  # importing them fails
        "from dali_pipes.cli import main; sys.exit(main(['cache', 'warm', sys.argv[1], '--cache', sys.argv[2]]))"
    )
    done = subprocess.run([sys.executable, "-c", program, shards, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("staged 5 shards, ")
