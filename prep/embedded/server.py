"""Answer AIStore's HTTP API on loopback, from a folder.

One process is a whole cluster: proxy and target at one address. As in a cluster, the proxy redirects a request for an
object (301 for GET, 307 for the rest) to the target's URL, with ``pid`` in its query; a request with ``pid`` is for the
target. So clients get the same redirects as from a cluster.

# Note [threads]: each connection and each dSort job has a thread. They share only the `Storage`, which is thread-safe.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any, BinaryIO
from urllib.parse import parse_qsl, unquote

from dali_pipes.store.checksums import NO_CHECKSUM_TYPE, new_checksum
from dali_pipes.store.cluster.embedded_node import ALLOW_ETL
from prep.embedded import wire
from prep.embedded.dsort import SortJob, read_status
from prep.embedded.etl import Etls
from prep.embedded.exchange import ClientGoneError, Exchange
from prep.embedded.s3 import answer_s3
from prep.embedded.sortspec import SortSpec
from prep.embedded.storage import (
    BucketExistsError,
    BucketMissingError,
    BucketProps,
    ChecksumMismatchError,
    ObjectMissingError,
    Storage,
)
from prep.embedded.wire import RefusalError

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_RANGE_CHUNK_BYTES = 1 << 20
_OBJECT_QUERY = {"provider", "pid", "utm", "props", "latest", "uuid", "etl_name"}


class NodeServer(ThreadingHTTPServer):
    """Serves a storage, on 127.0.0.1 only.

    Args:
        storage: The objects.
        port: 0 takes a free one.
        allow_etl: Let clients run transforms, which are code, by ETL.
        before_request: Called before each request is answered, in the connection's thread; it may wait. The request has
            its ``command``, ``path`` and ``headers``; its body is not read yet.
    """

    daemon_threads = True
    request_queue_size = 128
    etls: Etls | None = None  # a class attribute, because `server_close` needs it even if binding fails

    def __init__(
        self,
        storage: Storage,
        *,
        port: int,
        allow_etl: bool = False,
        before_request: Callable[[BaseHTTPRequestHandler], None] | None = None,
    ) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.storage = storage
        self.before_request = before_request
        self.port = int(self.server_address[1])
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.proxy_id, self.target_id = f"embp{self.port}", f"embt{self.port}"
        self.started_ns = time.time_ns()
        self.uuid = os.urandom(6).hex()
        if allow_etl:
            self.etls = Etls(storage, endpoint=self.endpoint, node=self.target_id)

    def server_close(self) -> None:
        """Stop listening, and end the transforms."""
        super().server_close()
        if self.etls is not None:
            self.etls.close()

    def server_bind(self) -> None:
        """Bind, without looking up the machine's name as ``HTTPServer`` does."""
        TCPServer.server_bind(self)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that closed the connection; print the traceback of any other error, which is a bug."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # socketserver's own types


class _Handler(Exchange):
    server: NodeServer

    def _dispatch(self) -> None:
        if self.server.before_request is not None:
            self.server.before_request(self)
        self.begin()
        self._is_target = False
        try:
            try:
                self._route()
            except RefusalError as refusal:
                self._refuse(refusal)
            except BucketMissingError as exc:
                self._refuse(wire.bucket_missing(exc.args[0]))
            except OSError as exc:
                if isinstance(exc, ConnectionError) or self.has_answered:
                    raise
                # 507, because the SDK would retry after 500 for a minute and a half.
                message = f"{self.command} {self._path}: the node cannot use its folder: {exc.strerror}"
                self._refuse(RefusalError(507, message, "ErrCapExceeded"))
            self.body.drain()
        except ClientGoneError:
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = do_OPTIONS = _dispatch  # noqa: N815  # http.server's names

    def _route(self) -> None:
        if not self.body.is_valid:
            self.close_connection = True
            raise RefusalError(400, "invalid Content-Length")
        host = self.headers.get("Host", "")
        if not host and self.request_version == "HTTP/1.1":
            raise RefusalError(400, "missing required Host header")
        if "Origin" in self.headers or "Sec-Fetch-Site" in self.headers:
            raise RefusalError(403, "the embedded node does not answer web pages")
        if host and host.rsplit(":", 1)[0].strip("[]") not in _LOOPBACK:
            raise RefusalError(403, f"the embedded node answers on loopback only, not as '{host}'")
        raw_path, _, raw_query = self.path.partition("?")
        self._query = dict(parse_qsl(raw_query, keep_blank_values=True))
        try:
            self._path = unquote(raw_path, errors="strict")
        except UnicodeDecodeError as exc:
            raise RefusalError(400, f"invalid request URI: '{self.command} {raw_path}' is not UTF-8") from exc
        provider, namespace = self._query.get("provider", ""), self._query.get("namespace", "")
        if provider not in ("", "ais") or namespace:
            raise wire.unsupported(f"provider '{provider}', namespace '{namespace}'")
        match self.command, self._path.split("/", 4)[1:]:
            case "GET", ["v1", "health"]:
                uptime = str(time.time_ns() - self.server.started_ns)
                self.answer(200, headers=[("Ais-Cluster-Uptime", uptime), ("Ais-Node-Uptime", uptime)])
            case "GET", ["v1", "daemon"] if self._query.get("what") == "smap":
                self.answer_json(
                    wire.cluster_map(
                        port=self.server.port,
                        proxy_id=self.server.proxy_id,
                        target_id=self.server.target_id,
                        uuid=self.server.uuid,
                        created=str(datetime.fromtimestamp(self.server.started_ns / 1e9, UTC)),
                    )
                )
            case "GET", ["v1", "buckets"]:
                self.answer_json([wire.bucket_json(name) for name in self.server.storage.list_buckets()])
            case "POST", ["v1", "sort"]:
                spec = SortSpec.parse(self.read_json())
                job = SortJob(spec, self.server.storage, self.server.target_id, endpoint=self.server.endpoint)
                self.answer_text(job.start())
            case "GET", ["v1", "sort"] if (job_id := self._query.get("uuid")) is not None:
                status = read_status(self.server.storage, job_id)
                if status is None:
                    raise RefusalError(404, f"[dsort] {job_id} does not exist")
                self.answer_text(json.dumps(status))
            case "DELETE", ["v1", "sort", "abort"]:
                self._abort_sort(self._query.get("uuid", ""))
            case _, ["v1", "etl", *rest]:
                self._etl(rest)
            case "GET", ["v1", "cluster"] if self._query.get("what") == "qryxstats" and self.server.etls is not None:
                self.answer_json(self._etls().snapshots(wire.field_of(self.read_json(), "ID", str)))
            case _, ["v1", "buckets", bucket]:
                wire.check_bucket_name(bucket)
                self._bucket(bucket)
            case "GET" | "HEAD" | "PUT" | "DELETE", ["v1", "objects", bucket, name]:
                wire.check_bucket_name(bucket)
                self._object(bucket, name)
            case _, ["s3", *_]:
                answer_s3(self, self.server.storage, self._path, node=self.server.target_id)
            case _:
                raise wire.unsupported(f"{self.command} {self._path}")

    # Buckets

    def _bucket(self, bucket: str) -> None:
        storage = self.server.storage
        if self.command == "HEAD":
            self._bucket_head(bucket)
            return
        message = self.read_json()

        def value() -> dict[str, Any]:
            """Read only for the actions below: others may hold a value of another type."""
            return wire.field_of(message, "value", dict)

        match self.command, message.get("action"):
            case "POST", "create-bck":
                try:
                    storage.create_bucket(bucket, wire.parse_bucket_props(value(), BucketProps()))
                except BucketExistsError as exc:
                    tcode = "ErrBucketAlreadyExists"
                    raise RefusalError(409, f'bucket "ais://{bucket}" already exists', tcode) from exc
                self.answer(200)
            case "PATCH", "set-bprops":
                storage.set_bucket_props(bucket, wire.parse_bucket_props(value(), storage.bucket_props(bucket)))
                self.answer(200)
            case "DELETE", "destroy-bck":
                storage.destroy_bucket(bucket)
                self.answer(200)
            case "GET", "list":
                self._list(bucket, value())
            case "GET", "summary-bck":
                storage.bucket_info(bucket)
                if not value().get("uuid"):  # a cluster starts a job here; the client asks again with the job's id
                    self.answer_text(os.urandom(5).hex(), status=202)
                else:
                    self.answer_text(json.dumps([self._summary(bucket, wire.field_of(value(), "prefix", str))]))
            case "POST", "etl-listrange" if self.server.etls is not None:
                self.answer_text(self._etls().start_job(bucket, value()))
            case _, action:
                raise wire.unsupported(f"{self.command} {self._path}, action '{action}'")

    def _bucket_head(self, bucket: str) -> None:
        bucket_id, created_ns = self.server.storage.bucket_info(bucket)
        props = self.server.storage.bucket_props(bucket)
        headers = [("Ais-Bucket-Props", wire.bucket_props(props, bucket_id=bucket_id, created_ns=created_ns))]
        if "bsumm_remote" not in self._query:
            self.answer(200, headers=headers, length=None)
        elif "uuid" not in self._query:
            self.answer(202, headers=[*headers, ("Ais-Xaction-Id", os.urandom(5).hex())], length=None)
        else:
            headers.append(("Ais-Bucket-Summ", json.dumps(self._summary(bucket, ""))))
            self.answer(200, headers=[*headers, ("Ais-Xaction-Id", self._query["uuid"])], length=None)

    def _summary(self, bucket: str, prefix: str) -> dict[str, Any]:
        storage = self.server.storage
        sizes = [meta.num_bytes for meta in storage.heads(bucket, storage.list_names(bucket, prefix=prefix))]
        return wire.bucket_summary(bucket, sizes, disk_bytes=storage.disk_bytes())

    def _list(self, bucket: str, message: dict[str, Any]) -> None:
        storage, flags = self.server.storage, wire.field_of(message, "flags", int)
        if flags & ~wire.LIST_FLAGS:
            raise wire.unsupported(f"listing with flags {flags}")
        props = frozenset(filter(None, (wire.field_of(message, "props", str) or "name,size").split(",")))
        if flags & 16:
            props = frozenset({"name"})
        elif flags & 32:
            props = frozenset({"name", "size"})
        after = wire.field_of(message, "continuation_token", str) or wire.field_of(message, "start_after", str)
        limit = wire.field_of(message, "pagesize", int) or wire.PAGE_SIZE
        names = storage.list_names(bucket, prefix=wire.field_of(message, "prefix", str), after=after)[:limit]
        # AIS gives a token with every full page; if nothing follows, the next page is empty.
        page = wire.listing(
            storage.heads(bucket, names),
            props=props,
            uuid=wire.field_of(message, "uuid", str) or os.urandom(5).hex(),
            token=names[-1] if len(names) == limit else "",
            atime=f"{datetime.now(UTC):%d %b %y %H:%M UTC}",
            location=self._location(),
        )
        self.answer(200, page, headers=[("Content-Type", "application/msgpack")])

    # Objects

    def _object(self, bucket: str, name: str) -> None:
        wire.check_object_name(name)
        if "etl_name" in self._query and self._etls() and self.command != "GET":
            raise wire.unsupported(f"{self.command} of an object through ETL")
        if unknown := self._query.keys() - _OBJECT_QUERY:
            raise wire.unsupported(f"{self.command} of an object with {', '.join(sorted(unknown))}")
        props = self.server.storage.bucket_props(bucket)
        if "pid" not in self._query:
            self._redirect()
            return
        self._is_target = True
        try:
            match self.command:
                case "GET":
                    self._get(bucket, name, props)
                case "HEAD":
                    self._head(bucket, name)
                case "PUT":
                    self._put(bucket, name)
                case _:
                    self.server.storage.delete(bucket, name)
                    self.answer(200)
        except ObjectMissingError as exc:
            if self.command == "DELETE":
                raise RefusalError(404, f"ais://{bucket}/{name} doesn't exist") from exc
            message = f"t[{self.server.target_id}]: ais://{bucket}/{name} does not exist"
            raise RefusalError(404, message, "ErrNotFound") from exc

    def _redirect(self) -> None:
        path, _, query = self.path.partition("?")
        pid = f"pid={self.server.proxy_id}&utm={time.time_ns():x}"
        location = f"{self.server.endpoint}{path}?{query}{'&' if query else ''}{pid}"
        body = b""
        headers = [("Location", location)]
        if self.command in ("GET", "HEAD"):
            headers.insert(0, ("Content-Type", "text/html; charset=utf-8"))
        if self.command == "GET":
            body = f'<a href="{escape(location)}">Moved Permanently</a>.\n\n'.encode()
        if self.body.is_long:
            self.close_connection = True
        length = None if self.command == "HEAD" else len(body)
        self.answer(301 if self.command == "GET" else 307, body, headers=headers, length=length)

    def _get(self, bucket: str, name: str, props: BucketProps) -> None:
        if etl := self._query.get("etl_name"):
            # As AIS: the whole result, whatever range is asked for, in chunks, without length and checksum.
            data = self._etls().transform(etl, bucket, name)
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
            self.answer(200, body, headers=[("Transfer-Encoding", "chunked")], length=None)
            return
        file, meta = self.server.storage.open(bucket, name)
        with file:
            start, stop = self.wanted_range(meta.num_bytes, what=f"ais://{bucket}/{name}")
            # A range comes with the checksum of the whole object, unless the bucket is set to give the range's own.
            if props.read_range and props.checksum_type != NO_CHECKSUM_TYPE and stop - start < meta.num_bytes:
                value = _range_checksum(file, start, stop, checksum_type=props.checksum_type)
                meta = replace(meta, checksum=value, checksum_type=props.checksum_type)
            self.answer_file(file, start, stop, meta.num_bytes, headers=wire.object_headers(meta))

    def _head(self, bucket: str, name: str) -> None:
        meta = self.server.storage.head(bucket, name)
        known = {
            "checksum": wire.checksum_headers(meta),
            "atime": [("Ais-Atime", str(meta.atime_ns))],
            "version": [("Ais-Version", str(meta.version))],
            "copies": [("Ais-Mirror-Copies", "1"), ("Ais-Mirror-Paths", "[/]")],
            "location": [("Ais-Location", self._location())],
            **{prop: [] for prop in ("name", "size", "custom", "ec", "chunked", "etag", "last-modified", "")},
        }
        headers = [("Ais-Present", "true")]
        for prop in self._query.get("props", "checksum,atime,version,copies,location").split(","):
            if prop not in known:
                raise RefusalError(400, f'invalid property "{prop}" in props list')
            headers += known[prop]
        if "props" not in self._query:
            headers += [("Ais-Name", name), ("Ais-Bucket-Name", bucket), ("Ais-Bucket-Provider", "ais")]
        self.answer(200, headers=headers, length=meta.num_bytes)

    def _location(self) -> str:
        return f"t[{self.server.target_id}]:mp[/]"

    def _put(self, bucket: str, name: str) -> None:
        checksum_type = self.headers.get("Ais-Checksum-Type", NO_CHECKSUM_TYPE)
        wire.check_checksum_type(checksum_type)  # AIS closes the connection without an answer
        # A value without a type is ignored, as by AIS.
        checksum = self.headers.get("Ais-Checksum-Value", "") if checksum_type != NO_CHECKSUM_TYPE else ""
        chunks = self.body.chunks()
        try:
            meta = self.server.storage.write(bucket, name, chunks, checksum=checksum, checksum_type=checksum_type)
        except ChecksumMismatchError as exc:
            _, given, found = exc.args
            message = f"BAD DATA CHECKSUM: {checksum_type}({given} != {found}) (context: ais://{bucket}/{name})"
            raise RefusalError(500, message, "ErrBadCksum") from exc
        self.answer(200, headers=wire.object_headers(meta))

    # Jobs

    def _abort_sort(self, job: str) -> None:
        status = read_status(self.server.storage, job)
        if status is None:
            raise RefusalError(404, f"dsort job {job} does not exist", "ErrNotFound")
        if all(target["archived"] for target in status.values()):
            raise RefusalError(410, f"[dsort] {job} is already archived")
        self.server.storage.abort_job(job)
        self.answer(200)

    def _etls(self) -> Etls:
        if self.server.etls is None:
            request = f"{self.command} {self._path}"
            raise wire.unsupported(f"{request} with ETL, which runs code and is off ({ALLOW_ETL}=1 allows it)")
        return self.server.etls

    def _etl(self, rest: list[str]) -> None:
        etls = self._etls()
        match self.command, rest:
            case "PUT", []:
                self.answer_text(etls.start(self.read_json()))
            case "GET", []:
                self.answer_json(etls.infos())
            case "GET", [name]:
                self.answer_json(etls.details(name, job=self._query.get("uuid", "")))
            case "POST", [name, "stop"]:
                etls.stop(name)
                self.answer(200)
            case "DELETE", [name]:
                etls.delete(name)
                self.answer(200)
            case _:
                raise wire.unsupported(f"{self.command} {self._path}")

    def _refuse(self, refusal: RefusalError) -> None:
        body = wire.error_body(
            refusal,
            method=self.command,
            path=unquote(self.path.partition("?")[0], errors="replace"),
            remote=f"{self.client_address[0]}:{self.client_address[1]}",
            node=f"t[{self.server.target_id}]" if self._is_target else f"p[{self.server.proxy_id}]",
        )
        headers = [*refusal.headers, ("Content-Type", "application/json")]
        if self.command == "HEAD":
            self.answer(refusal.status, headers=[*headers, ("Hdr-Error", body.decode().strip())], length=None)
        else:
            self.answer(refusal.status, body, headers=headers)


def _range_checksum(file: BinaryIO, start: int, stop: int, *, checksum_type: str) -> str:
    """Compute the checksum of the bytes ``[start, stop)``; the file's position stays."""
    checksum = new_checksum(checksum_type)
    for at in range(start, stop, _RANGE_CHUNK_BYTES):
        checksum.update(os.pread(file.fileno(), min(stop - at, _RANGE_CHUNK_BYTES), at))
    return checksum.hexdigest()


def serve_forever(
    directory: Path,
    port: int = 0,
    *,
    allow_etl: bool | None = None,
    latency_s: float = 0.0,
    announce: Callable[[str], object] | None = None,
) -> None:
    """Serve ``directory`` on 127.0.0.1 until interrupted; print the endpoint as soon as it answers.

    Args:
        directory: Created if missing; nothing is stored anywhere else.
        port: 0 takes a free one.
        allow_etl: Whether clients may run transforms as this user. ``None``: only if the environment's
            ``DALI_PIPES_EMBEDDED_ETL`` is ``1``.
        latency_s: Seconds to wait before each request is answered.
        announce: Called with the endpoint, instead of printing it.

    Raises:
        OSError: If the folder cannot be written, or the port is taken.
    """
    if allow_etl is None:
        allow_etl = os.environ.get(ALLOW_ETL) == "1"
    delay = (lambda _request: time.sleep(latency_s)) if latency_s else None
    with (
        Storage(directory) as storage,
        NodeServer(storage, port=port, allow_etl=allow_etl, before_request=delay) as server,
    ):
        if announce is None:
            print(server.endpoint, flush=True)  # the command's result
        else:
            announce(server.endpoint)
        server.serve_forever()
