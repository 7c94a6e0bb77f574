"""Mixtures: what may be mixed, one manifest of several data sets, and each object from its own store."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dali_pipes.data_set.data_set import DataSet, join_manifests
from dali_pipes.data_set.find import Mixture, NamedSets, find_shards
from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import classes_name, index_name
from dali_pipes.reader.samples import StoredSamples
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from tests.dali_pipes.data_set.test_data_set import stage
from tests.shards import Sample, make_samples, write_shards, write_tar
from tests.simulated import manifest_of


def find(mixture: Mixture, *, endpoint: str | None = None) -> NamedSets:
    with contextlib.ExitStack() as resources:
        return find_shards(mixture, endpoint=endpoint, embedded_dir=None, resources=resources)


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five shards of two samples, class ids 1 to 5, with a table."""
    directory = write_shards(tmp_path_factory.mktemp("pets"), make_samples([(30, 20)] * 10), per_shard=2, index=False)
    (directory / classes_name("s-")).write_text('{"1": "a", "2": "b", "3": "c", "4": "d", "5": "e"}')
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


# --- what may be mixed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "weights", "kind", "text"),
    [
        ({}, None, ValueError, "a mixture must have at least one data set, got none"),
        (["ais://pets/s-"], None, TypeError, "sets must be a mapping of names to shards, got list"),
        ({"": "x"}, None, ValueError, "name must not be empty, '.' or '..', .* got ''"),
        ({"a/b": "x"}, None, ValueError, "nor hold a '/' or an unprintable character, got 'a/b'"),
        ({"a\tb": "x"}, None, ValueError, r"an unprintable character, got 'a\\tb'"),
        ({1: "x"}, None, TypeError, "name must be a text, got 1"),
        ({"a": "x", "b": "y"}, {"a": 1}, ValueError, "exactly the sets 'a', 'b', got some for 'a'"),
        ({"a": "x"}, {"b": 2}, ValueError, "exactly the sets 'a', got some for 'b'"),
        ({"a": "x"}, {"a": 0}, ValueError, "a weight must be positive and finite, got 0 for 'a'"),
        ({"a": "x"}, {"a": float("nan")}, ValueError, "positive and finite, got nan for 'a'"),
        ({"a": "x"}, {"a": True}, TypeError, "the weight of 'a' must be a number, got True"),
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


# --- one manifest -----------------------------------------------------------------------------------------------------


def test_mixture_is_one_data_set(pets: Path, texts: Path) -> None:
    """Names, columns and sums of both, each shard under its set's name; the rest works on it as on any other."""
    found = find(Mixture({"pets": pets, "texts": texts}, weights={"texts": 3, "pets": 1}))
    assert found.url == f"pets={pets}/s-, texts={texts}/s-"
    indexed = DataSet(found)
    names = [*(f"pets/s-{row:06d}.tar" for row in range(5)), *(f"texts/s-{row:06d}.tar" for row in range(2))]
    assert indexed.manifest.names == names
    assert indexed.whole is indexed.manifest
    assert indexed.rows.tolist() == list(range(7))
    assert indexed.manifest.samples.tolist() == [2] * 5 + [3] * 2
    assert indexed.manifest.components == {"cls": 10, "image.jpg": 16, "trimap.png": 10, "txt": 6}
    assert indexed.manifest.photos == {"image.jpg": {"JPEG": 16}, "trimap.png": {"PNG": 10}}
    assert indexed.manifest.labels == {"min": 1, "max": 5}
    assert indexed.manifest.classes == {1: "a", 2: "b", 3: "c", 4: "d", 5: "e"}
    assert (indexed.set_names, indexed.set_shards, indexed.weights) == (("pets", "texts"), [5, 2], (1.0, 3.0))
    assert indexed.indexes is None
    again = Manifest.from_bytes(indexed.whole.to_bytes(), where="m")
    assert again.digest == indexed.whole.digest
    samples = StoredSamples(indexed.manifest, indexed.read_index, whole=indexed.whole)
    samples.check_component("image.jpg")
    with pytest.raises(DataError, match=r"shard 'texts/s-000000.tar', key 't00': no component 'cls' \(found: image"):
        samples.check_component("cls")
    rows = samples.rows(np.array([15]))
    assert rows.name(0) == ("texts/s-000001.tar", "t12")


def test_mixture_in_another_order_is_another_data_set(pets: Path, texts: Path) -> None:
    """And so is one under another name; weights are none of its data."""
    first, second = {"pets": pets}, {"texts": texts}
    mixtures = [Mixture(first | second), Mixture(second | first), Mixture(first | {"text": texts})]
    mixtures.append(Mixture(first | second, weights={"pets": 1, "texts": 2}))
    assert len({DataSet(find(mixture)).whole.digest for mixture in mixtures}) == 3


def test_shards_of_a_set_are_chosen_by_its_url(pets: Path, texts: Path, tmp_path: Path) -> None:
    """By braces and by a list, in its order; what is staged are their bytes, in the image of all."""
    mixture = Mixture(
        {"texts": f"{texts}/s-{{000001..000001}}.tar", "pets": [pets / "s-000003.tar", pets / "s-000000.tar"]}
    )
    indexed = DataSet(find(mixture))
    assert indexed.manifest.names == ["texts/s-000001.tar", "pets/s-000003.tar", "pets/s-000000.tar"]
    assert indexed.rows.tolist() == [1, 5, 2]
    assert indexed.whole.num_shards == 7
    assert indexed.set_shards == [1, 2]
    paths = [texts / "s-000001.tar", pets / "s-000003.tar", pets / "s-000000.tar"]
    for number, (shard, index) in enumerate(stage(indexed, tmp_path)):
        assert shard == paths[number].read_bytes()
        assert (
            index == paths[number].with_name(index_name(paths[number].name)).read_bytes() == indexed.read_index(number)
        )
        assert indexed.locate(indexed.manifest.names[number]) == str(paths[number])
        assert indexed.read_range(number, start=500, size=600) == shard[500:1100]
    assert indexed.columns().samples.keys == ["t10", "t11", "t12", "s00006", "s00007", "s00000", "s00001"]
    whole = DataSet(find(Mixture({"texts": texts, "pets": pets})))
    stage(whole, tmp_path)
    assert len(list(tmp_path.glob("dali-pipes-*/*.image"))) == 1


def test_sets_of_buckets_and_directories_are_mixed(pets: Path, bucket: AisStore, tmp_path: Path) -> None:
    """Two buckets, one of them without an index, and a directory: each object from where it is."""
    second = AisStore(bucket.endpoint, f"{bucket.bucket}-2")
    for store in (bucket, second):
        store.create()
        for path in sorted(pets.glob("*.tar"))[:3]:
            store.upload(f"deep/{path.name}", path)
    index_shards(resolve_shards(f"{bucket.url}/deep/", endpoint=bucket.endpoint))
    mixture = Mixture({"a": f"{bucket.url}/deep/s-", "b": f"{second.url}/deep/s-{{000001..000002}}.tar", "c": pets})
    indexed = DataSet(find(mixture, endpoint=bucket.endpoint))
    assert indexed.manifest.num_shards == 3 + 2 + 5
    assert sorted(indexed.indexes) == [f"b/deep/s-00000{number}.index.safetensors" for number in (1, 2)]
    expected = [*range(3), 1, 2, *range(5)]
    for number, (shard, index) in enumerate(stage(indexed, tmp_path)):
        assert shard == (pets / f"s-{expected[number]:06d}.tar").read_bytes()
        assert index == indexed.read_index(number)
    assert indexed.locate("b/deep/s-000002.tar") == f"{second.url}/deep/s-000002.tar"
    assert indexed.columns().samples.keys == [f"s{2 * number + row:05d}" for number in expected for row in range(2)]


# --- sums and tables --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "joined"),
    [
        ({"JPEG": 2, "unknown": 1}, {"PNG": 3}, {"JPEG": 2, "PNG": 3, "unknown": 1}),
        # Unsized is told where it differs from the unknown: 1 + 2 of 1.
        ({"JPEG": 3, "unknown": 1}, {"JPEG": 4, "unsized": 2}, {"JPEG": 7, "unknown": 1, "unsized": 3}),
        # Here it differs in one set, and not in both together.
        ({"unknown": 2, "unsized": 0}, {"JPEG": 4, "unsized": 2}, {"JPEG": 4, "unknown": 2}),
    ],
)
def test_photo_sums_are_added(first: dict[str, int], second: dict[str, int], joined: dict[str, int]) -> None:
    parts = {
        "a": manifest_of([4], photos={"jpg": first}),
        "b": manifest_of([4], photos={"jpg": second, "png": {"PNG": 1}}),
    }
    assert join_manifests(parts).photos == {"jpg": joined, "png": {"PNG": 1}}


def test_class_tables_that_disagree_are_refused_for_contiguous_labels(pets: Path, tmp_path: Path) -> None:
    """The same id with two names, naming both sets; or no table at all."""
    write_shards(tmp_path, make_samples([(20, 20)] * 2), per_shard=2, index=False)
    (tmp_path / classes_name("s-")).write_text('{"1": "a", "2": "boxer"}')
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
