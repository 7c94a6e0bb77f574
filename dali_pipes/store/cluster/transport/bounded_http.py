"""Sessions of `requests` whose answers have limits, whoever sends them.

`requests`, `urllib3` and `http.client` read lines, interim answers, trailers and bodies for as long as they come, and
decompress what a server says is compressed. Here an answer that exceeds the limits of
`dali_pipes.store.cluster.transport.http_limits` is a broken transfer. The fetch client has the same limits, in
`dali_pipes.fetch.transport.http1`.
"""

import http.client
import io
import re
import time
from typing import Any

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection

from dali_pipes.store.cluster.transport.http_limits import (
    MAX_OBJECT_BYTES,
    Pace,
    ProtocolError,
    framing,
    max_lines_bytes,
)
from dali_pipes.store.cluster.transport.http_rules import MAX_REDIRECTS, RedirectError, redirect_target

MAX_ANSWER_BYTES = 64 << 20
"""An answer that is read at once and is not an object, such as a page of a listing: at most 10,000 names."""
MAX_REFUSAL_BYTES = 1 << 20
"""The body of an answer other than 2xx."""

_BLOCK_BYTES = 64 << 10
_DEFAULT_WINDOW_S = 60.0


def limit_answers(session: requests.Session, *, max_bytes: int = MAX_ANSWER_BYTES, **options: Any) -> None:
    """Give a session adapters with limits; ``options`` are those of `requests.adapters.HTTPAdapter`.

    Its redirects never lead from https to http. ``max_bytes`` holds for what is read at once and is no
    object.
    """
    session.headers["Accept-Encoding"] = "identity"
    session.max_redirects = MAX_REDIRECTS
    adapter = BoundedAdapter(max_bytes, **options)
    session.mount("http://", adapter)
    session.mount("https://", adapter)


class BoundedAdapter(HTTPAdapter):
    """Sends requests over connections whose answers have limits."""

    __attrs__ = [*HTTPAdapter.__attrs__, "max_bytes"]  # noqa: RUF012 (what HTTPAdapter pickles)

    def __init__(self, max_bytes: int, **options: Any) -> None:
        self.max_bytes = max_bytes
        super().__init__(**options)

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        super().init_poolmanager(*args, **options)
        self.poolmanager.pool_classes_by_scheme = _POOLS

    def proxy_manager_for(self, *args: Any, **options: Any) -> Any:
        manager = super().proxy_manager_for(*args, **options)
        manager.pool_classes_by_scheme = _POOLS
        return manager

    def send(self, request: requests.PreparedRequest, stream: bool = False, **options: Any) -> requests.Response:  # type: ignore[override]
        """Send a request; raises what `requests` raises."""
        answer = super().send(request, stream=stream, **options)
        try:
            if answer.is_redirect:
                try:
                    redirect_target(request.url or "", answer.headers["Location"])
                except RedirectError as exc:
                    raise requests.exceptions.InvalidURL(str(exc), request=request) from None
            if not stream:
                _read_whole(answer, max_bytes=_limit_for(answer, request, self.max_bytes))
        except BaseException:
            answer.close()
            raise
        return answer


def _limit_for(answer: requests.Response, request: requests.PreparedRequest, max_bytes: int) -> int:
    """The most bytes of an answer that is read at once."""
    if answer.status_code >= 300:
        return MAX_REFUSAL_BYTES
    if request.method != "GET" or "/v1/objects/" not in (request.url or "") or "Content-Length" not in answer.headers:
        return max_bytes
    asked = re.fullmatch(r"bytes=(\d+)-(\d+)", str(request.headers.get("Range", "")))
    return int(asked[2]) - int(asked[1]) + 1 if asked else MAX_OBJECT_BYTES


def _read_whole(answer: requests.Response, *, max_bytes: int) -> None:
    """Read the body now, so that `requests` takes it from memory."""
    body = io.BytesIO()
    too_long = requests.RequestException(f"its answer has more than {max_bytes} bytes", request=answer.request)
    if int(answer.headers.get("Content-Length", "0")) > max_bytes and answer.request.method != "HEAD":
        raise too_long
    try:
        for block in answer.raw.stream(_BLOCK_BYTES, decode_content=False):
            body.write(block)
            if body.tell() > max_bytes:
                raise too_long
    except urllib3.exceptions.ReadTimeoutError as exc:
        raise requests.ConnectionError(exc, request=answer.request) from exc
    except urllib3.exceptions.HTTPError as exc:
        raise requests.exceptions.ChunkedEncodingError(exc, request=answer.request) from exc
    body.seek(0)
    answer.raw = body


class _PacedSocket(io.RawIOBase):
    """The bytes of a connection, and the pace at which they come; owns the stream that it reads."""

    def __init__(self, stream: io.RawIOBase, window_s: float) -> None:
        self._stream, self._pace = stream, Pace(window_s)

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def readinto(self, buffer: Any) -> int | None:
        started = time.monotonic()
        num: int | None = self._stream.readinto(buffer)
        self._pace.count(num or 0, waited_s=time.monotonic() - started)
        return num

    def close(self) -> None:
        self._stream.close()
        super().close()


class _BoundedStream(io.BufferedReader):
    """What `http.client` reads an answer from."""

    def __init__(self, raw: io.RawIOBase) -> None:
        super().__init__(raw)
        self._num_bytes = self._num_line_bytes = 0
        self.max_bytes: int | None = None
        """The most bytes of the body; the reader of a longer one gets an error."""

    def readline(self, size: int | None = -1) -> bytes:
        left = max_lines_bytes(self._num_bytes) - self._num_line_bytes
        line = super().readline(left + 1)
        self._num_line_bytes += len(line)
        if len(line) > left:
            raise ProtocolError(f"more than {left} bytes of lines come before or between the bytes of its body")
        if line.endswith(b"\n") and not line.endswith(b"\r\n"):
            raise ProtocolError("a line of its answer ends without a carriage return")
        return line

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:  # the size of a chunk, or a body whose length nobody knows
            raise ProtocolError("a part of its answer has no length")
        data = super().read(size)
        self._count(len(data))
        return data

    def readinto(self, buffer: Any) -> int:
        num = super().readinto(buffer)
        self._count(num)
        return num

    def read1(self, size: int = -1) -> bytes:
        data = super().read1(size)
        self._count(len(data))
        return data

    def _count(self, num: int) -> None:
        self._num_bytes += num
        if self.max_bytes is not None and self._num_bytes > self.max_bytes:
            raise ProtocolError(f"the body of an answer other than 2xx has more than {self.max_bytes} bytes")


class _BoundedResponse(http.client.HTTPResponse):
    """An answer that is read through a `_BoundedStream`, and is not compressed."""

    fp: io.BufferedReader

    def __init__(self, sock: Any, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp = self._bounded = _BoundedStream(_PacedSocket(self.fp.detach(), sock.gettimeout() or _DEFAULT_WINDOW_S))

    def begin(self) -> None:
        super().begin()
        fields = (self.headers.get_all(name) for name in ("Content-Length", "Transfer-Encoding"))
        length, coding = (None if values is None else ", ".join(values) for values in fields)
        framing(length, coding, is_1_1=self.version == 11)
        if self.headers.get("Content-Encoding", "identity").lower() != "identity" and self.length != 0:
            raise ProtocolError("its answer is compressed, though it was asked for the bytes as they are")
        if not 200 <= self.status < 300:
            self._bounded.max_bytes = MAX_REFUSAL_BYTES


class _HttpConnection(HTTPConnection):
    response_class = _BoundedResponse


class _HttpsConnection(HTTPSConnection):
    response_class = _BoundedResponse


class _HttpPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _HttpConnection


class _HttpsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _HttpsConnection


_POOLS = {"http": _HttpPool, "https": _HttpsPool}
