"""Speak HTTP/1.1 on one connection, by the standard library's server, with processes of the node's own user.

A request's body must have a ``Content-Length``: no client of the node sends HTTP chunks.

# Note [owner]: TCP carries no user, but the kernel knows the owner of the client's socket: ``/proc/net/tcp`` and
``tcp6`` list all connections of the machine. A socket whose process closed it while the connection still ends has no
inode, and older kernels give it to user 0. So a row without an inode names nobody. The kernel reads a row's user and
inode one after the other; the second of two looks therefore proves that the socket still had its owner at the first.
"""

import contextlib
import json
import re
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from email.utils import formatdate
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, BinaryIO

from dali_pipes.store.http.wire import decimal
from prep.embedded.storage import RefusalError
from prep.embedded.wire import parse_range

_READ_BYTES = 1 << 20
_MAX_JSON_BYTES = 16 << 20
_KEEP_ALIVE_BYTES = 256 << 10  # Go's server skips at most this much of a body
# After an answer that closes the connection, the client may read it for this time.
_LINGER_S = 2.0
_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

Headers = Sequence[tuple[str, str]]
Address = tuple[str, int]
"""An IPv4 address and a port."""


class NodeConnection(BaseHTTPRequestHandler):
    """Handles the requests of one connection, which stays open."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 30.0
    """A connection without a request is closed after this time, as by AIS."""
    body_timeout_s = 60.0
    """A connection is closed if no byte of a body came for this time."""

    has_answered = False
    _waits_to_send = False
    """Whether the client waits for ``100 Continue`` before it sends its body."""
    _unread_bytes = 0

    def dispatch(self) -> None:
        """Answer one request."""
        raise NotImplementedError

    def do_GET(self) -> None:
        """Answer a request of any method."""
        lengths = self.headers.get_all("content-length") or ["0"]
        length = decimal(lengths[0]) if len(lengths) == 1 else None
        if "transfer-encoding" in self.headers:
            self.send_error(411, "a body must have a Content-Length")
            return
        if length is None:
            self.send_error(400, f"Content-Length is '{', '.join(lengths)}'")
            return
        self._unread_bytes, self.has_answered = length, False
        self.dispatch()
        self._waits_to_send = False
        if not self.close_connection:
            # If the connection were closed instead, the client might never read the answer.
            for _ in self.body_chunks():
                pass
        self.connection.settimeout(self.timeout)

    do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = do_GET  # noqa: N815 (the library's names)

    def handle_expect_100(self) -> bool:
        """Wait with ``100 Continue`` until the body is read: the proxy's redirect comes instead of it."""
        self._waits_to_send = True
        return True

    # The request's body

    @property
    def body_is_long(self) -> bool:
        """Whether Go's server, and so AIS, would close the connection rather than skip the body."""
        return self._unread_bytes > _KEEP_ALIVE_BYTES

    def body_chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the body that were not read yet; raises `OSError` if the client goes before the end."""
        if self._waits_to_send:
            self.connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._waits_to_send = False
        self.connection.settimeout(self.body_timeout_s)
        while self._unread_bytes:
            data = self.rfile.read1(min(self._unread_bytes, _READ_BYTES))
            if not data:
                raise ConnectionResetError("the client closed the connection within its request")
            self._unread_bytes -= len(data)
            yield data

    def read_json(self) -> dict[str, Any]:
        if self._unread_bytes > _MAX_JSON_BYTES:
            self.close_connection = True
            raise RefusalError(413, f"a message of more than {_MAX_JSON_BYTES} bytes is too long")
        try:
            message = json.loads(b"".join(self.body_chunks()) or b"{}")
        except (ValueError, RecursionError) as exc:
            raise RefusalError(400, f"failed to unmarshal the request: {exc}") from exc
        if not isinstance(message, dict):
            raise RefusalError(400, "failed to unmarshal the request: it is not a JSON object")
        return message

    # The answer

    def answer(self, status: int, body: bytes = b"", *, headers: Headers = (), length: int | None = -1) -> None:
        """Send an answer. A ``length`` of -1 means that of ``body``; ``None`` sends the body as HTTP chunks."""
        head = self._begin(status, headers, length=len(body) if length == -1 else length)
        if length is None:
            body = (b"%x\r\n%s\r\n" % (len(body), body) if body else b"") + b"0\r\n\r\n"
        self.connection.sendall(head + (b"" if self.command == "HEAD" else body))

    def _begin(self, status: int, headers: Headers, *, length: int | None) -> bytes:
        self.has_answered = True
        self.connection.settimeout(None)
        self.close_connection |= self._waits_to_send
        fields = [
            *headers,
            ("Transfer-Encoding", "chunked") if length is None else ("Content-Length", str(length)),
            ("Date", formatdate(usegmt=True)),
            *([("Connection", "close")] if self.close_connection else []),
        ]
        lines = [f"HTTP/1.1 {status} {_PHRASES.get(status, '')}", *(f"{name}: {text}" for name, text in fields)]
        # As Go's server does: a control character of a value, such as a line's end, becomes a space.
        return "\r\n".join([*(_CONTROL.sub(" ", line).strip() for line in lines), "", ""]).encode()

    def answer_json(self, value: object) -> None:
        body = json.dumps(value).encode() + b"\n"
        self.answer(200, body, headers=[("Content-Type", "application/json; charset=utf-8")])

    def answer_text(self, text: str) -> None:
        """Send status 200 and text; AIS also sends some JSON as text."""
        self.answer(200, text.encode(), headers=[("Content-Type", "text/plain; charset=utf-8")])

    def wanted_range(self, num_bytes: int, *, what: str) -> tuple[int, int]:
        """Return the bytes ``[start, stop)`` that are asked for."""
        wanted = self.headers.get("range")
        return parse_range(wanted, num_bytes, what=what) if wanted else (0, num_bytes)

    def answer_file(self, file: BinaryIO, start: int, stop: int, num_bytes: int, *, headers: Headers) -> None:
        """Send the bytes ``[start, stop)`` of an object of ``num_bytes``: status 206 for a range, 200 otherwise."""
        headers = [*headers, ("Content-Type", "application/octet-stream")]
        is_range = bool(self.headers.get("range"))
        if is_range:
            headers += [("Content-Range", f"bytes {start}-{stop - 1}/{num_bytes}"), ("Accept-Ranges", "bytes")]
        self.connection.sendall(self._begin(206 if is_range else 200, headers, length=stop - start))
        if start < stop:
            self.connection.sendfile(file, start, stop - start)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request that the library, or `do_GET`, cannot read, and close the connection."""
        self.command = self.command or ""
        self.close_connection = True
        text = f"the request breaks the rules of HTTP: {message or _PHRASES.get(code, '')}"
        self.answer(code, text.encode(), headers=[("Content-Type", "text/plain; charset=utf-8")])

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a node's output is its endpoint."""

    def finish(self) -> None:
        """Let the client read the last answer: unread bytes of its request would reset the connection."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            until_s = time.monotonic() + _LINGER_S
            while self.has_answered and (remaining_s := until_s - time.monotonic()) > 0:
                self.connection.settimeout(remaining_s)
                if not self.connection.recv(_READ_BYTES):
                    break
        super().finish()


def peer_uid(client: Address, server: Address) -> int | None:
    """Return the user id of the client's socket of an accepted connection, or ``None`` if nobody owns it any more."""
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        looks = []
        with contextlib.suppress(OSError):
            for _ in range(2):  # Note [owner]
                with Path(path).open() as rows:
                    looks.append(find_uid(rows, client=client, server=server))
        if len(looks) == 2 and looks[1] is not None:
            return looks[0]
    return None


def find_uid(rows: Iterable[str], *, client: Address, server: Address) -> int | None:
    """Return the owner of the client's socket from the rows of ``/proc/net/tcp`` or ``tcp6``.

    ``None`` means that there is no such socket, or that it has no owner any more. A table of IPv6 has the clients that
    connected by an IPv6 socket to an IPv4 address.
    """
    local, remote = _forms(client), _forms(server)
    for row in rows:
        fields = row.split()
        if len(fields) > 9 and fields[1] in local and fields[2] in remote:
            return int(fields[7]) if fields[9] != "0" else None
    return None


def _forms(address: Address) -> tuple[str, str]:
    """How the kernel prints an address: 32-bit words in the byte order of the machine; and mapped into IPv6."""
    ip = socket.inet_aton(address[0])
    words = struct.unpack("=4I", bytes(10) + b"\xff\xff" + ip)
    return f"{words[3]:08X}:{address[1]:04X}", f"{''.join(f'{word:08X}' for word in words)}:{address[1]:04X}"
