"""The HTTP client that reads all bytes: its connections to the servers of one store, and how it reaches them."""

import contextlib
import ipaddress
import os
import ssl
from base64 import b64encode
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import SplitResult, unquote, urlsplit

from dali_pipes.errors import StoreError, keep_secret
from dali_pipes.store.http.rules import MAX_REDIRECTS, REDIRECTS, RedirectError, redirect_target
from dali_pipes.store.http.wire import Answer, HttpConnection, ProtocolError, Stopped
from dali_pipes.store.patience import is_told_to_end

CONNECT_TIMEOUT_S = 3.0
"""The time for each address of a host. An endpoint that does not answer must be reported within ten seconds."""
SILENCE_S = 60.0
"""The longest pause without a byte: a target under load, or one that asks a cloud first, may take long."""
PROMPT_S = 10.0
"""The same for an answer that needs no disk: a listing, a HEAD, a small object."""
MAX_ERROR_BYTES = 64 << 10
"""Bytes of an error's body that are read, to quote it and to keep the connection."""
MAX_IDLE_CONNECTIONS = 64
"""Connections that one client keeps open, to all servers together."""

Fields = Iterable[tuple[str, str]]


class NoAnswerError(Exception):
    """A server did not answer a request for ``url``, or not by HTTP's rules.

    ``is_sent``: the server may have obeyed the request.
    """

    def __init__(self, url: str, cause: Exception, *, is_sent: bool) -> None:
        super().__init__(str(cause))
        self.url, self.cause, self.is_sent = url, cause, is_sent


@dataclass(frozen=True, kw_only=True)
class HttpAccess:
    """The address of a store, and the certificates for it. Requests carry their own signature."""

    endpoint: str
    """Its URL, for messages too."""
    ca: Path | None = None
    """Certificates to trust, a file or a directory; ``None``: those that `requests` trusts."""
    client_cert: tuple[Path, Path] | None = None
    """Certificate and key, for a server that authenticates its clients."""
    skip_verify: bool = False
    ca_variable: ClassVar[str] = "SSL_CERT_FILE"
    """The environment variable that names ``ca``, for messages."""

    @classmethod
    def of_cloud(cls, endpoint: str) -> "HttpAccess":
        """Read AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE, CURL_CA_BUNDLE, SSL_CERT_FILE and SSL_CERT_DIR; the first counts."""
        variables = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR")
        ca = next(filter(None, map(os.environ.get, variables)), None)
        return cls(endpoint=endpoint, ca=Path(ca) if ca else None)

    def headers_for(self, url: str) -> Fields:
        """The fields that belong to each request for a URL."""
        return ()

    def tls_context(self) -> ssl.SSLContext:
        """Make TLS settings as `requests` would; a `StoreError` if a certificate or key cannot be read."""
        from certifi import where
        from urllib3.util.ssl_ import create_urllib3_context

        context = create_urllib3_context()
        context.set_alpn_protocols(["http/1.1"])
        try:
            if self.skip_verify:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            else:
                what, variables = f"certificates from '{self.ca}'", self.ca_variable
                trusted = self.ca or Path(where())
                is_folder = trusted.is_dir()
                context.load_verify_locations(None if is_folder else trusted, trusted if is_folder else None)
            if self.client_cert:
                certificate, key = self.client_cert
                what = f"the client's certificate '{certificate}' with its key '{key}'"
                variables = "AIS_CRT and AIS_CRT_KEY"
                context.load_cert_chain(certificate, key)
        except OSError as exc:
            raise StoreError(f"{self.endpoint}: cannot read {what}: {exc}; check {variables}") from exc
        return context

    def proxy_for(self, url: str) -> str | None:
        """Return the HTTP proxy that the environment names for a URL; ``None`` if the endpoint is on this machine."""
        if is_loopback(self.endpoint) or not any(name.lower().endswith("_proxy") for name in os.environ):
            return None
        # Imported here, because the import takes 0.1 s in each worker process.
        from requests.utils import get_environ_proxies, select_proxy

        proxy: str | None = select_proxy(url, get_environ_proxies(url)) or None
        return proxy if proxy is None or "://" in proxy else f"http://{proxy}"


class HttpClient:
    """Connections to the servers of a store, such as a cluster's proxy and its targets. Any thread may use it.

    Owns the idle connections; that of an answer belongs to the answer until it is closed.
    """

    def __init__(self, access: HttpAccess, *, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        self.access = access
        self._connect_timeout_s = connect_timeout_s
        self._idle: deque[HttpConnection] = deque()
        """Least recently used first. A forked child does not use those of its parent."""
        self._proxy_of = cache(access.proxy_for)  # of an origin

    def close(self) -> None:
        """Close the idle connections. Can be called twice."""
        while self._idle:
            self._idle.pop().close()

    __del__ = close

    def __reduce__(self) -> tuple[Any, ...]:
        return HttpClient, (self.access,)

    def ask(
        self,
        url: str,
        *,
        method: str = "GET",
        headers: Fields = (),
        body: bytes | Iterable[memoryview] = b"",
        silence_s: float = SILENCE_S,
        stopped: Stopped = is_told_to_end,
    ) -> Answer:
        """Send one request; the caller closes the answer.

        ``headers`` go with the request, beside those of the access. A body that is no bytes needs its Content-Length
        there.

        Raises:
            NoAnswerError: If nothing answers, or the answer is not HTTP.
            StoreError: If a certificate cannot be read, or the environment's proxy is of a kind that we cannot use.
            StoppedError: If ``stopped``.
        """
        is_repeatable = isinstance(body, bytes) and method != "POST"
        head = self._head(method, url, headers, body)
        while True:
            connection: HttpConnection | None = None
            is_used = is_sent = False
            try:
                connection = self._borrow(urlsplit(url), silence_s, stopped)
                is_used, is_sent = connection.was_used, True
                connection.is_last = ("Connection", "close") in headers
                _send(connection, head, body)
                answer_head = connection.read_head()
                return Answer(connection, answer_head, url=url, has_body=method != "HEAD", give_back=self._give_back)
            except BaseException as exc:
                if connection is not None:
                    connection.close()
                # A server may close an idle connection just when it is used again: ask on another one.
                if is_used and is_repeatable and isinstance(exc, ConnectionError | ssl.SSLEOFError):
                    continue
                if isinstance(exc, OSError | ProtocolError):
                    raise NoAnswerError(url, exc, is_sent=is_sent) from exc
                raise

    def follow(
        self,
        url: str,
        *,
        method: str = "GET",
        headers: Sequence[tuple[str, str]] = (),
        own_headers: Fields = (),
        body: bytes = b"",
        silence_s: float = SILENCE_S,
        stopped: Stopped = is_told_to_end,
    ) -> Answer:
        """`ask`, and follow redirects. ``own_headers``, such as a signature, go to the URL's own host alone.

        Raises:
            RedirectError: If a redirect must not be followed, or there are too many.
        """
        own_origin = _origin_of(url)
        for _ in range(MAX_REDIRECTS):
            extra = own_headers if _origin_of(url) == own_origin else ()
            answer = self.ask(
                url, method=method, headers=(*headers, *extra), body=body, silence_s=silence_s, stopped=stopped
            )
            # A signature is for one region's host.
            if answer.status not in REDIRECTS or answer.headers.get("X-Amz-Bucket-Region"):
                return answer
            read_end(answer)
            try:
                url = redirect_target(url, answer.headers.get("Location"))
            except RedirectError as exc:
                raise RedirectError(f"{host_of(url)}: {exc}") from None
        raise RedirectError(f"redirected {MAX_REDIRECTS} times")

    def _give_back(self, connection: HttpConnection) -> None:
        if not connection.is_idle or connection.process != os.getpid():
            connection.close()
            return
        self._idle.append(connection)
        if len(self._idle) > MAX_IDLE_CONNECTIONS:
            self._idle.popleft().close()

    def _head(self, method: str, url: str, headers: Fields, body: object) -> bytes:
        origin, parts = _origin_of(url), urlsplit(url)
        proxy = self._proxy_of(origin) if parts.scheme == "http" else None
        fields = {
            "Host": parts.netloc,
            "User-Agent": "dali-pipes",
            "Accept": "*/*",
            "Accept-Encoding": "identity",
            **(_proxy_headers(proxy) if proxy else {}),
            **dict(self.access.headers_for(url)),
            **dict(headers),
        }
        if isinstance(body, bytes) and (body or method in ("PUT", "POST", "PATCH")):
            fields.setdefault("Content-Length", str(len(body)))
        target = url.partition("#")[0][len(origin) :]
        target = f"{origin if proxy else ''}{'' if target.startswith('/') else '/'}{target}"
        return _lines(f"{method} {target} HTTP/1.1", fields)

    def _borrow(self, parts: SplitResult, silence_s: float, stopped: Stopped) -> HttpConnection:
        """An idle connection, else a new one."""
        origin = f"{parts.scheme}://{parts.netloc}"
        for idle in reversed(list(self._idle)):
            if idle.process != os.getpid() or idle.origin != origin:
                continue
            try:
                self._idle.remove(idle)
            except ValueError:
                continue  # another thread took it
            if not idle.is_stale:
                idle.silence_s, idle.stopped = silence_s, stopped
                return idle
            idle.close()
        proxy = self._proxy_of(origin)
        via = urlsplit(proxy) if proxy else parts
        if proxy and (via.scheme != "http" or not via.hostname):
            raise StoreError(
                f"the environment's proxy for {host_of(origin)} is of the kind '{via.scheme}', only 'http://host:port' "
                "can be used; name the host in NO_PROXY to reach it directly"
            )
        connection = HttpConnection(
            (via.hostname or "", _port_of(via)),
            origin=origin,
            connect_timeout_s=self._connect_timeout_s,
            silence_s=silence_s,
            stopped=stopped,
        )
        try:
            if parts.scheme == "https":
                if proxy:
                    _tunnel(connection, host_of(origin), proxy)
                connection.encrypt(self._tls, parts.hostname or "")
        except BaseException:
            connection.close()
            raise
        return connection

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return self.access.tls_context()


def read_end(answer: Answer, max_bytes: int = MAX_ERROR_BYTES) -> bytes:
    """The body of an answer, or its beginning; closes the answer. `NoAnswerError` if the connection breaks."""
    try:
        return answer.read_short(max_bytes)
    except (OSError, ProtocolError) as exc:
        raise NoAnswerError(answer.url, exc, is_sent=True) from exc
    finally:
        answer.close()


def _lines(first: str, fields: dict[str, str]) -> bytes:
    lines = [first, *(f"{name}: {value}" for name, value in fields.items()), "\r\n"]
    return "\r\n".join(lines).encode("latin-1")


def _send(connection: HttpConnection, head: bytes, body: bytes | Iterable[memoryview]) -> None:
    chunks: Iterable[bytes | memoryview] = [head + body] if isinstance(body, bytes) else chain([head], body)
    for chunk in chunks:
        try:
            connection.send(chunk)
        except (BrokenPipeError, ConnectionResetError, ssl.SSLEOFError):
            # The server does not want the rest of the body. Its answer says why: a redirect, or a refusal.
            connection.is_last = True
            return


def _tunnel(connection: HttpConnection, host: str, proxy: str) -> None:
    connection.send(_lines(f"CONNECT {host} HTTP/1.1", {"Host": host, **_proxy_headers(proxy)}))
    head = connection.read_head()
    if head.status != 200:
        raise ConnectionError(f"the proxy {host_of(proxy)} answers {head.status} {head.reason}")
    connection.was_used = False  # the host itself has not answered yet


def _proxy_headers(proxy: str) -> dict[str, str]:
    return {f"Proxy-{name}": value for name, value in without_password(proxy)[1]}


def without_password(url: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """A URL without name and password, and the field of a request's head that has them."""
    parts = urlsplit(url)
    if parts.username is None:
        return url, ()
    password = unquote(parts.password or "")
    encoded = b64encode(f"{unquote(parts.username)}:{password}".encode()).decode()
    for secret in (password, encoded, parts.netloc.rpartition("@")[0], parts.password):
        keep_secret(secret)
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return plain, (("Authorization", f"Basic {encoded}"),)


def is_loopback(endpoint: str) -> bool:
    """Whether an endpoint is on this machine, where no proxy can reach it."""
    with contextlib.suppress(ValueError):
        host = urlsplit(endpoint).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False


def _origin_of(url: str) -> str:
    """``http://host:port``, as the URL has it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def host_of(url: str) -> str:
    """``host:port``, for messages.

    >>> host_of("https://[::1]/v1")
    '[::1]:443'
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"[{host}]:{_port_of(parts)}" if ":" in host else f"{host}:{_port_of(parts)}"


def _port_of(parts: SplitResult) -> int:
    return parts.port or {"http": 80, "https": 443}[parts.scheme]
