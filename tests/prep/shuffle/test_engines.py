"""What a shuffle writes, by dSort on the embedded node and by an exchange: orders, key maps, compressed shards."""

import gzip
import re
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aistore.sdk.dsort.core import Dsort

from dali_pipes.data_set.indexing import find_manifest
from dali_pipes.errors import DataError, StoreError
from dali_pipes.store.base import Store
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_names import ObjectEntry, Template
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from prep.part import JobPart
from prep.shuffle.key_map import Grouping, parse_key_map
from prep.shuffle.order import Algorithm
from prep.shuffle.plan import ShufflePlan
from prep.shuffle.request import Request
from prep.shuffle.shuffle import shuffle
from prep.sources.record import Source
from tests.prep.shuffle.conftest import NUM_SAMPLES
from tests.shards import make_source, pack, read_tar, tar_bytes


def _members(store: Store, names: Sequence[str]) -> list[tuple[str, bytes]]:
    return [member for name in names for member in read_tar(store.read(name))]


def _keys(store: Store, names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name.partition(".")[0] for name, _ in _members(store, names)))


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
    """One code decides for both, from a bucket and from a directory."""
    by_node = shuffle(Request(packed, algorithm=algorithm, output_prefix="node-", shard_bytes=9000, engine="dsort"))
    by_exchange = shuffle(
        Request(packed, algorithm=algorithm, output_prefix="exchange-", shard_bytes=9000, engine="exchange")
    )
    local = shuffle(Request(directory, algorithm=algorithm, output_prefix="local-", shard_bytes=9000))
    assert (by_node.engine, by_exchange.engine, local.engine) == ("dsort", "exchange", "exchange")
    for node, client, other in zip(by_node.shards, by_exchange.shards, local.shards, strict=True):
        assert _members(bucket, [node]) == _members(bucket, [client])
        assert bucket.read(client) == directory.store.read(other)
    assert [shard["num_bytes"] for shard in by_exchange.planned] == [bucket.size(name) for name in by_exchange.shards]


def test_output_of_a_directory_is_indexed_with_its_class_table(directory: ShardSet) -> None:
    report = shuffle(Request(directory, algorithm=Algorithm(seed=7)))
    manifest = index_shards(resolve_shards(report.url, endpoint=None))
    assert (manifest.num_samples, manifest.names) == (NUM_SAMPLES, report.shards)
    assert manifest.classes == {0: "zero", 1: "one", 2: "two"}
    assert isinstance(directory.store, LocalStore)
    assert [path for path in directory.store.directory.iterdir() if path.name.startswith(".")] == []


def test_output_may_lie_in_another_store(directory: ShardSet, bucket: AisStore, tmp_path: Path) -> None:
    """From a directory into a bucket that is not made yet, and into another directory."""
    report = shuffle(Request(directory, target=bucket, algorithm=Algorithm(seed=3)))
    other = LocalStore(tmp_path / "other" / "deep")
    again = shuffle(Request(directory, target=other, output_prefix="a/b-", algorithm=Algorithm(seed=3)))
    assert list(_bytes(bucket, report.shards).values()) == list(_bytes(other, again.shards).values())
    assert bucket.read("shuffled-classes.json") == other.read("a/b-classes.json")


def test_output_of_another_request_or_kind_needs_overwrite_which_leaves_nothing_of_the_old(directory: ShardSet) -> None:
    """A set of two kinds could be neither indexed nor shuffled again."""
    first = shuffle(Request(directory, algorithm=Algorithm(seed=7), shard_bytes=1))
    index_shards(ShardSet(store=directory.store, names=first.shards))
    for request in (Request(directory, algorithm=Algorithm(seed=8)), Request(directory, extension=".tgz")):
        with pytest.raises(StoreError, match=r"holds 43 shards already, from 'shuffled-000000\.tar'; --overwrite"):
            shuffle(request)
        report = shuffle(replace(request, overwrite=True))
        names = [entry.name for entry in directory.store.list("shuffled-")]
        assert names == [*report.shards, "shuffled-classes.json", "shuffled-written.json"]
        first = shuffle(Request(directory, algorithm=Algorithm(seed=7), shard_bytes=1, overwrite=True))


# Running again


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
    # What described the shards before is gone; an index of a shard that stays is right, still.
    assert store.size("shuffled-manifest.safetensors") is None
    assert store.size("shuffled-columns.safetensors") is None
    assert store.size(victim.replace(".tar", ".index.safetensors")) is None


def test_auto_completes_what_an_exchange_has_begun(packed: ShardSet, bucket: AisStore) -> None:
    """The cluster could not: it writes all or nothing."""
    first = shuffle(Request(packed, algorithm=Algorithm(seed=7), shard_bytes=3000, engine="exchange"))
    bucket.delete(first.shards[2])
    with pytest.raises(StoreError, match="--overwrite replaces them"):
        shuffle(Request(packed, algorithm=Algorithm(seed=7), shard_bytes=3000, engine="dsort"))
    report = shuffle(Request(packed, algorithm=Algorithm(seed=7), shard_bytes=3000))
    assert (report.engine, report.num_written) == ("exchange", 1)


def test_sets_of_many_classes_are_listed_at_once(directory: ShardSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after: a listing for each class would read a directory of a thousand sets a thousand times."""
    listed: list[str] = []
    whole = LocalStore.list

    def counted(store: LocalStore, prefix: str) -> list[ObjectEntry]:
        listed.append(prefix)
        return whole(store, prefix)

    monkeypatch.setattr(LocalStore, "list", counted)
    assert len(shuffle(Request(directory, mapped=Grouping(by="class"), shard_bytes=1 << 30)).shards) == 3
    tables = {directory.store.read(f"shuffled-class{label}-classes.json") for label in range(3)}
    assert tables == {directory.store.read("samples-classes.json")}
    assert [prefix for prefix in listed if prefix.startswith("shuffled")] == ["shuffled-class"] * 2


@pytest.mark.parametrize(
    "name",
    [
        "a-000.tar",
        "a-12345.tgz",  # past the template's end, and of another kind: read as one of the set
        "v217.tar",  # a prefix that ends in a digit
        "x-0-y-03.tar",
    ],
)
def test_names_that_belong_to_the_output(name: str) -> None:
    templates = [Template.parse(text) for text in ("a-{000..009}", "v2{00..99}", "x-{0..1}-y-{00..09}")]
    plan = ShufflePlan(SimpleNamespace(), SimpleNamespace(), [], templates, 1)  # type: ignore[arg-type]
    assert plan.is_output(name)
    for other in ("a-.tar", "a-1x.tar", "a-001.json", "b-a-001.tar", "v22-1.tar", "x-0-y-3.tar", "x-2-y-03.tar"):
        assert not plan.is_output(other), other


# What must not pass


def test_manifest_that_counts_other_samples_is_refused(directory: ShardSet, bucket: AisStore) -> None:
    index_shards(directory)
    store = directory.store
    store.write(directory.names[0], store.read(directory.names[4]))
    store.delete(directory.names[4])
    part = ShardSet(store=store, names=directory.names[:4])
    with pytest.raises(DataError, match=r"counts 10 samples in 'samples-000000\.tar', the shard holds 3; index the"):
        shuffle(Request(part))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"algorithm": Algorithm(kind="content", component="nope")}, DataError, r"key 'folder/0000': no component 'n"),
        (
            {"algorithm": Algorithm(kind="content", component="json", key_type="int")},
            DataError,
            r"shard 'samples-000000\.tar', key 'folder/0000': component 'json' holds '\{\"number\": 0\}', expected int",
        ),
        ({"shard_bytes": 0}, ValueError, "shard_bytes must be positive, got 0"),
        ({"engine": "cluster"}, ValueError, "engine must be one of auto, dsort, exchange, got 'cluster'"),
        ({"extension": ".zip"}, ValueError, r"extension must be one of \.tar, \.tgz, \.tar\.gz, got '\.zip'"),
        ({"output_prefix": "samples-"}, ValueError, "output prefix 'samples-' names the input itself; choose another"),
        ({"output_prefix": ""}, ValueError, "a prefix must not hold braces .*, and end in a name's start"),
        ({"output_prefix": "out2"}, ValueError, "that is not a digit, such as 'shuffled-', got 'out2'"),
        ({"output_prefix": "out/"}, ValueError, "got 'out/'"),
        ({"output_prefix": "out{-"}, ValueError, "got 'out{-'"),
        ({"drop_unmapped": True}, ValueError, "no key map is given"),
        ({"engine": "dsort", "part": JobPart(number=1, total=2)}, ValueError, "--part 1/2 goes with --engine exchange"),
        ({"engine": "dsort"}, ValueError, r"' is not in AIStore; engine 'dsort' runs in an AIStore"),
    ],
)
def test_bad_request_is_refused_before_anything_is_written(
    directory: ShardSet, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    before = directory.store.list("")
    with pytest.raises(error, match=message):
        shuffle(Request(directory, **options))
    assert directory.store.list("") == before


# Compressed shards


def test_compressed_shards_go_in_and_out(directory: ShardSet) -> None:
    store, extension = directory.store, ".tar.gz"
    assert isinstance(store, LocalStore)
    packed = shuffle(Request(directory, output_prefix="packed-", extension=extension, shard_bytes=9000))
    assert all(name.endswith(extension) for name in packed.shards)
    assert sorted(_members(store, packed.shards)) == sorted(_members(store, directory.names))
    assert shuffle(Request(directory, output_prefix="packed-", extension=extension, shard_bytes=9000)).num_written == 0
    found = resolve_shards([str(store.directory / "packed-")], endpoint=None, compressed=True)
    assert found.names == packed.shards
    plain = shuffle(Request(found, output_prefix="plain-", algorithm=Algorithm(kind="none"), extension=".tar"))
    assert _members(store, plain.shards) == _members(store, packed.shards)


def test_shards_of_two_kinds_are_refused(directory: ShardSet) -> None:
    with pytest.raises(ValueError, match=r"shards must all end alike, got \.tar and \.tgz"):
        shuffle(Request(ShardSet(store=directory.store, names=("a-0.tar", "a-1.tgz"))))
    with pytest.raises(ValueError, match=r"shards must all end in one of \.tar, \.tgz, \.tar\.gz, got 'a-1\.zip'"):
        shuffle(Request(ShardSet(store=directory.store, names=("a-0.tar", "a-1.zip"))))


# By key


def test_key_map_that_lacks_keys_must_be_asked_to_drop_them(packed: ShardSet, bucket: AisStore) -> None:
    mapped = parse_key_map(b"folder/0001\tone-{0..9}.tar\nfolder/0002\tone-{0..9}.tar\n", where="map")
    with pytest.raises(DataError, match=r"map: names no shard for 41 of 43 keys: 'folder/0000', .*--drop-unmapped"):
        shuffle(Request(packed, mapped=mapped))
    with pytest.raises(ValueError, match="dSort cannot leave samples out; use --engine exchange"):
        shuffle(Request(packed, mapped=mapped, drop_unmapped=True, engine="dsort"))
    report = shuffle(Request(packed, mapped=mapped, drop_unmapped=True))
    assert (report.engine, report.num_samples, report.num_dropped) == ("exchange", 2, 41)
    assert sorted(_keys(bucket, report.shards)) == ["folder/0001", "folder/0002"]


@pytest.mark.parametrize("engine", ["dsort", "exchange"])
def test_key_map_with_too_few_names_is_refused(packed: ShardSet, bucket: AisStore, engine: Any) -> None:
    mapped = parse_key_map(b'{"few-{0..1}": ["^folder/"]}', where="map")
    with pytest.raises(DataError, match=r"using few-\{0\.\.1\} template exceeds expected number of shards \(2\)"):
        shuffle(Request(packed, mapped=mapped, shard_bytes=1000, engine=engine))
    assert bucket.list("few-") == []


def test_by_folder_takes_the_first_directory(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    source = make_source(9)
    folders = ("cat", "dog", "cat/x")
    records = [replace(r, key=f"{folders[n % 3]}/{n}") for n, r in enumerate(source.records)]
    names = pack(Source(name="made up", records=records, classes=source.classes), store=store).shards
    report = shuffle(Request(ShardSet(store=store, names=names), mapped=Grouping(by="folder"), shard_bytes=1 << 30))
    assert report.shards == ("shuffled-cat-000000.tar", "shuffled-dog-000000.tar")
    assert sorted(_keys(store, report.shards[1:])) == ["dog/1", "dog/4", "dog/7"]


def links(kind: bytes) -> bytes:
    """A sample, and links to it."""
    return tar_bytes({"a.jpg": b""})[:512] + tar_bytes({"README": b"", "b.jpg": b""}, type=kind, linkname="a.jpg")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("in-0.tar", tar_bytes({"README": b"x"}), "in-': the 1 shards hold no sample"),
        # Neither engine would carry a link over: the sample would come out without it, and the comparison not see it.
        ("in-0.tar", links(tarfile.LNKTYPE), r"in-0\.tar', member 'b\.jpg': is a link, which no reader of shards"),
        ("in-0.tar", links(tarfile.SYMTYPE), r"in-0\.tar', member 'b\.jpg': is a link, which no reader of shards"),
        # AIS 4.9 keeps one of them, which the comparison notices after all the work.
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


@pytest.mark.parametrize(
    ("text", "why"),
    [
        # As where a cluster's nodes refuse each other (403), or ask for a token.
        ('unexpected status code (404) when requesting ekm file from "x"', "its targets cannot read the key map"),
        # What AIS 4.9 answers where the shards have `u5.CLS`: a component's name is any letters' to us, not to it.
        ('key is missing for "up-000000.tar|u5"', "dSort distinguishes component 'CLS' from 'cls'"),
    ],
)
def test_job_that_this_cluster_cannot_do_is_done_from_here(
    packed: ShardSet,
    bucket: AisStore,
    text: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    failed = SimpleNamespace(aborted=False, metrics=SimpleNamespace(aborted=True, errors=[text]))
    monkeypatch.setattr(Dsort, "get_job_info", lambda _: {"t1": failed})
    mapped = Grouping(by="class")
    with pytest.raises(StoreError, match=f"{re.escape(text)}; {why}. Shuffle from here: --engine exchange"):
        shuffle(Request(packed, mapped=mapped, engine="dsort"))
    assert [entry.name for entry in bucket.list("") if not entry.name.startswith("samples-")] == []
    report = shuffle(Request(packed, mapped=mapped))
    assert (report.engine, report.num_samples) == ("exchange", NUM_SAMPLES)
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_numbers_that_dsort_cannot_read_are_sorted_from_here(bucket: AisStore) -> None:
    """AIS cannot read a number that a line end follows; here it is a number."""
    members = {f"{number}.cls": b"%d\n" % (7 * number % 10) for number in range(10)}
    bucket.create()
    bucket.write("in-0.tar", tar_bytes(members))
    shards = ShardSet(store=bucket, names=("in-0.tar",))
    algorithm = Algorithm(kind="content", component="cls", key_type="int")
    with pytest.raises(ValueError, match=r"dSort cannot read a number with white space .* 'cls' of .*, key '0'; use"):
        shuffle(Request(shards, algorithm=algorithm, engine="dsort"))
    report = shuffle(Request(shards, algorithm=algorithm))
    assert report.engine == "exchange"
    assert [data for _, data in _members(bucket, report.shards)] == [b"%d\n" % number for number in range(10)]


# Dry run, epochs


@pytest.mark.parametrize(
    ("indexed", "algorithm"),
    [(False, Algorithm(seed=7)), (True, Algorithm(kind="content", component="cls", key_type="int"))],
    ids=["scanned", "indexed"],
)
def test_dry_run_plans_what_is_then_written(
    packed: ShardSet, bucket: AisStore, indexed: bool, algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards that are indexed are not read for it."""
    if indexed:
        index_shards(packed)
        open_stream: Callable[..., Any] = AisStore.open
        monkeypatch.setattr(
            AisStore, "open", lambda store, name: pytest.fail(name) if "samples" in name else open_stream(store, name)
        )
    dry = shuffle(Request(packed, algorithm=algorithm, shard_bytes=5000, dry_run=True))
    monkeypatch.undo()
    assert bucket.list("shuffled-") == []
    assert (dry.dry_run, dry.num_written, dry.num_samples) == (True, 0, NUM_SAMPLES)
    assert dry.spec is not None
    assert dry.spec["input_format"] == {"template": "samples-{000000..000004}"}
    done = shuffle(Request(packed, algorithm=algorithm, shard_bytes=5000, engine="exchange"))
    assert [shard["name"] for shard in dry.planned] == list(done.shards) == list(dry.shards)
    assert [shard["num_bytes"] for shard in dry.planned] == [bucket.size(name) for name in done.shards]
