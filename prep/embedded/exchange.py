"""Read a request's body in chunks of at most 1 MiB, and send an answer's head and body by one call."""

import json
import re
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any, BinaryIO

from prep.embedded.wire import RefusalError, parse_range

_CHUNK_BYTES = 1 << 20
_KEEP_ALIVE_BYTES = 256 << 10  # Go's server skips at most this much of a body
_MAX_JSON_BYTES = 16 << 20

Headers = Sequence[tuple[str, str]]


class ClientGoneError(Exception):
    """The client closed the connection before it had sent its whole body."""


class RequestBody:
    """A request's body, sent with its length or in HTTP chunks. It can be read once."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        self._handler = handler
        self._is_chunked = handler.headers.get("Transfer-Encoding", "").lower() == "chunked"
        length = handler.headers.get("Content-Length", "0")
        self.is_valid = re.fullmatch(r"[0-9]{1,18}", length) is not None  # so below 2**63
        self.left = int(length) if self.is_valid and not self._is_chunked else 0
        self.expects_continue = handler.headers.get("Expect", "").lower() == "100-continue"

    @property
    def is_long(self) -> bool:
        """Whether Go's server, and so AIS, would close the connection rather than skip the body."""
        return self._is_chunked or self.left > _KEEP_ALIVE_BYTES

    def chunks(self) -> Iterator[memoryview]:
        """Yield the bytes, in a buffer that is used again for the next chunk; raises `ClientGoneError`."""
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
        """Read the rest of the body: if the connection were closed instead, the client might never read the answer."""
        if self.expects_continue:  # the client waits, and will not send
            self._handler.close_connection = True
            return
        for _ in self.chunks():
            pass


class Exchange(BaseHTTPRequestHandler):
    """Handles the requests of one connection, which stays open, and answers in AIS's form."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    idle_s = 30.0
    """A connection is closed after this time without a request, as by AIS."""
    body: RequestBody
    has_answered: bool

    def handle_one_request(self) -> None:
        """Wait at most ``idle_s`` for a request's head; there is no limit for its body."""
        self.connection.settimeout(self.idle_s)
        super().handle_one_request()

    def begin(self) -> None:
        """Prepare for a request; called first for each request."""
        self.connection.settimeout(None)
        self.body = RequestBody(self)
        self.has_answered = False

    def read_json(self) -> dict[str, Any]:
        """Return the body as a JSON object, which is empty for an empty body."""
        if self.body.left > _MAX_JSON_BYTES:
            raise RefusalError(413, f"a message of {self.body.left} bytes is too long")
        try:
            message = json.loads(b"".join(bytes(chunk) for chunk in self.body.chunks()) or b"{}")
        except (ValueError, RecursionError) as exc:
            raise RefusalError(400, f"failed to unmarshal the request: {exc}") from exc
        if not isinstance(message, dict):
            raise RefusalError(400, "failed to unmarshal the request: it is not a JSON object")
        return message

    def answer(self, status: int, body: bytes = b"", *, headers: Headers = (), length: int | None = -1) -> None:
        """Send an answer. A ``length`` of -1 means the length of ``body``; ``None`` sends no ``Content-Length``."""
        self.has_answered = True
        self.send_response_only(status)
        for key, value in headers:
            self.send_header(key, value)
        if length is not None:
            self.send_header("Content-Length", str(len(body) if length < 0 else length))
        self.send_header("Date", self.date_time_string())
        if self.close_connection or self.body.expects_continue:
            self.send_header("Connection", "close")
        # end_headers() would send the head separately.
        self._headers_buffer += [b"\r\n", body]  # type: ignore[attr-defined]  # not in typeshed
        self.flush_headers()

    def answer_json(self, value: object) -> None:
        """Send status 200 and JSON."""
        body = json.dumps(value).encode() + b"\n"
        self.answer(200, body, headers=[("Content-Type", "application/json; charset=utf-8")])

    def answer_text(self, text: str, *, status: int = 200) -> None:
        """Send text; AIS also sends some JSON as text."""
        self.answer(status, text.encode(), headers=[("Content-Type", "text/plain; charset=utf-8")])

    def wanted_range(self, num_bytes: int, *, what: str) -> tuple[int, int]:
        """Return the requested bytes ``[start, stop)`` of an object: the range in the headers, or all bytes."""
        wanted = self.headers.get("Range")
        return parse_range(wanted, num_bytes, what=what) if wanted else (0, num_bytes)

    def answer_file(self, file: BinaryIO, start: int, stop: int, num_bytes: int, *, headers: Headers) -> None:
        """Send the bytes ``[start, stop)`` of an object of ``num_bytes``: status 206 for a range, 200 otherwise."""
        headers = [*headers, ("Content-Type", "application/octet-stream")]
        is_range = bool(self.headers.get("Range"))
        if is_range:
            headers += [("Content-Range", f"bytes {start}-{stop - 1}/{num_bytes}"), ("Accept-Ranges", "bytes")]
        self.answer(206 if is_range else 200, headers=headers, length=stop - start)
        if start < stop:
            self.connection.sendfile(file, start, stop - start)

    def handle_expect_100(self) -> bool:
        """Send no "continue" yet: `RequestBody` sends it when the body is read. A redirect does not read the body."""
        return True

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the client gets the answer."""
