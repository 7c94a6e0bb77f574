"""Ranged reads of objects in S3's words: GET and HEAD of ``/s3/BUCKET/OBJECT`` in, S3's headers or XML errors out.

As much as DALI's ``s3://`` readers ask of a server, which is how those are timed against ours: they ask for an object's
size, then for a range of it for each component of each sample. It answers as AIS 4.9 does with its feature
``S3-Reverse-Proxy`` on, at the proxy's own address; without that feature AIS redirects a GET, and DALI's client follows
no redirect. Who signed a request, and how, is not looked at: the node answers on loopback only, and whoever reaches it.
"""

import re
from email.utils import formatdate
from xml.sax.saxutils import escape

from dali_pipes.store.checksums import NO_CHECKSUM_TYPE
from prep.embedded import wire
from prep.embedded.exchange import Exchange
from prep.embedded.storage import BucketMissingError, ObjectMeta, ObjectMissingError, Storage
from prep.embedded.wire import RefusalError

__all__ = ["answer_s3"]

# The codes that S3's clients know, for what AIS names otherwise.
_NO_SUCH_BUCKET, _NO_SUCH_KEY = "NoSuchBucket", "NoSuchKey"
# A client may ask for a name of any letters; XML 1.0 holds no others than these.
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def answer_s3(exchange: Exchange, storage: Storage, path: str, *, node: str) -> None:
    """Answer the request that ``exchange`` has read.

    Args:
        exchange: Its command and headers are looked at, its body is not.
        storage: What is served.
        path: Of the request, unquoted, from ``/s3`` on; without the query.
        node: The target's name, for messages.
    """
    try:
        _answer_object(exchange, storage, path, node=node)
    except RefusalError as refusal:
        _refuse(exchange, refusal)
    except BucketMissingError as exc:
        _refuse(exchange, RefusalError(404, f'bucket "{exc.args[0]}" does not exist', _NO_SUCH_BUCKET))


def _answer_object(exchange: Exchange, storage: Storage, path: str, *, node: str) -> None:
    _, _, bucket, name = (*path.split("/", 3), "", "")[:4]
    if exchange.command not in ("GET", "HEAD") or not name:
        raise wire.unsupported(f"{exchange.command} {path}")
    wire.check_bucket_name(bucket)
    wire.check_object_name(name)
    storage.bucket_info(bucket)  # else no object could be told from no bucket
    try:
        file, meta = storage.open(bucket, name)
    except ObjectMissingError as exc:
        raise RefusalError(404, f"t[{node}]: ais://{bucket}/{name} does not exist", _NO_SUCH_KEY) from exc
    with file:
        headers = [
            ("Etag", f'"v{meta.version}-{meta.checksum}"'),
            ("Last-Modified", formatdate(meta.atime_ns / 1e9, usegmt=True)),
        ]
        if exchange.command == "HEAD":
            exchange.answer(200, headers=[*headers, *_checksum_headers(meta)], length=meta.num_bytes)
            return
        start, stop, status = 0, meta.num_bytes, 200
        headers.append(("Content-Type", "application/octet-stream"))
        if wanted := exchange.headers.get("Range"):
            start, stop = wire.parse_range(wanted, meta.num_bytes, what=f"ais://{bucket}/{name}")
            headers += [("Content-Range", f"bytes {start}-{stop - 1}/{meta.num_bytes}"), ("Accept-Ranges", "bytes")]
            status = 206
        exchange.answer(status, headers=headers, length=stop - start)
        if start < stop:
            exchange.connection.sendfile(file, start, stop - start)


def _checksum_headers(meta: ObjectMeta) -> list[tuple[str, str]]:
    if meta.checksum_type == NO_CHECKSUM_TYPE:
        return []
    return [("X-Amz-Meta-Ais-Cksum-Type", meta.checksum_type), ("X-Amz-Meta-Ais-Cksum-Val", meta.checksum)]


def _refuse(exchange: Exchange, refusal: RefusalError) -> None:
    code, message = escape(refusal.tcode), escape(_NOT_IN_XML.sub("\ufffd", refusal.message), {'"': "&#34;"})
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{message}</Message><Resource></Resource><RequestId></RequestId></Error>"
    ).encode()
    headers = [*refusal.headers, ("Content-Type", "application/xml"), ("X-Content-Type-Options", "nosniff")]
    # A HEAD says how long the error is that it leaves out.
    exchange.answer(refusal.status, b"" if exchange.command == "HEAD" else body, headers=headers, length=len(body))
