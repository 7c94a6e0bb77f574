"""Shards of text, a node that may run transforms, and a server that gives one answer."""

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from dali_pipes.store.cluster import embedded_node
from dali_pipes.store.cluster.ais import AisStore
from tests.servers.scripted import ScriptedServer, says, scripted
from tests.shards import copy_files, tar_bytes, write_classes

FUNCTIONS = "tests.prep.etl.functions"


def make_shard(samples: Mapping[str, Mapping[str, bytes]]) -> bytes:
    members = {f"{key}.{name}": data for key, components in samples.items() for name, data in components.items()}
    return tar_bytes(members, mtime=1234, uname="somebody")


def words(first: int = 0, count: int = 3) -> bytes:
    return make_shard({f"d/{n:03d}": {"txt": b"word %d" % n, "cls": b"%d" % n} for n in range(first, first + count)})


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two shards of text and a class table."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "samples-000000.tar").write_bytes(words())
    (folder / "samples-000001.tar").write_bytes(words(3, 2))
    write_classes(folder, {"0": "zero"}, prefix="samples-")
    return folder


@pytest.fixture(scope="session")
def etl_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An embedded node that may run transforms."""
    with embedded_node.start(tmp_path_factory.mktemp("etl"), allow_etl=True) as running:
        yield running.endpoint


@pytest.fixture
def source(etl_node: str, shards: Path, request: pytest.FixtureRequest) -> AisStore:
    """The shards in a bucket of that node, beside an object that is not a shard."""
    store = AisStore(etl_node, f"b{abs(hash(request.node.nodeid)):x}")
    store.create()
    copy_files(shards, store)
    store.write(".dali-pipes/samples-manifest.safetensors", b"no tar")
    return store


def stub(status: int, message: dict[str, object]) -> AbstractContextManager[ScriptedServer]:
    """A server that gives every request this answer."""
    body = json.dumps(message).encode()
    head = f"HTTP/1.1 {status} .\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    return scripted(says(head.encode() + body))
