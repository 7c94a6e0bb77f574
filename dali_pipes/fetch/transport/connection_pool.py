"""A pool of HTTP connections to the servers of a store, such as a cluster's proxy and its targets."""

import ssl
from base64 import b64encode
from collections.abc import Iterable
from functools import cache, cached_property
from urllib.parse import SplitResult, unquote, urlsplit

from dali_pipes.errors import StoreError, keep_secret
from dali_pipes.fetch.transport.access import HttpAccess
from dali_pipes.fetch.transport.event_loop import Task
from dali_pipes.fetch.transport.http1 import HttpConnection, dial
from dali_pipes.fetch.transport.http_head import Answer

MAX_IDLE_CONNECTIONS = 32
"""Connections that one fetcher keeps open, to all servers together."""

_PORTS = {"http": 80, "https": 443}


def host_of(url: str) -> str:
    """``host:port``, for messages.

    >>> host_of("https://[::1]/v1")
    '[::1]:443'
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"[{host}]:{_port_of(parts)}" if ":" in host else f"{host}:{_port_of(parts)}"


class ConnectionPool:
    """Connections to the servers of a store. Owns the idle ones; a borrowed one belongs to its borrower.

    ``connect_timeout_s`` is for each address of a host; ``silence_s`` limits the pauses in an answer.
    """

    def __init__(self, access: HttpAccess, *, connect_timeout_s: float, silence_s: float) -> None:
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
        self,
        url: str,
        *,
        byte_range: tuple[int, int] | None,
        headers: Iterable[tuple[str, str]] = (),
        body: bytes = b"",
    ) -> Task[tuple[HttpConnection, Answer]]:
        """Ask for a URL, or for bytes ``[start, stop)``: the answer's head, and its connection, to be given back.

        ``headers`` go with the request, beside those of the access. ``body`` is JSON that goes with it: AIStore takes
        the arguments of some questions there.

        Raises:
            OSError, ProtocolError: If nothing answers, or the answer is not HTTP.
            StoreError: If a certificate cannot be read, or the environment's proxy is of a kind that we cannot use.
        """
        request = self._request(url, byte_range, headers, body)
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

    def _request(
        self, url: str, byte_range: tuple[int, int] | None, headers: Iterable[tuple[str, str]], body: bytes
    ) -> bytes:
        parts = urlsplit(url)
        proxy = self._proxy_of(origin_of(parts)) if parts.scheme == "http" else None
        lines = [
            f"GET {url if proxy else url[len(origin_of(parts)) :]} HTTP/1.1",
            f"Host: {parts.netloc}",
            "User-Agent: dali-pipes",
            "Accept: */*",
            "Accept-Encoding: identity",
        ]
        if proxy:
            lines += _proxy_headers(proxy)
        lines += self._access.headers_for(url)
        lines += [f"{name}: {value}" for name, value in headers]
        if byte_range:
            lines.append(f"Range: bytes={byte_range[0]}-{byte_range[1] - 1}")
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body

    def _borrow(self, parts: SplitResult) -> Task[HttpConnection]:
        origin = origin_of(parts)
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


def origin_of(parts: SplitResult) -> str:
    """``http://host:port``, as the URL has it."""
    return f"{parts.scheme}://{parts.netloc}"


def _port_of(parts: SplitResult) -> int:
    return parts.port or _PORTS[parts.scheme]
