"""Read a request's body in chunks, of at most 1 MiB, at no less than a lowest rate.

h11 reads bodies in HTTP chunks, and refuses what RFC 9112 forbids. A body with a length needs no rules, so it goes from
the socket to the storage without h11, which would copy it.
"""

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import cast

import h11

from prep.embedded.wire import RefusalError

_CHUNK_BYTES = 1 << 20
_HTTP_CHUNK_BYTES = 128 << 10  # h11 copies what it reads; in pieces of this size in half the time of 1 MiB
_KEEP_ALIVE_BYTES = 256 << 10  # Go's server skips at most this much of a body
_DRAIN_S = 60.0


class ClientGoneError(Exception):
    """The client closed the connection before it had sent its whole body."""


class RequestBody:
    """A request's body, sent with its length or in HTTP chunks. It can be read once."""

    min_bytes, per_s = 60 << 10, 60.0
    """The slowest body: so many bytes in so many seconds, or all that is left."""

    def __init__(self, connection: socket.socket, http: h11.Connection, request: h11.Request) -> None:
        self._connection, self._http = connection, http
        headers = dict(request.headers)
        self._is_chunked = b"transfer-encoding" in headers
        self._has_ended = False
        self.is_broken = False
        """Whether no more of it can be read, because it breaks the rules or comes too slowly."""
        self.left = 0 if self._is_chunked else int(headers.get(b"content-length", b"0"))
        """Bytes to come; 0 for a body in HTTP chunks, whose length is unknown."""
        self.expects_continue = http.they_are_waiting_for_100_continue
        # Of a body with a length, h11 may hold the beginning; the rest does not go through it.
        self._held = b"" if self._is_chunked else http.trailing_data[0]
        self._window_end_s, self._window_bytes = 0.0, 0

    @property
    def is_long(self) -> bool:
        """Whether Go's server, and so AIS, would close the connection rather than skip the body."""
        return self._is_chunked or self.left > _KEEP_ALIVE_BYTES

    @property
    def behind(self) -> bytes:
        """The bytes that came after the body: the beginning of the next request."""
        return self._http.trailing_data[0] if self._is_chunked else self._held

    def chunks(self) -> Iterator[memoryview]:
        """Yield the bytes, in a buffer that is used again for the next chunk.

        Raises:
            ClientGoneError: If the client goes before the end.
            RefusalError: 400 if the chunks break HTTP's rules; 408 if the body is slower than `min_bytes` in `per_s`.
        """
        if self.expects_continue:
            self.expects_continue = False
            self._connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._window_end_s, self._window_bytes = time.monotonic() + self.per_s, 0
        return self._chunks_of_http() if self._is_chunked else self._chunks_of_length()

    def _chunks_of_length(self) -> Iterator[memoryview]:
        if self._held and self.left:
            first, self._held = self._held[: self.left], self._held[self.left :]
            self.left -= len(first)
            yield memoryview(first)
        buffer = memoryview(bytearray(min(self.left, _CHUNK_BYTES)))
        while self.left:
            num_bytes = self._receive(buffer[: min(self.left, len(buffer))])
            self.left -= num_bytes
            yield buffer[:num_bytes]

    def _chunks_of_http(self) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(_HTTP_CHUNK_BYTES))
        while not self._has_ended:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as exc:
                self.is_broken = True
                raise RefusalError(400, f"the request's body breaks the rules of HTTP chunks: {exc}") from exc
            if event is h11.NEED_DATA:
                self._http.receive_data(cast("bytes", buffer[: self._receive(buffer)]))
            elif isinstance(event, h11.Data):
                yield memoryview(event.data)
            self._has_ended = isinstance(event, h11.EndOfMessage)

    def _receive(self, buffer: memoryview) -> int:
        num_bytes = None
        while num_bytes is None:
            now_s = time.monotonic()
            if now_s >= self._window_end_s:
                if self._window_bytes < self.min_bytes:
                    self.is_broken = True
                    sent = f"{self._window_bytes} bytes in {self.per_s:g} s, expected at least {self.min_bytes}"
                    raise RefusalError(408, f"the client sends its body too slowly: {sent}")
                self._window_end_s, self._window_bytes = now_s + self.per_s, 0
            self._connection.settimeout(self._window_end_s - now_s)
            with contextlib.suppress(TimeoutError):
                num_bytes = self._connection.recv_into(buffer)
        if not num_bytes:
            raise ClientGoneError
        self._window_bytes += num_bytes
        return num_bytes

    def drain(self) -> bool:
        """Read the rest of the body; return whether the connection can serve the next request.

        If the connection were closed instead, the client might never read the answer.
        """
        if self.expects_continue or self.is_broken:  # a client that waits will not send
            return False
        until_s = time.monotonic() + _DRAIN_S
        return all(time.monotonic() < until_s for _ in self.chunks())
