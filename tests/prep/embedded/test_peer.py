"""A node answers processes of its own user only; so its connections are looked up by their two ends."""

import fcntl
import http.client
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dali_pipes.errors import StoreError
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.embedded_node import claim_folder, start
from dali_pipes.store.cluster.endpoint import check_endpoint
from dali_pipes.store.patience import Patience, use_patience
from prep.embedded import connection
from prep.embedded.connection import Address, find_uid
from prep.embedded.storage import Storage
from tests.prep.embedded.conftest import node_server, sdk
from tests.prep.embedded.other_user import NOBODY, as_nobody, needs_root

ROOT = Path(__file__).resolve().parents[3]

# Rows of a real machine: a listening socket, a connection's two ends, a socket that its process closed, one that waits.
ROWS = """\
   0: 0100007F:CF6E 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000 0 44674 2 0 100 0 0 10 0
   1: 0100007F:9C40 0100007F:CF6E 01 00000000:00000000 00:00000000 00000000  1001 0 51234 1 0 20 4 30 10 -1
   2: 0100007F:CF6E 0100007F:9C40 01 00000000:00000000 00:00000000 00000000  1000 0 51235 1 0 20 4 30 10 -1
   3: 0100007F:9C41 0100007F:CF6E 04 00000000:00000000 01:00000015 00000000     0 0 0 1 0 20 4 30 10 -1
   4: 0100007F:9C42 0100007F:CF6E 06 00000000:00000000 03:00000ABC 00000000     0 0 0 3 0
   5: 0200007F:9C43 0100007F:CF6E 01 00000000:00000000 00:00000000 00000000  1002 0 51236 1 0 20 4 30 10 -1
   6: 0000000000000000FFFF00000100007F:9C44 0000000000000000FFFF00000100007F:CF6E 01 0:0 0:0 0  1003 0 51237 1 0
   7: truncated
"""


@pytest.mark.skipif(sys.byteorder != "little", reason="the rows are of a little-endian machine")
@pytest.mark.parametrize(
    ("client", "uid"),
    [
        (("127.0.0.1", 0x9C40), 1001),
        (("127.0.0.1", 0x9C41), None),  # its process has closed it: the user 0 is nobody
        (("127.0.0.1", 0x9C42), None),
        (("127.0.0.1", 0x9C43), None),  # another address with this port
        (("127.0.0.2", 0x9C43), 1002),
        (("127.0.0.1", 0x9C44), 1003),  # an IPv6 socket on an IPv4 address
        (("127.0.0.1", 0x9C45), None),
        (("127.0.0.1", 0xCF6E), None),  # the server's own end and its listening socket are no clients
    ],
)
def test_find_uid_takes_the_clients_row(client: Address, uid: int | None) -> None:
    assert find_uid(ROWS.splitlines(), client=client, server=("127.0.0.1", 0xCF6E)) == uid


def ask(port: int, method: str = "GET", path: str = "/v1/health", body: bytes | None = None) -> str:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    client.request(method, path, body)
    answer = client.getresponse()
    return f"{answer.status} {answer.read().decode()}"


@needs_root
def test_process_of_another_user_is_refused(tmp_path: Path) -> None:
    """It gets 403 with the way out, whatever it asks; nothing of the bucket changes, and no transform starts."""
    with node_server(tmp_path / "ais", allow_etl=True) as node:
        node.storage.create_bucket("b")
        node.storage.write("b", "a", [b"mine"])
        command = {"name": "theirs", "runtime": {"command": ["python", "-m", "prep.etl", "os:system"]}}
        for method, path, body in (
            ("GET", "/v1/health", None),
            ("GET", "/v1/objects/b/a?pid=p", None),
            ("HEAD", "/v1/objects/b/a?pid=p", None),
            ("PUT", "/v1/objects/b/a?pid=p", b"theirs" * 100_000),
            ("DELETE", "/v1/objects/b/a?pid=p", None),
            ("GET", "/s3/b/a", None),
            ("PUT", "/v1/etl", json.dumps(command).encode()),
        ):
            said = as_nobody(lambda m=method, p=path, b=body: ask(node.port, m, p, b))  # type: ignore[misc]
            assert said.startswith("403"), (method, path)
            if method != "HEAD":
                assert f"answers only processes of its own user, id {os.geteuid()};" in said
                assert "dali-pipes prep embedded --open" in said
        assert node.storage.read("b", "a") == b"mine"
        assert ask(node.port).startswith("200")


@needs_root
def test_open_node_answers_everybody_and_warns(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "prep.embedded", "--dir", str(tmp_path / "ais"), "--open"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    port = int(process.stdout.readline().rpartition(":")[2])
    assert as_nobody(lambda: ask(port)).startswith("200")
    process.terminate()
    assert "every user of this machine can read, replace and delete its objects\n" in process.communicate()[1]


def test_connection_whose_owner_cannot_be_found_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No store retries until its patience ends, and no message mentions tokens, which would not help."""
    monkeypatch.setattr(connection, "peer_uid", lambda _client, _server: None)
    with node_server(tmp_path / "ais") as running, use_patience(Patience(patience_s=600)):
        assert ask(running.port).startswith("403")
        store = AisStore(running.endpoint, "b")
        for use in (
            lambda: check_endpoint(running.endpoint),
            store.exists,
            lambda: store.list(""),
            lambda: store.read("a"),
            lambda: store.write("a", b"x" * 3_000_000),
        ):
            with pytest.raises(StoreError, match=r"its own user.* dali-pipes prep embedded --open") as caught:
                use()
            assert "token" not in str(caught.value)


def test_folder_and_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    """The umask of the process that starts the node does not matter."""
    before = os.umask(0)
    try:
        with start(tmp_path / "ais") as node:
            bucket = sdk(node.endpoint).bucket("b").create()
            bucket.object("a").get_writer().put_content(b"mine")
            found = {path: path.stat().st_mode & 0o077 for path in (tmp_path / "ais").rglob("*")}
    finally:
        os.umask(before)
    assert len(found) > 6
    assert (tmp_path / "ais").stat().st_mode & 0o777 == 0o700
    assert set(found.values()) == {0}


@needs_root
def test_another_user_can_hold_no_lock_of_a_node(tmp_path: Path) -> None:
    """A lock on a bucket would stop every PUT; nobody else gets as far as the file."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)  # the folders above are open, as a home often is
    claim_folder(tmp_path / "ais")
    with Storage(tmp_path / "ais") as storage:
        storage.create_bucket("b")

        def hold() -> str:
            file = os.open(tmp_path / "ais" / "buckets" / "b" / ".bucket", os.O_RDONLY)
            fcntl.flock(file, fcntl.LOCK_EX)
            return "held"

        assert as_nobody(hold) == "PermissionError"


def test_open_folder_of_a_node_is_closed_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also an empty folder, which somebody made for the node."""
    for name in ("node", "empty"):
        (tmp_path / name).mkdir(mode=0o755)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "node" / "buckets").mkdir()
    for name in ("node", "empty"):
        with caplog.at_level(logging.WARNING):
            claim_folder(tmp_path / name)
        assert f"folder '{tmp_path / name}' to other users: mode 0755 is now 0700" in caplog.text
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700
    caplog.clear()
    claim_folder(tmp_path / "node")
    assert caplog.text == ""


def test_open_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    """Its mode may be somebody's wish; nothing changes."""
    folder = tmp_path / "data"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "notes.txt").touch()
    with pytest.raises(StoreError, match=r"is open to other users \(mode 0755\) and holds other files .*chmod 700"):
        start(folder)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


@needs_root
def test_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", NOBODY, NOBODY)
    with pytest.raises(StoreError, match=f"belongs to user {NOBODY}, and this process is user 0"):
        start(tmp_path / "theirs")
