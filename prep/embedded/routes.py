"""Route requests of AIStore's API to the storage, the dSort jobs and the ETLs, and answer as AIS does.

As in a cluster, the proxy redirects a request for an object (301 for GET, 307 for the rest) to the target's URL, with
``pid`` in its query; a request with ``pid`` is for the target. So clients get the same redirects as from a cluster.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import parse_qsl, unquote

from dali_pipes.store.checksums import NO_CHECKSUM_TYPE, new_checksum
from dali_pipes.store.cluster.embedded_node import ALLOW_ETL
from prep.embedded import peer, wire
from prep.embedded.connection import NodeConnection
from prep.embedded.etl import Etls
from prep.embedded.s3 import answer_s3
from prep.embedded.storage import (
    BucketExistsError,
    BucketMissingError,
    BucketProps,
    ChecksumMismatchError,
    ObjectMissingError,
    Storage,
)
from prep.embedded.wire import RefusalError

if TYPE_CHECKING:
    from prep.embedded.dsort import SortJob

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_RANGE_CHUNK_BYTES = 1 << 20
_OBJECT_QUERY = {"provider", "pid", "utm", "props", "latest", "uuid", "etl_name"}


@dataclass(kw_only=True)
class Node:
    """One process that is a whole cluster, proxy and target at one address: what its connections share."""

    storage: Storage
    port: int
    etls: Etls | None = None
    """The transforms; ``None`` if the node runs none."""
    is_open: bool = False
    """Whether processes of other users may use the node."""
    before_request: Callable[[NodeConnection], None] | None = None
    sort_jobs: dict[str, "SortJob"] = field(default_factory=dict)
    started_ns: int = field(default_factory=time.time_ns)
    uuid: str = field(default_factory=lambda: os.urandom(6).hex())

    def __post_init__(self) -> None:
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.proxy_id, self.target_id = f"embp{self.port}", f"embt{self.port}"


class Handler(NodeConnection):
    """Answers the requests of one connection."""

    _is_target = False

    def setup(self) -> None:
        """Take the node from the server."""
        super().setup()
        self.node: Node = self.server.node  # type: ignore[attr-defined]  # socketserver's own type

    def handle(self) -> None:
        """Answer the own user's processes; refuse others without reading what they send."""
        if self.node.is_open or peer.peer_uid(self.client_address, ("127.0.0.1", self.node.port)) == os.geteuid():
            super().handle()
            return
        self.command = self.path = ""
        reason = (
            f"this embedded node answers only processes of its own user, id {os.geteuid()}; run your command as that "
            "user, start a node of your own, or let its owner start it with: dali-pipes prep embedded --open"
        )
        body = self._error_body(RefusalError(403, reason))
        error = body.decode().strip()  # for a HEAD, whose client ignores the body
        self.refuse_connection(403, body, [("Content-Type", "application/json"), ("Hdr-Error", error)])

    def dispatch(self) -> None:
        """Answer one request."""
        if self.node.before_request is not None:
            self.node.before_request(self)
        self._is_target = False
        try:
            self._route()
        except RefusalError as refusal:
            self._refuse(refusal)
        except BucketMissingError as exc:
            self._refuse(wire.bucket_missing(exc.args[0]))
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
        if provider not in ("", "ais") or namespace:
            raise wire.unsupported(f"provider '{provider}', namespace '{namespace}'")
        match self.command, self._path.split("/", 4)[1:]:
            case "GET", ["v1", "health"]:
                uptime = str(time.time_ns() - self.node.started_ns)
                self.answer(200, headers=[("Ais-Cluster-Uptime", uptime), ("Ais-Node-Uptime", uptime)])
            case "GET", ["v1", "daemon"] if self._query.get("what") == "smap":
                self.answer_json(
                    wire.cluster_map(
                        port=self.node.port,
                        proxy_id=self.node.proxy_id,
                        target_id=self.node.target_id,
                        uuid=self.node.uuid,
                        created=str(datetime.fromtimestamp(self.node.started_ns / 1e9, UTC)),
                    )
                )
            case "GET", ["v1", "buckets"]:
                self.answer_json([wire.bucket_json(name) for name in self.node.storage.list_buckets()])
            case "POST", ["v1", "sort"]:
                from prep.embedded.dsort import SortJob, parse_job_spec  # numpy and the SDK, for this alone

                spec = parse_job_spec(self.read_json())
                job = SortJob(spec, self.node.storage, self.node.target_id, endpoint=self.node.endpoint)
                job.start()
                self.node.sort_jobs[job.id] = job
                self.answer_text(job.id)
            case "GET", ["v1", "sort"] if (job_id := self._query.get("uuid")) is not None:
                if job_id not in self.node.sort_jobs:
                    raise RefusalError(404, f"[dsort] {job_id} does not exist")
                self.answer_text(json.dumps({self.node.target_id: self.node.sort_jobs[job_id].status()}))
            case "DELETE", ["v1", "sort", "abort"]:
                self._abort_sort(self._query.get("uuid", ""))
            case _, ["v1", "etl", *rest]:
                self._etl(rest)
            case "GET", ["v1", "cluster"] if self._query.get("what") == "qryxstats":
                self._jobs(self.read_json())
            case _, ["v1", "buckets", bucket]:
                wire.check_bucket_name(bucket)
                self._bucket(bucket)
            case "GET" | "HEAD" | "PUT" | "DELETE", ["v1", "objects", bucket, name]:
                wire.check_bucket_name(bucket)
                self._object(bucket, name)
            case _, ["s3", *_]:
                answer_s3(self, self.node.storage, self._path, node=self.node.target_id)
            case _:
                raise wire.unsupported(f"{self.command} {self._path}")

    def _jobs(self, message: dict[str, Any]) -> None:
        if wire.field_of(message, "Kind", str) in ("rebalance", "resilver"):
            self.answer_json({self.node.target_id: []})  # one node moves nothing
        elif self.node.etls is not None and (job := wire.field_of(message, "ID", str)):
            self.answer_json(self.node.etls.snapshots(job))
        else:
            raise wire.unsupported(f"{self.command} {self._path}, what=qryxstats")

    # Buckets

    def _bucket(self, bucket: str) -> None:
        storage = self.node.storage
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
            case "POST", "etl-listrange" if self.node.etls is not None:
                self.answer_text(self._etls().start_job(bucket, value()))
            case _, action:
                raise wire.unsupported(f"{self.command} {self._path}, action '{action}'")

    def _bucket_head(self, bucket: str) -> None:
        if "bsumm_remote" in self._query:
            raise wire.unsupported(f"{self.command} {self._path} with a summary")
        props = self.node.storage.bucket_props(bucket)
        header = wire.bucket_props(props, created_ns=self.node.storage.created_ns(bucket))
        self.answer(200, headers=[("Ais-Bucket-Props", header)])

    def _list(self, bucket: str, message: dict[str, Any]) -> None:
        storage, flags = self.node.storage, wire.field_of(message, "flags", int)
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
            message = f"t[{self.node.target_id}]: ais://{bucket}/{name} does not exist"
            raise RefusalError(404, message, "ErrNotFound") from exc

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
        if self.body_is_long:
            self.close_connection = True
        self.answer(301 if self.command == "GET" else 307, body, headers=headers)

    def _get(self, bucket: str, name: str, props: BucketProps) -> None:
        if etl := self._query.get("etl_name"):
            # As AIS: the whole result, whatever range is asked for, in chunks, without length and checksum.
            data = self._etls().transform(etl, bucket, name)
            self.answer(200, data, length=None)
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
            ("Ais-Location", self._location()),
            ("Ais-Name", name),
            ("Ais-Bucket-Name", bucket),
            ("Ais-Bucket-Provider", "ais"),
        ]
        self.answer(200, headers=headers, length=meta.num_bytes)

    def _location(self) -> str:
        return f"t[{self.node.target_id}]:mp[/]"

    def _put(self, bucket: str, name: str) -> None:
        checksum_type = self.headers.get("ais-checksum-type", NO_CHECKSUM_TYPE)
        wire.check_checksum_type(checksum_type)  # AIS closes the connection without an answer
        # A value without a type is ignored, as by AIS.
        checksum = self.headers.get("ais-checksum-value", "") if checksum_type != NO_CHECKSUM_TYPE else ""
        chunks = self.body_chunks()
        try:
            meta = self.node.storage.write(bucket, name, chunks, checksum=checksum, checksum_type=checksum_type)
        except ChecksumMismatchError as exc:
            _, given, found = exc.args
            message = f"BAD DATA CHECKSUM: {checksum_type}({given} != {found}) (context: ais://{bucket}/{name})"
            raise RefusalError(500, message, "ErrBadCksum") from exc
        self.answer(200, headers=wire.object_headers(meta))

    # Jobs

    def _abort_sort(self, job_id: str) -> None:
        if job_id not in self.node.sort_jobs:
            raise RefusalError(404, f"dsort job {job_id} does not exist", "ErrNotFound")
        job = self.node.sort_jobs[job_id]
        if job.is_done:
            raise RefusalError(410, f"[dsort] {job_id} is already archived")
        job.is_aborted = True
        self.answer(200)

    def _etls(self) -> Etls:
        if self.node.etls is None:
            request = f"{self.command} {self._path}"
            raise wire.unsupported(f"{request} with ETL, which runs code and is off ({ALLOW_ETL}=1 allows it)")
        return self.node.etls

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
        body = self._error_body(refusal)
        headers = [*refusal.headers, ("Content-Type", "application/json")]
        if self.command == "HEAD":
            # The SDK shows nothing of such an answer but its status line.
            reason = refusal.message if refusal.status == 501 else ""
            headers.append(("Hdr-Error", body.decode().strip()))
            self.answer(refusal.status, headers=headers, reason=reason)
        else:
            self.answer(refusal.status, body, headers=headers)

    def _error_body(self, refusal: RefusalError) -> bytes:
        return wire.error_body(
            refusal,
            method=self.command,
            path=unquote(self.path.partition("?")[0], errors="replace"),
            remote=f"{self.client_address[0]}:{self.client_address[1]}",
            node=f"t[{self.node.target_id}]" if self._is_target else f"p[{self.node.proxy_id}]",
        )


def _range_checksum(file: BinaryIO, start: int, stop: int, *, checksum_type: str) -> str:
    """Compute the checksum of the bytes ``[start, stop)``; the file's position stays."""
    checksum = new_checksum(checksum_type)
    for at in range(start, stop, _RANGE_CHUNK_BYTES):
        checksum.update(os.pread(file.fileno(), min(stop - at, _RANGE_CHUNK_BYTES), at))
    return checksum.hexdigest()
