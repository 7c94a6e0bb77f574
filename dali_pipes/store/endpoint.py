"""Where AIStore answers: the endpoint that was named, else an embedded node started for as long as it is needed."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from dali_pipes.store import embedded_node
from dali_pipes.store.ais import check_endpoint

__all__ = ["cluster", "default_embedded_dir"]

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def cluster(endpoint: str | None, *, embedded_dir: Path | None = None) -> Iterator[str]:
    """An endpoint that answers.

    Args:
        endpoint: A cluster's proxy; asked for its health first. ``None`` starts the embedded node, in a process of its
            own on loopback, and stops it at the end: for first runs, tests and laptops, not for more than one machine.
        embedded_dir: The embedded node's storage; `default_embedded_dir` where ``None``.

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


def default_embedded_dir() -> Path:
    """``$XDG_DATA_HOME/dali-pipes/embedded``: buckets packed by one command are there for the next."""
    data_home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data_home) / "dali-pipes" / "embedded"
