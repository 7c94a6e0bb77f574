"""A transform behind HTTP, as the pods of AIStore's ETL answer: a class for the SDK's server framework.

The framework's multi-threaded server needs nothing that the SDK does not bring (its others: FastAPI, Flask). Whole
shards are transformed before anything is answered: the framework's streaming mode sends 200 first, and what breaks
after that looks like a shard that ends.
"""

import sys
from typing import Any

from aistore.sdk.etl.webserver.http_multi_threaded_server import HTTPMultiThreadedServer

from dali_pipes.errors import DataError
from prep.etl.transforms import ShardTransform

__all__ = ["PORT", "ShardServer"]

PORT = 8000
"""At which AIStore looks for a pod's server."""


class ShardServer(HTTPMultiThreadedServer):  # type: ignore[misc]  # the SDK publishes no types
    """Serves one transform until SIGTERM, by `start`.

    Args:
        of: The transform.
        host: Where to listen.
        port: There.

    Raises:
        OSError: If ``AIS_TARGET_URL`` is not set: AIStore sets it in the pods that it starts.
    """

    def __init__(self, of: ShardTransform, *, host: str, port: int) -> None:
        super().__init__(host=host, port=port)
        self._of = of

    def transform(self, data: bytes, path: str, etl_args: str) -> bytes:
        """The shard that comes of ``data``."""
        return self._of.transform(data, path, etl_args)

    def get_mime_type(self) -> str:
        """Of what is answered."""
        return "application/x-tar"

    class RequestHandler(HTTPMultiThreadedServer.RequestHandler):  # type: ignore[misc]  # the same
        """The framework's, but a shard that cannot be transformed is named: a PUT's answer would say nothing."""

        def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
            """Answer with an error, in plain text, its body alone: a status line holds Latin letters only."""
            cause = sys.exception()
            text = str(cause) if isinstance(cause, DataError | ValueError) else message or explain or ""
            body = text.encode()
            self.send_response(422 if isinstance(cause, DataError | ValueError) else code)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: what fails is logged by the framework."""
