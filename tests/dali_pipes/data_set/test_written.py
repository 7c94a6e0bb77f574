"""A listing that lacks shards is refused where no manifest says which there should be: by a record, or by numbers."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import dali_pipes as dp
from dali_pipes.data_set.written import WrittenShards, expected_shards, stored_records, write_record
from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.names import record_names
from dali_pipes.store.base import Store
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import Pattern
from prep.commands.group import prep
from prep.shuffle.request import Request
from prep.shuffle.shuffle import shuffle
from tests.loaders import open_loader
from tests.shards import make_samples, make_source, pack, write_shards, write_tar

LAST = "samples-000003.tar"
IDENTITY = "tests.dali_pipes.etl_transforms:as_told"


@pytest.fixture(params=["directory", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Four packed shards of ten samples, not indexed."""
    if request.param == "directory":
        made: Store = LocalStore(tmp_path / "shards")
    else:
        made = request.getfixturevalue("bucket")
    pack(make_source(40), store=made, max_count=10)
    return made


def run(store: Store, *arguments: str) -> Result:
    more = () if store.endpoint is None else ("--endpoint", store.endpoint)
    return CliRunner().invoke(prep, [*arguments, *more])


COMMANDS: dict[str, Callable[[str], tuple[str, ...]]] = {
    "shuffle": lambda url: ("shuffle", url),
    "exchange": lambda url: ("shuffle", url, "--engine", "exchange"),
    "index": lambda url: ("index", url),
    "index of a part": lambda url: ("index", url, "--part", "1/2"),
    "anew": lambda url: ("index", url, "--overwrite"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_packed_shards_of_which_the_last_is_not_listed(store: Store, command: str) -> None:
    """Their numbers have no gap: the record alone knows it. Nothing is written."""
    url = store.locate("samples-")
    store.delete(LAST)
    before = [entry.name for entry in store.list("")]
    done = run(store, *COMMANDS[command](url))
    assert isinstance(done.exception, StoreError)
    text = str(done.exception)
    assert f"no shard '{store.locate(LAST)}'" in text
    assert "samples-written.json' lists 4 shards with 40 samples, missing: 1 of 4" in text
    assert "--allow-missing" in text
    assert [entry.name for entry in store.list("")] == before


@pytest.mark.parametrize("command", ["shuffle", "index"])
def test_allow_missing_goes_on_and_says_what_is_lost(
    store: Store, command: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.delete(LAST)
    done = run(store, command, store.locate("samples-"), "--allow-missing", "--json")
    assert done.exit_code == 0, done.exception
    assert '"num_samples": 30' in done.stdout
    assert f"lacks 1 of 4 shards, which are left out: '{LAST}'" in caplog.text


def test_index_that_may_leave_shards_out_ends_the_record(store: Store) -> None:
    store.delete(LAST)
    assert run(store, "index", store.locate("samples-"), "--allow-missing").exit_code == 0
    assert run(store, "shuffle", store.locate("samples-")).exit_code == 0


@pytest.mark.parametrize("command", ["info", "verify"])
def test_info_and_verify_name_the_missing_shard(store: Store, command: str) -> None:
    store.delete(LAST)
    done = run(store, command, store.locate("samples-"))
    assert done.exit_code == 1
    assert store.locate(LAST) in done.stdout
    assert "missing" in done.stdout or "is not there" in done.stdout


def test_loader_without_a_manifest_refuses(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "s", make_samples([(30, 30)] * 12), per_shard=3, index=False)
    names = sorted(path.name for path in shards.glob("*.tar"))
    write_record(LocalStore(shards), "s-", WrittenShards(names=names, num_samples=12))
    (shards / names[-1]).unlink()
    with pytest.raises(StoreError, match=r"s-000003\.tar'; .*s-written\.json' lists 4 shards with 12 samples"):
        dp.loader(shards, dp.segmentation(crop=16), batch_size=3, device="cpu")
    select = dp.Select(allow_missing=True)
    with dp.loader(shards, dp.segmentation(crop=16), batch_size=3, device="cpu", select=select) as opened:
        assert opened.num_samples == 9


def test_loader_of_a_bucket_without_a_manifest_refuses(bucket: AisStore) -> None:
    pack(make_source(40), store=bucket, max_count=10)
    bucket.delete(LAST)
    with pytest.raises(StoreError, match="missing: 1 of 4; perhaps a target of the cluster is away"):
        open_loader(bucket.locate("samples-"), dp.classification_eval(crop=16), batch_size=3, endpoint=bucket.endpoint)


def test_shuffled_shards_have_a_record_of_their_own(store: Store) -> None:
    for engine in ("exchange",) if store.directory is not None else ("exchange", "dsort"):
        assert (
            run(store, "shuffle", store.locate("samples-"), "--output", f"{engine}-", "--engine", engine).exit_code == 0
        )
        last = [entry.name for entry in store.list(f"{engine}-0")][-1]
        store.delete(last)
        done = run(store, "index", store.locate(f"{engine}-"))
        assert f"no shard '{store.locate(last)}'" in str(done.exception)


def test_sets_that_a_shuffle_splits_have_a_record_each(tmp_path: Path) -> None:
    pack(make_source(40), store=LocalStore(tmp_path), max_count=10)
    done = run(LocalStore(tmp_path), "shuffle", str(tmp_path), "--by", "split", "--splits", "train=0.7,val=0.3")
    assert done.exit_code == 0, done.exception
    records = sorted(path.name for path in tmp_path.glob("*written.json"))
    assert records == ["samples-written.json", "shuffled-train-written.json", "shuffled-val-written.json"]


def test_pack_that_was_stopped_is_not_taken_for_complete(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is there before the first shard; and of shards that were to be replaced some are the old ones."""

    def fail(*_: object) -> bool:
        raise StoreError("stopped")

    monkeypatch.setattr("prep.pack.pack.write_file", fail)
    with pytest.raises(StoreError, match="stopped"):
        pack(make_source(40, num_bytes=900), store=store, max_count=10, overwrite=True)
    done = run(store, "index", store.locate("samples-"))
    assert "and the command that wrote them recorded" in str(done.exception)


def test_record_is_on_two_targets(bucket: AisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that is lost must not take the record along with the last shards."""
    bucket.create()
    targets = iter(["a", "a", "a", "b"])
    monkeypatch.setattr(AisStore, "target_of", lambda self, name: next(targets))
    write_record(bucket, "x-", WrittenShards(names=["x-000000.tar", "x-000001.tar"]))
    assert stored_records(bucket, "x-") == [
        "x-written-2.json",
        "x-written-3.json",
        "x-written-4.json",
        "x-written.json",
    ]
    bucket.write("x-000000.tar", b"")
    bucket.delete("x-written.json")
    pattern = Pattern(url=bucket.locate("x-"), store=bucket, prefix="x-")
    expected = expected_shards(pattern, [bucket.locate("x-000000.tar")])
    assert expected.locations == [bucket.locate("x-000000.tar"), bucket.locate("x-000001.tar")]


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


def test_url_of_some_shards_is_compared_with_these_only(store: Store) -> None:
    """``samples-00000`` names them by a part of their number; a record beside them says which there are."""
    store.delete("samples-000001.tar")
    assert isinstance(run(store, "index", store.locate("samples-00000")).exception, StoreError)
    if store.directory is not None:
        assert run(store, "info", f"{store.url}/samples-00000[023].tar").exit_code == 0


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"shards": 3, "num_samples": 1, "num_bytes": 1}', b"\xff"])
def test_record_that_is_none_is_told(store: Store, data: bytes) -> None:
    store.write(record_names("samples-")[0], data)
    done = run(store, "index", store.locate("samples-"))
    assert isinstance(done.exception, DataError)
    assert "samples-written.json' is not a record of written shards" in str(done.exception)


def test_record_reads_back() -> None:
    for names in (["x-000000.tar", "x-000001.tar"], ["b.tar", "a.tar"], ["c{1..2}.tar"], ["x-0.tgz"]):
        record = WrittenShards(names=tuple(names), num_samples=3, num_bytes=None)
        assert WrittenShards.from_bytes(record.to_bytes(), where="x") == record


def test_moved_data_set_takes_its_record_along(tmp_path: Path) -> None:
    pack(make_source(40), store=LocalStore(tmp_path), prefix="a/x-", max_count=10)
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "b" / "x-000003.tar").unlink()
    done = run(LocalStore(tmp_path), "index", str(tmp_path / "b"))
    assert f"no shard '{tmp_path}/b/x-000003.tar'" in str(done.exception)


@pytest.mark.parametrize("num_copies", [1, 2])
def test_shards_that_were_replaced_are_indexed_as_the_error_says(store: Store, num_copies: int) -> None:
    for name in record_names("samples-")[1:num_copies]:
        store.write(name, store.read(record_names("samples-")[0]))
    store.write(LAST, store.read("samples-000000.tar") + bytes(10240))
    done = run(store, "index", store.locate("samples-"))
    assert "recorded" in str(done.exception)
    assert f"dali-pipes prep index '{store.locate('samples-')}' --allow-missing" in str(done.exception)
    assert run(store, "verify", store.locate("samples-"), "--workers", "1").exit_code in (0, 1)  # it says what it finds
    assert run(store, "index", store.locate("samples-"), "--allow-missing").exit_code == 0
    assert run(store, "index", store.locate("samples-")).exit_code == 0


def test_index_that_may_leave_shards_out_drops_no_shard_that_is_there(store: Store) -> None:
    """It is named by nobody, and not missing: that is what ``--overwrite`` is for."""
    assert run(store, "index", store.locate("samples-")).exit_code == 0
    done = run(store, "index", f"{store.url}/samples-{{000000..000001}}.tar", "--allow-missing")
    assert "lists 4 shards, and 2 of them are not among the 2 to be indexed" in str(done.exception)


def test_transform_in_two_runs_has_one_record(store: Store, tmp_path: Path) -> None:
    """Runs over disjoint shards, and parts, name all of them together."""
    out = tmp_path / "out"
    for shards in ("{000000..000001}", "{000002..000003}"):
        done = run(store, "transform", f"{store.url}/samples-{shards}.tar", f"{out}/", "--function", IDENTITY)
        assert done.exit_code == 0, done.exception
    (out / "samples-000000.tar").unlink()
    done = run(LocalStore(out), "index", str(out))
    assert f"no shard '{out}/samples-000000.tar'; '{out}/samples-written.json' lists 4 shards" in str(done.exception)


def test_dsort_that_is_stopped_is_not_taken_for_complete(bucket: AisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last shards may be missing: the record says so until the output was compared."""
    pack(make_source(40), store=bucket, max_count=10)

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("prep.shuffle.shuffle.check_same", stop)
    shards = ShardSet(store=bucket, names=[f"samples-00000{number}.tar" for number in range(4)])
    with pytest.raises(KeyboardInterrupt):
        shuffle(Request(shards, engine="dsort"))
    monkeypatch.undo()
    assert isinstance(run(bucket, "index", bucket.locate("shuffled-")).exception, StoreError)
