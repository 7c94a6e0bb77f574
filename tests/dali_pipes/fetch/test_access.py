"""Tokens, certificates and proxies on the way to an object."""

import os
import ssl
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from aistore import Client

from dali_pipes.errors import StoreError
from dali_pipes.store.cluster.access import ClusterAccess, Token
from dali_pipes.store.cluster.ais import AisStore
from tests.dali_pipes.fetch.served import DATA, fails, fetch_object, fetching
from tests.servers.faulty import faulty
from tests.servers.scripted import Visit, scripted

TOKEN = "s3cret-t0ken"


def test_token_goes_where_the_sdk_sends_it(store: AisStore) -> None:
    """To the proxy; not to a target, at another address: held against the SDK's own requests."""
    with faulty(store.endpoint) as proxy:
        with fetching(proxy.endpoint, store.bucket, token=Token(TOKEN)) as fetcher:
            fetch_object(fetcher)
        ours = [(seen.is_entry, seen.headers.get("Authorization")) for seen in proxy.seen]
        proxy.seen.clear()
        client = Client(proxy.endpoint, token=TOKEN)
        client.bucket(store.bucket).object("a/x.tar").get_reader().read_all()
        sdks = [(seen.is_entry, seen.headers.get("Authorization")) for seen in proxy.seen]
    assert ours == sdks == [(True, f"Bearer {TOKEN}"), (False, None)]


@pytest.mark.parametrize("endpoint", ["localhost:51080", "ftp://h", "http://", "http://h:port", "http://u:pw@h"])
def test_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    """A password in it is not repeated."""
    with pytest.raises(ValueError, match="endpoint") as raised:
        ClusterAccess(endpoint=endpoint)
    assert "pw" not in str(raised.value)


def test_environment_is_read_as_the_sdk_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variables, held against what the SDK makes of them."""
    from aistore.sdk.session_manager import resolve_ssl_config

    for name in list(os.environ):
        if name.startswith("AIS_") or name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
            monkeypatch.delenv(name)
    steps = [
        {},
        {"AIS_AUTHN_TOKEN": TOKEN, "AIS_CLIENT_CA": "/ca.pem"},
        {"AIS_CRT": "/c.pem"},  # a certificate without a key is none
        {"AIS_CRT_KEY": "/k.pem"},
        {"AIS_SKIP_VERIFY": "Yes"},
        {"AIS_SKIP_VERIFY_CRT": "no"},  # comes before the older name
        {"AIS_SKIP_VERIFY_CRT": "T"},
    ]
    for variables in steps:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        ours = ClusterAccess.from_environment("https://ais:1")
        verify, certificate = resolve_ssl_config()
        assert (not ours.skip_verify and (str(ours.ca) if ours.ca else True)) == verify
        assert (ours.client_cert and tuple(map(str, ours.client_cert))) == certificate
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the SDK's, of not verifying
            assert ours.bearer == Client("http://localhost:1").cluster().client.token


# TLS


@dataclass(frozen=True)
class Tls:
    ca: Path
    other_ca: Path
    client_cert: tuple[Path, Path]
    context: ssl.SSLContext
    strict: ssl.SSLContext
    """Asks for a client's certificate."""


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    folder = tmp_path_factory.mktemp("tls")
    ca, other = trustme.CA(), trustme.CA()
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    other.cert_pem.write_to_path(str(folder / "other.pem"))
    client = ca.issue_cert("client@example.org")
    client.cert_chain_pems[0].write_to_path(str(folder / "client.pem"))
    client.private_key_pem.write_to_path(str(folder / "client.key"))
    contexts = []
    for mode in (ssl.CERT_NONE, ssl.CERT_REQUIRED):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        ca.issue_cert("127.0.0.1").configure_cert(context)
        ca.configure_trust(context)
        context.verify_mode = mode
        contexts.append(context)
    client_cert = (folder / "client.pem", folder / "client.key")
    return Tls(folder / "ca.pem", folder / "other.pem", client_cert, *contexts)


def test_https_with_a_client_certificate(store: AisStore, tls: Tls) -> None:
    """With it, bytes; without, an error that names the variables."""
    with faulty(store.endpoint, context=tls.strict) as proxy:
        with fetching(proxy.endpoint, store.bucket, ca=tls.ca, client_cert=tls.client_cert) as fetcher:
            fetch_object(fetcher)
        with fetching(proxy.endpoint, store.bucket, ca=tls.ca) as fetcher:
            fails(fetcher, StoreError, "set AIS_CRT and AIS_CRT_KEY")


# The environment's proxies


def test_https_goes_through_a_tunnel(tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client sends CONNECT with the host's name, and the tunnel carries TLS to that host, also after a redirect."""

    def script(visit: Visit) -> None:
        if visit.request.startswith(b"CONNECT"):
            visit.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
            visit.encrypt(tls.context)
        elif "ais.invalid" in visit.headers["Host"]:
            visit.say(307, Location="https://127.0.0.1:51081/there")
        else:
            visit.say(200, DATA)

    with scripted(script) as server:
        monkeypatch.setenv("https_proxy", server.endpoint)
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setenv("NO_PROXY", "")
        # The redirect leads to 127.0.0.1, with the certificate of that; the proxy's own name is not checked here.
        with fetching("https://ais.invalid:51080", "b", skip_verify=True) as fetcher:
            fetch_object(fetcher, name="x.tar")
        path = "/v1/objects/b/x.tar?provider=ais"
        assert server.paths == ["ais.invalid:51080", path, "127.0.0.1:51081", "/there"]


def test_proxy_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its password."""
    monkeypatch.setenv("http_proxy", "socks5://u:pw@127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    with fetching("http://ais.invalid:51080", "b") as fetcher:
        text = fails(fetcher, StoreError, r"proxy for ais.invalid:51080 is of the kind 'socks5'.* NO_PROXY")
    assert "pw" not in text


def test_https_to_http_is_not_followed(tls: Tls) -> None:
    """A redirect never takes the data to where others can read and change them."""

    with scripted(lambda visit: visit.say(200, b"abc")) as target:
        redirect = scripted(lambda visit: visit.say(307, Location=f"{target.endpoint}/o"), context=tls.context)
        with redirect as entry, fetching(entry.endpoint, "b", ca=tls.ca) as fetcher:
            fails(fetcher, StoreError, "redirected from https to http, to 'http://127.0.0.1:")
        assert not target.requests


def test_proxy_cannot_speak_before_tls(tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that an HTTP proxy sends after its answer to CONNECT are not read as part of the encrypted connection."""

    with scripted(lambda visit: visit.send(b"HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 404 SMUGGLED\r\n\r\n")) as server:
        monkeypatch.setenv("https_proxy", server.endpoint)
        monkeypatch.setenv("no_proxy", "")
        with fetching("https://ais.invalid", "b", ca=tls.ca) as fetcher:
            fails(fetcher, StoreError, "bytes came before the TLS connection was made")
