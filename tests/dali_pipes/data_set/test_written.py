"""A listing that lacks shards is refused where no manifest says which there should be: by a record, or by numbers."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dali_pipes.data_set.written import WrittenShards, expected_shards
from dali_pipes.errors import DataError, StoreError
from dali_pipes.store.base import Store
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import Pattern
from prep.commands.group import prep
from tests.shards import contents_of, make_samples, make_source, pack, write_tar

LAST = "samples-000003.tar"
IDENTITY = "tests.dali_pipes.etl_transforms:as_told"


@pytest.fixture
def directory(tmp_path: Path) -> Store:
    """Four packed shards of ten samples, not indexed."""
    store = LocalStore(tmp_path / "shards")
    pack(make_source(40), store=store, max_count=10)
    return store


@pytest.fixture
def packed_bucket(bucket: AisStore) -> AisStore:
    """The same shards in a bucket."""
    pack(make_source(40), store=bucket, max_count=10)
    return bucket


@pytest.fixture(params=["directory", "packed_bucket"])
def store(request: pytest.FixtureRequest) -> Store:
    made: Store = request.getfixturevalue(request.param)
    return made


def run(store: Store, *arguments: str) -> Result:
    more = () if store.endpoint is None else ("--endpoint", store.endpoint)
    return CliRunner().invoke(prep, [*arguments, *more])


@pytest.mark.parametrize(
    ("kind", "command", "options"),
    [
        ("packed_bucket", "shuffle", []),
        ("directory", "shuffle", ["--engine", "exchange"]),
        ("directory", "index", ["--part", "1/2"]),
    ],
)
def test_commands_refuse_packed_shards_of_which_the_last_is_not_listed(
    request: pytest.FixtureRequest, kind: str, command: str, options: list[str]
) -> None:
    """Their numbers have no gap: the record alone knows it. Nothing is written."""
    store: Store = request.getfixturevalue(kind)
    store.delete(LAST)
    before = contents_of(store)
    done = run(store, command, store.locate("samples-"), *options)
    assert isinstance(done.exception, StoreError)
    text = str(done.exception)
    assert f"no shard '{store.locate(LAST)}'" in text
    assert "samples-written.json' lists 4 shards with 40 samples, missing: 1 of 4" in text
    assert "--allow-missing" in text
    assert contents_of(store) == before


def test_allow_missing_goes_on_says_what_is_lost_and_ends_the_record(
    directory: Store, caplog: pytest.LogCaptureFixture
) -> None:
    directory.delete(LAST)
    for command in ("info", "verify"):
        done = run(directory, command, directory.locate("samples-"), *(["--workers", "1"] * (command == "verify")))
        assert done.exit_code == 1
        assert directory.locate(LAST) in done.stdout
        assert "missing" in done.stdout or "is not there" in done.stdout
    done = run(directory, "index", directory.locate("samples-"), "--allow-missing", "--json")
    assert done.exit_code == 0, done.exception
    assert '"num_samples": 30' in done.stdout
    assert f"lacks 1 of 4 shards, which are left out: '{LAST}'" in caplog.text
    assert run(directory, "shuffle", directory.locate("samples-")).exit_code == 0


def test_shuffled_and_transformed_shards_have_a_record_of_their_own(directory: Store, tmp_path: Path) -> None:
    """Runs over disjoint shards share a record that names all shards; each split of a shuffle has its own record."""
    url, out = directory.locate("samples-"), f"{tmp_path}/out"
    outputs = [
        (f"{directory.url}/exchange-", ["shuffle", url, "--output", "exchange-", "--engine", "exchange"]),
        (f"{out}/samples-", ["transform", f"{url}{{000000..000001}}.tar", f"{out}/", "--function", IDENTITY]),
        (f"{out}/samples-", ["transform", f"{url}{{000002..000003}}.tar", f"{out}/", "--function", IDENTITY]),
        (f"{directory.url}/shuffled-train-", ["shuffle", url, "--by", "split", "--splits", "train=0.5,val=0.5"]),
    ]
    for _, command in outputs:
        done = run(directory, *command)
        assert done.exit_code == 0, done.exception
    assert (tmp_path / "shards" / ".dali-pipes/shuffled-val-written.json").exists()
    for prefix in {prefix for prefix, _ in outputs}:
        Path(f"{prefix}000000.tar").unlink()
        done = run(directory, "index", prefix)
        assert f"no shard '{prefix}000000.tar'" in str(done.exception)


@pytest.mark.parametrize(
    ("names", "lacking"),
    [
        (["a-000000", "a-000002"], ["a-000001"]),
        (["a-000001", "a-000002"], []),  # some count from 1
        (["a-20261101", "a-20261103"], []),  # dates
        (["a-2026-11-01", "a-2026-11-03"], []),
        (["a-000000", "a-099999"], []),  # ids
        (["a-7", "a-9"], []),  # no counter with zeros before it
        (["a-000", "a-002", "b-000", "b-001"], ["a-001"]),
    ],
)
def test_gaps_in_numbers_are_missing_shards(tmp_path: Path, names: list[str], lacking: list[str]) -> None:
    for name in names:
        write_tar(tmp_path / f"{name}.tar", make_samples([(30, 30)]))
    pattern = Pattern(url=f"{tmp_path}/*", store=LocalStore(tmp_path), prefix="", is_glob=True)
    expected = expected_shards(pattern, [f"{tmp_path}/{name}.tar" for name in names])
    assert set(expected.locations) == {f"{tmp_path}/{name}.tar" for name in (*names, *lacking)}


def test_record_reads_back_or_is_told_to_be_none() -> None:
    for names in (["x-000000.tar", "x-000001.tar"], ["b.tar", "a.tar"], ["c{1..2}.tar"], ["x-0.tgz"]):
        record = WrittenShards(names=tuple(names), num_samples=3, num_bytes=None)
        assert WrittenShards.from_bytes(record.to_bytes(), where="x") == record
    for data in (b"", b"[]", b"{}", b'{"shards": 3, "num_samples": 1, "num_bytes": 1}', b"\xff"):
        with pytest.raises(DataError, match="'x' is not a record of written shards"):
            WrittenShards.from_bytes(data, where="x")


def test_shards_that_were_replaced_are_indexed_as_the_error_says(store: Store) -> None:
    """``--allow-missing`` does not drop shards that exist and are not named in the command: ``--overwrite`` does."""
    store.write(LAST, store.read("samples-000000.tar") + bytes(10240))
    done = run(store, "index", store.locate("samples-"))
    assert "recorded" in str(done.exception)
    assert f"dali-pipes prep index '{store.locate('samples-')}' --allow-missing" in str(done.exception)
    assert run(store, "index", store.locate("samples-"), "--allow-missing").exit_code == 0
    assert run(store, "index", store.locate("samples-")).exit_code == 0
    done = run(store, "index", f"{store.url}/samples-{{000000..000001}}.tar", "--allow-missing")
    assert "lists 4 shards, and 2 of them are not among the 2 to be indexed" in str(done.exception)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"shards": "a-{000000..999999}{0..99}.tar"}, "too many names"),
        ({"num_samples": -1}, "a count is not a number"),
        ({"num_bytes": "3"}, "a count is not a number"),
        ({"shards": ["../a.tar"]}, "a name is not that of a shard"),
        ({"shards": [3]}, "a name is not that of a shard"),
    ],
)
def test_records_with_impossible_values_are_refused(changed: dict[str, object], text: str) -> None:
    value = {"shards": "a-{000000..000003}.tar", "num_samples": 3, "num_bytes": 4}
    assert len(WrittenShards.from_bytes(json.dumps(value).encode(), where="a-written.json").names) == 4
    with pytest.raises(DataError, match=r"'a-written.json' is not a record of written shards") as failed:
        WrittenShards.from_bytes(json.dumps(value | changed).encode(), where="a-written.json")
    assert str(failed.value.__cause__) == text
