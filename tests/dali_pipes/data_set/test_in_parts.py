"""Samples that are chosen by columns in parts, in bounded memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dali_pipes.data_set import data_set as data_set_module
from dali_pipes.data_set.data_set import DataSet
from dali_pipes.data_set.exclusions import excluded_ordinals
from dali_pipes.data_set.find import Mixture
from dali_pipes.errors import DataError
from dali_pipes.formats import column_file, sample_columns
from dali_pipes.formats.sample_columns import Columns
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from tests.dali_pipes.data_set.test_mixture import find
from tests.shards import Sample, copy_files, photo_bytes, write_tar

NUM_SHARDS, PER_SHARD = 5, 7


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five shards of seven samples; some lack a label, keys have several lengths, photos two sizes."""
    directory = tmp_path_factory.mktemp("parts")
    for number in range(NUM_SHARDS):
        samples = []
        for row in range(number * PER_SHARD, (number + 1) * PER_SHARD):
            components = {"jpg": photo_bytes(row, 16, 8 + row % 2)}
            if row % 3:
                components["cls"] = str(row % 4).encode()
            samples.append(Sample(f"{'ü' * (row % 5)}/{row}", components))
        write_tar(directory / f"s-{number:06d}.tar", samples)
    index_shards(resolve_shards(directory, endpoint=None))
    return directory


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards without photos and labels."""
    directory = tmp_path_factory.mktemp("texts")
    for number in range(2):
        samples = [Sample(f"t{3 * number + row}", {"txt": b"x"}) for row in range(3)]
        write_tar(directory / f"t-{number}.tar", samples)
    index_shards(resolve_shards(directory, endpoint=None))
    return directory


def content(columns: Columns) -> dict[str, list[Any]]:
    """All that a predicate can see."""
    found = {"keys": columns.keys.tolist(), "labels": columns.labels.tolist(), "shards": columns.shards.tolist()}
    found |= {f"has {name}": columns.has(name).tolist() for name in columns.components}
    for name in columns.samples.sizes:
        height, width = columns.size(name)
        found |= {f"height {name}": height.tolist(), f"width {name}": width.tolist()}
    return found


def joined(data_set: DataSet) -> dict[str, list[Any]]:
    """The content of all parts, one after the other."""
    found: dict[str, list[Any]] = {}
    for first, columns in data_set.columns_in_parts():
        part = content(columns)
        assert first == len(found.get("keys", []))
        assert not found or found.keys() == part.keys()
        found = {name: found.get(name, []) + values for name, values in part.items()}
    return found


def test_parts_of_a_mixture_have_the_components_of_all(
    shards: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a set without labels has the label -1, as in the columns at once; so has a set that is indexed now."""
    write_tar(tmp_path / "n-0.tar", [Sample("new", {"cls": b"900", "txt": b"x"})])
    data_set = DataSet(find(Mixture({"texts": texts, "photos": shards, "new": tmp_path})))
    monkeypatch.setattr(sample_columns, "SAMPLES_AT_A_TIME", 4)
    assert joined(data_set) == content(data_set.columns())
    assert joined(data_set)["has jpg"] == [False] * 6 + [True] * 35 + [False]


def test_where_never_sees_an_empty_part(tmp_path: Path) -> None:
    """A first part of one sample is not halved: numpy makes floats of an empty list, which are no answer."""
    for number, num_samples in enumerate((3, 1)):
        samples = [Sample(f"{number}{row}", {"txt": b"x"}) for row in range(num_samples)]
        write_tar(tmp_path / f"s-{number}.tar", samples)
    index_shards(resolve_shards(tmp_path, endpoint=None))
    data_set = DataSet(resolve_shards([tmp_path / "s-1.tar", tmp_path / "s-0.tar"], endpoint=None))
    chosen = excluded_ordinals(data_set, where=lambda columns: np.array([key != "01" for key in columns.keys]))
    assert chosen.excluded.tolist() == [2]


@pytest.mark.parametrize(
    "where",
    [
        lambda columns: np.arange(len(columns)) % 2 == 0,  # by the place in the part
        lambda columns: columns.labels == columns.labels[-1],  # by another sample
        lambda columns: np.full(len(columns), len(columns) > PER_SHARD - 1),  # by the number of samples
    ],
)
def test_where_that_looks_at_other_samples_is_refused(
    shards: Path, monkeypatch: pytest.MonkeyPatch, where: Any
) -> None:
    """Its answer would depend on the parts."""
    monkeypatch.setattr(sample_columns, "SAMPLES_AT_A_TIME", PER_SHARD)
    data_set = DataSet(resolve_shards(shards, endpoint=None))
    with pytest.raises(ValueError, match=r"judge each sample by that sample alone; of sample '.*' it says .* among 7"):
        excluded_ordinals(data_set, where=where)


def test_column_file_of_another_manifest_or_replaced_is_refused(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_file, "_HEAD_BYTES", 16)
    copy_files(shards, LocalStore(tmp_path))
    data_set = DataSet(resolve_shards(tmp_path, endpoint=None))
    parts = data_set.columns_in_parts()
    next(parts)
    (tmp_path / "s-000004.tar").unlink()
    index_shards(resolve_shards(tmp_path, endpoint=None), overwrite=True)
    with pytest.raises(DataError, match="damaged dali-pipes column file: it was replaced while it was read"):
        next(parts)
    with pytest.raises(DataError, match="is the column file of another manifest"):
        next(data_set.columns_in_parts())


def test_columns_that_do_not_fit_in_memory_are_refused_before_the_read(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For factors of classes and buckets, which need all samples at once."""
    data_set = DataSet(resolve_shards(shards, endpoint=None))
    monkeypatch.setattr(data_set_module, "available_memory", lambda: 1399)
    monkeypatch.setattr(LocalStore, "find", None)
    with pytest.raises(ValueError, match=r"of the 35 samples .* take about 1400 bytes .* 1399 are available"):
        data_set.columns()


def test_folds_depend_on_seed_and_key_alone(shards: Path) -> None:
    data_set = DataSet(resolve_shards(shards, endpoint=None))

    def held_out(seed: int, fold: int) -> list[int]:
        where = lambda columns: columns.fold(3, seed=seed) != fold  # noqa: E731
        return excluded_ordinals(data_set, where=where).excluded.tolist()

    folds = [held_out(0, fold) for fold in range(3)]
    assert sorted(ordinal for fold in folds for ordinal in fold) == list(range(NUM_SHARDS * PER_SHARD))
    assert folds != [held_out(1, fold) for fold in range(3)]
    with pytest.raises(ValueError, match="number must be 2 or more folds, got 1"):
        excluded_ordinals(data_set, where=lambda columns: columns.fold(1) == 0)
