"""What a shuffle writes, by dSort on the embedded node and by an exchange: orders, key maps, compressed shards."""

import gzip
import tarfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dali_pipes.data_set.indexing import find_manifest
from dali_pipes.errors import DataError, StoreError
from dali_pipes.store.base import Store
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_names import Template
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from prep.part import JobPart
from prep.shuffle.key_map import parse_key_map
from prep.shuffle.order import Algorithm
from prep.shuffle.plan import ShufflePlan
from prep.shuffle.request import Request
from prep.shuffle.shuffle import shuffle
from tests.shards import read_tar, tar_bytes


def _members(store: Store, names: Sequence[str]) -> list[tuple[str, bytes]]:
    return [member for name in names for member in read_tar(store.read(name))]


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


def test_shards_of_two_kinds_are_refused(directory: ShardSet) -> None:
    with pytest.raises(ValueError, match=r"shards must all end alike, got \.tar and \.tgz"):
        shuffle(Request(ShardSet(store=directory.store, names=("a-0.tar", "a-1.tgz"))))
    with pytest.raises(ValueError, match=r"shards must all end in one of \.tar, \.tgz, \.tar\.gz, got 'a-1\.zip'"):
        shuffle(Request(ShardSet(store=directory.store, names=("a-0.tar", "a-1.zip"))))


# By key


@pytest.mark.parametrize("engine", ["dsort", "exchange"])
def test_key_map_with_too_few_names_is_refused(packed: ShardSet, bucket: AisStore, engine: Any) -> None:
    mapped = parse_key_map(b'{"few-{0..1}": ["^folder/"]}', where="map")
    with pytest.raises(DataError, match=r"using few-\{0\.\.1\} template exceeds expected number of shards \(2\)"):
        shuffle(Request(packed, mapped=mapped, shard_bytes=1000, engine=engine))
    assert bucket.list("few-") == []


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
