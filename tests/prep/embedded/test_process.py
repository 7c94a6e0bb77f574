"""Test the embedded node as a process: it starts, explains failures, ends with its owner, and keeps its objects."""

import http.client
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from aistore.sdk.errors import AISError, ErrObjNotFound

from dali_pipes.errors import StoreError
from dali_pipes.processes.programs import ServerProcess
from dali_pipes.store.cluster.embedded_node import ALLOW_ETL, start
from tests.prep.embedded.conftest import sdk

ROOT = Path(__file__).resolve().parents[3]


def answers(endpoint: str, path: str = "/v1/health") -> bool:
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def wait_for_the_end(endpoint: str) -> None:
    """Return when the node no longer answers."""
    start_s = time.monotonic()
    while answers(endpoint):
        assert time.monotonic() - start_s < 120, "the node outlived its owner"
        time.sleep(0.02)


def test_start_answers_and_close_can_be_called_twice(tmp_path: Path) -> None:
    """The node answers after ``start``, also over a folder that was used before, and not after ``close``."""
    for _ in range(3):
        node = start(tmp_path / "new" / "folder")
        assert answers(node.endpoint)
        node.close()
        node.close()
        assert not answers(node.endpoint)


@pytest.mark.fresh_interpreter
def test_server_imports_little() -> None:
    """It imports neither the SDK nor torch, which would cost seconds at every start."""
    code = "import sys, prep.embedded.__main__; print({'aistore', 'torch', 'pydantic', 'numpy'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "set()"


def test_start_where_nothing_can_be_written_is_an_error(tmp_path: Path) -> None:
    """The error names the folder."""
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot use the folder '.*file'"):
        start(tmp_path / "file")


def test_start_on_a_taken_port_says_so(tmp_path: Path) -> None:
    """The error contains the message of the node."""
    with start(tmp_path / "one") as node:
        port = int(node.endpoint.rpartition(":")[2])
        with pytest.raises(StoreError, match=rf"did not start: cannot serve .* on 127\.0\.0\.1:{port}: .*in use"):
            start(tmp_path / "two", port=port)


@pytest.mark.parametrize(
    ("environment", "allow_etl", "expected"),
    [
        (None, None, False),  # off unless asked for
        ("1", None, True),
        (None, True, True),
        ("1", False, False),  # who starts it has the last word
    ],
)
def test_start_allows_etl_where_its_caller_or_else_the_environment_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: str | None, allow_etl: bool | None, expected: bool
) -> None:
    """The node lists ETLs or refuses to; the caller's own environment does not change."""
    monkeypatch.delenv(ALLOW_ETL, raising=False)
    if environment is not None:
        monkeypatch.setenv(ALLOW_ETL, environment)
    with start(tmp_path, allow_etl=allow_etl) as node:
        assert answers(node.endpoint, "/v1/etl") is expected
    assert os.environ.get(ALLOW_ETL) == environment


@pytest.mark.parametrize("options", [[], ["--allow-etl"]])
def test_module_in_the_foreground_prints_its_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """``python -m prep.embedded`` serves until Ctrl-C, then ends with 0 and leaves no scratch files."""
    monkeypatch.delenv(ALLOW_ETL, raising=False)
    process = subprocess.Popen(
        [sys.executable, "-m", "prep.embedded", "--dir", str(tmp_path / "ais"), *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    endpoint = process.stdout.readline().strip()
    assert answers(endpoint)
    assert answers(endpoint, "/v1/etl") is bool(options)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 0
    process.stdout.close()
    assert list((tmp_path / "ais" / "scratch").iterdir()) == []


OWNER = """
import os, sys, time
from pathlib import Path
from dali_pipes.store.cluster.embedded_node import start
node = start(Path(sys.argv[1]))
if sys.argv[2] == "fork" and os.fork() == 0:  # the child holds the pipe's end, and does not own the node
    node.close()
    time.sleep(40)
    os._exit(0)
print(node.endpoint, flush=True)
if sys.argv[2] == "return":
    sys.exit()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("how", "end"),
    [
        ("sleep", signal.SIGKILL),  # the pipe ends at once
        ("sleep", signal.SIGTERM),
        ("return", None),  # without close()
        ("fork", signal.SIGKILL),  # the pipe stays open; the parent's number changes
    ],
)
def test_node_ends_with_its_owner(tmp_path: Path, how: str, end: signal.Signals | None) -> None:
    """The node ends, in whatever way the owner dies."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), how],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert owner.stdout is not None
    endpoint = owner.stdout.readline().strip()
    assert endpoint.startswith("http://127.0.0.1:")
    if end is not None:
        assert answers(endpoint)
        owner.send_signal(end)
    owner.wait(120)
    wait_for_the_end(endpoint)
    owner.stdout.close()


def test_two_nodes_over_one_folder_see_the_same(tmp_path: Path) -> None:
    """Two nodes over one folder share all objects while both run; both may write one object."""
    with start(tmp_path) as one, start(tmp_path) as two:
        first, second = sdk(one.endpoint).bucket("b").create(), sdk(two.endpoint).bucket("b")
        first.object("a").get_writer().put_content(b"one")
        assert bytes(second.object("a").get_reader().read_all()) == b"one"
        second.object("a").get_writer().put_content(b"two")
        assert bytes(first.object("a").get_reader().read_all()) == b"two"
        assert first.object("a").props.obj_version == "2"
        second.delete()
        assert sdk(one.endpoint).cluster().list_buckets() == []


def test_killed_in_mid_put_keeps_the_old_object(tmp_path: Path) -> None:
    """The next node finds the old object, and removes the half-written file."""
    node = start(tmp_path)
    bucket = sdk(node.endpoint).bucket("b").create()
    bucket.object("a").get_writer().put_content(b"old")
    with socket.create_connection(("127.0.0.1", int(node.endpoint.rpartition(":")[2]))) as client:
        client.sendall(
            b"PUT /v1/objects/b/a?pid=p HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\n"
            + bytes(5_000_000)
        )
        while not any(path.stat().st_size > 1 << 20 for path in tmp_path.glob("scratch/*/*")):
            time.sleep(0.01)
        node._process.kill()
        node.close()
    assert len(list(tmp_path.glob("scratch/*/*"))) == 2  # the lock and the half object
    with start(tmp_path) as after:
        assert len(list(tmp_path.glob("scratch/*/*"))) == 1
        found = sdk(after.endpoint).bucket("b").object("a")
        assert bytes(found.get_reader().read_all()) == b"old"
        assert found.props.obj_version == "1"


def test_folder_that_takes_no_more_is_507_and_nothing_changes(node: ServerProcess, tmp_path: Path) -> None:
    """If the kernel refuses to write (here a file over 1 MiB), the error names the object, and the old object stays."""
    bucket = sdk(node.endpoint).bucket("b").create()
    bucket.object("dir/a").get_writer().put_content(b"old")
    no_limit = resource.prlimit(node._process.pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    for num_bytes in (3 << 20, 1 << 20):  # in the body; in the last bytes, which hold the metadata
        for name in ("dir/a", "dir/new"):
            with pytest.raises(AISError, match=f"b/{name}.*File too large") as refused:
                bucket.object(name).get_writer().put_content(bytes(num_bytes))
            assert refused.value.status_code == 507
    assert bytes(bucket.object("dir/a").get_reader().read_all()) == b"old"
    with pytest.raises(ErrObjNotFound):
        bucket.object("dir/new").get_reader().read_all()
    assert [entry.name for entry in bucket.list_all_objects()] == ["dir/a"]
    assert [path.name for path in tmp_path.glob("ais/scratch/*/*")] == [".lock"]
    resource.prlimit(node._process.pid, resource.RLIMIT_FSIZE, no_limit)
    bucket.object("dir/new").get_writer().put_content(bytes(3 << 20))
    assert bucket.object("dir/new").props.size == 3 << 20


def test_slowed_node_waits_before_each_answer_and_gives_the_same_bytes(tmp_path: Path) -> None:
    """Two nodes over one folder, as `bench windows` has them; the proxy's answer and the target's each wait once."""
    latency_s = 0.1
    with start(tmp_path) as fast, start(tmp_path, latency_s=latency_s) as slow:
        sdk(fast.endpoint).bucket("b").create().object("a").get_writer().put_content(b"bytes")
        since_s = time.monotonic()
        assert bytes(sdk(slow.endpoint).bucket("b").object("a").get_reader().read_all()) == b"bytes"
        assert time.monotonic() - since_s >= 2 * latency_s
