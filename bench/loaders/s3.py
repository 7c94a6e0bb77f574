"""Buckets of peers that read by S3's protocol: where they answer, and what a peer made of shards and keeps there."""

import contextlib
import functools
import hashlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from dali_pipes.errors import StoreError
from dali_pipes.store.shard_set import ShardSet

if TYPE_CHECKING:
    from obstore.store import S3Store

REGION = "us-east-1"
"""The region of servers that have none."""


# Clients of S3 require these; AIStore and the embedded node ignore them. The user's own values take precedence.
_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "none",
    "AWS_SECRET_ACCESS_KEY": "none",
    "AWS_REGION": REGION,
    "AWS_EC2_METADATA_DISABLED": "true",  # otherwise a cloud's metadata server is asked for credentials, with a wait
}


class S3Place(NamedTuple):
    """A bucket on a server that speaks S3."""

    endpoint: str | None
    """``None``: Amazon's own."""
    bucket: str


def s3_place(shards: ShardSet) -> S3Place:
    """Return the place of the shards' bucket: below ``/s3`` of an AIStore, or where ``AWS_ENDPOINT_URL`` says."""
    bucket = shards.store.url.partition("://")[2].partition("/")[0]
    if shards.store.endpoint is not None:
        return S3Place(f"{by_address(shards.store.endpoint)}/s3", bucket)
    return S3Place(cloud_endpoint(), bucket)


def cloud_endpoint() -> str | None:
    """Return the endpoint of a server of S3 other than Amazon's own."""
    # Every S3 client reads these by itself; the bench has no options of its own for them.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return by_address(endpoint) if endpoint else None


@functools.cache
def s3_client(place: S3Place) -> "S3Store":
    """Open obstore's client of a bucket, once in a process."""
    from obstore.store import S3Store

    return S3Store(place.bucket, endpoint=place.endpoint, client_options={"allow_http": True})


def by_address(endpoint: str) -> str:
    """Return an endpoint with its host's IP address: with a name, DALI's client would ask
    ``http://pets.localhost:51080``.

    With TLS the name stays, because the certificate contains it.
    """
    parts = urlsplit(endpoint)
    if parts.scheme == "https" or parts.hostname is None:
        return endpoint.rstrip("/")
    try:
        address = socket.gethostbyname(parts.hostname)
    except OSError as exc:
        raise StoreError(f"endpoint '{endpoint}': no address for '{parts.hostname}'") from exc
    return f"http://{address}:{parts.port or 80}{parts.path.rstrip('/')}"


@contextlib.contextmanager
def client_environment(shards: ShardSet, **variables: str | None) -> Iterator[None]:
    """Set the variables that configure a peer's S3 client while its loader is open, for its workers too.

    A bucket of AIStore gets credentials that it ignores; another keeps the user's own. A variable that is ``None``
    stays as it is.
    """
    added = {name: value for name, value in variables.items() if value is not None}
    if shards.store.endpoint is not None:
        added |= {name: os.environ.get(name, value) for name, value in _CREDENTIALS.items()}
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def uploaded_folder(shards: ShardSet, directory: Path) -> Iterator[str]:
    """Set the environment of S3 clients; yields the ``s3://`` address of a directory that `upload_folder` uploaded."""
    place = s3_place(shards)
    # Streaming reads the second variable, the other clients read the first.
    with client_environment(shards, AWS_ENDPOINT_URL=place.endpoint, S3_ENDPOINT_URL=place.endpoint):
        yield f"s3://{place.bucket}/{_prefix(directory)}"


def upload_folder(shards: ShardSet, directory: Path) -> None:
    """Upload each file of a directory into the shards' bucket."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            shards.store.upload(f"{_prefix(directory)}/{path.relative_to(directory)}", path)


def remove_uploads(shards: ShardSet, directory: Path) -> None:
    """Delete what `upload_folder` uploaded; nothing if there is nothing."""
    for entry in shards.store.list(f"{_prefix(directory)}/"):
        shards.store.delete(entry.name)


def _prefix(directory: Path) -> str:
    """The place in the bucket of a directory's files: no two directories of a machine share one."""
    return f"dali-pipes-bench/{hashlib.sha256(str(directory).encode()).hexdigest()[:16]}"
