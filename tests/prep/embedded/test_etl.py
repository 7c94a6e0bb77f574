"""The embedded node runs transforms only if allowed, runs no other command, and leaves no process behind."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from aistore import Client
from aistore.sdk.errors import AISError

from dali_pipes.store.cluster.embedded_node import ALLOW_ETL, start
from tests.prep.embedded.conftest import node_server, put, sdk
from tests.prep.etl.conftest import FUNCTIONS
from tests.programs import wait_until
from tests.shards import tar_bytes

COMMAND = ["python", "-m", "prep.etl", "pets"]
SAME = [*COMMAND[:-1], f"{FUNCTIONS}:same"]


@pytest.fixture(scope="module")
def allowing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a node in this process that runs transforms, with the bucket ``b``."""
    with node_server(tmp_path_factory.mktemp("ais"), allow_etl=True) as node:
        client = sdk(node.endpoint)
        put(client.bucket("b").create(), "a.tar", bytes(10240))
        yield client


def workers_of(node: int) -> list[int]:
    """Find the processes that run a transform for a node, by the process id in their command."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"prep.workers" in words and b"%d" % node in words:
                found.append(int(path.parent.name))
    return found


def test_etl_is_off_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_ETL, "0")
    with start(tmp_path) as node:
        with pytest.raises(AISError, match=f"runs code and is off .{ALLOW_ETL}=1 allows it") as caught:
            sdk(node.endpoint).etl("pets-etl").init(image="x", command=COMMAND)
        assert caught.value.status_code == 501
        assert workers_of(node.pid) == []


@pytest.mark.parametrize("command", [["sh", "-c", "true"], ["python", "-m", "prep.etl"], [*COMMAND, "--host=0.0.0.0"]])
def test_only_transforms_are_run(allowing: Client, command: list[str]) -> None:
    with pytest.raises(AISError, match="the embedded node does not do that") as caught:
        allowing.etl("some-etl").init(image="x", command=command)
    assert caught.value.status_code == 501
    assert allowing.cluster().list_etls() == []


@pytest.mark.parametrize("sig", [None, signal.SIGKILL], ids=["closed", "killed"])
def test_processes_end_with_the_node(tmp_path: Path, sig: int | None) -> None:
    with start(tmp_path, allow_etl=True) as node:
        client = sdk(node.endpoint)
        client.etl("pets-etl").init(image="x", command=SAME)
        assert [info.id for info in client.cluster().list_etls()] == ["pets-etl"]
        assert len(workers_of(node.pid)) == 1
        if sig is None:
            node.close()
        else:
            os.kill(node.pid, sig)
        wait_until(lambda: workers_of(node.pid) == [])


def test_requests_that_no_etl_answers_are_refused(allowing: Client) -> None:
    """The node refuses a list of other jobs than ETLs, and a HEAD, PUT or DELETE that names an ETL."""
    with pytest.raises(AISError, match="GET /v1/cluster, what=qryxstats: the embedded node does not do that") as caught:
        allowing.job(job_kind="get-batch").get_details()
    assert caught.value.status_code == 501
    for method in ("HEAD", "PUT", "DELETE"):
        with pytest.raises(AISError) as caught:
            allowing.cluster().client.request(
                method, path="objects/b/a.tar", params={"provider": "ais", "etl_name": "some-etl"}
            )
        assert caught.value.status_code == 501
    assert allowing.bucket("b").object("a.tar").get_reader().read_all() == bytes(10240)


def test_what_comes_through_an_etl_is_whole_and_of_unknown_length(allowing: Client) -> None:
    """The answer to any range is the whole object in chunks, without a checksum, as AIS gives it.

    A running ETL is not deleted. A stopped one answers 404.
    """
    etl = allowing.etl("same-etl")
    etl.init(image="x", command=SAME)
    assert etl.view().init_msg.name == "same-etl"
    ask = {"params": {"provider": "ais", "etl_name": "same-etl"}, "path": "objects/b/a.tar"}
    answer = allowing.cluster().client.request("GET", headers={"Range": "bytes=0-99"}, **ask)
    assert (answer.status_code, answer.content) == (200, bytes(10240))
    assert answer.headers["Transfer-Encoding"] == "chunked"
    assert not {"Content-Length", "Content-Range", "Ais-Checksum-Value"} & set(answer.headers)
    with pytest.raises(AISError, match="is running: stop it first"):
        etl.delete()
    etl.stop()
    with pytest.raises(AISError, match="same-etl does not exist - try starting new ETL") as caught:
        allowing.cluster().client.request("GET", **ask)
    assert caught.value.status_code == 404
    etl.delete()
    with pytest.raises(AISError, match="does not exist"):
        etl.view()


def test_node_of_one_function_runs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment allows more, but 403 names the function, and no process starts."""
    monkeypatch.setenv(ALLOW_ETL, "1")
    with start(tmp_path / "ais", etl_function=f"{FUNCTIONS}:same") as node:
        client = sdk(node.endpoint)
        for other in ("pets", "os:system", f"{FUNCTIONS}:shout"):
            with pytest.raises(AISError, match=f"runs the transform '{FUNCTIONS}:same' only") as caught:
                client.etl("some-etl").init(image="x", command=[*COMMAND[:-1], other])
            assert caught.value.status_code == 403
        assert workers_of(node.pid) == []
        client.etl("some-etl").init(image="x", command=SAME)
        assert len(workers_of(node.pid)) == 1


def test_transforms_process_has_no_credentials_and_no_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot send a token anywhere, and no other process can reach it: it has no port."""
    with monkeypatch.context() as patch:
        for name in ("AUTHN_TOKEN", "AUTHN_TOKEN_FILE", "CRT", "CRT_KEY", "CLIENT_CA", "ENDPOINT"):
            patch.setenv(f"AIS_{name}", "secret")
        node = start(tmp_path / "ais", allow_etl=True)
    with node:
        client = sdk(node.endpoint)
        put(client.bucket("b").create(), "a.tar", tar_bytes({"s.txt": b""}))
        client.etl("some-etl").init(image="x", command=[*COMMAND[:-1], f"{FUNCTIONS}:environment"])
        ask = {"params": {"provider": "ais", "etl_name": "some-etl"}, "path": "objects/b/a.tar"}
        made = client.cluster().client.request("GET", **ask).content
        assert b"\nPATH" in made
        assert b"AIS_" not in made
        (worker,) = workers_of(node.pid)
        inodes = {str(file.readlink()).strip("socket:[]") for file in Path("/proc", str(worker), "fd").iterdir()}
        for table in ("tcp", "tcp6"):
            rows = [row.split() for row in Path("/proc/net", table).read_text().splitlines()[1:]]
            assert not [row for row in rows if row[9] in inodes]
