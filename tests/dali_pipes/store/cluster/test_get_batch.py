"""Ranges of a cluster's shards: by GetBatch of either kind, and by single requests where GetBatch fails or lies."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import xxhash

from dali_pipes.errors import DataError
from dali_pipes.formats.shard_index import ComponentRange
from dali_pipes.store.cluster.ais import AisStore
from tests.dali_pipes.fetch.served import ranged
from tests.servers.scripted import Visit, scripted
from tests.shards import tar_bytes

SHARDS = {f"s-{number}.tar": random.Random(number).randbytes(300_000) for number in range(3)}
PLACES = [
    ("s-2.tar", 512, 100),
    ("s-0.tar", 1024, 70_000),
    ("s-2.tar", 1024, 5),
    ("s-1.tar", 4096, 1),
    ("s-1.tar", 9, 0),
]
RANGES = [
    ComponentRange(shard, start, size, xxhash.xxh64_intdigest(SHARDS[shard][start : start + size]), f"k{start}", "jpg")
    for shard, start, size in PLACES
]
EXPECTED = [SHARDS[shard][start : start + size] for shard, start, size in PLACES]
Entries = list[dict[str, Any]]


def bytes_of(entry: dict[str, Any], kind: str) -> bytes:
    """What a cluster of this kind says to an entry."""
    if (kind == "ranges") != ("start" in entry):
        return b""
    start = entry["start"] if kind == "ranges" else int(entry["archpath"].removeprefix("k").removesuffix(".jpg"))
    return next(
        data for one, data in zip(RANGES, EXPECTED, strict=True) if (one.shard, one.start) == (entry["objname"], start)
    )


def batch(entries: Entries, kind: str) -> bytes:
    return tar_bytes({f"{number}": bytes_of(entry, kind) for number, entry in enumerate(entries)})


ANSWERS: dict[str, Callable[[Visit, Entries], None]] = {
    "5.0": lambda visit, entries: visit.say_chunked(batch(entries, "ranges")),
    "4.9": lambda visit, entries: visit.say_chunked(batch(entries, "members")),
    "no GetBatch": lambda visit, entries: visit.say(501, b"{}"),
    "busy": lambda visit, entries: visit.say(503, b"{}"),
    "cut off": lambda visit, entries: visit.say_chunked(batch(entries, "ranges")[:2000]),
    "one wrong": lambda visit, entries: visit.say_chunked(batch(entries, "ranges").replace(EXPECTED[0], bytes(100))),
    "too few": lambda visit, entries: visit.say_chunked(batch(entries[:2], "ranges")),
    "too many": lambda visit, entries: visit.say_chunked(batch([*entries, *entries], "ranges")),
    "another order": lambda visit, entries: visit.say_chunked(batch(entries[::-1], "ranges")),
    "no tar": lambda visit, entries: visit.say(200, b"x" * 3000),
}


@pytest.mark.parametrize("cluster", ANSWERS)
def test_what_getbatch_does_not_bring_is_read_by_range(cluster: str) -> None:
    """Whatever the cluster answers, the bytes are right. A way that returns nothing is not tried again."""

    def act(visit: Visit) -> None:
        if "/ml/moss/b?" in visit.path:
            entries = json.loads(visit.request.partition(b"\r\n\r\n")[2])["in"]
            assert all(entry.get("length") != 0 for entry in entries)  # AIStore 5.0 refuses such a request
            ANSWERS[cluster](visit, entries)
        else:
            visit.send(ranged(visit, SHARDS[visit.path.partition("/b/")[2].partition("?")[0]]))

    with scripted(act) as server:
        store = AisStore(server.endpoint, "b")
        for _ in range(2):
            asked = len(server.requests)
            assert store.read_ranges(RANGES) == EXPECTED
        again = ["/ml/moss/" in path for path in server.paths[asked:]]
    num_batches = {"no GetBatch": 0, "no tar": 0, "another order": 0, "busy": 2}
    assert sum(again) == num_batches.get(cluster, 1)
    assert all(again) == (cluster in ("5.0", "4.9", "too many"))


def test_bytes_that_stay_wrong_are_an_error() -> None:
    def act(visit: Visit) -> None:
        visit.say(501) if "/ml/moss/" in visit.path else visit.send(ranged(visit, SHARDS["s-0.tar"]))

    text = r"shard 'ais://b/s-0\.tar', key 'k1024': component 'jpg' has other bytes"
    with scripted(act) as server, pytest.raises(DataError, match=text):
        AisStore(server.endpoint, "b").read_ranges([RANGES[1]._replace(checksum=7)])
