"""One HTTP exchange: a request's body in, in chunks of at most 1 MiB; an answer out, head and body in one send."""

import json
import re
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any

from prep.embedded.wire import RefusalError

_CHUNK_BYTES = 1 << 20
_KEEP_ALIVE_BYTES = 256 << 10  # Go's server, and so AIS, rather ends a connection than read more than this for nothing
_MAX_JSON_BYTES = 16 << 20

Headers = Sequence[tuple[str, str]]


class ClientGoneError(Exception):
    """The client went away in the middle of its body."""


class Body:
    """A request's body, read once, from ``Content-Length`` or chunks; knows what is left of it."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        """Nothing is read yet."""
        self._handler = handler
        self._is_chunked = handler.headers.get("Transfer-Encoding", "").lower() == "chunked"
        length = handler.headers.get("Content-Length", "0")
        self.is_valid = re.fullmatch(r"[0-9]{1,18}", length) is not None  # so below 2**63
        self.left = int(length) if self.is_valid and not self._is_chunked else 0
        self.expects_continue = handler.headers.get("Expect", "").lower() == "100-continue"

    @property
    def is_long(self) -> bool:
        """Whether a real server would close the connection rather than read it for nothing."""
        return self._is_chunked or self.left > _KEEP_ALIVE_BYTES

    def chunks(self) -> Iterator[memoryview]:
        """The bytes, in a buffer that is used again for the next chunk.

        Raises:
            ClientGoneError: It ends early.
        """
        if self.expects_continue:
            self.expects_continue = False
            self._handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        rfile = self._handler.rfile
        buffer = memoryview(bytearray(_CHUNK_BYTES if self._is_chunked else min(self.left, _CHUNK_BYTES)))
        while self._is_chunked or self.left:
            if self._is_chunked and not self.left:
                self.left = self._read_chunk_size()
                if not self.left:
                    self._is_chunked = False
                    return
            num_bytes = rfile.readinto(buffer[: min(self.left, len(buffer))])
            if not num_bytes:
                raise ClientGoneError
            self.left -= num_bytes
            if self._is_chunked and not self.left:
                rfile.readline(3)  # the line end after a chunk's data
            yield buffer[:num_bytes]

    def _read_chunk_size(self) -> int:
        match = re.match(rb"([0-9A-Fa-f]{1,15})\s*(;|$)", self._handler.rfile.readline(1024))
        if match is None:
            raise ClientGoneError
        num_bytes = int(match[1], 16)
        while num_bytes == 0 and self._handler.rfile.readline(1024) not in (b"\r\n", b"\n", b""):
            pass  # trailers
        return num_bytes

    def drain(self) -> None:
        """Read what the client still sends: hung up on, it might never read the answer."""
        if self.expects_continue:  # it waits, and will not send
            self._handler.close_connection = True
            return
        for _ in self.chunks():
            pass


class Exchange(BaseHTTPRequestHandler):
    """A handler that keeps connections open and knows how AIS answers."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    idle_s = 30.0
    """A connection on which no request comes for so long is closed, as AIS closes it."""
    body: Body
    has_answered: bool

    def handle_one_request(self) -> None:
        """Wait for a request's head no longer than ``idle_s``, for anything that follows as long as it takes."""
        self.connection.settimeout(self.idle_s)
        super().handle_one_request()

    def begin(self) -> None:
        """To be called first for each request."""
        self.connection.settimeout(None)
        self.body = Body(self)
        self.has_answered = False

    def read_json(self) -> dict[str, Any]:
        """The body as a JSON object; empty for none."""
        if self.body.left > _MAX_JSON_BYTES:
            raise RefusalError(413, f"a message of {self.body.left} bytes is too long")
        try:
            message = json.loads(b"".join(bytes(chunk) for chunk in self.body.chunks()) or b"{}")
        except (ValueError, RecursionError) as exc:
            raise RefusalError(400, f"failed to unmarshal the request: {exc}") from exc
        if not isinstance(message, dict):
            raise RefusalError(400, "failed to unmarshal the request: no JSON object")
        return message

    def answer(self, status: int, body: bytes = b"", *, headers: Headers = (), length: int | None = -1) -> None:
        """Send it. ``length`` is -1 for that of ``body``; None sends no ``Content-Length``."""
        self.has_answered = True
        self.send_response_only(status)
        for key, value in headers:
            self.send_header(key, value)
        if length is not None:
            self.send_header("Content-Length", str(len(body) if length < 0 else length))
        self.send_header("Date", self.date_time_string())
        if self.close_connection or self.body.expects_continue:
            self.send_header("Connection", "close")
        # end_headers() would send the head apart from the body.
        self._headers_buffer += [b"\r\n", body]  # type: ignore[attr-defined]  # not in typeshed
        self.flush_headers()

    def answer_json(self, value: object) -> None:
        """200 with JSON."""
        body = json.dumps(value).encode() + b"\n"
        self.answer(200, body, headers=[("Content-Type", "application/json; charset=utf-8")])

    def answer_text(self, text: str, *, status: int = 200) -> None:
        """Text, as which AIS sends some JSON too."""
        self.answer(status, text.encode(), headers=[("Content-Type", "text/plain; charset=utf-8")])

    def handle_expect_100(self) -> bool:
        """Say "continue" only when the body is wanted: a redirect spares the client its sending."""
        return True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the client has the answer."""
