"""Test the embedded node's dSort where it is stricter than a cluster, or where a cluster cannot be tested."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prep.embedded.dsort import SortJob, parse_job_spec
from prep.embedded.server import NodeServer
from prep.embedded.storage import RefusalError, Storage
from tests.prep.embedded.conftest import node_server
from tests.programs import wait_until
from tests.shards import tar_bytes

SPEC: dict[str, Any] = {
    "input_bck": {"name": "b", "provider": "ais"},
    "input_format": {"template": "in-{0..1}"},
    "input_extension": ".tar",
    "output_format": "out-{00..99}",
    "output_shard_size": "200B",
    "algorithm": {"kind": "shuffle", "seed": "1"},
}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeServer]:
    """A node in this process, with a bucket ``b`` of two shards of ten samples each."""
    with node_server(tmp_path) as server:
        server.storage.create_bucket("b")
        for shard in range(2):
            members = {f"{shard}{index}.jpg": bytes([index]) * 50 for index in range(10)}
            server.storage.write("b", f"in-{shard}.tar", [tar_bytes(members)])
        yield server


def run(node: NodeServer, **changes: object) -> dict[str, Any]:
    """Run a job and return its last status."""
    job = SortJob(parse_job_spec(SPEC | changes), node.storage, "target", endpoint=node.endpoint)
    job.start()
    wait_until(lambda: job.is_done)
    return job.status()


def read_all(storage: Storage, prefix: str) -> dict[str, bytes]:
    return {name: storage.read("b", name) for name in storage.list_names("b", prefix=prefix)}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"output_format": "in-{0..9}"}, "output shard 'in-0.tar' is an input too"),
        ({"ekm_file": "{endpoint}/v1/objects/b/map.json"}, "'../c-0'"),  # a name that leads to another bucket
        ({"ekm_file": "http://127.0.0.1:9/v1/objects/b/map.json"}, "reads an ekm file from its own buckets only"),
        ({"ekm_file": "{endpoint}/v1/objects/b/none.json"}, "unexpected status code (404) when requesting ekm file"),
        ({"input_format": {"objnames": ["in-0.tar", "twice.tar"]}}, "1 keys come more than once"),  # AIS would mix them
    ],
)
def test_job_that_fails_says_why_and_writes_nothing(node: NodeServer, changes: dict[str, Any], error: str) -> None:
    node.storage.write("b", "map.json", [b'{"../c-{0..9}": ["00"]}'])
    node.storage.write("b", "twice.tar", [tar_bytes({"00.jpg": b"x"})])
    before = read_all(node.storage, "")
    if "ekm_file" in changes:
        changes = {"ekm_file": changes["ekm_file"].format(endpoint=node.endpoint)}
    [said] = run(node, **changes)["Metrics"]["errors"]
    assert error in said
    assert read_all(node.storage, "") == before


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"output_shard_size": "-1"}, 400),
        ({"input_bck": {"name": "../b"}}, 400),
        ({"input_bck": {"name": "b", "provider": "aws"}}, 501),
        ({"algorithm": {"kind": "md5"}}, 501),
        ({"dry_run": True}, 501),
    ],
)
def test_spec_that_cannot_run_is_refused(changes: dict[str, object], status: int) -> None:
    """The request is refused before a job begins."""
    with pytest.raises(RefusalError) as refused:
        parse_job_spec(SPEC | changes)
    assert refused.value.status == status
