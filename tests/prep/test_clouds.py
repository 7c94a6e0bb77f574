"""Every command of prep on real servers of clouds: the objects are those of a directory, byte for byte."""

from pathlib import Path

import pytest

from dali_pipes.errors import StoreError
from dali_pipes.formats.names import manifest_name
from dali_pipes.store.urls import open_store
from tests.prep.commands.calls import json_of_prep, run_prep
from tests.prep.versions.sets import class_folders
from tests.servers.clouds import KINDS, cloud_bucket
from tests.shards import contents_of


@pytest.fixture(params=KINDS)
def cloud_url(request: pytest.FixtureRequest) -> str:
    return cloud_bucket(request.param, request)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return class_folders(tmp_path / "photos", {"cat": 7, "dog": 6})


def test_every_stage_writes_what_a_directory_gets(cloud_url: str, photos: Path, tmp_path: Path) -> None:
    """Pack, index, shuffle and transform write the same objects, except manifests: a manifest names its place."""
    stores = [open_store(f"{place}/a-", endpoint=None)[0] for place in (cloud_url, str(tmp_path / "local"))]
    for place, jobs in ((cloud_url, "2"), (str(tmp_path / "local"), "1")):
        run_prep("pack", "imagefolder", photos, f"{place}/a-", "--max-count", "4")
        run_prep("index", f"{place}/a-")
        mixed = ("--output", "b-", "--seed", "3", "--engine", "exchange", "--jobs", jobs)
        run_prep("shuffle", f"{place}/a-", *mixed)
        run_prep("index", f"{place}/b-")
        run_prep("transform", f"{place}/b-", f"{place}/c-", "--function", "tests.prep.workers_tasks:unchanged")
    for prefix in ("a-", "b-", "c-"):
        found, expected = (contents_of(store, prefix) for store in stores)
        assert len([name for name in found if name.endswith(".tar")]) == 4
        assert found.keys() == expected.keys()
        assert {name for name in found if found[name] != expected[name]} <= {manifest_name(prefix)}


def test_a_data_set_lives_there(cloud_url: str, photos: Path, tmp_path: Path) -> None:
    """Versions are objects that only one writer creates."""
    url = f"{cloud_url}/a-"
    run_prep("pack", "imagefolder", photos, url, "--max-count", "4")
    run_prep("index", url)
    run_prep("add", class_folders(tmp_path / "more", {"cat": 2, "dog": 1}, first=50), url)
    run_prep("remove", url, "--key", "cat/000")
    assert json_of_prep("info", url)["num_samples"] == 15
    assert json_of_prep("info", f"{url}@1")["num_samples"] == 13
    run_prep("compact", url)
    run_prep("log", url)
    assert json_of_prep("verify", url, "--decoder", "pillow", "--workers", "1")["num_samples"] == 15
    run_prep("view", url, tmp_path / "view.html")


def test_missing_bucket_is_told_before_work_begins(cloud_url: str, photos: Path) -> None:
    url = f"{cloud_url}-other/a-"
    run_prep("pack", "imagefolder", photos, url, expect=StoreError, match="no bucket '.*-other' at http.*make it first")
    run_prep("index", url, expect=StoreError, match="no bucket")
