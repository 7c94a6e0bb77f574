"""The kinds of a process's memory: own pages, mapped files, shared memory; a cache file is in none of them."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from dali_pipes.data_set.data_set import DataSet
from dali_pipes.store.urls import resolve_shards
from tests.conftest import make_samples, write_shards

MIB = 1 << 20


# Run in a process of its own: in the tests' process, memory that earlier tests freed goes back at any moment.
_MEASURE = """
import json, mmap, tempfile
from dataclasses import asdict
from dali_pipes.processes.programs import ResidentMemory
MIB = 1 << 20
before = asdict(ResidentMemory.now())
block = bytearray(b"1") * (64 * MIB)
with tempfile.TemporaryFile(dir="/dev/shm") as stream:
    stream.truncate(32 * MIB)
    with mmap.mmap(stream.fileno(), 32 * MIB) as mapped:
        mapped[:] = bytes(32 * MIB)
        after = asdict(ResidentMemory.now())
print(json.dumps({name: after[name] - before[name] for name in after} | {"file": after["file_bytes"]}))
"""


def test_each_kind_is_told_apart() -> None:
    """64 MiB allocated are the process's own; 32 MiB of a mapped file in /dev/shm are shared."""
    done = subprocess.run([sys.executable, "-c", _MEASURE], check=True, capture_output=True, text=True)
    grown = json.loads(done.stdout)
    assert grown["own_bytes"] > 60 * MIB
    assert grown["shared_bytes"] > 30 * MIB
    assert grown["file"] > 0


def test_cache_file_is_not_in_a_loaders_memory(tmp_path: Path) -> None:
    """A cache in /dev/shm: its bytes are fetched, checked and read without being mapped."""
    shards = write_shards(tmp_path, make_samples([(500, 400)] * 24), per_shard=2)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        data = DataSet(resolve_shards(shards, endpoint=None))
        share = data.open_share(reserved=None, is_windowed=False, group=1, cache_dir=Path(name), cache_bytes=None)
        stager = data.open_stager(share)
        stager.need(range(data.manifest.num_shards))
        maps = Path("/proc/self/maps").read_text()
        assert share.taken_bytes >= int(share.extent_bytes.sum()) > 0
        assert ".image" not in maps
        assert ".table" in maps
        stager.close()
        share.close()
