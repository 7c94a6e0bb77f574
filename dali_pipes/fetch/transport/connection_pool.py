"""How to reach a cluster, and a pool of HTTP connections to its proxy and its targets."""

import os
import ssl
from base64 import b64encode
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from dali_pipes.errors import StoreError, keep_secret
from dali_pipes.fetch.transport.event_loop import Task
from dali_pipes.fetch.transport.http1 import HttpConnection, dial
from dali_pipes.fetch.transport.http_head import Answer
from dali_pipes.store.cluster.token import Token, is_token_for
from dali_pipes.store.cluster.transport.proxies import Proxies, split_endpoints
from dali_pipes.store.messages import is_loopback

MAX_IDLE_CONNECTIONS = 32
"""Connections that one fetcher keeps open, to proxy and targets together."""

_PORTS = {"http": 80, "https": 443}
_TRUE = ("1", "t", "true", "y", "yes", "on")


@dataclass(frozen=True, kw_only=True)
class ClusterAccess:
    """The address of a cluster, and the token and certificates for it."""

    endpoint: str
    """URL of an AIStore proxy, ``http://host:51080``, or several with commas between them; kept is the first."""
    token: Token | None = None
    """Token of AIStore's AuthN."""
    ca: Path | None = None
    """Certificates to trust, a file or a directory; ``None``: those that `requests` trusts."""
    client_cert: tuple[Path, Path] | None = None
    """Certificate and key, for a cluster that authenticates its clients."""
    skip_verify: bool = False
    """Accept any certificate."""
    proxies: Proxies = None  # type: ignore[assignment]  # made from the endpoint, if not given
    """The proxies of the cluster, which a store shares with its fetchers."""

    def __post_init__(self) -> None:
        named = split_endpoints(self.endpoint)
        object.__setattr__(self, "endpoint", named[0])
        object.__setattr__(self, "proxies", self.proxies or Proxies(named))

    @property
    def bearer(self) -> str | None:
        """The token as it is now."""
        return self.token.current() if self.token else None

    @classmethod
    def from_environment(cls, endpoint: str, *, proxies: Proxies | None = None) -> "ClusterAccess":
        """Read the variables of the ``aistore`` SDK: AIS_CLIENT_CA, AIS_CRT, AIS_CRT_KEY, AIS_SKIP_VERIFY_CRT.

        The token is found by `dali_pipes.store.cluster.token.Token.from_environment`.

        If AIS_CLIENT_CA is not set, REQUESTS_CA_BUNDLE and CURL_CA_BUNDLE count. (In `requests`, which the SDK uses,
        they take precedence over it, and over AIS_SKIP_VERIFY_CRT.) They do not count for an endpoint on this machine,
        as in `dali_pipes.store.cluster.client`.
        """
        environment = os.environ
        certificate, key = environment.get("AIS_CRT"), environment.get("AIS_CRT_KEY")
        skips = environment.get("AIS_SKIP_VERIFY_CRT", environment.get("AIS_SKIP_VERIFY", ""))
        bundles = [] if is_loopback(endpoint) else ["REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"]
        ca = next(filter(None, map(environment.get, ["AIS_CLIENT_CA", *bundles])), None)
        return cls(
            endpoint=endpoint,
            proxies=proxies,  # type: ignore[arg-type]
            token=Token.from_environment(),
            ca=Path(ca) if ca else None,
            client_cert=(Path(certificate), Path(key)) if certificate and key else None,
            skip_verify=skips.strip().lower() in _TRUE,
        )

    def tls_context(self) -> ssl.SSLContext:
        """Make TLS settings as `requests` would; a `StoreError` if a certificate or key cannot be read."""
        from certifi import where
        from urllib3.util.ssl_ import create_urllib3_context

        context = create_urllib3_context()
        context.set_alpn_protocols(["http/1.1"])
        if self.skip_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        else:
            trusted = self.ca or Path(where())
            try:
                if trusted.is_dir():
                    context.load_verify_locations(capath=trusted)
                else:
                    context.load_verify_locations(cafile=trusted)
            except OSError as exc:
                raise StoreError(f"cannot read certificates from '{trusted}': {exc}; check AIS_CLIENT_CA") from exc
        if self.client_cert:
            certificate, key = self.client_cert
            try:
                context.load_cert_chain(certificate, key)
            except OSError as exc:
                text = f"cannot read the client's certificate '{certificate}' with its key '{key}': {exc}"
                raise StoreError(f"{text}; check AIS_CRT and AIS_CRT_KEY") from exc
        return context

    def proxy_for(self, url: str) -> str | None:
        """Return the HTTP proxy that the environment names for a URL; ``None`` if the endpoint is on this machine."""
        from requests.utils import get_environ_proxies, select_proxy

        if is_loopback(self.endpoint):
            return None
        proxy: str | None = select_proxy(url, get_environ_proxies(url)) or None
        return proxy if proxy is None or "://" in proxy else f"http://{proxy}"


def host_of(url: str) -> str:
    """``host:port``, for messages.

    >>> host_of("https://[::1]/v1")
    '[::1]:443'
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"[{host}]:{_port_of(parts)}" if ":" in host else f"{host}:{_port_of(parts)}"


class ConnectionPool:
    """Connections to a cluster's proxy and targets. Owns the idle ones; a borrowed one belongs to its borrower.

    ``connect_timeout_s`` is for each address of a host; ``silence_s`` limits the pauses in an answer.
    """

    def __init__(self, access: ClusterAccess, *, connect_timeout_s: float, silence_s: float) -> None:
        self._access = access
        self._connect_timeout_s, self._silence_s = connect_timeout_s, silence_s
        self._idle: list[HttpConnection] = []
        """Least recently used first."""
        self._proxy_of = cache(access.proxy_for)  # of an origin

    def close(self) -> None:
        """Close the idle connections. Can be called twice."""
        while self._idle:
            self._idle.pop().close()

    def get(
        self, url: str, *, byte_range: tuple[int, int] | None, body: bytes = b""
    ) -> Task[tuple[HttpConnection, Answer]]:
        """Ask for a URL, or for bytes ``[start, stop)``: the answer's head, and its connection, to be given back.

        ``body`` is JSON that goes with the request: AIStore takes the arguments of some questions there.

        Raises:
            OSError, ProtocolError: If nothing answers, or the answer is not HTTP.
            StoreError: If a certificate cannot be read, or the environment's proxy is of a kind that we cannot use.
        """
        request = self._request(url, byte_range, body)
        while True:
            connection = yield from self._borrow(urlsplit(url))
            is_used = connection.num_answers > 0
            try:
                return connection, (yield from connection.ask(request))
            except (ConnectionError, ssl.SSLEOFError):
                connection.close()
                # A server may close an idle connection just when it is used again: ask on another one.
                if not is_used:
                    raise
            except BaseException:
                connection.close()
                raise

    def give_back(self, connection: HttpConnection) -> None:
        """Keep a connection for the next request, or close it if its answer was not read to the end."""
        if not connection.is_idle:
            connection.close()
            return
        self._idle.append(connection)
        if len(self._idle) > MAX_IDLE_CONNECTIONS:
            self._idle.pop(0).close()

    def _request(self, url: str, byte_range: tuple[int, int] | None, body: bytes) -> bytes:
        parts = urlsplit(url)
        proxy = self._proxy_of(_origin_of(parts)) if parts.scheme == "http" else None
        lines = [
            f"GET {url if proxy else url[len(_origin_of(parts)) :]} HTTP/1.1",
            f"Host: {parts.netloc}",
            "User-Agent: dali-pipes",
            "Accept: */*",
            "Accept-Encoding: identity",
        ]
        if proxy:
            lines += _proxy_headers(proxy)
        if self._access.token and any(is_token_for(named, url) for named in self._access.proxies.named):
            lines.append(f"Authorization: Bearer {self._access.bearer}")
        if byte_range:
            lines.append(f"Range: bytes={byte_range[0]}-{byte_range[1] - 1}")
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body

    def _borrow(self, parts: SplitResult) -> Task[HttpConnection]:
        origin = _origin_of(parts)
        for idle in [idle for idle in reversed(self._idle) if idle.origin == origin]:
            self._idle.remove(idle)
            if not idle.is_stale:
                return idle
            idle.close()
        proxy = self._proxy_of(origin)
        via = urlsplit(proxy) if proxy else parts
        if proxy and (via.scheme != "http" or not via.hostname):
            raise StoreError(
                f"the environment's proxy for {host_of(origin)} is of the kind '{via.scheme}', only 'http://host:port' "
                "can be used; name the host in NO_PROXY to reach it directly"
            )
        sock = yield from dial(via.hostname or "", _port_of(via), timeout_s=self._connect_timeout_s)
        connection = HttpConnection(sock, origin=origin, silence_s=self._silence_s)
        try:
            if parts.scheme == "https":
                if proxy:
                    yield from _tunnel(connection, host_of(origin), proxy)
                yield from connection.encrypt(self._tls, parts.hostname or "")
        except BaseException:
            connection.close()
            raise
        return connection

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return self._access.tls_context()


def _tunnel(connection: HttpConnection, host: str, proxy: str) -> Task[None]:
    lines = [f"CONNECT {host} HTTP/1.1", f"Host: {host}", *_proxy_headers(proxy)]
    answer = yield from connection.ask(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
    if answer.status != 200:
        raise ConnectionError(f"the proxy {host_of(proxy)} answers {answer.status} {answer.reason}")
    connection.num_answers = 0  # the host itself has not answered yet


def _proxy_headers(proxy: str) -> list[str]:
    parts = urlsplit(proxy)
    if parts.username is None:
        return []
    password = unquote(parts.password or "")
    encoded = b64encode(f"{unquote(parts.username)}:{password}".encode()).decode()
    keep_secret(password)
    keep_secret(encoded)
    return [f"Proxy-Authorization: Basic {encoded}"]


def _origin_of(parts: SplitResult) -> str:
    return f"{parts.scheme}://{parts.netloc}"


def _port_of(parts: SplitResult) -> int:
    return parts.port or _PORTS[parts.scheme]
