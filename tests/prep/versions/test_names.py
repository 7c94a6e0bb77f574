"""Versions: URLs that name one and names that only look so, shards as an ETL gives them, states of jobs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp
from dali_pipes.data_set.named import compare_shards, list_shards, name_shards
from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.names import manifest_name
from dali_pipes.store.cluster import transformed
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.transformed import through_etl
from dali_pipes.store.shard_set import ShardSet
from prep.index import index_shards
from prep.sources.folders import imagefolder
from tests import loaders
from tests.prep.versions.sets import Place, class_folders, copy_set, make_set
from tests.shards import Sample, pack, write_tar


def shards_of(url: str, **options: Any) -> tuple[str, ...]:
    return name_shards(url, endpoint=options.pop("endpoint", None)).names


@pytest.mark.parametrize("url", ["{folder}/s-", "{folder}/", "file://{folder}/s-", "{folder}/*.tar"])
def test_a_prefix_a_directory_and_a_glob_name_versions(local: Place, more: Path, url: str) -> None:
    local.add(more)
    local.remove("cat/000", "cat/001")
    local.compact()
    url = url.format(folder=Path(local.url).parent)
    old = tuple(f"s-{row:06d}.tar" for row in range(3))
    assert shards_of(f"{url}@1") == old
    assert len(shards_of(f"{url}@2")) == 4
    assert shards_of(url) == shards_of(f"{url}@4") == (*old[1:], shards_of(f"{url}@2")[3])
    assert name_shards(f"{url}@2", endpoint=None).url == f"{local.url}@2"
    with pytest.raises(StoreError, match=r"no version 9 of '.*s-' \(found: 1, 2, 3, 4\)"):
        name_shards(f"{url}@9", endpoint=None)
    # Nothing that lies there is beyond the data set: it belongs to other versions.
    for version in ("", "@1", "@2"):
        found = compare_shards(f"{url}{version}", endpoint=None)
        assert (found.missing, found.beyond) == ([], [])
    assert list_shards(f"{url}@1", endpoint=None).names == old


def test_names_that_end_like_versions(local: Place, tmp_path: Path) -> None:
    """A directory may be called so. The beginning of shards' names is taken for a version."""
    copy_set(local, Place(f"{tmp_path}/set@2/s-", None))
    assert name_shards(f"{tmp_path}/set@2", endpoint=None).store.url == f"{tmp_path}/set@2"
    write_tar(tmp_path / "x@2-000000.tar", [Sample("a", {"txt": b"1"})])
    for read in (name_shards, list_shards):
        with pytest.raises(StoreError, match="there is no manifest, so there are no versions"):
            read(f"{tmp_path}/x@2", endpoint=None)


def test_versions_without_a_newest_are_refused(local: Place, more: Path) -> None:
    """A node that is away takes it from the listing, or somebody deleted it: a listing would mix versions."""
    local.add(more)
    local.store.delete(manifest_name("s-"))
    for read in (name_shards, list_shards):
        with pytest.raises(StoreError, match=r"a data set has versions, '.*manifest@1.safetensors'.*is not there"):
            read(local.url, endpoint=None)


def test_index_and_pack_leave_versions_alone(local: Place, more: Path, tmp_path: Path) -> None:
    local.add(more)
    before = local.objects()
    with pytest.raises(StoreError, match=r"has versions \(1; 2\), .*dali-pipes prep add"):
        index_shards(list_shards(local.url, endpoint=None), overwrite=True)
    for overwrite in (False, True):
        with pytest.raises(StoreError, match=r"is a data set with versions, '.dali-pipes/s-manifest@1.safetensors'"):
            pack(imagefolder(more), store=local.store, prefix="s-", overwrite=overwrite)
    assert local.objects() == before


# Shards as an ETL gives them


@pytest.fixture
def place(bucket: AisStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Two shards in a bucket, with an ETL 'small' that seems to run, and that was indexed."""
    monkeypatch.setattr(transformed, "check_running", lambda store, etl: None)  # the node runs none
    folder = class_folders(tmp_path / "old", {"cat": 2, "dog": 2})
    place = make_set(folder, Place(f"{bucket.url}/s-", bucket.endpoint))
    index_etl(place)
    return place


def index_etl(place: Place) -> None:
    """As `prep index --etl small`, if the ETL changes no byte."""
    shards = through_etl(list_shards(place.url, endpoint=place.endpoint), "small")
    manifest = place.newest().manifest
    shards.store.write(
        manifest_name(shards.prefix), replace(manifest, etl="small", version=1, parts=(), history=()).to_bytes()
    )


def named(place: Place) -> ShardSet:
    return name_shards(place.url, endpoint=place.endpoint, etl="small")


def test_an_etl_that_lacks_added_shards_or_has_removed_samples_is_refused(place: Place, more: Path) -> None:
    """Without the error, the loader would silently miss samples or read removed ones."""
    assert len(named(place).names) == 2
    place.add(more)
    with pytest.raises(DataError, match=r"version 2 has 3 shards, and the manifest of ETL 'small' lists others; index"):
        named(place)
    index_etl(place)
    assert len(named(place).names) == 3
    place.remove("cat/000")
    with pytest.raises(DataError, match=r"samples were removed .*an ETL gives whole shards.*prep compact"):
        named(place)
    place.compact()
    index_etl(place)
    assert named(place).names == tuple(place.newest().manifest.names)


# A job's state holds the version that it reads, and goes on with it


def open_loader(shards: Any, **options: Any) -> "dp.Loader":
    return loaders.open_loader(shards, graph=dp.classification_train(crop=8), batch_size=2, seed=3, **options)


def keys_of(loader: "dp.Loader") -> list[list[str]]:
    return [list(batch["key"]) for (batch,) in loader]


def test_a_state_goes_on_with_its_version_or_says_so(local: Place, more: Path) -> None:
    local.add(more)
    with open_loader(local.url) as loader:
        expected = keys_of(loader)
        loader.set_epoch(0)
        next(iter(loader))
        state = loader.state_dict()
        for impossible in ("2", [True], [1.5], {"a": 1}):
            with pytest.raises(dp.StateError, match="impossible values: data_versions must be an integer"):
                loader.load_state_dict(state | {"data_versions": impossible})
    assert state["data_versions"] == [2]
    local.remove("cat/000")
    message = rf"the state is of version 2 of '{local.url}', this loader reads version 3; open '{local.url}@2'"
    with pytest.raises(dp.StateError, match=message):
        open_loader(local.url, state=state)
    with open_loader(f"{local.url}@2", state=state) as loader:
        assert keys_of(loader) == expected[1:]
