"""Provide an AIStore endpoint that answers: the given one, or that of an embedded node started for the purpose."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from dali_pipes.errors import StoreError, shown
from dali_pipes.store.cluster import embedded_node
from dali_pipes.store.cluster.ais import check_endpoint

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def cluster(endpoint: str | None, *, embedded_dir: Path | None = None) -> Iterator[str]:
    """Yield an endpoint that answers.

    Args:
        endpoint: A cluster's proxy, whose health is checked first. ``None`` starts the embedded node on loopback, in a
            process of its own, and stops it at the end: for first runs, tests and laptops, not for several machines.
        embedded_dir: The embedded node's folder; ``None`` for `default_embedded_dir`.

    Raises:
        StoreError: If nothing answers there.
    """
    if endpoint is not None:
        check_endpoint(endpoint)
        yield endpoint
        return
    directory = embedded_dir or default_embedded_dir()
    with embedded_node.start(directory) as node:
        _log.info("no AIS_ENDPOINT: embedded AIS node at %s, storing into %s", node.endpoint, directory)
        yield node.endpoint


def check_embedded_bucket(url: str | Path, *, embedded_dir: Path | None) -> None:
    """Refuse to read a bucket that the embedded node does not have, before a node is started.

    Args:
        url: ``ais://BUCKET/...``, or a URL of another provider's bucket.
        embedded_dir: As for `cluster`.

    Raises:
        StoreError: If the folder holds no such bucket; names the buckets that it holds.
    """
    scheme, _, rest = str(url).partition("://")
    bucket, folder = rest.partition("/")[0], embedded_dir or default_embedded_dir()
    buckets = folder / embedded_node.BUCKETS
    if (buckets / bucket).is_dir():
        return
    found = sorted(path.name for path in buckets.iterdir() if path.is_dir()) if buckets.is_dir() else []
    raise StoreError(
        f"no bucket '{scheme}://{bucket}': AIS_ENDPOINT is not set, and the embedded node's folder '{folder}' holds no "
        f"such bucket (found: {shown(found) if found else 'none'}); set AIS_ENDPOINT, or make the bucket: "
        f"dali-pipes prep pack ... {scheme}://{bucket}"
    )


def default_embedded_dir() -> Path:
    """``$XDG_DATA_HOME/dali-pipes/embedded``, where the buckets of one command stay for the next one."""
    data_home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data_home) / "dali-pipes" / "embedded"
