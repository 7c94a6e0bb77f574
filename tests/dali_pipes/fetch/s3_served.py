"""A real S3 server, versitygw, over a folder of the tests; tests that need it are skipped without it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.clouds import S3_KEYS, s3_cloud

ACCESS_KEY, SECRET_KEY = S3_KEYS


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Serve the folders below ``folder`` as buckets: the endpoint."""
    with s3_cloud(folder) as cloud:
        yield cloud.endpoint


def s3_store(endpoint: str, bucket: str, *, secret_key: str = SECRET_KEY) -> Any:
    """A bucket, as obstore sees it."""
    stores: Any = pytest.importorskip("obstore.store")
    return stores.S3Store(
        bucket,
        endpoint=endpoint,
        access_key_id=ACCESS_KEY,
        secret_access_key=secret_key,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
