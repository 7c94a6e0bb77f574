"""Serve one transform, as in a pod of AIStore's ETL: ``python -m prep.etl TRANSFORM``.

The SDK's multi-threaded server needs no packages beside the SDK (its others need FastAPI or Flask). A shard is
transformed completely before the server answers. The SDK's streaming mode sends the status 200 first, so a transform
that fails later would look like a short shard.
"""

import argparse
import contextlib
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from aistore.sdk.etl.webserver.http_multi_threaded_server import HTTPMultiThreadedServer

from dali_pipes.errors import DataError
from dali_pipes.processes.programs import end_with_owner
from prep.etl.refusals import refusal
from prep.etl.transforms import ShardTransform, load_transform


class ShardServer(HTTPMultiThreadedServer):  # type: ignore[misc]  # the SDK publishes no types
    """Serves one transform; `start` returns at SIGTERM.

    Args:
        of: The transform.
        host: The address to listen at.
        port: The port to listen at.
        socket: The path of a Unix socket to listen at, instead of an address.

    Raises:
        OSError: If ``AIS_TARGET_URL`` is not set. AIStore sets it in the pods that it starts.
    """

    def __init__(self, of: ShardTransform, *, host: str, port: int, socket: str | None = None) -> None:
        super().__init__(host=host, port=port)
        self._of, self._socket = of, socket

    def transform(self, data: bytes, path: str, etl_args: str) -> bytes:
        """Return the transformed shard."""
        return self._of.transform(data, path, etl_args)

    def get_mime_type(self) -> str:
        """Return the type of the answers."""
        return "application/x-tar"

    def start(self) -> None:
        """Serve; on a Unix socket, until the process ends."""
        if self._socket is None:
            super().start()
            return
        with _SocketServer(self._socket, self.RequestHandler) as server:
            server.etl_server = self
            server.serve_forever()

    class RequestHandler(HTTPMultiThreadedServer.RequestHandler):  # type: ignore[misc]  # the same
        """The SDK's handler; but it takes bytes from its node and gives them back to its node only.

        And errors name the shard, where the SDK's answer to PUT is empty.
        """

        def parse_request(self) -> bool:
            """Read a request's head; return whether to go on."""
            if not super().parse_request():
                return False
            url = urlsplit(self.path)
            reason = refusal(
                path=unquote(url.path),
                files=[unquote(file) for file in parse_qs(url.query).get("etl_fqn", [])],
                receivers=self.headers.get_all("Ais-Node-Url", []),
                target=self.server.etl_server.host_target,
            )
            if reason is not None:
                self.send_error(403, reason)
            return reason is None

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


class _SocketServer(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True
    etl_server: ShardServer


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; return 1 if the server cannot start, 2 for an unknown transform."""
    parser = argparse.ArgumentParser(prog="python -m prep.etl", description="Serve one transform for AIStore's ETL.")
    parser.add_argument("transform", metavar="TRANSFORM", help="pets, or MODULE:FUNCTION")
    parser.add_argument("--host", default="0.0.0.0", help="all interfaces, for the target beside the pod")  # noqa: S104
    parser.add_argument("--port", type=int, default=8000, help="AIStore expects 8000, the default")
    parser.add_argument("--socket", help=argparse.SUPPRESS)
    parser.add_argument("--owner", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.owner is not None:
        threading.Thread(target=_watch, args=(args.owner, args.socket), daemon=True).start()
    try:
        transform = load_transform(args.transform)
    except ValueError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    try:
        ShardServer(transform, host=args.host, port=args.port, socket=args.socket).start()
    except OSError as exc:
        print(f"error: cannot serve on {args.socket or f'{args.host}:{args.port}'}: {exc}", file=sys.stderr)
        return 1
    return 0


def _watch(owner: int, socket: str | None) -> None:
    end_with_owner(owner)
    if socket is not None:  # the owner made the folder for it, and may have been killed
        with contextlib.suppress(OSError):
            Path(socket).unlink()
            Path(socket).parent.rmdir()
    os._exit(0)  # the server keeps no state after a request


if __name__ == "__main__":
    sys.exit(main())
