"""Speak HTTP/1.1 on one connection: h11 reads requests by the rules of RFC 9112, and frames the answers."""

import json
import re
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from email.utils import formatdate
from http import HTTPStatus
from socketserver import BaseRequestHandler
from typing import Any, BinaryIO, cast

import h11

from prep.embedded.wire import RefusalError, parse_range

_READ_BYTES = 64 << 10  # h11 copies what it reads, and refuses a longer head
_MAX_JSON_BYTES = 16 << 20
_KEEP_ALIVE_BYTES = 256 << 10  # Go's server skips at most this much of a body
_DRAIN_S = 60.0
# After an answer that closes the connection, the client may read it for this time.
_LINGER_S = 2.0
_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

Headers = Sequence[tuple[str, str]]


class ClientGoneError(Exception):
    """The client closed the connection before it had sent its whole request."""


class NodeConnection(BaseRequestHandler, ABC):
    """Handles the requests of one connection, which stays open."""

    request: socket.socket
    idle_s = 30.0
    """A connection is closed after this time without a whole request head, as by AIS."""
    min_bytes, per_s = 60 << 10, 60.0
    """The slowest body: so many bytes in so many seconds, or all that is left."""

    command = ""
    path = ""
    """The request's target, as it was sent: the path, and the query after a ``?``."""
    headers: dict[str, str]
    """The request's headers, with names in lower case; several of one name are joined with commas."""
    has_answered = False
    close_connection = False
    _sends_body = True
    """False for a client that waited for ``100 Continue`` and got its answer instead."""

    def setup(self) -> None:
        """Send each answer at once."""
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._http = h11.Connection(h11.SERVER)

    def handle(self) -> None:
        """Answer requests until one of the two sides closes the connection."""
        while self._read_head():
            try:
                self.dispatch()
                self._drain()
            except RefusalError:  # of the body's rest, after the answer
                break
            except ClientGoneError:
                return
            if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                break
            self._http.start_next_cycle()
        if self.has_answered:
            self._linger()

    @abstractmethod
    def dispatch(self) -> None:
        """Answer one request."""

    def _read_head(self) -> bool:
        """Wait for a request, and return whether there is one; answer here what breaks HTTP's rules."""
        until_s = time.monotonic() + self.idle_s
        self.has_answered, self.command, self.path = False, "", ""
        try:
            event = self._next_event(until_s)
            if not isinstance(event, h11.Request):
                return False
            _check_framing(event)
        except (TimeoutError, ClientGoneError):
            return False
        except h11.RemoteProtocolError as exc:
            reason = f"the request breaks the rules of HTTP: {exc}".encode()
            self.refuse_connection(exc.error_status_hint, reason, [("Content-Type", "text/plain; charset=utf-8")])
            return False
        self.command, self.path = event.method.decode(), event.target.decode()
        self.headers = {}
        for name, value in event.headers:
            key, text = str(name, "ascii"), str(value, "latin-1")
            self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text
        return True

    def _next_event(self, until_s: float) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self.request.settimeout(max(0.001, until_s - time.monotonic()))
            if not (data := self.request.recv(_READ_BYTES)):
                raise ClientGoneError
            self._http.receive_data(data)
        return event

    # The request's body

    @property
    def body_is_long(self) -> bool:
        """Whether Go's server, and so AIS, would close the connection rather than skip the body."""
        return "transfer-encoding" in self.headers or int(self.headers.get("content-length", "0")) > _KEEP_ALIVE_BYTES

    def body_chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the body that were not read yet.

        Raises:
            ClientGoneError: If the client goes before the end.
            RefusalError: 400 if the body breaks HTTP's rules; 408 if it is slower than `min_bytes` in `per_s`.
        """
        if self._http.they_are_waiting_for_100_continue:
            go_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.request.sendall(self._http.send(go_on) or b"")
        until_s, num_bytes = time.monotonic() + self.per_s, 0
        while self._http.their_state is h11.SEND_BODY:
            try:
                event = self._next_event(until_s)
                if time.monotonic() > until_s:
                    raise TimeoutError
            except h11.RemoteProtocolError as exc:
                self.close_connection = True
                raise RefusalError(400, f"the request's body breaks the rules of HTTP: {exc}") from exc
            except TimeoutError as exc:
                self.close_connection = True
                sent = f"{num_bytes} bytes in {self.per_s:g} s, expected at least {self.min_bytes}"
                raise RefusalError(408, f"the client sends its body too slowly: {sent}") from exc
            if isinstance(event, h11.Data):
                yield event.data
                num_bytes += len(event.data)
                if num_bytes >= self.min_bytes:
                    until_s, num_bytes = time.monotonic() + self.per_s, 0

    def read_json(self) -> dict[str, Any]:
        """Return the body as a JSON object, which is empty for an empty body."""
        text = bytearray()
        too_long = int(self.headers.get("content-length", "0")) > _MAX_JSON_BYTES
        if not too_long:
            for chunk in self.body_chunks():
                text += chunk
                if too_long := len(text) > _MAX_JSON_BYTES:
                    break
        if too_long:
            self.close_connection = True
            raise RefusalError(413, f"a message of more than {_MAX_JSON_BYTES} bytes is too long")
        try:
            message = json.loads(text or b"{}")
        except (ValueError, RecursionError) as exc:
            raise RefusalError(400, f"failed to unmarshal the request: {exc}") from exc
        if not isinstance(message, dict):
            raise RefusalError(400, "failed to unmarshal the request: it is not a JSON object")
        return message

    def _drain(self) -> None:
        """Read the rest of the body: if the connection were closed instead, the client might never read the answer."""
        if not self._sends_body:
            return
        until_s = time.monotonic() + _DRAIN_S
        for _ in self.body_chunks():
            if time.monotonic() > until_s:
                return

    # The answer

    def answer(
        self, status: int, body: bytes = b"", *, headers: Headers = (), length: int | None = -1, reason: str = ""
    ) -> None:
        """Send an answer.

        Args:
            status: HTTP's status.
            body: The body.
            headers: Headers beside length, date and the connection's.
            length: -1 means the length of ``body``; ``None`` sends the body in HTTP chunks.
            reason: The text behind the status, if not HTTP's own.
        """
        data = self._begin(status, headers, length=len(body) if length == -1 else length, reason=reason)
        data += (self._http.send(h11.Data(data=body)) or b"") if body else b""
        self.request.sendall(data + (self._http.send(h11.EndOfMessage()) or b""))

    def _begin(self, status: int, headers: Headers, *, length: int | None, reason: str = "") -> bytes:
        """The head of the answer."""
        self.has_answered = True
        self.request.settimeout(None)
        if self._http.they_are_waiting_for_100_continue:
            self._sends_body, self.close_connection = False, True
        fields = [
            *headers,
            *([] if length is None else [("Content-Length", str(length))]),
            ("Date", formatdate(usegmt=True)),
            *([("Connection", "close")] if self.close_connection else []),
        ]
        head = h11.Response(
            status_code=status,
            headers=[(name.encode(), _field(text)) for name, text in fields],
            reason=_field(reason or _PHRASES.get(status, "")),
        )
        return self._http.send(head) or b""

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
        self.request.sendall(self._begin(206 if is_range else 200, headers, length=stop - start))
        if start < stop:
            # h11 asks for the length alone; the bytes do not go through it.
            self._http.send_with_data_passthrough(h11.Data(data=cast("bytes", range(start, stop))))
            self.request.sendfile(file, start, stop - start)
        self._http.send(h11.EndOfMessage())

    def refuse_connection(self, status: int, body: bytes, headers: Headers) -> None:
        """Send this answer, whatever the client has sent, and close the connection."""
        self.close_connection = True
        self.answer(status, body, headers=headers)
        self._linger()

    def _linger(self) -> None:
        """Let the client read the answer before the connection closes: unread bytes would reset it."""
        try:
            self.request.shutdown(socket.SHUT_WR)
            until_s = time.monotonic() + _LINGER_S
            while (remaining_s := until_s - time.monotonic()) > 0:
                self.request.settimeout(remaining_s)
                if not self.request.recv(_READ_BYTES):
                    return
        except OSError:
            return


def _check_framing(request: h11.Request) -> None:
    """Refuse what h11 lets pass: RFC 9112 leaves it to the server, but two servers might read it in two ways."""
    names = {name for name, _ in request.headers}
    if request.http_version not in (b"1.0", b"1.1"):
        raise h11.RemoteProtocolError("only HTTP/1.0 and HTTP/1.1 are understood", error_status_hint=505)
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version == b"1.0"):
        raise h11.RemoteProtocolError("Transfer-Encoding with Content-Length, or in HTTP/1.0")


def _field(value: str) -> bytes:
    """A header's value as Go's server sends it: a control character, such as a line's end, becomes a space."""
    return _CONTROL.sub(" ", value).strip().encode()
