"""The contract of every loader that can be timed."""

import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from bench.compare.outputs import Reference, compare_epoch, tolerance_of
from bench.loaders.protocol import BenchBatch, LoaderOptions
from bench.loaders.registry import LOADERS, LoaderSpec, open_loader
from dali_pipes.store.shard_set import ShardSet
from tests.bench.conftest import loader_cases
from tests.programs import start_python, wait_until

ALWAYS = ("dali", "memory", "webloader", "dali-external")
"""These loaders are tested in every run. The other loaders are tested nightly."""


@pytest.fixture(scope="module")
def references(pets: ShardSet, bucket_shards: ShardSet, options: LoaderOptions) -> Iterator[dict[str, Reference]]:
    with Reference.open(pets, options=options) as local, Reference.open(bucket_shards, options=options) as remote:
        yield {"local": local, "bucket": remote}


def _cases() -> Iterator[Any]:
    """Each loader with each of its decoders on local shards, and on a bucket with one."""
    for place, sources in (("local", ("local", "converted")), ("bucket", ("ais",))):
        for case in loader_cases(*sources, always=ALWAYS):
            (spec,) = case.values
            if place == "local" or spec.decode in (None, *LOADERS[spec.name].decodes[:1]):
                yield pytest.param(spec, place, id=f"{case.id}-{place}", marks=case.marks)


@pytest.mark.parametrize(("spec", "place"), list(_cases()))
def test_loader_keeps_the_contract(
    spec: LoaderSpec,
    place: str,
    pets: ShardSet,
    bucket_shards: ShardSet,
    options: LoaderOptions,
    references: dict[str, Reference],
    keys: set[str],
) -> None:
    """Each epoch has each key once, equal labels and masks, and photos within the tolerance, at sizes around the crop.

    Batches have at most the batch size, also where workers, or shards, make them. An epoch that was left after one
    batch, its iterator still held, is no part of the next. What a loader started has ended when its context has, even
    if somebody still holds an unfinished epoch.
    """
    before = set(_workers())
    sizes: list[int] = []
    epochs: list[list[str]] = []
    with open_loader(spec.name, bucket_shards if place == "bucket" else pets, options=spec.apply(options)) as loader:

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
        assert len(set(_workers()) - before) == loader.num_workers
    assert set(_workers()) <= before
    del left, held
    assert [len(epoch) for epoch in epochs] == [22, 22]
    if LOADERS[spec.name].gives:
        assert [sorted(epoch) for epoch in epochs] == [sorted(keys)] * 2
    assert 0 < min(sizes) <= max(sizes) == options.batch_size
    assert sorted(after_left) == sorted(epochs[0])


MAIN = """
import multiprocessing, os, signal, sys
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
        signal.pause()

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
        # DALI's worker and the tracker of its shared memory
        pytest.param("dali-external", "main", 2, marks=pytest.mark.nightly),
        ("dali-external", "rank", 1),  # only the worker: a fork imports nothing during the timing
    ],
)
def test_workers_end_with_a_killed_main_process(name: str, place: str, num_processes: int, pets: ShardSet) -> None:
    """SIGKILL runs no cleaning up, and the parent of the workers is the fork server."""
    with start_python(MAIN, name, pets.store.url, place) as main:
        assert main.stdout is not None
        try:
            killed, *below = [psutil.Process(int(pid)) for pid in main.stdout.readline().split()]
            assert place == "main" or [_command(one) for one in below] == [_command(killed)]
            killed.send_signal(signal.SIGKILL)
        finally:
            main.kill()
        assert len(below) >= num_processes
        wait_until(lambda: not any(map(_is_running, below)), "a worker is left")


def test_webloader_more_workers_than_shards(pets: ShardSet, options: LoaderOptions, keys: set[str]) -> None:
    """A worker without a shard would have nothing to do: none is started, and no sample comes twice."""
    one = ShardSet(store=pets.store, names=pets.names[:1])
    with open_loader("webloader", one, options=options) as loader:
        assert loader.num_workers == 1
        seen = [key for batch in loader.epoch() for key in batch["key"]]
    assert len(seen) == len(set(seen)) == 8
    assert set(seen) < keys


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
