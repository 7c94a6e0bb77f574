"""Serve a transform by HTTP as the pods of AIStore's ETL do, with the SDK's server framework.

The framework's multi-threaded server needs no packages beside the SDK (others need FastAPI or Flask). A shard is
transformed whole before it is answered, because the streaming mode sends 200 first: a transform that fails later would
look like a short shard.
"""

import sys
from typing import Any

from aistore.sdk.etl.webserver.http_multi_threaded_server import HTTPMultiThreadedServer

from dali_pipes.errors import DataError
from prep.etl.transforms import ShardTransform

PORT = 8000
"""The port at which AIStore expects a pod's server."""


class ShardServer(HTTPMultiThreadedServer):  # type: ignore[misc]  # the SDK publishes no types
    """Serves one transform; `start` returns at SIGTERM.

    Args:
        of: The transform.
        host: The address to listen on.
        port: The port to listen on.

    Raises:
        OSError: If ``AIS_TARGET_URL`` is not set: AIStore sets it in the pods that it starts.
    """

    def __init__(self, of: ShardTransform, *, host: str, port: int) -> None:
        super().__init__(host=host, port=port)
        self._of = of

    def transform(self, data: bytes, path: str, etl_args: str) -> bytes:
        """The transformed shard."""
        return self._of.transform(data, path, etl_args)

    def get_mime_type(self) -> str:
        """The type of the answers."""
        return "application/x-tar"

    class RequestHandler(HTTPMultiThreadedServer.RequestHandler):  # type: ignore[misc]  # the same
        """The framework's handler; but an error names the shard, where the framework's answer to PUT is empty."""

        def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
            """Answer with an error as plain text in the body, because a status line cannot hold all letters."""
            cause = sys.exception()
            text = str(cause) if isinstance(cause, DataError | ValueError) else message or explain or ""
            body = text.encode()
            self.send_response(422 if isinstance(cause, DataError | ValueError) else code)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: the framework logs failures."""
