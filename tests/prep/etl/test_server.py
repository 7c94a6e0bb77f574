"""The server of a pod, as AIStore asks it: what it answers, and what it refuses to strangers."""

import http.client
import json
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own
from aistore.sdk.etl.webserver import http_multi_threaded_server as sdk_server

from dali_pipes.store.cluster.ais import AisStore
from prep.etl.__main__ import main as serve
from prep.etl.run import start_etl
from prep.etl.transforms import load_transform
from tests.prep.etl.conftest import FUNCTIONS, stub, words
from tests.programs import REPOSITORY
from tests.shards import encode_mask, encode_photo


@contextmanager
def serving(transform: str, *, target: str) -> Iterator[int]:
    """The port of a server in a thread of this process. SIGTERM's handler ends the server, which returns 0."""
    handlers: dict[int, Callable[..., object]] = {}
    servers: queue.Queue[sdk_server.ThreadedHTTPServer] = queue.Queue()
    codes: list[int] = []

    class Told(sdk_server.ThreadedHTTPServer):  # type: ignore[misc]  # the SDK publishes no types
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            servers.put(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIS_TARGET_URL", target)
        patch.setattr(sdk_server, "ThreadedHTTPServer", Told)
        signals = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT, "signal": handlers.__setitem__}
        patch.setattr(sdk_server, "signal", SimpleNamespace(**signals))
        arguments = [transform, "--host", "127.0.0.1", "--port", "0"]
        thread = threading.Thread(target=lambda: codes.append(serve(arguments)))
        thread.start()
        try:
            yield servers.get(timeout=60).server_address[1]
        finally:
            handlers[signal.SIGTERM](signal.SIGTERM, None)
            thread.join()
        assert codes == [0]


def ask(
    port: int, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_server_answers_what_aistore_sends(source: AisStore, tmp_path: Path) -> None:
    """It takes a health check, a body, an object's file, a read from the target, and its own node as receiver."""
    path = tmp_path / "@ais" / "b" / "%ob" / "s.tar"
    path.parent.mkdir(parents=True)
    path.write_bytes(words())
    wanted = load_transform(f"{FUNCTIONS}:shout").transform(words(), "s.tar")
    with serving(f"{FUNCTIONS}:shout", target=source.endpoint) as port:
        assert ask(port, "GET", "/health") == (200, b"Running")
        assert ask(port, "PUT", "/b/s.tar", words()) == (200, wanted)
        assert ask(port, "PUT", f"/b/s.tar?etl_fqn={quote(str(path))}") == (200, wanted)
        assert ask(port, "PUT", f"/b/s.tar?etl_fqn={quote(quote(str(path), safe=''))}") == (200, wanted)  # as AIS 5.0
        assert ask(port, "GET", f"/v1/objects/{source.bucket}/samples-000000.tar") == (200, wanted)
        other = f"{source.endpoint}/v1/objects/{source.bucket}/direct.tar?provider=ais&pid=x"
        assert ask(port, "PUT", "/b/s.tar", words(), {"Ais-Node-Url": other}) == (204, b"")
        assert source.read("direct.tar") == wanted
        assert ask(port, "GET", "/v1/objects/nothing/s.tar")[0] == 404


def test_server_gives_results_and_tokens_to_no_stranger(etl_node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even behind its own node, as a next stage; nor where a path without a slash would name another host."""
    monkeypatch.setenv("AIS_AUTHN_TOKEN", "secret")
    with stub(200, {}) as stranger, serving(f"{FUNCTIONS}:shout", target=etl_node) as port:
        url = stranger.endpoint
        for header in (url, f"{url}/v1/objects/b/x", f"{etl_node},{url}", f"https{etl_node[4:]}"):
            status, body = ask(port, "PUT", "/b/s.tar", words(), {"Ais-Node-Url": header})
            assert status == 403, header
            assert b"is not the node that started this transform" in body
        assert ask(port, "GET", f"@{url.removeprefix('http://')}/x")[0] == 403
        assert stranger.requests == []


FILES = [
    "/etc/passwd",
    "{folder}/private.tar",
    "{folder}/@ais/b/%ob/../../../private.tar",
    "{folder}/@ais/other/%ob/private.tar",  # not in the request's bucket
    "@ais/b/%ob/private.tar",
]


def test_server_reads_no_file_but_a_targets_objects(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "@ais/other/%ob", tmp_path / "@ais/b/%ob"):
        folder.mkdir(parents=True, exist_ok=True)
    for folder in (tmp_path, tmp_path / "@ais/other/%ob"):
        (folder / "private.tar").write_bytes(words())
    with serving(f"{FUNCTIONS}:shout", target="http://127.0.0.1:9") as port:
        for file in FILES:
            named = quote(file.format(folder=tmp_path))
            for method, text in (("PUT", named), ("GET", named), ("PUT", quote(named))):
                status, body = ask(port, method, f"/b/s.tar?etl_fqn={text}", b"" if method == "PUT" else None)
                assert status == 403, (file, body)
                assert b"is not where a target keeps an object of the bucket 'b'" in body


def test_server_that_cannot_start_says_why(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIS_TARGET_URL", raising=False)
    assert serve(["dogs"]) == 2
    assert "error: a transform is 'pets' or MODULE:FUNCTION" in capfd.readouterr().err
    assert serve(["pets"]) == 1
    assert "'AIS_TARGET_URL' must be set" in capfd.readouterr().err


def test_spec_is_what_start_sends() -> None:
    """The YAML for `ais etl init` is equal to the request of `prep etl start`."""
    with stub(200, {}) as server:
        start_etl(AisStore(server.endpoint, "b"), "dali-pipes-pets", transform="pets")
    sent = json.loads(server.requests[0].partition(b"\r\n\r\n")[2])
    assert yaml.safe_load((REPOSITORY / "deploy/etl/pets.yaml").read_text()) == sent


def test_image_holds_what_the_server_imports() -> None:
    """The recipe's files exist, its requirements are pinned, and packages that it leaves out are not needed."""
    recipe = (REPOSITORY / "deploy/etl/Dockerfile").read_text()
    copied = re.findall(r"^COPY (.+) \S+$", recipe, re.MULTILINE)
    assert all((REPOSITORY / name).exists() for names in copied for name in names.split())
    lines = (REPOSITORY / "deploy/etl/requirements.txt").read_text().splitlines()
    wanted = {line for line in lines if not line.startswith("#")}
    pinned = {line.partition("==")[0] for line in (REPOSITORY / "constraints.txt").read_text().splitlines()}
    assert wanted <= pinned
    left_out = "torch nvidia webdataset click google_crc32c fastapi flask uvicorn httpx"
    script = f"""
import sys
sys.modules.update(dict.fromkeys("{left_out}".split()))  # importing one of them fails
import prep.etl.__main__
sample = dict(zip(("image.jpg", "trimap.png"), [bytes.fromhex(line) for line in sys.stdin]))
print(*prep.etl.transforms.load_transform("pets").function(sample))
"""
    sample = f"{encode_photo().hex()}\n{encode_mask().hex()}"
    made = subprocess.run(
        [sys.executable, "-c", script], input=sample, text=True, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE
    )
    assert made.stdout.split() == ["image.npy", "trimap.npy"]
