"""Every command of prep on real servers of clouds: the objects are those of a directory, byte for byte."""

import re
from pathlib import Path

import pytest

from dali_pipes.errors import StoreError
from dali_pipes.store.base import Store
from dali_pipes.store.urls import open_store
from tests.prep.commands.calls import json_of_prep, run_prep
from tests.prep.versions.sets import class_folders
from tests.servers.clouds import KINDS, cloud_bucket


@pytest.fixture(params=KINDS)
def bucket(request: pytest.FixtureRequest) -> str:
    return cloud_bucket(request.param, request)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return class_folders(tmp_path / "photos", {"cat": 7, "dog": 6})


def objects(store: Store, prefix: str, *, ending: str = "") -> dict[str, bytes]:
    """Name -> bytes of what is there."""
    return {entry.name: store.read(entry.name) for entry in store.list(prefix) if entry.name.endswith(ending)}


def test_every_stage_writes_what_a_directory_gets(bucket: str, photos: Path, tmp_path: Path) -> None:
    """Packed, indexed, shuffled, indexed: all objects but the manifests, which name their place."""
    local = tmp_path / "local"
    for place in (bucket, str(local)):
        run_prep("pack", "imagefolder", photos, f"{place}/a-", "--max-count", "4")
        run_prep("index", f"{place}/a-")
        run_prep("shuffle", f"{place}/a-", "--output", "b-", "--seed", "3", "--engine", "exchange")
        run_prep("index", f"{place}/b-")
        run_prep("transform", f"{place}/b-", f"{place}/c-", "--function", "tests.prep.test_clouds:unchanged")
    store = open_store(f"{bucket}/a-", endpoint=None)[0]
    directory = open_store(f"{local}/a-", endpoint=None)[0]
    for prefix in ("a-", "b-", "c-"):
        expected = objects(directory, prefix)
        found = objects(store, prefix)
        assert len([name for name in found if name.endswith(".tar")]) == 4
        assert found.keys() == expected.keys()
        assert {name for name in found if found[name] != expected[name]} <= {f"{prefix}manifest.safetensors"}


def test_several_processes_write_what_one_writes(bucket: str, photos: Path) -> None:
    """Outputs put together from ranges of the bucket's shards."""
    run_prep("pack", "imagefolder", photos, f"{bucket}/a-", "--max-count", "4")
    run_prep("index", f"{bucket}/a-")
    store = open_store(f"{bucket}/a-", endpoint=None)[0]
    found = []
    for jobs in ("1", "2"):
        run_prep(
            "shuffle", f"{bucket}/a-", "--output", f"by{jobs}x-", "--seed", "3", "--engine", "exchange", "--jobs", jobs
        )
        shards = objects(store, f"by{jobs}x-", ending=".tar")
        found.append({name.removeprefix(f"by{jobs}x"): data for name, data in shards.items()})
    assert len(found[0]) == 4
    assert found[0] == found[1]


def test_what_is_there_is_told_alike(bucket: str, photos: Path, tmp_path: Path) -> None:
    found = {}
    for place in (bucket, str(tmp_path / "local")):
        run_prep("pack", "imagefolder", photos, f"{place}/a-", "--max-count", "4")
        run_prep("index", f"{place}/a-")
        shown = [json_of_prep("verify", f"{place}/a-"), json_of_prep("info", f"{place}/a-")]
        found[place] = re.sub(
            r'"[a-z_]*(seconds|_s)": [0-9.e-]+', "", str(shown).replace(f"{place}/", "").replace("'", '"')
        )
        run_prep("view", f"{place}/a-", tmp_path / "view.html")
    assert len(set(found.values())) == 1


def test_a_data_set_lives_there(bucket: str, photos: Path, tmp_path: Path) -> None:
    """Versions are objects that only one writer creates."""
    url = f"{bucket}/a-"
    run_prep("pack", "imagefolder", photos, url, "--max-count", "4")
    run_prep("index", url)
    run_prep("add", class_folders(tmp_path / "more", {"cat": 2, "dog": 1}, first=50), url)
    run_prep("remove", url, "--key", "cat/000")
    assert json_of_prep("info", url)["num_samples"] == 15
    assert json_of_prep("info", f"{url}@1")["num_samples"] == 13
    run_prep("compact", url)
    run_prep("log", url)
    assert json_of_prep("verify", url)["num_samples"] == 15


def test_missing_bucket_is_told_before_work_begins(bucket: str, photos: Path) -> None:
    url = f"{bucket}-other/a-"
    run_prep("pack", "imagefolder", photos, url, expect=StoreError, match="no bucket '.*-other' at http.*make it first")
    run_prep("index", url, expect=StoreError, match="no bucket")


def unchanged(sample: dict[str, bytes]) -> dict[str, bytes]:
    """A transform that changes nothing."""
    return sample
