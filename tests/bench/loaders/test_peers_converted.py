"""What LitData and Mosaic Streaming make of shards, and what they leave behind, beyond the contract of all loaders."""

import importlib.util
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.loaders.protocol import LoaderOptions
from bench.loaders.registry import LOADERS, LoaderEntry, Prepared, open_loader, prepare_loader
from dali_pipes.errors import PipesError
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import resolve_shards
from tests.bench.conftest import NUM_SAMPLES, samples
from tests.shards import make_samples, write_tar

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module", params=["litdata", "mosaic"])
def name(request: pytest.FixtureRequest) -> str:
    entry = LOADERS[request.param]
    if any(importlib.util.find_spec(package) is None for package in entry.requires):
        pytest.skip(f"needs the extra {entry.extra}")
    return str(request.param)


@pytest.fixture(scope="module")
def prepared(
    name: str, shards: ShardSet, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Prepared, Path, Path]]:
    """What was made of the shards, and the temporary and home directories while it was made and is read."""
    temporary, home = tmp_path_factory.mktemp("temporary"), tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        # torch's own, made where the process's first import of its compiler falls: of no loader's making.
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(temporary.parent / "torchinductor"))
        patch.setenv("HOME", str(home))
        patch.setattr(tempfile, "tempdir", None)
        found = prepare_loader(name, shards, directory=tmp_path_factory.mktemp(name))
        assert found is not None
        yield found, temporary, home


def test_converted_holds_the_bytes_of_the_shards(prepared: tuple[Prepared, Path, Path]) -> None:
    """Nothing is decoded and encoded anew: the components' bytes, keys, and where each sample lies."""
    components = sum(len(data) for sample in samples() for data in sample.components.values())
    assert components < prepared[0].num_bytes < components + NUM_SAMPLES * 100 + 4096
    assert prepared[0].wall_s > 0


def test_converted_epochs_have_orders_of_their_own_and_nothing_is_left(
    name: str, prepared: tuple[Prepared, Path, Path], shards: ShardSet, options: LoaderOptions, keys: set[str]
) -> None:
    """Epochs that are left at any batch, also where one worker is through and the other is not, change nothing."""
    found, temporary, home = prepared
    before = _segments()
    with open_loader(name, shards, options=options, prepared=found) as loader:
        orders = []
        for left_after in (5, 1, 4, 3):
            epoch = loader.epoch()
            for _ in range(left_after):
                next(epoch)
            orders.append([key for batch in loader.epoch() for key in batch["key"]])
        held = loader.epoch()
        next(held)
    assert [sorted(order) for order in orders] == [sorted(keys)] * 4
    assert len({tuple(order) for order in orders}) == 4
    assert _segments() == before
    assert os.listdir(temporary) == os.listdir(home) == []  # noqa: PTH208
    del held


def test_converted_samples_with_other_components_are_refused(name: str, tmp_path: Path) -> None:
    """Both formats have the same fields in all samples, so one that lacks its mask is named."""
    lacking = make_samples([(12, 12)] * 3)
    del lacking[2].components["trimap.png"]
    write_tar(tmp_path / "pets-000000.tar", lacking)
    shards = resolve_shards(tmp_path, endpoint=None)
    target = tmp_path / "converted"
    target.mkdir()
    found = "key 's00002': its components are cls, image.jpg, expected cls, image.jpg, trimap.png"
    with pytest.raises(PipesError, match=f"shard '{shards.store.locate(shards.names[0])}', {found} as in the first"):
        prepare_loader(name, shards, directory=target)


def _segments() -> set[str]:
    """Shared memory under the names that Mosaic Streaming gives it."""
    return {path.name for path in SHARED_MEMORY.iterdir() if re.match(r"\d{6}_", path.name)}


def test_copy_in_the_bucket_is_read_from_there_and_removed(
    bucket: ShardSet, options: LoaderOptions, keys: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of ``litdata-s3`` and ``mosaic-s3``: what was made is there while the loader is open."""
    entry = LoaderEntry(module="tests.bench.loaders.copied_shards", prepares="prepare", source=("ais",), in_bucket=True)
    monkeypatch.setitem(LOADERS, "copied", entry)
    before = [found.name for found in bucket.store.list("")]
    with open_loader("copied", bucket, options=options) as loader:
        assert len(bucket.store.list("dali-pipes-bench/")) == len(bucket.names)
        assert {key for batch in loader.epoch() for key in batch["key"]} == keys
    assert [found.name for found in bucket.store.list("")] == before
