"""No token and no password is shown, whatever a server repeats: in output, logs, tracebacks and records."""

import base64
import contextlib
import json
import logging
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest
from prometheus_client import generate_latest

import dali_pipes as dp
from dali_pipes.cli import main
from dali_pipes.errors import PipesError, keep_secret, printable
from dali_pipes.metrics import LoaderCollector
from dali_pipes.metrics.counts import span
from dali_pipes.store.cloud.settings import CloudSettings
from dali_pipes.store.cluster.access import ClusterAccess, Token
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.urls import open_store
from tests import loaders
from tests.dali_pipes.raw import raw
from tests.servers.scripted import Script, Visit, scripted
from tests.shards import Sample, photo_bytes, write_classes, write_shards

TOKEN = "eyJhbGciOi-t0ken-of-this-test"
PASSWORD = "hunter2-and-more"
SECRETS = (TOKEN, PASSWORD, base64.b64encode(f"user:{PASSWORD}".encode()).decode())
STATUSES = (200, 206, 307, 400, 401, 403, 404, 422, 500)

# Commands that print by themselves, print an error or write a record. All others print by `commands.output`:
# tests/test_imports.py checks that they do, and tests/dali_pipes/commands/test_output.py tests `commands.output`.
_COMMANDS = {
    "doctor": 401,
    "prep info ais://b/x-": 500,
    "prep shuffle ais://b/x- ais://b/y --engine dsort": 422,
    "bench run --shards ais://b/x- --loaders dali,webloader --repeats 1 --json record.json": 403,
}


def echo(status: int) -> Script:
    """A server that is an AIStore by its health, and answers everything else with what it was asked, in every field."""

    def script(visit: Visit) -> None:
        asked = " ".join(visit.request.decode("latin-1").split())
        text = f"{TOKEN} {asked}"
        code = 200 if b"/v1/health" in visit.request else status
        body = json.dumps({"message": f"ais://b/x {text}", "status": code}).encode()
        fields = {
            "Ais-Version": TOKEN,
            "Ais-Checksum-Type": TOKEN,
            "Ais-Checksum-Value": TOKEN,
            "Ais-Bucket-Props": json.dumps({"checksum": {"type": TOKEN}}) if visit.number % 2 else text,
            "Hdr-Error": text,
            "Content-Range": text,
            "Location": f"http://127.0.0.1:1/{quote(TOKEN)}" if visit.number % 2 else f"nowhere {text}",
            "Content-Type": "application/json",
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        head = f"HTTP/1.1 {code} {text}\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
        visit.send(head.encode("latin-1") + (b"" if visit.request.startswith(b"HEAD") else body))

    return script


def _shown(exc: BaseException) -> str:
    return "".join(traceback.format_exception(exc)) + repr(exc)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A token, and a place of this test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AIS_AUTHN_TOKEN", TOKEN)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def all_output(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> Callable[[], str]:
    """Everything that was printed, logged or written."""
    caplog.set_level(logging.DEBUG)

    def collect() -> str:
        written = "".join(path.read_text("latin-1") for path in tmp_path.glob("*.json"))
        return "\n".join([*capfd.readouterr(), caplog.text, written])

    return collect


@pytest.mark.parametrize(("line", "status"), _COMMANDS.items())
def test_no_command_shows_the_token(
    line: str, status: int, monkeypatch: pytest.MonkeyPatch, all_output: Callable[[], str]
) -> None:
    """The server repeats the request in its answer; neither the output nor the traceback shows the token."""
    with scripted(echo(status)) as server:
        monkeypatch.setenv("AIS_ENDPOINT", server.endpoint)
        main(["-v", *line.split()])
        assert any(f"Bearer {TOKEN}".encode() in request for request in server.requests)
    shown = all_output()
    assert shown.strip()
    assert not [secret for secret in SECRETS if secret in shown]


def test_no_loader_shows_the_token(all_output: Callable[[], str]) -> None:
    """The store fails; neither the output nor the traceback, with all its causes, shows a secret."""
    with scripted(echo(401)) as server, pytest.raises(PipesError) as raised:
        dp.loader("ais://b/x-{0..3}.tar", dp.segmentation(), batch_size=2, endpoint=server.endpoint)
    shown = all_output() + _shown(raised.value)
    assert not [secret for secret in SECRETS if secret in shown]


@pytest.mark.parametrize("status", STATUSES)
def test_no_store_shows_the_token(status: int) -> None:
    """Each request that a store can send."""
    with scripted(echo(status)) as server:
        store = AisStore(server.endpoint, "b")
        access = AisStore(server.endpoint, "b", http=ClusterAccess(endpoint=server.endpoint, token=Token(TOKEN)))
        asks: list[Callable[[], object]] = [
            store.exists,
            store.create,
            lambda: store.list("x"),
            lambda: store.find("x"),
            lambda: store.read("x"),
            lambda: store.read_range("x", start=0, size=3),
            lambda: store.write("x", b"abc"),
            lambda: store.size("x"),
            lambda: store.delete("x"),
            store.access,
            lambda: access.write_stream("x", lambda: [memoryview(b"abc")], num_bytes=3),
            lambda: access.file("x", size=3).read_into(memoryview(bytearray(3)), offset=0),
        ]
        for ask in asks:
            try:
                shown = repr([*parts_of(store), *parts_of(access)])
                ask()
            except PipesError as exc:
                shown += _shown(exc)
            assert not [secret for secret in SECRETS if secret in shown]


TEXTS = {
    "x-amz-security-token: FwoGZXIvYXdzROLE/01+=": "x-amz-security-token: ***",
    '{"X-Amz-Security-Token": "FwoGZXIvYXdzROLE"}': '{"X-Amz-Security-Token": "***"}',
    "/a?X-Amz-Signature%3D0123456789%26x": "/a?X-Amz-Signature%3D***",
    "https://h/a%3Fsig%3D0123456789": "https://h/a%3Fsig%3D***",
    "Bearer eyJhbGciOi.x": "Bearer ***",
    "401 Bearer authentication failed; the signature: unknown-one": "",
}


@pytest.mark.parametrize("text", TEXTS)
def test_what_works_like_a_password_is_masked_whoever_made_it(text: str) -> None:
    """A package may get tokens by itself, and a server may repeat them in any form."""
    assert printable(text) == (TEXTS[text] or text)


def test_each_line_of_a_key_is_masked_and_the_longer_of_two_first() -> None:
    keep_secret("begin-of-both")
    keep_secret("begin-of-both-and-more")
    keep_secret("-----BEGIN KEY-----\nMIIEvQIBADANBgkq\nhkiG9w0BAQEFAASC\n")
    assert printable("begin-of-both-and-more hkiG9w0BAQEFAASC") == "*** ***"


KEY = base64.b64encode(b"a key of this test, which nobody may see").decode()
CLOUDS = {
    "s3": {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": KEY, "AWS_SESSION_TOKEN": f"{TOKEN}/+="},
    "az with a signature": {"AZURE_STORAGE_SAS_TOKEN": f"sv=2024-11-04&sp=rl&sig={quote(KEY, safe='')}"},
    "az with a key": {"AZURE_STORAGE_ACCOUNT_KEY": KEY},
    "gs": {"GOOGLE_SKIP_SIGNATURE": "true"},
}


def repeat(status: int) -> Script:
    """A cloud that repeats what it was asked, as it came and unquoted, as message, code and reason."""

    def script(visit: Visit) -> None:
        asked = " ".join(visit.request.decode("latin-1").split())
        body = f"<Error><Code>Odd</Code><Message>{asked} {unquote(asked)}</Message></Error>".encode()
        head = f"HTTP/1.1 {status} {asked}\r\nContent-Length: {len(body)}\r\nX-Ms-Error-Code: {asked}\r\n\r\n"
        visit.send(head.encode("latin-1") + (b"" if visit.request.startswith(b"HEAD") else body))

    return script


@pytest.mark.parametrize("status", [400, 403, 404])
@pytest.mark.parametrize("cloud", CLOUDS)
def test_no_cloud_shows_keys_and_signatures(
    cloud: str, status: int, monkeypatch: pytest.MonkeyPatch, all_output: Callable[[], str]
) -> None:
    """Each request that a bucket can send; what signed it is in none of its errors, logs and texts."""
    shown = ""
    with scripted(repeat(status)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{server.endpoint}/account")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
        monkeypatch.setenv("GOOGLE_BASE_URL", server.endpoint)
        for name, value in CLOUDS[cloud].items():
            monkeypatch.setenv(name, value)
        store, _ = open_store(f"{cloud[:2]}://bucket", endpoint="direct")
        asks: list[Callable[[], object]] = [
            store.exists,
            lambda: store.list("x"),
            lambda: store.read("x"),
            lambda: store.write("x", b"abc"),
            lambda: store.size("x"),
            lambda: store.delete("x"),
        ]
        for ask in asks:
            try:
                shown += repr(store)
                ask()
            except PipesError as exc:
                shown += _shown(exc)
        sent = b"".join(server.requests).decode("latin-1")
        shown += repr([store.source.signed("x"), *parts_of(store)])
    shown += all_output()
    signatures = re.findall(r"(?:Signature|sig)=([^&\s]+)", sent) + re.findall(r"SharedKey account:(\S+)", sent)
    assert signatures or cloud == "gs"
    secrets = {KEY, TOKEN, *signatures}
    assert not [
        secret for secret in secrets if secret in shown or quote(secret, safe="") in shown or unquote(secret) in shown
    ]


def parts_of(value: object) -> list[object]:
    """Objects of our classes, and of theirs, with all that they hold."""
    found, left = [], [value]
    while left:
        one = left.pop()
        if type(one).__module__.startswith("dali_pipes.") and not any(one is other for other in found):
            found.append(one)
            left += one if isinstance(one, tuple) else getattr(one, "__dict__", {}).values()
    return found


def test_no_span_page_or_metric_shows_a_secret(
    tmp_path: Path, exporter: Any, all_output: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may repeat a secret as any name: of a shard, a key, a class, a caption."""
    for name, value in [pair for cloud in CLOUDS.values() for pair in cloud.items()]:
        monkeypatch.setenv(name, value)
    opened = Token.from_environment(), *(CloudSettings.from_environment(scheme, "bucket") for scheme in ("s3", "az"))
    assert all(opened)
    secrets = [TOKEN, KEY, quote(KEY, safe=""), f"{TOKEN}/+=", PASSWORD]
    keep_secret(PASSWORD)
    texts = [secret.replace("/", "%2F") for secret in secrets]
    samples = [
        Sample(f"{text}-{number}", {"image.jpg": photo_bytes(number, 20, 30), "cls": b"0", "txt": text.encode()})
        for number, text in enumerate(texts)
    ]
    shards = write_shards(tmp_path / TOKEN, samples, per_shard=3)
    write_classes(shards, {"0": f"sig={quote(KEY, safe='')}", "1": KEY})
    (shards / "s-000001.tar").write_bytes(b"no tar " + KEY.encode() * 30)
    with loaders.open_loader(shards, raw, batch_size=1) as loader:
        loader.name = KEY
        with pytest.raises(PipesError) as raised:
            list(loader)
        with contextlib.suppress(OSError), span("open"):
            raise OSError(f"the host {TOKEN} is unknown")  # of another package
        metrics = generate_latest(LoaderCollector(labels={"run": TOKEN})).decode()
    page = tmp_path / "page.html"
    main(["prep", "view", str(shards), "-o", str(page)])
    main(["prep", "info", str(shards)])
    main(["prep", "verify", str(shards)])
    spans = "".join(span.to_json() for span in exporter.get_finished_spans())
    shown = [metrics, spans, page.read_text(), all_output(), _shown(raised.value)]
    assert all("***" in text for text in shown)
    assert not [secret for secret in {*secrets, *texts} for text in shown if secret in text]


@pytest.mark.parametrize("line", ["doctor", "-v prep info ais://b/x-"])
def test_no_command_shows_a_password_in_the_endpoint(
    line: str, monkeypatch: pytest.MonkeyPatch, all_output: Callable[[], str]
) -> None:
    """An endpoint with a password is refused before it is asked; the error names the host alone."""
    with scripted(echo(200)) as server:
        monkeypatch.setenv("AIS_ENDPOINT", server.endpoint.replace("://", f"://user:{PASSWORD}@"))
        assert main(line.split())
        assert not server.requests
    shown = all_output()
    assert "must not hold a password" in shown
    assert not [secret for secret in SECRETS if secret in shown]


def test_secret_is_masked_before_a_text_is_cut() -> None:
    """No half of a token is left at the end of a text that was cut."""
    keep_secret(TOKEN)
    for length in range(len(TOKEN) + 5, 80):
        shown = printable("x" * 20 + TOKEN + "y" * 100, max_chars=length)
        assert not any(TOKEN[:stop] in shown for stop in range(8, len(TOKEN) + 1))


def test_repr_of_a_loader_shows_no_token(small_shards: Path, tmp_path: Path) -> None:
    """``repr`` hides a token that is part of the path."""
    keep_secret("token-of-the-cluster")
    link = tmp_path / "token-of-the-cluster"
    link.symlink_to(small_shards)
    for rank in (None, "late"):
        with loaders.open_loader(link, rank=rank) as loader:
            assert f"{tmp_path}/***" in repr(loader)
            assert link.name not in repr(loader)
