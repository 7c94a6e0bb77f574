"""What an endpoint's certificates, or the lack of TLS, may have wrong: each trouble has its own advice."""

import ssl
from pathlib import Path

import pytest
import trustme

from dali_pipes.errors import StoreError
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.endpoint import check_endpoint
from tests.servers.scripted import says, scripted

HEALTHY = says(b"HTTP/1.1 200 OK\r\nAis-Daemon-Id: p\r\nContent-Length: 0\r\n\r\n")
# As Go's server with TLS answers plain HTTP.
TEXT = b"Client sent an HTTP request to an HTTPS server.\n"
SAYS_HTTPS = says(b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%b" % (len(TEXT), TEXT))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``ca.pem`` signed the servers' certificate, ``other.pem`` did not, ``bad.pem`` is none."""
    tmp_path = tmp_path_factory.mktemp("tls")
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
    (tmp_path / "bad.pem").write_text("no certificate")
    certificate = ca.issue_cert("127.0.0.1")
    for name, part in (("server.pem", certificate.cert_chain_pems[0]), ("server.key", certificate.private_key_pem)):
        part.write_to_path(str(tmp_path / name))
    return tmp_path


def context_of(folder: Path, *, asks: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    context.load_verify_locations(folder / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED if asks else ssl.CERT_NONE
    return context


@pytest.mark.parametrize(
    ("server", "scheme", "variables", "expected"),
    [
        ("tls", "https", {"AIS_CLIENT_CA": "ca.pem"}, ""),
        ("tls", "https", {}, r"cannot be trusted \(self.signed.*\); set AIS_CLIENT_CA to the file of the CA"),
        ("tls", "https", {"AIS_CLIENT_CA": "other.pem"}, r"cannot be trusted .*; set AIS_CLIENT_CA"),
        ("tls", "https", {"AIS_CLIENT_CA": "none.pem"}, "cannot read .*none.pem.*; check AIS_CLIENT_CA"),
        ("tls", "https", {"AIS_CLIENT_CA": "bad.pem"}, "cannot read .*bad.pem.*; check AIS_CLIENT_CA"),
        ("tls", "https", {"AIS_CRT": "none.pem", "AIS_CRT_KEY": "none.key"}, "none.pem.*; check AIS_CRT and"),
        ("strict", "https", {"AIS_CLIENT_CA": "ca.pem"}, r"client's certificate, set AIS_CRT and AIS_CRT_KEY"),
        ("plain", "https", {}, r"does not speak TLS .*; should the endpoint begin with http://\?"),
        ("says", "http", {}, r"speaks TLS; the endpoint must begin with https://"),
    ],
)
def test_tls_trouble_has_its_own_advice(
    folder: Path, monkeypatch: pytest.MonkeyPatch, server: str, scheme: str, variables: dict[str, str], expected: str
) -> None:
    """When a command checks its endpoint, and when a store is asked later; never "is it running?" alone."""
    for name in ("AIS_CLIENT_CA", "AIS_CRT", "AIS_CRT_KEY", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(folder / value))
    context = context_of(folder, asks=server == "strict") if server in ("tls", "strict") else None
    script = SAYS_HTTPS if server == "says" else HEALTHY
    # What is no HTTP, such as the beginning of TLS, is answered by http.server.
    plain = scripted(lambda visit: visit.say(200, b"", **{"Ais-Daemon-Id": "p"}))
    with plain if server == "plain" else scripted(script, context=context) as running:
        endpoint = f"{scheme}://{running.endpoint.partition('://')[2]}"
        if not expected:
            check_endpoint(endpoint)
            return
        with pytest.raises(StoreError, match=expected) as raised:
            check_endpoint(endpoint)
        assert endpoint in str(raised.value)
        if server != "says":
            with pytest.raises(StoreError, match=expected):
                AisStore(endpoint, "b").list("")
