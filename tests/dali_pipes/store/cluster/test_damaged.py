"""Bytes that changed on a target's disk are served with 200 and the old checksum: errors say so, and what mends it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import dali_pipes as dp
from dali_pipes.errors import DataError, PipesError
from dali_pipes.store.cluster import embedded_node
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.urls import resolve_shards
from prep.commands.group import prep
from prep.index import index_shards
from tests.loaders import open_loader
from tests.shards import copy_files, make_samples, write_shards

SHARD = "s-000001.tar"


@pytest.fixture
def damage(tmp_path: Path) -> Iterator[AisStore]:
    """A bucket whose files the test can change."""
    with embedded_node.start(tmp_path / "node") as running:
        store = AisStore(running.endpoint, "pets")
        store.create()
        copy_files(write_shards(tmp_path / "s", make_samples([(30, 30)] * 9), per_shard=3, index=False), store)
        yield store


def place_of(store: AisStore, folder: Path) -> tuple[Path, int]:
    """The file that holds the shard, and a byte of its first photo."""
    data = store.read(SHARD)
    (file,) = (path for path in folder.rglob("*") if path.is_file() and data in path.read_bytes())
    return file, file.read_bytes().index(data) + 700


def flip(file: Path, position: int) -> None:
    """Change the byte, or change it back."""
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def check(error: BaseException | None, store: AisStore) -> None:
    assert isinstance(error, PipesError)
    text = str(error)
    assert f"'{store.locate(SHARD)}' is damaged on" in text
    assert "target" in text
    assert "write it again" in text
    assert "ais bucket props set ais://pets checksum.validate_warm_get=true" in text
    assert "is the cluster well" not in text


def test_damaged_shard_is_refused_by_all_who_read_it(damage: AisStore, tmp_path: Path) -> None:
    """Commands and a loader refuse it. A command's new checksum would declare the damaged bytes correct."""
    url, endpoint = damage.locate("s-"), damage.endpoint
    place = place_of(damage, tmp_path / "node")
    flip(*place)
    for name, *options in (["index"], ["shuffle", "--engine", "exchange"]):
        done = CliRunner().invoke(prep, [name, url, *options, "--endpoint", endpoint])
        check(done.exception, damage)
        assert isinstance(done.exception, DataError)
    assert not [entry.name for entry in damage.list("") if "manifest" in entry.name or "shuffled" in entry.name]
    flip(*place)
    index_shards(resolve_shards(url, endpoint=endpoint))
    flip(*place)
    options = {"endpoint": endpoint, "cache": dp.Cache(directory=tmp_path)}
    with pytest.raises(PipesError) as raised, open_loader(url, dp.classification_eval(crop=16), **options) as loader:
        list(loader)
    check(raised.value, damage)
