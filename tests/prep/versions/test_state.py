"""A job's state holds the version that it reads, and goes on with it."""

from functools import partial
from pathlib import Path

import pytest

import dali_pipes as dp
from bench.engine.options import opened_shards
from tests import builders
from tests.prep.versions.sets import Place, class_folders

open_loader = partial(builders.open_loader, graph=dp.classification_train(crop=8), batch_size=2, seed=3)


def keys_of(loader: dp.Loader) -> list[list[str]]:
    return [list(batch["key"]) for (batch,) in loader]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("change", ["add", "remove"])
def test_a_state_goes_on_with_its_version_or_says_so(
    local: Place, more: Path, tmp_path: Path, version: int, change: str
) -> None:
    if version == 2:
        local.add(more)
    with open_loader(local.url) as loader:
        expected = keys_of(loader)
        loader.set_epoch(0)
        next(iter(loader))
        state = loader.state_dict()
    assert state.get("data_versions") == (None if version == 1 else [2])
    if change == "remove":
        local.remove("cat/000")
    else:
        local.add(class_folders(tmp_path / "later", {"cat": 1}, first=80))
    message = (
        rf"the state is of version {version} of '{local.url}', this loader reads version {version + 1}; "
        rf"open '{local.url}@{version}'"
    )
    with pytest.raises(dp.StateError, match=message):
        open_loader(local.url, state=state)
    with open_loader(local.url) as loader, pytest.raises(dp.StateError, match=message):
        loader.load_state_dict(state)
    with open_loader(f"{local.url}@{version}", state=state) as loader:
        assert keys_of(loader) == expected[1:]


def test_the_state_of_a_mixture_names_the_set(local: Place, more: Path) -> None:
    sets = {"a": f"{local.url}@1", "b": local.url}
    with open_loader(dp.Mixture(sets)) as loader:
        next(iter(loader))
        state = loader.state_dict()
    local.add(more)
    with pytest.raises(dp.StateError, match=rf"version 1 of '{local.url}', this loader reads version 2; open '.*@1'"):
        open_loader(dp.Mixture(sets), state=state)
    with open_loader(dp.Mixture({"a": f"{local.url}@1", "b": f"{local.url}@1"}), state=state) as loader:
        assert len(keys_of(loader)) == 5


@pytest.mark.parametrize("versions", ["2", [0], [True], [1.5], {"a": 1}])
def test_impossible_versions_are_refused(local: Place, versions: object) -> None:
    with open_loader(local.url) as loader:
        state = loader.state_dict()
        with pytest.raises(dp.StateError, match="'data_versions' must be whole numbers from 1"):
            loader.load_state_dict(state | {"data_versions": versions})


def test_benchmarks_take_the_newest_version_only(local: Place) -> None:
    """Other loaders do not know versions: they read whole shards."""
    local.remove("cat/000")
    for version, message in (
        ("@1", "take the newest version .*name it without @1"),
        ("", "hold samples that were removed"),
    ):
        with (
            pytest.raises(dp.DataError, match=message),
            opened_shards(f"{local.url}{version}", endpoint=None, embedded_dir=None),
        ):
            pass
