import uuid
from collections.abc import Iterator

import pytest

from dali_pipes.processes.programs import ServerProcess
from dali_pipes.store.cluster import embedded_node
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.http import objects
from tests.dali_pipes.fetch.served import DATA


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with embedded_node.start(tmp_path_factory.mktemp("node")) as running:
        yield running


@pytest.fixture
def store(node: ServerProcess) -> AisStore:
    """A bucket of this test's own with ``a/x.tar``, 2.5 MB."""
    made = AisStore(node.endpoint, f"transport-{uuid.uuid4().hex[:8]}")
    made.create()
    made.write("a/x.tar", DATA)
    return made


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "RANGE_BYTES", 500_000)
