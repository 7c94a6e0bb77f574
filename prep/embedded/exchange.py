"""Speak HTTP/1.1 on one connection: read requests by h11's rules, which are those of RFC 9112, and answer."""

import json
import re
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from email.utils import formatdate
from http import HTTPStatus
from socketserver import BaseRequestHandler
from typing import Any, BinaryIO

import h11

from prep.embedded.body import ClientGoneError, RequestBody
from prep.embedded.wire import RefusalError, parse_range

_HEAD_BYTES = 64 << 10
_MAX_JSON_BYTES = 16 << 20
# After a refusal that closes the connection, the client may read it for this time.
_LINGER_S = 2.0
_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

Headers = Sequence[tuple[str, str]]


class Exchange(BaseRequestHandler, ABC):
    """Handles the requests of one connection, which stays open, and answers in AIS's form."""

    request: socket.socket
    idle_s = 30.0
    """A connection is closed after this time without a whole request head, as by AIS."""

    command = ""
    path = ""
    """The request's target, as it was sent: the path, and the query after a ``?``."""
    headers: dict[str, str]
    """The request's headers, with names in lower case; several of one name are joined with commas."""
    body: RequestBody
    has_answered = False
    close_connection = False

    def setup(self) -> None:
        """Send each answer at once."""
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def handle(self) -> None:
        """Answer requests until one of the two sides closes the connection."""
        behind = b""
        while not self.close_connection and self._read_head(behind):
            try:
                self.dispatch()
                self.request.settimeout(None)
                if self.body.drain():
                    behind = self.body.behind
                else:
                    self.close_connection = True
            except RefusalError:  # of the body's rest, after the answer
                self.close_connection = True
            except ClientGoneError:
                return
        if self.has_answered:
            self._linger()

    @abstractmethod
    def dispatch(self) -> None:
        """Answer one request."""

    def _read_head(self, behind: bytes) -> bool:
        """Wait for a request, and return whether there is one; answer here what breaks HTTP's rules."""
        http = h11.Connection(h11.SERVER)  # a new one for each request, because it does not see all bodies
        if behind:
            http.receive_data(behind)
        until_s = time.monotonic() + self.idle_s
        self.has_answered, self.command, self.path = False, "", ""
        try:
            while (event := http.next_event()) is h11.NEED_DATA:
                self.request.settimeout(max(0.001, until_s - time.monotonic()))
                if not (data := self.request.recv(_HEAD_BYTES)):
                    return False
                http.receive_data(data)
            if not isinstance(event, h11.Request):
                return False
            _check_framing(event)
        except TimeoutError:
            return False
        except h11.RemoteProtocolError as exc:
            reason = f"the request breaks the rules of HTTP: {exc}".encode()
            self.refuse_connection(exc.error_status_hint, reason, [("Content-Type", "text/plain; charset=utf-8")])
            return False
        self.request.settimeout(None)
        self.command, self.path = event.method.decode(), event.target.decode()
        self.headers = {}
        for name, value in event.headers:
            key, text = str(name, "ascii"), str(value, "latin-1")
            self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text
        options = {option.strip().lower() for option in self.headers.get("connection", "").split(",")}
        self.close_connection = event.http_version != b"1.1" or "close" in options
        self.body = RequestBody(self.request, http, event)
        return True

    def refuse_connection(self, status: int, body: bytes, headers: Headers) -> None:
        """Send this answer, whatever the client has sent, and close the connection."""
        self.close_connection = True
        self._send(status, body, headers, len(body))
        self._linger()

    def _linger(self) -> None:
        """Let the client read the answer before the connection closes: unread bytes would reset it."""
        try:
            self.request.shutdown(socket.SHUT_WR)
            until_s = time.monotonic() + _LINGER_S
            while (left_s := until_s - time.monotonic()) > 0:
                self.request.settimeout(left_s)
                if not self.request.recv(_HEAD_BYTES):
                    return
        except OSError:
            return

    def read_json(self) -> dict[str, Any]:
        """Return the body as a JSON object, which is empty for an empty body."""
        text = bytearray()
        if self.body.left <= _MAX_JSON_BYTES:
            for chunk in self.body.chunks():
                text += chunk
                if len(text) > _MAX_JSON_BYTES:
                    break
        if self.body.left + len(text) > _MAX_JSON_BYTES:
            self.close_connection = True
            raise RefusalError(413, f"a message of more than {_MAX_JSON_BYTES} bytes is too long")
        try:
            message = json.loads(text or b"{}")
        except (ValueError, RecursionError) as exc:
            raise RefusalError(400, f"failed to unmarshal the request: {exc}") from exc
        if not isinstance(message, dict):
            raise RefusalError(400, "failed to unmarshal the request: it is not a JSON object")
        return message

    def answer(
        self, status: int, body: bytes = b"", *, headers: Headers = (), length: int | None = -1, reason: str = ""
    ) -> None:
        """Send an answer.

        Args:
            status: HTTP's status.
            body: The body, or its beginning.
            headers: Headers beside length, date and the connection's.
            length: -1 means the length of ``body``; ``None`` sends no ``Content-Length``.
            reason: The text behind the status, if not HTTP's own.
        """
        self.has_answered = True
        self.request.settimeout(None)
        if self.body.expects_continue or self.body.is_broken:
            self.close_connection = True
        self._send(status, body, headers, len(body) if length == -1 else length, reason)

    def _send(self, status: int, body: bytes, headers: Headers, length: int | None, reason: str = "") -> None:
        lines = [
            f"HTTP/1.1 {status} {_field(reason or _PHRASES.get(status, ''))}",
            *(f"{key}: {_field(text)}" for key, text in headers),
        ]
        if length is not None:
            lines.append(f"Content-Length: {length}")
        lines.append(f"Date: {formatdate(usegmt=True)}")
        if self.close_connection:
            lines.append("Connection: close")
        self.request.sendall("\r\n".join([*lines, "", ""]).encode() + body)

    def answer_json(self, value: object) -> None:
        """Send status 200 and JSON."""
        body = json.dumps(value).encode() + b"\n"
        self.answer(200, body, headers=[("Content-Type", "application/json; charset=utf-8")])

    def answer_text(self, text: str, *, status: int = 200) -> None:
        """Send text; AIS also sends some JSON as text."""
        self.answer(status, text.encode(), headers=[("Content-Type", "text/plain; charset=utf-8")])

    def wanted_range(self, num_bytes: int, *, what: str) -> tuple[int, int]:
        """Return the requested bytes ``[start, stop)`` of an object: the range in the headers, or all bytes."""
        wanted = self.headers.get("range")
        return parse_range(wanted, num_bytes, what=what) if wanted else (0, num_bytes)

    def answer_file(self, file: BinaryIO, start: int, stop: int, num_bytes: int, *, headers: Headers) -> None:
        """Send the bytes ``[start, stop)`` of an object of ``num_bytes``: status 206 for a range, 200 otherwise."""
        headers = [*headers, ("Content-Type", "application/octet-stream")]
        is_range = bool(self.headers.get("range"))
        if is_range:
            headers += [("Content-Range", f"bytes {start}-{stop - 1}/{num_bytes}"), ("Accept-Ranges", "bytes")]
        self.answer(206 if is_range else 200, headers=headers, length=stop - start)
        if start < stop:
            self.request.sendfile(file, start, stop - start)


def _check_framing(request: h11.Request) -> None:
    """Refuse what h11 lets pass: RFC 9112 leaves it to the server, but two servers might read it in two ways."""
    names = {name for name, _ in request.headers}
    if request.http_version not in (b"1.0", b"1.1"):
        raise h11.RemoteProtocolError("only HTTP/1.0 and HTTP/1.1 are understood", error_status_hint=505)
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version == b"1.0"):
        raise h11.RemoteProtocolError("Transfer-Encoding with Content-Length, or in HTTP/1.0")


def _field(value: str) -> str:
    """A header's value as Go's server sends it: a control character, such as a line's end, becomes a space."""
    return _CONTROL.sub(" ", value).strip()
