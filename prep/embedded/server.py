"""Answer AIStore's HTTP API on loopback, from a folder, in a process of its own or in a thread.

# Note [threads]: each connection and each job has a thread. They share only the `Node`, whose `Storage` and `Etls` are
thread-safe.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn

from dali_pipes.store.cluster.embedded_node import ALLOW_ETL
from prep.embedded.connection import NodeConnection
from prep.embedded.etl import Etls
from prep.embedded.routes import Handler, Node
from prep.embedded.storage import Storage


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
    node: Node | None = None  # a class attribute, because `server_close` needs it even if binding fails

    def __init__(
        self,
        storage: Storage,
        *,
        port: int,
        allow_etl: bool = False,
        etl_function: str | None = None,
        is_open: bool = False,
        before_request: Callable[[NodeConnection], None] | None = None,
    ) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.port = int(self.server_address[1])
        self.node = Node(storage=storage, port=self.port, is_open=is_open, before_request=before_request)
        self.endpoint = self.node.endpoint
        if allow_etl or etl_function is not None:
            self.node.etls = Etls(storage, endpoint=self.endpoint, node=self.node.target_id, only=etl_function)

    def server_close(self) -> None:
        """Stop listening, and end the transforms."""
        super().server_close()
        if self.node is not None and self.node.etls is not None:
            self.node.etls.close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that closed the connection; print the traceback of any other error, which is a bug."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # socketserver's own types


def serve_forever(
    directory: Path,
    port: int = 0,
    *,
    announce: Callable[[str], object],
    allow_etl: bool = False,
    etl_function: str | None = None,
    is_open: bool = False,
    latency_s: float = 0.0,
) -> None:
    """Serve ``directory`` on 127.0.0.1 until interrupted.

    The process's new files are for its user alone from then on.

    Args:
        directory: Created if missing; nothing is stored anywhere else. See `claim_folder` for an existing one.
        port: 0 takes a free one.
        announce: Called with the endpoint as soon as it answers.
        allow_etl: Whether clients may run transforms as this user; so does ``DALI_PIPES_EMBEDDED_ETL=1`` in the
            environment, if ``etl_function`` is not given.
        etl_function: The one transform that clients may run.
        is_open: Whether processes of other users may use the node; a warning on stderr says so.
        latency_s: Seconds to wait before each request is answered.

    Raises:
        OSError: If the folder cannot be written, or the port is taken.
        StoreError: If the folder is another user's, or holds other files and is open to other users.
    """
    allow_etl |= etl_function is None and os.environ.get(ALLOW_ETL) == "1"
    os.umask(0o077)
    delay = (lambda _request: time.sleep(latency_s)) if latency_s else None
    with (
        Storage(directory) as storage,
        NodeServer(
            storage, port=port, allow_etl=allow_etl, etl_function=etl_function, is_open=is_open, before_request=delay
        ) as server,
    ):
        if is_open:
            able = "read, replace and delete its objects" + (", and run any code as you, by ETL" if allow_etl else "")
            print(f"warning: --open: every user of this machine can {able}", file=sys.stderr, flush=True)
        announce(server.endpoint)
        server.serve_forever()
