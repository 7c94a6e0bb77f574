"""Fixtures of all tests: the fork server, a brief patience, the embedded node, small shards."""

import gc
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from dali_pipes.store.cluster import embedded_node
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.patience import Patience, use_patience
from tests.fork_server import ForkedPopen, fork_server
from tests.programs import free_port
from tests.servers.clouds import azure_server, s3_server
from tests.shards import Sample, make_samples, write_shards

__all__ = ["azure_server", "s3_server"]  # fixtures of all tests

# A shell that starts a program in the background has it ignore Ctrl-C, and its children, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Losses of two runs are compared: the order in which MKL adds is not to depend on where an array lies in memory. It
# reads this when it is loaded, also in the processes that tests start.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

# A change passes or fails by what it is, not by what was drawn that day: `--hypothesis-profile=search` draws anew.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile("fixed")

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


BRIEF = Patience(patience_s=3.0, longest_pause_s=0.05)
"""A test whose cluster never comes back is over soon. Loaders and commands have a patience of their own."""


@pytest.fixture(autouse=True, scope="session")
def _fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Programs that tests start are forked from a process that has torch and DALI."""
    with fork_server(tmp_path_factory.mktemp("fork")):
        yield


@pytest.fixture(autouse=True)
def _fresh_interpreter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of a fresh interpreter has one."""
    if "fresh_interpreter" in request.keywords:
        monkeypatch.setattr(ForkedPopen, "server", None)


@pytest.fixture(autouse=True, scope="session")
def _brief_patience() -> Iterator[None]:
    """For the fixtures of modules and sessions."""
    with use_patience(BRIEF):
        yield


@pytest.fixture(autouse=True)
def _brief_patience_again() -> Iterator[None]:
    """A command called without `main` keeps its patience in this process: set ours again before each test."""
    with use_patience(BRIEF):
        yield


@pytest.fixture
def without_collector() -> Iterator[None]:
    """No garbage collection in the test: it would close loaders that earlier tests dropped, in mid-trace."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def small_samples() -> list[Sample]:
    """23 small samples of odd and even sizes."""
    return make_samples([(40 + 7 * (i % 5), 33 + 5 * (i % 7)) for i in range(23)])


@pytest.fixture(scope="session")
def small_shards(tmp_path_factory: pytest.TempPathFactory, small_samples: list[Sample]) -> Path:
    """The small samples in four indexed shards of 6, 6, 6, 5."""
    return write_shards(tmp_path_factory.mktemp("small"), small_samples, per_shard=6)


@pytest.fixture
def four_shards(tmp_path: Path) -> Path:
    """Four indexed shards of three samples, for a test to change."""
    return write_shards(tmp_path / "data", make_samples([(30, 30)] * 12), per_shard=3)


@pytest.fixture(autouse=True)
def _no_cluster_by_accident(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tests marked ``aistore`` see a cluster that the environment names."""
    if "aistore" not in request.keywords:
        monkeypatch.delenv("AIS_ENDPOINT", raising=False)


def pytest_configure(config: pytest.Config) -> None:
    """Tests say what the CPU gives, on a machine with a GPU, too, but for those of ``-m gpu``; processes inherit it."""
    if not wants_gpu(config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def wants_gpu(config: pytest.Config) -> bool:
    """Whether tests were asked for that need one."""
    is_marked = re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr")) is not None
    return is_marked or os.environ.get("REQUIRE_GPU") == "1"


def pytest_collection_finish() -> None:
    """Libraries and tests are there for good: a test that collects garbage, maybe twenty times, looks for its own."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def gpu() -> None:
    """Skips without a CUDA device, but fails under REQUIRE_GPU=1."""
    import torch

    if not torch.cuda.is_available():
        if os.environ.get("REQUIRE_GPU") == "1":
            pytest.fail("REQUIRE_GPU=1 and torch finds no CUDA device")
        pytest.skip("no CUDA device")


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of an embedded node that all tests share; each uses a bucket of its own."""
    with embedded_node.start(tmp_path_factory.mktemp("node")) as running:
        yield running.endpoint


@pytest.fixture
def bucket(node: str, request: pytest.FixtureRequest) -> AisStore:
    """A bucket that is not made yet."""
    return AisStore(node, f"b{abs(hash(request.node.nodeid)):x}")


@pytest.fixture
def closed_port() -> int:
    """A port at which nothing answers."""
    return free_port()
