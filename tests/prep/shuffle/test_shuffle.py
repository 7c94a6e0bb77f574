"""A shuffle by a dSort job: what starts, what fails, and what a cluster did wrong."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
from aistore.sdk.dsort.core import Dsort
from aistore.sdk.errors import AISError

from dali_pipes.errors import DataError, StoreError
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.shard_set import ShardSet
from prep.shuffle import shuffle as shuffle_module
from prep.shuffle.order import Algorithm
from prep.shuffle.request import Request
from prep.shuffle.shuffle import shuffle, spec_of
from tests.prep.shuffle.conftest import NUM_SAMPLES
from tests.shards import make_source, pack, read_tar, tar_bytes


def _read(store: AisStore, names: Sequence[str]) -> list[tuple[str, bytes]]:
    """Member names and bytes in the order of the shards."""
    return [member for name in names for member in read_tar(store.read(name))]


def _names(store: AisStore, prefix: str) -> list[str]:
    return [entry.name for entry in store.list(prefix)]


# The job, on the embedded node


def test_shuffle_by_a_job_reports_what_it_wrote(packed: ShardSet, bucket: AisStore) -> None:
    """The samples are compared with the exchange's in `test_engines`."""
    report = shuffle(Request(packed, algorithm=Algorithm(seed=7)))
    assert (report.num_samples, report.num_input_shards) == (NUM_SAMPLES, 5)
    assert report.url == f"{bucket.url}/shuffled-"
    assert len(report.shards) in (4, 5)  # their size is the mean of the input's
    assert bucket.read("shuffled-classes.json") == bucket.read("samples-classes.json")
    assert report.num_bytes == sum(bucket.size(name) or 0 for name in report.shards)


# What is refused before a job is started


def test_shuffle_of_absent_shards_names_them(packed: ShardSet, bucket: AisStore) -> None:
    absent = ShardSet(store=bucket, names=tuple(f"samples-{number:06d}.tar" for number in range(7)))
    with pytest.raises(
        StoreError, match=r"no shard '.*samples-000005\.tar', '.*samples-000006\.tar' at .*; 7 were named"
    ):
        shuffle(Request(absent))


def test_shuffle_of_shards_that_share_a_key_names_it(bucket: AisStore) -> None:
    """Shuffled, the two samples could come to stand together, and every reader would take them for one."""
    for number in range(2):
        pack(make_source(4), store=bucket, prefix=f"same{number}-")
        bucket.write(f"joined-{number}.tar", bucket.read(f"same{number}-000000.tar"))
    with pytest.raises(DataError, match=r"4 keys come more than once in the 2 shards: 'folder/0000', .* and 1 more;"):
        shuffle(Request(ShardSet(store=bucket, names=("joined-0.tar", "joined-1.tar"))))
    assert _names(bucket, "shuffled-") == []


CUT_OFF = {
    0: "is not a readable tar: empty file",
    300: "is not a readable tar",
    4608: "is cut off: 4608 bytes",  # between two members
    5000: "is cut off: 5000 bytes",  # in a header
    5700: r"is cut off: 5700 bytes, member 'folder/0021\.image\.jpg' claims bytes 5120 to 5970",
}


def test_shuffle_of_a_shard_that_is_cut_off_names_it(
    packed: ShardSet, bucket: AisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dsort, "start", lambda *_: pytest.fail("started"))
    whole = bucket.read("samples-000002.tar")
    for num_bytes, message in CUT_OFF.items():
        bucket.write("samples-000002.tar", whole[:num_bytes])
        with pytest.raises(DataError, match=rf"samples-000002\.tar' {message}"):
            shuffle(Request(packed))


def test_shuffle_in_a_missing_bucket_says_how_to_make_one(bucket: AisStore) -> None:
    with pytest.raises(StoreError, match=f"no bucket '{bucket.url}'"):
        shuffle(Request(ShardSet(store=bucket, names=("samples-000000.tar",))))


# A job that fails


def test_shuffle_job_that_fails_leaves_nothing(
    packed: ShardSet, bucket: AisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster that needs more names than the plan does: it says so after its work, not before."""
    few = {"output_format": "shuffled-{000000..000001}"}
    monkeypatch.setattr(shuffle_module, "spec_of", lambda plan: spec_of(plan) | few)
    with pytest.raises(
        StoreError, match=r"dSort job 'srt-.*' at http.* failed: number of shards to be created exceeds"
    ):
        shuffle(Request(packed))
    assert _names(bucket, "shuffled-") == []


REFUSALS = [
    (400, "stats.NodeStatus.Status: ReadString: expects"),  # as AIS 5.0 answers; see the recorded exchanges
    (404, "invalid path"),
    (501, "not supported"),
]


def _refuse_dsort(monkeypatch: pytest.MonkeyPatch, status: int, text: str) -> None:
    def refuse(*_: object) -> None:
        raise AISError(status, text, "http://x/v1/sort", SimpleNamespace())

    monkeypatch.setattr(Dsort, "start", refuse)


@pytest.mark.parametrize(("status", "text"), REFUSALS)
def test_shuffle_on_a_cluster_without_dsort_is_refused_or_goes_on_from_here_with_one_warning(
    packed: ShardSet,
    bucket: AisStore,
    status: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _refuse_dsort(monkeypatch, status, text)
    refused = rf"no dSort that works at http://127.*: {status} {text}.*shuffle from here: --engine exchange"
    with pytest.raises(StoreError, match=refused):
        shuffle(Request(packed, engine="dsort"))
    assert _names(bucket, "shuffled-") == []
    report = shuffle(Request(packed, algorithm=Algorithm(seed=7)))
    assert report.engine == "exchange"
    assert sorted(_read(bucket, report.shards)) == sorted(_read(bucket, packed.names))
    [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert f"{status} {text}" in warning.message
    assert warning.message.endswith("Shuffling from here now: all bytes pass through this machine")


def test_shuffle_interrupted_aborts_the_job(
    packed: ShardSet, bucket: AisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted: list[str] = []

    def interrupt(_: Dsort) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Dsort, "get_job_info", interrupt)
    monkeypatch.setattr(Dsort, "abort", lambda job: aborted.append(job.dsort_id))
    with pytest.raises(KeyboardInterrupt):
        shuffle(Request(packed))
    assert len(aborted) == 1
    assert _names(bucket, "samples-") == [*packed.names, "samples-classes.json", "samples-written.json"]


# A job that ends well and should not have


Tamper = Callable[[dict[str, dict[str, bytes]]], None]


def _lose(samples: dict[str, dict[str, bytes]]) -> None:
    for key in list(samples)[:5]:
        del samples[key]


def _flip_a_bit(samples: dict[str, dict[str, bytes]]) -> None:
    photo = samples["folder/0007"]["image.jpg"]
    samples["folder/0007"]["image.jpg"] = photo[:-1] + bytes([photo[-1] ^ 1])


def _rename(samples: dict[str, dict[str, bytes]]) -> None:
    samples["other"] = samples.pop("folder/0007")


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (_lose, r"43 samples went in, 38 came out of .*: 5 missing \('folder/0000', 'folder/0001', .* and 2 more\)\."),
        (_flip_a_bit, r"1 changed \('folder/0007'\)"),
        (_rename, r"1 missing \('folder/0007'\), 1 extra \('other'\)\. Do not use"),
    ],
)
def test_shuffle_that_changed_the_data_names_the_keys(
    packed: ShardSet, bucket: AisStore, tamper: Tamper, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tampering_job(*_: object, **__: object) -> None:
        samples: dict[str, dict[str, bytes]] = {}
        for name, data in _read(bucket, packed.names):
            samples.setdefault(name.partition(".")[0], {})[name.partition(".")[2]] = data
        tamper(samples)
        members = {f"{key}.{name}": data for key, parts in reversed(samples.items()) for name, data in parts.items()}
        bucket.write("shuffled-000000.tar", tar_bytes(members))

    monkeypatch.setattr(shuffle_module, "_run_dsort", tampering_job)
    with pytest.raises(DataError, match=f"dSort changed the data: .*{message}"):
        shuffle(Request(packed))
    assert "shuffled-classes.json" not in _names(bucket, "shuffled-")


def test_shuffle_that_split_a_sample_in_two_is_noticed(
    packed: ShardSet, bucket: AisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All members are there, but not together: no reader would give the sample whole."""

    def splitting_job(*_: object, **__: object) -> None:
        members = _read(bucket, packed.names)
        bucket.write("shuffled-000000.tar", tar_bytes([*members[1:], members[0]]))

    monkeypatch.setattr(shuffle_module, "_run_dsort", splitting_job)
    with pytest.raises(DataError, match=r"43 samples went in, 44 came out of .*: 1 changed \('folder/0000'\)"):
        shuffle(Request(packed))


def test_shuffle_that_wrote_nothing_is_noticed(packed: ShardSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle_module, "_run_dsort", lambda *_, **__: None)
    with pytest.raises(DataError, match="reported success and wrote no shard; 5 went in"):
        shuffle(Request(packed))
