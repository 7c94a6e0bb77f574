"""An index is used only for the shard that it was made from: by its name, size, checksum and number of samples."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import dali_pipes as dp
from dali_pipes.errors import DataError
from dali_pipes.formats.manifest import Manifest, checksum
from dali_pipes.formats.names import index_name, manifest_name
from tests.dali_pipes.raw import raw
from tests.shards import make_samples, write_shards

SHARDS = ("s-000000.tar", "s-000001.tar")


@pytest.fixture
def swapped(tmp_path: Path) -> Path:
    """Two shards of two samples and equal sizes, whose indexes were swapped, in the manifest as well."""
    samples = make_samples([(40, 33)] * 4)
    for sample in samples:  # equal lengths, so that the places are equal too
        sample.components["image.jpg"] += b"\0" * (2000 - len(sample.components["image.jpg"]))
        sample.components["trimap.png"] += b"\0" * (500 - len(sample.components["trimap.png"]))
    shards = write_shards(tmp_path / "set", samples, per_shard=2)
    first, second = (shards / index_name(name) for name in SHARDS)
    first_data, second_data = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_data)
    second.write_bytes(first_data)
    path = shards / manifest_name("s-")
    manifest = Manifest.from_bytes(path.read_bytes(), where="m")
    assert len({*manifest.shard_bytes.tolist()}) == 1
    checksums = np.array([checksum(second_data), checksum(first_data)], manifest.index_checksums.dtype)
    sizes = np.array([len(second_data), len(first_data)])
    swapped = dataclasses.replace(manifest, index_checksums=checksums, index_bytes=sizes)
    path.write_bytes(swapped.to_bytes())
    assert Manifest.from_bytes(path.read_bytes(), where="m").digest == manifest.digest
    return shards


EXPECTED = r"is of shard 's-000001.tar': 2 samples, \d+ bytes, xxhash2 \w+; the manifest lists shard 's-000000.tar'"


def test_loader_refuses_the_index_of_another_shard(swapped: Path, tmp_path: Path) -> None:
    """Its keys and labels belong to other photos: no batch comes."""
    with pytest.raises(DataError, match=EXPECTED):
        list(dp.loader(swapped, raw, batch_size=2, cache=dp.Cache(directory=tmp_path)))


def test_index_of_the_shard_as_it_was_is_refused(swapped: Path) -> None:
    """A shard of the same name, size and number of samples, but other bytes, has another index."""
    manifest = Manifest.from_bytes((swapped / manifest_name("s-")).read_bytes(), where="m")
    data = (swapped / index_name(SHARDS[0])).read_bytes()  # that of SHARDS[1]
    assert manifest.shard_index(1, data, where="i").shard == SHARDS[1]
    mixed = dataclasses.replace(manifest, names=[f"b/{name}" for name in manifest.names])
    assert mixed.shard_index(1, data, where="i").shard == SHARDS[1]  # the name of the set stands before the shard's
    with pytest.raises(DataError, match=r"the manifest lists shard 'b/s-000000.tar'"):
        mixed.shard_index(0, data, where="i")
    changed = dataclasses.replace(manifest, checksums=manifest.checksums ^ np.uint64([0, 1]))
    with pytest.raises(DataError, match=r"the manifest lists shard 's-000001.tar'"):
        changed.shard_index(1, data, where="i")
