"""Mixtures: what may be mixed, one manifest of several data sets, and each object from its own store."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from dali_pipes.data_set.data_set import DataSet
from dali_pipes.data_set.find import Mixture, NamedSets, find_shards
from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.names import classes_name
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from tests.shards import Sample, make_samples, write_classes, write_shards, write_tar


def find(mixture: Mixture, *, endpoint: str | None = None) -> NamedSets:
    with contextlib.ExitStack() as resources:
        return find_shards(mixture, endpoint=endpoint, embedded_dir=None, resources=resources)


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five shards of two samples, class ids 1 to 5, with a table."""
    directory = write_shards(tmp_path_factory.mktemp("pets"), make_samples([(30, 20)] * 10), per_shard=2, index=False)
    write_classes(directory, {"1": "a", "2": "b", "3": "c", "4": "d", "5": "e"})
    index_shards(resolve_shards(directory, endpoint=None))
    return directory


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of the same names as the pets', of a photo and no label."""
    directory = tmp_path_factory.mktemp("texts")
    photo = make_samples([(20, 20)])[0].components["image.jpg"]
    for number in range(2):
        samples = [Sample(f"t{number}{row}", {"image.jpg": photo, "txt": b"x"}) for row in range(3)]
        write_tar(directory / f"s-{number:06d}.tar", samples)
    index_shards(resolve_shards(directory, endpoint=None))
    return directory


@pytest.mark.parametrize(
    ("sets", "weights", "kind", "text"),
    [
        ({}, None, ValueError, "a mixture must have at least one data set, got none"),
        (["ais://pets/s-"], None, TypeError, "sets must be a mapping of names to shards, got list"),
        ({"": "x"}, None, ValueError, "name must not be empty, '.' or '..', .* got ''"),
        ({"a/b": "x"}, None, ValueError, "nor hold a '/' or an unprintable character, got 'a/b'"),
        ({"a": "x"}, {"b": 2}, ValueError, "exactly the sets 'a', got some for 'b'"),
        ({"a": "x"}, {"a": 0}, ValueError, "a weight must be positive and finite, got 0 for 'a'"),
        ({"a": "x"}, [1.0], TypeError, "weights must be a mapping of names to numbers, got list"),
    ],
)
def test_mixture_that_cannot_be_is_refused(sets: Any, weights: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        Mixture(sets, weights=weights)


def test_set_that_is_not_there_is_named(pets: Path, tmp_path: Path) -> None:
    """Which of the data sets the error is about."""
    with pytest.raises(StoreError, match=rf"data set 'other': '{tmp_path}' holds no .tar"):
        find(Mixture({"pets": pets, "other": tmp_path}))
    with pytest.raises(ValueError, match="data set 'other': shards must name at least one tar, got an empty list"):
        find(Mixture({"pets": pets, "other": []}))


def test_class_tables_that_disagree_are_refused_for_contiguous_labels(pets: Path, tmp_path: Path) -> None:
    """The same id with two names, naming both sets; or no table at all."""
    write_shards(tmp_path, make_samples([(20, 20)] * 2), per_shard=2, index=False)
    write_classes(tmp_path, {"1": "a", "2": "boxer"})
    index_shards(resolve_shards(tmp_path, endpoint=None))
    indexed = DataSet(find(Mixture({"pets": pets, "own": tmp_path})))
    with pytest.raises(
        DataError, match=r"class id 2 is 'b' in data set 'pets', 'boxer' in 'own'; give .* or take labels='raw'"
    ):
        indexed.check_classes()
    (tmp_path / classes_name("s-")).unlink()
    index_shards(resolve_shards(tmp_path, endpoint=None))
    indexed = DataSet(find(Mixture({"pets": pets, "own": tmp_path})))
    with pytest.raises(DataError, match=r"a class table of every data set, and the manifest of 'own' has none; write"):
        indexed.check_classes()
    DataSet(find(Mixture({"pets": pets, "again": pets}))).check_classes()
    DataSet(resolve_shards(tmp_path, endpoint=None)).check_classes()  # one set: `Samples` looks at its table
