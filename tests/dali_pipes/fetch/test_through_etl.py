"""A loader whose shards are read through an ETL: the embedded node runs the transform's server as a real process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dali_pipes as dp
from dali_pipes.cli import main
from dali_pipes.data_set.data_set import DataSet
from dali_pipes.data_set.indexing import find_manifest, index_in_memory
from dali_pipes.errors import DataError, PipesError, StoreError
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import transformed_name
from dali_pipes.store.cluster import embedded_node
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.embedded_node import ALLOW_ETL
from dali_pipes.store.cluster.transformed import NoEtlError, TransformedStore, through_etl
from dali_pipes.store.patience import Patience, use_patience
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import resolve_shards
from prep.etl.run import open_output, start_etl, stop_etl, transform_shards
from prep.index import index_shards
from tests import loaders
from tests.dali_pipes.fetch.served import Place, checksum
from tests.loaders import keys_of
from tests.servers.scripted import Visit, scripted
from tests.shards import Sample, copy_files, make_samples, write_shards

TRANSFORMS = "tests.dali_pipes.etl_transforms"
KEYS = [f"s{i:05d}" for i in range(12)]


SAMPLES = make_samples([(40 + 7 * (i % 5), 33 + 5 * (i % 7)) for i in range(12)])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of four small samples, indexed."""
    return write_shards(tmp_path_factory.mktemp("plain"), SAMPLES, per_shard=4)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An embedded node that may run transforms, and runs two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ALLOW_ETL, "1")
        started = embedded_node.start(tmp_path_factory.mktemp("node"))
    with started as running:
        any_bucket = AisStore(running.endpoint, "any")
        start_etl(any_bucket, "small-pets", transform=f"{TRANSFORMS}:small_pets")
        start_etl(any_bucket, "as-told", transform=f"{TRANSFORMS}:as_told")
        yield running.endpoint


@pytest.fixture
def bucket(node: str, plain: Path) -> AisStore:
    """A bucket of its own with the shards and what describes them."""
    store = AisStore(node, f"through-{uuid.uuid4().hex[:8]}")
    store.create()
    copy_files(plain, store)
    return store


def tell(store: AisStore, act: bytes, directory: Path, *, keys: Sequence[str] = KEYS) -> None:
    """Replace the shards by others of which some samples tell the ETL ``as-told`` what to do."""
    samples = [Sample(s.key, s.components | ({"act": act} if s.key in keys else {})) for s in SAMPLES]
    copy_files(write_shards(directory, samples, per_shard=4, index=False), store)


def shards_of(store: AisStore, etl: str) -> ShardSet:
    return through_etl(resolve_shards(f"{store.url}/s-", endpoint=store.endpoint), etl)


def tensors(components: dp.Components, random: dp.Random) -> dict[str, Any]:
    """A graph of what `prep.etl.transforms.pets` makes: nothing is decoded."""
    return {
        "image": components.npy("image.npy", dtype=np.float32, ndim=3),
        "mask": components.npy("trimap.npy", dtype=np.uint8, ndim=3),
        "label": components.label,
    }


def labels(components: dp.Components, random: dp.Random) -> dict[str, Any]:
    return {"label": components.label, "length": components["image.jpg"].shape()}


def open_loader(store: AisStore, graph: Callable[..., Any], **options: Any) -> dp.Loader:
    shards = dp.Shards(f"{store.url}/s-", etl=options.pop("etl", None))
    usual = {"batch_size": 5, "seed": 3, "cache": dp.Cache(show_progress=False)}
    return loaders.open_loader(shards, graph, endpoint=store.endpoint, **usual | options)


def assert_batches_equal(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    import torch

    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_indexed", [True, False], ids=["indexed", "on the fly"])
def test_batches_are_those_of_shards_that_were_transformed_here(
    bucket: AisStore, plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_indexed: bool
) -> None:
    """Bit by bit, over two epochs; without an index they are indexed, that is said, and nothing is written."""
    found = resolve_shards(plain, endpoint=None)
    transform_shards(found, open_output(tmp_path, endpoint=None), transform=f"{TRANSFORMS}:small_pets", jobs=1)
    index_shards(resolve_shards(tmp_path, endpoint=None))
    before = [entry.name for entry in bucket.list("")]
    if is_indexed:
        index_shards(shards_of(bucket, "small-pets"))
    with (
        open_loader(bucket, tensors, etl="small-pets") as through,
        dp.loader(tmp_path, tensors, batch_size=5, seed=3, device="cpu", outputs=dp.Outputs(keys=True)) as here,
    ):
        assert len(through) == len(here) == 3
        for _ in range(2):
            batches = [batch for (batch,) in through]
            assert batches[0]["image"].shape == (5, 3, 24, 24)
            assert_batches_equal(batches, [batch for (batch,) in here])
    told = f"as ETL 'small-pets' gives them: indexed 3 of them in .* dali-pipes prep index '{bucket.url}/s-'"
    assert bool(re.search(told, caplog.text)) is not is_indexed
    written = {entry.name for entry in bucket.list("")} - set(before)
    names = [f".dali-pipes/s-00000{n}.index.small-pets.etl.safetensors" for n in range(3)]
    names += [".dali-pipes/s-columns.small-pets.etl.safetensors", ".dali-pipes/s-manifest.small-pets.etl.safetensors"]
    assert written == (set(names) if is_indexed else set())


def test_parts_of_a_shard_are_those_of_the_transformed_one(bucket: AisStore, tmp_path: Path) -> None:
    """Read once for several parts, and checked; a shard that is another one since is told."""
    indexed = DataSet(shards_of(bucket, "small-pets"))
    found = indexed.manifest
    with contextlib.closing(indexed):
        store = shards_of(bucket, "small-pets").store
        for shard in (1, 0):
            data = store.read(found.names[shard])
            assert len(data) == found.shard_bytes[shard]
            for start, size in [(0, 512), (5_000, 9_000), (len(data) - 10, 10)]:
                assert indexed.read_range(shard, start=start, size=size) == data[start : start + size]
        assert indexed.source == f"{bucket.url}/s- through ETL small-pets"
        bucket.write("s-000002.tar", bucket.read("s-000001.tar"))
        with pytest.raises(DataError, match=r"s-000002.tar through ETL small-pets'.* gave the same bytes twice"):
            indexed.read_range(2, start=0, size=512)


# --- what an ETL may not do -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", [b"relabel", b"unsteady"], ids=["changed", "unsteady"])
def test_other_bytes_than_when_it_was_indexed_are_told(bucket: AisStore, tmp_path: Path, act: bytes) -> None:
    index_shards(shards_of(bucket, "as-told"))
    tell(bucket, act, tmp_path / "shards")
    with (
        open_loader(bucket, labels, etl="as-told") as loader,
        pytest.raises(
            DataError,
            match=r"s-00000[012].tar through ETL as-told': its b.*; (it gave the same bytes twice: the shard was "
            r"replaced since, or the transform of ETL 'as-told' is another one; index again: dali-pipes prep index URL "
            r"--etl as-told"
            r"|ETL 'as-told' gave different bytes each of 2 times)",
        ) as caught,
    ):
        keys_of(loader)
    assert ("the same bytes twice" in str(caught.value)) is (act == b"relabel")


def test_a_transform_that_fails_is_told_with_shard_and_key(bucket: AisStore, tmp_path: Path) -> None:
    """When it is indexed, and when it is read."""
    index_shards(shards_of(bucket, "as-told"))
    tell(bucket, b"fail", tmp_path / "shards", keys=["s00002"])
    told = rf"shard 's-000000.tar', key 's00002': transform '{TRANSFORMS}:as_told' failed: ValueError: a sample that"
    with pytest.raises(StoreError, match=f"ETL 'as-told' failed: {told}"):
        index_in_memory(shards_of(bucket, "as-told"))
    with (
        open_loader(bucket, labels, etl="as-told", shuffle=False, cache=dp.Cache(fetchers=1)) as loader,
        pytest.raises(StoreError, match=f"s-000000.tar through ETL as-told' at http.*: ETL 'as-told' failed: {told}"),
    ):
        keys_of(loader)


def test_an_etl_that_is_stopped_is_waited_for_a_while(bucket: AisStore) -> None:
    """Then told by its name, and how to start it; started again in time nothing is lost."""
    start_etl(bucket, "comes-goes", transform=f"{TRANSFORMS}:as_told")
    made = index_in_memory(shards_of(bucket, "comes-goes")).manifest
    bucket.client.etl("comes-goes").stop()
    with pytest.raises(
        StoreError, match=r"ETL 'comes-goes' at .* does not run, its stage is Aborted .*stop it and start"
    ):
        shards_of(bucket, "comes-goes")
    with pytest.raises(
        StoreError,
        match=r"s-000000.tar through ETL comes-goes' at http.*: given up after .* attempts in .*: no ETL 'comes-goes' "
        "runs there .*start it: dali-pipes prep etl start comes-goes --function",
    ):
        fetch_first(bucket, made, etl="comes-goes")
    stop_etl(bucket, "comes-goes")
    start = functools.cache(partial(start_etl, bucket, "comes-goes", transform=f"{TRANSFORMS}:as_told"))
    fetch_first(bucket, made, etl="comes-goes", patience_s=60.0, on_retry=start)
    stop_etl(bucket, "comes-goes")


def fetch_first(
    store: AisStore, made: Manifest, *, etl: str, patience_s: float = 0.3, on_retry: Callable[[], None] | None = None
) -> None:
    """Fetch the first shard, and expect what the manifest says."""
    place = Place(int(made.shard_bytes[0]))
    with use_patience(Patience(patience_s=patience_s, longest_pause_s=0.02, on_retry=on_retry)):
        fetcher = TransformedStore(AisStore(store.endpoint, store.bucket), etl).open_fetcher()
    with contextlib.closing(fetcher):
        assert fetcher.fetch([Wanted(made.names[0], place.extent, int(made.checksums[0]))], stopped=lambda: False)


# --- a transfer that breaks, as AIStore ends it: with 200 said, an error's text in the body, and no sign of it --------

DATA = bytes(range(256)) * 800
ERROR = b'{"message":"unexpected EOF","method":"GET","status":500}'


def through(bodies: list[bytes]) -> tuple[Place, list[str | None]]:
    """Fetch what a server answers, one body after the other and the last one ever again; the ranges asked for."""

    def script(visit: Visit) -> None:
        if "etl_name=some-etl" not in visit.path:
            visit.say(404, b"{}")  # the map of the cluster
        else:
            visit.say_chunked(bodies.pop(0) if len(bodies) > 1 else bodies[0])

    place = Place(len(DATA))
    with scripted(script) as server:
        with use_patience(Patience(patience_s=60.0, longest_pause_s=0.02)):
            fetcher = TransformedStore(AisStore(server.endpoint, "b"), "some-etl").open_fetcher()
        with contextlib.closing(fetcher):
            # As many connections as it may have: there are no ranges for them.
            assert fetcher.fetch(
                [Wanted("x.tar", place.extent, checksum(DATA))], stopped=lambda: False, num_connections=4
            )
        return place, server.ranges[1:]


def test_what_breaks_off_is_read_again_from_the_beginning() -> None:
    """Early, and so late that the error's text makes it longer than it should be; no range is asked for."""
    place, ranges = through([DATA[:100_000] + ERROR, DATA[:-5] + ERROR, DATA[:1] + ERROR, DATA])
    assert place.holds(DATA)
    assert ranges == [None] * 4


@pytest.mark.parametrize(
    ("bodies", "message"),
    [
        ([DATA[:-1]], r"ends after 204799 of 204800 bytes; it gave the same bytes twice: the shard was replaced"),
        ([DATA + b"x"], r"its body has more than 204800 bytes, the manifest's; it gave the same bytes twice"),
        ([DATA[::-1]], r"its bytes have the checksum .*, the manifest says .*; it gave the same bytes twice"),
        ([DATA[::-1], DATA[1:] + b"x"], r"ETL 'some-etl' gave different bytes each of 2 times"),
        ([DATA[:n] for n in range(1, 9)], r"ends after 6 of 204800 bytes; .* gave different bytes each of 6"),
    ],
)
def test_other_bytes_that_cannot_be_a_break_are_told(bodies: list[bytes], message: str) -> None:
    with pytest.raises(DataError, match=f"'ais://b/x.tar through ETL some-etl'.*{message}"):
        through(list(bodies))


# --- errors before any work -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "etl", "error", "message"),
    [
        ("{plain}", "small-pets", ValueError, r"ETL 'small-pets' with '.*': a cluster's ETL .*prep transform"),
        ("ais://b/s-", "small-pets", ValueError, r"ETL 'small-pets' with 'ais://b/s-' needs the endpoint"),
        ("{plain}", 3, TypeError, "etl must be the name of an ETL, got 3"),
        ({"sets": {"a": "ais://b/s-"}}, "e", ValueError, r"mixture: name the data sets .*etl={'SET': 'e'}\)"),
        ({"sets": {"a": "ais://b/s-"}, "etl": {"a": "e"}}, None, ValueError, "ETL 'e' with 'ais://b/s-' needs"),
    ],
)
def test_misuse_is_told_before_any_work(
    plain: Path, shards: Any, etl: Any, error: type[Exception], message: str
) -> None:
    shards = shards.format(plain=plain) if isinstance(shards, str) else dp.Mixture(**shards)
    with pytest.raises(error, match=message):
        dp.loader(shards if etl is None else dp.Shards(shards, etl=etl), labels, batch_size=5, device="cpu")


@pytest.mark.parametrize(
    ("status", "text", "error", "message"),
    [
        # As AIS 4.9 and 5.0 answer a question for their ETLs without Kubernetes.
        (400, "the operation requires Kubernetes", NoEtlError, "it does not run on Kubernetes.*prep transform URL OUT"),
        (501, "cannot use ETL in a build without ETL support", NoEtlError, "built with the tag etl.*prep transform"),
        (500, "out of order", StoreError, "'ETL some-etl' at .*: 500 out of order"),
        (403, "only administrators", None, ""),
        (200, "no list", StoreError, "this is no list of ETLs"),
    ],
)
def test_what_a_cluster_says_of_its_etls(status: int, text: str, error: type[PipesError] | None, message: str) -> None:
    """One that lists them to administrators only is not asked again: a training job may still read through them."""

    answer = json.dumps({"message": text, "status": status}).encode()
    with scripted(lambda visit: visit.say(status, answer, Connection="close")) as server:
        store = AisStore(server.endpoint, "b")
        with contextlib.nullcontext() if error is None else pytest.raises(error, match=message):
            through_etl(ShardSet(store=store, names=("s-000000.tar",)), "some-etl")
    assert server.paths[0] == "/v1/etl"


# --- names, formats, the command --------------------------------------------------------------------------------------


def test_a_manifest_says_through_which_etl(bucket: AisStore) -> None:
    """Read back as it was written; one that was renamed, or says what cannot be, is refused."""
    shards = shards_of(bucket, "as-told")
    made = index_shards(shards)
    name = ".dali-pipes/s-manifest.as-told.etl.safetensors"
    data = bucket.read(name)
    assert Manifest.from_bytes(data, where="m").to_bytes() == data
    assert Manifest.from_bytes(data, where="m").digest == made.digest
    assert made.take(np.array([1, 0])).etl == "as-told"
    with pytest.raises(DataError, match="damaged dali-pipes manifest: 'etl' is "):
        Manifest.from_bytes(dataclasses.replace(made, etl="as told").to_bytes(), where="m")
    bucket.write(".dali-pipes/s-manifest.safetensors", data)
    stored = resolve_shards(f"{bucket.url}/s-", endpoint=bucket.endpoint)
    with pytest.raises(
        DataError, match=r"describes shards as ETL 'as-told' gives them, expected one of shards as they are st"
    ):
        find_manifest(stored)
    bucket.write(transformed_name(".dali-pipes/s-manifest.safetensors", etl="small-pets"), data)
    with pytest.raises(DataError, match=r"expected one of shards as ETL 'small-pets' gives them; .*--etl small-pets"):
        find_manifest(shards_of(bucket, "small-pets"))


def test_a_bucket_as_an_etl_shows_it(bucket: AisStore, plain: Path) -> None:
    store = TransformedStore(bucket, "as-told")
    data = (plain / "s-000001.tar").read_bytes()
    bucket.write(".dali-pipes/s-classes.json", b"{}")
    assert store.read("s-000001.tar") == data
    assert store.read_range("s-000001.tar", start=1_000, size=70_000) == data[1_000:71_000]
    assert store.read(".dali-pipes/s-classes.json") == b"{}"
    assert store.size(".dali-pipes/s-manifest.safetensors") is None
    store.write(".dali-pipes/s-manifest.safetensors", b"12345")
    assert bucket.read(".dali-pipes/s-manifest.as-told.etl.safetensors") == b"12345"
    assert store.read_range(".dali-pipes/s-manifest.safetensors", start=1, size=2) == b"23"
    store.delete(".dali-pipes/s-manifest.safetensors")
    assert store.size(".dali-pipes/s-manifest.safetensors") is None
    assert bucket.size(".dali-pipes/s-manifest.safetensors") is not None


def test_index_command(bucket: AisStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command indexes through an ETL; an unknown ETL and a missing endpoint are errors."""
    command = ["prep", "index", f"{bucket.url}/s-", "--endpoint", bucket.endpoint, "--etl"]
    assert main([*command, "as-told", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["etl"], told["manifest"]) == (
        "as-told",
        f"{bucket.url}/.dali-pipes/s-manifest.as-told.etl.safetensors",
    )
    assert main([*command, "not-there"]) == 1
    assert "no ETL 'not-there'" in capsys.readouterr().err
    monkeypatch.delenv("AIS_ENDPOINT", raising=False)
    assert main(["prep", "index", "ais://b/s-", "--etl", "as-told"]) == 2
    assert "--etl NAME needs --endpoint" in capsys.readouterr().err
