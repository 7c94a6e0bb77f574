"""The exchange: the same bytes, whoever writes them; restartable, in parts, in bounded memory."""

import hashlib
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dali_pipes.data_set.indexing import find_manifest
from dali_pipes.errors import DataError, PipesError, StoreError
from dali_pipes.formats.names import classes_name, index_name
from dali_pipes.store.base import Store
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from prep.part import JobPart
from prep.shuffle import exchange
from prep.shuffle.exchange import MAX_GAP_BYTES, runs, sections
from prep.shuffle.key_map import Grouping
from prep.shuffle.order import Algorithm
from prep.shuffle.request import Request
from prep.shuffle.shuffle import ShuffleReport, shuffle
from tests.prep.shuffle.conftest import NUM_SAMPLES
from tests.prep.workers_tasks import kill_itself
from tests.programs import REPOSITORY, start_python, wait_until
from tests.shards import make_source, pack, read_tar, tar_bytes


def run(shards: ShardSet, name: str, **options: Any) -> ShuffleReport:
    """A shuffle to ``NAME-``, by an exchange in this process unless the options say otherwise."""
    given = {"engine": "exchange", "jobs": 1, "algorithm": Algorithm(seed=7), "shard_bytes": 5000} | options
    return shuffle(Request(shards, output_prefix=f"{name}-", **given))


def outputs(store: Store, names: Sequence[str]) -> list[bytes]:
    return [store.read(name) for name in names]


# SHA-256 of all shards, one after the other, by shard_bytes: these never change.
GOLDEN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "shuffle": ({}, ["b4cbdfd94af650ba", "f06a25bf19a1ddde", "1cacd3f89994d201"]),
    "none": ({"algorithm": Algorithm(kind="none")}, ["57401ed799ea7f03", "804cbb19f0b00a9c", "2b78adcd1d9d74cd"]),
    "alphanumeric": (
        {"algorithm": Algorithm(kind="alphanumeric", decreasing=True)},
        ["d5077a0cfcf8cb97", "309221d8607079a2", "2478d6f325229b75"],
    ),
    "content": (
        {"algorithm": Algorithm(kind="content", component="cls", key_type="int")},
        ["b4bb57f1ec65506a", "3eb86945db741093", "1263cc073190c3cf"],
    ),
    "class": ({"mapped": Grouping(by="class")}, ["3e0054aee5377913", "f1dd67190fdfe592", "ff68155f2d91fb54"]),
    "balanced": ({"mapped": Grouping(by="balanced")}, ["003e648bf45ffe01", "c4cca225034f3f44", "1cacd3f89994d201"]),
}


@pytest.mark.parametrize("is_indexed", [False, True])
@pytest.mark.parametrize("order", list(GOLDEN))
def test_bytes_are_the_same_for_ever(directory: ShardSet, order: str, *, is_indexed: bool) -> None:
    """With and without shard indexes; a shard for each sample, some shards, one shard."""
    if is_indexed:
        index_shards(directory)
    options, expected = GOLDEN[order]
    for shard_bytes, digest in zip((1, 5000, 10**6), expected, strict=True):
        report = run(directory, f"of{shard_bytes}x", shard_bytes=shard_bytes, **options)
        assert (report.engine, report.num_samples) == ("exchange", NUM_SAMPLES)
        data = b"".join(outputs(directory.store, report.shards))
        assert hashlib.sha256(data).hexdigest().startswith(digest)


@pytest.mark.parametrize("section_bytes", [600, 4096])
def test_size_of_sections_does_not_change_the_bytes(
    directory: ShardSet, monkeypatch: pytest.MonkeyPatch, section_bytes: int
) -> None:
    """Also if samples are larger than a section."""
    expected = run(directory, "whole")
    monkeypatch.setattr(exchange, "SECTION_BYTES", section_bytes)
    found = run(directory, "exchange")
    assert outputs(directory.store, expected.shards) == outputs(directory.store, found.shards)


@pytest.mark.parametrize("is_indexed", [False, True])
def test_odd_members_come_out_as_they_went_in(tmp_path: Path, *, is_indexed: bool) -> None:
    """Files of no sample between samples (left out), long names, names beyond ASCII, capitals, empty files."""
    store = LocalStore(tmp_path / "odd")
    went_in: dict[str, bytes] = {}
    for shard in range(3):
        members = {"README": b"x" * 700}
        for row in range(4):
            key = f"{'long/' * 40 if row == 1 else ''}{'ä' if row == 2 else 'a'}{shard}{row}"
            samples = {f"{key}.TXT": b"t" * (500 * row), f"{key}.json": b"{}"}
            members |= {**samples, f"{row}": b"no sample"}
            went_in |= samples
        store.write(f"odd-{shard}.tar", tar_bytes(members))
    shards = ShardSet(store=store, names=tuple(f"odd-{shard}.tar" for shard in range(3)))
    if is_indexed:
        index_shards(shards)
        went_in = {name.replace(".TXT", ".txt"): data for name, data in went_in.items()}
    report = run(shards, "exchange")
    came_out = [member for data in outputs(store, report.shards) for member in read_tar(data)]
    folded = [(name.replace(".TXT", ".txt") if is_indexed else name, data) for name, data in came_out]
    assert sorted(folded) == sorted(went_in.items())


@pytest.mark.parametrize("total", [3, 20])
def test_parts_make_the_whole(directory: ShardSet, total: int) -> None:
    """In any order, and one of them twice; parts beyond the last output have nothing to do."""
    index_shards(directory)
    whole = run(directory, "whole")
    made: list[str] = []
    for number in [*range(total, 0, -1), 1]:
        report = run(directory, "parts", engine="auto", part=JobPart(number=number, total=total))
        assert report.engine == "exchange"
        assert report.num_written == (0 if set(report.shards) <= set(made) else len(report.shards))
        made += report.shards
    names = sorted(set(made))
    assert [name.replace("parts", "whole") for name in names] == list(whole.shards)
    assert outputs(directory.store, names) == outputs(directory.store, whole.shards)
    assert directory.store.find(classes_name("parts-")) == directory.store.find(classes_name("whole-"))


def test_part_that_is_run_again_keeps_the_indexes_of_the_others(directory: ShardSet) -> None:
    index_shards(directory)
    for number in (1, 2):
        run(directory, "parts", part=JobPart(number=number, total=2))
    made = resolve_shards(directory.store.locate("parts-"), endpoint=None)
    index_shards(made)
    directory.store.delete(made.names[1])
    run(directory, "parts", part=JobPart(number=2, total=2))
    assert find_manifest(made) is None
    there = [name for name in made.names if directory.store.find(index_name(name)) is not None]
    assert there == [name for name in made.names if name != made.names[1]]


KILLED = """
import sys
from pathlib import Path
from dali_pipes.store.urls import resolve_shards
from prep.shuffle.order import Algorithm
from prep.shuffle.request import Request
from prep.shuffle.shuffle import shuffle
from tests.prep.shuffle.gated_store import GatedStore
shards, out, gate = sys.argv[1:]
store = GatedStore(Path(out), held="shuffled-000003.tar", gate=Path(gate))
shuffle(Request(resolve_shards(shards, endpoint=None), target=store, output_prefix="shuffled-",
                algorithm=Algorithm(seed=7), shard_bytes=5000, engine="exchange", jobs=1))
"""


def test_run_that_was_killed_is_finished_by_running_it_again(directory: ShardSet, tmp_path: Path) -> None:
    """Killed in the middle of its fourth output."""
    (tmp_path / "gate").mkdir()
    command = start_python(KILLED, directory.url, tmp_path / "out", tmp_path / "gate")
    wait_until(lambda: (tmp_path / "gate" / "pid").exists() or command.poll() is not None)
    command.kill()
    said = command.communicate()
    target = LocalStore(tmp_path / "out")
    assert [entry.name for entry in target.list("shuffled-0")] == [f"shuffled-{n:06d}.tar" for n in range(3)], said
    report = run(directory, "shuffled", target=target)
    assert report.num_written == len(report.shards) - 3
    expected = run(directory, "whole")
    assert outputs(target, report.shards) == outputs(directory.store, expected.shards)


def test_input_that_is_not_what_its_index_says_is_noticed(directory: ShardSet) -> None:
    """Two samples of equal size that changed places."""
    store = directory.store
    sample = [("a.txt", b"1"), ("b.txt", b"2")]
    store.write("swap-0.tar", tar_bytes(dict(sample)))
    shards = ShardSet(store=store, names=("swap-0.tar",))
    index_shards(shards)
    store.write("swap-0.tar", tar_bytes(dict(reversed(sample))))
    with pytest.raises(DataError, match=r"swap-0\.tar', bytes .*: expected another sample than '[ab]'"):
        run(shards, "shuffled")
    assert store.list("shuffled-0") == []


def test_worker_that_is_killed_is_told_with_its_shard(directory: ShardSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setattr(exchange, "write_and_compare", kill_itself)
    with pytest.raises(PipesError, match=r"ended while it worked on shard '.*/shuffled-00000\d\.tar', exit status -9"):
        run(directory, "shuffled", jobs=2)


@pytest.mark.parametrize("at", [0, 512, None])
def test_shards_that_change_meanwhile_are_told(
    directory: ShardSet, monkeypatch: pytest.MonkeyPatch, at: int | None
) -> None:
    """A header is damaged, a label changes, or an output disappears (as if another run had --overwrite)."""
    write, store, name = exchange.Exchange.write, directory.store, directory.names[1]
    gone = r"00\.tar' was written, and is gone; does another process"
    changed = rf"{name}', bytes 0 to \d+.*changed since it was indexed or read"

    def write_beside_another(self: exchange.Exchange, planned: Any) -> None:
        if at is not None:
            data = bytearray(store.read(name))
            data[at] ^= 1
            store.write(name, bytes(data))
        write(self, planned)
        store.delete("shuffled-000000.tar")

    monkeypatch.setattr(exchange.Exchange, "write", write_beside_another)
    with pytest.raises((DataError, StoreError), match=gone if at is None else changed):
        run(directory, "shuffled", algorithm=Algorithm(kind="none"))


class FlippingStore(LocalStore):
    """Stores another byte than it was sent."""

    def write_stream(self, name: str, chunks: Any, *, num_bytes: int) -> None:
        super().write_stream(name, chunks, num_bytes=num_bytes)
        data = bytearray(self.read(name))
        data[512] ^= 1
        self.write(name, bytes(data))


def test_store_that_gives_back_other_bytes_is_noticed(directory: ShardSet, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"shuffled-000000\.tar' was read back with other bytes than were written"):
        run(directory, "shuffled", target=FlippingStore(tmp_path / "out"))


def test_neighbours_are_read_by_one_request() -> None:
    """In any order of the output; a gap larger than the next sample, or than 64 KiB, begins another request."""
    large = MAX_GAP_BYTES * 2
    starts = np.array([4096, 0, 512, 9000, large, 3 * large + 2])
    stops = np.array([8192, 512, 1024, 9100, 2 * large, 4 * large])
    rows = np.array([0, 0, 0, 0, 1, 1])
    found = runs(range(6), rows, starts, stops)
    assert [(each.shard, each.start, each.stop, each.samples) for each in found] == [
        (0, 0, 8192, [1, 2, 0]),
        (0, 9000, 9100, [3]),
        (1, large, 2 * large, [4]),
        (1, 3 * large + 2, 4 * large, [5]),
    ]
    assert sum(each.stop - each.start for each in found) <= 2 * int((stops - starts).sum())


def test_sections_are_bounded_and_complete() -> None:
    sizes = np.random.default_rng(0).integers(1, 9 << 20, 300)
    found = list(sections(np.zeros(300, np.int64), sizes))
    assert [sample for samples in found for sample in samples] == list(range(300))
    assert max(int(sizes[list(samples)].sum()) for samples in found) <= exchange.SECTION_BYTES
    assert list(sections(np.zeros(0, np.int64), np.zeros(0, np.int64))) == []


def test_memory_does_not_grow_with_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory holds two sections, whatever the sizes of inputs and outputs; here one output of 24 MB."""
    store = LocalStore(tmp_path / "large")
    shards = ShardSet(store=store, names=pack(make_source(240, num_bytes=100_000), store=store, max_count=80).shards)
    index_shards(shards)
    monkeypatch.setattr(exchange, "SECTION_BYTES", 1 << 20)
    run(replace(shards, names=shards.names[:1]), "warm")  # modules that are loaded on the way are no data
    tracemalloc.start()
    try:
        report = run(shards, "shuffled", shard_bytes=10**9)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(report.shards) == 1
    assert report.num_bytes > 24_000_000
    assert peak < 12 << 20
