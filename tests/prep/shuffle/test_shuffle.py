"""Shuffles by a dSort job on the embedded node and by an exchange: what is written, what is refused, what failed."""

import gzip
import re
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aistore.sdk.dsort.core import Dsort
from aistore.sdk.errors import AISError

from dali_pipes.data_set.indexing import find_manifest
from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.names import index_name
from dali_pipes.store.base import Store
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from prep.part import JobPart
from prep.shuffle import shuffle as shuffle_module
from prep.shuffle.order import Algorithm
from prep.shuffle.request import Request
from prep.shuffle.shuffle import shuffle, spec_of
from tests.prep.shuffle.conftest import NUM_SAMPLES
from tests.programs import wait_until
from tests.shards import contents_of, make_source, members_of, pack, tar_bytes


def _names(store: Store, prefix: str) -> list[str]:
    return list(contents_of(store, prefix))


def test_shuffle_by_a_job_reports_what_it_wrote(packed: ShardSet, bucket: AisStore) -> None:
    """The report has the right numbers; a test below compares the samples with those of an exchange."""
    report = shuffle(Request(packed, algorithm=Algorithm(seed=7)))
    assert (report.num_samples, report.num_input_shards) == (NUM_SAMPLES, 5)
    assert report.url == f"{bucket.url}/shuffled-"
    assert len(report.shards) in (4, 5)  # the default size is the mean of the input shards
    assert bucket.read(".dali-pipes/shuffled-classes.json") == bucket.read(".dali-pipes/samples-classes.json")
    assert report.num_bytes == sum(bucket.size(name) or 0 for name in report.shards)


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
    (0, "unexpected status code (404) when requesting ekm file"),  # a job that starts, but cannot finish
    # AIS 4.9 answers this if the shards have `u5.CLS`: AIS distinguishes upper and lower case in a component's name.
    (0, 'key is missing for "up-000000.tar|u5"'),
]


def _refuse_dsort(monkeypatch: pytest.MonkeyPatch, status: int, text: str) -> None:
    def refuse(*_: object) -> None:
        raise AISError(status, text, "http://x/v1/sort", SimpleNamespace())

    failed = SimpleNamespace(aborted=False, metrics=SimpleNamespace(aborted=True, errors=[text]))
    info_of = Dsort.get_job_info

    def fail(job: Dsort) -> dict[str, Any]:
        wait_until(lambda: all(found.archived for found in info_of(job).values()))  # it writes nothing more
        return {"t1": failed}

    monkeypatch.setattr(Dsort, "get_job_info", fail)
    if status:
        monkeypatch.setattr(Dsort, "start", refuse)


@pytest.mark.parametrize(("status", "text"), REFUSALS)
def test_shuffle_that_a_cluster_cannot_do_is_refused_or_goes_on_from_here_with_one_warning(
    packed: ShardSet,
    bucket: AisStore,
    status: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _refuse_dsort(monkeypatch, status, text)
    said = f"no dSort that works at http://127.*: {status} " if status else "dSort job 'srt-.*' at http.* failed: "
    refused = rf"{said}{re.escape(text)}.*; .*[Ss]huffle from here: --engine exchange"
    with pytest.raises(StoreError, match=refused):
        shuffle(Request(packed, engine="dsort"))
    with pytest.raises(ValueError, match="; use --engine exchange"):  # dSort would sort them
        shuffle(Request(packed, engine="dsort", algorithm=Algorithm(kind="none")))
    assert _names(bucket, "shuffled-") == []
    report = shuffle(Request(packed, algorithm=Algorithm(seed=7)))
    assert report.engine == "exchange"
    assert sorted(members_of(bucket, report.shards)) == sorted(members_of(bucket, packed.names))
    [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert text in warning.message
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
    described = [".dali-pipes/samples-classes.json", ".dali-pipes/samples-written.json"]
    assert _names(bucket, "samples-") == [*described, *packed.names]


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
        for name, data in members_of(bucket, packed.names):
            samples.setdefault(name.partition(".")[0], {})[name.partition(".")[2]] = data
        tamper(samples)
        members = {f"{key}.{name}": data for key, parts in reversed(samples.items()) for name, data in parts.items()}
        bucket.write("shuffled-000000.tar", tar_bytes(members))

    monkeypatch.setattr(shuffle_module, "_run_dsort", tampering_job)
    with pytest.raises(DataError, match=f"dSort changed the data: .*{message}"):
        shuffle(Request(packed))
    assert ".dali-pipes/shuffled-classes.json" not in _names(bucket, "shuffled-")


def test_shuffle_that_split_a_sample_in_two_is_noticed(
    packed: ShardSet, bucket: AisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All members are there, but not together: no reader would give the sample whole."""

    def splitting_job(*_: object, **__: object) -> None:
        members = members_of(bucket, packed.names)
        bucket.write("shuffled-000000.tar", tar_bytes([*members[1:], members[0]]))

    monkeypatch.setattr(shuffle_module, "_run_dsort", splitting_job)
    with pytest.raises(DataError, match=r"43 samples went in, 44 came out of .*: 1 changed \('folder/0000'\)"):
        shuffle(Request(packed))


def test_shuffle_that_wrote_nothing_is_noticed(packed: ShardSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle_module, "_run_dsort", lambda *_, **__: None)
    with pytest.raises(DataError, match="reported success and wrote no shard; 5 went in"):
        shuffle(Request(packed))


def _bytes(store: Store, names: Sequence[str]) -> dict[str, bytes]:
    return {name: store.read(name) for name in names}


ORDERS = [
    Algorithm(seed=2**63 - 1),
    Algorithm(kind="alphanumeric", decreasing=True),
    Algorithm(kind="content", component=".cls", key_type="float", decreasing=True),
    Algorithm(kind="content", component="json"),
]


@pytest.mark.parametrize("algorithm", ORDERS, ids=lambda found: f"{found.kind}-{found.component}-{found.decreasing}")
def test_exchange_gives_the_bytes_of_the_embedded_node(
    packed: ShardSet, bucket: AisStore, directory: ShardSet, algorithm: Algorithm
) -> None:
    """Both engines write the same samples in the same order, from a bucket and from a directory."""
    by_node = shuffle(Request(packed, algorithm=algorithm, output_prefix="node-", shard_bytes=9000, engine="dsort"))
    by_exchange = shuffle(
        Request(packed, algorithm=algorithm, output_prefix="exchange-", shard_bytes=9000, engine="exchange")
    )
    local = shuffle(Request(directory, algorithm=algorithm, output_prefix="local-", shard_bytes=9000))
    assert (by_node.engine, by_exchange.engine, local.engine) == ("dsort", "exchange", "exchange")
    for node, client, other in zip(by_node.shards, by_exchange.shards, local.shards, strict=True):
        assert members_of(bucket, [node]) == members_of(bucket, [client])
        assert bucket.read(client) == directory.store.read(other)
    assert [shard["num_bytes"] for shard in by_exchange.planned] == [bucket.size(name) for name in by_exchange.shards]


@pytest.mark.parametrize("kind", ["gone", "other"])
def test_run_again_writes_what_is_missing_or_differs_only(directory: ShardSet, kind: str) -> None:
    store = directory.store
    assert isinstance(store, LocalStore)
    first = shuffle(Request(directory, algorithm=Algorithm(seed=7), shard_bytes=5000))
    before = _bytes(store, first.shards)
    made = resolve_shards(first.url, endpoint=None)
    index_shards(made)
    again = shuffle(Request(directory, algorithm=Algorithm(seed=7), shard_bytes=5000))
    assert (again.num_written, again.shards) == (0, first.shards)
    assert find_manifest(made) is not None
    times = {name: (store.directory / name).stat().st_mtime_ns for name in first.shards}
    victim = first.shards[3]
    if kind == "gone":
        store.delete(victim)
    else:
        data = bytearray(before[victim])
        data[512] ^= 1  # the first byte of its first member
        store.write(victim, bytes(data))
        with pytest.raises(StoreError, match=r"holds \d+ shards already, from .*--overwrite replaces them"):
            shuffle(Request(directory, algorithm=Algorithm(seed=7), shard_bytes=5000))
    report = shuffle(Request(directory, algorithm=Algorithm(seed=7), shard_bytes=5000, overwrite=kind == "other"))
    assert report.num_written == 1
    assert _bytes(store, report.shards) == before
    kept = {name for name in first.shards if (store.directory / name).stat().st_mtime_ns == times[name]}
    assert kept == set(first.shards) - {victim}
    # Manifest and column file are removed. The index of an unchanged shard stays valid.
    assert store.size(".dali-pipes/shuffled-manifest.safetensors") is None
    assert store.size(".dali-pipes/shuffled-columns.safetensors") is None
    assert store.size(index_name(victim)) is None


@pytest.mark.parametrize("extension", [".tgz", ".tar"])
def test_other_output_needs_overwrite_which_leaves_nothing_of_it(directory: ShardSet, extension: str) -> None:
    """Shards of another kind go, too: a set of two kinds could be neither indexed nor shuffled again."""
    first = shuffle(Request(directory, extension=extension, shard_bytes=1))
    if extension == ".tar":
        index_shards(ShardSet(store=directory.store, names=first.shards))
    with pytest.raises(StoreError, match=rf"holds 43 shards already, from '.*shuffled-000000{extension}'; --overwrite"):
        shuffle(Request(directory))
    report = shuffle(Request(directory, overwrite=True))
    described = [".dali-pipes/shuffled-classes.json", ".dali-pipes/shuffled-written.json"]
    assert _names(directory.store, "shuffled-") == [*described, *report.shards]


def test_auto_completes_what_an_exchange_has_begun(packed: ShardSet, bucket: AisStore) -> None:
    """An exchange completes the shards, because a dSort job would write all or nothing."""
    first = shuffle(Request(packed, shard_bytes=3000, engine="exchange"))
    bucket.delete(first.shards[2])
    report = shuffle(Request(packed, shard_bytes=3000))
    assert (report.engine, report.num_written) == ("exchange", 1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"algorithm": Algorithm(kind="content", component="nope")}, DataError, r"key 'folder/0000': no component 'n"),
        ({"extension": ".zip"}, ValueError, r"extension must be one of \.tar, \.tgz, \.tar\.gz, got '\.zip'"),
        ({"output_prefix": "samples-"}, ValueError, "output prefix 'samples-' names the input itself; choose another"),
        ({"output_prefix": ""}, ValueError, "a prefix must not hold braces .*, and end in a name's start"),
        ({"output_prefix": "out2"}, ValueError, "that is not a digit, such as 'shuffled-', got 'out2'"),
        ({"drop_unmapped": True}, ValueError, "no key map is given"),
        ({"engine": "dsort", "part": JobPart(number=1, total=2)}, ValueError, "--part 1/2 goes with --engine exchange"),
        ({"engine": "dsort"}, ValueError, r"' is not in AIStore; engine 'dsort' runs in an AIStore"),
    ],
)
def test_bad_request_is_refused_before_anything_is_written(
    directory: ShardSet, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    before = contents_of(directory.store)
    with pytest.raises(error, match=message):
        shuffle(Request(directory, **options))
    assert contents_of(directory.store) == before


def links(kind: bytes) -> bytes:
    """A tar of a sample and of links to it."""
    return tar_bytes({"a.jpg": b""})[:512] + tar_bytes({"README": b"", "b.jpg": b""}, type=kind, linkname="a.jpg")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("in-0.tar", tar_bytes({"README": b"x"}), "in-': the 1 shards hold no sample"),
        # No engine copies links. The output would lack this member, and the comparison would not notice it.
        ("in-0.tar", links(tarfile.LNKTYPE), r"in-0\.tar', member 'b\.jpg': is a link, which no reader of shards"),
        ("in-0.tar", links(tarfile.SYMTYPE), r"in-0\.tar', member 'b\.jpg': is a link, which no reader of shards"),
        # AIS 4.9 keeps only one of the two. The comparison would notice it, but only after all the work.
        ("in-0.tar", tar_bytes({"a.jpg": b"", "a.JPG": b""}), r"in-0\.tar', key 'a': component 'jpg' occurs twice"),
        (
            "in-0.tgz",
            gzip.compress(b"x" * 999, mtime=0)[:-20],
            r"in-0\.tgz' is not a complete gzip file: .*; pack it anew",
        ),
        ("in-0.tgz", b"no gzip", r"in-0\.tgz' is not a complete gzip file"),
    ],
)
def test_shard_that_would_lose_samples_is_refused(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        shuffle(Request(ShardSet(store=LocalStore(tmp_path), names=(name,))))
    assert [path.name for path in tmp_path.iterdir()] == [name]
