"""Test the embedded node as a process: it starts, explains failures, ends with its owner, and keeps its objects."""

import contextlib
import http.client
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aistore.sdk.errors import AISError, ErrObjNotFound

from dali_pipes.errors import StoreError
from dali_pipes.processes.programs import ServerProcess
from dali_pipes.store.cluster.embedded_node import ALLOW_ETL, start
from prep.embedded.storage import Storage
from tests.prep.embedded.conftest import get, put, sdk
from tests.programs import wait_until

ROOT = Path(__file__).resolve().parents[3]


def answers(endpoint: str, path: str = "/v1/health") -> bool:
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=60)
    with contextlib.closing(connection), contextlib.suppress(OSError):
        connection.request("GET", path)
        return connection.getresponse().status == 200
    return False


def test_start_answers_and_close_can_be_called_twice(tmp_path: Path) -> None:
    """The node answers after ``start``, also over a folder that was used before, and not after ``close``."""
    for _ in range(2):
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


def test_start_that_fails_says_why(tmp_path: Path) -> None:
    """The error names the folder that cannot be used, or holds the message of the node."""
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot use the folder '.*file'"):
        start(tmp_path / "file")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StoreError, match=rf"did not start: cannot serve .* on 127\.0\.0\.1:{port}: .*in use"):
            start(tmp_path / "two", port=port)


def test_module_in_the_foreground_prints_its_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m prep.embedded`` serves until Ctrl-C, then ends with 0 and leaves no scratch files."""
    monkeypatch.delenv(ALLOW_ETL, raising=False)
    command = [sys.executable, "-m", "prep.embedded", "--dir", str(tmp_path / "ais"), "--allow-etl"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        assert answers(endpoint, "/v1/etl")
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
    assert list((tmp_path / "ais" / "scratch").iterdir()) == []


OWNER = """
import os, sys, time
from pathlib import Path
from dali_pipes.store.cluster.embedded_node import start
node = start(Path(sys.argv[1]))
if sys.argv[2] == "fork" and os.fork() == 0:  # the child holds the pipe's end, and does not own the node
    node.close()
    sys.stdin.read()
    os._exit(0)
print(node.endpoint, flush=True)
if sys.argv[2] != "return":
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("how", "end"),
    [
        ("stay", signal.SIGKILL),  # the pipe ends at once
        ("stay", signal.SIGTERM),
        ("return", None),  # without close()
        ("fork", signal.SIGKILL),  # the pipe stays open; the parent's number changes
    ],
)
def test_node_ends_with_its_owner(tmp_path: Path, how: str, end: signal.Signals | None) -> None:
    """The node ends, in whatever way the owner dies."""
    command = [sys.executable, "-c", OWNER, str(tmp_path), how]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        endpoint = owner.stdout.readline().strip()
        assert endpoint.startswith("http://127.0.0.1:")
        if end is not None:
            assert answers(endpoint)
            owner.send_signal(end)
        owner.wait(120)
        wait_until(lambda: not answers(endpoint), "the node outlived its owner")


def test_killed_in_mid_put_keeps_the_old_object(tmp_path: Path) -> None:
    """The next node finds the old object, and removes the half-written file."""
    node = start(tmp_path)
    put(sdk(node.endpoint).bucket("b").create(), "a", b"old")
    head = b"PUT /v1/objects/b/a?pid=p HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(node.endpoint.rpartition(":")[2]))) as client:
        client.sendall(head + bytes(5_000_000))
        wait_until(lambda: any(path.stat().st_size > 1 << 20 for path in tmp_path.glob("scratch/*/*")))
        os.kill(node.pid, signal.SIGKILL)
        node.close()
    assert len(list(tmp_path.glob("scratch/*/*"))) == 2  # the lock and the half object
    with Storage(tmp_path) as after:
        assert len(list(tmp_path.glob("scratch/*/*"))) == 1
        assert after.read("b", "a") == b"old"
        assert after.head("b", "a").version == 1


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ServerProcess]:
    with start(tmp_path / "ais") as running:
        yield running


def test_folder_that_takes_no_more_is_507_and_nothing_changes(node: ServerProcess, tmp_path: Path) -> None:
    """If the kernel refuses to write (here a file over 1 MiB), the error names the object, and the old object stays."""
    bucket = sdk(node.endpoint).bucket("b").create()
    put(bucket, "dir/a", b"old")
    no_limit = resource.prlimit(node.pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    for num_bytes in (3 << 20, 1 << 20):  # in the body; in the last bytes, which hold the metadata
        for name in ("dir/a", "dir/new"):
            with pytest.raises(AISError, match=f"b/{name}.*File too large") as refused:
                put(bucket, name, bytes(num_bytes))
            assert refused.value.status_code == 507
    assert get(bucket, "dir/a") == b"old"
    with pytest.raises(ErrObjNotFound):
        get(bucket, "dir/new")
    assert [entry.name for entry in bucket.list_all_objects()] == ["dir/a"]
    assert [path.name for path in tmp_path.glob("ais/scratch/*/*")] == [".lock"]
    resource.prlimit(node.pid, resource.RLIMIT_FSIZE, no_limit)
    put(bucket, "dir/new", bytes(3 << 20))
    assert bucket.object("dir/new").props.size == 3 << 20
