"""Shards that are named, to an image: a part of what was indexed, shards without an index, no GPU library."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from dali_pipes.data_set.data_set import DataSet
from dali_pipes.errors import DataError
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.store.urls import resolve_shards
from tests.shards import Sample, make_samples, samples_and_shards, write_shards, write_tar

# Five shards.
samples, shards = samples_and_shards([(30, 30)] * 10, per_shard=2)


def stage(indexed: DataSet, cache_dir: Path) -> list[tuple[bytes, bytes]]:
    """Shard and index bytes as they lie in the image."""
    share = indexed.open_share(reserved=None, is_windowed=False, group=1, cache_dir=cache_dir, cache_bytes=None)
    stager = indexed.open_stager(share, num_fetchers=2)
    try:
        numbers = range(indexed.manifest.num_shards)
        stager.need(numbers)
        return [(share.shard_extent(n).read(), share.index_extent(n).read()) for n in numbers]
    finally:
        stager.close()
        share.close()


def test_shards_without_an_index_are_indexed_and_their_indexes_staged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From memory: nothing is written beside the shards, and it is said how to store it."""
    directory = write_shards(tmp_path / "plain", make_samples([(30, 30)] * 4), per_shard=2, index=False)
    (tmp_path / "cache").mkdir()
    with caplog.at_level(logging.WARNING):
        indexed = DataSet(resolve_shards(directory, endpoint=None))
    assert "indexed 2 of them in" in caplog.text
    assert "dali-pipes prep index" in caplog.text
    for number, (shard, index) in enumerate(stage(indexed, tmp_path / "cache")):
        assert shard == (directory / f"s-{number:06d}.tar").read_bytes()
        assert index == indexed.read_index(number)
        assert ShardIndex.from_bytes(index, where="").num_samples == 2
    assert sorted(path.name for path in directory.iterdir()) == ["s-000000.tar", "s-000001.tar"]


def test_empty_shard_is_staged_among_others_and_refused_alone(tmp_path: Path) -> None:
    """A shard of no samples takes its place in the manifest and in the image."""
    write_tar(tmp_path / "e-0.tar", [])
    with pytest.raises(DataError, match=r"hold no sample"):
        DataSet(resolve_shards(tmp_path, endpoint=None))
    write_tar(tmp_path / "e-1.tar", [Sample("a", {"txt": b"x"})])
    indexed = DataSet(resolve_shards(tmp_path, endpoint=None))
    assert indexed.manifest.samples.tolist() == [0, 1]
    assert len(stage(indexed, tmp_path)) == 2


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
