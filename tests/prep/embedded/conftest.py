"""Nodes and clients for the tests of the embedded node."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from aistore import Client
from aistore.sdk.bucket import Bucket
from aistore.sdk.retry_config import RetryConfig
from tenacity import Retrying, stop_after_attempt
from urllib3.util.retry import Retry

from dali_pipes.processes.programs import ServerProcess
from dali_pipes.store.cluster.embedded_node import start


def sdk(endpoint: str) -> Client:
    """The SDK without its minute of retries, so that a failure shows at once."""
    once = RetryConfig(http_retry=Retry(total=0), network_retry=Retrying(stop=stop_after_attempt(1), reraise=True))
    return Client(endpoint, retry_config=once, timeout=30)


def put(bucket: Bucket, name: str, data: bytes) -> None:
    bucket.object(name).get_writer().put_content(data)


def get(bucket: Bucket, name: str) -> bytes:
    return bytes(bucket.object(name).get_reader().read_all())


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ServerProcess]:
    """A node for this test alone, over ``tmp_path / "ais"``."""
    with start(tmp_path / "ais") as running:
        yield running


@pytest.fixture(scope="session")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with start(tmp_path_factory.mktemp("ais")) as running:
        yield running


@pytest.fixture(params=["embedded", pytest.param("cluster", marks=pytest.mark.aistore)])
def client(request: pytest.FixtureRequest) -> Client:
    """The SDK on the embedded node, and on the cluster that AIS_ENDPOINT names."""
    if request.param == "embedded":
        return sdk(request.getfixturevalue("shared_node").endpoint)
    if not os.environ.get("AIS_ENDPOINT"):
        pytest.skip("AIS_ENDPOINT names no cluster")
    return sdk(os.environ["AIS_ENDPOINT"])


@pytest.fixture
def bucket(client: Client) -> Iterator[Bucket]:
    """A new bucket, destroyed afterwards."""
    made = client.bucket(f"contract-{uuid.uuid4().hex[:12]}").create()
    yield made
    made.delete(missing_ok=True)
