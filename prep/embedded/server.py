"""Answer AIStore's HTTP API on loopback from a folder: requests go to the storage, the dSort jobs and the ETLs.

As in a cluster, the proxy redirects a request for an object (301 for GET, 307 for the rest) to the target's URL, with
``pid`` in its query; a request with ``pid`` is for the target. So clients get the same redirects as from a cluster.

# Note [threads]: each connection and each job has a thread. They share only the `NodeServer`, whose `Storage` and
`Etls` are thread-safe.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import parse_qsl, unquote

from dali_pipes.store.checksums import NO_CHECKSUM_TYPE, new_checksum
from dali_pipes.store.cluster.embedded_node import ALLOW_ETL
from prep.embedded import connection, wire
from prep.embedded.connection import NodeConnection
from prep.embedded.etl import Etls
from prep.embedded.s3 import answer_s3
from prep.embedded.storage import BucketProps, ObjectMissingError, RefusalError, Storage

if TYPE_CHECKING:
    from prep.embedded.dsort import SortJob

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_RANGE_CHUNK_BYTES = 1 << 20
_OBJECT_QUERY = {"provider", "namespace", "pid", "utm", "props", "latest", "uuid", "etl_name"}


class NodeServer(ThreadingMixIn, TCPServer):
    """One process that is a whole cluster: proxy and target at one address, 127.0.0.1, for processes of this user.

    Args:
        storage: The objects.
        port: 0 takes a free one.
        allow_etl: Let clients run transforms, which are code, by ETL.
        etl_function: Run this transform by ETL, and no other.
        is_open: Answer processes of other users, too.
        before_request: Called before each request is answered, in the connection's thread; it may wait. The request has
            its ``command``, ``path`` and ``headers``; its body is not read yet.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128
    etls: Etls | None = None
    """The transforms; ``None`` if the node runs none, and also if binding the port fails."""

    def __init__(
        self,
        storage: Storage,
        *,
        port: int,
        allow_etl: bool = False,
        etl_function: str | None = None,
        is_open: bool = False,
        before_request: Callable[[NodeConnection], None] = lambda _: None,
    ) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.storage, self.is_open, self.before_request = storage, is_open, before_request
        self.port = int(self.server_address[1])
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.proxy_id, self.target_id = f"embp{self.port}", f"embt{self.port}"
        self.uuid, self.started_ns = os.urandom(6).hex(), time.time_ns()
        self.sort_jobs: dict[str, SortJob] = {}
        if allow_etl or etl_function is not None:
            self.etls = Etls(storage, endpoint=self.endpoint, node=self.target_id, only=etl_function)

    def server_close(self) -> None:
        super().server_close()
        if self.etls is not None:
            self.etls.close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that closed the connection; print the traceback of any other error, which is a bug."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # socketserver's own types


class Handler(NodeConnection):
    """Answers the requests of one connection."""

    _is_target = False

    def setup(self) -> None:
        super().setup()
        self.node: NodeServer = self.server  # type: ignore[assignment]  # socketserver's own type

    def handle(self) -> None:
        """Answer the own user's processes; refuse others without reading what they send."""
        ends = self.client_address, ("127.0.0.1", self.node.port)
        if self.node.is_open or connection.peer_uid(*ends) == os.geteuid():
            super().handle()
            return
        self.command = self.path = ""
        self.close_connection = True
        reason = (
            f"this embedded node answers only processes of its own user, id {os.geteuid()}; run your command as that "
            "user, start a node of your own, or let its owner start it with: dali-pipes prep embedded --open"
        )
        body = self._error_body(RefusalError(403, reason))
        error = body.decode().strip()  # for a HEAD, whose client ignores the body
        self.answer(403, body, headers=[("Content-Type", "application/json"), ("Hdr-Error", error)])

    def dispatch(self) -> None:
        self.node.before_request(self)
        self._is_target = False
        try:
            self._route()
        except RefusalError as refusal:
            self._refuse(refusal)
        except UnicodeEncodeError as exc:
            self._refuse(RefusalError(400, f"a text of the request is not Unicode: {exc}"))
        except OSError as exc:
            if isinstance(exc, ConnectionError | TimeoutError) or self.has_answered:
                raise
            # 507, because the SDK would retry after 500 for a minute and a half.
            message = f"{self.command} {self._path}: the node cannot use its folder: {exc.strerror}"
            self._refuse(RefusalError(507, message, "ErrCapExceeded"))

    def _route(self) -> None:
        host = self.headers.get("host", "")
        if "origin" in self.headers or "sec-fetch-site" in self.headers:
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
        if provider not in ("", "ais") or not (namespace == "" or namespace.startswith(("#", "@#"))):
            raise wire.unsupported(f"provider '{provider}', namespace '{namespace}'")
        node = self.node
        match self.command, self._path.split("/", 4)[1:]:
            case "GET", ["v1", "health"]:
                uptime = str(time.time_ns() - node.started_ns)
                self.answer(200, headers=[("Ais-Cluster-Uptime", uptime), ("Ais-Node-Uptime", uptime)])
            case "GET", ["v1", "daemon"] if self._query.get("what") == "smap":
                created = str(datetime.fromtimestamp(node.started_ns / 1e9, UTC))
                ids = {"proxy_id": node.proxy_id, "target_id": node.target_id, "uuid": node.uuid}
                self.answer_json(wire.cluster_map(port=node.port, created=created, **ids))
            case "GET", ["v1", "buckets"]:
                self.answer_json([wire.bucket_json(name) for name in node.storage.list_buckets()])
            case "GET", ["v1", "cluster"] if self._query.get("what") == "qryxstats":
                self._jobs(self.read_json())
            case _, ["v1", "sort", *rest]:
                self._sort(rest)
            case _, ["v1", "etl", *rest]:
                self._etl(rest)
            case _, ["v1", "buckets", bucket]:
                self._bucket(wire.bucket_in(namespace, bucket))
            case "GET" | "HEAD" | "PUT" | "DELETE", ["v1", "objects", bucket, name]:
                self._object(wire.bucket_in(namespace, bucket), name)
            case _, ["s3", *_]:
                answer_s3(self, node.storage, self._path, node=node.target_id)
            case _:
                raise self._unsupported()

    def _unsupported(self, what: str = "") -> RefusalError:
        return wire.unsupported(f"{self.command} {self._path}{what}")

    # Buckets

    def _bucket(self, bucket: str) -> None:
        storage = self.node.storage
        if self.command == "HEAD":
            if "bsumm_remote" in self._query:
                raise self._unsupported(" with a summary")
            header = wire.bucket_props(storage.bucket_props(bucket), created_ns=storage.created_ns(bucket))
            self.answer(200, headers=[("Ais-Bucket-Props", header)])
            return
        message = self.read_json()
        # Other actions than these may hold a value of another type.
        match self.command, message.get("action"):
            case "POST", "create-bck":
                storage.create_bucket(bucket, wire.parse_bucket_props(message, BucketProps()))
                self.answer(200)
            case "PATCH", "set-bprops":
                storage.set_bucket_props(bucket, wire.parse_bucket_props(message, storage.bucket_props(bucket)))
                self.answer(200)
            case "DELETE", "destroy-bck":
                storage.destroy_bucket(bucket)
                self.answer(200)
            case "GET", "list":
                self._list(bucket, wire.field_of(message, "value", dict))
            case "POST", "etl-listrange" if self.node.etls is not None:
                self.answer_text(self.node.etls.start_job(bucket, wire.field_of(message, "value", dict)))
            case _, action:
                raise self._unsupported(f", action '{action}'")

    def _list(self, bucket: str, message: dict[str, Any]) -> None:
        storage, flags = self.node.storage, wire.field_of(message, "flags", int)
        if flags & ~wire.LIST_FLAGS:
            raise wire.unsupported(f"listing with flags {flags}")
        props = frozenset(filter(None, (wire.field_of(message, "props", str) or "name,size").split(",")))
        if flags & (16 | 32):
            props = frozenset({"name"} if flags & 16 else {"name", "size"})
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
            location=self._location,
        )
        if self.headers.get("accept") == "application/msgpack":
            self.answer(200, wire.packed_listing(page), headers=[("Content-Type", "application/msgpack")])
        else:
            self.answer_json(page)

    # Objects

    @property
    def _location(self) -> str:
        return f"t[{self.node.target_id}]:mp[/]"

    def _object(self, bucket: str, name: str) -> None:
        wire.check_object_name(name)
        if "etl_name" in self._query and self._need_etls() and self.command != "GET":
            raise wire.unsupported(f"{self.command} of an object through ETL")
        if unknown := self._query.keys() - _OBJECT_QUERY:
            raise wire.unsupported(f"{self.command} of an object with {', '.join(sorted(unknown))}")
        props = self.node.storage.bucket_props(bucket)
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
                    self.node.storage.delete(bucket, name)
                    self.answer(200)
        except ObjectMissingError as exc:
            if self.command == "DELETE":
                raise RefusalError(404, f"ais://{bucket}/{name} doesn't exist") from exc
            raise RefusalError(404, f"t[{self.node.target_id}]: {exc}", "ErrNotFound") from exc

    def _redirect(self) -> None:
        path, _, query = self.path.partition("?")
        pid = f"pid={self.node.proxy_id}&utm={time.time_ns():x}"
        location = f"{self.node.endpoint}{path}?{query}{'&' if query else ''}{pid}"
        body = b""
        headers = [("Location", location)]
        if self.command in ("GET", "HEAD"):
            headers.insert(0, ("Content-Type", "text/html; charset=utf-8"))
        if self.command == "GET":
            body = f'<a href="{escape(location)}">Moved Permanently</a>.\n\n'.encode()
        self.close_connection |= self.body_is_long
        self.answer(301 if self.command == "GET" else 307, body, headers=headers)

    def _get(self, bucket: str, name: str, props: BucketProps) -> None:
        if etl := self._query.get("etl_name"):
            # As AIS: the whole result, whatever range is asked for, in chunks, without length and checksum.
            self.answer(200, self._need_etls().transform(etl, bucket, name), length=None)
            return
        file, meta = self.node.storage.open(bucket, name)
        with file:
            start, stop = self.wanted_range(meta.num_bytes, what=f"ais://{bucket}/{name}")
            # A range comes with the checksum of the whole object, unless the bucket is set to give the range's own.
            if props.read_range and props.checksum_type != NO_CHECKSUM_TYPE and stop - start < meta.num_bytes:
                value = _range_checksum(file, start, stop, checksum_type=props.checksum_type)
                meta = replace(meta, checksum=value, checksum_type=props.checksum_type)
            self.answer_file(file, start, stop, meta.num_bytes, headers=wire.object_headers(meta))

    def _head(self, bucket: str, name: str) -> None:
        meta = self.node.storage.head(bucket, name)
        headers = [
            ("Ais-Present", "true"),
            *wire.object_headers(meta),
            ("Ais-Mirror-Copies", "1"),
            ("Ais-Mirror-Paths", "[/]"),
            ("Ais-Location", self._location),
            ("Ais-Name", name),
            ("Ais-Bucket-Name", bucket.rpartition("/")[2]),
            ("Ais-Bucket-Provider", "ais"),
        ]
        self.answer(200, headers=headers, length=meta.num_bytes)

    def _put(self, bucket: str, name: str) -> None:
        checksum_type = self.headers.get("ais-checksum-type", NO_CHECKSUM_TYPE)
        wire.check_checksum_type(checksum_type)  # AIS closes the connection without an answer
        # A value without a type is ignored, as by AIS.
        checksum = self.headers.get("ais-checksum-value", "") if checksum_type != NO_CHECKSUM_TYPE else ""
        chunks = self.body_chunks()
        meta = self.node.storage.write(bucket, name, chunks, checksum=checksum, checksum_type=checksum_type)
        self.answer(200, headers=wire.object_headers(meta))

    # Jobs

    def _jobs(self, message: dict[str, Any]) -> None:
        if wire.field_of(message, "Kind", str) in ("rebalance", "resilver"):
            self.answer_json({self.node.target_id: []})  # one node moves nothing
        elif self.node.etls is not None and (job := wire.field_of(message, "ID", str)):
            self.answer_json(self.node.etls.snapshots(job))
        else:
            raise self._unsupported(", what=qryxstats")

    def _sort(self, rest: list[str]) -> None:
        node, job_id = self.node, self._query.get("uuid", "")
        job = node.sort_jobs.get(job_id)
        match self.command, rest:
            case "POST", []:
                from prep.embedded.dsort import SortJob, parse_job_spec  # numpy and the SDK, for this alone

                spec = parse_job_spec(self.read_json())
                job = SortJob(spec, node.storage, node.target_id, endpoint=node.endpoint)
                job.start()
                node.sort_jobs[job.id] = job
                self.answer_text(job.id)
            case "GET", []:
                if job is None:
                    raise RefusalError(404, f"[dsort] {job_id} does not exist")
                self.answer_text(json.dumps({node.target_id: job.status()}))
            case "DELETE", ["abort"]:
                if job is None:
                    raise RefusalError(404, f"dsort job {job_id} does not exist", "ErrNotFound")
                if job.is_done:
                    raise RefusalError(410, f"[dsort] {job_id} is already archived")
                job.is_aborted = True
                self.answer(200)
            case _:
                raise self._unsupported()

    def _need_etls(self) -> Etls:
        if self.node.etls is None:
            raise self._unsupported(f" with ETL, which runs code and is off ({ALLOW_ETL}=1 allows it)")
        return self.node.etls

    def _etl(self, rest: list[str]) -> None:
        etls = self._need_etls()
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
                raise self._unsupported()

    # Refusals

    def _refuse(self, refusal: RefusalError) -> None:
        body = self._error_body(refusal)
        headers = [*refusal.headers, ("Content-Type", "application/json")]
        if self.command == "HEAD":
            headers.append(("Hdr-Error", body.decode().strip()))
            body = b""
        self.answer(refusal.status, body, headers=headers)

    def _error_body(self, refusal: RefusalError) -> bytes:
        """The JSON that AIS sends with an error."""
        fields = {"tcode": refusal.tcode} if refusal.tcode else {}
        fields |= {
            "message": refusal.message,
            "method": self.command,
            "url_path": unquote(self.path.partition("?")[0], errors="replace"),
            "remote_addr": f"{self.client_address[0]}:{self.client_address[1]}",
            "caller": "",
            "node": f"t[{self.node.target_id}]" if self._is_target else f"p[{self.node.proxy_id}]",
        }
        return json.dumps(fields | {"status": refusal.status}).encode() + b"\n"


def _range_checksum(file: BinaryIO, start: int, stop: int, *, checksum_type: str) -> str:
    """Compute the checksum of the bytes ``[start, stop)``; the file's position stays."""
    checksum = new_checksum(checksum_type)
    for at in range(start, stop, _RANGE_CHUNK_BYTES):
        checksum.update(os.pread(file.fileno(), min(stop - at, _RANGE_CHUNK_BYTES), at))
    return checksum.hexdigest()
