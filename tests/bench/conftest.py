import contextlib
import pickle
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bench.cli import bench as bench_command
from bench.loaders.protocol import BenchBatch, BenchLoader, LoaderOptions
from bench.loaders.registry import LOADERS, LoaderSpec, available_loaders
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from tests.shards import Sample, mask_bytes, photo_bytes, write_tar

CROP = 64
# Below, at and above the crop, odd and even, so that padding, cutting and rounding all happen.
SIDES = (33, 50, 63, 64, 65, 67, 90, 131)
NUM_SAMPLES = 22
NUM_SHARDS = 3


def samples() -> list[Sample]:
    return [
        Sample(
            f"animals/pet_{row:03d}",
            {
                "image.jpg": photo_bytes(row, *size, mode="L" if row == 4 else "RGB"),
                "cls": str(row % 5 + 1).encode(),
                "trimap.png": mask_bytes(row, *size),
            },
        )
        for row, size in ((row, (SIDES[(row * 3 + 1) % 8], SIDES[row % 8])) for row in range(NUM_SAMPLES))
    ]


@pytest.fixture(scope="session", autouse=True)
def server_of_workers() -> None:
    """Start the server of workers and ranks as a run does: its processes have DALI, each turn imports nothing."""
    from bench.engine.turn_process import fork_server

    fork_server()


@pytest.fixture
def turns_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns run in this process. Their arguments and results are still pickled.

    Turns in processes of their own are tested with the engine, and with `bench run` and `bench feed`.
    """

    def call_here(function: Callable[..., Any], *arguments: Any, name: str, **limits: Any) -> Any:
        del name, limits
        function, arguments = pickle.loads(pickle.dumps((function, arguments)))
        return pickle.loads(pickle.dumps(function(*arguments)))

    for module in ("engine.scenario", "scenarios.feed"):
        monkeypatch.setattr(f"bench.{module}.call_apart", call_here)
    # On a busy machine, a node's first answer may take longer than the default limit.
    monkeypatch.setattr("dali_pipes.store.cluster.endpoint.PROMPT_S", 120.0)


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """A directory in /dev/shm, because ext4 counts its metadata blocks as blocks of a file."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def pets(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    """22 samples in three indexed shards."""
    directory = tmp_path_factory.mktemp("pets")
    for shard in range(NUM_SHARDS):
        write_tar(directory / f"pets-{shard:06d}.tar", samples()[shard::NUM_SHARDS])
    found = resolve_shards(directory, endpoint=None)
    index_shards(found)
    return found


@pytest.fixture(scope="session")
def bucket_shards(pets: ShardSet, node: str) -> ShardSet:
    """The same shards in a bucket of the node."""
    store = AisStore(node, "pets")
    store.create()
    for name in pets.names:
        store.upload(name, Path(pets.store.locate(name)))
    found = resolve_shards("ais://pets/pets-", endpoint=node)
    index_shards(found)
    return found


@pytest.fixture(scope="session")
def options() -> LoaderOptions:
    return LoaderOptions(batch_size=5, num_threads=2, crop=CROP, device="cpu")


@pytest.fixture(scope="session")
def keys() -> set[str]:
    return {sample.key for sample in samples()}


def invoke(*arguments: object) -> Result:
    """Run a command of ``bench`` that must end well; what it raises is raised."""
    done = CliRunner().invoke(bench_command, [str(word) for word in arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done


@contextlib.contextmanager
def with_wrong_label(opened: AbstractContextManager[BenchLoader], key: str) -> Iterator[Any]:
    """Open a loader that yields the label 99 for the sample ``key``."""
    with opened as loader:

        def epoch() -> Iterator[BenchBatch]:
            for batch in loader.epoch():
                batch["label"][[row for row, found in enumerate(batch["key"]) if found == key]] = 99
                yield batch

        yield SimpleNamespace(num_workers=0, decode="dali", device="cpu", epoch=epoch)


def loader_cases(*sources: str, always: Collection[str]) -> list[Any]:
    """Return a `LoaderSpec` parameter for each decoder of each loader of these sources.

    A loader is skipped if its packages are missing. Loaders that are not in ``always`` run nightly.
    """
    reasons = available_loaders()
    return [
        pytest.param(
            LoaderSpec(name=name, decode=decode),
            id=name if decode is None else f"{name}:{decode}",
            marks=[
                *([] if name in always else [pytest.mark.nightly]),
                *([] if reasons[name] is None else [pytest.mark.skip(reason=str(reasons[name]))]),
            ],
        )
        for name, entry in LOADERS.items()
        if set(sources) & set(entry.source)
        for decode in entry.decodes or (None,)
    ]
