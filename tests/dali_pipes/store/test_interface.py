"""What every store answers for itself, and that nobody outside asks for its class."""

import ast
import pickle
from pathlib import Path

import pytest

import dali_pipes
from dali_pipes.errors import StoreError
from dali_pipes.store.base import Store
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.transformed import TransformedStore
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_set import ShardSet

ROOT = Path(dali_pipes.__file__).parents[1]
CLASSES = {"AisStore", "LocalStore", "Store", "TransformedStore"}


def _asked_classes(call: ast.Call) -> set[str]:
    return {node.id for node in ast.walk(call.args[-1]) if isinstance(node, ast.Name)} | {
        node.attr for node in ast.walk(call.args[-1]) if isinstance(node, ast.Attribute)
    }


def test_nobody_outside_asks_which_kind_a_store_is() -> None:
    """No ``isinstance(store, AisStore)`` and no ``cast("AisStore", store)``: a store has a method for it."""
    found = []
    for package in ("dali_pipes", "prep", "bench"):
        for path in (ROOT / package).rglob("*.py"):
            if path.parent == ROOT / "dali_pipes" / "store":
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    asks = node.func.id in ("isinstance", "issubclass") and _asked_classes(node) & CLASSES
                    casts = node.func.id == "cast" and "Store" in ast.unparse(node.args[0])
                    if asks or casts:
                        found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


def test_a_directory_answers(tmp_path: Path) -> None:
    store: Store = LocalStore(tmp_path / "data")
    assert (store.directory, store.endpoint, store.cluster, store.etl) == (tmp_path / "data", None, None, "")
    assert not store.exists()
    store.create()
    store.create()
    assert store.exists()
    with pytest.raises(ValueError, match=f"'{tmp_path}/data' is a directory, dSort needs a bucket"):
        store.need_cluster("dSort needs a bucket")


def test_a_bucket_answers() -> None:
    store: Store = AisStore("http://localhost:1", "pets", provider="aws")
    assert (store.directory, store.endpoint, store.etl) == (None, "http://localhost:1", "")
    assert store.cluster is store
    assert store.need_cluster("dSort needs a bucket") is store
    transformed: Store = TransformedStore(store, "small")
    assert (transformed.cluster, transformed.etl, transformed.endpoint) == (store, "small", store.endpoint)
    with pytest.raises(ValueError, match="parts of an object's name must not be empty"):
        transformed.check_name("../other/x-")


def test_identity_follows_links(tmp_path: Path) -> None:
    """The same file under two names is one object."""
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    assert LocalStore(tmp_path / "link").identity("x") == LocalStore(tmp_path / "data").identity("x")
    assert LocalStore(tmp_path / "data").identity("x") != LocalStore(tmp_path / "data").identity("y")
    assert AisStore("http://localhost:1", "pets").identity("x") == "ais://pets/x"


@pytest.mark.parametrize("store", [AisStore("http://localhost:1", "pets", provider="aws"), LocalStore(Path("a"))])
def test_a_store_goes_to_another_process(store: Store) -> None:
    sent = pickle.loads(pickle.dumps(store))
    assert (sent.url, sent.endpoint, sent.directory) == (store.url, store.endpoint, store.directory)


def test_entries_of_shards_in_several_folders_and_of_missing_ones(tmp_path: Path) -> None:
    """In the order in which they were named; the first missing ones are named."""
    store = LocalStore(tmp_path)
    for size, name in enumerate(("b/x-1.tar", "a/x-0.tar", "x-2.tar")):
        store.write(name, b"x" * size)
    names = ("x-2.tar", "b/x-1.tar", "a/x-0.tar")
    assert [entry.size for entry in ShardSet(store=store, names=names).entries()] == [2, 0, 1]
    with pytest.raises(StoreError, match=rf"no shard '{tmp_path}/c/x-3.tar'; 4 were named"):
        ShardSet(store=store, names=(*names, "c/x-3.tar")).entries()
