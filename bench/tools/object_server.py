"""Serve a folder of buckets to benchmarks: the embedded AIS node in a process of its own, slowed where that is asked.

It answers as the node does: the proxy's redirect to the target's URL, listing, HEAD, ranges, checksum and version in
the headers, connections kept alive. So clients of every kind read it unmodified. Bodies go out by ``sendfile``, in
which a thread does not hold the interpreter's lock: one process serves as many connections as there are, on all cores,
and ``bench fetch`` measures with a client that drops what it receives how fast it is.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.tools.server_process import ServerProcess, announce, server_arguments
from dali_pipes.store.cluster.ais import AisStore, check_endpoint
from dali_pipes.store.shard_set import ShardSet
from prep.embedded.server import NodeServer
from prep.embedded.storage import Storage


class ObjectServer(ServerProcess):
    """A running server.

    Args:
        directory: Holds the buckets, in the embedded node's format; made if need be. Several servers may share one.
        latency_s: Slept before each request is answered, the proxy's and the target's alike: an object's GET meets it
            twice. Connections do not wait for each other.

    Raises:
        StoreError: If it does not start.
    """

    def __init__(self, directory: Path, *, latency_s: float = 0.0) -> None:
        arguments = ["--dir", str(directory), "--latency-s", repr(latency_s)]
        super().__init__("bench.tools.object_server", *arguments, what=f"the benchmark's server over '{directory}'")


@contextlib.contextmanager
def new_bucket(endpoint: str, name: str) -> Iterator[AisStore]:
    """A bucket of a benchmark's own, which is destroyed at the end.

    Raises:
        StoreError: If the endpoint does not answer.
        ValueError: If the bucket is there already.
    """
    check_endpoint(endpoint)
    store = AisStore(endpoint, name)
    if store.exists():
        raise ValueError(
            f"bucket '{store.url}' is there already at {endpoint}: another benchmark runs, or one was killed; "
            "destroy the bucket, it holds nothing else"
        )
    store.create()
    try:
        yield store
    finally:
        with store.asking(store.url):
            store.client.bucket(name).delete(missing_ok=True)


def upload_shards(shards: ShardSet, endpoint: str, bucket: str) -> ShardSet:
    """Copy local shards into a new bucket of a server; their index is not copied."""
    store = AisStore(endpoint, bucket)
    store.create()
    for name in shards.names:
        store.upload(name, Path(shards.store.locate(name)))
    return ShardSet(store=store, names=shards.names)


def main(argv: list[str] | None = None) -> int:
    """Serve until the owner goes; print the endpoint first."""
    parser = server_arguments("bench.tools.object_server", __doc__)
    parser.add_argument("--dir", type=Path, required=True, help="the folder that holds buckets and objects")
    options = parser.parse_args(argv)
    try:
        before_request = _delay(options.latency_s) if options.latency_s > 0 else None
        with Storage(options.dir) as storage, NodeServer(storage, port=0, before_request=before_request) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            announce(server.endpoint, owner=options.owner)
    except OSError as exc:
        print(f"cannot serve '{options.dir}': {exc}", file=sys.stderr)
        return 1
    return 0


def _delay(latency_s: float) -> Callable[[object], None]:
    return lambda _request: time.sleep(latency_s)


if __name__ == "__main__":
    sys.exit(main())
