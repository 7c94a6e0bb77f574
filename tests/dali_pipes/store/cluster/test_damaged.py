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
from tests.shards import make_samples, write_shards

SHARD = "s-000001.tar"


@pytest.fixture
def damage(tmp_path: Path) -> Iterator[AisStore]:
    """A bucket, which `flip` can damage."""
    with embedded_node.start(tmp_path / "node") as running:
        store = AisStore(running.endpoint, "pets")
        store.create()
        for path in write_shards(tmp_path / "s", make_samples([(30, 30)] * 9), per_shard=3, index=False).iterdir():
            store.write(path.name, path.read_bytes())
        yield store


def flip(store: AisStore, folder: Path) -> None:
    """Change a byte of the shard's first photo in the file that holds it."""
    data = store.read(SHARD)
    (file,) = (path for path in folder.rglob("*") if path.is_file() and data in path.read_bytes())
    position = file.read_bytes().index(data) + 700
    with file.open("r+b") as stream:
        stream.seek(position)
        byte = stream.read(1)
        stream.seek(position)
        stream.write(bytes([byte[0] ^ 1]))


def check(error: BaseException | None, store: AisStore) -> None:
    assert isinstance(error, PipesError)
    text = str(error)
    assert f"'{store.locate(SHARD)}' is damaged on" in text
    assert "target" in text
    assert "write it again" in text
    assert "ais bucket props set ais://pets checksum.validate_warm_get=true" in text
    assert "is the cluster well" not in text


@pytest.mark.parametrize("command", [("index",), ("shuffle", "--engine", "exchange")])
def test_command_refuses_a_damaged_shard(damage: AisStore, tmp_path: Path, command: tuple[str, ...]) -> None:
    """Their own checksum would make the damaged bytes the right ones."""
    flip(damage, tmp_path / "node")
    name, *options = command
    done = CliRunner().invoke(prep, [name, damage.locate("s-"), *options, "--endpoint", damage.endpoint])
    check(done.exception, damage)
    assert isinstance(done.exception, DataError)
    assert not [entry.name for entry in damage.list("") if "manifest" in entry.name or "shuffled" in entry.name]


def test_loader_says_that_the_stored_object_is_damaged(damage: AisStore, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    index_shards(resolve_shards(damage.locate("s-"), endpoint=damage.endpoint))
    flip(damage, tmp_path / "node")
    with (
        pytest.raises(PipesError) as raised,
        dp.loader(
            damage.locate("s-"),
            dp.segmentation(crop=16),
            batch_size=3,
            device="cpu",
            endpoint=damage.endpoint,
            cache=dp.Cache(directory=tmp_path / "cache"),
        ) as loader,
    ):
        list(loader)
    check(raised.value, damage)
