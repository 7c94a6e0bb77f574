"""Nodes and clients for the tests of the embedded node."""

import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aistore import Client
from aistore.sdk.bucket import Bucket
from aistore.sdk.retry_config import RetryConfig
from tenacity import Retrying, stop_after_attempt
from urllib3.util.retry import Retry

from dali_pipes.processes.programs import ServerProcess
from dali_pipes.store.cluster.embedded_node import start
from prep.embedded.server import NodeServer
from prep.embedded.storage import Storage

PLACES = ["embedded", *([pytest.param("cluster", marks=pytest.mark.aistore)] if "AIS_ENDPOINT" in os.environ else [])]


def sdk(endpoint: str) -> Client:
    """The SDK without its minute of retries, so that a failure shows at once."""
    once = RetryConfig(http_retry=Retry(total=0), network_retry=Retrying(stop=stop_after_attempt(1), reraise=True))
    return Client(endpoint, retry_config=once, timeout=60)


def put(bucket: Bucket, name: str, data: bytes) -> None:
    bucket.object(name).get_writer().put_content(data)


def get(bucket: Bucket, name: str) -> bytes:
    return bytes(bucket.object(name).get_reader().read_all())


@contextmanager
def node_server(folder: Path, **options: Any) -> Iterator[NodeServer]:
    """A node in a thread of this process."""
    with Storage(folder) as storage, NodeServer(storage, port=0, **options) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="session")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with start(tmp_path_factory.mktemp("ais")) as running:
        yield running


@pytest.fixture(params=PLACES)
def client(request: pytest.FixtureRequest) -> Client:
    """The SDK on the embedded node, and on the cluster that AIS_ENDPOINT names."""
    if request.param == "embedded":
        return sdk(request.getfixturevalue("shared_node").endpoint)
    return sdk(os.environ["AIS_ENDPOINT"])


@pytest.fixture
def sdk_bucket(client: Client) -> Iterator[Bucket]:
    """A new bucket, destroyed afterwards."""
    made = client.bucket(f"contract-{uuid.uuid4().hex[:12]}").create()
    yield made
    made.delete(missing_ok=True)
