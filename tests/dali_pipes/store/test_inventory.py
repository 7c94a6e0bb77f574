"""An error of a name that matches nothing lists the data sets of that place, those called alike first."""

from pathlib import Path

import pytest

import dali_pipes as dp
from dali_pipes.errors import StoreError
from dali_pipes.store.base import Store
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.local import LocalStore
from dali_pipes.store.patterns import inventory
from dali_pipes.store.urls import resolve_shards

NAMES = (
    *(f"shuffled-train-{number:06d}.tar" for number in range(9)),
    "shuffled-val-000000.tar",
    "shuffled-train-manifest.safetensors",
    "samples-000000.tar",
    "notes.txt",
)


def _fill(store: Store, names: tuple[str, ...] = NAMES) -> Store:
    store.create()
    for name in names:
        store.write(name, b"x")
    return store


@pytest.fixture(params=["directory", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "directory":
        return _fill(LocalStore(tmp_path / "shards"))
    bucket: AisStore = request.getfixturevalue("bucket")
    return _fill(bucket)


@pytest.mark.parametrize("url", ["train-", "train-{000000..000003}.tar", "train-000000.tar"])
def test_wrong_prefix_lists_the_data_sets_of_the_place(store: Store, url: str) -> None:
    """Whoever split by --by split forgets that the names begin with the output's prefix."""
    first = rf"there: '{store.url}/shuffled-train-' \(9 shards\), '"
    with pytest.raises(StoreError, match=first) as raised:
        dp.loader(f"{store.url}/{url}", dp.classification_train(), batch_size=1, endpoint=store.endpoint)
    assert f"'{store.url}/shuffled-val-' (1 shard, not indexed)" in str(raised.value)
    assert f"'{store.url}/samples-' (1 shard, not indexed)" in str(raised.value)


def test_place_without_shards_lists_its_files_by_extension(tmp_path: Path) -> None:
    _fill(LocalStore(tmp_path / "photos"), ("1.jpg", "2.jpg", "README"))
    with pytest.raises(StoreError, match=r"holds no \.tar; .*; what is there: 2 \.jpg, 1 without an extension"):
        resolve_shards(tmp_path / "photos", endpoint=None)


def test_shards_that_were_added_belong_to_their_data_set(tmp_path: Path) -> None:
    """If it has a manifest; otherwise these are names like any other."""
    added = [f"{prefix}-add-3f9a6c01d2-000000.tar" for prefix in ("train", "val")]
    store = _fill(LocalStore(tmp_path), ("train-000000.tar", "train-manifest.safetensors", *added))
    assert inventory(store, "train") == (
        f"'{tmp_path}/train-' (2 shards), '{tmp_path}/val-add-3f9a6c01d2-' (1 shard, not indexed)"
    )


def test_many_data_sets_are_counted(tmp_path: Path) -> None:
    store = _fill(LocalStore(tmp_path), tuple(f"{letter}-0.tar" for letter in "abcdefghi"))
    assert inventory(store, "d-").startswith(f"'{tmp_path}/d-' (1 shard, not indexed), ")
    assert inventory(store, "d-").endswith(" and 3 more")


def test_wrong_folder_of_a_bucket_lists_the_bucket(bucket: AisStore) -> None:
    _fill(bucket, ("birds/train-0.tar",))
    assert inventory(bucket, "bird/train-") == f"'{bucket.url}/birds/train-' (1 shard, not indexed)"


def test_missing_directory_names_the_folders_beside_it(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    with pytest.raises(StoreError, match=rf"no such directory: '{tmp_path}/shard', .*; '{tmp_path}' has the folders"):
        resolve_shards(tmp_path / "shard" / "x-", endpoint=None)


def test_missing_bucket_names_the_others(bucket: AisStore, node: str) -> None:
    bucket.create()
    with pytest.raises(StoreError, match=r"no bucket 'ais://no-such' at .* makes one \(found: 'ais://"):
        resolve_shards("ais://no-such/x-", endpoint=node)


def test_nothing_is_listed_where_nothing_is_wrong(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dali_pipes.store.patterns.inventory", lambda *_: pytest.fail("listed"))
    assert len(resolve_shards(f"{store.url}/shuffled-train-", endpoint=store.endpoint).names) == 9
