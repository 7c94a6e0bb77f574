"""Write and read the JSON, msgpack and headers of AIStore's HTTP API, as recorded from AIS 4.9."""

import json
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec.msgpack
import xxhash

from dali_pipes.store.checksums import CHECKSUM_TYPES, NO_CHECKSUM_TYPE
from dali_pipes.store.shard_names import BucketParts
from prep.embedded.storage import BucketProps, ObjectMeta, RefusalError

_BUCKET_NAME = re.compile(r"(?!\.\.?$)[A-Za-z0-9._-]{1,64}")
_MAX_NAME_BYTES = 1024
PAGE_SIZE = 10_000
"""Entries of one page of a listing, if the client gives no number."""
_ENTRY_PRESENT = 64
_PACKED = {
    "name": "n", "checksum": "cs", "atime": "a", "version": "v", "location": "t", "size": "s", "copies": "c",
    "flags": "f",
}  # fmt: skip
LIST_FLAGS = 1 | 16 | 32 | 64 | 128 | 256
"""Listing flags that have a meaning for an ``ais://`` bucket on one node: cached, name only, name and size, bucket
present, do not ask a remote, do not add a remote."""

Field = TypeVar("Field", str, int, bool, dict[str, Any], list[Any])

_CHECKSUM_CHOICES = {"type", "enable_read_range"}
_ID_SEED = 1103515245  # the seed of AIS's digests, by which the SDK finds an object's target


def unsupported(what: str) -> RefusalError:
    """Return a 501, which the SDK does not retry."""
    message = f"{what}: the embedded node does not do that; set AIS_ENDPOINT to a cluster that does"
    return RefusalError(501, message, "ErrUnsupp")


def bucket_json(bucket: str) -> dict[str, Any]:
    """Return the form in which listings and jobs name a bucket."""
    parts = BucketParts.parse(bucket)
    return {"name": parts.bucket, "provider": "ais", "namespace": {"uuid": "", "name": parts.namespace}}


def cluster_map(*, port: int, proxy_id: str, target_id: str, uuid: str, created: str) -> dict[str, Any]:
    """Describe a cluster of one proxy and one target at one address."""
    net = {"node_ip_addr": "127.0.0.1", "daemon_port": str(port), "direct_url": f"http://127.0.0.1:{port}"}
    nets = {"public_net": net, "intra_data_net": net, "intra_control_net": net}

    def node(kind: str, node_id: str, flags: int) -> dict[str, Any]:
        digest = xxhash.xxh64_intdigest(node_id.encode(), seed=_ID_SEED)
        return nets | {"daemon_type": kind, "daemon_id": node_id, "flags": flags, "id_digest": digest}

    proxy = node("proxy", proxy_id, 2)
    return {
        "pmap": {proxy_id: proxy},
        "proxy_si": proxy,
        "tmap": {target_id: node("target", target_id, 0)},
        "uuid": uuid,
        "creation_time": created,
        "version": "1",
    }


def parse_bucket_props(message: dict[str, Any], before: BucketProps) -> BucketProps:
    """Apply the value of ``create-bck`` or ``set-bprops``, such as ``{"checksum": {"type": "md5"}}``."""
    value = field_of(message, "value", dict)
    checksum = field_of(value, "checksum", dict)
    others = [*(value.keys() - {"checksum"}), *(f"checksum.{name}" for name in checksum.keys() - _CHECKSUM_CHOICES)]
    if others:
        raise unsupported(f"bucket properties {', '.join(sorted(others))}")
    checksum_type = field_of(checksum, "type", str) or before.checksum_type
    check_checksum_type(checksum_type)
    is_set = checksum.get("enable_read_range") is not None
    read_range = field_of(checksum, "enable_read_range", bool) if is_set else before.read_range
    return BucketProps(checksum_type=checksum_type, read_range=read_range)


def check_checksum_type(name: str) -> None:
    if name not in CHECKSUM_TYPES:
        raise RefusalError(400, f'invalid checksum type "{name}" (expecting [{" ".join(CHECKSUM_TYPES)}])')


def bucket_props(props: BucketProps, *, created_ns: int) -> str:
    """Return the header ``Ais-Bucket-Props``, with those of AIS's properties that the node has."""
    checksum = {"type": props.checksum_type, "enable_read_range": props.read_range}
    values = {"provider": "ais", "checksum": checksum, "bid": str(created_ns), "created": str(created_ns)}
    return json.dumps(values)


def listing(
    metas: Iterable[ObjectMeta], *, props: frozenset[str], uuid: str, token: str, atime: str, location: str
) -> dict[str, Any]:
    """Return one page of a listing, for JSON. Fields that are zero or empty are left out, as by AIS."""
    entries = []
    for meta in metas:
        values: dict[str, str | int] = {
            "checksum": meta.checksum,
            "atime": atime,
            "version": str(meta.version),
            "location": location,
            "size": str(meta.num_bytes) if meta.num_bytes else "",
            "copies": 1,
        }
        chosen = {name: value for name, value in values.items() if name in props and value}
        entries.append({"name": meta.name, **chosen, "flags": _ENTRY_PRESENT})
    return {"uuid": uuid, "continuation_token": token, "entries": entries, "flags": 0}


def packed_listing(page: dict[str, Any]) -> bytes:
    """Return the same page in msgpack, where fields have other names, and a size is a number."""
    entries = [
        {_PACKED[name]: int(value) if name == "size" else value for name, value in entry.items()}
        for entry in page["entries"]
    ]
    fields = {"UUID": page["uuid"], "ContinuationToken": page["continuation_token"], "Entries": entries}
    return msgspec.msgpack.encode(fields | {"Flags": page["flags"]})


def object_headers(meta: ObjectMeta) -> list[tuple[str, str]]:
    """Return the headers of every answer with an object's bytes; type ``none`` has none of a checksum."""
    headers = [("Ais-Atime", str(meta.atime_ns)), ("Ais-Version", str(meta.version))]
    if meta.checksum_type != NO_CHECKSUM_TYPE:
        headers += [("Ais-Checksum-Type", meta.checksum_type), ("Ais-Checksum-Value", meta.checksum)]
    return headers


def field_of(message: dict[str, Any], name: str, kind: type[Field]) -> Field:
    """Return a field of a JSON message; empty or zero if it is missing. A number may also come as text."""
    value = message.get(name)
    if value is None or value == "":
        return kind()
    if kind is int and isinstance(value, str) and re.fullmatch(r"\d{1,18}", value, re.ASCII):
        value = int(value)
    if not isinstance(value, kind) or (kind is int and value < 0):
        raise RefusalError(400, f'failed to unmarshal the request: "{name}" must be of type {kind.__name__}')
    return value


def check_object_name(name: str) -> None:
    """Refuse a name that leaves the bucket, or that a cluster would list under another name.

    AIS 4.9 refuses ``..`` and a slash at the end. It takes ``a//b``, ``./b`` and ``/b``, but lists them under other
    names or not at all, so the node refuses them too.
    """
    parts = name.split("/")
    if not name or any(part in ("", ".", "..") for part in parts) or "\0" in name:
        raise RefusalError(400, f'invalid object name "{name}"', "errInvalidObjName")
    if (num_bytes := len(name.encode())) > _MAX_NAME_BYTES:
        message = f"object name is too long: {num_bytes} > {_MAX_NAME_BYTES} bytes"
        raise RefusalError(400, message, "errInvalidObjName")


def bucket_in(namespace: str, name: str) -> str:
    """Return a bucket's name as it stands in URLs. ``namespace`` is ``@#NAME``, or empty."""
    namespace = namespace.removeprefix("@").removeprefix("#")
    for part in filter(None, (name, namespace)):
        check_bucket_name(part)
    return BucketParts(name, namespace=namespace).text


def check_bucket_name(name: str) -> None:
    if len(name) > 64:
        raise RefusalError(400, f"bucket name is too long: {len(name)} > 64(max length)")
    if not _BUCKET_NAME.fullmatch(name):
        allowed = "may only contain letters, numbers, dashes (-), underscores (_), and dots (.)"
        raise RefusalError(400, f"bucket name is invalid: {allowed}")


def parse_range(header: str, num_bytes: int, *, what: str) -> tuple[int, int]:
    """Return the bytes ``[start, stop)`` that a ``Range`` header asks for; ``bytes=-5`` means the last five."""
    if "," in header:
        raise RefusalError(416, f"cannot multi-range read {what} - operation not supported", "ErrUnsupp")
    match = re.fullmatch(r"bytes=(\d{0,40})-(\d{0,40})", header.strip())
    if match is None or match.group(0).endswith("=-"):
        raise RefusalError(416, f'read range "{header[:100]}" is invalid')
    first, last = match.groups()
    if first and last and int(last) < int(first):
        raise RefusalError(416, f'read range "{first}-{last}" is invalid (end)')
    start = int(first) if first else max(0, num_bytes - int(last))
    stop = min(int(last) + 1, num_bytes) if first and last else num_bytes
    if start >= stop:
        message = f"object size = {num_bytes}, range [{first}-{last}] not satisfiable"
        raise RefusalError(416, message, "ErrRangeNotSatisfiable", (("Content-Range", f"bytes */{num_bytes}"),))
    return start, stop
