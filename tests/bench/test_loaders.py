"""The contract of every loader that can be timed."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from bench.compare import Reference, compare_epoch, tolerance_of
from bench.loaders import LOADERS, LoaderOptions, LoaderSpec, open_loader
from bench.loaders.workers import fitting_batch_size
from prep.errors import PipesError
from prep.urls import ShardSet

ALL = [*LOADERS, "webloader:turbo"]


@pytest.fixture(params=ALL)
def spec(request: pytest.FixtureRequest) -> LoaderSpec:
    return LoaderSpec.parse(request.param)


def test_loader_two_epochs_give_each_key_once(
    spec: LoaderSpec, shards: ShardSet, options: LoaderOptions, keys: set[str]
) -> None:
    """Every epoch holds every key exactly once, in batches of at most batch_size, of the promised types."""
    with open_loader(spec.name, shards, options=spec.apply(options)) as loader:
        for _ in range(2):
            seen = []
            for batch in loader.epoch():
                size = len(batch["key"])
                assert 0 < size <= options.batch_size
                assert (batch["image"].dtype, list(batch["image"].shape)) == (torch.float32, [size, 3, 64, 64])
                assert (batch["trimap"].dtype, list(batch["trimap"].shape)) == (torch.uint8, [size, 1, 64, 64])
                assert (batch["label"].dtype, list(batch["label"].shape)) == (torch.int64, [size])
                seen += batch["key"]
            assert sorted(seen) == sorted(keys)


def test_loader_left_early_starts_again(
    spec: LoaderSpec, shards: ShardSet, options: LoaderOptions, keys: set[str]
) -> None:
    """An epoch that was left after one batch, its iterator still held, is no part of the next."""
    with open_loader(spec.name, shards, options=spec.apply(options)) as loader:
        left = loader.epoch()
        next(left)
        seen = [key for batch in loader.epoch() for key in batch["key"]]
        assert sorted(seen) == sorted(keys)


def test_loader_outputs_equal_the_reference(spec: LoaderSpec, shards: ShardSet, options: LoaderOptions) -> None:
    """Labels and masks equal, photos within the tolerance, for sizes on both sides of the crop."""
    with (
        Reference.open(shards, options=options) as reference,
        open_loader(spec.name, shards, options=spec.apply(options)) as loader,
    ):
        tolerance = tolerance_of(decode=loader.decode, device=loader.device)
        found = compare_epoch(loader.epoch(), reference, loader=spec.name, tolerance=tolerance)
    assert found.num_samples == 22


def test_loader_closed_in_mid_epoch_leaves_no_worker(
    spec: LoaderSpec, shards: ShardSet, options: LoaderOptions
) -> None:
    """What a loader started has ended when its context has, even if somebody still holds an unfinished epoch."""
    with open_loader(spec.name, shards, options=spec.apply(options)) as loader:
        held = loader.epoch()
        next(held)
        # The tutorial's shuffle buffer has drawn this small epoch to its end, and with it its workers'.
        if spec.name == "webloader":
            assert len(_workers()) == loader.num_workers == 2
    assert _workers() == []
    del held


MAIN = """
import sys, time
import psutil
from bench.loaders import LoaderOptions, open_loader
from prep.urls import resolve_shards

options = LoaderOptions(batch_size=2, num_threads=2, crop=8, device="cpu")
with open_loader(sys.argv[1], resolve_shards(sys.argv[2], endpoint=None), options=options) as loader:
    epoch = loader.epoch()
    next(epoch)
    print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("polls", [False, True])
def test_webloader_workers_end_with_a_killed_main_process(shards: ShardSet, tmp_path: Path, polls: bool) -> None:
    """Issue 3: SIGKILL runs no cleaning up, and the workers' parent is the fork server, which waited for them."""
    # Without pidfd, as on an old kernel or in a sandbox: taken out in the main process and, by preload, in the server.
    (tmp_path / "sitecustomize.py").write_text("import os\ndel os.pidfd_open\n" if polls else "")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"}
    arguments = [sys.executable, "-c", MAIN, "webloader", shards.store.url]
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True) as main:
        assert main.stdout is not None
        try:
            below = [psutil.Process(int(pid)) for pid in main.stdout.readline().split()]
        finally:
            main.kill()
        assert len(below) >= 3, "the server and two workers"
        _, alive = psutil.wait_procs(below, timeout=10)
        alive = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
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


def test_webloader_epochs_have_orders_of_their_own(shards: ShardSet, options: LoaderOptions) -> None:
    """Shards are shuffled anew each epoch, and the same in each run."""

    def orders() -> list[list[str]]:
        one_worker = LoaderOptions(batch_size=4, num_threads=1, crop=8, device="cpu")
        with open_loader("webloader", shards, options=one_worker) as loader:
            return [[key for batch in loader.epoch() for key in batch["key"]] for _ in range(6)]

    first = orders()
    assert len({tuple(order) for order in first}) > 1
    assert orders() == first


@pytest.mark.parametrize("name", LOADERS)
def test_loader_reads_a_bucket(name: str, bucket: ShardSet, options: LoaderOptions, keys: set[str]) -> None:
    """The same contract over HTTP: a reference copied out of the bucket, each key once, outputs equal."""
    with Reference.open(bucket, options=options) as reference, open_loader(name, bucket, options=options) as loader:
        assert reference.keys == keys
        tolerance = tolerance_of(decode=loader.decode, device=loader.device)
        for _ in range(2):
            compare_epoch(loader.epoch(), reference, loader=name, tolerance=tolerance)


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
        ("webdataset", "loader must be one of dali, memory, webloader, webloader-tutorial, got 'webdataset'"),
        ("webloader:opencv", "decode must be one of pil, turbo, got 'opencv' in 'webloader:opencv'"),
        ("dali:turbo", "only webloader has a choice of decoders, got 'dali:turbo'"),
    ],
)
def test_loader_spec_unknown_name_is_refused(text: str, message: str) -> None:
    """A name that is not there is answered with those that are."""
    with pytest.raises(ValueError, match=message):
        LoaderSpec.parse(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"num_threads": -1}, "num_threads must be at least 1, got -1"),
        ({"decode": "gd"}, "decode must be one of pil, turbo, got 'gd'"),
        ({"device": "tpu"}, "device must be one of auto, cpu, gpu, got 'tpu'"),
    ],
)
def test_loader_options_out_of_range_are_refused(change: dict[str, object], message: str) -> None:
    """Options are checked before anything is opened."""
    with pytest.raises(ValueError, match=message):
        LoaderOptions(**change)  # type: ignore[arg-type]


def _workers() -> list[psutil.Process]:
    """Worker processes: what the fork server started, and has not ended."""
    below = itertools.chain.from_iterable(child.children() for child in psutil.Process().children())
    return [process for process in below if process.status() != psutil.STATUS_ZOMBIE]
