"""The contract of every loader that can be timed."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.compare.outputs import Reference, compare_epoch, tolerance_of
from bench.loaders.protocol import BenchBatch, LoaderOptions
from bench.loaders.registry import LOADERS, LoaderSpec, available_loaders, open_loader
from bench.loaders.workers import fitting_batch_size
from dali_pipes.errors import PipesError
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import resolve_shards


@dataclass(frozen=True)
class Opened:
    """What one opening of a loader gave: each is opened once for all tests of its contract, which takes seconds."""

    spec: LoaderSpec
    num_workers: int
    sizes: list[int]
    """Of the batches of two epochs."""
    epochs: list[list[str]]
    """Keys of two epochs, each compared with the reference."""
    after_left: list[str]
    """Keys of the epoch that was asked for while another was unfinished."""
    workers_inside: int
    """In the middle of an epoch that was still held when the loader was closed."""
    workers_after: int


@pytest.fixture(scope="module")
def references(shards: ShardSet, bucket: ShardSet, options: LoaderOptions) -> Iterator[dict[str, Reference]]:
    with Reference.open(shards, options=options) as local, Reference.open(bucket, options=options) as remote:
        yield {"local": local, "bucket": remote}


def _cases() -> Iterator[Any]:
    """Each loader with each of its decoders on local shards, and on a bucket with one."""
    reasons = available_loaders()
    for name, entry in LOADERS.items():
        marks = [] if reasons[name] is None else [pytest.mark.skip(reason=str(reasons[name]))]
        specs = [LoaderSpec(name=name, decode=decode) for decode in entry.decodes or (None,)]
        if {"local", "converted"} & set(entry.source):
            for spec in specs:
                yield pytest.param((spec, "local"), id=f"{spec}-local", marks=marks)
        if "ais" in entry.source:
            yield pytest.param((specs[0], "bucket"), id=f"{specs[0]}-bucket", marks=marks)


@pytest.fixture(scope="module", params=_cases())
def opened(
    request: pytest.FixtureRequest,
    shards: ShardSet,
    bucket: ShardSet,
    options: LoaderOptions,
    references: dict[str, Reference],
) -> Opened:
    spec, place = request.param
    before = set(_workers())
    sizes: list[int] = []
    epochs: list[list[str]] = []
    with open_loader(spec.name, bucket if place == "bucket" else shards, options=spec.apply(options)) as loader:

        def seen(epoch: Iterator[BenchBatch]) -> Iterator[BenchBatch]:
            epochs.append([])
            for batch in epoch:
                sizes.append(len(batch["key"]))
                epochs[-1] += batch["key"]
                yield batch

        for _ in range(2):
            compare_epoch(
                seen(loader.epoch()),
                references[place],
                loader=str(spec),
                tolerance=tolerance_of(decode=loader.decode, device=loader.device),
                gives=LOADERS[spec.name].gives,
            )
        left = loader.epoch()
        next(left)
        after_left = [key for batch in loader.epoch() for key in batch["key"]]
        held = loader.epoch()
        next(held)
        inside = len(set(_workers()) - before)
        num_workers = loader.num_workers
    found = Opened(spec, num_workers, sizes, epochs, after_left, inside, len(set(_workers()) - before))
    del left, held
    return found


def test_loader_two_epochs_equal_the_reference(opened: Opened, keys: set[str]) -> None:
    """Each key exactly once an epoch; labels and masks equal, photos within the tolerance, at sizes around the crop."""
    assert [len(epoch) for epoch in opened.epochs] == [22, 22]
    if LOADERS[opened.spec.name].gives:
        assert [sorted(epoch) for epoch in opened.epochs] == [sorted(keys)] * 2


def test_loader_batches_are_at_most_batch_size(opened: Opened, options: LoaderOptions) -> None:
    """Also where workers, or shards, make them."""
    assert 0 < min(opened.sizes) <= max(opened.sizes) == options.batch_size


def test_loader_left_early_starts_again(opened: Opened) -> None:
    """An epoch that was left after one batch, its iterator still held, is no part of the next."""
    assert sorted(opened.after_left) == sorted(opened.epochs[0])


def test_loader_closed_in_mid_epoch_leaves_no_worker(opened: Opened) -> None:
    """What a loader started has ended when its context has, even if somebody still holds an unfinished epoch."""
    # The tutorial's shuffle buffer has drawn this small epoch to its end, and with it its workers'.
    if opened.spec.name != "webloader-tutorial":
        assert opened.workers_inside == opened.num_workers
    assert opened.workers_after == 0


def test_dali_external_in_a_rank_forks_its_worker(shards: ShardSet, options: LoaderOptions) -> None:
    """Not spawned: nothing is imported on the clock. Epochs equal the reference, the worker ends with the loader."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    rank = context.Process(target=_rank_with_dali_external, args=(shards.store.url, options, theirs))
    rank.start()
    theirs.close()
    try:
        assert ours.poll(60)
        assert ours.recv() == ([22, 22], ["forked"], [])
    finally:
        rank.kill()
        rank.join()


def _rank_with_dali_external(url: str, options: LoaderOptions, pipe: Connection) -> None:
    shards = resolve_shards(url, endpoint=None)
    with Reference.open(shards, options=options) as reference:
        with open_loader("dali-external", shards, options=options) as loader:
            tolerance = tolerance_of(decode=loader.decode, device=loader.device)
            compared = [
                compare_epoch(loader.epoch(), reference, loader="dali-external", tolerance=tolerance) for _ in range(2)
            ]
            held = loader.epoch()
            next(held)
            inside = ["forked" if _is_forked(worker) else str(_command(worker)) for worker in _workers()]
        pipe.send(([found.num_samples for found in compared], inside, _workers()))


MAIN = """
import multiprocessing, os, sys, time
import psutil
from bench.loaders.protocol import LoaderOptions
from bench.loaders.registry import open_loader
from dali_pipes.store.urls import resolve_shards

def run():
    options = LoaderOptions(batch_size=2, num_threads=2, crop=8, device="cpu")
    with open_loader(sys.argv[1], resolve_shards(sys.argv[2], endpoint=None), options=options) as loader:
        epoch = loader.epoch()
        next(epoch)
        print(os.getpid(), *[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
        time.sleep(600)

if sys.argv[3] == "rank":
    rank = multiprocessing.get_context("fork").Process(target=run)
    rank.start()
    rank.join()
else:
    run()
"""


@pytest.mark.parametrize(
    ("name", "place", "num_processes"),
    [
        ("webloader", "main", 3),  # the server and two workers
        ("dali-external", "main", 2),  # DALI's worker, and what tracks its shared memory
        ("dali-external", "rank", 1),  # the worker alone, forked
    ],
)
def test_workers_end_with_a_killed_main_process(name: str, place: str, num_processes: int, shards: ShardSet) -> None:
    """Issue 3: SIGKILL runs no cleaning up, and the workers' parent is the fork server, which waited for them."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    arguments = [sys.executable, "-c", MAIN, name, shards.store.url, place]
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True) as main:
        assert main.stdout is not None
        try:
            killed, *below = [psutil.Process(int(pid)) for pid in main.stdout.readline().split()]
            killed.send_signal(signal.SIGKILL)
        finally:
            main.kill()
        assert len(below) >= num_processes
        deadline = time.monotonic() + 60  # on a busy machine
        while (alive := [process for process in below if _is_running(process)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in alive:
            process.kill()
        assert alive == []


def test_webloader_more_workers_than_shards(shards: ShardSet, options: LoaderOptions, keys: set[str]) -> None:
    """A worker without a shard would have nothing to do: none is started, and no sample comes twice."""
    one = ShardSet(store=shards.store, names=shards.names[:1])
    for name in ("webloader", "webloader-tutorial"):
        with open_loader(name, one, options=options) as loader:
            assert loader.num_workers == 1
            seen = [key for batch in loader.epoch() for key in batch["key"]]
        assert len(seen) == len(set(seen)) == 8
        assert set(seen) < keys


@pytest.mark.parametrize("name", ["webloader", "dali-external", "spdl", "aistore"])
def test_peer_has_another_order_of_shards_each_epoch(name: str, bucket: ShardSet) -> None:
    """Shards are shuffled anew, and the same in each run; keys keep their directory."""
    if (reason := available_loaders(bucket)[name]) is not None:
        pytest.skip(reason)

    def orders() -> list[list[str]]:
        one_worker = LoaderOptions(batch_size=4, num_threads=1, crop=8, device="cpu")
        with open_loader(name, bucket, options=one_worker) as loader:
            return [[key for batch in loader.epoch() for key in batch["key"]] for _ in range(5)]

    first = orders()
    assert len({tuple(order) for order in first}) > 1
    assert {key.rpartition("/")[0] for key in first[0]} == {"animals"}
    assert orders() == first


@pytest.mark.parametrize(
    ("free_mib", "batch_size", "expected"),
    [
        (20_000, 64, 64),  # a laptop: half of its memory
        (64, 64, 4),  # a container: 7 batches of 4 x 1.5 MiB are 43 MiB, of 8 they would be 85
        (1, 64, 1),  # never 0
    ],
)
def test_fitting_batch_size_halves_until_it_fits(
    monkeypatch: pytest.MonkeyPatch, free_mib: int, batch_size: int, expected: int
) -> None:
    """Two workers share two batches each, make one, and one is in use."""
    monkeypatch.setattr("bench.loaders.workers._free_shared_memory", lambda: free_mib << 20)
    options = LoaderOptions(batch_size=batch_size, num_threads=2, crop=350)
    assert fitting_batch_size(options, num_shards=8) == expected


@pytest.mark.parametrize("name", ["webloader", "webloader-tutorial"])
def test_loader_without_shared_memory_says_what_to_do(
    name: str, shards: ShardSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that finds shared memory full would be killed by SIGBUS, with no word about why."""
    monkeypatch.setattr("bench.loaders.workers._free_shared_memory", lambda: 64 << 20)
    with (
        pytest.raises(PipesError, match=r"has 64 MiB free; lower --batch-size, .* --shm-size=2g"),
        open_loader(name, shards, options=LoaderOptions(num_threads=2, device="cpu")),
    ):
        pass


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("webdataset", "loader must be one of dali, memory, webloader, webloader-tutorial, .*, got 'webdataset'"),
        ("webloader:opencv", "loader 'webloader' decodes with pil or turbo, got 'webloader:opencv'"),
        ("dali:turbo", "loader 'dali' decodes with DALI alone, got 'dali:turbo'"),
        ("webloader-tutorial:turbo", "loader 'webloader-tutorial' decodes with pil, got"),
    ],
)
def test_loader_spec_unknown_name_is_refused(text: str, message: str) -> None:
    """A name that is not there is answered with those that are."""
    with pytest.raises(ValueError, match=message):
        LoaderSpec.parse(text)


def _workers() -> list[psutil.Process]:
    """Worker processes: what the fork server started and has not ended, and what DALI did, in either way."""
    children = psutil.Process().children()
    below = [grandchild for child in children for grandchild in child.children()]
    of_dali = [
        child for child in children if _is_forked(child) or any("spawn_main" in word for word in _command(child))
    ]
    return [process for process in (*below, *of_dali) if _is_running(process)]


def _is_forked(child: psutil.Process) -> bool:
    """It has run nothing else: its command line is still ours."""
    return bool(_command(child) == psutil.Process().cmdline())


def _is_running(process: psutil.Process) -> bool:
    """Not so one that has ended and that nobody waits for: in a container the first process may not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
