"""Answer GET and HEAD of ``/s3/BUCKET/OBJECT`` as S3 does, also of a range, and list ``/s3/BUCKET``.

DALI's ``s3://`` readers need this, and are timed beside our loader. They ask for an object's size, then for a range of
it for each component of each sample. The node answers as AIS 4.9 does with its feature ``S3-Reverse-Proxy``, at the
proxy's own address. Without that feature AIS redirects a GET, and DALI's client does not follow redirects. Signatures
are not checked, because the node answers on loopback only.
"""

import re
from datetime import UTC, datetime
from email.utils import formatdate
from typing import BinaryIO
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

from dali_pipes.store.checksums import NO_CHECKSUM_TYPE
from dali_pipes.store.http.wire import decimal
from prep.embedded import wire
from prep.embedded.connection import NodeConnection
from prep.embedded.storage import BucketMissingError, ObjectMeta, ObjectMissingError, RefusalError, Storage

_PAGE_SIZE = 1000
# A client may ask for any name; XML 1.0 cannot hold these characters.
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def answer_s3(connection: NodeConnection, storage: Storage, path: str, *, node: str) -> None:
    """Answer a request. ``path`` is unquoted; ``node`` is the target's name in errors, which have S3's codes."""
    try:
        _, _, bucket, name = (*path.split("/", 3), "", "")[:4]
        query = dict(parse_qsl(connection.path.partition("?")[2]))
        is_listing = connection.command == "GET" and not name and query.get("list-type") == "2" and bucket != ""
        if connection.command not in ("GET", "HEAD") or not (name or is_listing):
            raise wire.unsupported(f"{connection.command} {path}")
        wire.check_bucket_name(bucket)
        if is_listing:
            _list(connection, storage, bucket, query)
            return
        wire.check_object_name(name)
        storage.created_ns(bucket)  # so that a missing bucket is not reported as a missing object
        file, meta = storage.open(bucket, name)
        with file:
            _answer_object(connection, file, meta, where=f"ais://{bucket}/{name}")
    except ObjectMissingError as exc:
        _refuse(connection, RefusalError(404, f"t[{node}]: {exc}", "NoSuchKey"))
    except BucketMissingError as exc:
        _refuse(connection, RefusalError(404, f'bucket "{exc.bucket}" does not exist', "NoSuchBucket"))
    except RefusalError as refusal:
        _refuse(connection, refusal)


def _list(connection: NodeConnection, storage: Storage, bucket: str, query: dict[str, str]) -> None:
    """Answer ``ListObjectsV2``. The token of a page is the last name of the page before."""
    if delimiter := query.get("delimiter"):
        raise wire.unsupported(f"listing with delimiter '{delimiter}'")
    limit = min(decimal(query.get("max-keys", "")) or _PAGE_SIZE, _PAGE_SIZE)
    after, prefix = query.get("continuation-token") or query.get("start-after", ""), query.get("prefix", "")
    names = storage.list_names(bucket, prefix=prefix, after=after)
    entries = "".join(
        f"<Contents><Key>{_text(meta.name)}</Key><LastModified>"
        f"{datetime.fromtimestamp(meta.atime_ns / 1e9, UTC):%Y-%m-%dT%H:%M:%S.000Z}</LastModified>"
        f"<ETag>{_text(_etag(meta))}</ETag><Size>{meta.num_bytes}</Size></Contents>"
        for meta in storage.heads(bucket, names[:limit])
    )
    is_cut = len(names) > limit
    token = f"<NextContinuationToken>{_text(names[limit - 1])}</NextContinuationToken>" if is_cut else ""
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>{bucket}</Name>'
        f"<Prefix>{_text(prefix)}</Prefix><KeyCount>{min(len(names), limit)}</KeyCount><MaxKeys>{limit}</MaxKeys>"
        f"<IsTruncated>{str(is_cut).lower()}</IsTruncated>{token}{entries}</ListBucketResult>"
    )
    connection.answer(200, body.encode(), headers=[("Content-Type", "application/xml")])


def _text(text: str) -> str:
    """A text in XML."""
    return escape(_NOT_IN_XML.sub("\ufffd", text), {'"': "&#34;"})


def _etag(meta: ObjectMeta) -> str:
    """Changes with the object's bytes."""
    return f'"v{meta.version}-{meta.checksum}"'


def _answer_object(connection: NodeConnection, file: BinaryIO, meta: ObjectMeta, *, where: str) -> None:
    headers = [("Etag", _etag(meta)), ("Last-Modified", formatdate(meta.atime_ns / 1e9, usegmt=True))]
    if connection.command == "HEAD":
        if meta.checksum_type != NO_CHECKSUM_TYPE:
            headers += [("X-Amz-Meta-Ais-Cksum-Type", meta.checksum_type), ("X-Amz-Meta-Ais-Cksum-Val", meta.checksum)]
        connection.answer(200, headers=headers, length=meta.num_bytes)
        return
    start, stop = connection.wanted_range(meta.num_bytes, what=where)
    connection.answer_file(file, start, stop, meta.num_bytes, headers=headers)


def _refuse(connection: NodeConnection, refusal: RefusalError) -> None:
    code, message = escape(refusal.tcode), _text(refusal.message)
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{message}</Message><Resource></Resource><RequestId></RequestId></Error>"
    ).encode()
    headers = [*refusal.headers, ("Content-Type", "application/xml"), ("X-Content-Type-Options", "nosniff")]
    # The answer to a HEAD has the length of the error, but no body.
    connection.answer(refusal.status, b"" if connection.command == "HEAD" else body, headers=headers, length=len(body))
