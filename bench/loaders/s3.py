"""Where a bucket answers as S3 does, for peers that read buckets by S3's protocol only."""

import os
import socket
from typing import NamedTuple
from urllib.parse import urlsplit

from dali_pipes.errors import StoreError
from dali_pipes.store.shard_set import ShardSet

REGION = "us-east-1"
"""The region of servers that have none."""


class S3Place(NamedTuple):
    """A bucket on a server that speaks S3."""

    endpoint: str | None
    """``None``: Amazon's own."""
    bucket: str


def s3_place(shards: ShardSet) -> S3Place:
    """Return the place of the shards' bucket: below ``/s3`` of an AIStore, or where ``AWS_ENDPOINT_URL`` says.

    Raises:
        StoreError: If the endpoint's host has no address.
    """
    bucket = shards.store.url.partition("://")[2].partition("/")[0]
    if shards.store.endpoint is not None:
        return S3Place(f"{by_address(shards.store.endpoint)}/s3", bucket)
    # Every S3 client reads these by itself; the bench has no options of its own for them.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return S3Place(by_address(endpoint) if endpoint else None, bucket)


def by_address(endpoint: str) -> str:
    """Return an endpoint with its host's IP address, in the form that DALI's client needs.

    The client would put the bucket before a name and request ``http://pets.localhost:51080/...``. With TLS the name
    stays, because the certificate contains it.

    >>> by_address("http://127.0.0.1:51080/")
    'http://127.0.0.1:51080'
    """
    parts = urlsplit(endpoint)
    if parts.scheme == "https" or parts.hostname is None:
        return endpoint.rstrip("/")
    try:
        address = socket.gethostbyname(parts.hostname)
    except OSError as exc:
        raise StoreError(f"endpoint '{endpoint}': no address for '{parts.hostname}'") from exc
    return f"http://{address}:{parts.port or 80}{parts.path.rstrip('/')}"
