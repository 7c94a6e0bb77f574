"""A real S3 server, versitygw, over a folder of the tests; tests that need it are skipped without it."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dali_pipes.fetch.clouds import CloudObjects
from dali_pipes.fetch.parts import ObjectRequest
from dali_pipes.fetch.transport.access import CloudAccess

ACCESS_KEY, SECRET_KEY = "test-user", "test-secret-key"
_PROGRAM = "versitygw"
_START_S = 60.0


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Serve the folders below ``folder`` as buckets: the endpoint. It ends with the test, or with this process."""
    places = [os.environ.get("DALI_PIPES_SERVERS", ""), str(Path(__file__).parents[3] / ".servers" / "bin")]
    program = shutil.which(_PROGRAM, path=os.pathsep.join([*filter(None, places), os.environ.get("PATH", "")]))
    if program is None:
        pytest.skip(f"no '{_PROGRAM}' in PATH, DALI_PIPES_SERVERS or .servers/bin")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    keys = ["--access", ACCESS_KEY, "--secret", SECRET_KEY]
    # A shell that ends the server when its input ends: with `close`, or with this process.
    command = ["/bin/sh", "-c", '"$@" & cat >/dev/null; kill $!; wait', "sh"]
    server = subprocess.Popen(
        [*command, program, "--quiet", "--keep-alive", "--port", address, *keys, "posix", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait_for(address)
        yield f"http://{address}"
    finally:
        assert server.stdin is not None
        server.stdin.close()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait_for(address: str) -> None:
    host, _, port = address.partition(":")
    until = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return


def s3_store(endpoint: str, bucket: str, *, secret_key: str = SECRET_KEY) -> Any:
    """A bucket, as obstore sees it."""
    stores: Any = pytest.importorskip("obstore.store")
    return stores.S3Store(
        bucket,
        endpoint=endpoint,
        access_key_id=ACCESS_KEY,
        secret_access_key=secret_key,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )


def s3_objects(endpoint: str, bucket: str, *, secret_key: str = SECRET_KEY, expires_s: float = 600.0) -> CloudObjects:
    """A bucket's objects, signed for ``endpoint`` by obstore."""
    obstore: Any = pytest.importorskip("obstore")
    store = s3_store(endpoint, bucket, secret_key=secret_key)

    def ask_for(name: str) -> ObjectRequest:
        url = obstore.sign(store, "GET", name, expires_in=timedelta(seconds=max(1.0, expires_s)))
        return ObjectRequest(url, expires_s=expires_s)

    return CloudObjects(
        ask_for,
        locate=lambda name: f"s3://{bucket}/{name}",
        access=CloudAccess.from_environment(endpoint),
        scheme="s3",
        advice="check the keys",
    )
