"""Samples that are left out: by lists, by a predicate, by what they lack; what is read for it, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dali_pipes as dp
from dali_pipes.data_set.data_set import DataSet
from dali_pipes.data_set.exclusions import excluded_ordinals
from dali_pipes.data_set.find import Mixture
from dali_pipes.errors import DataError
from dali_pipes.formats.names import columns_name
from dali_pipes.formats.quarantine import Quarantine
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from tests.dali_pipes.data_set.test_mixture import find
from tests.loaders import keys_of, open_loader, substituting
from tests.shards import Sample, copy_files, make_samples, with_data, write_shards, write_tar

NUM_SHARDS, PER_SHARD = 4, 5


def components_of(ordinal: int) -> dict[str, bytes]:
    """All have txt; every third lacks cls, jpg or jpeg are there in turn, and in one neither."""
    components = {"txt": b"x"}
    if ordinal % 3:
        components["cls"] = str(ordinal % 4).encode()
    if ordinal != 7:
        components["jpg" if ordinal % 2 else "jpeg"] = b"\xff\xd8\xff"
    return components


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards of five samples, ``cat/00`` to ``dog/19``."""
    directory = tmp_path_factory.mktemp("chosen")
    for number in range(NUM_SHARDS):
        ordinals = range(number * PER_SHARD, (number + 1) * PER_SHARD)
        samples = [Sample(f"{'cat' if row < 8 else 'dog'}/{row:02d}", components_of(row)) for row in ordinals]
        write_tar(directory / f"s-{number:06d}.tar", samples)
    index_shards(resolve_shards(directory, endpoint=None))
    return directory


@pytest.fixture
def indexed(shards: Path) -> DataSet:
    return DataSet(resolve_shards(shards, endpoint=None))


def part_of(shards: Path, *numbers: int) -> DataSet:
    return DataSet(resolve_shards([shards / f"s-{number:06d}.tar" for number in numbers], endpoint=None))


@pytest.fixture
def listed(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a list of samples."""

    def write(text: str) -> Path:
        path = tmp_path / "bad.tsv"
        path.write_text(text)
        return path

    return write


def test_quarantine_of_a_job_is_left_out_of_the_next(indexed: DataSet, tmp_path: Path) -> None:
    """What two ranks wrote down counts once."""
    for rank in range(2):
        quarantine = Quarantine(tmp_path / f"q-{rank}.tsv", manifest=indexed.manifest.digest)
        quarantine.add("s-000003.tar", "dog/16", "jpg", "broken")
        quarantine.add("s-000001.tar", f"cat/0{5 + rank}", "", "broken")
    excluded, summary = excluded_ordinals(indexed, exclude=[tmp_path / "q-0.tsv", str(tmp_path / "q-1.tsv")])
    assert excluded.tolist() == [5, 6, 16]
    assert summary == "3 samples left out: 3 by exclude"


def test_listed_samples_that_the_loader_does_not_read_are_counted(
    shards: Path, listed: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """No error: a quarantine of a whole data set serves its parts."""
    path = listed("s-000003.tar\tdog/16\ns-000009.tar\tx\ns-000001.tar\tcat/05\ns-000009.tar\ty\n")
    assert excluded_ordinals(part_of(shards, 3), exclude=path).excluded.tolist() == [1]
    assert "3 of 4 listed samples are in shards that the loader does not read, such as 's-000009.tar'" in caplog.text
    assert excluded_ordinals(part_of(shards, 2, 0), exclude=listed("cat/00\ndog/19\n")).excluded.tolist() == [5]
    assert "1 of 2 listed keys are in shards that the loader does not read, such as 'dog/19'" in caplog.text


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ("s-000001.tar\tcat/05\n\ns-000001.tar\tcat/01\n", "3: shard 's-000001.tar' has no key 'cat/01'; was the list"),
        ("cat/00\ndog/19.jpg\ncat/000\n", "2: key 'dog/19.jpg' is not in .* \\(2 such keys .*; expected keys such as"),
    ],
)
def test_listed_key_that_is_not_there_is_named_with_file_and_line(
    indexed: DataSet, listed: Callable[[str], Path], lines: str, text: str
) -> None:
    """Most likely the list is of other shards with the same names, or it has a file's name instead of a key."""
    path = listed(lines)
    with pytest.raises(DataError, match=f"'{path}':{text}"):
        excluded_ordinals(indexed, exclude=path)


def test_bad_sample_of_a_mixture_is_named_with_its_set(small_shards: Path, tmp_path: Path) -> None:
    """The quarantine names the data set, and the next job uses the quarantine to leave the sample out."""
    samples = with_data(make_samples([(20, 20)] * 5), {2: b"GIF89a"})
    mixture = dp.Mixture({"small": small_shards, "few": write_shards(tmp_path, samples, per_shard=5)})
    with open_loader(mixture, bad_samples=substituting(tmp_path)) as loader:
        list(loader)
        assert [(bad.shard, bad.key) for bad in loader.bad_samples] == [("few/s-000000.tar", "few/s00002")]
    with open_loader(mixture, select=dp.Select(exclude=tmp_path / "q.tsv")) as loader:
        assert loader.num_samples == 23 + 4
        assert "few/s00002" not in keys_of(loader)


def test_lists_of_a_mixture_and_of_its_sets(shards: Path, tmp_path: Path, listed: Callable[[str], Path]) -> None:
    """A shard by its combined name, or by its own where one set only has it; never a guess."""
    other = tmp_path / "other"
    other.mkdir()
    write_tar(other / "s-000003.tar", [Sample("dog/16", {"txt": b"x"})])
    write_tar(other / "s-000008.tar", [Sample("cat/00", {"txt": b"x"}), Sample("z", {"txt": b"x"})])
    index_shards(resolve_shards(other, endpoint=None))
    indexed = DataSet(find(Mixture({"a": shards, "b": other})))
    # By the combined name; by its own; a key alone is in both sets.
    path = listed("b/s-000003.tar\tdog/16\ns-000001.tar\tcat/05\ns-000008.tar\tz\ncat/00\n")
    assert excluded_ordinals(indexed, exclude=path).excluded.tolist() == [0, 5, 20, 21, 22]
    path = listed("s-000001.tar\tcat/05\ns-000003.tar\tdog/16\n")
    ambiguous = rf"'{path}':2: shard 's-000003.tar' may be 'a/s-000003.tar' or 'b/s-000003.tar'; write which"
    with pytest.raises(DataError, match=ambiguous):
        excluded_ordinals(indexed, exclude=path)
    # Also where the loader has one of the two only: the other may be meant.
    part = DataSet(find(Mixture({"a": shards / "s-000003.tar", "b": other / "s-000008.tar"})))
    part_of_all = DataSet(find(Mixture({"a": f"{shards}/s-{{000000..000001}}.tar", "b": other})))
    with pytest.raises(DataError, match=ambiguous):
        excluded_ordinals(part_of_all, exclude=path)
    assert excluded_ordinals(part, exclude=listed("a/s-000003.tar\tdog/16\n")).excluded.tolist() == [1]
    with pytest.raises(DataError, match=r"key 'a/dog/99' is not in .*; expected keys such as 'a/cat/00'"):
        excluded_ordinals(indexed, exclude=listed("a/dog/99\n"))


@pytest.mark.parametrize(
    ("where", "text"),
    [
        (
            lambda columns: columns.labels,
            r"one for each of 20 samples, got int64 of shape \[20\]; for instance: lambda",
        ),
        (lambda columns: np.ones(3, bool), r"one for each of 20 samples, got bool of shape \[3\]"),
        (lambda columns: None, "one for each of 20 samples, got NoneType"),
    ],
)
def test_where_that_gives_no_choice_is_refused(indexed: DataSet, where: Any, text: str) -> None:
    with pytest.raises(TypeError, match=f"where must return a numpy array of bool, {text}"):
        excluded_ordinals(indexed, where=where)


def test_all_that_is_left_out_together_may_not_be_all(indexed: DataSet, listed: Callable[[str], Path]) -> None:
    """Each alone leaves some; each sample counts for the first that leaves it out."""
    keys = "".join(f"cat/{row:02d}\n" for row in range(8)) + "dog/08\n"
    with pytest.raises(ValueError, match="where keeps none of the 20 samples"):
        excluded_ordinals(indexed, where=lambda columns: columns.labels > 99)
    chosen = excluded_ordinals(indexed, where=lambda c: c.shards != "s-000001.tar", exclude=listed(keys))
    assert chosen.excluded.tolist() == list(range(10))
    assert chosen.summary == "10 samples left out: 5 by where, 5 by exclude"
    with pytest.raises(ValueError, match=r"none of the 20 samples of '.*' is left: 12 by where, 8 by exclude"):
        excluded_ordinals(indexed, where=lambda c: np.strings.startswith(c.keys, "cat/"), exclude=listed(keys))


def test_missing_column_file_is_named(shards: Path, tmp_path: Path, listed: Callable[[str], Path]) -> None:
    """By each of the choices that need it."""
    copy_files(shards, LocalStore(tmp_path))
    (tmp_path / columns_name("s-")).unlink()
    indexed = DataSet(resolve_shards(tmp_path, endpoint=None))
    choices: list[dict[str, Any]] = [
        {"exclude": listed("s-000001.tar\tcat/05\n")}, {"where": lambda c: c.labels > 0}, {"lacking": ["cls"]}
    ]  # fmt: skip
    for options in choices:
        with pytest.raises(DataError, match=r"no column file '.*s-columns.safetensors', .*dali-pipes prep index '"):
            excluded_ordinals(indexed, **options)


def test_several_components_and_reasons_are_counted_once(indexed: DataSet) -> None:
    chosen = excluded_ordinals(
        indexed, where=lambda columns: columns.keys != "cat/00", lacking=["cls", "jpg;jpeg", "txt"]
    )
    assert chosen.summary == "8 samples left out: 1 by where, 6 without 'cls', 1 without 'jpg;jpeg'"
    with pytest.raises(
        DataError, match=r"no sample of '.*' has component 'png;gif' \(found: 'cls', 'jpeg', 'jpg', 'txt'"
    ):
        excluded_ordinals(indexed, lacking=["png;gif"])
