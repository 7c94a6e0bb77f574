"""Data sets with versions, and their shards as an ETL gives them."""

from dataclasses import replace
from pathlib import Path

import pytest

from dali_pipes.data_set.named import list_shards, name_shards
from dali_pipes.errors import DataError
from dali_pipes.formats.names import manifest_name
from dali_pipes.store.cluster import transformed
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.transformed import through_etl
from dali_pipes.store.shard_set import ShardSet
from tests.prep.versions.sets import Place, class_folders, make_set


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


def named(place: Place, version: str = "") -> ShardSet:
    return name_shards(f"{place.url}{version}", endpoint=place.endpoint, etl="small")


def test_an_etl_that_lacks_added_shards_is_refused(place: Place, more: Path) -> None:
    """It would read fewer samples, without a word."""
    assert len(named(place).names) == 2
    place.add(more)
    with pytest.raises(DataError, match=r"version 2 has 3 shards, and the manifest of ETL 'small' lists others; index"):
        named(place)
    index_etl(place)
    assert len(named(place).names) == 3


def test_removed_samples_are_not_read_through_an_etl(place: Place) -> None:
    place.remove("cat/000")
    with pytest.raises(DataError, match=r"samples were removed .*an ETL gives whole shards.*prep compact"):
        named(place)
    with pytest.raises(DataError, match=r"still hold samples that were removed .*\(1\)"):
        index_etl(place)
    place.compact()
    index_etl(place)
    assert named(place).names == tuple(place.newest().manifest.names)


def test_an_etl_reads_the_newest_version_only(place: Place, more: Path) -> None:
    place.add(more)
    with pytest.raises(ValueError, match="through an ETL only the newest can be read; leave out '@1'"):
        named(place, "@1")
