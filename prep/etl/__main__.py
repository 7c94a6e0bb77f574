"""Serve one transform, as in a pod of AIStore's ETL: ``python -m prep.etl TRANSFORM``.

The SDK's multi-threaded server needs no packages beside the SDK (its others need FastAPI or Flask). A shard is
transformed completely before the server answers. The SDK's streaming mode sends the status 200 first, so a transform
that fails later would look like a short shard.
"""

import argparse
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from aistore.sdk.etl.webserver.http_multi_threaded_server import HTTPMultiThreadedServer

from dali_pipes.errors import DataError
from dali_pipes.processes.programs import end_with_owner
from prep.etl.transforms import ShardTransform, load_transform


class ShardServer(HTTPMultiThreadedServer):  # type: ignore[misc]  # the SDK publishes no types
    """Serves one transform; `start` returns at SIGTERM.

    Raises:
        OSError: If ``AIS_TARGET_URL`` is not set. AIStore sets it in the pods that it starts.
    """

    def __init__(self, of: ShardTransform, *, host: str, port: int) -> None:
        super().__init__(host=host, port=port)
        self._of = of

    def transform(self, data: bytes, path: str, etl_args: str) -> bytes:
        """Return the transformed shard."""
        return self._of.transform(data, path, etl_args)

    def get_mime_type(self) -> str:
        """Return the type of the answers."""
        return "application/x-tar"

    class RequestHandler(HTTPMultiThreadedServer.RequestHandler):  # type: ignore[misc]  # the same
        """The SDK's handler; but errors name the shard, where the SDK's answer to PUT is empty."""

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
            """Log nothing: the SDK logs failures."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; return 1 if the server cannot start, 2 for an unknown transform."""
    parser = argparse.ArgumentParser(prog="python -m prep.etl", description="Serve one transform for AIStore's ETL.")
    parser.add_argument("transform", metavar="TRANSFORM", help="pets, or MODULE:FUNCTION")
    parser.add_argument("--host", default="0.0.0.0", help="all interfaces, for the target beside the pod")  # noqa: S104
    parser.add_argument("--port", type=int, default=8000, help="AIStore expects 8000, the default")
    parser.add_argument("--owner", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.owner is not None:
        threading.Thread(target=_watch, args=(args.owner,), daemon=True).start()
    try:
        transform = load_transform(args.transform)
    except ValueError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    try:
        ShardServer(transform, host=args.host, port=args.port).start()
    except OSError as exc:
        print(f"error: cannot serve on {args.host}:{args.port}: {exc}", file=sys.stderr)
        return 1
    return 0


def _watch(owner: int) -> None:
    end_with_owner(owner)
    os._exit(0)  # the server keeps no state after a request


if __name__ == "__main__":
    sys.exit(main())
