"""Valid HTTP answers, in every form that a server may choose."""

import random
from collections.abc import Sequence

import msgspec

BODY = random.Random(3).randbytes(1500)
LOCATION = "/v1/objects/b/o?elsewhere=1"


def object_answers() -> Sequence[bytes]:
    """Answers to a GET of an object whose bytes are `BODY`: the object, redirects, a server that is busy."""
    length = b"Content-Length: %d\r\n" % len(BODY)
    chunks = b"".join(b"%x;a=b\r\n%b\r\n" % (len(piece), piece) for piece in (BODY[:700], BODY[700:1499], BODY[1499:]))
    chunked = b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\nX-Trailer: y\r\n\r\n"
    checksum = b"Ais-Checksum-Type: md5\r\nAis-Checksum-Value: 0123456789abcdef0123456789abcdef\r\nAis-Version: 7\r\n"
    error = b'{"status": 503, "message": "ais://b/o is busy", "method": "GET"}'
    return [
        b"HTTP/1.1 200 OK\r\n" + length + b"\r\n" + BODY,
        b"HTTP/1.1 200 OK\r\nDate: Sun, 22 Nov 2026 14:24:02 GMT\r\nConnection: close\r\n" + length + b"\r\n" + BODY,
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\n" + chunked,
        b"HTTP/1.1 200 OK\r\n" + chunked,
        b"HTTP/1.1 200 OK\r\n\r\n" + BODY,
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nX: folded\r\n over lines\r\n" + length + b"\r\n" + BODY,
        b"HTTP/1.1 307 Temporary Redirect\r\nLocation: " + LOCATION.encode() + b"\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 301 Moved\r\nLocation: " + LOCATION.encode() + b"\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n%b" % (len(error), error),
        b"HTTP/1.1 503 Busy\r\nHdr-Error: starting\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 429 Slow down\r\nRetry-After: 0\r\nContent-Range: bytes */1500\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + checksum.replace(b"md5", b"unknown") + length + b"\r\n" + BODY,
    ]


def listing_answers() -> Sequence[bytes]:
    """Answers to a listing with `entry_names`, in one page."""
    entries = [{"n": name, "s": 5, "cs": "0123456789abcdef"} for name in entry_names()]
    body = msgspec.msgpack.encode({"UUID": "u", "ContinuationToken": "", "Flags": 0, "Entries": entries})
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/msgpack\r\n"
    return [
        head + b"Content-Length: %d\r\n\r\n" % len(body) + body,
        head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body),
    ]


def entry_names() -> Sequence[str]:
    return [f"a/{number:04d}.tar" for number in range(9)]
