"""The embedded node runs transforms only if allowed, runs no other command, and leaves no process behind."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from aistore.sdk.errors import AISError

from dali_pipes.processes.programs import ServerProcess
from dali_pipes.store.cluster.embedded_node import ALLOW_ETL, start
from tests.prep.embedded.conftest import sdk
from tests.programs import wait_until
from tests.shards import Sample, write_tar

COMMAND = ["python", "-m", "prep.etl", "pets"]


@pytest.fixture
def allowing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    monkeypatch.setenv(ALLOW_ETL, "1")
    with start(tmp_path / "ais") as running:
        yield running


def workers_of(node: int) -> list[int]:
    """Find the processes that run a transform for a node, by the process id in their command."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"prep.workers" in words and b"%d" % node in words:
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("value", [None, "", "0"])
def test_etl_is_off_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv(ALLOW_ETL, raising=False)
    if value is not None:
        monkeypatch.setenv(ALLOW_ETL, value)
    with start(tmp_path) as node:
        client = sdk(node.endpoint)
        with pytest.raises(AISError, match=f"runs code and is off .{ALLOW_ETL}=1 allows it") as caught:
            client.etl("pets-etl").init(image="x", command=COMMAND)
        assert caught.value.status_code == 501
        assert workers_of(node._process.pid) == []


@pytest.mark.parametrize("command", [["sh", "-c", "true"], ["python", "-m", "prep.etl"], [*COMMAND, "--host=0.0.0.0"]])
def test_only_transforms_are_run(allowing: ServerProcess, command: list[str]) -> None:
    with pytest.raises(AISError, match="the embedded node does not do that") as caught:
        sdk(allowing.endpoint).etl("some-etl").init(image="x", command=command)
    assert caught.value.status_code == 501
    assert workers_of(allowing._process.pid) == []


@pytest.mark.parametrize("sig", [None, signal.SIGKILL], ids=["closed", "killed"])
def test_processes_end_with_the_node(allowing: ServerProcess, sig: int | None) -> None:
    client = sdk(allowing.endpoint)
    client.etl("pets-etl").init(image="x", command=COMMAND)
    assert [info.id for info in client.cluster().list_etls()] == ["pets-etl"]
    node = allowing._process.pid
    assert len(workers_of(node)) == 1
    if sig is None:
        allowing.close()
    else:
        os.kill(node, sig)
    wait_until(lambda: workers_of(node) == [])


def test_running_etl_is_not_deleted_and_a_stopped_one_is(allowing: ServerProcess) -> None:
    etl = sdk(allowing.endpoint).etl("pets-etl")
    etl.init(image="x", command=COMMAND)
    assert etl.view().init_msg.name == "pets-etl"
    with pytest.raises(AISError, match="is running: stop it first"):
        etl.delete()
    etl.stop()
    etl.delete()
    with pytest.raises(AISError, match="does not exist"):
        etl.view()
    assert workers_of(allowing._process.pid) == []


def test_jobs_of_other_kinds_are_refused_by_name(allowing: ServerProcess) -> None:
    """A node with ETL has jobs; a list of all jobs would be one of ETL's alone."""
    with pytest.raises(AISError, match="GET /v1/cluster, what=qryxstats: the embedded node does not do that") as caught:
        sdk(allowing.endpoint).job(job_kind="get-batch").get_details()
    assert caught.value.status_code == 501


def test_only_reads_go_through_an_etl(allowing: ServerProcess) -> None:
    """A copy or a HEAD with an ETL is refused, not done without the ETL; a plain read returns the stored bytes."""
    client = sdk(allowing.endpoint)
    bucket = client.bucket("b").create()
    bucket.object("a.tar").get_writer().put_content(b"as it is")
    for method in ("HEAD", "PUT", "DELETE"):
        with pytest.raises(AISError) as caught:
            client.cluster().client.request(
                method, path="objects/b/a.tar", params={"provider": "ais", "etl_name": "some-etl"}
            )
        assert caught.value.status_code == 501
    assert bucket.object("a.tar").get_reader().read_all() == b"as it is"


def test_what_comes_through_an_etl_is_whole_and_of_unknown_length(allowing: ServerProcess) -> None:
    """As from AIS, the answer comes in chunks for any range, without a checksum; a stopped ETL answers 404."""
    client = sdk(allowing.endpoint)
    bucket = client.bucket("b").create()
    bucket.object("a.tar").get_writer().put_content(bytes(10240))
    etl = client.etl("same-etl")
    etl.init(image="x", command=[*COMMAND[:-1], f"{__name__}:same"])
    ask = {"params": {"provider": "ais", "etl_name": "same-etl"}, "path": "objects/b/a.tar"}
    answer = client.cluster().client.request("GET", headers={"Range": "bytes=0-99"}, **ask)
    assert (answer.status_code, answer.content) == (200, bytes(10240))
    assert answer.headers["Transfer-Encoding"] == "chunked"
    assert not {"Content-Length", "Content-Range", "Ais-Checksum-Value"} & set(answer.headers)
    etl.stop()
    with pytest.raises(AISError, match="same-etl does not exist - try starting new ETL") as caught:
        client.cluster().client.request("GET", **ask)
    assert caught.value.status_code == 404


def same(sample: dict[str, bytes]) -> dict[str, bytes]:
    return sample


def test_node_of_one_function_runs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment says: 403 names the function, and no process starts."""
    monkeypatch.setenv(ALLOW_ETL, "1")
    with start(tmp_path / "ais", etl_function=f"{__name__}:same") as node:
        client = sdk(node.endpoint)
        for other in ("pets", "os:system", f"{__name__}:workers_of"):
            with pytest.raises(AISError, match=f"runs the transform '{__name__}:same' only") as caught:
                client.etl("some-etl").init(image="x", command=[*COMMAND[:-1], other])
            assert caught.value.status_code == 403
        assert workers_of(node.pid) == []
        client.etl("some-etl").init(image="x", command=[*COMMAND[:-1], f"{__name__}:same"])
        assert len(workers_of(node.pid)) == 1


def environment(sample: dict[str, bytes]) -> dict[str, bytes]:
    """The names of all variables, and what it prints is in nobody's way."""
    print("a line " * 20_000)
    return {"txt": "\n".join(os.environ).encode()}


def test_transforms_process_has_no_credentials_and_no_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot send a token anywhere, and no other process can reach it: it has no port."""
    with monkeypatch.context() as patch:
        for name in ("AUTHN_TOKEN", "AUTHN_TOKEN_FILE", "CRT", "CRT_KEY", "CLIENT_CA", "ENDPOINT"):
            patch.setenv(f"AIS_{name}", "secret")
        node = start(tmp_path / "ais", allow_etl=True)
    with node:
        client = sdk(node.endpoint)
        bucket = client.bucket("b").create()
        write_tar(tmp_path / "a.tar", [Sample("s", {"txt": b""})])
        bucket.object("a.tar").get_writer().put_content((tmp_path / "a.tar").read_bytes())
        client.etl("some-etl").init(image="x", command=[*COMMAND[:-1], f"{__name__}:environment"])
        ask = {"params": {"provider": "ais", "etl_name": "some-etl"}, "path": "objects/b/a.tar"}
        made = client.cluster().client.request("GET", **ask).content
        assert b"\nPATH" in made
        assert b"AIS_" not in made
        (worker,) = workers_of(node.pid)
        inodes = {str(file.readlink()).strip("socket:[]") for file in Path("/proc", str(worker), "fd").iterdir()}
        for table in ("tcp", "tcp6"):
            rows = [row.split() for row in Path("/proc/net", table).read_text().splitlines()[1:]]
            assert not [row for row in rows if row[9] in inodes]
