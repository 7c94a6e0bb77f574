"""`dali-pipes cache`: what it fills a loader finds, what it shows is so, what it clears nobody holds."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp
from dali_pipes.cli import main
from dali_pipes.data_set.indexing import find_manifest
from dali_pipes.store.urls import resolve_shards
from tests.dali_pipes.cache.member import blocks
from tests.dali_pipes.raw import raw, read_epoch
from tests.loaders import open_windowed
from tests.shards import Sample, make_samples, samples_and_shards, write_shards

# Eight shards.
samples, shards = samples_and_shards([(40 + 7 * (i % 5), 33) for i in range(16)], per_shard=2)


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


class Command:
    """Runs the commands on one cache."""

    def __init__(self, cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._cache_dir, self._capsys = cache_dir, capsys

    def __call__(self, name: str, *arguments: object, code: int = 0) -> str:
        """What it says: on stdout, or as its error."""
        assert main(["cache", name, *map(str, arguments), "--cache", str(self._cache_dir)]) == code
        said = self._capsys.readouterr()
        return said.err if code else said.out

    def json(self, name: str, *arguments: object) -> Any:
        return json.loads(self(name, *arguments, "--json"))


@pytest.fixture
def run(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(cache_dir, capsys)


def object_bytes(shards: Path, num: int) -> int:
    manifest = find_manifest(resolve_shards(shards, endpoint=None))
    assert manifest is not None
    return int(manifest.shard_bytes[:num].sum() + manifest.index_bytes[:num].sum())


def test_warm_ls_clear(shards: Path, samples: list[Sample], run: Command, cache_dir: Path) -> None:
    """`warm` stages all shards, `ls` lists them, `clear` removes them; a second `warm` or a loader fetches nothing."""
    assert run("ls") == "no cache files\n"
    first = run.json("warm", shards)
    assert (first["num_shards"], first["num_staged"]) == (8, 8)
    assert first["fetched_bytes"] == object_bytes(shards, 8)
    second = run.json("warm", shards)
    assert (second["num_staged"], second["fetched_bytes"]) == (8, 0)
    assert run("warm", shards).startswith("staged 8 shards, ")
    with dp.loader(str(shards), raw, batch_size=4, device="cpu", cache=dp.Cache(directory=cache_dir)) as loader:
        assert len(read_epoch([loader], samples)) == 16
        assert loader.parts.stager.fetched_bytes == 0
    (row,) = run.json("ls")
    assert (row["num_shards"], row["num_resident"], row["num_held"], row["pids"]) == (8, 8, 0, [])
    assert row["resident_bytes"] == row["image_bytes"] == first["num_bytes"]
    assert row["keep"]
    assert str(shards) in row["source"]
    assert "8 of 8 shards resident" in run("ls")
    assert "unused" in run("ls")
    assert blocks(cache_dir) >= first["num_bytes"]
    assert run.json("clear") == {"freed_bytes": first["num_bytes"], "held_bytes": 0}
    assert run.json("ls") == []
    assert blocks(cache_dir) == 0
    assert run("clear").startswith("freed 0")


def test_warm_beside_a_loader_takes_what_was_not_promised(
    shards: Path, samples: list[Sample], run: Command, cache_dir: Path
) -> None:
    """A loader at work keeps its two windows; what is left is filled, and the loader's epoch is whole."""
    whole = run.json("warm", shards)["num_bytes"]
    run("clear")
    window = whole // 8
    with open_windowed(shards, raw, directory=cache_dir, window_bytes=window, max_bytes=whole, batch_size=2) as loader:
        batches = iter(loader)
        next(batches)
        found = run.json("warm", shards)
        assert 1 <= found["num_staged"] < 8
        (row,) = run.json("ls")
        assert row["pids"] == [os.getpid()]
        assert row["num_held"] >= 1
        assert f"used by {os.getpid()}" in run("ls")
        cleared = run.json("clear")
        assert cleared["held_bytes"] > 0
        assert "running loaders hold" in run("clear")
        assert len(list(batches)) == 7
        assert len(read_epoch([loader], samples)) == 16


def test_warm_with_a_broken_shard_names_it(run: Command, tmp_path: Path) -> None:
    """The shards before the broken one stay staged and are not fetched again."""
    shards = write_shards(tmp_path / "shards", make_samples([(30, 30)] * 4), per_shard=2)
    whole = (shards / "s-000001.tar").read_bytes()
    (shards / "s-000001.tar").write_bytes(whole[:700] + b"?" + whole[701:])
    assert "s-000001.tar' has the xxhash2" in run("warm", shards, "--connections", 1, code=1)
    (shards / "s-000001.tar").write_bytes(whole)
    found = run.json("warm", shards)
    assert found["num_staged"] == 2
    assert found["fetched_bytes"] == object_bytes(shards, 2) - object_bytes(shards, 1)
